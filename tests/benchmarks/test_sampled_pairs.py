"""The benchmark of sampled pairs: a row for every number of questions, of which a head learns to rank samples."""

import re
import sys

from benchmarks.quality import sampled_pairs
from stages.reward_modeling.dataset import Example
from tests.helpers import tiny_models


def test_every_question_is_paired_with_another():
    items = [Example(("s", n), [n], [[n], [10 + n]], [(0, 1)]) for n in range(5)]
    pairs = sampled_pairs.pair_with_others(items)
    assert [pair.answers[0] for pair in pairs] == [[n] for n in range(5)]
    assert sorted(pair.answers[1] for pair in pairs) == [[n] for n in range(5)]
    assert all(better != worse and pair.pairs == [(0, 1)] for pair in pairs for better, worse in [pair.answers])


def test_the_table_has_a_row_for_every_count(tmp_path, monkeypatch, capsys):
    tiny_models.save_base(tmp_path / "sft-merged")
    tiny_models.save_pairs(tmp_path / "pairs", 12)
    (tmp_path / "recipe.yaml").write_text(
        "reward: {tune: head, pooling: mean, precision: fp32, batching: question, max_sampled_tokens: 8}")
    monkeypatch.setattr(sys, "argv", ["sampled_pairs", "--run", str(tmp_path), "--counts", "0", "6"])
    sampled_pairs.main()
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("  ")[0].strip() for row in rows] == ["0 questions", "6 questions", "other question"]
    for row in rows:
        kinds = re.findall(r"(human|temperature 0|temperature 1|other question) [01]\.\d{3} \[", row)
        assert kinds == ["human", "temperature 0", "temperature 1", "other question"]
