"""Whether anything that a file may hold ends the runtime with a traceback, a hang, or a write or
read elsewhere: random bytes and random structure.

python tests/fuzz.py                         10,000 cases over all kinds of files; the nightly run does this
python tests/fuzz.py --seed 7 --cases 500    others, fewer
python tests/fuzz.py --kind state --case 12  one of them, with its traceback

Each case changes a valid file and calls what reads it, as a run does, in a forked process with
limits of time and memory. A few are whole runs.
What is read is right, or refused by ``UserError`` or a line.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import save_file

from liger_kernel import cli
from liger_kernel.bench import results
from liger_kernel.deploy.job import Job
from liger_kernel.train import checkpoint, folder, hub, loop, metrics, session, stream, tokenise
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.ranks import Ranks
from liger_kernel.train.records import Records
from liger_kernel.train.token_rows import TokenRows

SECONDS, WHOLE = 20, 90  # for a case, and for a whole run
MEMORY = 2 << 30  # bytes beyond what the process has
BATCH = 100  # cases of a process
ELSEWHERE = ("/etc/passwd", "/dev/zero", "../../../elsewhere", "..")
LARGE = [10**9, 2**31, 2**63, 10**30, -(10**30), 10**400]
NUMBERS = [None, True, False, 0, -1, 1, 2, *LARGE, 0.5, -0.0, 1e308, math.nan, math.inf]
TEXTS = ["", "x", "0", "-1", "\0", "\ud800", "é" * 50, "a" * 10_000, *ELSEWHERE, "step-99999999", "../x", "~"]
TEXTS += ["{{ x }}", "${PATH}", "!!python/object/apply:os.system [id]"]
VALUES: list[Any] = [*NUMBERS, *TEXTS, [], {}, [[]], [1, 2], [None], {"a": 1}, {"": {}}, [[1, [0, 0, 0], True]]]
PIECES = [b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b'"', b"{", b"}", b",", b": ", b"[" * 50_000, b"9" * 500, b"\\ud800"]
PIECES += [b"NaN", b"1e999", b"*a", b"&a ", b"/dev/zero", b"../"]


def changed(value: Any, rng: random.Random) -> Any:
    """``value`` with a part of it, or all, replaced, left out, renamed or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        match rng.random():
            case x if x < 0.75:
                return value | {name: changed(value[name], rng)}
            case x if x < 0.85:
                return {key: part for key, part in value.items() if key != name}
            case x if x < 0.93:
                return {str(rng.choice(VALUES)) if key == name else key: part for key, part in value.items()}
            case _:
                return value | {str(rng.choice([*ELSEWHERE, "x", ""])): rng.choice(VALUES)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], *rng.choice([[changed(value[at], rng)]] * 4 + [[], [value[at]] * 2]), *value[at + 1 :]]
    return rng.choice(VALUES)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """``content`` with bytes flipped, cut, put in, moved, or all others."""
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        match rng.randrange(7):
            case 0:
                content = content[:at]
            case 1:
                content = content[:at] + rng.choice(PIECES) + content[at:]
            case 2:
                content = content[:at] + rng.randbytes(rng.randrange(1, 9)) + content[at + rng.randrange(9) :]
            case 3:
                content = content[:at] + content[end:]
            case 4:
                content = content[:at] + content[at:end][:10_000] * 2 + content[end:]
            case 5:
                content = rng.randbytes(rng.randrange(200))
            case 6 if content:
                at = min(at, len(content) - 1)
                content = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    return content


def of_json(content: bytes, rng: random.Random) -> bytes:
    value = json.loads(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = changed(value, rng)
    return json.dumps(value).encode()


def of_lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = rng.choice([of_json, damaged])(lines[at], rng)
    return b"\n".join(lines)


def of_yaml(content: bytes, rng: random.Random) -> bytes:
    value = changed(yaml.safe_load(content), rng)
    with contextlib.suppress(Exception):  # of which there is no YAML
        return yaml.safe_dump(value, allow_unicode=True).encode(errors="surrogatepass")
    return damaged(content, rng)


def of_tensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header."""
    size = int.from_bytes(content[:8], "little")
    header = of_json(content[8 : 8 + size], rng)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


class Kind(NamedTuple):
    """A kind of file."""

    template: Path  # a folder that is copied for each case
    name: str  # in it
    change: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path, random.Random], Any]  # what reads the folder

    def make(self, place: Path, rng: random.Random) -> None:
        shutil.copytree(self.template, place)
        path = place / self.name
        content = path.read_bytes()
        match rng.random():
            case x if x < 0.02:
                path.unlink()
                link = lambda: path.symlink_to(rng.choice(ELSEWHERE[:2]))
                rng.choice([path.mkdir, lambda: os.mkfifo(path), link, lambda: None])()
            case x if x < 0.6:
                path.write_bytes(self.change(content, rng))
            case _:
                path.write_bytes(damaged(content, rng))


# -- what reads ------------------------------------------------------------------------------


SIZES = dict(hidden=16, layers=1, heads=2, vocab=300, length=16, batch=2, steps=2, warmup=1)
SIZES |= dict(eval_fraction=0.0, log_every=1, device="cpu", kernels="off")


class Readers:
    """The readers of the runtime, and valid files of all kinds in ``work``."""

    def __init__(self, work: Path):
        self.data = work / "data.jsonl"
        texts = [{"text": f"hello world, this is text number {i} of a small file"} for i in range(30)]
        turns = [{"from": "human", "value": "is it so?"}, {"from": "gpt", "value": "it is"}]
        said = [{"role": "user", "content": "is it so?"}, {"role": "assistant", "content": "it is"}]
        row = {"op": "x", "case": "y", "dtype": "bf16", "mode": "full", "variant": "z", "device_ms": 1.0}
        paths = {name: f"/x/{name}" for name in ("kernel.cubin", "kernel.ttir")}
        self.data.write_text("".join(json.dumps(record) + "\n" for record in texts))
        self.config = TrainConfig(data=str(self.data), out=str(work / "run"), checkpoint_every=1, **SIZES)
        made: list[Any] = []
        with mock.patch.object(loop._Run, "__init__", _noted(made, loop._Run.__init__)):
            loop.train(self.config)
        self.model, self.optimizer = made[0].parallel.module, made[0].optimizer
        (run,) = [work / "run"]
        (cache,) = (run / "cache").glob("*/")
        self.tokenizer = tokenise.loaded(cache)
        self.vocabulary = len(self.tokenizer)
        files = work / "files"
        files.mkdir()
        for name, content in {
            "text.jsonl": self.data.read_bytes(),
            "chat.jsonl": f"{json.dumps({'messages': said})}\n" * 5,
            "share.json": json.dumps([{"conversations": turns}] * 5),
            "pairs.csv": 'prompt,completion\nis it so?,"it is, and was"\n' + "a,b\n" * 5,
            "train.json": json.dumps(self.config.shown()),
            "train.yaml": yaml.safe_dump(self.config.shown()),
            "job.yaml": yaml.safe_dump(JOB),
            "job.json": json.dumps(JOB),
            "result.json": json.dumps({"meta": {"torch": "2"}, "rows": [row]}),
            "result.csv": "op,case,dtype,mode,variant,device_ms,torch\nx,y,bf16,full,z,1.0,2\n",
            "__grp__kernel.json": json.dumps({"child_paths": paths}),
            "kernel.cubin": "x",
            "kernel.ttir": "x",
            "config.json": json.dumps(self.model.config.to_dict()),
            "latest": "step-00000002\nstep-00000001\n",
        }.items():
            (files / name).write_bytes(content.encode() if isinstance(content, str) else content)
        state = {"place": [30, 0, 30], "chats": False, "silent": 0, "late": 0, "ids": 8, "labels": 0, "lengths": 2}
        (files / "draft").mkdir()
        (files / "draft" / "state.json").write_text(json.dumps(state))
        for name in ("ids", "labels", "lengths"):
            (files / "draft" / name).write_bytes(bytes(32))
        found = TokenRows.read(cache / "rows.safetensors")
        part = json.dumps([len(found), [30, 0, 30], True, found.digest()])
        save_file(found.tensors(), files / "part-000000.safetensors", {"part": part})
        (run / "checkpoints" / "identity.json").write_text(json.dumps({"seed": 0, "length": 16, "global_batch": 2}))
        step, read = "checkpoints/step-00000002", self.checkpoints
        self.kinds = {
            "data": Kind(files, "text.jsonl", of_lines, lambda place, _: self.records(place / "text.jsonl")),
            "chats": Kind(files, "chat.jsonl", of_lines, lambda place, _: self.records(place / "chat.jsonl")),
            "array": Kind(files, "share.json", of_json, lambda place, _: self.records(place / "share.json")),
            "table": Kind(files, "pairs.csv", damaged, lambda place, _: self.records(place / "pairs.csv")),
            "config-json": Kind(files, "train.json", of_json, lambda place, _: TrainConfig.load(place / "train.json")),
            "config-yaml": Kind(files, "train.yaml", of_yaml, lambda place, _: TrainConfig.load(place / "train.yaml")),
            "job-yaml": Kind(files, "job.yaml", of_yaml, lambda place, _: Job.load(place / "job.yaml").to_json()),
            "job-json": Kind(files, "job.json", of_json, lambda place, _: Job.load(place / "job.json").to_json()),
            "state": Kind(run, f"{step}/state.json", of_json, read),
            "sums": Kind(run, f"{step}/sums-0.json", of_json, read),
            "index": Kind(run, f"{step}/tensors.json", of_json, read),
            "generators": Kind(run, f"{step}/rank-0.json", of_json, read),
            "tensors": Kind(run, f"{step}/__0_0.distcp", damaged, read),
            "latest": Kind(run, "checkpoints/latest", damaged, read),
            "identity": Kind(run, "checkpoints/identity.json", of_json, self.identity),
            "record": Kind(run, "liger-run.json", of_json, self.folder),
            "metrics": Kind(run, "metrics.jsonl", of_lines, self.lines),
            "numbers": Kind(run, "metrics.json", of_json, self.numbers),
            "rows": Kind(cache, "rows.safetensors", of_tensors, self.rows),
            "part": Kind(files, "part-000000.safetensors", of_tensors, self.part),
            "draft": Kind(files, "draft/state.json", of_json, lambda place, _: tokenise.Draft(place / "draft").rows(4)),
            "tokenizer": Kind(cache, "tokenizer.json", of_json, lambda place, _: tokenise.loaded(place)),
            "tokenizer-config": Kind(cache, "tokenizer_config.json", of_json, lambda place, _: tokenise.loaded(place)),
            "model-config": Kind(files, "config.json", of_json, self.model_config),
            "results": Kind(files, "result.json", of_json, lambda place, _: results.read(place / "result.json")),
            "results-csv": Kind(files, "result.csv", damaged, lambda place, _: results.read(place / "result.csv")),
            "kernels": Kind(files, "__grp__kernel.json", of_json, self.kernels),
        }

    def records(self, path: Path) -> None:
        config = TrainConfig(data=str(path), out=str(path.parent / "run"), **SIZES)
        rows = tokenise.tokenise(iter(Records(config)), self.tokenizer, 16)
        rows.check(self.vocabulary)

    def checkpoints(self, place: Path, rng: random.Random) -> None:
        step = place / "checkpoints" / "step-00000002"
        folder.check(self.of(place))
        there = lambda path: path.is_file() and not path.is_symlink()
        if rng.random() < 0.7 and there(step / "sums-0.json"):  # a stranger can write checksums, too
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, RecursionError):
                sums = json.loads((step / "sums-0.json").read_bytes())
                for name in sums:
                    if checkpoint.FILE.fullmatch(name) and there(step / name):
                        sums[name] = checkpoint.digest(step / name)
                (step / "sums-0.json").write_text(json.dumps(sums))
        found = checkpoint.Checkpoints(place / "checkpoints", self.ranks, 2)
        while path := found.latest():
            identity = checkpoint.read_object(path / "state.json")["identity"]
            with contextlib.suppress(UserError):
                session.refuse_other(path, identity, {"seed": 0})
            if found.load(path, self.model, self.optimizer) is not None:
                break

    def identity(self, place: Path, rng: random.Random) -> None:
        folder.check(self.of(place))
        run = session.Session(self.of(place), _Held(), self.model, None, "fp32", self.ranks, None)
        session.accept(run, place / "checkpoints", place / "checkpoints" / "step-00000002")

    def of(self, place: Path) -> TrainConfig:
        return TrainConfig(data=str(self.data), out=str(place), checkpoint_every=1, **SIZES)

    def folder(self, place: Path, rng: random.Random) -> None:
        folder.check(self.of(place))
        folder.record(self.of(place), self.ranks, 2)

    def lines(self, place: Path, rng: random.Random) -> None:
        folder.check(self.of(place))
        lines = list(metrics.StepLines(place / "metrics.jsonl", 2).read())
        metrics.as_json(lines)

    def numbers(self, place: Path, rng: random.Random) -> None:
        found = session.Session(self.of(place), *[None] * 4, self.ranks, None).finished()
        if found:
            with mock.patch.object(loop, "train", lambda config: found):
                cli.main(["train", "--data", str(self.data), "--out", str(place)])

    def rows(self, place: Path, rng: random.Random) -> None:
        rows = TokenRows.read(place / "rows.safetensors")
        rows.check(self.vocabulary)
        if len(rows):
            rows.count([0]), rows.batch([0, len(rows) - 1], 0)

    def part(self, place: Path, rng: random.Random) -> None:
        stream.described(place / "part-000000.safetensors")

    def model_config(self, place: Path, rng: random.Random) -> None:
        hub.configuration(str(place / "config.json"))

    def kernels(self, place: Path, rng: random.Random) -> None:
        from liger_kernel.compile.cache import LigerTritonFileCacheManager

        manager = LigerTritonFileCacheManager.__new__(LigerTritonFileCacheManager)
        manager.cache_dir, manager.key = str(place), "x"
        for path in (manager.get_group("kernel.json") or {}).values():
            assert Path(path).parent == place, path

    def whole(self, place: Path, rng: random.Random) -> None:
        """A run that goes on from a folder with one file that was changed."""
        of_runs = [kind for kind in self.kinds.values() if kind.template == Path(self.config.out)]
        kind = rng.choice(of_runs)
        kind.make(place, rng)
        flags = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        flags += ["--steps", "3", "--checkpoint-every", "1", "--data", str(self.data), "--out", str(place)]
        cli.main(["train", *flags])

    def join(self) -> None:
        """The group of the one process."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.ranks = Ranks(0, 1, dist.group.WORLD, dist.group.WORLD)


class _Held:
    """Data of which only the identity counts."""

    train = range(3)

    def identity(self) -> dict[str, Any]:
        return {"rows": 3}


def _noted(made: list[Any], init: Callable[..., None]) -> Callable[..., None]:
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    return noting


JOB = {"name": "a", "image": "registry/a:1", "nodes": 2, "gpus": 1, "volume": "claim", "labels": {"team": "x"}}
JOB |= {"environment": {"A": "b"}, "tolerations": [{"key": "a", "operator": "Exists"}], "resources": {"rdma/ib": "8"}}
JOB |= {"extra_volumes": [{"name": "x", "emptyDir": {}}], "extra_mounts": [{"name": "x", "mountPath": "/x"}]}
JOB |= {"train": {"steps": 3, "data": "stdlib", "checkpoint_every": 5, "parallel": "ddp"}}


# -- what is watched -------------------------------------------------------------------------


class Strayed(BaseException):
    """Something elsewhere was written, or read by a name that a file holds, or run."""


def watched(place: list[Path]) -> None:
    """From now on nothing is written outside of ``place[0]``, and nothing that files name read."""
    writes = dict.fromkeys(("os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"), 1)
    writes |= dict.fromkeys(("os.rename", "os.symlink", "os.link"), 2)  # arguments that are paths

    def inside(path: Any) -> bool:
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if text in ("", "/dev/null", "/proc/self/clear_refs"):
            return True
        return Path(os.path.realpath(text)).is_relative_to(place[0])

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not place:
            return
        if event == "open":
            path, mode, flags = args
            if isinstance(flags, int):
                writing = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
            else:
                writing = any(c in (mode or "") for c in "wax+")
            text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
            # a link in the folder of a model or tokenizer may lead to a file
            named = os.path.realpath(text) in ("/etc/passwd", "/dev/zero") and (
                "checkpoints" in text or not os.path.islink(text)
            )
            if named or (writing and not inside(path)):
                raise Strayed(f"{'wrote' if writing else 'read'} {path!r}")
        elif event in writes:
            if not isinstance(args[-1], int) and not all(inside(path) for path in args[: writes[event]]):
                raise Strayed(f"{event} {args!r}")
        elif event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"):
            raise Strayed(f"ran {args!r}")

    sys.addaudithook(hook)


def child(readers: Readers, name: str, cases: range, seed: int, work: Path, said: int, show: bool) -> None:
    """Run some cases, and write before each its number, after it what was wrong."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY,) * 2)
    readers.join()
    place: list[Path] = []
    tempfile.tempdir = str(work)
    watched(place)
    for case in cases:
        os.write(said, f"{case}\n".encode())
        signal.alarm(WHOLE if name == "whole" else SECONDS)  # ends this process
        rng = random.Random(f"{seed} {name} {case}")
        here = work / "case"
        shutil.rmtree(here, ignore_errors=True)
        if name != "whole":
            readers.kinds[name].make(here, rng)
        wrong, out = "", io.StringIO()
        place[:] = [work]
        try:
            with contextlib.ExitStack() as entered:
                if not show:
                    entered.enter_context(contextlib.redirect_stdout(out))
                    entered.enter_context(contextlib.redirect_stderr(out))
                readers.whole(here, rng) if name == "whole" else readers.kinds[name].read(here, rng)
        except UserError as error:
            wrong = f"a message of {len(str(error))} characters" if len(str(error)) > 2000 else ""
        except BaseException as error:
            place.clear()
            wrong = f"{type(error).__name__}: {str(error)[:200]} ({traceback.extract_tb(error.__traceback__)[-1]})"
            if show:
                traceback.print_exc()
        place.clear()
        if "Traceback (most recent call last)" in out.getvalue():
            wrong = wrong or f"a traceback: {out.getvalue()[-200:]}"
        if wrong:
            os.write(said, f"! {' '.join(wrong.split())[:600]}\n".encode(errors="backslashreplace"))
    os.write(said, b"end\n")


def batch(
    readers: Readers, name: str, cases: range, seed: int, work: Path, show: bool = False
) -> list[tuple[int, str]]:
    """(case, what was wrong) of some cases. A process that hangs or dies is started again behind
    the case."""
    wrong: list[tuple[int, str]] = []
    path = work.with_name("said")
    while cases:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        said = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        pid = os.fork()
        if not pid:
            try:
                os.setpgid(0, 0)
                os.chdir(work)
                child(readers, name, cases, seed, work, said, show)
            finally:
                os._exit(0)
        os.close(said)
        status, case = os.waitpid(pid, 0)[1], cases.start
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        lines = path.read_text().splitlines()
        for line in lines:
            if line.startswith("! "):
                wrong.append((case, line[2:]))
            elif line.isdigit():
                case = int(line)
        if lines[-1:] != ["end"]:
            wrong.append((case, f"hangs, or its process ended with status {status}"))
        cases = range(case + 1, cases.stop)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="of all kinds together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another gives other cases (default: %(default)s)")
    parser.add_argument("--kind", help="only this kind of file")
    parser.add_argument("--case", type=int, help="only this case of --kind, with what it prints")
    a = parser.parse_args()
    torch.set_num_threads(1)
    work = Path(os.path.realpath(tempfile.mkdtemp(prefix="liger-fuzz-")))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            readers = Readers(work)
        names = [a.kind] if a.kind else [*readers.kinds, "whole"]
        each = -(-a.cases // max(1, len(readers.kinds) if not a.kind else 1))
        failed = 0
        for name in names:
            begin, wrong = time.monotonic(), list[tuple[int, str]]()
            count = min(each, max(1, a.cases // 1000)) if name == "whole" else each
            for start in range(0, count, BATCH) if a.case is None else [a.case]:
                cases = range(start, min(start + BATCH, count)) if a.case is None else range(a.case, a.case + 1)
                wrong += batch(readers, name, cases, a.seed, work / "child", show=a.case is not None)
            failed += len(wrong)
            print(f"{name:<18} {count:>6} cases  {len(wrong):>4} wrong  {time.monotonic() - begin:6.1f} s", flush=True)
            for case, what in wrong[:5]:
                print(f"    --seed {a.seed} --kind {name} --case {case}: {what}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
