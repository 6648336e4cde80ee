"""Hours of training in which ranks are killed at random, beside a run that is left alone: no step
may be lost, no loss differ, no memory grow.

    python benchmarks/soak.py runs/soak --minutes 30 -- --steps 60000 --hidden 64 --layers 2
    --length 128 --batch 4 --checkpoint-every 500

With `--connections 200` the calm run's metrics are scraped twice a second, beside so many
connections that say nothing, during every other half minute. The report has the largest number of
its open files and threads in the first half of the time, in the second, and the last one, the
scrapes that failed, and the median times of a step with and without.

What follows `--` goes to `liger train`. When the time is over both runs write a checkpoint; the
same command goes on. Prints a line of JSON every five minutes, so that a machine that is lost does
not take all that was seen with it, and one at the end; exits with 1 if a step is missing or
differs, or a run ended otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

# told to stop: everything is saved, or, while Python was loading, what the newest checkpoint has
PREEMPTED, TERMINATED = 75, 143
TURN = 30  # seconds
BETWEEN = 300  # seconds from one report to the next


def start(out: Path, flags: list[str]) -> subprocess.Popen:
    """A launcher with one rank, which it starts again whenever it dies."""
    out.mkdir(parents=True, exist_ok=True)
    argv = [
        sys.executable,
        "-m",
        "liger_kernel.cli",
        "train",
        "--nproc",
        "1",
        "--max-restarts",
        "1000000",
        "--deterministic",
        "--eval-fraction",
        "0",
    ]
    return subprocess.Popen(
        [*argv, *flags, "--out", str(out)], stdout=(out / "output.txt").open("a"), stderr=subprocess.STDOUT
    )


def rank_of(launcher: subprocess.Popen) -> int | None:
    """The launcher's child that trains."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    for pid in map(int, children.read_text().split() if children.exists() else []):
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and b"liger_kernel" in command.read_bytes():
            return pid
    return None


def resident(pid: int | None) -> float | None:
    """MB of memory of the host, without the pages of files, which come and go as the system
    likes."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if pid and status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), None)


def opened(pid: int | None) -> tuple[int, int] | None:
    """Files that are open, and threads."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return None


class Scraper:
    """Asks for metrics, and holds connections that ask for nothing, a quarter of which are made
    anew each time."""

    def __init__(self, port: int, connections: int):
        self.port, self.count = port, connections
        self.scrapes = self.failed = 0
        self.idle: list[socket.socket] = []
        self.turns: list[tuple[int, bool]] = []  # (lines of the run so far, whether it is scraped from there on)

    def turn(self, lines: int, on: bool) -> None:
        self.turns.append((lines, on))
        while self.idle:
            self.idle.pop().close()

    def times(self, lines: list[dict]) -> dict[str, float]:
        """Medians of the median times of a step between log lines, in ms: those of whole
        stretches."""
        found: dict[bool, list[float]] = {True: [], False: []}
        for (begin, on), (end, _) in itertools.pairwise(self.turns):
            found[on] += [line["step_seconds_p50"] for line in lines[begin:end] if "step_seconds_p50" in line][2:]
        name = {True: "scraped", False: "alone"}
        return {name[on]: round(1000 * statistics.median(some), 3) for on, some in found.items() if some} | {
            "log lines": sum(map(len, found.values()))
        }

    def look(self) -> None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as page:
                page.read()
            self.scrapes += 1
        except OSError:
            self.failed += 1
        for old in self.idle[: self.count // 4]:
            old.close()
        del self.idle[: self.count // 4]
        while len(self.idle) < self.count:
            new = socket.socket()
            new.setblocking(False)
            new.connect_ex(("127.0.0.1", self.port))
            self.idle.append(new)


def lines_of(out: Path) -> list[dict]:
    path = out / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--kill-every", type=float, default=60.0, help="mean seconds between two kills (default: %(default)s)"
    )
    parser.add_argument(
        "--connections",
        type=int,
        default=0,
        help="to the metrics endpoint of the calm run, which is then scraped, too (default: none)",
    )
    parser.add_argument("--port", type=int, default=19400, help="of that endpoint (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    a, flags = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    draw = random.Random(a.seed + len(lines_of(a.out / "disturbed")))
    calm, disturbed = a.out / "calm", a.out / "disturbed"
    scraper = Scraper(a.port, a.connections) if a.connections else None
    runs = {
        calm: start(calm, [*flags, *(["--metrics-port", str(a.port)] if scraper else [])]),
        disturbed: start(disturbed, flags),
    }
    counted: list[tuple[int, int]] = []
    began, kills, preemptions, memory = time.monotonic(), 0, 0, []
    strike, told = began + draw.expovariate(1 / a.kill_every), began

    def report(codes: dict[str, int | None]) -> dict[str, Any]:
        lines = {out: lines_of(out) for out in runs}
        losses = {
            out: {line["step"]: (line["loss"], line["grad_norm"]) for line in found} for out, found in lines.items()
        }
        both = losses[calm].keys() & losses[disturbed].keys()
        differ = sum(losses[calm][step] != losses[disturbed][step] for step in both)
        once = all([line["step"] for line in found] == list(range(1, len(found) + 1)) for found in lines.values())
        late = [
            rss for at, rss in memory if at > memory[0][0] + (memory[-1][0] - memory[0][0]) / 4
        ]  # allocators have grown by then
        tenth = max(1, len(late) // 10)
        device = [line["memory"] for line in lines[calm] if "memory" in line]
        scraped: dict[str, Any] = (
            dict(scrapes=scraper.scrapes, scrapes_failed=scraper.failed, step_ms=scraper.times(lines[calm]))
            if scraper
            else {}
        )
        if counted:
            half = len(counted) // 2
            scraped["files_and_threads"] = [max(counted[:half]), max(counted[half:]), counted[-1]]
        return dict(
            minutes=round((time.monotonic() - began) / 60, 1),
            kills=kills,
            preemptions=preemptions,
            exit_codes=codes,
            steps={out.name: len(found) for out, found in losses.items()},
            compared=len(both),
            differ=differ,
            each_step_once=once,
            host_mb=[round(sum(part) / len(part), 1) for part in (late[:tenth], late[-tenth:]) if part],
            memory_gb=[round(m / 1e9, 3) for m in device[:1] + device[-1:]],
            **scraped,
            loss=[lines[calm][0]["loss"], lines[calm][-1]["loss"]] if lines[calm] else None,
        )

    while time.monotonic() < began + 60 * a.minutes and any(run.poll() is None for run in runs.values()):
        time.sleep(0.5)
        now = time.monotonic()
        if now > told + BETWEEN:
            print(json.dumps(report({out.name: run.poll() for out, run in runs.items()})), flush=True)
            told = now
        if (calm / "metrics.jsonl").exists() and (rss := resident(rank_of(runs[calm]))):  # it trains
            memory.append((now, rss))
            if scraper:
                on = int(now - memory[0][0]) // TURN % 2 == 1
                if not scraper.turns or scraper.turns[-1][1] != on:
                    scraper.turn(len(lines_of(calm)), on)
                if on:
                    scraper.look()
                if found := opened(rank_of(runs[calm])):
                    counted.append(found)
        if runs[disturbed].poll() in (PREEMPTED, TERMINATED):
            runs[disturbed] = start(disturbed, flags)
        if now < strike or runs[disturbed].poll() is not None:
            continue
        strike = now + draw.expovariate(1 / a.kill_every)
        if draw.random() < 0.2:  # the node is taken away
            runs[disturbed].terminate()
            preemptions += 1
        elif pid := rank_of(runs[disturbed]):
            os.kill(pid, signal.SIGKILL)
            kills += 1
    for run in runs.values():
        if run.poll() is None:
            run.terminate()
    codes = {out.name: run.wait(300) for out, run in runs.items()}
    end = report(codes)
    print(json.dumps(end), flush=True)
    right = end["compared"] and not end["differ"] and end["each_step_once"]
    return 0 if right and set(codes.values()) <= {0, PREEMPTED, TERMINATED} else 1


if __name__ == "__main__":
    raise SystemExit(main())
