"""The pages of docs/benchmarks say what the files of benchmarks/data say, and these files read
as the results that they were written from."""

import importlib.util
import re
from pathlib import Path

import pytest

from liger_kernel.bench import report, rows

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("benchmark_pages", ROOT / "benchmarks" / "pages.py")
pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pages)
PAGES = {path.name: path.read_text() for path in pages.PAGES.glob("*.md")}
FILES = sorted(path.name for path in pages.DATA.glob("*.csv") if path.name != "commands.csv")


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_what_the_data_says(name):
    assert pages.written(PAGES[name]) == PAGES[name], "python benchmarks/pages.py"


def test_a_number_that_was_changed_is_found():
    changed = re.sub(r"\| 70,700 ±", "| 99,999 ±", PAGES["steps.md"])
    assert changed != PAGES["steps.md"] and pages.written(changed) == PAGES["steps.md"]


def test_every_operator_that_was_measured_is_on_a_page():
    measured = {row["op"] for result in pages.results("op") for row in result["rows"]}
    shown = {
        name
        for text in PAGES.values()
        for names in re.findall(r"<!-- operators (.*?) -->", text)
        for name in names.split()
    }
    assert measured == shown


def test_every_file_says_its_command_and_every_table_its_baseline():
    losses = "2026-11-22-h200-losses.csv"  # losses of 200 steps, which no table shows
    assert {*pages.commands(), losses} == set(FILES)
    for text in PAGES.values():
        for _, kind, _, _ in pages.TABLE.findall(text):
            assert pages.UNITS[kind] in text
        for table in re.findall(r"<!-- (?:operators|steps|largest) .*?<!-- end -->", text, re.S):
            assert re.search(r"\n- NVIDIA H\d00, torch .*, 2026-\d\d-\d\d: `.+`", table)


def test_a_rival_is_compared_within_its_file_only():
    text = pages.operators("rms_norm")
    line = next(line for line in text.splitlines() if line.startswith("| rms_norm | llama3-8b |"))
    file = next(
        r
        for r in pages.results("op")[::-1]
        if any((row["op"], row["case"]) == ("rms_norm", "llama3-8b") for row in r["rows"])
    )
    ms = {
        row["variant"]: row["device_ms"]
        for row in file["rows"]
        if (row["op"], row["case"]) == ("rms_norm", "llama3-8b")
    }
    assert (
        f"| {rows.digits(ms['ours'])} |" in line
        and f"{rows.digits(ms['torch'])} ({rows.times(ms['torch'] / ms['ours'])})" in line
    )


def test_a_variant_that_is_there_again_begins_another_run():
    row = lambda variant, rate: {"model": "m", "batch": 1, "seq": 2, "variant": variant, "tokens_per_s": rate}
    found = pages.runs([row("stock", 1.0), row("ours", 2.0), row("stock", 3.0), row("ours", 4.0)])
    assert [[r["tokens_per_s"] for r in group] for _, group in found] == [[1.0, 2.0], [3.0, 4.0]]


def test_a_csv_reads_as_the_result_it_was_made_of(tmp_path):
    meta = dict.fromkeys(rows.META) | {"hardware": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-20"}
    operator = {
        "op": "glu",
        "case": "1e5",
        "dtype": "bf16",
        "mode": "full",
        "variant": "ours",
        "shape": {"x": [2, 3]},
        "failed": None,
        "accurate": True,
        "device_ms": 0.5,
        "kernels": 3,
    }
    rows.write_csv(
        {
            "meta": meta,
            "rows": [operator, operator | {"variant": "eager", "failed": "out of memory", "device_ms": None}],
        },
        tmp_path / "ops.csv",
    )
    read = rows.read(tmp_path / "ops.csv")
    assert read["meta"] == meta
    first = {name: value for name, value in read["rows"][0].items() if value is not None}
    assert first == {name: value for name, value in operator.items() if value is not None}
    assert read["rows"][1]["failed"] == "out of memory"
    step = {
        "model": "m",
        "variant": "ours",
        "batch": 4,
        "seq": 8,
        "gpus": 1,
        "tokens_per_s": 10.0,
        "step_ms": 2.5,
        "breakdown_ms": {"gemm": 1.5, "idle": 0.5},
    }
    run = {"meta": meta | {"data": "random", "lengths": 0, "masked": 0, "optimizer": "sgd"}, "rows": [step]}
    rows.write_step_csv(run, tmp_path / "steps.csv")
    (found,) = rows.read(tmp_path / "steps.csv")["rows"]
    assert found["breakdown_ms"] == step["breakdown_ms"] and found["step_ms"] == 2.5 and found["tokens_per_s"] == 10


def test_report_takes_the_csv(tmp_path, capsys):
    assert (
        report.main([str(pages.DATA / "2026-11-22-h200-steps-all.csv"), "--markdown", str(tmp_path / "table.md")]) == 0
    )
    assert "66,766" in capsys.readouterr().out and "66,766" in (tmp_path / "table.md").read_text()
