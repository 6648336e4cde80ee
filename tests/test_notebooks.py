"""The notebooks of docs/ run on a CPU, and print what they store: what the site shows is what they
do.

jupyter execute --inplace docs/notebooks/*.ipynb      stores what they print now
"""

from __future__ import annotations

from pathlib import Path

import pytest
from quick import further

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))


def printed(notebook) -> list[str]:
    """What each cell of code prints; warnings, which differ between machines, aside."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")
        for cell in cells
    ]


@pytest.mark.parametrize("path", [NOTEBOOKS[-1], *further(*NOTEBOOKS[:-1])], ids=lambda path: path.stem)
def test_notebook(path, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(path, 4)
    stored = printed(notebook)
    place = {"metadata": {"path": str(tmp_path)}}  # some write files
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    assert any(stored) and printed(notebook) == stored


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_a_machine_is_stored(path):
    text = path.read_text()
    assert '"stderr"' not in text and "site-packages" not in text
    assert "execution" not in nbformat.read(path, 4).cells[-1].metadata
