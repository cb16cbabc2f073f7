"""The whole stage on a tiny model: it learns, its best state is the result, and a user's mistake is one line."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from stages import dpo, evaluate, merge
from stages.artifacts.artifact import read_manifest
from stages.command_line import command
from stages.modeling.load import load_causal
from stages.preference.logprobs import all_answer_logprobs
from stages.recipe.schema import SettingsError, override
from stages.recipe.sections.dpo import Dpo
from stages.recipe.sections.models import Lora, Merge
from stages.reporting.curves import CURVES, build_curves
from stages.reward_modeling.dataset import PairSplit, TooFewPairsError
from stages.runtime.series import read_history, read_rows
from tests.helpers import tiny_evaluation, tiny_models

CONFIG = Dpo(precision="fp32", batch_pairs=8, microbatch_pairs=4, epochs=3.0, learning_rate=2e-3, warmup_steps=2,
             save_every_steps=8, validation_share=0.2, max_length_tokens=128, log_to=("jsonl",),
             lora=Lora(r=4, alpha=8, dropout=0.0), batching="question")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return {"policy": tiny_models.save_base(folder / "base"), "pairs": tiny_models.save_pairs(folder / "pairs")}


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "dpo"
    command.make(dpo.run, CONFIG, out, inputs)
    return out


def test_it_learns_which_answer_is_better(trained):
    metrics, rows = read_manifest(trained)["metrics"], read_history(trained)
    first = rows[0]
    assert first["step"] == 0 and first["validation_preference_loss"] == pytest.approx(0.693147, abs=1e-5)
    assert first["validation_implicit_accuracy"] == 0.5 and first["validation_drift_per_token"] < 1e-6
    assert next(row["loss"] for row in rows if "loss" in row) == pytest.approx(0.693147, abs=1e-5)
    assert metrics["validation_implicit_accuracy"] > 0.9 and metrics["validation_preference_loss"] < 0.67
    assert metrics["best_step"] > 0 and metrics["validation_implicit_margin"] > 0
    gained = metrics["validation_better_logprob"] - first["validation_better_logprob"]
    lost = metrics["validation_worse_logprob"] - first["validation_worse_logprob"]
    assert gained > lost
    startup = json.loads((trained / "startup.json").read_text())
    assert startup["loss"] == pytest.approx(startup["expected_loss"], abs=1e-5)
    assert not (trained / "checkpoints").exists() and not (trained / "best.safetensors").exists()


def test_the_reference_is_that_of_the_base_and_stays_in_the_artifact(trained, inputs):
    parts = PairSplit(inputs["pairs"], "reward", 0.2)
    examples, _ = parts.training_examples(
        dpo.prepare_tokenizer(inputs["policy"]), max_length_tokens=128, max_pairs=10**6, by_question=True)
    expected = all_answer_logprobs(load_causal(inputs["policy"]), examples, "fp32")
    stored = torch.tensor(pq.read_table(trained / "reference.parquet")["logprob"].to_pylist())
    assert torch.allclose(stored, expected, atol=1e-4) and len(stored) == read_manifest(trained)["metrics"]["answers"]
    qids = set(pq.read_table(trained / "reference.parquet")["qid"].to_pylist())
    held_out = set(pq.read_table(trained / "validation_reference.parquet")["qid"].to_pylist())
    assert held_out == {qid for _, qid in parts.held_out} and qids and not qids & held_out


@pytest.mark.parametrize("changes", [
    {"loss": "ipo", "beta": 0.5}, {"tune": "full", "learning_rate": 1e-3, "batching": "pair"},
    {"label_smoothing": 0.1, "precision": "bf16"}], ids=str)
def test_other_losses_and_ways_to_train(inputs, tmp_path, changes):
    config = replace(CONFIG, epochs=1.0, **changes)
    metrics = dpo.run(config, tmp_path, **inputs)
    rows = [row for row in read_history(tmp_path) if "validation_preference_loss" in row]
    start = 1 / (4 * config.beta**2) if config.loss == "ipo" else 0.693147
    assert rows[0]["validation_preference_loss"] == pytest.approx(start, rel=2e-2)
    assert metrics["validation_preference_loss"] == min(row["validation_preference_loss"] for row in rows)
    assert metrics["validation_preference_loss"] < rows[0]["validation_preference_loss"]
    assert (tmp_path / ("adapter_model.safetensors" if config.tune == "lora" else "model.safetensors")).exists()


def test_a_policy_that_only_gets_worse_is_left_at_its_start_and_stops_early(inputs, tmp_path, monkeypatch):
    """Labels of the held-out pairs are turned round: the lowest loss is that of step 0."""
    draw = dpo.draw_held_out_pairs

    def draw_turned(*args, **named):
        pairs = draw(*args, **named)
        return replace(pairs, better=pairs.worse, worse=pairs.better)

    monkeypatch.setattr(dpo, "draw_held_out_pairs", draw_turned)
    metrics = dpo.run(replace(CONFIG, save_every_steps=2, patience_evaluations=2), tmp_path, **inputs)
    assert metrics["best_step"] == 0 and metrics["steps"] < 10
    assert metrics["validation_preference_loss"] == pytest.approx(0.693147, abs=1e-5)
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert not any(weight.any() for name, weight in adapter.items() if "lora_B" in name)


def test_without_held_out_questions_the_last_state_is_the_result(inputs, tmp_path):
    metrics = dpo.run(replace(CONFIG, validation_share=0.0, max_steps=3), tmp_path, **inputs)
    assert metrics["validation_pairs"] == 0 and "best_step" not in metrics
    assert not (tmp_path / "validation_reference.parquet").exists()


def test_it_is_merged_and_evaluated_as_a_policy(trained, inputs, tmp_path):
    merged, out = tmp_path / "dpo-merged", tmp_path / "evaluate"
    command.make(merge.run, Merge(dtype="fp32"), merged,
                 {"base": inputs["policy"], "adapter": [str(trained)], "pairs": inputs["pairs"]})
    card = (merged / "README.md").read_text()
    assert "then by direct preference optimisation" in card and "- dpo" in card
    given = tiny_evaluation.save_inputs(tmp_path, tiny_models.tokenizer())
    command.make(evaluate.run, tiny_evaluation.CONFIG, out, given | {"policy": {"dpo": merged}})
    assert set(json.loads((out / "metrics.json").read_text())["comparisons"]) == {"dpo"}


def test_every_curve_is_of_a_number_of_the_history(trained):
    history = read_rows(trained / "history.jsonl")
    assert set(build_curves("dpo", "dpo", history)) == {f"dpo-{spec.name}" for spec in CURVES["dpo"]}
    logged = {name for row in history for name in row}
    assert {key for spec in CURVES["dpo"] for key in spec.lines.values()} <= logged


@pytest.mark.parametrize(("values", "words"), [
    ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing is for the sigmoid loss"),
    ({"loss": "hinge"}, "loss must be one of 'sigmoid', 'ipo'"),
    ({"beta": 0}, "beta must be above 0"),
    ({"microbatch_pairs": 3}, "batch_pairs (16) must be a multiple of microbatch_pairs (3)"),
    ({"tune": "full"}, "tune 'full' needs trainable weights, and nf4 is quantised"),
    ({"log_to": ["terminal"]}, "log_to must name jsonl")])
def test_a_wrong_setting_is_one_line(values, words):
    with pytest.raises(SettingsError) as error:
        override(Dpo(), values, "recipe.yaml: dpo")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_wrong_inputs_are_one_line(inputs, trained, tmp_path):
    with pytest.raises(TooFewPairsError, match="hardly a usable pair in its reward split"):
        dpo.run(replace(CONFIG, max_length_tokens=4), tmp_path, **inputs)
    with pytest.raises(ValueError, match="is an adapter, and a whole model is needed here"):
        dpo.run(CONFIG, tmp_path, policy=trained, pairs=inputs["pairs"])
    with pytest.raises(ValueError, match="is it a pairs artifact"):
        dpo.run(CONFIG, tmp_path, policy=inputs["policy"], pairs=inputs["policy"])
