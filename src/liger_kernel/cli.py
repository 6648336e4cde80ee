"""``liger``: train, chat, merge, fit, recipes, demo, models, ops, bench, tune, warmup, deploy,
env. A command's code is imported only when the command runs, so help is instant."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import warnings
from pathlib import Path

import liger_kernel
from liger_kernel.train.config import from_flags
from liger_kernel.train.mistakes import Parser, UserError, one_of, sentence
from liger_kernel.train.redact import in_a_line

COMMANDS = {
    "train": "train or fine-tune a causal language model",
    "chat": "ask a model or adapters that were trained, also beside their base",
    "merge": "merge adapters into their base, as one model to serve or to publish",
    "fit": "estimate, without a GPU, what fits into a GPU's memory, and what each switch saves",
    "recipes": "settings for cards of 24 GB to eight of 80 GB: list them, or copy one",
    "demo": "train a small Llama twice, as Hugging Face ships it and with our kernels, and compare",
    "models": "the model families: what is swapped, what is left alone and why",
    "ops": "the operators and the cases they are tested on",
    "bench": "measure operators; `bench step`: training steps; `bench mismatch`: log-probabilities of samplers"
    " and trainers",
    "tune": "search an operator's launch configurations on this GPU",
    "warmup": "compile the kernels that training a model needs, with or without a GPU",
    "deploy": "render a training job for Kubernetes, submit it, and look after it",
    "env": "versions, the GPU, and whether kernels or PyTorch references run",
}
# command -> the module whose ``main`` it is, and the packages that it needs; others are functions of this file
MODULES = {
    "chat": ("train.chat", "torch transformers"),
    "merge": ("train.merge", "torch transformers peft"),
    "fit": ("train.fit", "torch triton transformers"),
    "demo": ("train.demo", "torch transformers"),
    "bench": ("bench.operators", "torch"),
    "bench step": ("bench.step", "torch transformers"),
    "bench mismatch": ("bench.mismatch", "torch transformers"),
    "bench report": ("bench.tables", ""),
    "tune": ("bench.tune", "torch"),
    "warmup": ("warmup", "torch triton transformers"),
    "deploy": ("deploy.command", ""),
}
INTERRUPTED, PIPE_CLOSED = 130, 141  # the exit codes that shells report for a program that SIGINT or SIGPIPE ends


def train(argv: list[str]) -> int:
    config = from_flags(argv)  # before torch is imported, so that help and errors in flags appear at once
    _need("torch transformers")
    from liger_kernel.train import ranks

    if config.nproc is not None:
        return ranks.launch_elastic(config)
    from liger_kernel.train import card, loop

    try:
        metrics = ranks.reporting(loop.train)(config)
    except ranks.Preempted as stopped:
        print(stopped, file=sys.stderr)
        return ranks.EXIT_PREEMPTED
    if config.dry_run or int(os.environ.get("RANK", "0")):
        return 0
    # without steps, as after a restart of a finished run, there are no tokens/s, and without its
    # metrics.json no loss
    loss = f"loss {metrics['losses'][-1]:.4f}, " if metrics["losses"] else ""
    rate = f"{metrics['tokens_per_second']:,.0f} tokens/s, " if metrics["tokens_per_second"] else ""
    memory = f"{metrics['peak_memory'] / 1e9:.2f} GB at most ({metrics['memory_kind']})"
    print(f"{loss}{rate}{memory}; {config.out}/metrics.json")
    card.finish(config, metrics)
    return 0


def recipes(argv: list[str]) -> None:
    parser = Parser(prog="liger recipes", description="List the recipes; with a name, copy that one to a file here.")
    parser.add_argument("name", nargs="?", help="a recipe")
    parser.add_argument("--out", metavar="FILE", help="new file to copy it to (default: NAME.yaml)")
    a = parser.parse_args(argv)
    texts = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}
    if a.name is None:
        for name, text in texts.items():
            print(f"{name:<20} {text.splitlines()[0].removeprefix('# ')}")
        return
    name = one_of("recipe", a.name.removesuffix(".yaml"), texts)
    text, out = texts[name], a.out or f"{name}.yaml"
    try:
        with open(out, "x") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    said = "".join(line[2:] for line in text.splitlines(keepends=True) if line.startswith("# "))
    print(f"{said.replace(f'{name}.yaml', out)}copied to {out}")


def models(argv: list[str]) -> int:
    parser = Parser(prog="liger models", description="The model families: what is swapped, what is left alone and why.")
    parser.add_argument("model_type", nargs="*", help="only these model types")
    does = parser.add_mutually_exclusive_group()
    does.add_argument(
        "--check", action="store_true", help="derive the table from the installed transformers and show the difference"
    )
    does.add_argument(
        "--write",
        action="store_true",
        help="derive the table, and write families.json, __init__.pyi, and in a checkout docs/models.md",
    )
    a = parser.parse_args(argv)
    if a.write and a.model_type:
        raise UserError("--write writes the whole table: leave out the model types")
    _need("torch transformers")
    from liger_kernel.transformers import table

    for name in a.model_type:
        one_of("model type", name, table.known())
    return table.write() if a.write else table.show(a.model_type, a.check)


def ops(argv: list[str]) -> None:
    parser = Parser(prog="liger ops", description="List the operators; with a name, its documentation and cases.")
    parser.add_argument("name", nargs="?", help="an operator")
    name = parser.parse_args(argv).name
    _need("torch")
    from liger_kernel.bench.cases import OPS

    if name is None:
        width = max(map(len, OPS))
        for op in OPS.values():
            print(f"{op.name:<{width}}  {len(op.cases):>3} cases  {op.doc.splitlines()[0]}")
        return
    op = OPS[one_of("operator", name, OPS)]
    print(f"{op.doc}\n\ncases")
    for case in op.cases:
        kind = "real model, GPU only" if case.gpu else ""
        print(f"  {case.name:<20} {kind}".rstrip())


def env(argv: list[str]) -> None:
    Parser(prog="liger env", description="What a bug report needs to know.").parse_args(argv)
    from liger_kernel.env_report import print_env_report

    print_env_report()


def run(name: str, argv: list[str]) -> int | None:
    """Run a command, of one or two words."""
    if name not in MODULES:
        return globals()[name](argv)
    module, packages = MODULES[name]
    if name in ("bench", "tune"):  # help and errors in flags appear before torch is imported
        from liger_kernel.bench import arguments

        (arguments.operators if name == "bench" else arguments.tune)(argv)
    _need(packages)
    return importlib.import_module(f"liger_kernel.{module}").main(argv)


def _need(packages: str) -> None:
    missing = [name for name in packages.split() if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{' and '.join(missing)} {verb} not installed: pip install {' '.join(missing)}")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. A mistake of the user gives one line on stderr
    and 2 (``LIGER_TRACEBACK=1`` adds the traceback)."""
    argv = sys.argv[1:] if argv is None else argv
    name = "liger"
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115  # until the end
        elif isinstance(getattr(sys, stream), io.TextIOWrapper):
            # a name that the terminal's encoding lacks must not end a command
            getattr(sys, stream).reconfigure(errors="backslashreplace")
    try:
        try:
            command = _command(argv)
            if command is None:
                return 0
            words = 2 if " ".join(argv[:2]) in MODULES else 1
            found = " ".join([command, *argv[1:words]])
            name = f"liger {found}"
            # PEFT reads an old name of transformers: nothing that a user could change
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            return run(found, argv[words:]) or 0
        finally:
            sys.stdout.flush()  # here, so that a closed pipe raises inside this try
    except BrokenPipeError:  # `liger ops | head`
        with contextlib.suppress(OSError, ValueError):  # then the interpreter discards the rest of the buffer
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        known = sentence(error)
        if os.environ.get("LIGER_TRACEBACK") == "1" or not (
            known or isinstance(error, (UserError, ImportError, OSError))
        ):
            raise
        more = "" if isinstance(error, UserError) else f" ({type(error).__name__}; LIGER_TRACEBACK=1 shows where)"
        text = known or in_a_line(error, None)
        if not known and isinstance(error, OSError) and error.filename and error.strerror:
            text = f"{error.filename}: {error.strerror}"
        print(f"{name}: {text}{more}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _command(argv: list[str]) -> str | None:
    """The command at the start of ``argv``. Without one, print the help and return None."""
    parser = Parser(
        prog="liger", usage="liger COMMAND [-h] ...", description=(liger_kernel.__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--version", action="version", version=f"liger-kernel {liger_kernel.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="liger")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    if not argv:
        parser.print_help()
        return None
    return parser.parse_args(argv[:1]).command


if __name__ == "__main__":
    sys.exit(main())
