"""Tables of results, and the plots of ``benchmarks/``: what failed or is inaccurate is compared
with nothing."""

import json
import re
from xml.etree import ElementTree

import plots
import pytest

from liger_kernel.bench import results, tables

META = {"hardware": "NVIDIA H200", "torch": "2.11.0+cu130", "date": "2026-11-20", "copy_tb_s": 4.22}


def operator(op, case, variant, ms, mb, **more):
    row = {"op": op, "case": case, "dtype": "bf16", "mode": "full", "variant": variant, "shape": {"x": [8192, 4096]}}
    row |= {"device_ms": ms, "device_spread": 0.012, "wall_ms": ms + 0.05, "host_ms": 0.31, "kernels": 3}
    row |= {"peak_mb": mb, "floor_ms": 0.08, "percent_of_floor": 8 / ms, "failed": None}
    return row | {"error": 1.66e-3, "error_pytorch": 1.66e-3, "accurate": True} | more


WRONG = operator("rms_norm", "llama3-8b", "torch", 0.031, 12, error=8.3e-2, accurate=False)
FAILED = {"op": "rms_norm", "case": "llama3-1b", "dtype": "bf16", "mode": "full", "variant": "torch"}
FAILED |= {"failed": "RuntimeError: no kernel image\nfor this device", "accurate": False}
OPERATORS = [
    operator("rms_norm", "llama3-8b", "ours", 0.096, 136),
    operator("rms_norm", "llama3-8b", "upstream", 0.139, 69),
    operator("rms_norm", "llama3-8b", "eager", 1.40, 872),
    operator("rms_norm", "llama3-1b", "ours", 0.096, 135),
    operator("rms_norm", "llama3-1b", "upstream", 0.179, 68),
    operator("rope", "llama3-8b", "ours", 0.094, 168),
    operator("rope", "llama3-8b", "upstream", 0.091, 0),
    WRONG,
    FAILED,
]


def step(variant, rate, gb, **more):
    row = {"model": "llama-3.2-1b", "variant": variant, "batch": 4, "seq": 4096, "gpus": 1, "parallel": None}
    row |= {"tokens_per_s": rate, "step_ms": 4 * 4096 / rate * 1e3, "spread": 0.004, "mfu": 0.4, "failed": None}
    row |= {"breakdown_ms": {"gemm": 100.0, "norm": 20.0, "idle": 1.0}, "loss_parity": 1.6e-5}
    return row | {"peak_allocated_gb": gb} | more


STEPS = [
    step("stock", 48323, 56.5),
    step("compile", 48676, 36.9),
    step("upstream", 62152, 23.3),
    step("ours", 64171, 23.7),
    {"model": "llama-3.2-1b", "variant": "ours+compile", "batch": 4, "seq": 4096, "gpus": 1, "failed": "out of memory"},
]

# -- tables


def cells(table, *start):
    """The cells of the line that starts with ``start``."""
    (line,) = [line for line in table.splitlines() if line.split()[: len(start)] == list(start)]
    return re.split(r"\s{2,}", line)


def test_table_of_operators():
    table, case = tables.text_table(OPERATORS), ("rms_norm", "llama3-8b", "full")
    names = ["op", "case", "mode", "variant", "device ms", "x", "wall", "host", "kernels", "peak MB", "% floor"]
    assert cells(table, "op") == [*names, "error/PyTorch"]
    upstream = ["0.139 ± 1.2 %", "1.45x", "0.189", "0.310", "3", "69.0", "58", "1.00"]
    assert cells(table, *case, "upstream")[4:] == upstream
    assert cells(table, *case, "ours")[4:6] == ["0.0960 ± 1.2 %", "0.146"]  # ours has no ratio to itself
    assert cells(table, *case, "torch")[4:6] == ["0.0310 ± 1.2 %", "0.0810"]
    assert cells(table, *case, "torch")[-1] == "50.0 inaccurate"
    failed = cells(table, "rms_norm", "llama3-1b", "full", "torch")[4:]
    assert failed == ["failed: RuntimeError: no kernel image for this device"]
    other = operator("glu", "a", "ours", 1.0, 1.0, dtype="fp32")
    assert "dtype" in tables.text_table([*OPERATORS, other]).split()
    unmeasured = tables.text_table([row | {"kernels": 0, "peak_mb": 0.0} for row in OPERATORS])
    assert "kernels" not in unmeasured and "peak MB" not in unmeasured


@pytest.mark.parametrize(
    "rate, spread, beyond",
    [(150, 0.01, True), (102, 0.01, False), (98, 0.01, False), (110, 0.2, False), (900, 0.6, False)],
)
def test_speeds_within_the_noise_are_not_compared(rate, spread, beyond):
    table = tables.text_table([step("stock", 100.0, 8.0, spread=spread), step("ours", rate, 4.0, spread=spread)])
    assert ("in noise" in cells(table, "llama-3.2-1b", "ours")) == (not beyond)


def test_table_in_markdown():
    lines = tables.markdown_table([*OPERATORS[:4], WRONG | {"case": "a|b"}]).splitlines()
    assert len(lines) == 7 and len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert lines[1].startswith("| --- | --- | --- | --- | ---: |")
    assert "| 1.45x |" in lines[3] and "a\\|b" in lines[6] and "x |" not in lines[6]


@pytest.mark.parametrize(
    "value, text",
    [(0.096, "0.0960"), (1.4, "1.40"), (141.4, "141"), (12608.0, "12,608"), (0.0, "0"), (None, ""), (9.999, "10.0")],
)
def test_digits(value, text):
    assert results.digits(value) == text


def test_report_of_several_runs(tmp_path, capsys):
    row = operator("glu", "llama", "ours", 2.0, 1.0)
    for i, rows in enumerate([[row, row | {"case": "phi3", "device_ms": 5.0}], [row | {"device_ms": 1.25}]]):
        (tmp_path / f"{i}.json").write_text(json.dumps({"meta": META, "rows": rows}))
    files = [str(tmp_path / name) for name in ("0.json", "1.json", "all.csv", "all.md")]
    assert tables.main([*files[:2], "--csv", files[2], "--markdown", files[3]]) == 0
    table = (tmp_path / "all.md").read_text()
    assert "1.25" in table and "5.00" in table and "2.00" not in table
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 3


# -- plots


def texts(rows: list, width: int = plots.drawing.WIDTH) -> dict[str, list[str]]:
    """Name of a plot -> its texts; no bar leaves its panel, and both forms are well-formed."""
    found = {}
    for plot in plots.plots_of({"meta": META, "rows": rows}):
        for form in (plot.file(), plot.html()):
            parsed = ElementTree.fromstring(form)
        boxes = [at for at in parsed.iter("rect")]
        assert all(float(at.get("x")) + float(at.get("width")) <= width + 1 for at in boxes)
        found[plot.name] = [" ".join(text.split()) for text in parsed.itertext()]
    return found


def test_plots_of_steps():
    found = texts(STEPS)
    assert [*found] == ["step", "breakdown"]
    assert "48,323 tokens/s · 1.33x" in found["step"] and "56.5 GB · 2.38x" in found["step"]
    assert any("1.33x as fast as stock with 0.42x the memory" in text for text in found["step"])
    assert {"gemm", "norm", "idle"} <= {*found["breakdown"]} and "loss" not in found["breakdown"]
