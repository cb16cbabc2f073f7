"""The frontier of a real, tiny evaluation, through the stages' own machinery."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from stages import evaluate, frontier
from stages.command_line import command
from stages.recipe.schema import override
from stages.recipe.sections.evaluate import Frontier
from stages.recipe.variants import evaluation_overrides
from tests.helpers import frontier_runs, tiny_evaluation

CONFIG = Frontier(algorithms=("ppo", "rloo"), ppo_kl_coefficients=(0.1, 0.3), best_of=(2, 4), prompts=6, max_pairs=10,
                  bootstrap_samples=50)


def test_an_evaluation_with_the_frontiers_settings_becomes_a_page(tmp_path):
    tokenizer = tiny_evaluation.make_tokenizer()
    folders = tiny_evaluation.save_inputs(tmp_path, tokenizer)
    policies = {"ppo-kl-0_1": tmp_path / "ppo", "ppo-kl-0_3": tmp_path / "third", "rloo": tmp_path / "fourth"}
    for seed, folder in enumerate(list(policies.values())[1:], 5):
        tiny_evaluation.make_model(tokenizer, seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    frontier_runs.write_manifest(tmp_path / "fourth", "rloo", seconds=12.0)
    config = override(replace(tiny_evaluation.CONFIG), evaluation_overrides(CONFIG), "frontier")
    command.make(evaluate.run, config, tmp_path / "evaluate", {**folders, "policy": policies})
    command.make(frontier.run, CONFIG, tmp_path / "page", {
        "evaluate": [str(tmp_path / "evaluate/manifest.json")], "trained": [str(tmp_path / "fourth")]})
    metrics = json.loads((tmp_path / "page/metrics.json").read_text())
    evaluated = json.loads((tmp_path / "evaluate/metrics.json").read_text())
    assert list(metrics["policies"]) == ["best_of_2", "best_of_4", "ppo-kl-0_1", "ppo-kl-0_3", "rloo"]
    assert metrics["measure"] == "reward"
    for name, policy in metrics["policies"].items():
        assert policy["gains"]["reward"]["mean"] == pytest.approx(
            evaluated["policies"][name]["reward_difference"]["mean"])
        expected = evaluated["policies"][name]["kl_k1"] or {"mean": evaluated["policies"][name]["kl_formula"]}
        assert policy["kl"]["mean"] == pytest.approx(expected["mean"])
    assert metrics["costs"]["policies"] == {"rloo": {"mean": 12.0, "by_seed": [12.0]}}
    assert {path.name for path in (tmp_path / "page").iterdir()} >= {"frontier.html", "points.csv", "figures"}
    assert list(pd.read_csv(tmp_path / "page/points.csv").policy) == list(metrics["policies"])
