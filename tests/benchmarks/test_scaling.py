"""The benchmark of stages in several processes: shorter recipes, and the options of each stage."""

from pathlib import Path

import pytest
import yaml

from benchmarks.scaling import run as scaling
from stages.command_line.option_parser import read_signature
from stages.recipe.recipe import load_recipe

ROOT = Path(__file__).parents[2]


def test_the_recipe_is_the_runs_with_fewer_steps(tmp_path):
    (tmp_path / "run").mkdir()
    text = (ROOT / "configs/demo.yaml").read_text()
    (tmp_path / "run/recipe.yaml").write_text(text)
    short = load_recipe(str(scaling.write_recipe(tmp_path / "run", tmp_path)))
    whole = load_recipe("configs/demo.yaml")
    assert short.ppo.iterations == 6 < whole.ppo.iterations and short.base.scratch.max_tokens == 250_000
    assert short.base.scratch.optimizer == whole.base.scratch.optimizer == "muon"
    assert short.ppo.lora == whole.ppo.lora
    assert yaml.safe_load(text) == yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())


@pytest.mark.parametrize("stage", scaling.INPUTS)
def test_the_inputs_are_those_of_the_stage(stage):
    inputs = read_signature(ROOT / f"stages/{stage}.py").inputs
    required = {name for name, kind in inputs.items() if kind != "Path | None"}
    assert required <= set(scaling.INPUTS[stage]) <= set(inputs)
