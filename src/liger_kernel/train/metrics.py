"""Where the numbers of a run go: metrics.jsonl, a Prometheus endpoint on every rank, TensorBoard,
Weights & Biases, MLflow.

Numbers leave the device only at log lines; the endpoint shows those of the last one.
``metrics.jsonl`` has one line for each step: a run that continues from a checkpoint removes the
lines after it, so that every step is there once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import ipaddress
import json
import math
import socket
import sys
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from liger_kernel.nearest import did_you_mean
from liger_kernel.train.config import REPORTS, TrainConfig, UserError
from liger_kernel.train.files import NUMBER, append, fits, write
from liger_kernel.train.mistakes import note
from liger_kernel.train.ranks import optional_thread
from liger_kernel.train.redact import in_a_line, redacted

# name on the endpoint -> (key of a log line, what it is); what ends in _total is a counter
EXPORTED = {
    "step": ("step", "Optimizer steps done"),
    "loss": ("loss", "Loss of the last step, mean over its tokens"),
    "learning_rate": ("lr", "Learning rate of the last step"),
    "gradient_norm": ("grad_norm", "Norm of the gradient before clipping"),
    "tokens_total": ("tokens", "Tokens of all ranks since the first start"),
    "tokens_per_second": ("tokens_per_second", "Tokens of all ranks per second since the log line before"),
    "mfu": ("mfu", "Model FLOPs over what the GPUs could do"),
    "step_seconds_p50": ("step_seconds_p50", "Median time of a step since the log line before"),
    "step_seconds_p95": ("step_seconds_p95", "95th percentile of the time of a step"),
    "data_wait_seconds": ("data_wait_seconds", "Mean time of a step in which batches were made"),
    "memory_bytes": ("memory", "Peak memory of this rank"),
    "nonfinite_steps_total": ("nonfinite_steps", "Steps skipped because of a NaN or Inf"),
    "restarts_total": ("restarts", "Restarts of this rank"),
    "checkpoint_step": ("checkpoint_step", "Step of the newest checkpoint on disk"),
    "checkpoint_time_seconds": ("checkpoint_time", "Unix time of the newest checkpoint on disk"),
    "checkpoint_failures_total": (
        "checkpoint_failures",
        "Checkpoints that could not be written, or not copied to the store at first",
    ),
    "kernels_compiled_total": ("kernels_compiled", "Kernels compiled after training began"),
}


# name in metrics.json -> name in a line of metrics.jsonl
CURVES = {"losses": "loss", "gradient_norms": "grad_norm", "learning_rates": "lr"}
# of a line of metrics
LINE = {"step": range(1, 1 << 53)} | dict.fromkeys(CURVES.values(), (NoneType, *NUMBER))


class StepLines:
    """``metrics.jsonl``: one line for each step."""

    def __init__(self, path: Path, step: int):
        """Keep the lines of the first ``step`` steps."""
        self.path = path
        kept = [line for line in self.read() if line["step"] <= step]
        # lost lines are no reason not to train
        if len(kept) < step:
            note(
                f"{path} has lines of {len(kept)} steps, but the checkpoint was written after step {step}: the lines "
                "between are lost"
            )
        write(path, "".join(as_json(line) + "\n" for line in kept))

    def append(self, lines: list[dict[str, Any]]) -> None:
        try:
            append(self.path, "".join(as_json(line) + "\n" for line in lines))
        # a full disk must not end a run
        except OSError as error:
            note(f"{self.path} lacks steps {lines[0]['step']} to {lines[-1]['step']}: {error}")

    def read(self) -> Iterator[dict[str, Any]]:
        damaged = []
        if self.path.is_file():
            with self.path.open(encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file, 1):
                    found: Any = None
                    # a killed run leaves half a line at the end
                    with contextlib.suppress(ValueError, RecursionError):
                        found = json.loads(line)
                    if fits(found, LINE):
                        yield {name: math.nan if value is None else value for name, value in found.items()}
                    else:
                        damaged.append(number)
        if damaged:
            note(f"{self.path}: {len(damaged)} damaged lines are left out, the first is line {damaged[0]}")


def as_json(value: Any, **options: Any) -> str:
    """``value`` as JSON, which has no NaN and no infinity: they become null."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: plain(each) for name, each in part.items()}
        if isinstance(part, list | tuple):
            return [plain(each) for each in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(plain(value), allow_nan=False, **options)


class Endpoint:
    """``GET /metrics`` in Prometheus' text format; ``GET /healthz`` says how old the last progress
    is.

    One thread sees to all connections, a few times a second: each time that it runs, training waits
    for the interpreter. A thread a connection, which take turns with training, made steps of 17 ms
    11 % longer while 200 clients came and went. The server of prometheus_client has these, no limit
    for silent clients, and answers web pages of others.
    """

    # the most connections at a time; others wait in the system's queue
    most = 128
    # second that a client may take to ask: behind 200 of them a scrape waits less than the ten that
    # Prometheus gives it
    patience = 1.0
    # seconds between two looks for new connections
    rest = 0.05

    def __init__(self, host: str, port: int, rank: int):
        self.values: dict[str, Any] = {}
        self.progress = time.time()
        self._rank, self._host = rank, host.lower()
        try:
            self._listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=self.most
            )
        except (OSError, OverflowError) as error:
            raise UserError(f"metrics cannot be served on {host}:{port}: {error}") from error
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._clients: set[asyncio.Task] = set()
        self._ended = False
        self._thread = optional_thread(lambda: asyncio.run(self._serve()), "metrics", f"no metrics on {host}:{port}")

    def close(self) -> None:
        self._ended = True
        if self._thread:
            self._thread.join()
        self._listener.close()

    async def _serve(self) -> None:
        while not self._ended:
            # OSError: no client is waiting, or there are no more descriptors
            with contextlib.suppress(OSError):
                while len(self._clients) < self.most:
                    connection, _ = self._listener.accept()
                    connection.setblocking(False)
                    client = asyncio.create_task(self._client(connection))
                    self._clients.add(client)
                    client.add_done_callback(self._clients.discard)
            await asyncio.sleep(self.rest)

    async def _client(self, connection: socket.socket) -> None:
        # a client may go away at any time
        with connection, contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._converse(connection), self.patience)

    async def _converse(self, connection: socket.socket) -> None:
        loop, request = asyncio.get_running_loop(), b""
        while b"\r\n\r\n" not in request:
            more = await loop.sock_recv(connection, 4096)
            if not more or len(request) > 1 << 16:
                return
            request += more
        await loop.sock_sendall(connection, self._answer(request))

    def _answer(self, request: bytes) -> bytes:
        method, path = (*request.split(b" ", 2), b"", b"")[:2]
        pages: dict[bytes, Callable[[], str]] = {
            b"/metrics": lambda: exposition(self.values, self._rank),
            b"/healthz": lambda: f"{time.time() - self.progress:.0f} s since the last step\n",
        }
        page = pages.get(path.partition(b"?")[0])
        status = "405 Method Not Allowed" if method != b"GET" else "200 OK" if page else "404 Not Found"
        if not self._is_ours(request):
            status, page = "403 Forbidden", None
        body = (page() if page and method == b"GET" else "GET /metrics or /healthz\n").encode()
        head = (
            f"HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: "
            f"{len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    def _is_ours(self, request: bytes) -> bool:
        """Whether the request names this machine. On a loopback address, a name of somebody
        else's is a web page that asks through the user's browser."""
        if not ipaddress.ip_address(self._listener.getsockname()[0]).is_loopback:
            return True
        hosts = [
            line.partition(b":")[2].strip().decode("latin-1")
            for line in request.split(b"\r\n")[1:]
            if line[:5].lower() == b"host:"
        ]
        with contextlib.suppress(ValueError):
            names = [urllib.parse.urlsplit(f"//{host}").hostname or "" for host in hosts]
            return all(name in ("localhost", self._host) or ipaddress.ip_address(name) for name in names)
        return False


def exposition(values: dict[str, Any], rank: int) -> str:
    """``values``, by the names of ``EXPORTED``, in Prometheus' format."""
    text = ""
    for name, (key, help) in EXPORTED.items():
        if values.get(key) is not None:
            kind = "counter" if name.endswith("_total") else "gauge"
            text += (
                f'# HELP liger_{name} {help}\n# TYPE liger_{name} {kind}\nliger_{name}{{rank="{rank}"}} '
                f"{float(values[key])!r}\n"
            ).replace(" nan", " NaN")
    return text


def check_reports(config: TrainConfig) -> None:
    """Raise ``UserError``, before anything is loaded, if ``config.report`` names a service that
    is unknown or not installed."""
    for name in config.reports:
        if name not in REPORTS:
            raise UserError(
                f"report must be of {', '.join(REPORTS)}, with commas between; got "
                f"{config.report!r}{did_you_mean(name, REPORTS)}"
            )
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"report {name} needs the package {name}: pip install {'mlflow-skinny' if name == 'mlflow' else name}"
            )


class Reports:
    """The services of ``config.report``; rank 0 makes one."""

    def __init__(self, config: TrainConfig, settings: dict[str, Any]):
        self._send: list[Callable[[int, dict[str, float]], Any]] = []
        self._close: list[Callable[[], Any]] = []
        if config.reports:
            # services record the command line, too
            sys.argv[1:] = map(redacted, sys.argv[1:])
        for name in config.reports:
            with _left_alone(name):
                getattr(self, f"_{name}")(Path(config.out), settings)

    def _tensorboard(self, out: Path, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(str(out / "tensorboard"))
        self._send.append(lambda step, values: [writer.add_scalar(name, value, step) for name, value in values.items()])
        self._close.append(writer.close)

    def _wandb(self, out: Path, settings: dict[str, Any]) -> None:
        import wandb

        # the same after a restart: the run goes on
        path = out / "wandb-id"
        if not path.is_file():
            write(path, uuid.uuid4().hex)
        run = wandb.init(dir=str(out), name=out.name, id=path.read_text(), resume="allow", config=settings)
        self._send.append(lambda step, values: run.log(values, step=step))
        self._close.append(run.finish)

    def _mlflow(self, out: Path, settings: dict[str, Any]) -> None:
        import mlflow

        mlflow.start_run(run_name=out.name)
        self._close.append(mlflow.end_run)
        mlflow.log_params({name: value for name, value in settings.items() if value is not None})
        self._send.append(lambda step, values: mlflow.log_metrics(values, step=step))

    def send(self, values: dict[str, Any]) -> None:
        numbers = {
            name: float(value) for name, value in values.items() if isinstance(value, int | float) and name != "step"
        }
        for send in list(self._send):
            with _left_alone("one of them", functools.partial(self._send.remove, send)):
                send(values["step"], numbers)

    def close(self) -> None:
        for close in self._close:
            with _left_alone("one of them"):
                close()


@contextlib.contextmanager
def _left_alone(service: str, then: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """A service that is down must not end a run."""
    try:
        yield
    except Exception as error:
        then()
        note(f"reporting to {service} stopped: {type(error).__name__}: {in_a_line(error)}")
