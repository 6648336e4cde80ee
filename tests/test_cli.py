"""The ``liger`` command: what it prints, and its exit code; mistakes are in test_mistakes.py."""

import errno
import io
import subprocess
import sys
from unittest import mock

import pytest

import liger_kernel
from liger_kernel import cli
from liger_kernel.cli import COMMANDS, main


def run(*argv):
    command = [sys.executable, "-m", "liger_kernel.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"    {name} " in out for name in COMMANDS)


OF_TRAIN = "--batch N rows per forward pass (default: 8)", "--fused-linear-cross-entropy, --no-fused-linear-"
OF_BENCH = "calls of each variant (default: 11)", "comma-separated (default: bf16, fp32 without a GPU) --mode"


@pytest.mark.parametrize("command, said", [("train", OF_TRAIN), ("bench", OF_BENCH)])
def test_help_says_what_a_flag_does_and_its_default_once(command, said, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert all(words in out for words in said)


def test_ops_lists_the_registry_and_with_a_name_its_cases(capsys):
    from liger_kernel.bench.cases import OPS

    assert main(["ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(OPS)
    assert f"{len(OPS['rms_norm'].cases)} cases" in lines[list(OPS).index("rms_norm")]
    assert main(["ops", "rms_norm"]) == 0
    out = capsys.readouterr().out
    assert "Root-mean-square" in out and "llama3-8b" in out


def test_env_says_what_serves(capsys):
    import torch

    assert main(["env"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["liger-kernel"].strip().startswith(liger_kernel.__version__)
    assert rows["torch"].strip() == torch.__version__
    assert ("kernels on the GPU" in rows["operators"]) == torch.cuda.is_available()
    assert rows["attention"].strip().startswith("sdpa by ") and rows["attention"].endswith("installed")
    assert "(enabled: flash, cudnn, mem efficient, math)" in rows["attention"]
    packed = "varlen_attn" if torch.cuda.is_available() else "sdpa with a mask: no GPU"
    assert f"packed documents by {packed};" in rows["attention"]


def test_a_package_that_fails_does_not_end_the_report(monkeypatch):
    from liger_kernel import env_report
    from liger_kernel.transformers import trl_head

    monkeypatch.setattr(trl_head, "heads", mock.Mock(side_effect=RuntimeError("too new")))
    assert env_report._trl() == "unknown: RuntimeError('too new')"


@pytest.mark.parametrize("stream", [io.TextIOWrapper(io.BytesIO(), encoding="ascii"), None])
def test_a_terminal_without_a_letter_or_a_stream_that_is_closed_ends_no_command(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream), monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(cli, "env", lambda argv: print("größe"))
    assert cli.main(["env"]) == 0 and cli.main(["größe"]) == 2
    if stream:
        stream.flush()
        assert stream.buffer.getvalue().decode("ascii").startswith("gr\\xf6\\xdfe\nliger: ")


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "x"), RuntimeError("loop.cc:48] rv != -1. pipe: Too many open files")]
)
def test_too_few_file_descriptors_are_said(error, monkeypatch, capsys):
    """Packages below have errors of their own for it."""
    monkeypatch.setattr(cli, "env", mock.Mock(side_effect=error))
    assert cli.main(["env"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("liger env: this process may not open as many files as it needs: `ulimit -n`")
    assert said.count("\n") == 1
    monkeypatch.setattr(cli, "env", mock.Mock(side_effect=RuntimeError("another")))
    with pytest.raises(RuntimeError, match="another"):
        cli.main(["env"])


def test_the_exit_code_reaches_the_shell():
    done = run("train", "--batch", "0")
    assert done.returncode == 2 and done.stderr == "liger train: batch must be at least 1, got 0\n"
    assert run("bogus").returncode == 2
    done = run("--version")
    assert done.returncode == 0 and done.stdout == f"liger-kernel {liger_kernel.__version__}\n"
