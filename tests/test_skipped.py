"""The cap on skipped tests: a test or a file that is skipped for no listed reason fails the run,
also over processes of xdist."""

import subprocess
import sys
from pathlib import Path

import pytest

ONE = "import pytest\ndef test_it(): pytest.skip({!r})\ndef test_other(): pass\n"
FILE = "import pytest\npytest.skip({!r}, allow_module_level=True)\n"


@pytest.mark.parametrize(
    "text, reason, options, code",
    [
        (ONE, "somebody's package is not here", ["--max-skips=0"], 1),
        (ONE, "somebody's package is not here", ["--max-skips=1"], 0),
        (FILE, "somebody's package is not here", ["--max-skips=0", "-n1"], 1),
        (FILE, "needs two GPUs", ["--max-skips=0", "-n1"], 0),
    ],
)
def test_skips_are_counted(text, reason, options, code, tmp_path):
    if "-n1" in options:
        pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(
        "from skipped import Skips\n"
        "def pytest_addoption(parser): parser.addoption('--max-skips', type=int)\n"
        "def pytest_configure(config):\n"
        "    if config.getoption('--max-skips') is not None: "
        "config.pluginmanager.register(Skips(config.getoption('--max-skips')))\n"
    )
    (tmp_path / "test_a.py").write_text(text.format(reason))
    (tmp_path / "test_b.py").write_text("def test_passes(): pass\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={tmp_path}"]
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    argv += [*options, str(tmp_path)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert (f"    1 {reason}" in done.stdout) == bool(code)
