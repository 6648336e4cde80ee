"""The trainers that `liger train` can hand a run to: same rows, same losses, same weights as its
own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from small_runs import OTHER_TRAINERS, forget_the_newest, needs, refused, save_model, small_run, write_jsonl

from liger_kernel import cli
from liger_kernel.train import checkpoint, hf, loop, ranks
from liger_kernel.train.session import Session, learning_rate

pytestmark = pytest.mark.usefixtures("references")
CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "uno, dos"}]
others = pytest.mark.parametrize("trainer", OTHER_TRAINERS)


@pytest.fixture
def config(tmp_path):
    """Rows of different lengths: tokens of a step weigh alike only if all of it is counted."""
    records = [{"messages": CHAT * (1 + i % 3)} for i in range(24)]
    sizes = dict(layers=2, length=48, batch=2, accumulate=2, steps=6, warmup=2, eval_fraction=0.1, eval_every=3)
    return small_run(tmp_path, records, out=str(tmp_path / "torch"), save=str(tmp_path / "saved"), **sizes)


def by(trainer, config, **changes):
    return replace(config, trainer=trainer, out=f"{config.out}-{trainer}", save=f"{config.save}-{trainer}", **changes)


def weights(config):
    from safetensors.torch import load_file

    return load_file(f"{config.save}/model.safetensors")


@others
def test_trains_as_our_own(trainer, config):
    other = by(trainer, config)
    expected, found = loop.train(config), loop.train(other)
    assert found["trainer"] == trainer and expected["trainer"] == "torch"
    for name in ("losses", "gradient_norms", "learning_rates"):
        assert len(found[name]) == config.steps
        assert found[name] == pytest.approx(expected[name], rel=2e-4), name
    assert [e["step"] for e in found["evaluations"]] == [e["step"] for e in expected["evaluations"]] == [3, 6]
    # transformers' mean is over batches, not tokens
    rel = 0.1 if trainer == "hf" else 1e-4
    assert [e["loss"] for e in found["evaluations"]] == pytest.approx(
        [e["loss"] for e in expected["evaluations"]], rel=rel
    )
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert found["tokens_per_second"] > 0 and found["peak_memory"] > 0
    torch.testing.assert_close(weights(other), weights(config), rtol=1e-3, atol=1e-4)
    assert json.loads(Path(other.out, "metrics.json").read_text())["losses"] == found["losses"]


@others
def test_a_preempted_and_crashed_run_goes_on(trainer, config, monkeypatch, tmp_path):
    """It loses no step to the preemption, and to the crash those since the newest checkpoint."""
    calm = by(trainer, config, checkpoint_every=2, checkpoint_keep=2, eval_fraction=0.0, steps=9)
    expected = loop.train(calm)["losses"]
    again = replace(calm, out=str(tmp_path / "stopped"), save=str(tmp_path / "again"))
    names = {"hf": ("_HFCallback", "on_step_end"), "lightning": ("_LightningCallback", "on_train_batch_end")}
    callback, name = names[trainer]
    callback = getattr(importlib.import_module(f"liger_kernel.train.{trainer}"), callback)
    before, preempted, crashed = getattr(callback, name), [], []

    def disturbed(self, *args, **options):
        step = (args[1] if trainer == "hf" else args[0]).global_step
        if step == 2 and not preempted:
            preempted.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
        if step == 7 and not crashed:
            crashed.append(step)
            raise RuntimeError("crash")
        return before(self, *args, **options)

    monkeypatch.setattr(callback, name, disturbed)
    with pytest.raises(ranks.Preempted, match="stopped after step 3 by SIGTERM"):
        loop.train(again)
    with pytest.raises(RuntimeError, match="crash"):
        loop.train(again)
    kept = {"hf": "checkpoint-{}", "lightning": "step-{:08d}.ckpt"}[trainer]
    folder = Path(again.out) / f"checkpoints-{trainer}"
    assert all((folder / kept.format(step)).exists() for step in (4, 6))
    assert loop.train(again)["losses"] == pytest.approx(expected[6:], rel=1e-6)
    assert {path.name for path in folder.iterdir()} == {kept.format(8), kept.format(9), "identity.json"}
    for name, weight in weights(again).items():
        torch.testing.assert_close(weight, weights(calm)[name], rtol=1e-6, atol=1e-7)
    refused("holds checkpoints", loop.train, replace(again, resume=False))


@others
def test_damaged_checkpoints_are_passed_over(trainer, config, capfd):
    """One of the Trainer's whose save was killed, and one of each trainer with a flipped bit."""
    again = by(trainer, config, checkpoint_every=2, checkpoint_keep=3, eval_fraction=0.0)
    expected = loop.train(again)["losses"]
    folder, left = Path(again.out) / f"checkpoints-{trainer}", {"hf": 2, "lightning": 4}[trainer]
    if trainer == "hf":
        (folder / "checkpoint-6" / "trainer_state.json").unlink()
    part = folder / {"hf": "checkpoint-4/optimizer.pt", "lightning": "step-00000006.ckpt"}[trainer]
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert loop.train(again)["losses"] == pytest.approx(expected[left:], rel=1e-6)
    assert capfd.readouterr().err.count("ignoring checkpoint") == {"hf": 2, "lightning": 1}[trainer]


@others
@pytest.mark.parametrize("steps, timed", [(2, 2), (5, 3)])  # the first two count where there are no others
def test_tokens_per_second_are_of_the_steps_that_are_timed(steps, timed, trainer, config):
    write_jsonl(Path(config.data), [{"text": "one two three " * 60}] * 8)
    found = loop.train(by(trainer, config, steps=steps, eval_fraction=0.0))
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(timed * 4 * config.length)


@others
def test_what_may_change_between_starts(trainer, config):
    """Batches: a step keeps its rows, else the run would go on at another place in the data."""
    write_jsonl(Path(config.data), [{"instruction": f"{i}", "output": f"{i}" * (i % 7 + 1)} for i in range(30)])
    config = replace(config, eval_fraction=0.0, schedule="constant")
    expected = loop.train(by(trainer, config))["losses"]
    first = by(trainer, config, steps=3, checkpoint_every=3)
    first = replace(first, out=f"{first.out}-again", save=None)
    loop.train(first)
    for changes, said in (
        (dict(global_batch=8), "global_batch 4 there, 8 here"),
        (dict(seed=1), "seed 0 there, 1 here"),
    ):
        refused(f"is of other data: {said}", loop.train, replace(first, steps=6, **changes))
    found = loop.train(replace(first, steps=6, batch=1, accumulate=1))["losses"]
    assert found == pytest.approx(expected[3:], rel=1e-5)
    changed = replace(first, lr=3e-3, weight_decay=0.0, steps=9)
    assert loop.train(changed)["learning_rates"] == pytest.approx([learning_rate(changed, step) for step in (6, 7, 8)])


STATES = ['{"global_step": 5}', '{"global_step": "4"}', "[" * 100_000, "[4]", '{"global_step": 4, "x": 1}']


@pytest.mark.parametrize("strange", ["a pipe", "a link", *STATES], ids=lambda strange: strange[:24])
def test_checkpoints_of_strangers_are_said_to_be_damaged(strange, tmp_path):
    path = tmp_path / "checkpoint-4"
    path.mkdir()
    state = path / "trainer_state.json"
    state.write_text('{"global_step": 4}')
    assert hf.damage(path) is None
    if strange == "a pipe":
        os.mkfifo(path / "optimizer.pt")
        assert checkpoint.torn(path / "optimizer.pt") == "is no regular file"
    elif strange == "a link":
        (path / "rng_state.pth").symlink_to("/dev/zero")
    else:
        state.write_text(strange)
    assert hf.damage(path)


@needs("lightning")
def test_a_checkpoint_of_lightnings_that_would_run_something_is_refused(config, tmp_path):
    again = by("lightning", config, steps=2, checkpoint_every=2, eval_fraction=0.0)
    loop.train(again)
    path = Path(again.out) / "checkpoints-lightning" / "step-00000002.ckpt"
    assert len(loop.train(replace(again, steps=4))["losses"]) == 2

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save(torch.load(path, weights_only=True) | {"evil": Evil()}, path.with_name("step-00000005.ckpt"))
    refused(r"step-00000005.ckpt is damaged, or holds objects", loop.train, replace(again, steps=6))
    assert not (tmp_path / "evil").exists()


def test_one_process_takes_one_gpu(config, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    alone = ranks.Ranks(0, 1, None, None)
    session = Session(by("hf", config), None, None, torch.device("cuda"), "fp32", alone, ranks.Stop())
    args = hf.arguments(session, tmp_path, 4)
    assert args.n_gpu == 1 and args.train_batch_size == config.batch


@needs("lightning")
def test_lightning_is_told_of_several_machines(config, monkeypatch):
    from liger_kernel.train import data, lightning

    trainer = mock.Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(lightning.L, "Trainer", trainer)
    monkeypatch.setattr(ranks.Ranks, "agreed", lambda self, value: value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    two, many = by("lightning", config, parallel="ddp"), ranks.Ranks(0, 16, None, None)
    model = torch.nn.Linear(1, 1)
    model.config = transformers.LlamaConfig()
    with pytest.raises(ZeroDivisionError):
        lightning.run(Session(two, data.load(two), model, torch.device("cpu"), "fp32", many, ranks.Stop()))
    assert trainer.call_args.kwargs.items() >= dict(devices=8, num_nodes=2).items()


@pytest.mark.parametrize("trainer", ["torch", *OTHER_TRAINERS])
def test_padding_and_ends_that_a_tokenizer_lacks(trainer, config, tmp_path, capsys):
    """What chats are padded with plays no part: nothing, or an id that the model lacks."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    chats = [[("user", "a " * n), ("assistant", "b c " * n)] for n in range(1, 9)]
    records = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    write_jsonl(Path(config.data), records)
    losses, model = {}, None
    for name, pad, special in (
        ("neither", 7, {}),
        ("pad", 7, {"pad_token": "P"}),
        ("end", 7, {"eos_token": "P"}),
        ("far", 50, {"pad_token": "P"}),
    ):
        words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "c": 3, "P": pad}, unk_token="?"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", **special)
        tokenizer.save_pretrained(tmp_path / name)
        model = model or save_model(tmp_path / "model", tokenizer, vocab_size=8, hidden_size=16, intermediate_size=16)
        places = dict(model=model, tokenizer=str(tmp_path / name), out=str(tmp_path / "out" / name), save=None)
        one = replace(config, **places, trainer=trainer, steps=2, eval_fraction=0.2)
        losses[name] = [loop.train(one)[curve] for curve in ("losses", "evaluations")]
        assert ("the tokenizer has no end token" in capsys.readouterr().out) == (name != "end")
    assert losses["neither"] == losses["pad"] == losses["far"] != losses["end"]  # which an answer learns


@pytest.mark.parametrize("trainer", ["torch", *OTHER_TRAINERS])
def test_a_finished_run_started_again_keeps_its_numbers(trainer, config, capsys):
    short = by(trainer, config, steps=5, log_every=10, checkpoint_every=2)
    found = loop.train(short)
    # of transformers, the mean of the steps since the line before
    assert len(found["losses"]) == (1 if trainer == "hf" else 5)
    learnt = weights(short)
    shutil.rmtree(short.save)
    assert loop.train(short) == found
    assert json.loads(Path(short.out, "metrics.json").read_text()) == found
    assert all(torch.equal(weight, learnt[name]) for name, weight in weights(short).items())
    Path(short.out, "metrics.json").unlink()
    short.save_to(Path(short.out) / "short.json")
    capsys.readouterr()
    assert cli.main(["train", "--config", str(Path(short.out) / "short.json")]) == 0
    said = capsys.readouterr().out
    assert "no step was left to make" in said and "tokens/s" not in said


@pytest.mark.parametrize("trainer", ["torch", *OTHER_TRAINERS])
def test_a_loss_that_is_not_finite_ends_the_run(trainer, config):
    config = by(trainer, config, lr=1e20, warmup=0, grad_clip=0.0)
    refused(r"is (nan|inf) at step \d+: lower the learning rate", loop.train, config)


def test_batches_that_do_not_fit_are_said(config):
    refused("global_batch must be a multiple of batch x ranks = 2, got 3", loop.train, by("hf", config, global_batch=3))


@others
@pytest.mark.slow  # torchao compiles a step for each shape; test_optimizers.py has that of our own loop
@needs("torchao")
def test_8_bit_moments_learn_and_come_back(trainer, config):
    config = replace(config, hidden=64, eval_every=0)  # moments of 4096 values or more have 8 bits
    eight = by(trainer, config, optimizer="adamw-8bit", checkpoint_every=3)
    expected, found = loop.train(config), loop.train(eight)
    assert found["losses"] != expected["losses"]
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=2e-2, atol=0)
    learnt = weights(eight)
    forget_the_newest(eight)
    assert loop.train(eight)["losses"] == pytest.approx(found["losses"][3:], rel=1e-6)
    torch.testing.assert_close(weights(eight), learnt)


@needs("deepspeed")
@pytest.mark.parametrize("parallel", ["fsdp2", "deepspeed-z2", "deepspeed-z3"])
def test_sharded_over_two_ranks(parallel, config, user_env):
    """The losses of one process, whose rows are those of both ranks."""
    expected = loop.train(config)
    two = by("hf", config, parallel=parallel, accumulate=1, nproc=2, max_restarts=0)
    two.save_to(Path(two.out) / "two.json")
    argv = [sys.executable, "-m", "liger_kernel.cli", "train", "--config", str(Path(two.out) / "two.json")]
    env = user_env | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(Path(two.out, "metrics.json").read_text())
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    learnt = weights(two)
    assert learnt.keys() == weights(config).keys()
    for name, weight in weights(config).items():
        torch.testing.assert_close(learnt[name], weight, rtol=1e-2, atol=1e-3)
