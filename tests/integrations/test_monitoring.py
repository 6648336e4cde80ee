"""The alerts and the dashboard by promtool (apt install prometheus); a Prometheus that scrapes a real run
is in the drill, deploy/kind/drill.py."""

from __future__ import annotations

import shutil
import subprocess

import pytest

pytest.importorskip("yaml")

import yaml

from liger_kernel.deploy import monitoring
from liger_kernel.deploy.job import Job
from liger_kernel.train.config import TrainConfig

pytestmark = pytest.mark.skipif(not shutil.which("promtool"), reason="not installed: apt install prometheus")


def job(name, **changes):
    train = TrainConfig(model="m", checkpoint_every=10, steps=1000, **changes)
    return Job(name=name, image="i:1", nodes=1, gpus=1, volume="v", train=train)


def promtool(*argv, folder=None):
    done = subprocess.run(["promtool", *map(str, argv)], capture_output=True, text=True, check=False, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_promtool_accepts_all_expressions_and_refuses_a_wrong_twin(tmp_path):
    rules = monitoring.rules(job("run"))
    path = tmp_path / "rules.yaml"
    shown = [target["expr"] for panel in monitoring.dashboard()["panels"] for target in panel["targets"]]
    asked = [{"record": f"query:{i}", "expr": query.replace("$run", "run")} for i, query in enumerate(shown)]
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": asked}]}))
    code, said = promtool("check", "rules", path)
    assert code == 0 and f"{len(shown)} rules found" in said, said
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
    "failing": ({"checkpoint_failures_total": "0x10 1x100"}, {"LigerCheckpointFailed": (12, True)}),
    "long ago": ({"restarts_total": "0x10 1x100"}, {"LigerTrainingRestarted": (40, False)}),
    "nan": ({"loss": "1x10 NaN NaN NaN NaN NaN NaN"}, {"LigerNotFinite": (15, True)}),
    "slow": ({"tokens_per_second": "1000x200 600x60"}, {"LigerThroughputDropped": (240, True)}),
    "a little slow": ({"tokens_per_second": "1000x200 750x60"}, {"LigerThroughputDropped": (240, False)}),
    "slow for a moment": ({"tokens_per_second": "1000x200 100x2 1000x60"}, {"LigerThroughputDropped": (208, False)}),
}


def test_alerts_fire_when_they_should_and_not_before(tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(monitoring.rules(job("run"))))
    summaries = {rule["alert"]: rule for rule in monitoring.rules(job("run"))["groups"][0]["rules"] if "alert" in rule}
    assert summaries.keys() == {alert for _, wanted in TIMELINES.values() for alert, at in wanted.items() if at[1]}
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
