"""Cross-validation of the reward model: every question is held out once, and never learnt from where it is."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from benchmarks.quality import cross_validation
from stages.evaluation.pair_accuracy import draw_held_out_pairs
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.load import load_reward_models
from stages.stackexchange.pairs.table import question_key, read_pairs
from tests.helpers import tiny_models

RECIPE = """
reward: {precision: fp32, batching: question, pooling: sum, batch_pairs: 4, microbatch_pairs: 4,
         learning_rate: 1.0e-3}
"""


def questions(pairs, split) -> list[tuple]:
    return [question_key(row) for row in read_pairs(pairs, split)]


def test_each_question_is_held_out_once(tmp_path):
    pairs = tiny_models.save_pairs(tmp_path / "pairs", questions_per_split=11)
    everything = sorted(key for name in cross_validation.SPLITS for key in questions(pairs, name))
    evaluated = []
    for fold in range(cross_validation.FOLDS):
        cross_validation.write_fold(pairs, fold, tmp_path / str(fold))
        learnt, here = (questions(tmp_path / str(fold), name) for name in ("reward", "evaluation"))
        assert not set(learnt) & set(here) and sorted(learnt + here) == everything
        evaluated += here
    assert sorted(evaluated) == everything


def test_estimates_are_what_plain_python_counts():
    table = pa.table({"site": ["a"] * 4, "qid": [1, 1, 2, 3], "score_better": [1.0, 0.0, 2.0, 3.0],
                      "score_worse": [0.0, 1.0, 1.0, 3.0], "length_better": [100, 50, 95, 10],
                      "length_worse": [50, 100, 100, 30]})
    actual = cross_validation.estimate_accuracy(table)
    assert actual["accuracy"]["mean"] == (1 + 0 + 1 + 0.5) / 4
    assert actual["minus the longer answer"]["mean"] == ((1 + 0 + 1 + 0.5) - (1 + 0 + 0 + 0)) / 4
    assert actual["accuracy at equal length"]["mean"] == 1 and actual["accuracy at equal length"]["count"] == 1
    assert "accuracy at equal length" not in cross_validation.estimate_accuracy(table.slice(0, 2))


def test_folds_are_made_once_and_rank_what_they_never_saw(tmp_path, monkeypatch, capsys):
    tiny_models.save_base(tmp_path / "base")
    tiny_models.save_pairs(tmp_path / "pairs", questions_per_split=12)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    asked = [f"--{name}={tmp_path / name}" for name in ("base", "pairs", "out")]
    monkeypatch.setattr(sys, "argv", ["folds", f"--recipe={tmp_path / 'recipe.yaml'}", *asked, "--fold", "0", "3",
                                      f"--json={tmp_path / 'folds.json'}"])
    cross_validation.main()
    actual = json.loads((tmp_path / "folds.json").read_text())
    assert actual.keys() == {"fold 0", "fold 3", "together"}
    assert actual["together"]["accuracy"]["mean"] > 0.9, "the better answers are those that say 'flag'"
    counts = [actual[name]["accuracy"]["count"] for name in ("fold 0", "fold 3", "together")]
    assert counts[0] + counts[1] == counts[2]
    made = tmp_path / "out" / "fold-0" / cross_validation.SCORES
    before = made.stat().st_mtime_ns
    capsys.readouterr()
    cross_validation.main()
    assert made.stat().st_mtime_ns == before and "steps" not in capsys.readouterr().err
    table = parquet.read_table(made)
    assert table.num_rows == actual["fold 0"]["accuracy"]["count"]


def test_an_adapter_scores_as_the_merged_model(tmp_path):
    base = tiny_models.save_base(tmp_path / "base")
    pairs = tiny_models.save_pairs(tmp_path / "pairs", questions_per_split=12)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    cross_validation.write_fold(pairs, 1, tmp_path / "split")
    config = cross_validation.recipe.load_recipe(tmp_path / "recipe.yaml").reward
    (tmp_path / "reward").mkdir()
    table = cross_validation.train_and_score(config, base, tmp_path / "split", tmp_path / "reward")
    tiny_models.merge(base, [tmp_path / "reward"], tmp_path / "merged")
    held_out = draw_held_out_pairs(read_pairs(tmp_path / "split", "evaluation"), load_tokenizer(base), max_pairs=99,
                                   max_tokens=config.max_length_tokens, seed=0)
    (scorer,) = load_reward_models(tmp_path / "merged", "fp32")
    scores = scorer(held_out.prompts, held_out.answers).numpy()
    assert table["score_better"].to_pylist() == pytest.approx(scores[held_out.better].tolist(), abs=1e-3)
