"""Pictures and tables of benchmark results: from hand-written rows, on the numbers that one H200
gave."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from liger_kernel.bench import plots, report
from liger_kernel.bench.plots import drawing

META = {
    "hardware": "NVIDIA H200",
    "python": "3.12.3",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "liger_kernel": "0.8.90",
    "date": "2026-11-20",
    "copy_tb_s": 4.22,
    "gemm_tflops": 724.0,
    "command": "liger bench --against upstream,compile,eager",
}

VARIANTS = ("ours", "upstream", "compile", "eager", "cce")
# operator, case, shapes, bytes, FLOPs, then device ms and peak MB of each variant
MEASURED = [
    (
        "rms_norm",
        "llama3-8b",
        {"x": [8192, 4096], "w": [4096]},
        0.336e9,
        0.40e9,
        (0.096, 136),
        (0.139, 69),
        (0.124, 143),
        (1.40, 872),
    ),
    (
        "rms_norm",
        "llama3-1b",
        {"x": [16384, 2048], "w": [2048]},
        0.336e9,
        0.40e9,
        (0.096, 135),
        (0.179, 68),
        (0.115, 159),
        (1.41, 872),
    ),
    (
        "rms_norm",
        "qwen3-qk",
        {"x": [262144, 128], "w": [128]},
        0.336e9,
        0.40e9,
        (0.097, 135),
        (0.239, 68),
        (0.105, 138),
        (1.57, 872),
    ),
    (
        "rope",
        "llama3-8b",
        {"q": [4, 32, 2048, 128], "k": [4, 8, 2048, 128]},
        0.336e9,
        0.25e9,
        (0.094, 168),
        (0.091, 0),
        (0.337, 235),
        (1.42, 302),
    ),
    (
        "glu",
        "llama3-8b",
        {"gate": [8192, 14336], "up": [8192, 14336]},
        1.88e9,
        1.4e9,
        (0.440, 705),
        (0.448, 235),
        (0.439, 705),
        (0.776, 940),
    ),
    (
        "cross_entropy",
        "llama3-8b",
        {"logits": [8192, 128256]},
        6.3e9,
        8.4e9,
        (1.78, 2101),
        (1.94, 0),
        (2.60, 2101),
        (13.5, 12608),
    ),
    (
        "linear_cross_entropy",
        "llama3-8b",
        {"x": [8192, 4096], "w": [128256, 4096]},
        2.3e9,
        2.58e13,
        (41.2, 1381),
        (55.9, 1183),
        (39.8, 3219),
        (48.8, 12608),
        (45.0, 1500),
    ),
    (
        "linear_cross_entropy",
        "gemma3",
        {"x": [4096, 3072], "w": [256000, 3072]},
        3.2e9,
        1.93e13,
        (31.8, 2122),
        (141.0, 1632),
        (30.5, 3695),
        (40.7, 12583),
        (36.0, 1700),
    ),
]


def operator_row(op, case, variant, ms, mb, shape=None, moved=1e9, flops=1e9, **more):
    floor = max(moved / META["copy_tb_s"] / 1e9, flops / META["gemm_tflops"] / 1e9)
    row = {
        "op": op,
        "case": case,
        "dtype": "bf16",
        "mode": "full",
        "variant": variant,
        "shape": shape or {"x": [8192, 4096]},
        "device_ms": ms,
        "device_spread": 0.012,
        "wall_ms": ms + 0.05,
        "host_ms": 0.31,
        "kernels": 3,
        "peak_mb": mb,
        "bytes": moved,
        "flops": flops,
        "floor_ms": floor,
        "percent_of_floor": 100 * floor / ms,
        "tb_s": moved / ms / 1e9,
        "tflop_s": flops / ms / 1e9,
        "error": 1.66e-3,
        "error_pytorch": 1.66e-3,
        "accurate": True,
        "failed": None,
    }
    return row | more


def failed_row(op, case, variant, text, **more):
    row = operator_row(op, case, variant, 1.0, 1.0, **more)
    measured = (
        "device_ms",
        "device_spread",
        "wall_ms",
        "host_ms",
        "kernels",
        "peak_mb",
        "percent_of_floor",
        "tb_s",
        "tflop_s",
        "error",
        "error_pytorch",
    )
    return {name: value for name, value in row.items() if name not in measured} | {"accurate": False, "failed": text}


WRONG = operator_row(
    "rms_norm",
    "llama3-8b",
    "quack",
    0.031,
    12,
    {"x": [8192, 4096], "w": [4096]},
    0.336e9,
    0.40e9,
    error=8.3e-2,
    accurate=False,
)
FAILED = failed_row("rms_norm", "llama3-1b", "quack", "RuntimeError: no kernel image\nfor this device", moved=0.336e9)


def measured(*ops):
    """All results, or those of some operators."""
    rows = [
        operator_row(op, case, v, *found, shape, moved, flops)
        for op, case, shape, moved, flops, *variants in MEASURED
        for v, found in zip(VARIANTS, variants)
    ]
    return {"meta": META, "rows": [row for row in [*rows, WRONG, FAILED] if not ops or row["op"] in ops]}


def swept(sweep="tokens", values=(1024, 2048, 4096, 8192, 16384, 32768)):
    rows = []
    for n in values:
        shape = {"x": [n, 4096], "w": [128256, 4096]} if sweep == "tokens" else {"x": [8192, 2048], "w": [n, 2048]}
        flops = 6.0 * shape["x"][0] * shape["x"][1] * shape["w"][0]
        more = {"sweep": sweep, "x": n, "shape": shape, "flops": flops, "moved": 2e9}
        case = f"{sweep}={n}"
        ms = flops / 5.9e11
        rows += [
            operator_row("linear_cross_entropy", case, v, ms * a + b, mb, **more)
            for v, a, b, mb in (
                ("ours", 1.0, 0.4, 1100 + 0.03 * n),
                ("upstream", 1.1, 26.0, 960 + 0.02 * n),
                ("compile", 0.97, 0.4, 1100 + 0.26 * n),
            )
        ]
        eager = operator_row("linear_cross_entropy", case, "eager", 1.22 * ms + 0.6, 1.54 * n, **more)
        rows.append(
            eager if n < 32768 * 8 else failed_row("linear_cross_entropy", case, "eager", "out of memory", **more)
        )
    return rows


def modes():
    rows = []
    for mode, share in (("forward", 0.36), ("backward", 0.62), ("full", 1.0)):
        for op, case, shape, moved, flops, *variants in MEASURED[:3]:
            for v, (ms, mb) in zip(VARIANTS, variants):
                rows.append(operator_row(op, case, v, ms * share, mb * share, shape, moved * share, flops, mode=mode))
    return {"meta": META, "rows": rows}


KINDS = ("gemm", "attention", "norm", "activation", "rope", "loss", "optimizer", "communication", "other", "idle")
BREAKDOWN = {
    "stock": (121.0, 21.0, 31.0, 25.5, 11.2, 87.0, 13.0, 0.0, 22.0, 7.0),
    "compile": (122.0, 21.4, 9.0, 20.0, 3.9, 118.0, 13.0, 0.0, 20.0, 9.0),
    "upstream": (141.0, 21.1, 9.6, 21.0, 2.6, 31.0, 13.0, 0.0, 20.0, 4.0),
    "ours": (139.0, 21.0, 6.4, 20.6, 2.7, 29.0, 13.0, 0.0, 20.0, 3.0),
}
STEPS = [
    (
        "llama-3.2-1b",
        4,
        4096,
        {"stock": (48323, 56.5), "compile": (48676, 36.9), "upstream": (62152, 23.3), "ours": (64171, 23.7)},
    ),
    (
        "llama-3-8b-4layers",
        4,
        2048,
        {"stock": (56038, 23.4), "compile": (63544, 15.4), "upstream": (60155, 9.95), "ours": (67214, 10.2)},
    ),
    (
        "gemma-2b",
        4,
        2048,
        {"stock": (28265, 57.2), "compile": (31973, 36.0), "upstream": (29111, 24.8), "ours": (35295, 25.0)},
    ),
]


def timeline(peak, milliseconds, layers=16):
    """Weights, a forward that keeps activations, the peak of the loss, a backward that frees
    them, the optimizer."""
    held = 4.9
    points, step = (
        [[0.0, held, "start"], [0.01 * milliseconds, held + 0.1, "forward: embedding"]],
        0.45 * min(peak, 24.0) / layers,
    )
    for i in range(layers):
        points.append([milliseconds * (0.01 + 0.2 * (i + 1) / layers), held + step * (i + 1), f"forward: layer {i}"])
    top = points[-1][1]
    points += [
        [0.3 * milliseconds, peak, "forward: loss and head"],
        [0.38 * milliseconds, 0.6 * peak + 0.4 * top, "forward: loss and head"],
    ]
    points += [[0.42 * milliseconds, top + 2, "backward: loss and head"]]
    for i in reversed(range(1, layers)):
        points.append(
            [milliseconds * (0.42 + 0.5 * (layers - i) / layers), held + 2.4 + step * i, f"backward: layer {i}"]
        )
    points.append([0.94 * milliseconds, held + 2.5, "backward: layer 0 and embedding"])
    return [*points, [milliseconds, held, "optimizer"]]


def trained():
    rows = []
    for model, batch, seq, variants in STEPS:
        for variant, (rate, memory) in variants.items():
            ms = batch * seq / rate * 1e3
            scale = ms / sum(BREAKDOWN[variant])
            rows.append(
                {
                    "model": model,
                    "variant": variant,
                    "batch": batch,
                    "seq": seq,
                    "gpus": 1,
                    "parallel": None,
                    "tokens_per_s": rate,
                    "step_ms": ms,
                    "spread": 0.004,
                    "mfu": rate / 140000,
                    "peak_allocated_gb": memory,
                    "peak_reserved_gb": memory * 1.08,
                    "losses": [12.1624, 12.1703],
                    "loss_parity": 0.0 if variant == "stock" else 1.6e-5,
                    "largest_batch": int(500 / memory),
                    "failed": None,
                    "breakdown_ms": {kind: value * scale for kind, value in zip(KINDS, BREAKDOWN[variant])},
                    "memory_timeline": timeline(memory, ms),
                }
            )
    rows.append(
        {
            "model": "llama-3.2-1b",
            "variant": "ours+compile",
            "batch": 4,
            "seq": 4096,
            "gpus": 1,
            "parallel": None,
            "failed": "out of memory",
        }
    )
    return {"meta": META | {"command": "liger bench step --model llama-3.2-1b,gemma-2b"}, "rows": rows}


@pytest.fixture
def words(monkeypatch):
    """file name -> the texts of a picture, as they are saved."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    found, drawn, save, export = {}, [], Figure.savefig, drawing.export

    def savefig(figure, file, **kwargs):
        drawn[:] = [text.get_text() for text in figure.findobj(Text) if text.get_text()]
        save(figure, file, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    monkeypatch.setattr(
        drawing, "export", lambda path, picture: (found.update({path.name: [*drawn]}), export(path, picture))
    )
    return found


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 5000


# -- pictures


def test_operators_draws_roofline_times_and_memory(words, tmp_path):
    data = measured()
    data["rows"] += swept()
    paths = plots.operators(data, tmp_path)
    ops = list(dict.fromkeys(op for op, *_ in MEASURED))
    expected = {"roofline.png", "tokens-linear_cross_entropy-bf16-full.png"} | {
        f"{kind}-{op}-bf16.png" for kind in ("time", "memory") for op in ops
    }
    assert {path.name for path in paths} == expected
    assert all(is_png(path) for path in paths)


def test_time_bars_say_values_ratios_and_the_floor(words, tmp_path):
    plots.time_bars(measured("rms_norm", "rope"), tmp_path)
    texts = words["time-rms_norm-bf16.png"]
    assert "0.0960 ms   83 % of floor" in texts
    assert "0.139 ms   1.45x" in texts and "1.40 ms   14.6x" in texts
    assert any(text.startswith("rms_norm: 1.45–2.46x the speed of LinkedIn's package") for text in texts)
    assert any("NVIDIA H200" in text and "2026-11-20" in text for text in texts)
    assert any(
        text.startswith("rope: 0.97x the speed of LinkedIn's package") for text in words["time-rope-bf16.png"]
    )  # a loss is said like a win


def test_wrong_and_failed_have_no_ratio(words, tmp_path):
    plots.time_bars(measured("rms_norm"), tmp_path)
    plots.memory_bars(measured("rms_norm"), tmp_path)
    for name in ("time-rms_norm-bf16.png", "memory-rms_norm-bf16.png"):
        texts = words[name]
        assert "inaccurate" in texts and "failed" in texts
        assert not any("quack" in text and "x" in text for text in texts)  # nor in the title
    ours = operator_row("rms_norm", "llama3-8b", "ours", 0.096, 136)
    assert plots.bar_label(WRONG, ours, "device_ms") == plots.bar_label(WRONG, ours, "peak_mb") == "inaccurate"
    assert plots.bar_label(FAILED, ours, "device_ms") == "failed"


def test_nothing_is_compared_to_a_wrong_ours(words, tmp_path):
    rows = [row | {"accurate": row["variant"] != "ours"} for row in measured()["rows"] if row["op"] == "glu"]
    paths = [
        *plots.time_bars({"meta": META, "rows": rows}, tmp_path),
        *plots.memory_bars({"meta": META, "rows": rows}, tmp_path),
    ]
    assert len(paths) == 2
    for texts in words.values():
        assert "glu: ours is inaccurate in 1 of 1 cases" in texts
        assert not any(re.search(r"\d\.\d\dx", text) for text in texts)


def test_modes_are_columns(words, tmp_path):
    assert [path.name for path in plots.time_bars(modes(), tmp_path)] == ["time-rms_norm-bf16.png"]
    texts = words["time-rms_norm-bf16.png"]
    assert {"llama3-8b, forward", "llama3-8b, backward", "llama3-8b, forward + backward"} <= set(texts)


def test_memory_of_nothing_is_not_hidden(words, tmp_path):
    plots.memory_bars(measured("rope"), tmp_path)
    assert "0 MB" in words["memory-rope-bf16.png"]
    assert any("LinkedIn's package needs none" in text for text in words["memory-rope-bf16.png"])


def test_memory_that_could_not_be_measured_is_not_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row | {"peak_mb": 0.0} for row in measured()["rows"]]
    assert plots.memory_bars({"meta": META, "rows": rows}, tmp_path) == []


@pytest.mark.parametrize(
    "sweep, values, title",
    [
        ("tokens", (1024, 8192, 32768), "at 32,768 tokens"),
        ("vocabulary", (32000, 128256, 262144), "at vocabulary 262,144"),
    ],
)
def test_sweeps(sweep, values, title, words, tmp_path):
    rows = [
        {name: value for name, value in row.items() if name != "x"} for row in swept(sweep, values)
    ]  # found in the shapes
    (path,) = plots.sweeps({"meta": META, "rows": rows}, tmp_path)
    assert is_png(path) and path.name == f"{sweep}-linear_cross_entropy-bf16-full.png"
    texts = words[path.name]
    assert any(title in text for text in texts)
    assert {"ours", "LinkedIn's package", "torch.compile", "floor"} <= set(texts)
    assert ("PyTorch eager, failed at 262,144" in texts) == (sweep == "vocabulary")


def test_roofline_leaves_out_what_is_wrong(words, tmp_path):
    (path,) = plots.roofline(measured(), tmp_path)
    texts = words[path.name]
    assert is_png(path)
    assert all(op in texts for op, *_ in MEASURED)
    assert "quack" not in texts
    assert "copy 4.22 TB/s" in texts and "GEMM 724 TFLOP/s" in texts
    assert plots.roofline({"meta": {}, "rows": measured()["rows"]}, tmp_path) == []


def test_roofline_labels_do_not_overlap(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    rows = [
        operator_row(f"operator_number_{i}", "a", v, 0.1 * slow, 1, moved=3e8, flops=3e8 * (0.3 + 0.11 * i))
        for i in range(16)
        for v, slow in (("ours", 1.0), ("eager", 9.0))
    ]
    boxes, save = [], Figure.savefig

    def savefig(figure, *args, **kwargs):
        save(figure, *args, **kwargs)
        boxes.extend(text.get_window_extent() for text in figure.axes[0].texts)

    monkeypatch.setattr(Figure, "savefig", savefig)
    plots.roofline({"meta": META, "rows": rows}, tmp_path)
    assert len(boxes) == 18  # with the names of the two roofs
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_steps(words, tmp_path):
    paths = plots.steps(trained(), tmp_path)
    assert [path.name for path in paths[:2]] == ["step.png", "breakdown.png"] and len(paths) == 2 + len(STEPS)
    assert all(is_png(path) for path in paths)
    assert (
        "64,171 tokens/s" in words["step.png"]
        and "48,323 tokens/s   1.33x" in words["step.png"]
        and "56.5 GB   2.38x" in words["step.png"]
    )
    assert any(
        re.search(r"1\.20–1\.33x as fast as stock\s+with 0\.42–0\.44x the memory", text) for text in words["step.png"]
    )
    assert {"gemm", "loss", "idle"} <= set(words["breakdown.png"]) and "communication" not in words["breakdown.png"]
    memory = words["memory_over_step-llama_3.2_1b_4_x_4096.png"]
    assert (
        "stock: 56.5 GB in loss and head (forward)" in memory and "ours: 23.7 GB in loss and head (forward)" in memory
    )


def test_lengths(words, tmp_path):
    """Each variant is a line, and what `liger fit` says of ours stands beside what was measured;
    two lengths are no curve."""
    same = dict(
        model="tiny",
        gpus=1,
        parallel=None,
        checkpointing=True,
        lora=0,
        autocast=False,
        optimizer="sgd",
        batch=1,
        failed=None,
        layers=None,
    )
    rows = [
        same
        | dict(
            variant=name,
            seq=seq,
            tokens_per_s=1000.0,
            peak_allocated_gb=seq / 1000,
            estimated_gb=None if name == "unsloth" else seq / 990,
        )
        for name in ("unsloth", "ours", "ours:offload")
        for seq in (512, 1024, 2048)
    ]
    (path,) = plots.steps({"meta": META, "rows": rows}, tmp_path)
    assert path.name == "lengths-tiny.png" and is_png(path)
    said = (
        "tiny: peak memory of the longest rows of those measured: ours 2.05 GB, ours, offloading 2.05 GB, Unsloth "
        "2.05 GB"
    )
    assert any(said in " ".join(text.split()) for text in words[path.name]), words[path.name]
    assert {"batch 1, checkpointing: tokens per second", "peak memory a GPU, GB (x: liger fit)"} <= {*words[path.name]}
    assert plots.length_curves({"meta": META, "rows": rows[:2] + rows[3:5]}, tmp_path) == []


def test_a_step_within_the_noise_is_not_called_faster(words, tmp_path):
    data = trained()
    rows = [
        row | {"tokens_per_s": 64_000.0 if row["variant"] == "stock" else 65_000.0}
        for row in data["rows"]
        if row["variant"] in ("stock", "ours")
    ]
    plots.step_bars(data | {"rows": rows}, tmp_path)
    title = " ".join(words["step.png"])
    assert re.search(r"within noise as fast as stock\s+with 0\.42–0\.44x the memory", title) and re.search(
        r"\(noise of the\s+speed 3\.0%\)", title
    )


def test_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    assert (
        plots.operators({"meta": META, "rows": []}, tmp_path) == []
        and plots.steps({"meta": META, "rows": []}, tmp_path) == []
    )


def test_global_settings_are_left_alone(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    plots.roofline(measured(), tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        plots.time_bars(measured(), tmp_path)


# -- tables


def cells(table, *start):
    """The cells of the line that starts with ``start``."""
    (line,) = [line for line in table.splitlines() if line.split()[: len(start)] == list(start)]
    return re.split(r"\s{2,}", line)


def test_text_table():
    table = report.text_table(measured()["rows"])
    assert cells(table, "op") == [
        "op",
        "case",
        "mode",
        "variant",
        "device ms",
        "x",
        "wall",
        "host",
        "kernels",
        "peak MB",
        "% floor",
        "error/PyTorch",
    ]
    assert cells(table, "rms_norm", "llama3-8b", "full", "upstream")[4:] == [
        "0.139 ± 1.2 %",
        "1.45x",
        "0.189",
        "0.310",
        "3",
        "69.0",
        "57",
        "1.00",
    ]
    assert cells(table, "rms_norm", "llama3-8b", "full", "ours")[4:6] == [
        "0.0960 ± 1.2 %",
        "0.146",
    ]  # ours has no ratio to itself
    assert cells(table, "rms_norm", "llama3-8b", "full", "quack")[4:6] == ["0.0310 ± 1.2 %", "0.0810"]
    assert cells(table, "rms_norm", "llama3-8b", "full", "quack")[-1] == "50.0 inaccurate"
    assert cells(table, "rms_norm", "llama3-1b", "full", "quack")[4:] == [
        "failed: RuntimeError: no kernel image for this device"
    ]
    assert (
        "dtype"
        in report.text_table([*measured()["rows"], operator_row("glu", "a", "ours", 1.0, 1.0, dtype="fp32")]).split()
    )


def test_what_could_not_be_measured_has_no_column():
    table = report.text_table([row | {"kernels": 0, "peak_mb": 0.0} for row in measured()["rows"]])
    assert "kernels" not in table and "peak MB" not in table


def test_a_spread_beyond_the_picture_is_cut(tmp_path, words):
    rows = [
        operator_row("glu", "a", variant, 1.0, 1.0, device_spread=spread)
        for variant, spread in (("ours", 57.9), ("eager", 0.1))
    ]
    assert is_png(plots.time_bars({"meta": META, "rows": rows}, tmp_path)[0])
    assert any("whiskers" in text for text in words["time-glu-bf16.png"])


def test_text_table_of_steps():
    table = report.text_table(trained()["rows"])
    assert "parallel" not in table and "gpus" not in table  # the same everywhere
    assert cells(table, "gemma-2b", "stock")[2:7] == ["4", "2048", "28,265 ± 0.4 %", "1.25x", "290"]
    assert cells(table, "llama-3.2-1b", "ours+compile")[4:] == ["failed: out of memory"]


def test_steps_whose_losses_differ_have_no_ratio(words, tmp_path):
    rows = [row | {"accurate": row["variant"] != "upstream", "loss_parity": 0.3} for row in trained()["rows"][:4]]
    assert cells(report.text_table(rows), "llama-3.2-1b", "upstream")[-1] == "3.0e-01 inaccurate"
    assert "upstream" not in report.summary(rows)["llama-3.2-1b"]
    plots.step_bars({"meta": META, "rows": rows}, tmp_path)
    assert words["step.png"].count("inaccurate") == 2 and not any(
        "x as fast as LinkedIn's" in text for text in words["step.png"]
    )


def test_markdown_table():
    lines = report.markdown_table([*measured()["rows"][:4], WRONG | {"case": "a|b"}]).splitlines()
    assert len(lines) == 7 and len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert lines[1].startswith("|---|---|---|---|---:|")
    assert "| 1.45x |" in lines[3] and "a\\|b" in lines[6] and "x |" not in lines[6]


def test_summary_counts_only_what_is_accurate_and_no_sweeps():
    found = report.summary([*measured()["rows"], *swept()])
    assert "quack" not in found["rms_norm"]
    assert found["rms_norm"]["upstream"] == pytest.approx([0.139 / 0.096, 0.179 / 0.096, 0.239 / 0.097])
    assert len(found["linear_cross_entropy"]["upstream"]) == 2
    assert report.summary(trained()["rows"])["gemma-2b"]["stock"] == pytest.approx([35295 / 28265])


def test_losses_are_all_there_and_noise_is_named():
    found = {
        (loss.row["op"], loss.row["case"], loss.row["variant"], loss.measure): loss
        for loss in report.losses(measured()["rows"])
    }
    assert found["rope", "llama3-8b", "upstream", "device ms"].ratio == pytest.approx(0.094 / 0.091)
    assert not found["rope", "llama3-8b", "upstream", "device ms"].noise
    assert found["glu", "llama3-8b", "compile", "device ms"].noise  # 0.2 % slower, with a spread of 1.2 %
    assert found["rope", "llama3-8b", "upstream", "peak MB"].theirs == 0
    assert not any(loss.row["variant"] == "quack" for loss in found.values())
    ratios = [
        loss.ratio for loss in report.losses(measured()["rows"]) if loss.measure == "device ms" and not loss.noise
    ]
    assert ratios == sorted(ratios, reverse=True) and len(ratios) == 3
    steps = [(loss.row["model"], loss.row["variant"], loss.measure) for loss in report.losses(trained()["rows"])]
    assert sorted(steps) == sorted((model, "upstream", "peak GB") for model, *_ in STEPS)


def test_a_slower_ours_is_a_loss_in_tokens():
    rows = [
        row | {"tokens_per_s": row["tokens_per_s"] * (0.5 if row["variant"] == "ours" else 1)}
        for row in trained()["rows"][:4]
    ]
    worst = report.losses(rows)[0]
    assert (worst.measure, worst.row["variant"]) == ("tokens/s", "upstream") and worst.ratio == pytest.approx(
        62152 / (64171 / 2)
    )


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0960, "0.0960"),
        (1.4, "1.40"),
        (41.23, "41.2"),
        (141.4, "141"),
        (12608.0, "12,608"),
        (0.0, "0"),
        (None, ""),
        (9.999, "10.0"),
    ],
)
def test_digits(value, text):
    assert report.digits(value) == text


# -- HTML


class Page(HTMLParser):
    """Tags that close in order, table rows by table, and everything that a browser would fetch."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.fetched, self.images, self.text, self.table = [], {}, [], 0, "", None
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        self.images += tag == "img"
        self.fetched += [
            value
            for name, value in attributes.items()
            if name in ("src", "href") and not value.startswith(("data:image/png;base64,", "#"))
        ]
        if tag == "table":
            self.table = self.tables[attributes["id"]] = []
        if tag == "tr":
            self.table.append([])
        if tag in ("td", "th"):
            self.table[-1].append(["", attributes.get("data-v")])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.table[-1][-1][0] += data


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    images = [folder / "a-plot.png"]
    images[0].write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x04\x00\x00\x00\x02\x00" + bytes(64))
    path = report.html(folder / "new" / "report.html", measured(), trained(), images)
    return Page(path.read_text(encoding="utf-8")), path.read_text(encoding="utf-8")


def test_html_is_one_file(page):
    parsed, text = page
    assert parsed.fetched == [] and parsed.images == 1 and 'width="512"' in text
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme:dark" in text


def test_html_tables_have_the_numbers(page):
    tables = page[0].tables
    head, *rows = [[text for text, _ in line] for line in tables["table-operators"]]
    assert len(rows) == len(measured()["rows"])
    by_name = {(row[0], row[1], row[head.index("variant")]): dict(zip(head, row)) for row in rows}
    assert by_name["rms_norm", "llama3-8b", "upstream"]["x"] == "1.45x"
    assert by_name["rms_norm", "llama3-8b", "quack"]["x"] == by_name["rms_norm", "llama3-1b", "quack"]["x"] == ""
    assert by_name["rms_norm", "llama3-1b", "quack"]["device ms"].startswith("failed")
    glance = {line[0][0]: [text for text, _ in line[1:]] for line in tables["table-glance"]}
    assert glance["rope"][0] == "0.97x" and glance["gemma-2b"][-1] == "1.25x"
    assert not any("quack" in text for text, _ in tables["table-glance"][0])
    assert any(
        line[0][0].startswith("rope") and line[1][0] == "LinkedIn's package" and line[2][0] == "device ms"
        for line in tables["table-loses"]
    )
    assert not any(line[1][0] == "quack" for line in tables["table-loses"])


def test_html_is_sorted_by_numbers(page):
    parsed, text = page
    values = {line[4][0]: line[5] for line in parsed.tables["table-operators"][1:5]}
    assert float(values["eager"][1]) == 1.40 and values["eager"][0] == "1.40 ± 1.2 %"
    failed = next(line for line in parsed.tables["table-operators"] if line[5][0].startswith("failed"))
    assert failed[5][1] == ""  # no number: last
    assert 'addEventListener("click", () => sortBy(' in text and "function sortBy" in text
    assert re.search(r'<select data-table="table-operators" data-column="0">.*<option>rope</option>', text)
    assert text.count("<button") == sum(len(table[0]) for table in parsed.tables.values())


def test_html_explains_and_names_the_machine(page):
    for word in (
        *META.values(),
        "liger bench step --model",
        "cold L2",
        "enqueue the call",
        "bytes that the operator has to move",
    ):
        assert (report.digits(word) if isinstance(word, float) else word) in page[0].text


def test_html_admits_a_broken_ours_and_a_cpu(tmp_path):
    rows = [row | {"accurate": row["variant"] != "ours"} for row in measured()["rows"] if row["op"] == "glu"]
    parsed = Page(
        report.html(
            tmp_path / "r.html", {"meta": META | {"hardware": "CPU (x86_64, 2 threads)"}, "rows": rows}
        ).read_text()
    )
    assert "glu llama3-8b, bf16, full: inaccurate" in parsed.text and "Measured without a GPU" in parsed.text
    assert not any(re.fullmatch(r"\d\.\d\dx", text) for line in parsed.tables["table-operators"] for text, _ in line)


def test_html_escapes(tmp_path):
    row = failed_row("glu", "<b>case</b>", "ours", "<script>alert(1)</script>")
    assert "<script>alert" not in report.html(tmp_path / "r.html", {"meta": META, "rows": [row]}).read_text()


def test_report_of_several_runs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    row = dict(
        op="glu", case="llama", dtype="bf16", mode="full", variant="ours", device_ms=2.0, accurate=True, failed=None
    )
    runs = [[row, row | {"case": "phi3", "device_ms": 5.0}], [row | {"device_ms": 1.25}]]
    for i, rows in enumerate(runs):
        (tmp_path / f"{i}.json").write_text(json.dumps({"meta": META, "rows": rows}))
    out = [
        "--csv",
        str(tmp_path / "all.csv"),
        "--markdown",
        str(tmp_path / "all.md"),
        "--plot",
        str(tmp_path / "plots"),
    ]
    assert report.main([str(tmp_path / "0.json"), str(tmp_path / "1.json"), *out]) == 0
    table = (tmp_path / "all.md").read_text()
    assert "1.25" in table and "5.00" in table and "2.00" not in table
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 3 and (tmp_path / "plots" / "report.html").exists()
