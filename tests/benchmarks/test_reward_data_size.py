"""Gold against the number of pairs: what is trained on what, the peak, and the whole program on tiny models."""

import json
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

from benchmarks.quality import reward_data_size
from stages import evaluate_reward, merge, reward
from stages.artifacts.lineage import section_name
from stages.command_line import command
from stages.recipe.recipe import load_recipe
from stages.reporting.figures import LIGHT
from stages.runtime.files import write_json
from tests.helpers import tiny_models


def points(*gold: float) -> list[dict]:
    estimates = [{"mean": value, "low": value - 1, "high": value + 1, "count": 9, "groups": 9} for value in gold]
    return [{"n": 2**i, "kl": float(i), "gold": value, "best_gold": value} for i, value in enumerate(estimates)]


def score_flag(questions, responses):
    """Gold for the test: the share of letters that are in 'flag'."""
    return {"gold": [sum(letter in "flag" for letter in text) / (1 + len(text)) for text in responses]}


def test_each_number_of_pairs_has_a_line_of_its_own():
    curve = points(1.0, 2.0, 1.5)
    rows = {size: {"curve": curve, "peak": curve[1], "ppo": None} for size in reward_data_size.SIZES}
    axes = Figure().add_subplot()
    reward_data_size.GoldCurves("title", rows).draw(axes, LIGHT[-1])
    lines = axes.get_legend_handles_labels()[0]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(rows)


def test_the_peak_is_the_highest_mean_gold():
    assert reward_data_size.find_peak(points(1.0, 3.0, 2.0))["n"] == 2


def test_only_the_pairs_and_the_measurement_change():
    recipe = {"reward": {"train_pairs": 9, "epochs": 2.5}, "evaluate": {"gold": "a:b"}, "ppo": {"precision": "fp32"}}
    changed = reward_data_size.change_recipe(json.loads(json.dumps(recipe)), "500", 7)
    assert changed["reward"] == {"train_pairs": 500, "epochs": 2.5}
    assert changed["evaluate"] == {"gold": "a:b", "prompts": 7, "best_of": [2, 4, 8, 16, 32, 64]}
    assert reward_data_size.change_recipe(recipe, "all", 7)["reward"]["train_pairs"] == 9


@pytest.mark.parametrize("value_model", ["model", "adapter"])
def test_ppo_is_trained_against_the_reward_model_of_its_size(tmp_path, value_model, monkeypatch):
    calls = {}

    def stage(_, folder, out, **inputs):
        calls[out] = inputs
        (folder / out).mkdir()
        write_json(folder / out / "manifest.json", {"metrics": {"pairs": 5}})
        write_json(folder / out / "metrics.json", {
            "gold_curve": points(1.0, 2.0), "policy": None, "reward_model": {"accuracy": None}})
        return folder / out

    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    (run / "recipe.yaml").write_text(yaml.safe_dump(
        {"reward": {"start_from": "sft"}, "ppo": {"value_model": value_model}, "evaluate": {"gold": "a:b"}}))
    monkeypatch.setattr(reward_data_size, "stage", stage)
    row = reward_data_size.measure_size(run, out, "5", 7, with_ppo=True)
    assert row["pairs"] == 5 and row["peak"]["n"] == 2
    assert calls["ppo"]["reward"] == out / ("reward" if value_model == "adapter" else "reward-merged")
    assert calls["evaluate-reward"]["policy"] == out / "ppo-merged"
    assert calls["evaluate-reward"]["reward"] == out / "reward-merged"


def test_measures_and_draws_on_tiny_models(tmp_path, monkeypatch, capsys):
    """The stages run in this process, which has torch loaded."""
    run, out = tmp_path / "run", tmp_path / "out"
    tiny_models.save_base(run / "sft-merged")
    tiny_models.save_pairs(run / "pairs", questions_per_split=8)
    recipe = yaml.safe_load(Path("configs/tiny.yaml").read_text())
    recipe["evaluate"] |= {"gold": f"{__name__}:score_flag", "max_response_tokens": 4, "bootstrap_samples": 10}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    programs = {"reward": reward, "merge": merge, "evaluate_reward": evaluate_reward}

    def stage(name, folder, artifact, **inputs):
        config = getattr(load_recipe(folder / "recipe.yaml"), section_name(name))
        listed = {key: [str(value)] if (name, key) in (("merge", "adapter"), ("evaluate_reward", "reward")) else value
                  for key, value in inputs.items()}
        command.make(programs[name].run, config, folder / artifact, listed)
        return folder / artifact

    monkeypatch.setattr(reward_data_size, "BEST_OF", [2, 4])
    monkeypatch.setattr(reward_data_size, "stage", stage)
    reward_data_size.main([str(run), "--out", str(out), "--pairs", "4", "--prompts", "4"])
    rows = json.loads((out / "figures.json").read_text())
    assert {size: row["pairs"] for size, row in rows.items()} == {"4": 4}
    assert [point["n"] for point in rows["4"]["curve"]] == [1, 2, 4]
    assert (out / "gold.png").read_bytes().startswith(b"\x89PNG")
    assert "gold at the peak" in capsys.readouterr().out
