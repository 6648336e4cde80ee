"""What a run may write to, the record of its starts, and files that are written whole and
through no link."""

import contextlib
import errno
import json
import os
import shutil
import stat
import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("transformers")

import small_runs
from quick import words
from small_runs import OTHER_TRAINERS, refused, save_model, small_run

from liger_kernel.train import data as data_module, files, folder, loop, store
from liger_kernel.train.config import TrainConfig, UserError
from liger_kernel.train.mistakes import writable

pytestmark = pytest.mark.usefixtures("references")
TEXT = small_runs.TEXT * 40
links = pytest.mark.skipif(not hasattr(os, "symlink") or os.name != "posix", reason="links are those of POSIX")


@pytest.fixture
def config(tmp_path):
    changes = dict(hidden=16, steps=2, eval_fraction=0.0, kernels="off", lr=None, cache=str(tmp_path / "tokens"))
    return small_run(tmp_path, [{"text": TEXT}] * 4, **changes)


def content(root):
    """Every file below a folder, with links as links."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in Path(root).rglob("*")
        if not path.is_dir()
    }


def made(root, names):
    """A folder with these files, which hold something."""
    for name in names:
        path = Path(root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"model_type": "llama", "hidden_size": 16}')
    return root


OTHERS = {
    "a model": ["config.json", "model.safetensors", "tokenizer.json"],
    "adapters": ["adapter_config.json", "adapter_model.safetensors"],
    "the output of a trainer": ["checkpoint-500/model.safetensors", "trainer_state.json"],
    "data": ["chats.jsonl"],
    "a project": [".git/HEAD", "README.md"],
    "metrics": ["metrics.json"],
    "lines": ["metrics.jsonl"],
    "earlier metrics": ["metrics-1.json"],
    "a lock": ["lock"],
    "a lock of data": ["cache.lock"],
    "a tracker's": ["wandb-id"],
    "checkpoints of something else": ["checkpoints/epoch-1.pt"],
    "checkpoints of something else in one of ours": ["checkpoints/step-00000001/mine.txt"],
    "checkpoints for transformers": ["checkpoints-hf/model.safetensors"],
}


@pytest.mark.parametrize("names", OTHERS.values(), ids=OTHERS)
def test_a_folder_of_something_else_is_no_folder_of_a_run(names, config):
    made(config.out, names)
    before = content(config.out)
    refused(rf"{config.out}.* holds .*, which .*: (move it, or )?give another --out$", loop.train, config)
    assert content(config.out) == before


SAVED = {
    "a model": OTHERS["a model"],
    "adapters": OTHERS["adapters"],
    "a card": ["README.md"],
    "merges": ["merges.txt"],
    "data": ["chats.jsonl"],
}


@pytest.mark.parametrize("names", SAVED.values(), ids=SAVED)
def test_a_model_is_not_saved_over_something_else(names, config, tmp_path):
    made(tmp_path / "there", names)
    before = content(tmp_path / "there")
    config = replace(config, save=str(tmp_path / "there"))
    refused(r"there holds .*, which this run has not saved: give another --save$", loop.train, config)
    assert content(tmp_path / "there") == before and not Path(config.out).exists()


def test_what_no_run_writes_may_lie_beside_it(config, tmp_path):
    """Logs, hidden files, the data, folders; nor what a start has left that was killed at once."""
    made(config.out, ["output.txt", "slurm-1.out", "run.yaml", ".gitignore", "base/config.json", "lost+found/x"])
    made(config.out, ["cache/0123/rows.safetensors", "stuck-rank-0.txt"])
    (Path(config.out) / "lock").write_text(json.dumps({"host": "here", "pid": 1, "since": "now"}))
    (Path(config.out) / "cache.lock").touch()
    (Path(config.out) / "mine.json").write_text('{"steps": 2}')  # a config
    shutil.copy(config.data, Path(config.out) / "text.jsonl")
    made(tmp_path / "saved", [".gitattributes", "upload.log", "older/model.safetensors"])
    loop.train(replace(config, data=f"{config.out}/text.jsonl", save=str(tmp_path / "saved"), cache=None))
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def test_a_run_replaces_the_model_that_it_has_saved(config, tmp_path, monkeypatch):
    """That of another run stays, whatever folder the run is started from."""
    monkeypatch.chdir(tmp_path)
    config = replace(config, save="tuned")
    loop.train(config)
    first = content("tuned")
    loop.train(replace(config, seed=1, save=str(tmp_path / "tuned")))
    assert content("tuned") != first
    refused(r"tuned holds .*, which this run has not saved", loop.train, replace(config, out=f"{config.out}-2"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    made("tuned", OTHERS["a model"])
    refused(r"tuned holds config\.json, which this run has not saved", loop.train, config)


def test_a_model_may_be_saved_into_the_folder_of_its_run(config):
    config = replace(config, save=config.out)
    loop.train(config)
    loop.train(replace(config, steps=3))
    assert json.loads((Path(config.out) / "config.json").read_text())["model_type"] == "llama"


def test_data_are_not_prepared_over_something_else(config, tmp_path):
    made(tmp_path / "rows", OTHERS["a model"])
    before = content(tmp_path / "rows")
    refused(r"rows holds config\.json, which is not of prepared rows", data_module.prepare, config, tmp_path / "rows")
    assert content(tmp_path / "rows") == before


def recorded(config, field):
    """What the records of starts say, by their names without liger-run and .json."""
    found = {path.stem: json.loads(path.read_text()) for path in Path(config.out).glob("liger-run*.json")}
    return {name.removeprefix("liger-run"): values[field] for name, values in found.items()}


def test_starts_that_begin_anew_leave_what_was_there(config):
    first = loop.train(config)
    second = loop.train(replace(config, lr=1e-4))
    out = Path(config.out)
    assert recorded(config, "lr") == {"": 1e-4, "-1": None}
    before, now = (json.loads((out / f"metrics{number}.json").read_text()) for number in ("-1", ""))
    assert before == first != second == now
    assert len((out / "metrics-1.jsonl").read_text().splitlines()) == 2
    loop.train(replace(config, lr=1e-4))  # the same run once more
    assert len(recorded(config, "lr")) == 2 and not list(out.glob("metrics-2*"))
    loop.train(replace(config, steps=3))
    assert recorded(config, "steps") == {"": 3, "-1": 2, "-2": 2}
    assert TrainConfig.load(out / "liger-run.json") == replace(config, steps=3)


@pytest.mark.parametrize("trainer", ["torch", *OTHER_TRAINERS])
def test_a_start_that_goes_on_keeps_the_record_of_the_one_before(trainer, config):
    config = replace(config, trainer=trainer, checkpoint_every=1)
    loop.train(config)
    loop.train(replace(config, steps=4))
    assert recorded(config, "steps") == {"": 4, "-1": 2}
    assert not list(Path(config.out).glob("metrics-*"))
    if trainer == "torch":
        assert len((Path(config.out) / "metrics.jsonl").read_text().splitlines()) == 4
        (Path(config.out) / "liger-run.json").write_bytes(b"\0")  # which does not stop its run
        assert len(loop.train(replace(config, steps=5))["losses"]) == 5


@pytest.mark.parametrize("trainer", ["torch", *OTHER_TRAINERS])
def test_a_refused_start_leaves_the_record_of_the_run(trainer, config, tmp_path):
    tokenizer = data_module.load(config).tokenizer
    models = [save_model(tmp_path / f"base{i}", tokenizer, initializer_range=0.02 * (i + 1)) for i in range(2)]
    (tmp_path / "other.jsonl").write_text((json.dumps({"text": TEXT[::-1]}) + "\n") * 4)
    config = replace(config, model=models[0], trainer=trainer, checkpoint_every=1)
    loop.train(config)
    kept = lambda: {
        name: text for name, text in content(config.out).items() if Path(name).name.startswith(("liger-run", "metrics"))
    }
    before = kept()
    in_use = mock.Mock(side_effect=OSError(errno.EADDRINUSE, "in use"))
    for changes, said in (
        (dict(data=str(tmp_path / "other.jsonl"), steps=9), "is of other data"),
        (dict(model=models[1], steps=9), "is of another model: digest of weights"),
        (dict(seed=1), "is of other data: seed"),
        (dict(resume=False), "holds checkpoints"),
        (dict(data=str(tmp_path / "nowhere.jsonl")), "no such file"),
        (dict(model=str(tmp_path)), "holds no"),
        (dict(metrics_port=9400, steps=9), "metrics cannot be served"),
    ):
        with mock.patch("socket.create_server", in_use):
            refused(said, loop.train, replace(config, **changes))
        assert kept() == before, said
    assert len(before) >= 2
    loop.train(replace(config, steps=3))


NAMES = ["lock", "metrics.jsonl", "checkpoints", "checkpoints/latest", "checkpoints/step-00000003", "cache/0123"]
NAMES += ["tensorboard", "wandb-id"]


@links
@pytest.mark.parametrize("name", NAMES)
def test_links_in_the_folder_of_a_run_are_refused(name, config, tmp_path):
    loop.train(replace(config, steps=1, checkpoint_every=1, cache=None))
    there = made(tmp_path / "elsewhere", ["mine"])
    path = Path(config.out) / name
    shutil.rmtree(path, ignore_errors=True), path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(there / "mine" if "." in name or path.name in ("lock", "latest", "wandb-id") else there)
    before = content(there)
    link = rf"{path} is a link, which no run has made: remove it, or give another --out$"
    refused(link, loop.train, replace(config, checkpoint_every=1))
    assert content(there) == before


@pytest.mark.parametrize("name", ["metrics.json", "liger-run.json", "lock", "checkpoints/latest"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_pipes_and_folders_in_the_place_of_files_are_refused(kind, name, config):
    path = Path(config.out) / name
    path.parent.mkdir(parents=True)
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    refused(rf"{path} is a {kind}.*, which no run has made", loop.train, config)


@links
def test_nothing_is_written_through_a_link_that_comes_later(config, tmp_path, monkeypatch):
    """While the run trains, each name that it will write becomes a link."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    out, step = Path(config.out), loop._Run._step

    def after(run):
        (out / "checkpoints").mkdir(exist_ok=True)
        for name in words("metrics.json metrics.jsonl stuck-rank-0.txt checkpoints/latest checkpoints/step-00000002"):
            (out / name).unlink(missing_ok=True)
            (out / name).symlink_to(mine)
        return step(run)

    monkeypatch.setattr(loop._Run, "_step", after)
    with pytest.raises(OSError, match="the last checkpoint could not be written"):
        loop.train(replace(config, checkpoint_every=2))
    assert mine.read_text() == "mine" and not (out / "metrics.json").is_symlink()


@links
def test_files_of_their_own(tmp_path):
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.write_text("mine")
    for act in (
        lambda: files.write(link, "new"),
        lambda: files.create(link).close(),
        lambda: files.fresh(link),
        lambda: files.append(link, "new"),
        lambda: files.reopen(link),
        lambda: folder.acquired(tmp_path / "locked", 0),
        lambda: store.put(store.Store(f"file://{tmp_path}", tmp_path).fs, tmp_path / "other", str(link)),
    ):
        (tmp_path / "locked").mkdir(exist_ok=True)
        (tmp_path / "other").write_text("other")
        for path in (link, tmp_path / "locked" / "lock"):
            path.unlink(missing_ok=True) if not path.is_dir() or path.is_symlink() else path.rmdir()
            path.symlink_to(mine)
        with contextlib.suppress(OSError, UserError):
            act()
        assert mine.read_text() == "mine"


@links
def test_a_lock_that_is_a_file_elsewhere_is_not_written_to(config, tmp_path):
    (tmp_path / "mine").write_text(json.dumps({"pid": 1, "mine": True}))
    Path(config.out).mkdir()
    os.link(tmp_path / "mine", Path(config.out) / "lock")
    refused("lock is a file elsewhere, too: remove it", loop.train, config)
    assert "mine" in (tmp_path / "mine").read_text()


@links
def test_a_folder_may_be_a_link_of_ones_own(config, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    Path(config.out).symlink_to(tmp_path / "disk")
    loop.train(config)
    assert (tmp_path / "disk" / "metrics.json").is_file()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    real = os.lstat
    fake = lambda path: os.stat_result([*real(path)[:4], mine + 2, *real(path)[5:10]])
    monkeypatch.setattr(os, "lstat", fake)
    refused(rf"cannot write to .*: .* is a link, which user {mine + 2} has made", writable, folder=config.out)


def test_a_file_is_written_whole_or_stays(tmp_path, monkeypatch):
    """With the permissions that files have."""
    path = tmp_path / "file"
    files.write(path, "before")
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "plain").unlink()
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        files.write(path, "after")
    assert content(tmp_path) == {str(path): b"before"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_that_a_user_names_is_written_to(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    writable(file=pipe, ours="x")
    files.export(pipe, "text")
    reader.join(10)
    assert got == [b"text"] and stat.S_ISFIFO(pipe.stat().st_mode)
    files.export("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
