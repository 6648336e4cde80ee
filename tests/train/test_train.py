"""The runtime layer: configs, data and masks, the loop, and the demo."""

import codecs
import contextlib
import csv
import dataclasses
import gc
import importlib.machinery
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import sys
import threading
import time
import traceback
import types
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import NoneType
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch

pytest.importorskip("transformers")

import small_runs
import transformers
from processes import forkserver, run_code
from quick import further
from small_runs import RUN, refused, save_model, small_run, write_jsonl

from liger_kernel import cli
from liger_kernel.parallel.sharded_head import observed_inside
from liger_kernel.train import (
    checkpoint,
    data as data_module,
    demo,
    hub,
    loop,
    metrics,
    preview,
    ranks,
    records,
    redact,
    session,
    store,
    stream,
    tokenise as tokenising,
)
from liger_kernel.train.config import TrainConfig, UserError, from_flags, read_flags
from liger_kernel.train.data import load
from liger_kernel.train.files import COUNT, NUMBER, fits
from liger_kernel.train.loop import evaluate
from liger_kernel.train.measure import PeakMemory
from liger_kernel.train.model import attend, build, device_and_precision, flags_for
from liger_kernel.train.records import Records, standard_library
from liger_kernel.train.token_rows import IGNORE, Data, TokenRows
from liger_kernel.train.tokenise import CHAT_TEMPLATE, tokenise, train_bpe

pytestmark = pytest.mark.usefixtures("references")
TEXT = small_runs.TEXT * 40
TINY = RUN | dict(layers=2)
CHATS = [
    [("user", "hi"), ("assistant", "yes")],
    [("system", "be brief"), ("user", "one"), ("assistant", "uno"), ("user", "two"), ("assistant", "dos")],
    [("user", "a longer question, of more tokens"), ("assistant", "no")],
    [("user", "a"), ("assistant", "an answer that is longer than its question")],
]
CHATS = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in CHATS]


@pytest.fixture
def tokenizer():
    """One token a byte: what a label covers can be counted."""
    tokenizer = train_bpe([TEXT], 257)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def config(tmp_path):
    return small_run(tmp_path, [{"text": TEXT}] * 4, layers=2, cache=None)


@pytest.mark.parametrize("name", ["c.json", "c.yaml", "c.yml"])
def test_a_config_survives_its_file(name, tmp_path):
    config = TrainConfig(model="some/model", lr=3e-4, rope=False, steps=7, deterministic=True)
    config.save_to(tmp_path / name)
    assert TrainConfig.load(tmp_path / name) == config


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("steps: 5\nbatch: 2\nlr: 1e-4\nmin_lr: 0\n")
    config = from_flags(["--config", str(tmp_path / "c.yaml"), "--batch", "3"])
    assert (config.steps, config.batch, config.lr, config.min_lr) == (5, 3, 1e-4, 0.0)
    assert replace(config, steps=100, batch=8, lr=None, min_lr=0.1) == TrainConfig()


def test_every_field_is_a_flag():
    argv, expected = [], {}
    for field in dataclasses.fields(TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        if "bool" in field.type:
            argv, expected[field.name] = [*argv, "--no-" + flag[2:]], False
        else:
            value = {"int": 64, "float": 0.5}.get(field.type.split(" ")[0], (field.metadata["choices"] or ["x"])[-1])
            argv, expected[field.name] = [*argv, flag, str(value)], value
    assert read_flags(argv, "liger train", "", TrainConfig()) == expected | {"config": None}


def test_names_and_underscores_of_others_are_ours():
    theirs = (
        "--model_name_or_path m --learning-rate=3e-4 --max-seq-length 64 --per_device_train_batch_size 2 --lora_r 8"
    )
    theirs += " --dataset_name d --num-train-epochs 1.5 --gradient_accumulation_steps 4 --output_dir o --weight_decay 0"
    ours = "--model m --lr 3e-4 --length 64 --batch 2 --lora 8 --data d --epochs 1.5 --accumulate 4 --out o --save o"
    assert from_flags(theirs.split()) == from_flags([*ours.split(), "--weight-decay", "0"])
    assert from_flags(["--save", "s", "--output-dir", "o"]).save == "s"  # what is named by our name stays


def test_passes_over_the_data_are_steps(tmp_path):
    (tmp_path / "c.yaml").write_text("epochs: 2\n")
    config = from_flags(["--config", str(tmp_path / "c.yaml")])
    assert [config.in_steps(rows, 30).steps for rows in (4, 30, 100)] == [15, 2, 1]
    assert TrainConfig(epochs=0.1).in_steps(1, 30).steps == 3  # 0.1 * 30 > 3
    assert config.in_steps(4, 30).epochs == 0 and TrainConfig().in_steps(4, 30) == TrainConfig()
    named = from_flags(["--config", str(tmp_path / "c.yaml"), "--steps", "7"])  # flags win over the file
    assert (named.steps, named.epochs) == (7, 0)


def test_only_kernels_named_are_passed_on():
    assert TrainConfig().kernel_flags == {}
    assert from_flags(["--no-rope", "--rms-norm"]).kernel_flags == {"rope": False, "rms_norm": True}
    assert from_flags(["--graphs"]).kernel_flags == {"graphs": "auto"}
    assert from_flags(["--no-graphs"]).kernel_flags == {"graphs": False}


@pytest.mark.parametrize(
    "text, message",
    [
        ("steps: 1.5", "steps must be of type int, got 1.5"),
        ("steps: true", "steps must be of type int, got True"),
        ("- 1", "must hold names and values, got a list"),
        ("a: [", "is not valid YAML"),
        ("steps: 0", "steps must be at least 1, got 0"),
        ("limit: 0", "limit must be at least 1, got 0"),
        ("intermediate: -4", "intermediate must be at least 1, got -4"),
        ("metrics_port: 70000", r"metrics_port must be in \[0, 65535\], got 70000"),
        ("seed: -1", "seed must be in"),
        ("seed: 4294967296", "seed must be in"),
        ("grad_clip: .nan", "grad_clip must be at least 0, got nan"),
        ("stream: .nan", "stream must be at least 0, got nan"),
        ("min_lr: 2", r"min_lr must be in \[0, 1\], got 2.0"),
        ("lr: 0", "lr must be positive, got 0.0"),
        ("lr: .nan", "lr must be positive, got nan"),
        ("beta2: 1", r"beta2 must be in \[0, 1\), got 1.0"),
        ("heads: 3", "heads must divide hidden"),
        ("kv_heads: -1", "kv_heads must be at least 1, got -1"),
        ("store: s3://b/run", "store needs trainer torch and checkpoint_every"),
        ("{steps: 5, epochs: 1}", "steps and epochs exclude each other"),
        ("{epochs: 1, stream: 4}", r"epochs needs stream 0, got 4: .* give steps"),
        ("epochs: -1", "epochs must be at least 0"),
        ("columns: question", "columns must be THEIRS=OURS with commas between; got 'question'"),
        ("columns: q=promt", r"columns: 'promt' is no name of ours, which are text, .*; did you mean prompt\?"),
        ("columns: a=text,b=text", "columns must name each column once"),
        ("{cross_entropy: true, fused_linear_cross_entropy: true}", "exclude each other"),
        ("lr: 1" + "0" * 400, "lr must be of type float, got 10{79}$"),
        ("weight_decay: .inf", "weight_decay must be at least 0 and at most 1000000000, got inf"),
        ("timeout: 1" + "0" * 400, "timeout must be at least 1 and at most 1000000000, got 10{79}$"),
        ("lr: 1\nlr: 2", "the name 'lr' stands there twice"),
        ("model: [&a [x], *a]", r"aliases are not read \(\*a\): write the value where it is used"),
        (r'out: "a\0b"', r"out must be text without NUL and without halves of characters, got 'a\\x00b'"),
        (r'data: "a\ud800b"', "data must be text without NUL"),
        (r'out: "a\udcffb"', "out must be a name in UTF-8"),
    ],
)
def test_mistakes_in_a_config_are_named(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    refused(message, TrainConfig.load, tmp_path / "c.yaml")


def test_a_json_file_may_begin_with_a_bom_and_names_nothing_twice(tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(codecs.BOM_UTF8 + b'{"steps": 3}')
    assert TrainConfig.load(path).steps == 3
    path.write_text('{"steps": 3, "steps": 4}')
    refused("the name steps stands there twice", TrainConfig.load, path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv", "a.txt", "a.json", "a.yaml"])
@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_what_never_ends_is_not_read(kind, name, tmp_path):
    os.mkfifo(tmp_path / name) if kind == "pipe" else os.symlink("/dev/zero", tmp_path / name)
    data = (records.files_of, lambda _: records.files_of(str(tmp_path)))
    both = {"a.json": (TrainConfig.load, *data), "a.yaml": (TrainConfig.load,)}
    for read in both.get(name, data):
        refused(f"{name} is no regular file, but a pipe, a device or a socket", read, str(tmp_path / name))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "other"])
def test_a_model_or_tokenizer_whose_file_never_ends_is_not_read(name, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    for read in (lambda: tokenising.loaded(tmp_path), lambda: hub.configuration(str(tmp_path))):
        refused(f"{name} is no regular file, but a pipe", read)
    (tmp_path / name).unlink()
    refused("cannot load the tokenizer", tokenising.loaded, tmp_path)


def test_forms_of_values_in_files():
    part, line = checkpoint.PART, {"step": 1, "loss": None, "grad_norm": 1, "lr": 0.5, "more": "x"}
    for form, right, wrong in (
        (COUNT, [3], [-1, 10**30, True, "3"]),
        ((NoneType, bool), [None], [0]),
        (NUMBER, [math.nan], [10**400]),
        (part, [[1, [0, 0, 0], True, "x"]], [[1, [0, 0], True, "x"], [1, [0, 0, 0], 1, "x"], [1]]),
        (metrics.LINE, [line], [{"step": 0}, {"loss": 1.0}, []]),
    ):
        assert all(fits(value, form) for value in right) and not any(fits(value, form) for value in wrong), form


# of the last two, the files are shorter than it says: the disk has lost what was written to them
@pytest.mark.parametrize("known", [{"place": 3}, {"ids": 10**30}, "[" * 9**6, None, {"ids": 9}, {"lengths": 9}])
def test_a_strange_draft_begins_anew(known, tmp_path):
    for name in ("ids", "labels", "lengths"):
        (tmp_path / name).write_bytes(bytes(32))
    state = tmp_path / "state.json"
    whole = {"place": [30, 0, 30], "chats": False, "silent": 0, "late": 0, "ids": 8, "labels": 0, "lengths": 2}
    state.write_text(json.dumps(whole))
    assert tokenising.Draft(tmp_path)._known() == whole
    state.unlink()
    if known is None:
        os.mkfifo(state)
    else:
        known = whole | known if isinstance(known, dict) else known
        state.write_text(known if isinstance(known, str) else json.dumps(known))
    assert tokenising.Draft(tmp_path).place == records.BEGIN


@pytest.mark.parametrize("part", [None, "{", "[1]", "[" * 100_000, "pipe"])
def test_a_strange_part_of_a_stream_is_said(part, tmp_path):
    path = tmp_path / "part-000000.safetensors"
    safetensors.torch.save_file({"ids": torch.zeros(1)}, path, {"part": part} if part else {"x": "y"})
    if part == "pipe":
        path.unlink(), os.mkfifo(path)
    refused(r"holds no part of rows: .*; remove it|is no regular file, but a pipe", stream.described, path)
    refused(r"holds no rows of tokens|is no regular file, but a pipe", TokenRows.read, path)


@pytest.mark.parametrize("content", ["[]", "{", '{"global_batch": 0}', None])
def test_a_damaged_identity_is_said_and_damaged_numbers_are_no_ones(content, config, tmp_path):
    path = tmp_path / "identity.json"
    os.mkfifo(path) if content is None else path.write_text(content)
    for damaged in (path, tmp_path / "none"):
        refused("which says of what data and model the checkpoints are, is damaged", session._identity, damaged)
    config = replace(config, out=str(tmp_path))
    whole = {"tokens_per_second": 1.0, "peak_memory": 1, "memory_kind": "x"}
    for numbers in (
        content,
        *(json.dumps({"trainer": config.trainer, "losses": [loss], **whole}) for loss in ("x", None, 10**400)),
    ):
        (tmp_path / "metrics.json").unlink(missing_ok=True)
        os.mkfifo(tmp_path / "metrics.json") if numbers is None else (tmp_path / "metrics.json").write_text(numbers)
        assert session.Session(config, *[None] * 4, mock.Mock(first=True), None).finished() is None


def test_a_prompt_is_context_and_its_completion_is_learnt(tokenizer):
    """As text, with no chat template; as turns, whose answers in the prompt are context, too."""
    turns = [
        {"role": role, "content": content} for role, content in (("user", "a"), ("assistant", "no"), ("user", "b"))
    ]
    answer = {"role": "assistant", "content": "yes"}
    end, asked = tokenizer.eos_token, "### User:\nAdd."
    first = f"### System:\nbe brief\n\n### User:\none\n\n### Assistant:\nuno{end}"
    for record, whole, learnt in (
        ({"prompt": "Q: a\nA:", "completion": " yes"}, f"Q: a\nA: yes{end}", f" yes{end}"),
        (
            {"instruction": "Add.", "input": "1, 2", "output": "3"},
            f"{asked}\n\n1, 2\n\n### Assistant:\n3{end}",
            f"3{end}",
        ),
        ({"instruction": "Add.", "input": "", "output": "3"}, f"{asked}\n\n### Assistant:\n3{end}", f"3{end}"),
        ({"prompt": turns, "completion": [answer]}, None, f"yes{end}"),
        (CHATS[1], f"{first}\n\n### User:\ntwo\n\n### Assistant:\ndos{end}", f"uno{end}dos{end}"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "c"}]}, None, f"c{end}"),
        ({"conversations": [turns[0], answer]}, None, f"yes{end}"),  # of that name, in the other form
    ):
        rows = tokenise([record], tokenizer, 200)
        assert tokenizer.decode(rows.labels[rows.labels != IGNORE]) == learnt
        assert whole is None or tokenizer.decode(rows.ids) == whole
    tokenizer.bos_token = "a"  # a text begins with it; what is cut off has no end
    cut = tokenise([{"prompt": "Q", "completion": "yes"}] * 2, tokenizer, 4)
    assert [tokenizer.decode(cut.ids[:4]), cut.labels[:2].tolist()] == ["aQye", [IGNORE] * 2]


def test_what_others_call_a_column(config, tmp_path):
    data = write_jsonl(tmp_path / "qa.jsonl", [{"question": "q", "answer": "a", "id": 1, "prompt": "old"}])
    found = Records(replace(config, data=data, columns="question=prompt,answer=completion"))
    assert list(found) == [{"id": 1, "prompt": "q", "completion": "a"}]


def test_a_template_that_rewrites_earlier_turns_masks_them(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }} A {% else %}{{ "
        "'[last]' if loop.last }}{{ m.content }};{% endif %}{% endfor %}"
    )
    rows = tokenise([{"messages": CHATS[1]["messages"][1:]}], tokenizer, 200)
    assert tokenizer.decode(rows.ids) == "Q one A uno;Q two A [last]dos;"
    assert tokenizer.decode(rows.labels[rows.labels != IGNORE]) == "[last]dos;"


def test_texts_of_a_row_are_documents_by_themselves(tokenizer):
    rows = tokenise([{"text": "abcd"}, {"text": "e"}, {"text": "hij"}], tokenizer, 4, "documents")
    a, b, c, d, e, h = (tokenizer.encode(t)[0] for t in "abcdeh")
    end, no = tokenizer.eos_token_id, IGNORE
    assert rows.ids.tolist() == [a, b, c, d, end, e, end, h]  # j does not fill a row
    assert rows.labels.tolist() == [no, b, c, d, no, no, end, no]
    assert rows.positions.tolist() == [0, 1, 2, 3, 0, 0, 1, 0]
    assert rows.count([0, 1]) == (8, 4)


def test_eager_attention_that_a_run_names():
    """It is Transformers', also in families whose eager attention has a kernel; other families
    have no such flag."""
    assert flags_for(TrainConfig(attention="eager"), "llama") == {} == flags_for(TrainConfig(), "gpt_oss")
    assert flags_for(TrainConfig(attention="eager", rope=False), "gpt_oss") == {"attention": False, "rope": False}


@pytest.mark.parametrize("attention, patched", [("sdpa", True), ("eager", False)])
def test_conversations_of_a_row_are_learnt_as_if_each_were_alone(tokenizer, attention, patched):
    """No conversation is lost, and little is padded."""
    chats = [chat for chat in CHATS for _ in range(3)]
    alone, packed = tokenise(chats, tokenizer, 200), tokenise(chats, tokenizer, 200, "documents")
    assert len(packed) < len(alone) // 2 and packed.bounds.diff().max() <= 200
    assert sorted(packed.ids.tolist()) == sorted(alone.ids.tolist()) and int((packed.positions == 0).sum()) == len(
        chats
    )
    learnt = alone.count(list(range(len(alone))))
    assert packed.count(list(range(len(packed)))) == learnt
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation=attention)).train()
    if patched:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    found = []
    for rows in (alone, packed):
        model.zero_grad()
        loss = sum(
            model(**rows.batch([i], 0), use_cache=False, num_items_in_batch=learnt[1]).loss
            for i in range(0, len(rows) - 1)
        )
        batch = rows.batch([0, len(rows) - 1], 0)  # of different lengths
        batch["labels"][0] = IGNORE
        loss += model(**batch, use_cache=False, num_items_in_batch=learnt[1]).loss
        loss.backward()
        found.append({"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_padding_of_packed_rows_does_not_count_in_the_loss_of_routers(tokenizer, tmp_path, kernels):
    """Two rows, one of which is padded, have the loss of their documents in one row without padding."""
    folder = save_model(tmp_path, tokenizer, "Mixtral", num_local_experts=4, output_router_logits=True)
    config = TrainConfig(model=folder, kernels=kernels)
    losses = []
    for length in (140, 2000):
        rows = tokenise(CHATS, tokenizer, length, "documents")
        model = build(config, tokenizer, torch.device("cpu"), "fp32")
        attend(config, rows, model, torch.device("cpu"), "fp32")
        assert len(rows) == (2 if length == 140 else 1)
        assert not observed_inside(model)  # its steps can be recorded
        out = model(**rows.batch(list(range(len(rows))), 0), use_cache=False)
        losses.append(torch.stack((out.loss, out.aux_loss)))
    torch.testing.assert_close(*losses)


def test_the_order_is_fixed_by_the_seed_and_every_epoch_sees_every_row(tokenizer):
    rows = TokenRows.of([([i], [i]) for i in range(10)])
    data = Data(rows, tokenizer, eval_fraction=0.2)
    assert len(data.eval) == 2 and not set(data.eval) & set(data.train)
    drawn = lambda seed: [data.picks(2 * i, 2, seed) for i in range(8)]
    first = drawn(0)
    assert first == drawn(0) != drawn(1)
    epochs = [[row for batch in part for row in batch] for part in (first[:4], first[4:])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == data.train and epochs[0] != epochs[1]
    assert data.picks(10, 2, 0) == first[5]  # from the middle as well
    held = [i for batch in data.batches(data.eval, 0, 1, 4) for i in batch["input_ids"].flatten().tolist()]
    assert sorted(held) == data.eval


@pytest.mark.parametrize(
    "rows, fraction, held", [(1, 0.5, 0), (2, 0.01, 1), (10, 0.999, 9), (10, 0.2, 2), (10, 0.0, 0)]
)
def test_some_rows_are_left_to_train_on(rows, fraction, held, tokenizer):
    data = Data(TokenRows.of([([1, 2], [1, 2])] * rows), tokenizer, fraction)
    assert len(data.eval) == held and len(data.train) == rows - held and len(data.picks(0, 3, 0)) == 3


@pytest.mark.parametrize("name, sign", [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t"), ("A.CSV", ",")])
def test_tables_are_text_whatever_their_sign(name, sign, tmp_path):
    rows = [["7", "a\nb"], ["", 'the "quoted", part'], ["x", "y; z"]]
    with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=sign).writerows([["prompt", "completion"], [], *rows])
    found = Records(TrainConfig(data=str(tmp_path / name)))
    assert list(found) == [dict(prompt=prompt, completion=completion) for prompt, completion in rows]
    assert [record["prompt"] for record, _ in found.since((1, 0, 1))] == ["", "x"]


def test_a_text_file_is_one_text(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n\n1\n")
    found = Records(TrainConfig(data=str(tmp_path)))
    assert list(found) == [{"text": "a\n\n1\n"}, {"text": "b\n\n1\n"}] and len(list(found.since((1, 0, 1)))) == 1
    one = records._txt(tmp_path / "a.txt", 0, most=4)
    refused(r"a.txt is one text, longer than 0 MB: .* --max-record-mb raises", list, one)


def test_a_run_is_evaluated_on_other_data(config, tmp_path):
    """No row of its own data is kept back; the loss is the saved model's on these data alone."""
    other = write_jsonl(tmp_path / "other.jsonl", [{"text": TEXT[::-1]}] * 2)
    config = replace(config, eval_data=other, save=str(tmp_path / "saved"), eval_every=2)
    metrics = loop.train(config)
    assert [each["step"] for each in metrics["evaluations"]] == [2, 3]
    without = load(replace(config, eval_data=None, eval_fraction=0.0))
    assert load(config).train == without.train and load(config).identity() == without.identity()
    config = replace(config, model=config.save, save=None)
    alone = replace(config, data=other, eval_data=None, eval_fraction=0.99)
    scores = evaluate(config)
    assert scores["loss"] == pytest.approx(metrics["evaluations"][-1]["loss"], rel=1e-5) and scores["tokens"] > 0
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    refused("there are no rows to evaluate on", evaluate, replace(config, eval_data=None, eval_fraction=0.0))
    assert 0 <= scores["rows"] - evaluate(alone)["rows"] <= 1
    prepared = str(data_module.prepare(alone, tmp_path / "prepared"))
    assert evaluate(replace(config, eval_data=prepared)) == scores
    refused(r"eval_data .*: no such file", load, replace(config, eval_data=str(tmp_path / "no.jsonl")))
    both = replace(config, eval_data=prepared, packing="documents")
    refused("eval_data must be packed as data is", load, both)


def test_a_dry_run_shows_what_is_learnt_and_trains_nothing(tmp_path, capsys):
    data = write_jsonl(tmp_path / "chats.jsonl", CHATS * 5)
    flags = f"train --data {data} --out {tmp_path / 'run'} --hidden 32 --heads 2 --layers 1 --vocab 300 --device cpu"
    assert cli.main([*flags.split(), "--dry-run", "--epochs", "2", "--lora", "0"]) == 0
    out = capsys.readouterr().out
    shown = re.findall(r"row of \d+ tokens, (\d+) of them predicted, .*:\n((?:.+\n|\n)+?)(?=row|time)", out)
    assert len(shown) == 3 and all(re.search(r"### Assistant:\n>>>\w.*<\|endoftext\|><<<", text) for _, text in shown)
    assert re.search(r"5 steps of 8 rows: 2.11 passes", out) and re.search(r"time: about 0:00:\d\d for 5 steps", out)
    assert not list((tmp_path / "run").glob("metrics*")) and not list((tmp_path / "run").glob("liger-run*"))


@pytest.mark.parametrize("trainer", ["torch", "hf"])
def test_answers_before_and_after_change_no_run(trainer, tmp_path, capsys):
    config = TrainConfig(**TINY, data=write_jsonl(tmp_path / "chats.jsonl", CHATS * 5), out=str(tmp_path / "first"))
    config = replace(config, length=150, save=str(tmp_path / "model"), trainer=trainer)
    loop.train(config)
    assert "before: " not in capsys.readouterr().out  # random weights have no answers
    config = replace(config, model=config.save, save=None, epochs=1, steps=100)
    place = lambda samples: dict(out=str(tmp_path / f"out{samples}"), save=str(tmp_path / f"saved{samples}"))
    runs = [replace(config, samples=samples, **place(samples)) for samples in (0, 3)]
    losses = [loop.train(run)["losses"] for run in runs]
    said = capsys.readouterr().out
    assert said.count("  before: ") == said.count("  after: ") == said.count("  in the data: ") == 3
    assert losses[0] == losses[1] and len(losses[0]) == 5
    assert small_runs.saved(runs[0]) == small_runs.saved(runs[1])


def test_the_first_question_of_a_row():
    no = IGNORE
    for labels, positions, found in (
        ([no, no, 3, 4, no, 6], None, ([1, 2], [3, 4])),
        ([no, no, no, 4, 5, 6], [0, 1, 0, 1, 2, 3], None),  # a token before the answer is no question
        ([no, no, no, no, 5, 6], [0, 1, 0, 1, 2, 3], ([3, 4], [5, 6])),  # of the second document
        ([1, 2, 3, 4, 5, 6], None, None),
        ([no] * 6, None, None),
    ):
        row = torch.arange(1, 7), torch.tensor(labels), None if positions is None else torch.tensor(positions)
        data = types.SimpleNamespace(rows=types.SimpleNamespace(row=lambda pick, row=row: row))
        assert (question := preview._question(data, 0)) is None or [part.tolist() for part in question] == [*found]
        assert (question is None) == (found is None)


def test_a_loss_that_stays_is_said():
    rng = random.Random(0)
    noisy = lambda fall: [2 - fall * i / 100 + rng.gauss(0, 0.1) for i in range(100)]
    assert preview.unmoved(noisy(1)) is None and preview.unmoved([2.0, 1.0]) is None
    assert all("the loss did not fall" in preview.unmoved(noisy(fall)) for fall in (0, 0, -1))


WRONG = [
    ("", "holds no records"),
    ("{oops", ":1: not valid JSON"),
    (r'{"text": "x"}' + "\n" + r'{"text": "\ud83d"}', ":2: not valid JSON: .*surrogates"),
    (b'{"text": "\xe9"}', ":1: not UTF-8: 'utf-8' codec"),
    ('{"messages": "hi"}', "messages must be a list of objects"),
    ('{"messages": ["hi"]}', "messages must be a list of objects"),
    ('{"instruction": 1, "output": "x"}', "instruction, input and output must be text"),
    ("[1]", ":1: a record must be an object, got list"),
    ("[" * 100_000 + "]" * 100_000, ":1: (nested too deeply|not valid JSON|a record must be an object)"),
    ('{"prompt": "x"}', r"must have 'text', 'messages', .*; the first record has \['prompt'\]: --columns NAME=text"),
    ('{"prompt": "x", "completion": []}', "prompt and completion must both be text, or both lists of messages"),
    ('{"conversations": [{"from": "gtp", "value": "x"}]}', r"'from' must be one of .*'gtp'; did you mean gpt\?"),
    ('{"conversations": [{"from": "gpt"}]}', "the 'value' of a turn must be text"),
    ('{"prompt": "x", "completion": ""}', "nothing to learn: 1 of 1 conversations have no answer"),
    ('{"text": "x"}\n{"txt": "y"}', "record 2 has no 'text'"),
    ('{"messages": [{"role": "user", "content": "hi"}]}', "nothing to learn: 1 of 1 conversations have no answer"),
    ('{"messages": [{"role": "user"}]}', "'content'"),
    ('{"text": "x", "text": "y"}', ":1: not valid JSON: the name text stands there twice"),
    (
        '{"text": "x"}\n{"text": "' + "y" * 1_000_000 + '"}',
        ":2: the line is longer than 1 MB: .* --max-record-mb raises the limit",
    ),
]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", "text\nx,y\n", "a.csv:2: 2 values for 1 columns"),
        ("a.csv", "text,text\n", "a.csv:1: the name text stands there twice"),
        ("a.csv", 'text\n"x', "a.csv:2: unexpected end of data"),
        ("a.json", "[", "a.json: not valid JSON"),
        ("a.txt", b"\xff", "a.txt: not UTF-8"),
        ("a.csv", b"text\n\xff", "a.csv:2: not UTF-8"),
        *(("a.jsonl", *wrong) for wrong in WRONG),
    ],
)
def test_mistakes_in_the_data_are_named(name, content, message, config, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(message, load, replace(config, data=str(tmp_path / name), max_record_mb=1))


def test_learning_rate():
    config = TrainConfig(steps=11, warmup=2, lr=1.0, min_lr=0.1)
    rates = [loop.learning_rate(config, step) for step in range(11)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[10] == pytest.approx(0.1)
    assert loop.learning_rate(replace(config, schedule="linear"), 8) == pytest.approx(0.1 + 0.9 * 0.25)
    assert loop.learning_rate(replace(config, schedule="constant"), 10) == 1.0
    wsd = replace(config, schedule="wsd", steps=20, decay=0.25, min_lr=0.0)
    assert [loop.learning_rate(wsd, step) for step in (1, 2, 14, 15, 19)] == [1.0, 1.0, 1.0, pytest.approx(0.8), 0.0]
    assert TrainConfig().peak_lr == 1e-3 and TrainConfig(model="x").peak_lr == 2e-5
    assert TrainConfig(model="x", lora=8).peak_lr == TrainConfig(lora=8, quantize="nf4").peak_lr == 2e-4


@pytest.mark.parametrize("records", ["text", "chats"])
def test_kernels_change_no_loss(records, config, tmp_path):
    if records == "chats":
        config = replace(config, data=write_jsonl(tmp_path / "chats.jsonl", CHATS * 4), length=128, vocab=257)
    stock, ours = (loop.train(replace(config, kernels=kernels)) for kernels in ("off", "on"))
    # two implementations, unless nothing was patched
    assert stock["gradient_norms"] != ours["gradient_norms"] or torch.cuda.is_available()
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert ours["gradient_norms"] == pytest.approx(stock["gradient_norms"], rel=1e-3)


def test_accumulation_equals_one_large_batch(config, tmp_path):
    """Although parts have different numbers of labels: a token weighs the same wherever it is."""
    chats = write_jsonl(tmp_path / "chats.jsonl", CHATS * 4)
    config = replace(config, data=chats, length=128, vocab=257, batch=4, accumulate=1)
    whole, parts = loop.train(config), loop.train(replace(config, batch=1, accumulate=4))
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert parts["gradient_norms"] == pytest.approx(whole["gradient_norms"], rel=1e-4)


@pytest.mark.parametrize("changes", [{}, {"lora": 4}], ids=["patched", "adapters"])
def test_recomputed_activations_change_no_bit(changes, config):
    if "lora" in changes:
        pytest.importorskip("peft")
    config = replace(config, **changes)
    none, *others = (loop.train(replace(config, gradient_checkpointing=what)) for what in ("none", "selective", "full"))
    assert all(
        other["losses"] == none["losses"] and other["gradient_norms"] == none["gradient_norms"] for other in others
    )


@pytest.mark.parametrize("name", ["out", "save"])
def test_what_cannot_be_written_is_said_before_anything_is_loaded(name, config, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(loop, "load", None)
    config = replace(config, **{name: str(tmp_path / "file" / "run")})
    refused(r"cannot write to .*run: .*file is a file, not a folder", loop.train, config)


def test_more_processes_than_gpus_are_a_mistake(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    refused("device is cuda:2, but PyTorch sees 2 GPUs here", device_and_precision, TrainConfig())


def steps_in(folder):
    return [int(name.rpartition("-")[2]) for name in (folder / "checkpoints" / "latest").read_text().split()]


def test_a_store_keeps_what_is_newer_than_the_folder(config, tmp_path):
    """A machine comes back whose disk has an older checkpoint than the store has got meanwhile."""
    config = replace(config, checkpoint_every=2, schedule="constant", warmup=0, store=(tmp_path / "store").as_uri())
    one, two = (replace(config, out=str(tmp_path / name)) for name in ("one", "two"))
    loop.train(replace(one, steps=4))
    loop.train(replace(two, steps=8))
    found = loop.train(replace(one, steps=10))
    assert len(found["losses"]) == 10 and steps_in(tmp_path / "store") == steps_in(tmp_path / "one") == [10, 8]
    assert found["losses"][:8] == loop.train(replace(two, steps=8, store=None))["losses"]
    # a third run that knows nothing of that leaves it alone
    stale = store.Store(config.store, tmp_path / "two")
    with pytest.raises(RuntimeError, match="another run writes there; its newest checkpoint is step-00000010"):
        stale.copy()
    assert steps_in(tmp_path / "store") == [10, 8]


def test_a_store_that_removes_nothing_takes_what_is_new(config, tmp_path, capsys):
    config = replace(config, checkpoint_every=2, checkpoint_keep=1, schedule="constant", warmup=0)
    kept = store.Store((tmp_path / "store").as_uri(), Path(config.out))
    with mock.patch.object(kept.fs, "rm", side_effect=PermissionError("removing is not allowed")):
        for steps in (2, 4, 6):
            loop.train(replace(config, steps=steps))
            assert kept.copy() and steps_in(tmp_path / "store") == [steps]
    assert "older checkpoints remain in file:" in capsys.readouterr().err


def test_a_damaged_checkpoint_in_a_store_is_written_again(config, tmp_path):
    config = replace(
        config, checkpoint_every=2, steps=4, schedule="constant", warmup=0, store=(tmp_path / "store").as_uri()
    )
    loop.train(config)
    (tmp_path / "store" / "checkpoints" / "step-00000004" / "state.json").write_text("{")
    shutil.rmtree(config.out)
    loop.train(config)
    assert checkpoint.damage(tmp_path / "store" / "checkpoints" / "step-00000004") is None


@pytest.mark.parametrize(
    "before, after, message",
    [
        (dict(layers=2), dict(layers=1), r"does not fit this model: .*layers.1.* has shape \(.*\) there, none here"),
        (dict(heads=2, kv_heads=2), dict(heads=4, kv_heads=4), "another model: .*'num_attention_heads': 2"),
    ],
)
def test_checkpoints_of_another_model_are_refused(before, after, message, config):
    config = replace(config, checkpoint_every=2, steps=2)
    loop.train(replace(config, **before))
    refused(message, loop.train, replace(config, steps=4, **after))


SECRET = "wJalrXUtnFEMIK7MDENG"
HIDDEN = [
    ("s3://key:a/b+@c@bucket/run", "s3://***@bucket/run"),
    ("s3://key:p@ss@bucket/run", "s3://***@bucket/run"),
    ("https://ghp_x@github.com/a", "https://***@github.com/a"),
    ("simplecache::sftp://me:pw@host/x", "simplecache::sftp://***@host/x"),
    ("az://c/x?sig=ab%2F&sv=2", "az://c/x?sig=***&sv=2"),
    (
        "gs://b/x?AWSAccessKeyId=a&n=1&x-amz-security-token=b",
        "gs://b/x?AWSAccessKeyId=***&n=1&x-amz-security-token=***",
    ),
    (f"denied: {SECRET}", "denied: ***"),
    ("hf_" + "a" * 34, "***"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEv\n-----END RSA PRIVATE KEY-----\nb", "***\nb"),
    ("key: -----BEGIN PRIVATE KEY-----\nMIIEv, cut", "key: ***"),
    ("with eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl!", "with ***!"),
    ("sk-proj-abcdefghijklmnopqrstuvwxyz0123456789", "***"),
    ("glpat-abcdefghij0123456789, xoxb-123456789012-abcdefghijkl", "***, ***"),
    ("Authorization: Bearer abcdef0123456789abcdef", "Authorization: Bearer ***"),
    ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "Authorization: Basic ***"),
    ("""{"password":"a, b", "n": 1, 'api_key': 'c'}""", """{"password":"***", "n": 1, 'api_key': '***'}"""),
    ("denied for correct-horse", "denied for ***"),
]
PLAIN = ["s3://bucket/run@v1", "http://host:9000/run@v1", "abfs://container@account.dfs.core.windows.net/x"]
PLAIN += ["hf://datasets/user/repo@main", "file:///a/b", "a@b.c", '{"eos_token": "</s>", "key": "a"}']
PLAIN += ["bearer of good news, sk-learn, task-force-of-many-words-in-a-name"]


@pytest.mark.parametrize("text, shown", HIDDEN + [(text, text) for text in PLAIN])
def test_credentials_are_hidden_and_nothing_else(text, shown, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET), monkeypatch.setenv("TOKENIZERS_PARALLELISM", "datasets")
    monkeypatch.setenv("PGPASSWORD", "correct-horse"), monkeypatch.setenv("SSH_AUTH_SOCK_TYPE", "scheduled")
    assert redact.redacted(text) == redact.redacted(shown) == shown
    assert str(UserError(f"cannot use {text!r}")) == f"cannot use {shown!r}"


def stub(monkeypatch, name, **functions):
    service = types.ModuleType(name)
    service.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(service).update(functions)
    monkeypatch.setitem(sys.modules, name, service)


def test_credentials_leave_no_trace(config, tmp_path, monkeypatch, capfd):
    """A URI's password, and a variable that an error repeats: in no file, service or line."""
    sent, copied = [], store.put
    took = lambda *args, **kwargs: sent.append(repr((args, kwargs, sys.argv)))
    stub(monkeypatch, "mlflow", start_run=took, log_params=took, log_metrics=took, end_run=took)
    stub(monkeypatch, "wandb", init=lambda **kwargs: took(kwargs) or types.SimpleNamespace(log=took, finish=took))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    uri = f"memory://key:{SECRET[::-1]}@bucket/run?token=tokentoken"
    monkeypatch.setattr(sys, "argv", ["liger", "--store", uri])

    def fails_once(*args):
        monkeypatch.setattr(store, "put", copied)
        raise PermissionError(f"403 for {uri} as {SECRET}")

    monkeypatch.setattr(store, "put", fails_once), monkeypatch.setattr(store, "PERIOD", 0.05)
    config = replace(config, store=uri, checkpoint_every=1, report="mlflow,wandb", save=str(tmp_path / "saved"))
    loop.train(config)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    loop.train(config)
    monkeypatch.setattr(store, "put", lambda *_: fails_once())
    monkeypatch.setattr(store, "PERIOD", 1000)
    with pytest.raises(OSError, match="the last checkpoint is in") as raised:
        loop.train(replace(config, steps=4))
    traces = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} | {
        "sent": repr(sent).encode()
    }
    said = "".join(capfd.readouterr()) + "".join(traceback.format_exception(raised.value))
    assert "fetched step-00000003 from memory://***@bucket/run?token=***" in said and "mlflow" not in said
    for where, trace in (traces | {"said": said.encode()}).items():
        for secret in (SECRET, SECRET[::-1], "tokentoken"):
            assert secret.encode() not in trace, where
    assert len(sent) > 6
    assert json.loads((tmp_path / "run" / "liger-run.json").read_text())["store"] == "memory://***@bucket/run?token=***"


def test_a_store_without_its_credentials_is_asked_for(config, tmp_path, monkeypatch):
    """A file of a config has none; workers find them where the launcher has left them."""
    uri = "memory://key:password@bucket/run"
    replace(config, store=uri, checkpoint_every=1).save_to(tmp_path / "config.json")
    read = TrainConfig.load(tmp_path / "config.json")
    refused("has no credentials, as files keep none: give the whole URI", loop.train, read)
    monkeypatch.setenv("LIGER_STORE", uri)
    assert read.store_uri == uri
    monkeypatch.setenv("LIGER_STORE", "memory://key:password@other/run")
    refused("has no credentials", loop.train, read)


@pytest.mark.parametrize("when", ["start_run", "log_metrics", "end_run"])
def test_a_service_that_fails_is_left_alone(when, config, tmp_path, monkeypatch, capsys):
    works = dict.fromkeys(("start_run", "log_params", "log_metrics", "end_run"), mock.Mock())
    down = mock.Mock(side_effect=ConnectionError("the tracking server is down"))
    stub(monkeypatch, "mlflow", **works | {when: down})
    loop.train(replace(config, report="mlflow", save=str(tmp_path / "saved")))
    assert (tmp_path / "saved" / "model.safetensors").is_file() and (tmp_path / "run" / "metrics.json").is_file()
    assert capsys.readouterr().err.count("the tracking server is down") == 1


def test_a_full_disk_ends_no_run(config, tmp_path, monkeypatch, capsys):
    """The model is saved elsewhere all the same, and what is missing is said."""
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "write_data", full)
    monkeypatch.setattr(metrics, "append", full)
    with pytest.raises(OSError, match="the last checkpoint could not be written"):
        loop.train(replace(config, checkpoint_every=2, save=str(tmp_path / "saved")))
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    assert "lacks steps 1 to 1: [Errno 28]" in capsys.readouterr().err
    stopped = threading.Event()
    stopped.set()
    monkeypatch.setattr(loop, "told_to_stop", lambda: contextlib.nullcontext(stopped))
    with pytest.raises(OSError, match="stopped after step 2 by SIGTERM, but its checkpoint could not be written"):
        loop.train(replace(config, checkpoint_every=2, out=str(tmp_path / "stopped")))


def test_fewer_steps_than_the_checkpoint_has_are_no_failure(config, tmp_path):
    config = replace(config, checkpoint_every=2, steps=4)
    loop.train(config)
    loop.train(replace(config, steps=2, save=str(tmp_path / "saved")))
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def test_rows_of_strangers_are_checked_before_a_gpu_reads_them(config, tmp_path):
    rows = load(config).rows
    good, path = rows.tensors(), tmp_path / "rows.safetensors"
    save = lambda **change: safetensors.torch.save_file(
        {name: t.clone().contiguous() for name, t in (good | change).items() if t is not None}, path
    )
    last = good["bounds"][-1]
    for change, said in (
        (dict(ids=good["ids"].float()), "ids must be .* in int32"),
        (dict(labels=good["labels"][1:]), "labels must be"),
        (dict(other=good["ids"]), "it has tensors bounds, ids, labels, other"),
        (dict(labels=None), "it has tensors bounds, ids"),
        (dict(bounds=good["bounds"] * 1000), "bounds must rise from 0"),
        (dict(bounds=good["bounds"][:0]), "bounds must rise from 0"),
        (dict(bounds=torch.tensor([0, last, last])), "bounds must rise from 0"),
        (dict(positions=torch.full_like(good["ids"], 10**6)), "positions must lie in their rows"),
    ):
        save(**change)
        refused(f"holds no rows of tokens: {said}", TokenRows.read, path)
    path.write_bytes(b"\xff" * 100)
    refused("holds no rows of tokens", TokenRows.read, path)
    for change, said in (
        (dict(ids=-good["ids"] - 1), "got -"),
        (dict(labels=torch.full_like(good["ids"], -7)), "got -7"),
        (dict(labels=torch.full_like(good["ids"], 10**6)), "the model's vocabulary of 300 lacks"),
    ):
        save(**change)
        refused(said, TokenRows.read(path).check, 300)
    save()
    TokenRows.read(path).check(300)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives folders away")
@pytest.mark.parametrize("theirs", ["cache", "entry"])
def test_a_cache_of_another_user_is_refused(theirs, config, tmp_path):
    config = replace(config, cache=str(tmp_path / "cache"))
    load(config)
    (entry,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    os.chown(entry if theirs == "entry" else tmp_path / "cache", 1234, 1234)
    refused("belongs to user 1234, so what is in it may not be this user's", load, config)
    os.chown(entry if theirs == "entry" else tmp_path / "cache", 0, 0)
    load(config)
    entry.chmod(0o777)
    refused("can be written to by others", load, config)


def test_texts_are_tokenised_together_by_their_length():
    records = lambda lengths: (({"text": "x" * n}, (i, 0, i)) for i, n in enumerate(lengths, 1))
    sizes = lambda lengths: [
        sum(len(record["text"]) for record, _ in some) for some in tokenising.batches_of(records(lengths))
    ]
    assert sizes([10] * 2500) == [10_000, 10_000, 5_000]
    assert sizes([400_000] * 4 + [9_000_000, 1]) == [1_200_000, 9_400_000, 1]


def test_conversations_are_cut_and_those_with_nothing_to_learn_counted(tokenizer, capsys):
    question, answer = {"role": "user", "content": "a long question"}, {"role": "assistant", "content": "yes"}
    long = {"content": "x" * 100}
    turns = [[question, answer], [question, answer | long], *[[question]] * 3, *[[question | long, answer]] * 4]
    rows = tokenise([{"messages": each} for each in turns], tokenizer, 60)
    assert len(rows) == 2 and rows.bounds.diff()[1] == 60
    said = capsys.readouterr().err
    assert "3 of 9 conversations have no answer: left out" in said
    assert "4 of 9 conversations have no answer within their first 60 tokens" in said


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_a_signal_before_training_ends_the_run_at_once(number, config, monkeypatch, tmp_path):
    def tokenised(*_):
        try:  # as code does that handles exceptions of its own
            os.kill(os.getpid(), getattr(signal, number))
            time.sleep(30)
        except Exception:
            pytest.fail("taken for an error of the data")

    monkeypatch.setattr(loop, "load", tokenised)
    # nohup lets the tests ignore one of them, and a run would, too
    before = signal.signal(getattr(signal, number), signal.SIG_DFL)
    began = time.monotonic()
    with pytest.raises(ranks.TooEarly, match="stopped by SIGTERM before training began"):
        loop.train(replace(config, checkpoint_every=2))
    signal.signal(getattr(signal, number), before)
    assert time.monotonic() - began < 20 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    monkeypatch.setattr(loop, "load", load)
    loop.train(replace(config, checkpoint_every=2))


@pytest.mark.parametrize("kind", ["text", "chats"])
def test_a_run_stopped_while_it_tokenises_keeps_what_it_has(kind, config, monkeypatch, tmp_path, capsys):
    """The next start tokenises the rest alone, and trains no tokenizer again."""
    records = [{"text": TEXT + str(i)} for i in range(6)] if kind == "text" else CHATS[:2] * 3
    config = replace(config, data=write_jsonl(tmp_path / "records.jsonl", records), length=100, checkpoint_every=2)
    calm = load(replace(config, cache=str(tmp_path / "calm")))
    # every record is kept
    (monkeypatch.setattr(tokenising, "KEEP_EVERY", 0), monkeypatch.setattr(tokenising, "PIECE", 1))
    name = "_add_texts" if kind == "text" else "_add_chat"
    add, seen = getattr(tokenising.Draft, name), []

    def stopped(draft, record, *rest):
        seen.append(record)
        add(draft, record, *rest)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    monkeypatch.setattr(tokenising.Draft, name, stopped)
    with pytest.raises(ranks.TooEarly):
        loop.train(config)
    (unfinished,) = (tmp_path / "run" / "cache").iterdir()
    with (unfinished / "ids").open("ab") as file:
        file.write(b"cut short by a kill")
    monkeypatch.setattr(tokenising, "train_bpe", mock.Mock(side_effect=AssertionError("trained again")))
    again = load(config)
    assert "tokenising continues after record 3" in capsys.readouterr().err
    assert len(seen) == 4 + 3 and again.rows.digest() == calm.rows.digest()
    assert again.tokenizer.get_vocab() == calm.tokenizer.get_vocab() and not unfinished.exists()


def prefixed(tokenizer):
    """As older Llamas': a mark at the begin of a text, and words that do not end at white space."""
    from tokenizers import normalizers, pre_tokenizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("_")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


@pytest.mark.parametrize("cut", [True, False])
def test_a_long_text_has_the_tokens_of_its_pieces(cut, monkeypatch):
    """Its tokens take a hundred times the memory of the text: where they are the same it is
    tokenised in pieces, elsewhere in one."""
    text = "".join(standard_library()[:20])[:40_000]
    tokenizer = train_bpe([text], 600) if cut else prefixed(train_bpe([text], 600))
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = {"messages": [{"role": role, "content": text} for role in ("user", "assistant")]}
    rows = lambda: [tokenise([{"text": "short"}, {"text": text}], tokenizer, 100), tokenise([chat], tokenizer, 30_000)]
    calm = [one.digest() for one in rows()]
    monkeypatch.setattr(tokenising, "PIECE", 5000), monkeypatch.setattr(tokenising, "_CUTS_TRIED", 5)
    pieces = list(tokenising.pieces(text, tokenizer))
    assert "".join(pieces) == text and (max(map(len, pieces)) < 5500 if cut else len(pieces) == 1)
    call, longest = type(tokenizer).__call__, []

    def seen(self, texts, **options):
        longest.append(max(map(len, [texts] if isinstance(texts, str) else texts)))
        return call(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", seen)
    assert [one.digest() for one in rows()] == calm
    assert max(longest) < 5500 if cut else max(longest) > 40_000


def test_a_tokenizer_is_trained_on_the_words_of_long_texts(monkeypatch):
    text = "".join(standard_library()[:20])[:40_000]
    whole = train_bpe([text], 600).backend_tokenizer.to_str()
    monkeypatch.setattr(tokenising, "PIECE", 1000)
    assert len(list(tokenising.pieces(text))) > 30 and train_bpe([text], 600).backend_tokenizer.to_str() == whole


def test_the_step_that_stops_a_run_is_in_its_lines(config, tmp_path, monkeypatch):
    """And a checkpoint that was being written is complete."""
    before = loop._Run._update

    def update(run, keep=False):
        if run.step == 4:
            next(p for p in run.parallel.module.parameters() if p.grad is not None).grad.fill_(float("nan"))
        return before(run, keep)

    monkeypatch.setattr(loop._Run, "_update", update)
    refused("the gradient norm is nan at step 5", loop.train, replace(config, steps=8, checkpoint_every=4, log_every=5))
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and lines[4]["grad_norm"] is None
    assert math.isnan([*metrics.StepLines(path, 5).read()][4]["grad_norm"])
    assert steps_in(tmp_path / "run") == [4]


def test_all_generators_are_seeded():
    for numbers in ((20251123, 4, 1), (2**62, 2**40, 8)):
        torch.manual_seed(session._seed(*numbers))  # which takes it
    drawn = []
    for _ in range(2):
        session.seed_all(7, 3)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    session.seed_all(7, 4)
    assert drawn[0] == drawn[1] and not {random.random(), np.random.rand(), torch.rand(1).item()} & {*drawn[0]}


def test_prepared_rows_are_the_data_without_its_text(config, tmp_path):
    """In a folder that is prepared anew for other data, and that others can read."""
    other = replace(config, data=write_jsonl(tmp_path / "other.jsonl", [{"text": TEXT[::-1]}] * 4))
    for one in (config, other):
        folder = str(data_module.prepare(one, tmp_path / "rows"))
        direct, prepared = load(one), load(replace(one, data=folder))
        assert torch.equal(direct.rows.ids, prepared.rows.ids) and direct.eval == prepared.eval
        assert len(prepared.tokenizer) == len(direct.tokenizer)
        (tmp_path / "rows" / "mine.txt").touch()
    longer = f"prepared with rows of {config.length} tokens, but length is 8"
    refused(longer, load, replace(config, data=folder, length=8))
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "rows").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "rows" / "mine.txt").is_file() and not [
        path for path in (tmp_path / "rows").iterdir() if path.is_dir()
    ]


def test_a_model_saved_over_adapters_is_alone(config, tmp_path):
    pytest.importorskip("peft")
    base, both = str(tmp_path / "base"), str(tmp_path / "both")
    loop.train(replace(config, save=base, steps=1))
    loop.train(replace(config, model=base, lora=4, save=both, out=str(tmp_path / "tuned")))
    mine = tmp_path / "both" / "rows.safetensors"
    mine.write_text("stays")
    loop.train(replace(config, model=base, save=both, out=str(tmp_path / "tuned")))
    assert not any(
        "lora" in name for name, _ in transformers.AutoModelForCausalLM.from_pretrained(both).named_parameters()
    )
    assert mine.is_file()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not let a process forget its peak")
def test_peak_memory_sees_what_was_freed_and_leaves_pauses_out():
    gc.collect()  # what earlier tests left would else go away while memory is measured
    memory = PeakMemory(torch.device("cpu"))
    block = torch.ones(50_000_000)  # 200 MB
    del block
    memory.pause()
    larger = torch.ones(150_000_000)
    del larger
    memory.start()
    assert 190e6 < memory.read() - memory.before < 400e6


def ended(rates, losses=(4.0, 3.0)):
    measured = dict(losses=losses, rates=rates, tokens_per_second=statistics.median(rates))
    about = dict(peak_memory=2e9, memory_before_training=1e9, memory_kind="y")
    return measured | about | dict(precision="fp32", parameters=1, device="x")


def test_curves_that_differ_are_called_out():
    run, other = ended([100.0] * 5), ended([150.0] * 5, losses=[4.0, 3.0 * (1 + 2 * demo.TOLERANCE["fp32"])])
    assert demo.compare(run, run)["agree"]
    report = demo.compare(run, other)
    assert not report["agree"] and "DO NOT AGREE" in demo.table(report, other)
    speeds = dict(stock=100.0, ours=150.0, ratio=1.5, quartiles=[1.5, 1.5], clear=True)
    assert report["tokens_per_second"] | speeds == report["tokens_per_second"]


@pytest.mark.parametrize(
    "stock, ours, said",
    [
        # the machine gets busy: both are slower from then on, one a block earlier
        ([100.0] * 6 + [10.0] * 5, [110.0] * 5 + [11.0] * 6, r"(100 +110|10 +11) +1.10 \(1.10 to 1.10\)"),
        ([100.0, 101.0, 100.0] * 3, [101.0, 100.0, 100.0] * 3, r"1.00 \(0.99 to 1.01\)(.|\n)*so no difference shows"),
        (
            [100.0, 30.0] * 4,
            [50.0] * 8,
            r"unclear +unclear +unclear\n(.|\n)*too busy to tell .* 8 pairs .* are between 0.50 and 1.67",
        ),
        ([100.0] * 4, [150.0] * 4, r"unclear(.|\n)*too few blocks of steps .*, 4 of at least 5"),
    ],
)
def test_no_speed_without_its_spread(stock, ours, said, tmp_path):
    runs = {"stock": ended(stock), "ours": ended(ours) | {"model": "llama"}}
    report = demo.compare(*runs.values())
    shown = demo.table(report, runs["ours"])
    assert re.search(said, shown), shown
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    if "few" in shown:  # the one below draws a speed
        demo.plot(report, runs, tmp_path / "demo.png")


def test_the_demo_runs(tmp_path, monkeypatch, capfd):
    """Each run in a process of its own, forked from one that has imported everything."""

    def process(argv, pass_fds):
        ends = {str(end): Connection(os.dup(end)) for end in pass_fds}
        child = forkserver().Process(target=run_code, args=(argv[2], argv[3:], ends, str(tmp_path / "said")))
        child.start()
        return types.SimpleNamespace(wait=lambda: child.join() or child.exitcode, kill=child.kill)

    monkeypatch.setattr(demo, "subprocess", types.SimpleNamespace(Popen=process))
    data = write_jsonl(tmp_path / "text.jsonl", [{"text": TEXT}] * 8)
    flags = {**TINY, "data": data, "out": tmp_path / "demo", "steps": 8}
    argv = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    code, (out, err) = cli.main(["demo", *argv]), capfd.readouterr()
    out += (tmp_path / "said").read_text()
    assert code == 0, out + err
    assert "The loss curves agree" in out
    # the second run begins in its turn, with two blocks
    blocks = re.findall(r"^(stock|ours) +step +(\d+)/8 ", out, re.M)
    assert blocks == [
        ("stock", "1"),
        ("ours", "1"),
        *((name, str(step)) for step in range(2, 9) for name in ("ours", "stock")),
    ]
    report = json.loads((tmp_path / "demo" / "demo.json").read_text())
    assert report["agree"] and [run["kernels"] for run in report["runs"].values()] == ["off", "on"]
    assert report["tokens_per_second"]["pairs"] == 6  # without the first two
    assert all(math.isfinite(report[name]["ratio"]) for name in ("loss", "tokens_per_second", "peak_memory"))
    with contextlib.suppress(ImportError):
        import matplotlib  # noqa: F401

        assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("command", ["train", *further("fit")])
def test_code_of_a_model_runs_only_when_asked(trusted, command, config, tmp_path, monkeypatch, capsys):
    """Without the flag nobody is asked, whatever standard input would answer."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=300)
    theirs = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    (folder / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": theirs} | sizes))
    (folder / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    tokenising.own_tokenizer([{"text": "abc"}], 300, None).save_pretrained(folder)
    data = write_jsonl(tmp_path / "text.jsonl", [{"text": TEXT}] * 20)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    # which Transformers marks as code of the model's
    for theirs in (transformers.LlamaConfig, transformers.LlamaForCausalLM):
        monkeypatch.setattr(theirs, "_auto_class", None)
    asked = {
        "train": ["--out", str(tmp_path / "run"), "--steps", "1", "--batch", "1", "--data", data],
        "fit": ["--gpu", "h100"],
    }[command]
    code = cli.main([command, "--model", str(folder), *asked, *["--trust-remote-code"] * trusted])
    said = capsys.readouterr().err
    assert (tmp_path / "ran").exists() == trusted
    if not trusted:
        assert code and "only if you give --trust-remote-code" in said and "Traceback" not in said
