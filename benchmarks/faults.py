"""A campaign of faults against `liger train`, on the CPU: each is done to a run, which is then
started again, and the result compared with one left alone.

    python benchmarks/faults.py runs/faults                              # all of it: hundreds of runs, a quarter of an hour on two cores
    python benchmarks/faults.py runs/faults --only corruptions --every 3     # every third of some

Prints a line a kind of fault, how many were tried, and after how many the run was identical (every
loss, the rows of every step, the weights), was refused with a message that names the mistake, or
was silently wrong, each of which is named. Exits with 1 if any was.

    operations    SIGKILL at every file operation of training's saves
    disk          No space left on device, at every file operation of training's saves, in the first run alone
    moments       SIGKILL at random moments
    corruptions   every file of the newest checkpoint, and `latest`: missing, empty, cut short, longer, zeroed, a bit flipped
    store         an object store whose operations fail, whose latest is hostile, whose newest checkpoint is damaged, each with the run's folder gone
    launchers     SIGKILL to the launcher of two ranks, then the same command again
    jobs          hostile values in every field of a job, in every form of manifest (tests/deploy/test_deploy.py): refused, or there as the text that they are
"""  # noqa: E501

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from liger_kernel.train.config import TrainConfig, UserError

ROOT = Path(__file__).parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
Fault = Callable[[], None]
EXIT_MISTAKE = 2


# -- runs ----------------------------------------------------------------------------------


def work(config: TrainConfig, log: str, what: str, number: int) -> None:
    """A run of one rank in this process; at the file operation of that number in its checkpoints
    it is killed, or the disk is full."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1), os.dup2(handle, 2)
    import torch

    from liger_kernel.train import loop

    torch.set_num_threads(1)
    seen = 0
    folder = str(Path(config.out) / "checkpoints")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if not what or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            return
        if event == "open" and not (
            isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            return
        if not str(arguments[0]).startswith(folder):
            return
        seen += 1
        if what == "count":
            Path(log + ".count").write_text(str(seen))
        elif seen == number:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")

    sys.addaudithook(hook)
    try:
        loop.train(config)
    except (UserError, OSError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(EXIT_MISTAKE)
    sys.stdout.flush()
    os._exit(0)


def started(config: TrainConfig, what: str = "", number: int = 0) -> Any:
    Path(config.out).mkdir(parents=True, exist_ok=True)
    process = CONTEXT.Process(target=work, args=(config, f"{config.out}.log", what, number))
    process.start()
    return process


def ended(config: TrainConfig, what: str = "", number: int = 0) -> int:
    process = started(config, what, number)
    process.join(300)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def result(config: TrainConfig) -> Any:
    """What must be the same: losses and rows of every step, and the weights."""
    lines = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    weights = (Path(config.save or "") / "model.safetensors").read_bytes()
    return [(line["step"], line["loss"], line["rows"]) for line in lines], weights


def verdict(config: TrainConfig, expected: Any) -> str:
    """Of the run started once more, undisturbed."""
    code = ended(config)
    said = Path(f"{config.out}.log").read_text().splitlines()[-1:]
    if code == 0:
        return "identical" if result(config) == expected else "silently wrong"
    return (
        "refused"
        if code == EXIT_MISTAKE and said and said[0].startswith(("UserError", "OSError"))
        else f"broken ({code})"
    )


# -- faults --------------------------------------------------------------------------------


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[int(at * (len(data) - 1))] ^= 1 << int(at * 7)
    path.write_bytes(data)


CORRUPTIONS: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    **{f"flipped at {at}": lambda path, at=at: flip(path, at) for at in (0.0, 0.3, 0.6, 1.0)},
}


class Campaign:
    def __init__(self, out: Path, every: int, tries: int, seed: int):
        self.out, self.every, self.tries, self.draw = out, every, tries, random.Random(seed)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        text = "def add(a, b):\n    return a + b\n\n" * 20
        (out / "text.jsonl").write_text("".join(json.dumps({"text": text + str(i)}) + "\n" for i in range(20)))
        self.config = TrainConfig(
            data=str(out / "text.jsonl"),
            cache=str(out / "cache"),
            vocab=300,
            hidden=16,
            heads=2,
            kv_heads=1,
            layers=1,
            length=24,
            batch=2,
            steps=7,
            warmup=1,
            log_every=1,
            checkpoint_every=2,
            eval_fraction=0,
            device="cpu",
            schedule="constant",
            timeout=60,
        )
        self.calm = self.named("calm")
        assert ended(self.calm, "count") == 0, Path(f"{self.calm.out}.log").read_text()
        self.expected = result(self.calm)
        self.operations_ = int(Path(f"{self.calm.out}.log.count").read_text())

    def named(self, name: str, **changes: Any) -> TrainConfig:
        return dataclasses.replace(
            self.config, out=str(self.out / name / "run"), save=str(self.out / name / "saved"), **changes
        )

    def some(self, all_: Any) -> Iterator[Any]:
        yield from list(all_)[:: self.every]

    def operations(self) -> Iterator[tuple[str, str]]:
        for number in self.some(range(1, self.operations_ + 1)):
            config = self.named(f"operation-{number}")
            ended(config, "kill", number)
            yield f"operation {number}", verdict(config, self.expected)

    def disk(self) -> Iterator[tuple[str, str]]:
        for number in self.some(range(1, self.operations_ + 1)):
            config = self.named(f"disk-{number}")
            ended(config, "full", number)
            yield f"operation {number}", verdict(config, self.expected)

    def moments(self) -> Iterator[tuple[str, str]]:
        for number in range(self.tries):
            config = self.named(f"moment-{number}")
            for _ in range(3):
                process = started(config)
                process.join(self.draw.uniform(0.3, 4.0))
                process.kill()
                process.join()
            yield f"moment {number}", verdict(config, self.expected)

    def corruptions(self) -> Iterator[tuple[str, str]]:
        checkpoints = Path(self.calm.out) / "checkpoints"
        newest = checkpoints / (checkpoints / "latest").read_text().split()[0]
        files = [*sorted(newest.iterdir()), checkpoints / "latest"]
        for path, kind in self.some((path, kind) for path in files for kind in CORRUPTIONS):
            name = f"{path.relative_to(checkpoints)} {kind}"
            config = self.named(name.replace("/", "-").replace(" ", "-"))
            shutil.copytree(self.calm.out, config.out)
            CORRUPTIONS[kind](Path(config.out) / "checkpoints" / path.relative_to(checkpoints))
            yield name, verdict(config, self.expected)

    def store(self) -> Iterator[tuple[str, str]]:
        def of(name: str) -> tuple[TrainConfig, Path]:
            place = self.out / f"store-{name}" / "there"
            config = self.named(f"store-{name}", store=place.as_uri())
            assert ended(dataclasses.replace(config, steps=4)) == 0
            # with the record in its folder, the run's right to replace the saved model is gone, too
            shutil.rmtree(config.out), shutil.rmtree(config.save or "")
            return config, place / "checkpoints"

        hostile = ["../../../x", "/etc", "step-1", "\0", "\xff", "", "step-99999999", "step-00000004/../../x"]
        for number, text in self.some(enumerate(hostile)):
            config, there = of(f"latest-{number}")
            (there / "latest").write_bytes(text.encode("latin-1") + b"\n")
            yield f"latest {text!r}", verdict(config, self.expected)
        for kind in self.some(CORRUPTIONS):
            config, there = of(f"damage-{kind.replace(' ', '-')}")
            CORRUPTIONS[kind](there / (there / "latest").read_text().split()[0] / "__0_0.distcp")
            yield f"tensors {kind}", verdict(config, self.expected)
        for name, act in (("gone", shutil.rmtree), ("a file", lambda path: (shutil.rmtree(path), path.touch()))):
            config, there = of(name.replace(" ", "-"))
            act(there)
            yield f"checkpoints are {name}", verdict(config, self.expected)

    def launchers(self) -> Iterator[tuple[str, str]]:
        flags = {
            name: value
            for name, value in dataclasses.asdict(self.config).items()
            if value != getattr(TrainConfig(), name) and name not in ("out", "save")
        }

        def launch(name: str) -> subprocess.Popen:
            config = dataclasses.replace(
                TrainConfig(**flags),
                out=str(self.out / name / "run"),
                save=str(self.out / name / "saved"),
                parallel="ddp",
                steps=40,
            )
            config.save_to(self.out / name / "config.json")
            argv = [
                sys.executable,
                "-m",
                "liger_kernel.cli",
                "train",
                "--config",
                str(self.out / name / "config.json"),
                "--nproc",
                "2",
            ]
            env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(
                argv, env=env, stdout=(self.out / name / "output.txt").open("a"), stderr=subprocess.STDOUT
            )

        of = lambda name: result(self.named(name))
        assert launch("launcher-calm").wait(300) == 0
        for number in range(max(1, self.tries // 5)):
            name = f"launcher-{number}"
            first = launch(name)
            lines = self.out / name / "run" / "metrics.jsonl"
            while first.poll() is None and not lines.exists():
                time.sleep(0.1)
            time.sleep(self.draw.uniform(0, 1))
            first.kill(), first.wait()
            code = launch(name).wait(300)
            yield (
                name,
                ("identical" if of(name) == of("launcher-calm") else "silently wrong")
                if code == 0
                else f"broken ({code})",
            )

    def jobs(self) -> Iterator[tuple[str, str]]:
        argv = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            str(ROOT / "tests" / "deploy" / "test_deploy.py"),
            "-k",
            "has_its_form_or_is_refused",
        ]
        done = subprocess.run(
            argv,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
        for word, number in (counts or {"error": 1}).items():
            for field in range(number):
                yield f"field {field}", "refused" if word == "passed" else word


KINDS = ("operations", "disk", "moments", "corruptions", "store", "launchers", "jobs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for the runs, which is emptied")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        help="of operations, corruptions and stores, every so many (default: %(default)s)",
    )
    parser.add_argument(
        "--tries", type=int, default=25, help="random moments; a fifth as many launchers (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    CONTEXT.set_forkserver_preload(["liger_kernel.train.loop", "transformers.models.llama.modeling_llama"])
    campaign, bad = Campaign(a.out.absolute(), a.every, a.tries, a.seed), 0
    for kind in a.only:
        counts: Counter[str] = Counter()
        for name, came_to in getattr(campaign, kind)():
            counts[came_to] += 1
            if came_to not in ("identical", "refused"):
                bad += 1
                print(f"{kind}: {name}: {came_to}", flush=True)
        print(f"{kind}: {sum(counts.values())} tried, {counts['identical']} identical afterwards, "
            f"{counts['refused']} refused with a message, "
              f"{sum(counts.values()) - counts['identical'] - counts['refused']} wrong", flush=True)  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
