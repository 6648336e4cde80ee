"""The runtime layer over several processes: ranks are killed, stopped, stuck and changed in number,
and the run must end as if nothing had happened.

Without GPUs, workers are forked from a server that has imported everything once. `pytest -m elastic
tests/train/test_runtime.py` runs the rest of the matrix, `LIGER_TEST_DEVICE=cuda pytest -m elastic
tests/train/test_runtime.py -k "launcher or machine or moment"` on two GPUs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from processes import as_users_run_it, children_of, forkserver, free_port, until, write_to
from quick import further
from small_runs import TEXT, refused, save_model, saved, small_run, write_jsonl

pytest.importorskip("transformers")
if not sys.platform.startswith("linux"):
    pytest.skip("workers are forked", allow_module_level=True)

from liger_kernel import cli
from liger_kernel.parallel import Parallel
from liger_kernel.train import checkpoint, folder, loop, metrics, ranks, store
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.token_rows import share

pytestmark = pytest.mark.usefixtures("references")
STEPS = 8
DEVICE = os.environ.get("LIGER_TEST_DEVICE", "cpu")  # cuda: NCCL, where there is a GPU for each of two ranks
PATIENCE = 120 if DEVICE == "cpu" else 300  # seconds for a run; on GPUs each rank imports everything anew


def at_step(step, act):
    before = loop._Run._step

    def after(self):
        result = before(self)
        if self.step == step:
            act()
        return result

    loop._Run._step = after


def in_save(number, act):
    """Do ``act`` where a save of that number, from 1, writes tensors."""
    before, seen = checkpoint.dcp.FileSystemWriter.write_data, []

    def write(self, plan, planner):
        seen.append(plan)
        if len(seen) == number:
            act()
        return before(self, plan, planner)

    checkpoint.dcp.FileSystemWriter.write_data = write


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def no_space():
    raise OSError(errno.ENOSPC, "No space left on device")


def poisoned(step):
    before, seen = Parallel.clip_grad_norm_, []

    def clip(self, norm):
        seen.append(norm)
        if len(seen) == step:
            gradient = next(p.grad for p in self.module.parameters() if p.grad is not None)
            getattr(gradient, "_local_tensor", gradient).fill_(float("inf"))
        return before(self, norm)

    Parallel.clip_grad_norm_ = clip


def stuck(step):
    """A rank sleeps after that step, and finds out before the others."""
    at_step(step, lambda: time.sleep(1000))
    ranks.Watch.progress = lambda watch: setattr(watch, "_last", time.monotonic() - 2)


def rehearsed():
    """What is done on GPUs before the first step."""
    steps = loop._Run._steps
    loop._Run._steps = lambda run: (run._rehearse(), steps(run))


FAULTS = {
    "killed": lambda step: at_step(step, die),
    "terminated": lambda step: at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "stuck": stuck,
    "poisoned": poisoned,
    "killed in save": lambda number: in_save(number, die),
    "disk full": lambda number: in_save(number, no_space),
}


def work(rank, world, port, config, fault, elsewhere):
    write_to(f"{config.out}-rank-{rank}.log")
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), **elsewhere)
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    as_users_run_it()
    if "REHEARSE" in elsewhere:
        rehearsed()
    if fault and rank == world - 1:
        FAULTS[fault[0]](fault[1])
    try:
        ranks.reporting(loop.train)(config)
    except ranks.Preempted:
        sys.exit(ranks.EXIT_PREEMPTED)
    finally:
        sys.stdout.flush(), sys.stderr.flush()


def run(config, world=2, fault=None, **elsewhere):
    """Exit codes of ``world`` ranks, the last of which has the ``fault``; a negative one is a
    signal. Survivors are ended as torchrun does."""
    port = free_port()
    context = multiprocessing.get_context("spawn") if DEVICE == "cuda" else forkserver()
    workers = [
        context.Process(target=work, args=(rank, world, port, config, fault, elsewhere)) for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
    hung = [worker for worker in workers if worker.is_alive()]
    for worker in hung:
        worker.kill()
    assert not hung, log(config)
    return [worker.exitcode for worker in workers]


def log(config):
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(Path(config.out).parent.glob("*.log")))


# what a run has written
lines = lambda config: [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
column = lambda config, name: [line[name] for line in lines(config)]
losses = lambda config: column(config, "loss")
rows = lambda config: column(config, "rows")
metrics_of = lambda config: json.loads((Path(config.out) / "metrics.json").read_text())
checkpoints_of = lambda config: Path(config.out) / "checkpoints"
latest = lambda config: (checkpoints_of(config) / "latest").read_text().split()


def of_random_weights(base, **more):
    return dict(model=None, tokenizer=base.model, hidden=32, layers=1, heads=2, kv_heads=1) | more


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of a tiny model with dropout, whose draws must come back as well."""
    from liger_kernel.train.tokenise import train_bpe

    folder = tmp_path_factory.mktemp("runtime")
    model = save_model(folder / "model", train_bpe([TEXT], 280), attention_dropout=0.1)
    changes = dict(model=model, batch=2, global_batch=6, steps=STEPS, warmup=2, log_every=3)
    changes |= dict(checkpoint_every=3, eval_fraction=0.05, precision="fp32", parallel="fsdp2", timeout=60)
    return small_run(folder, [{"text": TEXT * 30 + str(i)} for i in range(12)], device=DEVICE, **changes)


def place(base, folder, **changes):
    return replace(base, out=str(folder / "run"), save=str(folder / "saved"), **changes)


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    config = place(base, tmp_path_factory.mktemp("undisturbed"))
    assert run(config) == [0, 0], log(config)
    assert len(losses(config)) == STEPS and losses(config)[-1] < 0.8 * losses(config)[0]
    return config


def same_run(config, undisturbed):
    """To the last bit: every loss, the rows of every step, the weights."""
    assert losses(config) == losses(undisturbed)
    assert rows(config) == rows(undisturbed) == [[6 * i, 6 * i + 6] for i in range(STEPS)]
    assert saved(config) == saved(undisturbed)


@pytest.mark.parametrize("parallel", further("ddp", "fsdp2"))
def test_transformers_trainer_learns_the_same_over_ranks(parallel, base, tmp_path):
    sizes = of_random_weights(base, parallel=parallel, global_batch=8, checkpoint_every=0, log_every=1)
    curves = {}
    for trainer in ("torch", "hf"):
        (tmp_path / trainer).mkdir()
        config = place(base, tmp_path / trainer, trainer=trainer, **sizes)
        assert run(config) == [0, 0], log(config)
        curves[trainer] = metrics_of(config)
    for name in ("losses", "gradient_norms", "learning_rates"):
        assert curves["hf"][name] == pytest.approx(curves["torch"][name], rel=2e-4), name


# what happens to the second of two ranks; its exit code; how many checkpoints are then named, the
# newest first, of steps 3 and 6 or of the one after SIGTERM; what else is true of the run
RECOVERIES = {
    # the second save may still be under way
    "killed": (("killed", 7), -signal.SIGKILL, [[3], [6, 3]], {}),
    # one part, whose order is that of the data as a whole; it is gone with the machine
    "killed, of a stream": (("killed", 7), -signal.SIGKILL, [[3], [6, 3]], dict(stream=1)),
    "killed in a save": (("killed in save", 2), -signal.SIGKILL, [[3]], {}),
    # neither the weights, the moments nor the draws of dropout are changed by it
    "killed after a rehearsal": (("killed", 7), -signal.SIGKILL, [[3], [6, 3]], dict(REHEARSE="1")),
    # the news travel beside one step
    "terminated": (("terminated", 4), ranks.EXIT_PREEMPTED, [[5, 3]], {}),
}


# of a stream it is killed as well
QUICK = ("killed, of a stream", "killed in a save", "terminated")


@pytest.mark.parametrize("how", [*QUICK, *further(*(how for how in RECOVERIES if how not in QUICK))])
def test_a_fault_of_a_rank_loses_nothing(how, base, undisturbed, tmp_path):
    fault, code, named, more = RECOVERIES[how]
    changes = dict(stream=1, cache=str(tmp_path / "cache")) if "stream" in more else {}
    config, env = place(base, tmp_path, **changes), {name: more[name] for name in more if name == "REHEARSE"}
    codes = run(config, fault=fault, **env)
    assert codes[1] == code and codes[0] in (1, code), log(config)  # the other one does not wait for ever
    assert [int(name[5:]) for name in latest(config)] in named
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert run(config, TORCHELASTIC_RESTART_COUNT="1", **env) == [0, 0], log(config)
    same_run(config, undisturbed)
    assert metrics_of(config)["restarts"] == 1


def test_a_run_goes_on_with_other_numbers_of_ranks(base, undisturbed, tmp_path):
    """2 -> 1 -> 3: the same rows, so the same losses but for dropout, which is drawn per rank."""
    config = place(base, tmp_path)
    assert run(config, 2, fault=("terminated", 3)) == [ranks.EXIT_PREEMPTED] * 2, log(config)
    assert run(config, 1, fault=("terminated", 6)) == [ranks.EXIT_PREEMPTED], log(config)
    assert run(config, 3) == [0, 0, 0], log(config)
    assert "written by 1 ranks; 3 now" in log(config)
    assert rows(config) == rows(undisturbed)
    assert losses(config)[:4] == losses(undisturbed)[:4]
    assert losses(config) == pytest.approx(losses(undisturbed), rel=0.1)


@pytest.mark.elastic
@pytest.mark.parametrize("parallel, precision, rel", [("ddp", "fp32", 1e-5), ("fsdp2", "bf16-mixed", 1e-2)])
def test_adapters_over_ranks(parallel, precision, rel, base, tmp_path):
    """Killed, started again, preempted, finished by one: same bits as long as there are two."""
    pytest.importorskip("peft")
    sizes = of_random_weights(base, layers=2, precision=precision)
    calm = place(base, tmp_path, parallel=parallel, lora=4, dora=True, **sizes)
    one = replace(calm, parallel="none", checkpoint_every=0, save=None, out=str(tmp_path / "one"))
    config = replace(calm, out=str(tmp_path / "killed"), save=str(tmp_path / "again"))
    assert run(calm) == [0, 0] and run(one, 1) == [0], log(calm)
    assert losses(calm) == pytest.approx(losses(one), rel=rel) and losses(calm)[-1] < losses(calm)[0]
    assert run(config, fault=("killed", 5))[1] == -signal.SIGKILL, log(config)
    assert run(config, fault=("terminated", 6)) == [ranks.EXIT_PREEMPTED] * 2, log(config)
    assert losses(config) == losses(calm)[:7]
    assert run(config, 1) == [0], log(config)
    assert losses(config)[:7] == losses(calm)[:7] and losses(config) == pytest.approx(losses(calm), rel=rel)
    stored = checkpoint.read_object(checkpoints_of(config) / latest(config)[0] / checkpoint.INDEX)
    assert stored and all("lora" in name for name in stored)
    from safetensors.torch import load_file

    learnt, expected = (load_file(Path(c.save) / "adapter_model.safetensors") for c in (config, calm))
    shapes = [{name: weight.shape for name, weight in found.items()} for found in (learnt, expected)]
    assert len(learnt) == 2 * 7 * 3 and shapes[0] == shapes[1]


@pytest.mark.elastic
@pytest.mark.parametrize(
    "changes",
    [
        # before the next one: PyTorch's cache on disk would take the moments of the two for the
        # same
        dict(optimizer="adamw-bf16", precision="bf16"),
        dict(optimizer="adamw-8bit-bf16", precision="bf16"),  # torchao compiles it in each of eight processes
        dict(optimizer="adamw-8bit", optimizer_in_backward=True),
        dict(optimizer_in_backward=True),
        dict(optimizer_on_cpu=True),
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_optimizers_over_shards(changes, base, tmp_path):
    """Killed and started again: the bits of a run left alone. One rank goes on, unless its
    shards would have other moments in 8 bits."""
    pytest.importorskip("torchao")
    sizes = of_random_weights(base, hidden=64, intermediate=128, heads=1, global_batch=4, log_every=1, grad_clip=0.0)
    calm = place(base, tmp_path, **sizes, **changes)
    config = replace(calm, out=str(tmp_path / "killed"), save=str(tmp_path / "again"))
    assert run(calm) == [0, 0], log(calm)
    assert run(config, fault=("killed", 5))[1] == -signal.SIGKILL, log(config)
    assert run(config) == [0, 0], log(config)
    assert losses(config) == losses(calm) and losses(config)[-1] < losses(config)[0]
    assert saved(config) == saved(calm)
    if "optimizer" not in changes:
        plain = dict(optimizer_in_backward=False, optimizer_on_cpu=False, save=str(tmp_path / "third"))
        plain = replace(calm, out=str(tmp_path / "plain"), **plain)
        assert run(plain) == [0, 0] and losses(plain) == losses(calm) and saved(plain) == saved(calm)
    alone = replace(calm, batch=4, steps=STEPS + 2)
    if "8bit" in calm.optimizer:
        assert run(alone, 1) != [0]
        assert "has 8-bit moments in the blocks of 2 ranks: continue with 2 ranks, got 1" in log(alone)
    else:
        assert run(alone, 1) == [0] and len(losses(alone)) == STEPS + 2, log(alone)


@pytest.mark.elastic
def test_a_disk_that_is_full_for_one_rank_costs_all_a_checkpoint_and_no_more(base, undisturbed, tmp_path):
    config = place(base, tmp_path)
    assert run(config, fault=("disk full", 2)) == [0, 0], log(config)
    assert "No space left" in log(config) and latest(config) == ["step-00000008", "step-00000003"]
    assert not (tmp_path / "run" / "checkpoints" / "step-00000006").exists()
    same_run(config, undisturbed)


def test_a_stuck_collective_is_reported_with_its_stacks(base, tmp_path):
    config = place(base, tmp_path, timeout=8)
    assert run(config, fault=("stuck", 2)) == [1, 1], log(config)
    waiting, guilty = ((tmp_path / "run" / f"stuck-rank-{rank}.txt").read_text() for rank in range(2))
    assert "no progress for 8 s" in waiting and "_steps" in waiting
    assert "in <lambda>" in guilty and "in <lambda>" not in waiting  # the one that sleeps


def test_a_step_without_finite_gradients_changes_nothing(base, tmp_path):
    """An Inf in the shard of one rank: both leave the step out."""
    config = place(base, tmp_path, log_every=1, steps=4, nonfinite="skip")
    assert run(config, fault=("poisoned", 3)) == [0, 0], log(config)
    assert column(config, "nonfinite_steps") == [0, 0, 1, 1] and lines(config)[3]["grad_norm"] > 0
    assert losses(config)[3] < losses(config)[0]


def test_shares_are_all_rows_once_in_as_many_pieces_on_every_rank():
    for count, world, size in ((8, 1, 8), (8, 2, 2), (7, 3, 2), (1, 3, 4), (10, 4, 1)):
        shares = [share(list(range(count)), rank, world, size) for rank in range(world)]
        assert [row for pieces in shares for piece in pieces for row in piece] == list(range(count))
        assert len({len(pieces) for pieces in shares}) == 1
        assert max(len(piece) for pieces in shares for piece in pieces) <= size


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.elastic), "fsdp2"])
def test_tokens_weigh_the_same_on_every_rank(parallel, base, tmp_path):
    """Five answers of unequal length: one rank has three of them, in two pieces, the other two
    in one, and a piece without labels."""
    chats = [{"instruction": "say it", "output": "yes" * (1 + 5 * (i % 4))} for i in range(40)]
    data = write_jsonl(tmp_path / "chats.jsonl", chats)
    changes = of_random_weights(base, data=data, length=128, global_batch=5, batch=2)
    one = place(base, tmp_path, **changes, steps=4, parallel="none", log_every=1, checkpoint_every=0)
    two = replace(one, parallel=parallel, save=None, out=str(tmp_path / "two"))
    assert run(one, 1) == [0] and run(two) == [0, 0], log(one)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert column(two, "grad_norm") == pytest.approx(column(one, "grad_norm"), rel=1e-4)


PACKED = dict(packing="documents", length=25, gradient_checkpointing="full")


# the next test has shards as well
@pytest.mark.parametrize(
    "parallel, more", [("ulysses", {}), pytest.param("ulysses-fsdp2", PACKED, marks=pytest.mark.elastic)]
)
def test_ranks_that_share_rows(parallel, more, base, tmp_path):
    """The losses of one process; after a restart the same bits, or with fewer ranks its losses."""
    sizes = of_random_weights(base, layers=2, heads=4, **more)
    calm = place(base, tmp_path, parallel=parallel, **sizes)
    one = replace(calm, parallel="none", checkpoint_every=0, save=None, out=str(tmp_path / "one"))
    config = replace(calm, out=str(tmp_path / "stopped"), save=str(tmp_path / "again"))
    assert run(calm) == [0, 0] and run(one, 1) == [0], log(calm)
    assert losses(calm) == pytest.approx(losses(one), rel=1e-5) and losses(calm)[-1] < losses(calm)[0]
    evaluated = lambda config: metrics_of(config)["evaluations"][-1]["loss"]
    assert evaluated(calm) == pytest.approx(evaluated(one), rel=1e-5)
    assert run(config, fault=("terminated", 4)) == [ranks.EXIT_PREEMPTED] * 2, log(config)
    assert run(config) == [0, 0], log(config)
    assert losses(config) == losses(calm) and rows(config) == rows(one) and saved(config) == saved(calm)
    if parallel == "ulysses":  # the rest is nightly
        return
    fewer = replace(calm, save=None, out=str(tmp_path / "fewer"))
    assert run(fewer, fault=("terminated", 6)) == [ranks.EXIT_PREEMPTED] * 2 and run(fewer, 1) == [0], log(fewer)
    assert losses(fewer) == pytest.approx(losses(one), rel=1e-5)
    groups = replace(calm, sequence_parallel_size=1, save=None, out=str(tmp_path / "groups"))
    assert run(groups) == [0, 0] and losses(groups) == pytest.approx(losses(one), rel=1e-5), log(groups)
    other = replace(calm, sequence_parallel_size=3, save=None, out=str(tmp_path / "other"))
    assert run(other) == [ranks.EXIT_MISTAKE] * 2
    assert "sequence_parallel_size must divide the 2 ranks, got 3" in log(other)


@pytest.mark.parametrize(
    "more, close",
    [
        (dict(optimizer_in_backward=True), 1e-5),
        # test_optimizers_over_shards has the one; torchao compiles the other in each process
        pytest.param(dict(optimizer_on_cpu=True), 1e-5, marks=pytest.mark.elastic),
        pytest.param(dict(optimizer="adamw-8bit"), 1e-3, marks=pytest.mark.elastic),
    ],
    ids=["in the backward", "on the CPU", "8 bits"],
)
def test_ranks_that_share_rows_and_shards(more, close, base, tmp_path):
    """Optimizers of FSDP2 work there, too: losses are those of one process and PyTorch's AdamW."""
    if "optimizer" in more:
        pytest.importorskip("torchao")
    sizes = of_random_weights(base, layers=2, heads=4, checkpoint_every=0, grad_clip=0.0, batch=6)
    one = place(base, tmp_path, parallel="none", **sizes)
    shared = replace(one, parallel="ulysses-fsdp2", save=None, out=str(tmp_path / "shared"), **more)
    assert run(one, 1) == [0] and run(shared) == [0, 0], log(shared)
    assert losses(shared) == pytest.approx(losses(one), rel=close) and losses(shared)[-1] < losses(shared)[0]
    norms = [metrics_of(c)["gradient_norms"] for c in (shared, one)]
    assert norms[0] == pytest.approx(norms[1], rel=10 * close)


def found_in(folder):
    """What a run of one rank would go on from."""
    with mock.patch.object(ranks.Ranks, "agreed", lambda self, value: value):
        return checkpoint.Checkpoints(folder, ranks.Ranks(0, 1, None, None), 2).latest()


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


CORRUPTIONS = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
}
for i in (0, 3, 7):
    flip = lambda path, i=i: path.write_bytes(flipped(path.read_bytes(), i * (path.stat().st_size - 1) // 7))
    CORRUPTIONS[f"flipped {i}"] = flip


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_damage_of_any_kind_is_found(corruption, undisturbed, tmp_path, capsys):
    """Of every file of the newest checkpoint: the one before is taken, and said why."""
    folder = Path(undisturbed.out) / "checkpoints"
    newest, before = latest(undisturbed)
    assert checkpoint.damage(folder / newest) is None
    names = sorted(path.name for path in (folder / newest).iterdir())
    of_a_rank = [name for rank in "01" for name in (f"rank-{rank}.json", f"sums-{rank}.json", f"__{rank}_0.distcp")]
    assert set(names) == {".metadata", "tensors.json", "state.json", *of_a_rank}
    for name in names:
        shutil.copytree(folder, tmp_path / name)
        CORRUPTIONS[corruption](tmp_path / name / newest / name)
        assert found_in(tmp_path / name) == tmp_path / name / before, name
        assert f"ignoring checkpoint {tmp_path / name / newest}: " in capsys.readouterr().err


def of_the_file(name, change):

    def made(path):
        values = json.loads((path / name).read_text())
        change(values)
        (path / name).write_text(json.dumps(values))

    return made


pipe_at = lambda path: (path.unlink(missing_ok=True), os.mkfifo(path))
link_at = lambda path, to="/dev/zero": (path.unlink(missing_ok=True), path.symlink_to(to))


def everywhere(**values):
    at = {"file": 2, "begin": 3, "length": 4}
    chunks = lambda index: [chunk for tensor in index.values() for chunk in tensor["chunks"]]
    return of_the_file(
        "tensors.json", lambda index: [c.__setitem__(at[name], values[name]) for c in chunks(index) for name in values]
    )


# what a stranger's checkpoint may hold with checksums that are right; the last of a name is whether
# they are made again
STRANGE = {
    "sums of a device": of_the_file("sums-0.json", lambda sums: sums.update({"/dev/zero": "0" * 64})),
    "sums of a list": lambda path: (path / "sums-0.json").write_text("[]"),
    **{
        f"{name} {value!s:.12}": of_the_file(
            "state.json", lambda state, name=name, value=value: state.update({name: value})
        )
        for name, values in dict(step=(10**30, 1), ranks=(0, 10**12), identity=([],), data=({"parts": [[1]]},)).items()
        for value in values
    },
    "state is deep": lambda path: (path / "state.json").write_text("[" * 100_000),
    "state is a pipe": lambda path: pipe_at(path / "state.json"),
    "state is a device": lambda path: link_at(path / "state.json"),
    "a pipe beside": lambda path: pipe_at(path / "x.json"),
    "a link to a file of its own": lambda path: link_at(path / "x.json", path / "state.json"),
    "generators of three": of_the_file("rank-1.json", lambda states: states.update(python=[3, [1, 2], None])),
    "generators beside themselves": of_the_file("rank-1.json", lambda states: states["numpy"].__setitem__(2, 10**6)),
    "generators of PyTorch": of_the_file("rank-0.json", lambda states: states.update(torch="AAAA")),
    "tensors elsewhere": everywhere(file="../../../elsewhere.distcp", begin=0),
    "tensors of a device": everywhere(file="/dev/zero", begin=0, length=-1),
    "tensors before their file": everywhere(begin=-1_000_000, length=10),
    "tensors behind their file": everywhere(begin=1 << 40),
    "a tensor is nowhere": of_the_file("tensors.json", lambda index: [t["chunks"].clear() for t in index.values()]),
    "tensors are a list": lambda path: (path / "tensors.json").write_text("[]"),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_what_no_run_writes_into_a_checkpoint_is_said_and_not_read(strange, undisturbed, tmp_path, capsys):
    shutil.copytree(Path(undisturbed.out) / "checkpoints", tmp_path / "checkpoints")
    newest, before = latest(undisturbed)
    path = tmp_path / "checkpoints" / newest
    STRANGE[strange](path)
    if not strange.startswith("sums"):
        for rank in (0, 1):  # a stranger can, too
            written = json.loads((path / f"sums-{rank}.json").read_text())
            sums = {name: checkpoint.digest(path / name) for name in written if (path / name).is_file()}
            (path / f"sums-{rank}.json").write_text(json.dumps(sums))
    memory = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm")
    here = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else 0
    try:
        if here:
            resource.setrlimit(resource.RLIMIT_AS, (here + (1 << 30), memory[1]))
        assert found_in(tmp_path / "checkpoints") == tmp_path / "checkpoints" / before
    finally:
        resource.setrlimit(resource.RLIMIT_AS, memory)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"ignoring checkpoint {path}: ") and len(lines[0]) < 500, lines
    assert "MemoryError" not in lines[0]


def test_tensors_that_cannot_be_read_are_passed_over(base, tmp_path, capsys):
    """Their checksums hold, as a stranger's do."""
    config = place(base, tmp_path, parallel="none", steps=4, checkpoint_every=2, checkpoint_keep=3)
    first = loop.train(config)["losses"]
    folder = tmp_path / "run" / "checkpoints"
    for name, last in (("step-00000004", False), ("step-00000002", True)):
        (part,) = (folder / name).glob("*.distcp")
        part.write_bytes(pickle.dumps(print).ljust(part.stat().st_size, b"\0"))
        checkpoint.write_sums(folder / name, 0)
        if last:
            refused(r"no checkpoint in .* is complete", loop.train, config)
            return
        assert loop.train(replace(config, checkpoint_every=0))["losses"][2:] == first[2:]
        assert f"ignoring checkpoint {folder / name}: rank 0: UnpicklingError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "lost",
    [
        "missing",
        "binary",
        "named folder gone",
        *(pytest.param(how, marks=pytest.mark.elastic) for how in ("empty", "zeroed", "of another")),
    ],
)
def test_a_lost_latest_destroys_nothing(lost, base, tmp_path, capsys):
    """Checkpoints that nobody names are found; a run removes none that it has not written."""
    config = replace(place(base, tmp_path, parallel="none", steps=6, checkpoint_every=2), save=None)
    loop.train(replace(config, steps=4, checkpoint_keep=4, schedule="cosine"))
    folder = tmp_path / "run" / "checkpoints"
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "latest"}
    {
        "missing": lambda path: path.unlink(),
        "empty": lambda path: path.write_text(""),
        "binary": lambda path: path.write_bytes(bytes(range(128, 256))),
        "zeroed": lambda path: path.write_bytes(bytes(20)),
        "of another": lambda path: path.write_text("step-1\n"),
        "named folder gone": lambda path: path.write_text("step-00000099\n"),
    }[lost](folder / "latest")
    found = loop.train(replace(config, checkpoint_keep=1))
    assert "names no complete checkpoint: the newest complete one, step-00000004, is used" in capsys.readouterr().err
    assert latest(config) == ["step-00000006"]
    assert {path: path.read_bytes() for path in contents} == contents
    assert found["losses"][4:] == loop.train(config)["losses"][4:] and len(found["losses"]) == config.steps


def test_what_cannot_be_read_is_not_replaced(base, tmp_path):
    """The run neither begins anew nor removes what is there."""
    config = place(base, tmp_path, parallel="none", steps=4, checkpoint_every=2)
    loop.train(config)
    folder = tmp_path / "run" / "checkpoints"
    for path in folder.glob("step-*/*.distcp"):
        path.write_bytes(flipped(path.read_bytes(), 100))
    for lose in (lambda: None, lambda: (folder / "latest").write_text(""), lambda: (folder / "latest").unlink()):
        lose()
        refused("is complete: restore one, or move the folder away to start again", loop.train, config)
        assert len(list(folder.glob("step-*"))) == 2


def test_a_damaged_checkpoint_is_written_again(base, tmp_path, monkeypatch):
    """Older whole ones stay named behind it, also where its save fails."""
    config = place(base, tmp_path, parallel="none", steps=6, checkpoint_every=2, checkpoint_keep=3)
    loop.train(config)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-00000006" / "rank-0.json").write_text("{}")
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint.dcp.FileSystemWriter, "write_data", lambda *_: no_space())
        with pytest.raises(OSError, match="could not be written; the newest checkpoint is that of step 4"):
            loop.train(config)
    loop.train(config)
    assert latest(config) == ["step-00000006", "step-00000004", "step-00000002"]
    assert checkpoint.damage(folder / "step-00000006") is None
    assert sorted(path.name for path in folder.iterdir()) == ["latest", *sorted(latest(config))]


def test_the_metadata_of_dcp_are_written_and_not_read(base, tmp_path):
    """PyTorch's tools need them; they are a pickle, which can run anything."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    config = place(base, tmp_path, parallel="none", steps=2, checkpoint_every=2)
    loop.train(config)
    path = checkpoints_of(config) / latest(config)[0]
    readers = checkpoint.dcp.FileSystemReader, checkpoint.IndexReader
    theirs, ours = (reader(path).read_metadata() for reader in readers)
    places = lambda found: {name: (t.size, t.chunks) for name, t in found.state_dict_metadata.items()}
    assert theirs.storage_data == ours.storage_data and places(theirs) == places(ours)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    checkpoint.write_sums(path, 0)
    loop.train(replace(config, steps=3))
    assert not (tmp_path / "evil").exists()


HOSTILE = ["../../../x", "/etc", "step-1", "step-00000001/..", "step-0000000a", "step-٠٠٠٠٠٠٠١", "step-00000001\0"]


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_but_a_checkpoints_name_is_read_in_latest(name, tmp_path, capsys):
    (tmp_path / "latest").write_bytes(f"{name}\nstep-00000003\n".encode())
    assert checkpoint.listed(tmp_path, say=True) == ["step-00000003"]
    assert "which is not the name of a checkpoint" in capsys.readouterr().err
    for step in (0, 7, 99_999_999, 100_000_000):
        assert checkpoint.NAME.fullmatch(f"step-{step:08d}")


@pytest.mark.parametrize("name", ["../../../.config-1", "/{}/.config-1"])
def test_a_store_writes_nothing_outside_the_run(name, tmp_path):
    """Keys of an object store are any text: a name in its ``latest`` must not become a path."""
    fs = memory_store()
    name = name.format(tmp_path)
    fs.pipe_file("/b/run/checkpoints/latest", f"{name}\nstep-00000001\n".encode())
    fs.store = {"/b/run/checkpoints/latest": fs.store["/b/run/checkpoints/latest"]}
    there = {
        f"/b/run/checkpoints/{name}/authorized_keys": b"mine",
        "/b/run/checkpoints/step-00000001/..\\x": b"",
        "/b/run/checkpoints/step-00000001/.bashrc": b"",
    }
    ls = lambda path, detail: [key for key in there if key.rpartition("/")[0] == path]
    get = lambda key, path: Path(path).write_bytes(there[key])
    refused = pytest.raises(UserError, match="no checkpoint in the store memory://b/run is complete")
    with mock.patch.object(fs, "ls", ls), mock.patch.object(fs, "get_file", get), refused:
        store.Store("memory://b/run", tmp_path / "home" / "runs" / "mine").fetch()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def memory_store():
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.store.clear()
    return fs


@pytest.mark.parametrize(
    "strange",
    ["latest is a device", "latest is a pipe", "metrics is a device", "metrics is a folder", "a file is a link"],
)
def test_a_store_of_a_stranger_has_files_alone(strange, tmp_path, capsys):
    there, out = tmp_path / "there", tmp_path / "run"
    step = there / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    (there / "checkpoints" / "latest").write_text("step-00000002\n")
    (there / "metrics.jsonl").write_text("{}\n")
    out.mkdir()
    if strange == "a file is a link":
        link_at(step / "state.json", tmp_path / "secret")
        (tmp_path / "secret").write_text("{}")
    else:
        name, _, kind = strange.partition(" is a ")
        path = there / {"latest": "checkpoints/latest", "metrics": "metrics.jsonl"}[name]
        path.unlink()
        {"device": link_at, "pipe": pipe_at, "folder": Path.mkdir}[kind](path)
    copy = store.Store(f"file://{there}", out)
    with mock.patch.object(store, "damage", lambda path: None):
        if strange.startswith("metrics"):
            assert copy.fetch() == "step-00000002" and not (out / "metrics.jsonl").exists()
        else:
            with pytest.raises((OSError, UserError), match=r"is no regular file|no checkpoint in the store"):
                copy.fetch()
    assert "is no regular file" in capsys.readouterr().err or strange.startswith("latest")
    assert not list(out.rglob("*.json"))


def test_a_second_run_in_a_folder_is_told_who_has_it(base, tmp_path, monkeypatch):
    config = place(base, tmp_path, parallel="none", steps=3, checkpoint_every=2)
    holder = forkserver().Process(target=hold, args=(tmp_path / "run", tmp_path / "held"))
    holder.start()
    until((tmp_path / "held").exists)
    monkeypatch.setattr(folder, "PATIENCE", 0.2)
    who = f"process {holder.pid} on {socket.gethostname()}, since 20"
    refused(f"another run writes to .*: {who}.*give another --out", loop.train, config)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    holder.kill(), holder.join()  # it goes with its process, however that ends
    loop.train(config)
    loop.train(config)


def hold(run, held):
    taken = folder.acquired(run, 0)
    held.touch()
    time.sleep(60)
    del taken


def test_all_ranks_refuse_a_folder_that_another_run_has(base, undisturbed, tmp_path):
    config = place(base, tmp_path)
    handle = folder.acquired(tmp_path / "run", 0)
    assert run(config) == [ranks.EXIT_MISTAKE] * 2, log(config)
    assert "another run writes to" in log(config)
    handle.release()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert folder.acquired(tmp_path, 0) is None
    said = "cannot be locked (No locks available): a second run could write to it without being noticed"
    assert said in capsys.readouterr().err


def test_a_run_goes_on_from_an_object_store_in_an_empty_folder(base, undisturbed, tmp_path):
    """A pod is taken away with its disk; the next one finds in the store what it needs."""
    uri = (tmp_path / "store").as_uri()
    first = place(base, tmp_path / "pod", store=uri)
    (tmp_path / "pod").mkdir()
    assert run(first, fault=("terminated", 4)) == [ranks.EXIT_PREEMPTED] * 2, log(first)
    there = (tmp_path / "store" / "checkpoints" / "latest").read_text().split()
    assert there == latest(first) == ["step-00000005", "step-00000003"]
    shutil.rmtree(first.out)
    assert run(first) == [0, 0], log(first)
    assert f"fetched step-00000005 from {uri}" in log(first)
    same_run(first, undisturbed)
    kept = {path.name for path in (tmp_path / "store" / "checkpoints").iterdir()}
    assert kept == {"latest", "uploading", *latest(first)}  # others are removed there, too


def test_a_store_names_only_what_is_there_whole(base, undisturbed, tmp_path):
    kept = store.Store((tmp_path / "store").as_uri(), Path(undisturbed.out))
    pipe = kept.fs.pipe_file
    full = lambda path, data: no_space() if path.endswith("latest") else pipe(path, data)
    with mock.patch.object(kept.fs, "pipe_file", side_effect=full), pytest.raises(OSError, match="No space"):
        kept.copy()
    assert kept.names() == []
    assert kept.copy() and not kept.copy()


def test_a_store_that_cannot_serve_is_said(base, tmp_path, monkeypatch):
    """Before data are loaded: a bucket that does not exist was noticed after the last step."""
    missing = mock.Mock(side_effect=FileNotFoundError("The specified bucket does not exist"))
    monkeypatch.setattr(type(memory_store()), "pipe_file", missing)
    monkeypatch.setattr(loop, "load", mock.Mock(side_effect=AssertionError("data were loaded")))
    for changes, said in (
        (dict(store="memory://bucket/run"), "cannot write to the store memory://bucket/run: FileNotFoundError"),
        (dict(store="nothing://here"), "cannot use the store 'nothing://here'"),
        (dict(store="file:///proc/nothing"), "cannot write to the store file:///proc/nothing: "),
    ):
        refused(said, loop.train, place(base, tmp_path, parallel="none", **changes))


@pytest.mark.parametrize("lost", ["latest", "a named one", "the newest's contents", "an upload"])
def test_a_store_in_disorder_gives_the_newest_whole_one(lost, base, undisturbed, tmp_path, capsys):
    kept = store.Store((tmp_path / "store").as_uri(), Path(undisturbed.out))
    kept.copy()
    there, (newest, before) = tmp_path / "store" / "checkpoints", kept.names()
    if lost == "latest":
        (there / "latest").unlink()
    elif lost == "a named one":
        shutil.rmtree(there / newest)
    elif lost == "the newest's contents":
        part = max((there / newest).glob("*.distcp"), key=lambda part: part.stat().st_size)
        part.write_bytes(flipped(part.read_bytes(), 1000))
    else:  # killed while it copied: what is there of it is not looked at, and goes with the next copy
        shutil.copytree(there / newest, there / "step-00000009")
        (there / "step-00000009" / "state.json").unlink()
        (there / "uploading").write_text("step-00000009\n")
    left = sorted(path.name for path in there.glob("step-*"))
    new = store.Store((tmp_path / "store").as_uri(), tmp_path / "new")
    expected = newest if lost in ("latest", "an upload") else before
    assert new.fetch() == expected and found_in(tmp_path / "new" / "checkpoints").name == expected
    assert new.fetch() is None  # what is in the folder wins
    assert ("ignoring checkpoint" in capsys.readouterr().err) == (expected == before)
    assert sorted(path.name for path in there.glob("step-*")) == left
    assert sorted(path.name for path in (tmp_path / "new" / "checkpoints").iterdir()) == ["latest", expected]
    new.copy()
    assert new.names() == [expected] and (there / "step-00000009").exists() is False
    assert (there / before).exists() == (lost != "an upload")  # a store has what the folder has, and what nobody named


def test_copies_that_fail_are_counted(base, tmp_path, monkeypatch):
    memory_store()
    copies, copy = [], store.put

    def fails(*args):
        copies.append(args)
        raise ConnectionError("the store is away")

    monkeypatch.setattr(store, "put", fails), monkeypatch.setattr(store, "PERIOD", 0.01)
    at_step_4 = lambda: [time.sleep(0.05) for _ in range(100) if not copies]
    monkeypatch.setattr(loop._Run, "_step", loop._Run._step)
    at_step(4, at_step_4)
    often = dict(steps=6, checkpoint_every=2, log_every=1, checkpoint_async=False)
    config = place(base, tmp_path, parallel="none", store="memory://bucket/run", **often)
    with pytest.raises(OSError, match="the last checkpoint is in"):
        loop.train(config)
    failures = column(config, "checkpoint_failures")
    assert failures[0] == 0 and 1 <= failures[-1] <= 3
    monkeypatch.setattr(store, "put", copy)


@contextlib.contextmanager
def endpoint_on(host="127.0.0.1", rank=0):
    endpoint = metrics.Endpoint(host, 0, rank)
    try:
        yield endpoint
    finally:
        endpoint.close()


def test_the_endpoint_shows_the_last_numbers_on_the_loopback_address():
    with endpoint_on(rank=3) as endpoint:
        endpoint.values = {"loss": 2.5, "grad_norm": float("nan"), "mfu": None, "tokens": 10}
        get = lambda path: urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}{path}", timeout=10).read().decode()
        shown = [line for line in get("/metrics").splitlines() if not line.startswith("#")]
        values = ("loss", "2.5"), ("gradient_norm", "NaN"), ("tokens_total", "10.0")
        assert shown == [f'liger_{name}{{rank="3"}} {value}' for name, value in values]
        assert "since the last step" in get("/healthz")
    assert TrainConfig().metrics_host == "127.0.0.1" and TrainConfig().metrics_port == 0


@pytest.mark.parametrize(
    "host, asked, status",
    [
        ("127.0.0.1", "localhost", 200),
        ("127.0.0.1", "evil.example", 403),  # a web page whose name leads here
        ("127.0.0.1", "[::1", 403),
        ("localhost", "LOCALHOST:1", 200),
        ("::1", "[::1]:9400", 200),
        ("0.0.0.0", "run-0.training.svc", 200),
    ],
)
def test_a_loopback_endpoint_answers_only_to_names_of_this_machine(host, asked, status):
    with endpoint_on(host) as endpoint:
        answer = endpoint._answer(f"GET /metrics HTTP/1.1\r\nhost: {asked}\r\n\r\n".encode())
        assert answer.split()[1] == str(status).encode()
        with socket.create_connection(("::1" if host == "::1" else "127.0.0.1", endpoint.port), 10) as connection:
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert b"200 OK" in connection.recv(1000)


def test_two_hundred_silent_connections_do_not_keep_a_scrape_away():
    """They are held by one thread, which is idle meanwhile, and closed."""
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.socket()) for _ in range(200)]
        endpoint = stack.enter_context(endpoint_on())
        for connection in idle:
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", endpoint.port))
        until(lambda: len(endpoint._clients) == endpoint.most, 10)
        assert threading.active_count() == before + 1
        endpoint.values = {"loss": 2.5}
        clock = time.pthread_getcpuclockid(endpoint._thread.ident)
        used = time.clock_gettime(clock)
        page = urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=60).read().decode()
        assert 'liger_loss{rank="0"} 2.5' in page
        assert time.clock_gettime(clock) - used < 0.1  # a loop that does not sleep takes all it gets
        until(lambda: not endpoint._clients, 10)
        idle[0].settimeout(10)
        assert idle[0].recv(1) == b""
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"], b"200 OK"),
        ([b"GET /met", b"rics?x=1 HTTP/1.1\r\n", b"Host: [::1]:9\r\n\r", b"\n"], b"200 OK"),
        ([b"GET /healthz HTTP/1.0\r\n\r\n"], b"200 OK"),
        ([b"GET / HTTP/1.0\r\n\r\n"], b"404 Not Found"),
        ([b"POST /metrics HTTP/1.0\r\n\r\n"], b"405 Method Not Allowed"),
        ([b"\xff\x00\r\n\r\n"], b"405 Method Not Allowed"),
        ([b"GET /metrics HTTP/1.0\r\n"], b""),  # and no more
        ([b"x" * 4096] * 40, b""),
    ],
)
def test_the_endpoint_answers_whatever_it_is_sent(parts, status, monkeypatch):
    monkeypatch.setattr(metrics.Endpoint, "rest", 0.001)  # each part is looked at by itself
    monkeypatch.setattr(metrics.Endpoint, "patience", 60 if len(parts) > 4 else 0.5)
    with endpoint_on() as endpoint:
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as connection:
            answer = b""
            with contextlib.suppress(ConnectionError):  # it does not listen to the end of what has none
                for part in parts:
                    connection.sendall(part)
                    time.sleep(0.02)
                while more := connection.recv(4096):
                    answer += more
            assert answer.startswith(b"HTTP/1.0 " + status if status else b"") and bool(answer) == bool(status)
        assert endpoint._thread.is_alive()


@pytest.mark.parametrize(
    "name, said",
    [
        ("watch", "rank 0: there is no watch over progress"),
        ("metrics", "no metrics on 127.0.0.1:"),
        ("store", "checkpoints are copied to the store at the end of the run alone"),
        ("AsyncCheckpoint", "training waits for the checkpoint of step 2"),
    ],
)
def test_a_thread_that_cannot_start_is_said_and_done_without(name, said, base, tmp_path, monkeypatch, capsys):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")  # what Python says where a limit of processes is reached
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    needed = {"metrics": dict(metrics_port=free_port()), "store": dict(store=(tmp_path / "store").as_uri())}
    config = place(base, tmp_path, parallel="none", steps=4, checkpoint_every=2, **needed.get(name, {}))
    assert len(loop.train(config)["losses"]) == 4
    assert f"can't start new thread: {said}" in capsys.readouterr().err
    assert latest(config) == ["step-00000004", "step-00000002"]
    assert name != "store" or (tmp_path / "store" / "checkpoints" / "latest").read_text().split() == latest(config)


def test_a_rendezvous_that_is_taken_is_said(monkeypatch, capsys):
    """Within seconds: a program that does not answer would be waited for without end."""
    monkeypatch.setattr(ranks, "ANSWER", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for nodes in (1, 2):
            there = f"127.0.0.1:{silent.getsockname()[1]}"
            refused(f"rdzv_endpoint {there} is used by another program", ranks._check_endpoint, there, nodes)
    ranks._check_endpoint("localhost:0", 1), ranks._check_endpoint(f"127.0.0.1:{free_port()}", 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(ranks, "ANSWER", 30)
    launcher = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks._check_endpoint(f"127.0.0.1:{launcher.port}", 2)
    assert "is in use: joining the launcher there" in capsys.readouterr().err


DAMAGED = [b"5", b'{"loss": 1}', b"\0" * 4096, b"[" * 100000, b'{"step":1,"lr":"\xff"}']
DAMAGED += [b'{"step": 1' + b"0" * 5000 + b"}"]


def test_lines_of_steps_after_the_checkpoint_are_dropped_and_damaged_ones_left_out(tmp_path, capsys):
    path, line = tmp_path / "metrics.jsonl", b'{"step": %d, "loss": null, "grad_norm": 1.5, "lr": 0.1}'
    # killed while it wrote
    path.write_bytes(b"\n".join([line % 1, *DAMAGED, line % 2, line % 3, b'{"step": 4, "lo']))
    lines = metrics.StepLines(path, 2)
    assert "7 damaged lines are left out, the first is line 2" in capsys.readouterr().err
    lines.append([{"step": 3, "loss": 2.5}])
    found = [(line["step"], line["loss"]) for line in lines.read()]
    assert found[1:] == [(2, pytest.approx(math.nan, nan_ok=True)), (3, 2.5)] and len(found) == 3
    metrics.StepLines(path, 5)
    assert "lines of 3 steps, but the checkpoint was written after step 5" in capsys.readouterr().err


def test_a_cache_of_kernels_can_be_copied_and_read_from_an_image(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from triton import knobs

    from liger_kernel.compile.cache import BASE, LigerTritonFileCacheManager as Manager

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "built"))
    built = Manager("key")
    built.put_group("kernel.json", {name: built.put(name.encode(), name) for name in ("kernel.json", "kernel.cubin")})
    shutil.move(tmp_path / "built", tmp_path / "image")
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "node"))
    assert Manager("key").get_group("kernel.json") is None
    monkeypatch.setenv(BASE, str(tmp_path / "image"))
    found = Manager("key").get_group("kernel.json")
    assert len(found) == 2 and all(Path(path).read_text() == name for name, path in found.items())
    (tmp_path / "image" / "key" / "kernel.cubin").unlink()
    assert Manager("key").get_group("kernel.json") is None  # never half a kernel


def test_a_cache_of_kernels_reads_only_its_own_files_and_shares_them_as_the_umask_says(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from triton import knobs

    from liger_kernel.compile.cache import LigerTritonFileCacheManager as Manager

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    before = os.umask(0o027)
    try:
        assert os.stat(Manager("key").put(b"x", "a.cubin")).st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
    (tmp_path / "outside").write_text("x")
    for names in (
        *(json.dumps({"child_paths": {name: ""}}) for name in ("", ".", "..", "a\0", "../outside")),
        '{"child_paths": {"/etc/hostname": ""}}',
        '{"child_paths": ["a.cubin"]}',
        "[]",
        "[" * 100000,
    ):
        Manager("key").put(names, "__grp__kernel.json", binary=False)
        assert Manager("key").get_group("kernel.json") is None, names[:40]
    path = Path(Manager("key").cache_dir) / "__grp__kernel.json"
    pipe_at(path)
    assert Manager("key").get_group("kernel.json") is None


def launched(config, user_env, *more, machine=None):
    if machine is not None:  # two of them share the one that runs the tests
        user_env = user_env | {"CUDA_VISIBLE_DEVICES": str(machine)}
    config.save_to(f"{config.out}.json")
    argv = [sys.executable, "-m", "liger_kernel.cli", "train", "--config", f"{config.out}.json", *more]
    return subprocess.Popen(
        argv, env=user_env | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ends_with(code, launcher, timeout=240):
    """What it has said by then."""
    output = launcher.communicate(timeout=timeout)[0]
    assert launcher.returncode == code, output
    return output


def under_way(path, *launchers):
    until(lambda: path.exists() or any(launcher.poll() is not None for launcher in launchers))
    assert all(launcher.poll() is None for launcher in launchers), [launcher.communicate()[0] for launcher in launchers]


def launching(command, **changes):
    """Python's arguments that run a command in two processes."""
    code = """
import json, sys
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.ranks import launch_elastic
changes, command = json.loads(sys.argv[1])
sys.exit(launch_elastic(TrainConfig(nproc=2, **changes), command))
"""
    return [sys.executable, "-c", code, json.dumps([changes, command])]


@pytest.mark.parametrize(
    "error, code, said",
    [
        (ConnectionError("the file system is away"), 1, "rank 0: Traceback (most recent call last)"),
        (UserError("no such file: gr\udcffe"), ranks.EXIT_MISTAKE, "rank 0: no such file: gr\\udcffe\n"),
        (RuntimeError("pipe: Too many open files"), 1, "rank 0: this process may not open as many files as it needs"),
    ],
)
def test_the_only_worker_tells_a_crash_from_a_mistake(error, code, said, monkeypatch, capfd):
    """As many do: after a mistake the launcher would not start it again."""
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(loop, "train", mock.Mock(side_effect=error))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train"])
    assert ended.value.code == code
    assert capfd.readouterr().err.startswith(said)


def test_the_launcher_names_a_run_in_the_current_folder_and_writes_nothing_there(tmp_path, monkeypatch):
    """Its workers' first rank has not looked at the folder yet."""
    asked = mock.Mock(side_effect=ZeroDivisionError)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.distributed.elastic.rendezvous.registry.get_rendezvous_handler", asked)
    with mock.patch.dict(os.environ), pytest.raises(ZeroDivisionError):
        ranks.launch_elastic(TrainConfig(nproc=1, out="."))
    assert tmp_path.name in asked.call_args.args[0].run_id and not any(tmp_path.iterdir())


def test_sigterm_before_there_are_workers_is_no_success(monkeypatch, tmp_path):
    stopped = ranks.SignalException("told to stop", sigval=signal.SIGTERM)
    monkeypatch.setattr("torch.distributed.elastic.rendezvous.registry.get_rendezvous_handler", mock.Mock())
    monkeypatch.setattr(ranks._Agent, "run", mock.Mock(side_effect=stopped))
    with mock.patch.dict(os.environ):
        assert ranks.launch_elastic(TrainConfig(nproc=1, out=str(tmp_path)), ["true"]) == ranks.EXIT_TERMINATED


ALONE = """
import os, pathlib, sys, time
from liger_kernel.train import ranks
watched = sys.argv[2] == "watched"
if watched:
    ranks._dies_with_parent = lambda: False

def run(folder):
    aside = folder / (os.environ["RANK"] + ".tmp")
    aside.write_text(str(os.getpid()))
    aside.rename(folder / os.environ["RANK"])
    time.sleep(60)

ranks.reporting(run)(pathlib.Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "how",
    [
        "ours",
        "torchrun",
        *(pytest.param(h, marks=pytest.mark.elastic) for h in ("ours, watched", "ours, through a shell")),
    ],
)
def test_workers_die_with_their_launcher(how, user_env, tmp_path):
    """However it is killed: ranks that train on would write beside those of the next start."""
    (tmp_path / "worker.py").write_text(ALONE)
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path), "watched" if "watched" in how else ""]
    if "shell" in how:
        command = ["sh", "-c", f"{sys.executable} {tmp_path}/worker.py {tmp_path} ''; true"]
    argv = launching(command, out=str(tmp_path))
    if how == "torchrun":
        argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *command[1:]]
    launcher = subprocess.Popen(argv, env=user_env)
    until(lambda: all((tmp_path / rank).exists() for rank in "01") or launcher.poll() is not None)
    workers = [int((tmp_path / rank).read_text()) for rank in "01"]
    launcher.kill(), launcher.wait()
    gone = lambda pid: (
        not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )
    try:
        until(lambda: all(map(gone, workers)), 10)
    finally:
        for pid in workers:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.elastic
def test_a_launcher_starts_killed_workers_again(base, undisturbed, tmp_path, user_env):
    """And they meet, which by default they do not: they find the addresses of the workers before
    them. A static rendezvous from the environment would not help, either."""
    config = place(base, tmp_path, log_every=1, checkpoint_async=False)
    env = user_env | dict(PET_MASTER_ADDR="127.0.0.1", PET_MASTER_PORT=str(free_port()))
    launcher = launched(config, env | dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0"), "--nproc", "2")
    under_way(checkpoints_of(config) / "latest", launcher)
    os.kill(children_of(launcher.pid)[-1], signal.SIGKILL)
    output = ends_with(0, launcher)
    assert "resuming after step" in output
    same_run(config, undisturbed)


@pytest.mark.elastic
def test_sigterm_to_a_worker_of_a_launcher_is_no_crash(base, tmp_path, user_env):
    config = place(base, tmp_path, log_every=1, steps=3000)
    launcher = launched(config, user_env, "--nproc", "2")
    under_way(tmp_path / "run" / "metrics.jsonl", launcher)
    os.kill(children_of(launcher.pid)[-1], signal.SIGTERM)
    output = ends_with(ranks.EXIT_PREEMPTED, launcher, 60)
    assert "resuming" not in output and latest(config)[0] == f"step-{len(losses(config)):08d}"


@pytest.mark.elastic
@pytest.mark.parametrize("told", [0, 1], ids=["the first", "the second"])  # the first keeps the rendezvous
def test_sigterm_to_one_of_two_machines_stops_both(told, base, tmp_path, user_env):
    config = place(base, tmp_path, log_every=1, steps=3000, timeout=40)
    port = free_port()
    flags = ("--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    launchers = [launched(config, user_env, *flags, machine=0)]
    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    launchers.append(launched(config, user_env, *flags, machine=1))
    under_way(tmp_path / "run" / "metrics.jsonl", *launchers)
    launchers[told].send_signal(signal.SIGTERM)
    outputs = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [ranks.EXIT_PREEMPTED] * 2, outputs
    assert latest(config)[0] == f"step-{len(losses(config)):08d}"


@pytest.mark.elastic
def test_a_launcher_does_not_repeat_a_mistake(base, tmp_path, user_env):
    launcher = launched(place(base, tmp_path, report="nope"), user_env, "--nproc", "2")
    output = ends_with(ranks.EXIT_MISTAKE, launcher, 60)
    assert 1 <= output.count("got 'nope'") <= 2, output  # of two ranks, the second may be ended before it says so


WORKER = """
import os, pathlib, signal, sys, time
rank, again, folder = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", pathlib.Path(sys.argv[1])
if {install}:
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep({saving}), os._exit({code})))
(folder / f"started-{{rank}}-{{int(again)}}").touch()
{then}
time.sleep(60)
"""  # noqa: E501
# what a worker does: whether it handles SIGTERM, the seconds it then saves, its exit code, what it
# does by itself; the launcher's exit code
ENDS = {
    "saved": (("True", 1, 75, ""), "TERM", 75),
    "finished": (("True", 1, 0, ""), "TERM", 0),
    "not saved": (("False", 0, 0, ""), "TERM", 143),
    "failed": (("True", 0, 3, ""), "TERM", 3),
    "too slow": (("True", 60, 75, ""), "TERM", 143),
    "interrupted": (("False", 0, 0, ""), "INT", 130),
    "the last is still ending": (("rank == 0", 0, 75, "rank == 0 and os._exit(75)"), None, 75),
    "mistake": (("True", 0, 1, "os._exit(2)"), None, 2),
    "crash": (("False", 0, 0, "os._exit(0 if again else 1)"), None, 0),
}
BESIDE = "time.sleep(rank / 2); os._exit(0 if again else 1 + 74 * rank)"
ENDS["a crash beside a preemption"] = ("True", 0, 75, BESIDE), None, 0


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in ("saved", "mistake") else pytest.mark.elastic) for name in ENDS]
)
def test_exit_codes_of_a_launcher(case, user_env, tmp_path):
    (install, saving, code, then), told, expected = ENDS[case]
    worker = WORKER.format(install=install, saving=saving, code=code, then=then)
    command = [sys.executable, "-c", worker, str(tmp_path)]
    launch = launching(command, max_restarts=1, timeout=1, out=str(tmp_path))
    launcher = subprocess.Popen(launch, env=user_env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if told:
        until(lambda: all((tmp_path / f"started-{rank}-0").exists() for rank in (0, 1)) or launcher.poll() is not None)
        launcher.send_signal(getattr(signal, f"SIG{told}"))
    output = ends_with(expected, launcher, 60)
    assert told != "INT" or "SignalException" not in output
    assert any(tmp_path.glob("started-*-1")) == ("crash" in case), output


@pytest.mark.elastic
def test_a_lost_machine_costs_a_restart(base, undisturbed, tmp_path, user_env):
    """Two launchers stand for two machines; one is killed with its worker, one goes on alone."""
    config = place(base, tmp_path, log_every=1, checkpoint_every=1, checkpoint_async=False, steps=30)
    port = free_port()
    flags = ("--nproc", "1", "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    first = launched(config, user_env, *flags, machine=0)
    # this one keeps the rendezvous, whichever is lost
    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    second = launched(config, user_env, *flags, machine=1)
    under_way(tmp_path / "run" / "metrics.jsonl", first, second)
    until(lambda: len(losses(config)) > 3 or first.poll() is not None)
    lost = children_of(second.pid)
    assert lost, "the second machine took no part"
    second.kill()
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    output = ends_with(0, first, 400)
    assert "resuming after step" in output
    assert rows(config) == [[6 * i, 6 * i + 6] for i in range(30)]


MOMENTS = [("killed", step) for step in (1, 3, 5, 6, 8)] + [("killed in save", number) for number in (1, 2, 3)]


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def calm(request, base, tmp_path_factory):
    config = place(base, tmp_path_factory.mktemp("calm"), parallel=request.param)
    assert run(config) == [0, 0], log(config)
    return config


@pytest.mark.elastic
@pytest.mark.parametrize("fault", MOMENTS, ids=lambda fault: f"{fault[0]}-{fault[1]}".replace(" ", "-"))
def test_no_moment_is_a_bad_one_to_be_killed_in(fault, calm, base, tmp_path):
    config = place(base, tmp_path, parallel=calm.parallel)
    assert run(config, fault=fault)[1] == -signal.SIGKILL, log(config)
    assert run(config) == [0, 0], log(config)
    same_run(config, calm)
