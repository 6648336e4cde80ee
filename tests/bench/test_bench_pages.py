"""The pages of docs/benchmarks say what the files of benchmarks/data say, and these files read
as the results that they were written from."""

import json
import re
import sys

import pages
import pytest

from liger_kernel.bench import results, tables

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
    line = next(line for line in pages.operators("rms_norm").splitlines() if "| rms_norm | llama3-8b |" in line)
    of_case = lambda data: [row for row in data["rows"] if (row["op"], row["case"]) == ("rms_norm", "llama3-8b")]
    ms = {row["variant"]: row["device_ms"] for row in next(filter(None, map(of_case, pages.results("op")[::-1])))}
    theirs = f"{results.digits(ms['torch'])} ({results.times(ms['torch'] / ms['ours'])})"
    assert f"| {results.digits(ms['ours'])} |" in line and theirs in line


def test_a_variant_that_is_there_again_begins_another_run():
    row = lambda variant, rate: {"model": "m", "batch": 1, "seq": 2, "variant": variant, "tokens_per_s": rate}
    found = pages.runs([row("stock", 1.0), row("ours", 2.0), row("stock", 3.0), row("ours", 4.0)])
    assert [[r["tokens_per_s"] for r in group] for _, group in found] == [[1.0, 2.0], [3.0, 4.0]]


def test_a_csv_reads_as_the_result_it_was_made_of(tmp_path):
    meta = dict.fromkeys(results.META) | {"hardware": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-20"}
    operator = {"op": "glu", "case": "1e5", "dtype": "bf16", "mode": "full", "variant": "ours", "shape": {"x": [2, 3]}}
    operator |= {"failed": None, "accurate": True, "device_ms": 0.5, "kernels": 3}
    broken = operator | {"variant": "eager", "failed": "out of memory", "device_ms": None}
    step = {"model": "m", "variant": "ours", "batch": 4, "seq": 8, "gpus": 1, "tokens_per_s": 10.0, "step_ms": 2.5}
    step |= {"breakdown_ms": {"gemm": 1.5, "idle": 0.5}}
    for rows in ([operator, broken], [step]):
        results.write_csv({"meta": meta | {"data": "random"}, "rows": rows}, tmp_path / "result.csv")
        read = results.read(tmp_path / "result.csv")
        known = [{name: row[name] for name in wanted} for row, wanted in zip(read["rows"], rows)]
        assert read["meta"] == meta and known == rows


def test_report_takes_the_csv(tmp_path, capsys):
    file, table = pages.DATA / "2026-11-22-h200-steps-all.csv", tmp_path / "table.md"
    assert tables.main([str(file), "--markdown", str(table)]) == 0
    assert "66,766" in capsys.readouterr().out and "66,766" in table.read_text()


def test_plots_of_the_site_are_those_that_pages_show():
    text = "\n".join(page.read_text() for page in (pages.ROOT / "docs").rglob("*.md"))
    shown = {*re.findall(r"^```\{plot\} (\S+)$", text, re.M)}
    assert shown == {*pages.plots()} and all(pages.plots()[name]().name == name for name in shown)
    assert "liger fit" in pages.plots()["lengths-llama_3_8b"]().html()
    assert pages.PICTURE.read_text() == pages.plots()["step"]().file(), "python benchmarks/pages.py"


@pytest.mark.slow
def test_estimates_of_the_plot_are_those_of_now():
    assert json.loads(pages.ESTIMATES.read_text()) == pages.estimates()


def test_all_rows_of_the_site():
    sys.path.append(str(pages.ROOT / "docs" / "_ext"))
    import all_rows

    html = all_rows.tables()
    count = sum(len(data["rows"]) for kind in ("op", "model") for data in pages.results(kind))
    assert html.count("<tr") == count + 2 and "LinkedIn's package" in html.replace("&#x27;", "'")
