"""Best-of-n as a stage: what it writes, what it measures, and what it does after an interruption."""

import json
import shutil
from itertools import combinations
from math import exp, log
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from stages.rejection_sampling.candidates import CandidateSampler, measure_best_of_n
from tests.helpers import tiny_stages
from tests.helpers.token_rewards import low_ids


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tiny_stages.save_policy_inputs(tmp_path_factory.mktemp("best-of-n"))


def make(out: Path, inputs: dict, **settings) -> dict:
    """Run the stage with these settings, and return its metrics."""
    return tiny_stages.run_stage("best_of_n", settings, out, {"best_of_n": inputs})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def made(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "out"
    return out, make(out, inputs)


def test_each_row_has_the_response_with_the_highest_reward(made, inputs):
    out, metrics = made
    rows = pq.read_table(out / "samples.parquet").to_pylist()
    assert len(rows) == metrics["prompts"] == 12 and len({row["qid"] for row in rows}) == 12
    for row in rows:
        assert row["reward"] == max(row["rewards"]) and len(row["rewards"]) == 4
        assert row["prompt"] == f"Question: {row['question']}\n\nAnswer: "
    assert len({value for row in rows for value in row["rewards"]}) > 2
    assert sorted(path.name for path in out.iterdir()) == ["history.jsonl", "metrics.json", "samples.parquet"]


def test_the_curve_is_that_of_all_subsets_and_the_kl_is_exact(made):
    out, metrics = made
    rewards = [row["rewards"] for row in pq.read_table(out / "samples.parquet").to_pylist()]
    curve = json.loads((out / "metrics.json").read_text())["best_of_n"]
    assert [row["n"] for row in curve] == [1, 2, 4]
    for row in curve:
        best = np.mean([max(subset) for sampled in rewards for subset in combinations(sampled, row["n"])])
        assert row["reward"]["mean"] == pytest.approx(best) and row["kl"] == log(row["n"]) - (row["n"] - 1) / row["n"]
        assert row["reward"]["low"] <= row["reward"]["mean"] <= row["reward"]["high"]
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [(row["n"], row["reward"]) for row in history] == [(row["n"], row["reward"]["mean"]) for row in curve]
    assert metrics["reward"] == curve[-1]["reward"]["mean"] > metrics["reward_of_one"]


def test_the_attainable_objective_is_that_of_the_rewards_in_plain_python(made):
    out, _ = made
    rewards = [row["rewards"] for row in pq.read_table(out / "samples.parquet").to_pylist()]
    optimum = json.loads((out / "metrics.json").read_text())["optimum"]
    assert [row["beta"] for row in optimum] == [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    for row in optimum:
        beta, tops = row["beta"], [max(sampled) for sampled in rewards]
        expected = [top + beta * log(sum(exp((reward - top) / beta) for reward in sampled) / 4)
                    for sampled, top in zip(rewards, tops, strict=True)]
        assert row["objective"]["mean"] == pytest.approx(sum(expected) / 12) == row["by_samples"]["4"]
        assert row["objective"]["mean"] == pytest.approx(row["reward"]["mean"] - beta * row["kl"]["mean"])
        assert row["objective"]["low"] <= row["objective"]["mean"] <= row["objective"]["high"]


def test_n_need_not_be_a_power_of_two():
    assert [row["n"] for row in measure_best_of_n(np.arange(12.0).reshape(2, 6), 10, 0)] == [1, 2, 4, 6]
    assert [row["n"] for row in measure_best_of_n(np.arange(2.0).reshape(2, 1), 10, 0)] == [1]


def test_an_interrupted_run_samples_only_what_is_missing(made, inputs, tmp_path, monkeypatch):
    sample_part, calls = CandidateSampler._sample_part, []

    def stop_at_the_third(self, model, prompts, purpose):
        calls.append(purpose)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sample_part(self, model, prompts, purpose)

    monkeypatch.setattr(CandidateSampler, "_sample_part", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", inputs)
    damaged = tmp_path / "out" / "parts" / "part-00000" / "candidates.parquet"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 3] ^= 1
    damaged.write_bytes(content)
    again = make(tmp_path / "out", inputs)
    assert calls[2:] == ["best_of_n/2", "best_of_n/0", "best_of_n/2"]
    assert contents(tmp_path / "out") == contents(made[0]) and again == made[1]


def test_a_choice_of_prompts_and_the_length_limit(inputs, tmp_path):
    metrics = make(tmp_path / "out", inputs, prompts=5)
    assert metrics["prompts"] == 5 and metrics["responses"] == 20
    with pytest.raises(ValueError, match=r"has no prompt of at most 2 tokens in its rl split \(12 are longer\)"):
        make(tmp_path / "none", inputs, max_prompt_tokens=2)


def test_without_room_nothing_is_sampled(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(ValueError, match=r"^the sampled responses: needs .* of disk space"):
        make(tmp_path / "out", inputs)
    assert not list((tmp_path / "out").iterdir())


def test_a_reward_model_that_is_missing_is_one_line(inputs, tmp_path):
    with pytest.raises(ValueError, match=r"has no scoring\.json: is it a finished reward artifact"):
        make(tmp_path / "out", inputs | {"reward": tmp_path}, rewards=[{"source": "model"}])


def test_what_the_reward_reads():
    assert low_ids([[1]], [[1, 159, 160, 319]]) == [0.5]
