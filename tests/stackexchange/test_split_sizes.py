"""A site that is too small is refused before anything is trained, with what is missing."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages import base
from stages.recipe.sections.models import Base
from stages.stackexchange.pairs.counts import NEEDED_QUESTIONS, check_split_sizes, print_split_sizes
from stages.stackexchange.pairs.table import SPLITS


def save_pairs(folder, *questions: int, shares: dict | None = None):
    """Save a pairs artifact with so many questions, two pairs each, in the splits."""
    for split, count in zip(SPLITS, questions, strict=True):
        (folder / split).mkdir(parents=True)
        keys = [number for number in range(count) for _ in range(2)]
        table = pa.table({"site": pa.array(["tiny"] * len(keys)), "qid": pa.array(keys, pa.int64())})
        pq.write_table(table, folder / split / "part-00000.parquet")
    if shares is not None:
        (folder / "manifest.json").write_text(json.dumps({"config": shares}))
    return folder


def test_enough_for_every_stage(tmp_path):
    assert list(NEEDED_QUESTIONS) == list(SPLITS)
    check_split_sizes(save_pairs(tmp_path / "least", 1, 2, 4, 1))
    check_split_sizes(save_pairs(tmp_path / "more", 9, 9, 9, 9))


@pytest.mark.parametrize("questions, missing", [
    ((1, 0, 0, 0), "reward has 0 (needed: 2), rl has 0 (needed: 4), evaluation has 0 (needed: 1)"),
    ((0, 2, 4, 1), "finetune has 0 (needed: 1)"), ((5, 1, 3, 1), "reward has 1 (needed: 2), rl has 3 (needed: 4)")])
def test_too_few_are_counted_by_question(tmp_path, questions, missing):
    with pytest.raises(ValueError, match=f"too few questions for a run: {re.escape(missing)}[.] Take") as error:
        check_split_sizes(save_pairs(tmp_path, *questions))
    assert "\n" not in str(error.value)


def test_a_split_whose_share_is_0_is_not_wanted(tmp_path):
    shares = {"finetune_share": 3.0, "reward_share": 3.0, "rl_share": 0.0, "evaluation_share": 1.0}
    check_split_sizes(save_pairs(tmp_path / "wanted", 5, 5, 0, 1, shares=shares))
    with pytest.raises(ValueError, match="rl has 0"):
        check_split_sizes(save_pairs(tmp_path / "all", 5, 5, 0, 1, shares=shares | {"rl_share": 1.0}))


def test_pairs_prints_the_sizes_and_warns_of_those_that_are_too_small(capsys):
    config = {"finetune_share": 3.0, "reward_share": 3.0, "rl_share": 0.0, "evaluation_share": 1.0}
    metrics = {"pairs_by_split": dict(zip(SPLITS, (1500, 4, 0, 9), strict=True)),
               "questions_by_split": dict(zip(SPLITS, (700, 1, 0, 5), strict=True))}
    print_split_sizes(config, metrics)
    assert capsys.readouterr().err.splitlines() == [
        "pairs: finetune 1,500 pairs of 700 questions, reward 4 pairs of 1 questions, rl 0 pairs of 0 questions, "
        "evaluation 9 pairs of 5 questions",
        "pairs: warning: the reward split has 1 questions, and reward needs 2: take a larger dump, or raise "
        "pairs.reward_share"]


def test_the_base_stage_checks_first(tmp_path):
    with pytest.raises(ValueError, match="rl has 3"):
        base.run(Base(), tmp_path / "out", pairs=save_pairs(tmp_path / "pairs", 9, 9, 3, 9))
    assert not (tmp_path / "out").exists()
