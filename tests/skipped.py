"""``--max-skips N``: the run fails if more than N tests are skipped for reasons other than those of
``LISTED``.

A package that cannot be imported any more takes its tests away without a failure, a whole file of
them as one. Reasons that are listed say what a machine without a GPU lacks, or what has an
environment or a run of its own; all others are to be looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

LISTED = re.compile(
    "|".join(
        (
            r"needs (a GPU|two GPUs|\d+ GPUs|70 GB of GPU memory)",
            r"varlen_attn needs a GPU",
            r"there is no device to wait for",
            r"the default is another device only where there is one",
            r"(accuracy is that|bits are those) of (the GPU's|PyTorch's)",
            # environments of their own (tests/integrations/environments.py)
            r"tests/integrations/environments\.py \w+",
            r"[\w.]+ is not installed: make test-integrations",
            r"((lightning|deepspeed|bitsandbytes|trl)(, )?)+ is not installed",
            r"could not import '(trl|flyte(kit)?|lightning|bitsandbytes|s3fs)\b",
            r"not installed: apt install prometheus",
            # cases that another case of the same test covers
            r"is what column_major is",
            r"rows of indices: a test of its own",
            r"the counter multiplies the weight gradient of a grouped convolution",
            r"stock( of [\d.]+)?: ",  # what transformers itself does not train
        )
    )
)


class Skips:
    def __init__(self, most: int):
        self.most = most
        self.found: dict[str, str] = {}  # test or file -> why

    def _add(self, report: Any) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.found[report.nodeid] = (
                report.longrepr[2].removeprefix("Skipped: ")
                if isinstance(report.longrepr, tuple)
                else str(report.longrepr)
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Files that are skipped as a whole are known to the processes of xdist alone."""
        self.found |= getattr(node, "workeroutput", {}).get("skipped", {})

    @property
    def unlisted(self) -> Counter[str]:
        return Counter(why for why in self.found.values() if not LISTED.match(why))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["skipped"] = self.found
        elif self.unlisted.total() > self.most:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.unlisted.total() > self.most:
            terminalreporter.section(
                f"{self.unlisted.total()} tests or files skipped for reasons that tests/skipped.py does not list, "
                f"allowed {self.most}"
            )
            for why, count in self.unlisted.most_common():
                terminalreporter.write_line(f"{count:5} {why}")
