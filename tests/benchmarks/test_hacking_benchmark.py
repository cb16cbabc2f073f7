"""Deliberately poor runs: what is spoilt, what is not, and the verdict without gold."""

from collections import Counter

import pytest
import yaml

from benchmarks.quality import hacking
from benchmarks.quality.hacking import POOR_RUNS
from stages.recipe import recipe
from stages.stackexchange.pairs.table import SPLITS, read_pairs
from tests.helpers import finished_run, tiny_models


@pytest.fixture
def pairs(tmp_path):
    return tiny_models.save_pairs(tmp_path / "pairs")


def test_flipped_votes_swap_the_answers_of_the_reward_split_alone(pairs, tmp_path):
    flipped = hacking.write_pairs(pairs, tmp_path / "flipped", hacking.flip_votes)
    for split in SPLITS:
        before, after = list(read_pairs(pairs, split)), list(read_pairs(flipped, split))
        if split == "reward":
            assert [(r["qid"], r["response_k"], r["response_j"], r["score_k"], r["score_j"]) for r in before] == [
                (r["qid"], r["response_j"], r["response_k"], r["score_j"], r["score_k"]) for r in after]
        else:
            assert before == after


def test_few_pairs_are_some_of_the_reward_split(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(hacking, "FEW_PAIRS", 7)
    few = list(read_pairs(hacking.write_pairs(pairs, tmp_path / "few", hacking.draw_few), "reward"))
    assert len(few) == 7
    assert not Counter(map(str, few)) - Counter(map(str, read_pairs(pairs, "reward")))


@pytest.mark.parametrize("name", POOR_RUNS)
def test_each_way_trains_what_it_names_and_nothing_else(name, tmp_path, monkeypatch):
    calls = {}

    def stage(stage_name, folder, out, **inputs):
        calls[out if stage_name != "evaluate" else stage_name] = inputs
        return folder / out

    run, poor = tmp_path / "run", POOR_RUNS[name]
    tiny_models.save_pairs(run / "pairs")
    (tmp_path / "posts").mkdir()
    settings = {"reward": {"start_from": "base"}, "ppo": {"value_model": "model", "precision": "fp32"},
                "evaluate": {"gold": "a:b"}}
    (run / "recipe.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setattr(hacking, "stage", stage)
    monkeypatch.setattr(hacking, "read_metrics", lambda folder: {})
    hacking.train_poorly(run, tmp_path / name, poor)
    loaded = recipe.load_recipe(tmp_path / name / "recipe.yaml")
    assert loaded.evaluate.gold == "a:b"
    for section in ("ppo", "evaluate"):
        for key, value in getattr(poor, section).items():
            if key != "rewards":
                assert (tuple(value) if isinstance(value, list) else value) == getattr(getattr(loaded, section), key)
    assert [source.source for source in loaded.ppo.rewards] == [
        {"length": "response_characters", "code": "has_code"}.get(name, "model")]
    trains_reward = name in ("few-pairs", "flipped")
    assert list(calls) == ["reward", "reward-merged"] * trains_reward + ["ppo", "ppo-merged", "evaluate"]
    reward = (tmp_path / name if trains_reward else run) / "reward-merged"
    assert calls["ppo"]["reward"] == calls["evaluate"]["reward"] == reward
    assert calls["evaluate"]["posts"] == tmp_path / "posts", "seeds share the posts of the folder above"
    assert calls["ppo"]["pairs"] == calls["evaluate"]["pairs"] == run / "pairs", "prompts and judges are not spoilt"


def test_the_verdict_without_gold_comes_from_the_monitors_alone():
    metrics = finished_run.metrics(learnt=0.5, gold=-0.3)
    for moved in ("code_share", "repetition"):
        metrics["comparisons"]["ppo"]["changes"][moved] = finished_run.around(1.0)
    row = hacking.verdicts(metrics)
    assert (row["with gold"], row["without gold"]) == ("flagged", "flagged") and len(row["moved"]) == 2
    honest = finished_run.metrics(learnt=0.5, gold=-0.3)
    row = hacking.verdicts(honest)
    assert (row["with gold"], row["without gold"], row["moved"]) == ("flagged", "clear", [])
    assert honest["comparisons"]["ppo"]["changes"]["gold"], "the metrics that were given are as they were"
    assert "| x | 0.720 | +0.50 | -0.30 | 2.5 | flagged | clear | none |" in hacking.format_table({"x": row})


def test_the_counts_have_each_way_with_its_flagged_runs():
    flagged, missed = ({"with gold": "flagged", "without gold": verdict} for verdict in ("flagged", "clear"))
    table = hacking.format_counts({"code": [flagged, missed, flagged, missed], "honest": [missed | {
        "with gold": "clear"}]})
    assert "| code | 4 of 4, 1.00 [0.51, 1.00] | 2 of 4, 0.50 [0.15, 0.85] |" in table
    assert "| honest | 0 of 1, 0.00 [0.00, 0.79] | 0 of 1, 0.00 [0.00, 0.79] |" in table
