"""The processes of a run: how they meet, what they agree on, how they are started again when one
dies.

Started by torchrun or ``launch_elastic``, a process finds its rank in the environment; otherwise it
is a run of one rank. Only one rank knows of a signal or a finished save: such facts are exchanged at every
step by an all-reduce on the CPU that runs beside the step, and acted upon one step later by all.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters

from liger_kernel.train.config import STORE, TrainConfig, UserError
from liger_kernel.train.files import create
from liger_kernel.train.mistakes import note, sentence
from liger_kernel.train.redact import in_a_line, redacted

T = TypeVar("T")
# environment variable of workers: the id of the process that started them
LAUNCHER = "LIGER_LAUNCHER"

# EX_TEMPFAIL of sysexits.h: everything is saved, run it again
EXIT_PREEMPTED = 75
# the mistake is the user's, so that no restart mends it
EXIT_MISTAKE = 2
# SIGTERM came, and not everything is saved
EXIT_TERMINATED = 128 + signal.SIGTERM
# seconds that the launcher of another machine has to answer
ANSWER = 10.0


class Preempted(Exception):
    """SIGTERM reached some rank; all ranks have stopped after the same step and written its
    checkpoint."""


class TooEarly(Preempted):
    """SIGTERM came before training began, so there is nothing to save."""


class _Early(BaseException):
    """That, on its way through code that handles exceptions of its own."""


class Stop(threading.Event):
    """Set if the run must stop; ``early`` until there are steps after which it can stop."""

    early = True


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclasses.dataclass
class Ranks:
    """This process among those of the run, and groups on the CPU for what training's own
    collectives must not wait for."""

    rank: int
    world: int
    control: Any
    saving: Any

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agreed(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def by_first(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on rank 0, on every rank; its ``UserError``, too."""
        found: tuple[Any, str | None] = None, None
        if self.first:
            try:
                found = work(), None
            except UserError as error:
                found = None, str(error)
        value, problem = self.agreed(found)
        if problem:
            raise UserError(problem)
        return value

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.control)
        return bool(flags.item())


@contextlib.contextmanager
def joined(config: TrainConfig, device: torch.device) -> Iterator[Ranks]:
    """Join the process group of the run; make it unless the caller has made one. After an error
    of several ranks it is left, as peers may be gone."""
    made = not dist.is_initialized()
    # before ranks join: a peer that still joins would only see that this one has gone
    check_ranks(config, int(os.environ.get("WORLD_SIZE", "1")) if made else dist.get_world_size())
    if made:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # longer than the watch over progress, so that stacks are written before a collective gives
        # up
        options: dict[str, Any] = {"timeout": timedelta(seconds=config.timeout + 60)}
        if "WORLD_SIZE" not in os.environ:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, **options)
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        if (
            restarts() == 0
            and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
            and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
            and rank == 0
        ):
            note(
                "torchrun's restarts fail unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set: set it, or use --nproc "
                "instead of torchrun"
            )
        yield Ranks(rank, world, dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))
    except BaseException as error:
        if made and (isinstance(error, Preempted) or dist.get_world_size() == 1):
            _leave()
        raise
    if made:
        _leave()


def check_ranks(config: TrainConfig, world: int) -> None:
    """Raise ``UserError`` if ``world`` ranks cannot share the work as the run says."""
    if world > 1 and config.parallel == "none":
        raise UserError(f"{world} ranks need --parallel ddp, fsdp2, tp or ulysses")
    if world % config.sharing(world):
        raise UserError(f"sequence_parallel_size must divide the {world} ranks, got {config.sequence_parallel_size}")


def _leave() -> None:
    # else a rank may be gone while another still talks to it, and abort
    dist.barrier()
    dist.destroy_process_group()


def reporting(run: Callable[[TrainConfig], T]) -> Callable[[TrainConfig], T]:
    """``run`` as a worker's main function: a rank's error is written to where torchrun looks for it
    and ends the process at once, with 1 or ``EXIT_MISTAKE``.

    An orderly end would first wait for threads and groups, and these for a peer that is gone.
    """

    def main(config: TrainConfig) -> T:
        if "RANK" not in os.environ:
            return run(config)
        if LAUNCHER in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_launcher()
        try:
            return run(config)
        # other ranks may be anywhere in their start, so that no orderly end is possible
        except TooEarly as stopped:
            os.write(2, f"rank {os.environ['RANK']}: {stopped}\n".encode())
            os._exit(EXIT_PREEMPTED)
        except (Preempted, SystemExit, KeyboardInterrupt):
            raise
        # DCP's error is a BaseException
        except BaseException as error:
            mistake, stack = isinstance(error, UserError), traceback.format_exc()
            get_error_handler().record_exception(error if redacted(stack) == stack else RuntimeError(redacted(stack)))
            text = f"{error}\n" if mistake else f"{known}\n" if (known := sentence(error)) else redacted(stack)
            os.write(2, f"rank {os.environ['RANK']}: {text}".encode(errors="backslashreplace"))
            os._exit(EXIT_MISTAKE if mistake else 1)

    return main


def die_with_launcher() -> None:
    """From now on the process that has started this one takes it along, even if it is killed
    itself: ranks that train on would write beside the next run."""
    # torchrun does not set the variable; it may be process 1 of a container
    launcher = int(os.environ.get(LAUNCHER, "0")) or os.getppid()
    # otherwise a shell stands between the two, or the launcher has gone already
    child = os.getppid() == launcher
    there = (lambda: os.getppid() == launcher) if child else (lambda: _exists(launcher))
    dies = child and _dies_with_parent()
    # the launcher ended before the request for a signal at its death was made
    if not there():
        os._exit(1)
    if dies:
        return

    def watch() -> None:
        while there():
            time.sleep(0.5)
        os.write(2, b"the launcher has ended, so this rank ends too\n")
        os._exit(1)

    optional_thread(watch, "launcher", "this rank will not notice if its launcher is killed")


def optional_thread(target: Callable[[], Any], name: str, without: str) -> threading.Thread | None:
    """A thread that the run can do without: where none can start (a limit of processes is
    reached), the run says what that means and goes on."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        note(f"{error}: {without}")
        return None
    return thread


def _dies_with_parent() -> bool:
    """Ask Linux for SIGKILL when the parent dies; False where there is no such thing."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    set_death_signal = 1
    return ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGKILL), 0, 0, 0) == 0


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True


class DelayedReduce:
    """What ranks tell each other, one step late and without waiting: whether to stop, and which
    save is complete on all ranks."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._sent: tuple[torch.Tensor, Any] | None = None

    def exchange(self, stop: bool, saved: int) -> tuple[bool, int]:
        """Send this rank's and return (whether any rank was to stop, the least save that was
        done) of the exchange before; the same on all ranks."""
        before = self.last()
        numbers = torch.tensor([-int(stop), saved])
        self._sent = numbers, dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self._ranks.control, async_op=True)
        return before

    def last(self) -> tuple[bool, int]:
        """What the last exchange said; after it there is none under way."""
        if self._sent is None:
            return False, -1
        numbers, work = self._sent
        work.wait()
        self._sent = None
        return bool(numbers[0]), int(numbers[1])


@contextlib.contextmanager
def told_to_stop() -> Iterator[Stop]:
    """An event that SIGTERM sets, and SIGHUP (a terminal that is closed) unless nohup has it
    ignored. While it is ``early``, they raise ``TooEarly``."""
    event = Stop()
    # only the main thread may set handlers of signals: the caller handles them
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handler(*_: Any) -> None:
        event.set()
        if event.early:
            # a second signal must not disturb the way out
            event.early = False
            raise _Early

    there = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))
    numbers = [number for number in there if number and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield event
    except _Early:
        raise TooEarly("stopped by SIGTERM before training began; no checkpoint was changed") from None
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Watch:
    """Ends the process when ``progress`` is not called for ``seconds``, with the stacks of its
    threads on stderr and in stuck-rank-N.txt of ``folder``.

    The end comes as many seconds after the stacks, 30 at most: once one rank has gone, the others
    fail in their collectives, with nothing to show for it. Where a call holds the interpreter, so
    that no thread of Python's runs, the interpreter's own timer (faulthandler) writes them, to
    stderr alone.
    """

    def __init__(self, folder: Path, rank: int, seconds: float):
        self._path, self._rank, self._seconds = folder / f"stuck-rank-{rank}.txt", rank, seconds
        self._ended = threading.Event()
        self.progress()

    def progress(self) -> None:
        self._last = time.monotonic()

    def __enter__(self) -> Watch:
        without = f"rank {self._rank}: there is no watch over progress, so a run that is stuck will not end by itself"
        self._thread = optional_thread(self._watch, "watch", without)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            faulthandler.dump_traceback_later(self._seconds + 5, exit=True, file=2)
            if time.monotonic() - self._last > self._seconds:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with create(self._path) as file:
                    file.write(f"rank {self._rank}: no progress for {self._seconds:.0f} s\n".encode())
                    file.flush()
                    faulthandler.dump_traceback(file)
                os.write(2, self._path.read_bytes())
                if not self._ended.wait(min(self._seconds, 30)):
                    os._exit(1)


# What PyTorch 2.13 needs for restarts. Without the first, a restarted worker reads the addresses of
# the one before from the agent's store.
ELASTIC = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    # collectives that NCCL's flight recorder keeps
    "TORCH_FR_BUFFER_SIZE": "2000",
}
# With these in the environment, as Kubeflow sets them, the rendezvous is a static one, from which
# no restart comes back.
STATIC = ("PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT")


class _Agent(LocalElasticAgent):
    """Starts workers again, but not after a preemption or a user's mistake, and lets them save
    before it kills them.

    ``patience`` are the seconds that workers have from SIGTERM to SIGKILL.
    """

    def __init__(self, spec: WorkerSpec, patience: float):
        super().__init__(spec, DefaultLogsSpecs())
        self._patience = patience

    def _handlers(self) -> list[Any]:
        return list(getattr(self._pcontext, "subprocess_handlers", {}).values())

    def _running(self) -> list[Any]:
        return [handler for handler in self._handlers() if handler.proc.poll() is None]

    def codes(self) -> set[int]:
        """With what the workers of the last round ended."""
        return {
            -signal.SIGKILL if code is None else code for code in (handler.proc.poll() for handler in self._handlers())
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is not WorkerState.FAILED:
            return result
        codes = {failure.exitcode for failure in result.failures.values()}
        if _preempted(codes) and self._joining():
            # the agent of another machine stopped its workers to let a new one in: restart, as it
            # does
            return RunResult(WorkerState.HEALTHY)
        if _preempted(codes) or EXIT_MISTAKE in codes:
            self._remaining_restarts = 0
        return result

    def _joining(self) -> bool:
        try:
            return self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0
        # the machine that keeps the rendezvous has gone already
        except RendezvousError:
            return False

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # a terminal that is closed takes nothing with it that is not saved
        if death_sig == getattr(signal, "SIGHUP", None):
            death_sig = signal.SIGTERM
        if death_sig == signal.SIGTERM and self._running():
            for handler in self._running():
                # ``close`` signals the whole process group
                handler.close(death_sig)
            end = time.monotonic() + self._patience
            while self._running() and time.monotonic() < end:
                time.sleep(0.1)
                if any(handler.proc.returncode not in (None, 0, EXIT_PREEMPTED) for handler in self._handlers()):
                    # one worker failed, and the others wait for it in a collective
                    end = min(end, time.monotonic() + timeout)
            for handler in self._running():
                note(f"process {handler.proc.pid} did not end in time after SIGTERM, so it was killed")
                handler.close(signal.SIGKILL)
        # PyTorch 2.11 and 2.13 differ in what else it takes
        super()._shutdown(death_sig)


def _preempted(codes: set[int]) -> bool:
    """Whether workers that failed with ``codes`` have saved everything. The last to end may be
    killed while they end: once one has, the agent sends SIGTERM."""
    return EXIT_PREEMPTED in codes and codes <= {EXIT_PREEMPTED, -signal.SIGTERM}


def _check_endpoint(endpoint: str, nodes: int) -> None:
    """``UserError`` if a program that is no launcher of this run listens there: the rendezvous
    would wait for its answer, without a word and without end."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"rdzv_endpoint must be HOST:PORT, such as localhost:29400; got {endpoint!r}")
    if not int(port):
        return
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    # nobody listens there yet
    except OSError:
        return
    if nodes == 1 or not _keeps_a_rendezvous(host, int(port)):
        raise UserError(
            f"rdzv_endpoint {endpoint} is used by another program than this run's launcher: give another port"
        )
    note(f"{endpoint} is in use: joining the launcher there. If another program uses it, give another port")


def _keeps_a_rendezvous(host: str, port: int) -> bool:
    """Whether what listens there answers as PyTorch's store does; the client itself knows no
    timeout while it is greeted."""
    answered: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            answered.append(
                dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ANSWER))
            )

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER)
    return bool(answered)


def launch_elastic(config: TrainConfig, command: list[str] | None = None) -> int:
    """Run ``config`` in ``config.nproc`` processes on each of ``config.nnodes`` machines; restart
    them up to ``max_restarts`` times when one dies.

    ``command`` is what a worker runs (default: ``liger train`` with this configuration). Returns 0;
    ``EXIT_PREEMPTED`` if SIGTERM reached some process and all workers have saved;
    ``EXIT_TERMINATED`` if it reached this process and they have not; 130 after Ctrl-C; or the exit
    code of the first worker that failed if no restarts were left or a restart would not help.
    """
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    os.environ |= ELASTIC | os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", LAUNCHER: str(os.getpid())}
    for name in STATIC:
        os.environ.pop(name, None)
    nodes = config.machines
    nproc = config.nproc or (torch.cuda.device_count() if torch.cuda.is_available() else 1)
    if nodes[1] > 1 and config.rdzv_endpoint == TrainConfig.rdzv_endpoint:
        raise UserError(
            "several machines need --rdzv-endpoint HOST:PORT: the address of one of them, the same on all machines"
        )
    if command is None:
        # the run's own folder is checked by its first rank
        folder = tempfile.mkdtemp(prefix="liger-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = Path(folder) / "train.json"
        dataclasses.replace(config, nproc=None).save_to(path)
        if config.store_uri:
            # the file has lost the URI's credentials
            os.environ[STORE] = config.store_uri
        command = [sys.executable, "-m", "liger_kernel.cli", "train", "--config", str(path)]
    # without it each process takes all cores
    if "OMP_NUM_THREADS" not in os.environ and nproc > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // nproc))
    # machines start minutes apart: one pulls an image that the other has
    waits: dict[str, Any] = {"join_timeout": config.timeout, "read_timeout": config.timeout} if nodes[1] > 1 else {}
    _check_endpoint(config.rdzv_endpoint, nodes[1])
    run_id = os.environ.get("PET_RDZV_ID") or Path(config.out).absolute().name or "run"
    try:
        rendezvous = get_rendezvous_handler(RendezvousParameters("c10d", config.rdzv_endpoint, run_id, *nodes, **waits))
    except RendezvousError as error:
        raise OSError(f"rdzv_endpoint {config.rdzv_endpoint}: no rendezvous there ({in_a_line(error)})") from error
    spec = WorkerSpec(
        role="default_role",
        local_world_size=nproc,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=rendezvous,
        max_restarts=config.max_restarts,
        monitor_interval=1.0,
    )
    # two steps and a save, each of which may take the timeout; torchrun knows the variable, too
    agent = _Agent(spec, patience=float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 3 * config.timeout)))
    try:
        result = agent.run()
    # other machines may go on: the rendezvous stays open
    except SignalException as signalled:
        if signalled.sigval not in (signal.SIGTERM, getattr(signal, "SIGHUP", None)):
            return 128 + signalled.sigval
        # the set is empty if the signal came while the first workers were started
        codes = agent.codes()
        if codes == {0}:
            return 0
        if _preempted(codes - {0}):
            return EXIT_PREEMPTED
        return max((code for code in codes if 0 < code != EXIT_PREEMPTED), default=EXIT_TERMINATED)
    except RendezvousError:
        if _preempted(agent.codes()):
            return EXIT_PREEMPTED
        rendezvous.shutdown()
        raise
    # there is no result on a machine that the run did not need
    codes = {failure.exitcode for failure in result.failures.values()} if result else set()
    if _preempted(codes):
        return EXIT_PREEMPTED
    rendezvous.shutdown()
    if not codes:
        return 0
    # the worker has printed the mistake
    if EXIT_MISTAKE in codes:
        return EXIT_MISTAKE
    failure = ChildFailedError(command[0], result.failures)
    note(failure)
    # a signal is a negative number
    return max(1, failure.get_first_failure()[1].exitcode)
