"""``liger``: train, demo, models, ops, bench, tune, warmup, deploy, env. A command's code is imported when it is asked for, so that help is instant."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable

import liger_kernel
from liger_kernel.train.config import UserError, from_flags
from liger_kernel.train.redact import in_a_line

COMMANDS = {
    "train": "train or fine-tune a causal language model",
    "demo": "train a small Llama twice, as Hugging Face ships it and with our kernels, and compare",
    "models": "the model families: what is swapped, what is left alone and why",
    "ops": "the operators and the cases they are tested on",
    "bench": "measure operators, or with `bench step` whole training steps, beside eager, torch.compile and other packages",
    "tune": "search an operator's launch configurations on this GPU",
    "warmup": "compile the kernels that training a model needs, with or without a GPU",
    "deploy": "render a training job for Kubernetes, or submit it",
    "env": "versions, GPU, and whether kernels or references serve",
}


def train(argv: list[str]) -> int:
    config = from_flags(argv)  # before torch is imported: help and mistakes in flags answer at once
    _need("torch", "transformers")
    from liger_kernel.train import ranks

    if config.nproc is not None:
        return ranks.launch_elastic(config)
    from liger_kernel.train import loop

    try:
        metrics = ranks.reporting(loop.train)(config)
    except ranks.Preempted as stopped:
        print(stopped, file=sys.stderr)
        return ranks.EXIT_PREEMPTED
    if int(os.environ.get("RANK", "0")):
        return 0
    loss = f"loss {metrics['losses'][-1]:.4f}" if metrics["losses"] else "no step was left to make"
    rate, memory = metrics["tokens_per_second"], metrics["peak_memory"] / 1e9
    print(f"{loss}, {rate:,.0f} tokens/s, {memory:.2f} GB at most ({metrics['memory_kind']}); {config.out}/metrics.json")
    if config.save:
        print(f"{'adapters' if config.lora else 'model'} in {config.save}")
    return 0


def demo(argv: list[str]) -> int:
    _need("torch", "transformers")
    from liger_kernel.train import demo

    return demo.main(argv)


def models(argv: list[str]) -> int | None:
    _need("torch", "transformers")
    from liger_kernel.transformers import table

    return table.main(argv)


def ops(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="liger ops", description="List the operators; with a name, its documentation and cases.")
    parser.add_argument("name", nargs="?", help="an operator")
    name = parser.parse_args(argv).name
    _need("torch")
    from liger_kernel.bench.cases import OPS

    if name is None:
        width = max(map(len, OPS))
        for op in OPS.values():
            print(f"{op.name:<{width}}  {len(op.cases):>3} cases  {op.doc.splitlines()[0]}")
        return
    if name not in OPS:
        raise UserError(f"no operator {name!r}; there are {', '.join(OPS)}")
    op = OPS[name]
    print(f"{op.doc}\n\ncases")
    for case in op.cases:
        kind = f"raises '{op.name}: {case.error}'" if case.error else "real model, GPU only" if case.gpu else ""
        print(f"  {case.name:<20} {kind}".rstrip())


def bench(argv: list[str]) -> int:
    _need("torch")
    if argv[:1] == ["step"]:
        from liger_kernel.bench import step

        return step.main(argv[1:])
    if argv[:1] == ["report"]:
        from liger_kernel.bench import report

        return report.main(argv[1:])
    from liger_kernel.bench import operators

    return operators.main(argv)


def tune(argv: list[str]) -> int:
    _need("torch")
    from liger_kernel.bench import tune

    return tune.main(argv)


def warmup(argv: list[str]) -> int:
    _need("torch", "triton", "transformers")
    from liger_kernel import warmup

    return warmup.main(argv)


def deploy(argv: list[str]) -> int:
    from liger_kernel.deploy import command

    return command.main(argv)


def env(argv: list[str]) -> None:
    argparse.ArgumentParser(prog="liger env", description="What a bug report needs to know.").parse_args(argv)
    from liger_kernel.env_report import print_env_report

    print_env_report()


def _need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}")


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code is its own, or 2 for a mistake of the user, which takes one line (``LIGER_TRACEBACK=1`` for all of it)."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="liger", usage="liger COMMAND [-h] ...", description=(liger_kernel.__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action="version", version=f"liger-kernel {liger_kernel.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="liger")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    if not argv:
        parser.print_help()
        return 0
    command = parser.parse_args(argv[:1]).command
    run: Callable[[list[str]], int | None] = globals()[command]
    try:
        return run(argv[1:]) or 0
    except (UserError, ImportError, OSError) as error:
        if os.environ.get("LIGER_TRACEBACK") == "1":
            raise
        more = "" if isinstance(error, UserError) else f" ({type(error).__name__}; LIGER_TRACEBACK=1 shows where)"
        print(f"liger {command}: {in_a_line(error, None)}{more}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
