"""The alerts and the dashboard, by promtool and by a Prometheus that scrapes real runs with
something wrong in each (apt install prometheus)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from processes import free_port
from small_runs import write_jsonl

pytest.importorskip("yaml")

import yaml

from liger_kernel.deploy import monitoring
from liger_kernel.deploy.job import Job
from liger_kernel.train.config import TrainConfig

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="not installed: apt install prometheus"
)


def job(name, **changes):
    train = TrainConfig(model="m", checkpoint_every=10, steps=1000, **changes)
    return Job(name=name, image="i:1", nodes=1, gpus=1, volume="v", train=train)


def promtool(*argv, folder=None):
    done = subprocess.run(["promtool", *map(str, argv)], capture_output=True, text=True, check=False, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_refuses_a_wrong_twin(tmp_path):
    rules = monitoring.rules(job("run"))
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(rules))
    code, said = promtool("check", "rules", path)
    assert code == 0 and "8 rules found" in said, said
    rules["groups"][0]["rules"][1]["expr"] += " by"
    path.write_text(yaml.safe_dump(rules))
    assert promtool("check", "rules", path)[0] != 0


# metric -> values a minute (promtool's notation); alert -> (minute, whether it fires)
TIMELINES = {
    "calm": (
        {"step": "0+10x120", "checkpoint_step": "0+10x120", "tokens_per_second": "1000x120", "loss": "2x120"},
        dict.fromkeys(("LigerTrainingStalled", "LigerCheckpointMissing", "LigerThroughputDropped"), (60, False))
        | {"LigerNotFinite": (60, False)},
    ),
    "stuck": ({"step": "0+10x20 200x100"}, {"LigerTrainingStalled": (50, True)}),
    "not yet long": ({"step": "0+10x20 200x100"}, {"LigerTrainingStalled": (30, False)}),
    "gone": ({"step": "0+10x20 _x100"}, {"LigerTrainingStalled": (50, True)}),
    "finished": ({"step": "0+10x100 _x100"}, {"LigerTrainingStalled": (130, False)}),
    "unsaved": ({"step": "0+1x120"}, {"LigerCheckpointMissing": (40, True)}),
    "old": ({"step": "0+1x200", "checkpoint_time_seconds": "60x200"}, {"LigerCheckpointOld": (140, True)}),
    "restarted": ({"restarts_total": "0x10 1x100"}, {"LigerTrainingRestarted": (12, True)}),
    "long ago": ({"restarts_total": "0x10 1x100"}, {"LigerTrainingRestarted": (40, False)}),
    "nan": ({"loss": "1x10 NaN NaN NaN NaN NaN NaN"}, {"LigerNotFinite": (15, True)}),
    "slow": ({"tokens_per_second": "1000x200 600x60"}, {"LigerThroughputDropped": (240, True)}),
    "a little slow": ({"tokens_per_second": "1000x200 750x60"}, {"LigerThroughputDropped": (240, False)}),
    "slow for a moment": ({"tokens_per_second": "1000x200 100x2 1000x60"}, {"LigerThroughputDropped": (208, False)}),
}


def test_alerts_fire_when_they_should_and_not_before(tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(monitoring.rules(job("run"))))
    summaries = {rule["alert"]: rule for rule in monitoring.rules(job("run"))["groups"][0]["rules"] if "alert" in rule}
    tests = []
    for name, (series, wanted) in TIMELINES.items():
        for alert, (minute, fires) in wanted.items():
            inputs = [{"series": f'liger_{m}{{run="run", rank="0"}}', "values": v} for m, v in series.items()]
            labels = {"run": "run", "severity": summaries[alert]["labels"]["severity"]}
            expected = {"exp_alerts": [{"exp_labels": labels}] if fires else []}
            rules = [{"eval_time": f"{minute}m", "alertname": alert, **expected}]
            tests.append({"name": name, "interval": "1m", "input_series": inputs, "alert_rule_test": rules})
    code, said = _without_texts(tests, tmp_path)
    assert code == 0, said
    tests[0]["alert_rule_test"][0]["exp_alerts"] = [{"exp_labels": {"run": "run", "severity": "critical"}}]
    assert _without_texts(tests, tmp_path)[0] != 0


def _without_texts(tests, folder):
    """promtool compares annotations as well: these, with their values, are no part of this test."""
    rules = yaml.safe_load((folder / "rules.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        rule.pop("annotations", None)
    (folder / "bare.yaml").write_text(yaml.safe_dump(rules))
    wanted = {"rule_files": ["bare.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(wanted))
    return promtool("test", "rules", "tests.yaml", folder=folder)


# -- a real Prometheus, real runs ----------------------------------------------------------------

RUN = """
import sys, time
sys.path[:0] = {path!r}
import test_runtime as t
from liger_kernel.train import checkpoint, loop
from liger_kernel.train.config import TrainConfig

t.as_users_run_it()
fault = sys.argv[2]
before, steps = loop._Run._step, []
def paced(self):
    steps.append(1)
    time.sleep(0.1 if fault != "slow" or len(steps) < 60 else 0.8)
    return before(self)
loop._Run._step = paced
if fault == "stuck":
    t.at_step(20, lambda: time.sleep(200))
if fault == "nan":
    t.poisoned(20)
if fault == "unsaved":
    checkpoint.dcp.FileSystemWriter.write_data = lambda *_: t.no_space()
loop.train(TrainConfig.load(sys.argv[1]))
"""
EXPECTED = {
    "calm": set(),
    "stuck": {"LigerTrainingStalled"},
    "nan": {"LigerNotFinite"},
    "unsaved": {"LigerCheckpointMissing", "LigerCheckpointFailed"},
    "restarted": {"LigerTrainingRestarted"},
    "slow": {"LigerThroughputDropped"},
}
# A machine that is busy with other work makes a run slow or still, which these alerts then say
# rightly: of when they must be silent, TIMELINES tell.
OF_TIME = {"LigerTrainingStalled", "LigerCheckpointMissing", "LigerThroughputDropped"}


@pytest.fixture
def scraped(user_env, tmp_path):
    """A Prometheus that scrapes a run of each kind; a function that asks it."""
    import transformers

    from liger_kernel.train.tokenise import train_bpe

    text = "def add(a, b):\n    return a + b\n\n"
    tokenizer = train_bpe([text], 280)
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    data = write_jsonl(tmp_path / "text.jsonl", [{"text": text * 30 + str(i)} for i in range(12)])
    run = dict(model=str(tmp_path / "model"), data=data, cache=str(tmp_path / "cache"), length=24, batch=2, steps=3000)
    run |= dict(log_every=1, checkpoint_every=5, eval_fraction=0, device="cpu", nonfinite="skip", timeout=300)
    targets, rules, started = [], [], []
    try:
        for name in EXPECTED:
            port = free_port()
            config = TrainConfig(**run, out=str(tmp_path / name), metrics_port=port)
            config.save_to(tmp_path / f"{name}.json")
            env = user_env | {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RESTART_COUNT": str(int(name == "restarted"))}
            log = (tmp_path / f"{name}.log").open("w")
            code = RUN.format(path=[str(TESTS), str(TESTS / "train")])
            argv = [sys.executable, "-c", code, str(tmp_path / f"{name}.json"), name]
            started.append(subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT))
            targets.append({"targets": [f"127.0.0.1:{port}"], "labels": {"run": name, "namespace": "here"}})
            train = TrainConfig(**vars(config) | {"out": "run"})
            of_run = Job(name=name, image="i:1", nodes=1, gpus=1, volume="v", train=train)
            rules += monitoring.rules(of_run, window="8s", hold="4s", memory="1m")["groups"]
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rules}))
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "liger", "static_configs": targets}],
        }
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        port = free_port()
        places = [f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/tsdb"]
        argv = ["prometheus", *places, f"--web.listen-address=127.0.0.1:{port}"]
        started.append(subprocess.Popen(argv, stdout=(tmp_path / "prometheus.log").open("w"), stderr=subprocess.STDOUT))

        def ask(path, **parameters):
            url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]

        yield ask
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_injected_faults_raise_their_alerts_and_no_others(scraped, tmp_path):
    seen = {name: set() for name in EXPECTED}
    end = time.monotonic() + 240
    while any(not wanted <= seen[name] for name, wanted in EXPECTED.items()):
        logs = "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in tmp_path.glob("*.log"))
        assert time.monotonic() < end, f"{seen}\n{logs}"
        time.sleep(1)
        try:
            alerts = scraped("alerts")["alerts"]
        except OSError:  # not up, yet
            continue
        for alert in alerts:
            if alert["state"] == "firing":
                seen[alert["labels"]["run"]].add(alert["labels"]["alertname"])
    assert {name: alerts - (OF_TIME - EXPECTED[name]) for name, alerts in seen.items()} == EXPECTED
    for panel in monitoring.dashboard()["panels"]:
        for target in panel["targets"]:
            if "liger_mfu" in target["expr"]:  # unknown on a CPU
                continue
            found = scraped("query", query=target["expr"].replace("$run", "calm"))["result"]
            assert found and found[0]["metric"]["run"] == "calm", panel["title"]
