"""Every block of code of README and docs/ runs here, on tiny models in the place of those of the
hub; why a block of Python cannot run here stands in the name of its page's test.

The blocks of a page run one after the other, with what the page takes for given (``GIVEN``). A line
``print(...)  # text`` must print that text, if it is one of ``SAID``. Of commands, in blocks or
indented, ``liger`` runs at tiny sizes, or its arguments are parsed; files that other programs get
must be there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import DEVICE, group_of_one, served_by_kernels_or_references
from quick import words

from liger_kernel import cli
from liger_kernel.transformers import AutoLigerKernelForCausalLM, apply_liger_kernel_to_llama, restore

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs" / "_ext"))

import command_line

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
}
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)
SAID = re.compile(
    r"^print\(.*\)  # (liger_kernel: .*|True.*|False.*|None|torch\.Size.*|tensor.*|Liger\w+|\d[\d.]*)$", re.M
)
SIZES = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=128, **SIZES)
IDS = {
    name
    for text in PAGES.values()
    for name in re.findall(r"[\"' ]((?:meta-llama|Qwen|google|mistralai|allenai|openai)/[\w.-]+)", text)
}
# Blocks that need more than this machine has, by a line in them; a package that is missing is a
# reason that needs no line here
NOT_RUN = {
    "load_in_mxfp4(": "no checkpoint in MXFP4 stands in",
    "FullyShardedDataParallel(model": "FSDP1 needs a GPU",
    "kernel_config=": "the library kernels is in environments of its own",
}


def blocks(page: str, *languages: str) -> list[str]:
    return [code for _, language, code in FENCE.findall(PAGES[page]) if language in languages]


# -- Python --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """That of a tiny Llama with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("checkpoint")
    llama().save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "<|end|>"])}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = dict(eos_token="<|end|>", pad_token="<|end|>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **special).save_pretrained(folder)
    return folder


@pytest.fixture
def offline(tmp_path, monkeypatch, checkpoint) -> Path:
    """A working directory with some chats, and with a folder for every id of the hub that pages
    name; ``train`` makes two tiny steps, of little text."""
    from liger_kernel.train import loop, records

    monkeypatch.setattr(records, "standard_library", lambda: [*PAGES.values()])
    (tmp_path / "checkpoint").symlink_to(checkpoint)
    for name in IDS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(checkpoint)
    train, sizes = loop.train, dict(steps=2, length=128, batch=2, log_every=1, eval_fraction=0.0, save=None)
    monkeypatch.setattr(loop, "train", lambda config: train(dataclasses.replace(config, **sizes)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    said = {"user": "Name a prime.", "assistant": "Seven is a prime number."}
    chat = {"messages": [{"role": role, "content": text} for role, text in said.items()]}
    Path("chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 16)
    return tmp_path


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).to(DEVICE).train()


def common(folder: Path) -> dict[str, Any]:
    ids = torch.randint(0, 512, (2, 32), device=DEVICE)
    imported = torch, transformers.TrainingArguments, apply_liger_kernel_to_llama, AutoLigerKernelForCausalLM
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (8, 16))]
    data = dict(ids=ids, labels=ids.clone(), rows=rows, positions=torch.arange(32, device=DEVICE)[None])
    names = {each.__name__: each for each in imported} | {"__name__": "page", "name": folder / "checkpoint"}
    return names | data | {"model": llama()}


def of_readme(folder: Path) -> dict[str, Any]:
    import peft

    head, hidden = torch.nn.Linear(4096, 512, bias=False, device=DEVICE), torch.randn(6, 4096, device=DEVICE)
    return common(folder) | vars(peft) | {"head": head, "hidden": hidden, "labels": torch.arange(6, device=DEVICE)}


def of_losses(folder: Path) -> dict[str, Any]:
    labels = torch.randint(0, 512, (4, 8), device=DEVICE)
    labels[:, :3] = -100
    hidden, ref_hidden = (torch.randn(4, 8, 16, device=DEVICE) for _ in range(2))
    head, ref_head = (torch.nn.Linear(16, 512, device=DEVICE) for _ in range(2))
    names = {"head": head, "hidden": hidden.requires_grad_(), "labels": labels}
    return names | {"ref_hidden": ref_hidden, "ref_head": ref_head}


def of_distributed(folder: Path) -> dict[str, Any]:
    """One rank."""
    names = common(folder) | dict(rank=0, ranks=1, data_ranks=1, sequence_ranks=1, counted_tokens=2 * 31 * 2)
    batches = [{"input_ids": names["ids"], "labels": names["labels"]}] * 2
    return names | {"F": torch.nn.functional, "device": DEVICE, "batches": batches}


def of_troubleshooting(folder: Path) -> dict[str, Any]:
    names = common(folder)
    apply_liger_kernel_to_llama(model=names["model"])
    return names


def of_training(folder: Path) -> dict[str, Any]:
    """Adapters, as ``liger train --lora`` saves them."""
    import peft

    peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules="all-linear")).save_pretrained(folder / "tuned")
    names = common(folder)
    names["model"].requires_grad_(False)
    return names


# File name of a page -> what it takes for given beyond a model, tokens and rows; a page keeps it
# when it moves
GIVEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "README.md": of_readme,
    "losses.md": of_losses,
    "distributed.md": of_distributed,
    "troubleshooting.md": of_troubleshooting,
    "liger-train.md": of_training,
}


def missing(code: str) -> list[str]:
    modules = re.findall(r"^(?:from|import) (\w+(?:, \w+)*)", code, re.M)
    return [name for line in modules for name in line.split(", ") if importlib.util.find_spec(name) is None]


def reason(code: str) -> str | None:
    """Why a block cannot run here."""
    if absent := missing(code):
        return f"{', '.join(absent)} is not installed"
    return next((why for line, why in NOT_RUN.items() if line in code), None)


def named(page: str) -> Any:
    """A page as a parameter, whose name says what of it does not run."""
    reasons = dict.fromkeys(why for code in blocks(page, "python") if (why := reason(code)))
    return pytest.param(page, id="; not run: ".join([page, *reasons]))


@pytest.mark.parametrize("page", [named(page) for page in PAGES if blocks(page, "python")])
def test_python_runs(page, offline, capsys):
    torch.manual_seed(0)
    names = GIVEN.get(Path(page).name, common)(offline)
    group = group_of_one("cpu") if Path(page).name == "distributed.md" else contextlib.nullcontext()
    try:
        with torch.device(DEVICE), served_by_kernels_or_references(), group:
            for number, code in enumerate(blocks(page, "python"), 1):
                program = compile(code, f"{page}, block {number}", "exec")
                if reason(code):
                    continue
                capsys.readouterr()
                exec(program, names)
                printed = [re.sub(r", device='.*?'", "", line) for line in capsys.readouterr().out.splitlines()]
                assert [said for said in SAID.findall(code) if said not in printed] == [], printed
    finally:
        restore()


def test_a_block_that_fails_or_prints_something_else_is_found(offline, capsys, monkeypatch):
    monkeypatch.setitem(PAGES, "broken.md", "```python\nprint(model.no_such_name)\n```\n")
    with pytest.raises(AttributeError, match="no_such_name"):
        test_python_runs("broken.md", offline, capsys)
    monkeypatch.setitem(PAGES, "other.md", "```python\nprint(1 + 1)  # 3\n```\n")
    with pytest.raises(AssertionError, match="3"):
        test_python_runs("other.md", offline, capsys)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml", "json")])
def test_data_is_well_formed(page):
    yaml = pytest.importorskip("yaml")
    assert all(list(yaml.safe_load_all(block)) for block in blocks(page, "yaml", "json"))


def test_every_reason_has_its_block():
    code = [block for page in PAGES for block in blocks(page, "python")]
    assert [line for line in NOT_RUN if not any(line in block for block in code)] == []


# -- commands ------------------------------------------------------------------------------

# Commands that take minutes, a GPU or a cluster, or have tests of their own: their arguments are parsed
PARSED = {"demo", "chat", "merge", "bench", "tune", "warmup", "fit"}
PARSED |= {"deploy submit", "deploy status", "deploy logs", "deploy delete"}
SMALL = (
    "--hidden 32 --intermediate 64 --layers 1 --heads 2 --kv-heads 1 --vocab 300 --length 32 --batch 1 --steps 2 "
    "--limit 8 --warmup 0 --eval-fraction 0 --eval-every 0"
)
# Options that need several processes, packages or services, or whose processes take long; others
# run them (tests/train, tests/integrations)
ELSEWHERE = ["--nproc", "--nnodes", "--trainer", "--report", "--metrics-port", "--quantize"]
ELSEWHERE += ["--model", "--config", "--data", "--stream", "--optimizer", "--optimizer-in-backward", "--parallel"]
# Other programs, which need a network, a cluster, a server, or minutes; and what is for commands that follow
PROGRAMS = words(""". export git pip hf docker make python pytest torchrun sbatch curl promtool mlflow tensorboard
    kubectl helm kustomize flyte pyflyte vllm llama-quantize llama-cli""")
PYPROJECT = (ROOT / "pyproject.toml").read_text()
OPTIONAL = PYPROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
EXTRAS = set(re.findall(r"^([\w-]+) = \[", OPTIONAL, re.M))
WORD = re.compile(rf"^(?:\$ )?(?:[A-Z_]+=\S+ )*({'|'.join(map(re.escape, ['liger', *PROGRAMS]))})\b")


def commands(page: str) -> list[str]:
    """Lines of shell blocks, and indented lines that begin with a program; continued lines are
    one."""
    text = re.sub(r"\\\n +", "", FENCE.sub("", PAGES[page]))
    shown = [line.strip() for line in text.splitlines() if re.match(r"^ {4}\S", line)]
    # what follows three spaces says what a command does
    indented = [re.split(r" {3,}", line)[0] for line in shown if WORD.match(line)]
    shells = "\n".join(blocks(page, "bash", "console", "sh", "shell"))
    found = [*re.sub(r"\\\n\s*", "", shells).splitlines(), *indented]
    return [line.removeprefix("$ ").strip() for line in found if line.strip() and not line.startswith("#")]


EVERY = dict.fromkeys(line for page in PAGES for line in commands(page))  # a line of several pages runs once


def parts(line: str) -> list[list[str]]:
    """The words of every command in a line, without comments, redirections and variables."""
    words = shlex.split(re.sub(r"<([\w ]+)>", r"\1", line).replace("&&", " ; ").replace("|", " ; "), comments=True)
    found: list[list[str]] = [[]]
    for word in words:
        if word == ";":
            found.append([])
        elif found[-1] or not re.match(r"^[A-Z_]+=", word):
            found[-1].append(word)
    ends = [next((i for i, word in enumerate(part) if word in (">", ">>", "<")), len(part)) for part in found]
    return [part[:end] for part, end in zip(found, ends) if part]


@pytest.mark.parametrize("line", EVERY)
def test_commands(line, offline, capsys):
    for part in parts(line):
        program, *words = part
        if program == "liger":
            run(words)
        elif program != "cd":
            assert program in PROGRAMS, f"{program}: no program that is known here; is the block a shell's?"
            for word in words:
                if re.fullmatch(r"(tests|benchmarks|examples|deploy|docs|src)/[\w./-]+", word):
                    assert (ROOT / word).exists(), word
                if extras := re.search(r"(?:^\.|checkout|liger-kernel)\[([\w,]+)\]", word):
                    assert set(extras[1].split(",")) <= EXTRAS, word


def run(words: list[str]) -> None:
    """A command of ours, at a tiny size; or, where that takes long, its arguments alone."""
    two = words[0] in ("deploy", "bench") and not "".join(words[1:2]).startswith("-")
    name = " ".join(words[: 1 + two])
    assert words[0] in cli.COMMANDS, words
    words = ["rms_norm" if word in ("OP", "NAME") else "llama" if word == "MODEL_TYPE" else word for word in words]
    if "..." in words or "COMMAND" in words or any(re.fullmatch(r"\[.*", word) for word in words):
        return  # a pattern of commands
    if words[0] in PARSED or name in PARSED:
        name = name if name in ("bench step", "bench report", "bench mismatch") else words[0]
        parser, given = command_line.parser_of(name), words[len(name.split()) :]
        parser.parse_args(getattr(parser, "as_ours", list)(given))  # names of other packages are accepted
    elif words[0] == "train":
        from liger_kernel.train.config import from_flags

        if "--config" not in words:
            from_flags(words[1:])
        if not any(word.partition("=")[0] in ELSEWHERE for word in words):
            # as a user's does on this machine; torchao's optimizers would compile for seconds
            with served_by_kernels_or_references(), torch.compiler.set_stance("force_eager"):
                assert cli.main([*words, *SMALL.split()]) == 0
    else:
        for job in (ROOT / "deploy" / "jobs").glob("*.yaml"):
            Path("deploy/jobs").mkdir(parents=True, exist_ok=True)
            shutil.copy(job, "job.yaml")
            shutil.copy(job, Path("deploy/jobs") / job.name)
        assert cli.main(words) == 0
