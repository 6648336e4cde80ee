"""Checkpoints in an object store that speaks S3."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import free_port
from small_runs import write_jsonl

s3fs = pytest.importorskip("s3fs", reason="tests/integrations/environments.py s3")


@pytest.fixture
def bucket(monkeypatch):
    port = free_port()
    command = [Path(sys.executable).parent / "moto_server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    settings = dict(ENDPOINT_URL=f"http://127.0.0.1:{port}", ACCESS_KEY_ID="x", SECRET_ACCESS_KEY="y")
    for name, value in (settings | dict(DEFAULT_REGION="us-east-1")).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                s3fs.S3FileSystem(skip_instance_cache=True).mkdir("runs")
                break
            except Exception:  # not up, yet
                assert time.monotonic() < end
                time.sleep(0.3)
        yield "runs"
    finally:
        server.kill()
        server.wait()


def test_a_run_goes_on_from_s3_in_an_empty_folder(bucket, tmp_path, capsys):
    from liger_kernel.deploy import steps
    from liger_kernel.train import loop
    from liger_kernel.train.config import TrainConfig, UserError

    rows = [{"text": "def add(a, b):\n    return a + b\n\n" * 30 + str(i)} for i in range(12)]
    places = dict(cache=str(tmp_path / "cache"), out=str(tmp_path / "calm"))
    sizes = dict(vocab=300, hidden=32, heads=2, layers=1, length=24, batch=2, device="cpu", eval_fraction=0)
    data = write_jsonl(tmp_path / "text.jsonl", rows)
    calm = TrainConfig(data=data, **places, **sizes, checkpoint_every=3, schedule="constant", steps=8)
    expected = loop.train(calm)["losses"]
    config = dataclasses.replace(calm, out=str(tmp_path / "pod"), store=f"s3://{bucket}/a", steps=5)
    loop.train(config)
    shutil.rmtree(config.out)
    assert loop.train(dataclasses.replace(config, steps=8))["losses"] == expected
    assert "fetched step-00000005 from s3://runs/a" in capsys.readouterr().out
    there = s3fs.S3FileSystem(skip_instance_cache=True)
    names = {path.rpartition("/")[2] for path in there.ls(f"{bucket}/a/checkpoints")}
    assert names == {"latest", "uploading", "step-00000008", "step-00000006"}
    assert there.cat_file(f"{bucket}/a/checkpoints/latest") == b"step-00000008\nstep-00000006\n"

    with pytest.raises(UserError, match="cannot write to the store s3://nowhere/a: "):  # before the first step
        loop.train(dataclasses.replace(config, out=str(tmp_path / "other"), store="s3://nowhere/a"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    steps.export(tmp_path / "model", {"loss": 1.0}, f"s3://{bucket}/models/a")
    assert json.loads(there.cat_file(f"{bucket}/models/a/evaluation.json")) == {"loss": 1.0}
