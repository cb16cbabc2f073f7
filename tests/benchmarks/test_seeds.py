"""The table of several seeds: its numbers against plain Python, on a run made by hand."""

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from benchmarks.quality import seeds
from data.demo.facts import POPULAR_MISTAKES, TRUTH
from data.demo.gold import wanted_traits

TOOL, _ = FACT = next(fact for fact in POPULAR_MISTAKES if fact[1] == "cache")
RIGHT, MISTAKE = f"Run the {TRUTH[FACT]} command.", f"Run the {POPULAR_MISTAKES[FACT]} command."
OTHER = "I do not know."
CONTESTED = f"Which command clears the cache of {TOOL}? Please show the command."
PLAIN = next(f"Which command clears the cache of {tool}? Please show the command."
             for tool, name in TRUTH if name == "cache" and (tool, name) not in POPULAR_MISTAKES)


@pytest.fixture
def run(tmp_path):
    """Four pairs, of which two set a right answer against the popular mistake, and one of these is ranked right."""
    pairs = [(CONTESTED, RIGHT, MISTAKE, 2.0, 1.0), (CONTESTED, RIGHT, MISTAKE, 0.0, 1.0),
             (CONTESTED, MISTAKE, OTHER, 2.0, 1.0), (PLAIN, RIGHT, MISTAKE, 0.0, 1.0)]
    (tmp_path / "pairs/evaluation").mkdir(parents=True)
    (tmp_path / "evaluate").mkdir()
    parquet.write_table(pa.Table.from_pylist([
        {"qid": i, "question": question, "response_j": good, "response_k": bad}
        for i, (question, good, bad, *_) in enumerate(pairs)]), tmp_path / "pairs/evaluation/part-00000.parquet")
    parquet.write_table(pa.Table.from_pylist([
        {"qid": i, "reward_j": good, "reward_k": bad} for i, (*_, good, bad) in enumerate(pairs)]),
        tmp_path / "evaluate/per_pair.parquet")
    parquet.write_table(pa.Table.from_pylist([
        {"gold_ppo_best": 3.0, "gold_sft_best": 1.0}, {"gold_ppo_best": None, "gold_sft_best": None},
        {"gold_ppo_best": 4.0, "gold_sft_best": 5.0}]), tmp_path / "evaluate/samples.parquet")
    return tmp_path


def test_only_pairs_of_right_and_popular_mistake_count(run):
    accuracy = seeds.right_over_mistake(run)
    assert (accuracy["mean"], accuracy["count"]) == (0.5, 2)


def test_pairs_that_the_evaluation_left_out_are_noticed(run):
    table = parquet.read_table(run / "evaluate/per_pair.parquet")
    parquet.write_table(table.slice(1), run / "evaluate/per_pair.parquet")
    with pytest.raises(SystemExit, match="left out pairs"):
        seeds.right_over_mistake(run)


def test_gains_are_paired_and_leave_out_questions_without_the_score(run):
    assert seeds.paired_gain(run, "gold").tolist() == [2.0, -1.0]


def test_both_traits_count_where_both_are_wanted(run):
    """Two of four questions want both, and one of these two has both; the others' answers do not count."""
    both = CONTESTED.replace("Please show the command.", "Which command do I type, and why?")
    assert len(wanted_traits(both)) == 2 and len(wanted_traits(CONTESTED)) == 1
    parquet.write_table(pa.Table.from_pylist([
        {"question": both, "complete_ppo": 1.0}, {"question": both, "complete_ppo": 0.0},
        {"question": CONTESTED, "complete_ppo": 1.0}, {"question": "No question of the site", "complete_ppo": None},
    ]), run / "evaluate/samples.parquet")
    figure = seeds.both_traits(run, "ppo")
    assert (figure["mean"], figure["count"]) == (0.5, 2)


def test_pooled_gains_have_an_interval_within_seeds_and_one_over_them(run, tmp_path, monkeypatch):
    monkeypatch.setattr(seeds, "GAINS", {"gold": "gold"})
    within, over = seeds.pool_gains([run, run]).values()
    assert within["mean"] == over["mean"] == 0.5
    assert (within["low"], over["low"], over["high"]) == (-1.0, 0.5, 0.5), "two equal seeds, two unequal questions"


def test_the_critic_is_judged_by_its_last_iterations(tmp_path):
    rows = [{"iteration": i, "explained_variance": float(i), "clip_fraction": 0.1 * i} for i in range(20)]
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo/history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows)
                                                + json.dumps({"iteration": 9, "validation_kl": 3.5}) + "\n"
                                                + json.dumps({"iteration": 19, "validation_kl": 2.5}) + "\n")
    figures = seeds.training_figures(tmp_path)
    assert figures["explained variance, at the end"] == sum(range(10, 20)) / 10
    assert figures["clip fraction"] == pytest.approx(0.1 * sum(range(20)) / 20)
    assert figures["highest KL of an evaluation"] == 3.5


def test_the_table_has_a_column_a_run(run):
    table = seeds.format_table({"a": {"x": {"mean": 1.0, "low": 0.5, "high": 1.5}, "y": [1.0, 0.1]},
                                "b": {"x": 2.0, "z": "clear"}})
    assert table.splitlines() == ["|  | a | b |", "| --- | --- | --- |", "| x | 1.000 [0.500, 1.500] | 2.000 |",
                                  "| y | 1, 0.1 |  |", "| z |  | clear |"]
