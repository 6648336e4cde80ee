"""Data that is tokenised while a run trains on it: what it reads, in which order, and where it
goes on."""

import contextlib
import dataclasses
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from processes import forkserver, run_script, until
from small_runs import refused, small_run, write_jsonl

from liger_kernel.train import data as data_module, loop, records as records_module, stream as stream_module
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.data import load
from liger_kernel.train.records import BEGIN, Records
from liger_kernel.train.stream import Stream, StreamPart, Writer, described, path_of
from liger_kernel.train.tokenise import tokenise, tokenizer_of, train_bpe

pytestmark = pytest.mark.usefixtures("references")
SIZE = 330  # characters of a record
said = lambda role, text: {"role": role, "content": text}
CHATS = [{"messages": [said("user", f"say {i}"), said("assistant", "yes " * (i % 5 + 1) + str(i))]} for i in range(60)]


@pytest.fixture
def config(tmp_path):
    """Eleven records; parts of three."""
    texts = [f"{i:010d}" * (SIZE // 10) for i in range(11)]
    train_bpe(texts, 257).save_pretrained(tmp_path / "tokenizer")  # a token a byte
    changes = dict(eval_fraction=0.1, tokenizer=str(tmp_path / "tokenizer"), stream=3 * SIZE / 1e6)
    config = small_run(tmp_path, [], **changes)
    Path(config.data).write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))  # blank lines are none
    return config


def write_parts(folder, stdin, stdout):
    sys.argv = ["stream", folder]
    sys.stdin, sys.stdout = os.fdopen(stdin.fileno()), os.fdopen(stdout.fileno(), "w")
    stream_module._main()


class Forked:
    """The process that writes parts, forked from one that has imported everything: Python need not
    start and import all that anew for each stream."""

    def __init__(self, config, folder):
        (requests, stdin), (stdout, mistakes) = (forkserver().Pipe(duplex=False) for _ in range(2))
        self._process = forkserver().Process(target=write_parts, args=(str(folder), requests, mistakes))
        self._process.start()
        requests.close(), mistakes.close()
        self.stdin, self.stdout = os.fdopen(os.dup(stdin.fileno()), "wb"), os.fdopen(os.dup(stdout.fileno()), "rb")
        stdin.close(), stdout.close()
        self.pid, self.kill = self._process.pid, self._process.kill
        stream_module._tell(self, dataclasses.asdict(config))

    def poll(self):
        self.returncode = self._process.exitcode
        return self.returncode

    def communicate(self):
        self._process.join()
        with contextlib.suppress(BrokenPipeError):  # as subprocess does
            self.stdin.close()


@pytest.fixture(autouse=True)
def forked_writers(monkeypatch):
    """One test starts a real writer, in a process of its own."""
    if sys.platform.startswith("linux"):
        monkeypatch.setattr(stream_module, "_start", Forked)


@pytest.fixture
def streams():
    opened = []

    def stream(config, folder):
        opened.append(Stream(config, tokenizer_of(config), folder))
        return opened[-1]

    yield stream
    for one in opened:
        one.close()


def written(config, folder):
    writer = Writer(config, folder)
    writer.run()
    return writer


def ids(data, picks):
    return [tuple(data.rows.row(pick)[0].tolist()) for pick in picks]


def test_parts_hold_what_all_of_it_holds(config, tmp_path, streams):
    data = streams(config, tmp_path / "parts")
    texts = [[record for record in Records(config)][at : at + 3] for at in range(0, 11, 3)]
    parts = [tokenise(records, data.tokenizer, config.length) for records in texts]
    counts = [len(rows) for rows in parts]
    total = sum(counts) - len(data.eval)
    epochs = [data.picks(epoch * total, total, seed=1) for epoch in range(3)]
    rows = [tuple(row.tolist()) for part in parts for row in part.ids.view(-1, config.length)]
    for epoch in epochs:
        assert sorted(ids(data, epoch) + ids(data, data.eval)) == sorted(rows)
    assert len({tuple(epoch) for epoch in epochs}) == 3 and epochs[0] != data.picks(0, total, seed=2)
    begin = 0
    for part, count in enumerate(counts):  # one part after the other
        count -= len(data.eval) if part == 0 else 0
        assert set(ids(data, epochs[0][begin : begin + count])) <= {
            tuple(row.tolist()) for row in parts[part].ids.view(-1, config.length)
        }
        begin += count
    assert data.tokens_of(0, total, 1) == total * config.length
    over = data.picks(counts[0] - len(data.eval) - 2, 4, seed=1)  # a batch of two parts
    assert data.rows.batch(over, 0)["input_ids"].tolist() == [list(row) for row in ids(data, over)]


@pytest.mark.parametrize("packing", ["auto", "documents"])
@pytest.mark.parametrize("chats", [False, True])
def test_a_stream_of_one_part_is_the_data(chats, packing, config, tmp_path, streams):
    config = replace(config, packing=packing, length=80, limit=9)
    if chats:
        config = replace(config, data=write_jsonl(tmp_path / "chats.jsonl", CHATS), limit=50)
    written(replace(config, stream=1), tmp_path / "parts")
    whole = load(replace(config, stream=0))
    stream = streams(replace(config, stream=1), tmp_path / "parts")
    assert (whole.rows.positions is None) == (stream.rows.positions is None) == (packing == "auto")
    total = len(whole.train)
    assert stream.eval == whole.eval and stream.picks(0, 2 * total + 1, 3) == whole.picks(0, 2 * total + 1, 3)
    picks = whole.picks(1, 5, 3)
    assert stream.rows.count(picks) == whole.rows.count(picks)
    one, other = stream.rows.batch(picks, 0), whole.rows.batch(picks, 0)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_stream_is_evaluated_on_other_data(config, tmp_path):
    other = write_jsonl(tmp_path / "other.jsonl", [{"text": "xy" * 40}])
    with contextlib.closing(load(replace(config, eval_data=other))) as data:
        data.check(257)
        assert len(data.eval) == 3 and data.tokenizer.decode(ids(data, data.eval)[0]) == "xy" * 12
        assert data.rows.count(data.eval) == (72, 69) and not set(data.picks(0, 50, 0)) & set(data.eval)
        assert data.identity()["held back"] == 0 and len(data.rows.part(0)) == data._ends[0]


def test_training_begins_before_the_rest_is_read(config, tmp_path, streams):
    """A line that is no JSON, at the end: the run says so when it is there."""
    with Path(config.data).open("a") as file:
        file.write("{oops")
    data = streams(config, tmp_path / "parts")
    first = data.picks(0, len(data.train), seed=0)
    assert len(ids(data, first)) > 30
    refused(r"text\.jsonl:23: not valid JSON", data.picks, 0, 10_000, seed=0)


def test_a_part_that_is_wanted_comes_before_those_before_it(config, tmp_path):
    complete = written(config, tmp_path / "complete")
    assert len(complete._parts) == 4 and [part.last for part in complete._parts] == [False, False, False, True]
    writer, order = Writer(config, tmp_path / "again"), []
    write = writer._write
    writer._write = lambda part: (order.append(part), write(part))
    writer.request = {"wanted": 2, "parts": json.loads(json.dumps(complete._parts[:3]))}
    writer.run()
    assert order == [0, 2, 3, 1]
    for part in range(4):
        assert path_of(tmp_path / "again", part).read_bytes() == path_of(tmp_path / "complete", part).read_bytes()
    path_of(tmp_path / "again", 1).unlink()
    Writer(config, tmp_path / "again").run()
    assert path_of(tmp_path / "again", 1).read_bytes() == path_of(tmp_path / "complete", 1).read_bytes()


def test_data_that_has_changed_is_noticed(config, tmp_path):
    writer = Writer(config, tmp_path / "parts")
    writer.request = {"wanted": 0, "parts": [[1, [3, 0, 3], False, "x"]]}
    refused("has changed", writer.run)


def test_a_part_without_rows_is_passed_over(config, tmp_path, streams):
    """The last record is shorter than a row."""
    with Path(config.data).open("a") as file:
        file.write(json.dumps({"text": "x" * (SIZE + 1)}) + "\n" + json.dumps({"text": "short"}))
    writer = written(config, tmp_path / "parts")
    assert writer._parts[-1].rows == 0 and writer._parts[-1].last
    data = streams(config, tmp_path / "parts")
    total = sum(part.rows for part in writer._parts) - len(data.eval)
    assert len(set(data.picks(0, total, 0))) == total and set(data.picks(total, total, 0)) == set(
        data.picks(0, total, 0)
    )


def test_what_may_change_unseen_is_kept_for_its_run_alone(tmp_path):
    """And by all that is known of it: other lengths are other rows."""
    places = lambda **changes: data_module._cache(
        TrainConfig(stream=1, cache=str(tmp_path / "shared"), out=str(tmp_path / "run"), **changes), None
    )
    hub, longer, file = places(data="org/chats"), places(data="org/chats", length=77), places(data="stdlib")
    assert hub[0].parent == longer[0].parent == tmp_path / "run" / "cache" and not hub[1] and hub != longer
    assert file[0].parent == tmp_path / "shared" and file[1]


def test_records_are_read_from_any_place(tmp_path, monkeypatch):
    datasets, arrow, parquet = (pytest.importorskip(name) for name in ("datasets", "pyarrow", "pyarrow.parquet"))
    folder = tmp_path / "both"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", CHATS[:7])
    parquet.write_table(arrow.Table.from_pylist(CHATS[7:20]), folder / "b.parquet", row_group_size=4)
    lines = write_jsonl(folder / "c.jsonl", CHATS[20:30])
    (folder / "array.json").write_text(json.dumps(CHATS[:30], indent=1))  # of a folder, the first kinds are read
    whole = datasets.Dataset.from_list(CHATS[:30])
    hub = {("org/chats", "dev", False): whole, ("org/chats", "dev", True): whole.to_iterable_dataset()}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split, streaming: hub[name, split, streaming])
    monkeypatch.setattr(records_module, "on_hub", lambda name, **_: None)
    named = [str(folder), "org/chats", str(folder / "array.json"), write_jsonl(tmp_path / "lines.json", CHATS[:30])]
    for name in named:
        for limit, stream in ((None, 1), (25, 1), (25, 0)):
            records = Records(TrainConfig(data=name, split="dev", limit=limit, stream=stream))
            found = list(records.since(BEGIN))
            assert [record for record, _ in found] == list(records) == CHATS[: limit or 30]
            for number in range(len(found) - 1):
                assert list(records.since(found[number][1])) == found[number + 1 :], (name, number)
    with Path(lines).open("a") as file:
        file.write("{oops")
    assert next(iter(Records(TrainConfig(data=lines)))) == CHATS[20]  # the rest is not read


def test_a_run_goes_on_where_its_parts_are_gone(config, tmp_path):
    """The checkpoint knows where parts begin; the first one trains the tokenizer."""
    config = replace(config, tokenizer=None, vocab=258, steps=8, batch=12, checkpoint_every=4, schedule="constant")
    whole = loop.train(config)
    assert whole["losses"][-1] < 0.9 * whole["losses"][0] and whole["evaluations"]
    stopped = replace(config, out=str(tmp_path / "stopped"), cache=str(tmp_path / "first"))
    loop.train(replace(stopped, steps=4))
    state = json.loads((tmp_path / "stopped" / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert StreamPart(*state["data"]["parts"][0]).rows == state["identity"]["rows of part 0"]
    assert len(state["data"]["parts"]) > 1
    resumed = loop.train(replace(stopped, cache=str(tmp_path / "second")))
    assert resumed["losses"] == whole["losses"]
    assert (tmp_path / "second").is_dir()
    refused(r"of other data: .*rows of part 0", loop.train, replace(stopped, stream=config.stream / 3, steps=9))


def test_a_part_that_has_changed_ends_the_run(config, tmp_path):
    """Its tokens, not their number or sum, and whether it is tokenised again or found tokenised."""
    config = replace(config, steps=8, batch=12, checkpoint_every=4, schedule="constant", eval_fraction=0)
    loop.train(replace(config, steps=4))
    lines = Path(config.data).read_text().splitlines()
    records = [line for line in lines if line]
    records[3], records[4] = records[4], records[3]  # the second part begins with the fourth
    other = write_jsonl(tmp_path / "other.jsonl", map(json.loads, records))
    for cached in (False, True):
        changes = dict(data=other, cache=str(tmp_path / f"other-{cached}"))
        if cached:
            loop.train(replace(config, out=str(tmp_path / "made"), checkpoint_every=0, **changes))
        refused("the data has changed: part 1 had", loop.train, replace(config, **changes))


def test_a_writer_that_dies_is_missed_and_one_without_a_reader_ends(config, tmp_path, user_env):
    """Its reader is killed: no process is left behind, and the next run takes over."""
    lines = [{"text": f"{i:010d}" * (SIZE // 10)} for i in range(20_000)]
    config = replace(config, data=write_jsonl(tmp_path / "long.jsonl", lines))
    code = f"""
import time
from liger_kernel.train.config import TrainConfig
from liger_kernel.train.data import load
data = load(TrainConfig.load({str(tmp_path / "config.json")!r}))
print(data._writer.pid, data._folder, flush=True)
time.sleep(1000)
"""
    config.save_to(tmp_path / "config.json")
    env = user_env | {"CUDA_VISIBLE_DEVICES": ""}
    reader = forkserver().Process(target=run_script, args=(["-c", code], env, tmp_path / "said"))
    reader.start()
    until(lambda: (tmp_path / "said").exists() and "\n" in (tmp_path / "said").read_text())
    pid, folder = (tmp_path / "said").read_text().split()
    assert not path_of(Path(folder), 6666).exists()
    reader.kill(), reader.join()
    until(lambda: not Path("/proc", pid).exists() or "State:\tZ" in Path("/proc", pid, "status").read_text(), 60)
    data = load(config)
    try:
        assert described(data.wait(3)).rows == described(path_of(Path(folder), 1)).rows
        data._writer.kill()
        refused(r"ended with exit code -9: .*part-006666.safetensors is missing", data.wait, 6666)
    finally:
        data.close()
