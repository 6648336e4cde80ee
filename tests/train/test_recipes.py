"""``liger recipes``: each is a configuration, and needs the memory that it says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import liger_kernel
from liger_kernel import cli
from liger_kernel.model_sizes import MODELS
from liger_kernel.train.config import TrainConfig, read_file
from liger_kernel.train.fit import GPUS

RECIPES = {path.stem: path for path in sorted((Path(liger_kernel.__file__).parent / "recipes").glob("*.yaml"))}
OURS = [name for name in RECIPES if not name.startswith("trl-")]


@pytest.mark.parametrize("name", OURS)
def test_a_recipe_is_a_configuration(name):
    config, (_, fit, train) = TrainConfig.load(RECIPES[name]), RECIPES[name].read_text().splitlines()[:3]
    assert train == f"# liger train --config {name}.yaml"
    model, gpu = re.search(r"--model (\S+) --gpu (\S+)$", fit).groups()
    assert model in MODELS and model == config.model.split("/")[1].lower()
    cards, size = re.match(r"(?:(\d)x)?(\d+)gb", name).groups()
    assert config.nproc == (int(cards) if cards else None)
    assert GPUS[gpu] == pytest.approx(int(size) * 1024, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_a_recipe_needs_the_memory_that_it_says(name, capsys, monkeypatch):
    monkeypatch.chdir(RECIPES[name].parent)
    gigabytes, command = re.match(
        r"# (\S+) GB a card by: liger (.*)", RECIPES[name].read_text().splitlines()[1]
    ).groups()
    assert cli.main([*shlex.split(command), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"] / 1e9 == pytest.approx(float(gigabytes), rel=0.02) and found["peak"] < found["memory"]


def test_recipes_are_listed_and_copied(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipes"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(RECIPES)
    assert cli.main(["recipes", OURS[0]]) == 0
    assert read_file(f"{OURS[0]}.yaml") == read_file(RECIPES[OURS[0]])
    assert cli.main(["recipes", OURS[0]]) == 2  # the user may have changed it
    assert "cannot write" in capsys.readouterr().err
