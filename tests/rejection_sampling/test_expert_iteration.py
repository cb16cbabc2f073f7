"""Expert iteration as a stage: it raises the reward, keeps the best round, and resumes to equal bytes."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file

from stages.modeling.load import load_causal
from stages.recipe.schema import SettingsError, override
from stages.recipe.sections.rejection_sampling import ExpertIteration
from stages.rejection_sampling import rounds
from stages.rejection_sampling.candidates import Candidates, choose_winners, draw_tilted, list_winners
from stages.training import callbacks
from tests.helpers import tiny_stages

REWARDS = np.array([[0.5, 2.0, 2.0], [1.0, -1.0, 0.0]])
DISTINCT = np.array([[True, True, False], [True, True, True]])
LEARNING = {"tune": "full", "learning_rate": 0.03, "kl_coefficient": 0.0, "epochs": 15.0, "weight_decay": 0.0,
            "sequence_length_tokens": 256, "batch_sequences": 1, "microbatch_sequences": 1, "save_every_steps": 100,
            "start_from": "previous", "n": 16, "keep": "share", "keep_share": 0.25}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tiny_stages.save_policy_inputs(tmp_path_factory.mktemp("expert-iteration"))


def make(out: Path, inputs: dict, **settings) -> dict:
    """Run the stage with these settings, and return its metrics."""
    return tiny_stages.run_stage("expert_iteration", settings, out, {"expert_iteration": inputs})


def read_history(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_at(function: Callable, number: int) -> Callable:
    """Return the function, but interrupted at the end of a call, by its number."""
    numbers = iter(range(1, 100))

    def call(*arguments, **options):
        result = function(*arguments, **options)
        if next(numbers) == number:
            raise KeyboardInterrupt
        return result
    return call


def test_it_raises_the_reward_and_publishes_the_best_round(inputs, tmp_path):
    metrics = make(tmp_path / "out", inputs, rounds=2, patience_rounds=None, **LEARNING)
    rows = read_history(tmp_path / "out")
    held_out = [row["validation_reward"] for row in rows]
    assert [row["round"] for row in rows] == [0, 1, 2] and rows[0]["validation_kl"] == pytest.approx(0, abs=1e-4)
    assert max(held_out) > held_out[0] + 0.2 and rows[2]["reward"] > rows[1]["reward"] + 0.15
    assert all(row["winners_reward"] > row["reward"] for row in rows[1:]) and rows[2]["validation_kl"] > 0.5
    assert metrics["best_round"] == int(np.argmax(held_out)) and metrics["validation_reward"] == max(held_out)
    assert not metrics["stopped_early"] and metrics["prompts"] == 9
    assert not list((tmp_path / "out").glob("round-*")) and not list((tmp_path / "out").glob("checkpoint-*"))
    load_causal(tmp_path / "out")


def test_tilted_draws_raise_the_reward(inputs, tmp_path):
    settings = LEARNING | {"keep": "tilted", "keep_share": None, "keep_draws": 4, "kl_coefficient": 0.1}
    make(tmp_path / "out", inputs, rounds=1, **settings)
    first, last = read_history(tmp_path / "out")
    assert last["documents"] == 4 * 9 and last["winners_reward"] > last["reward"]
    assert last["validation_reward"] > first["validation_reward"] + 0.2


def test_it_stops_at_a_round_that_is_no_better(inputs, tmp_path):
    """A KL coefficient that no reward is worth: the result is the SFT model, whose adapter changes nothing."""
    metrics = make(tmp_path / "out", inputs, rounds=3, kl_coefficient=1000.0, learning_rate=5.0)
    assert metrics["stopped_early"] and (metrics["best_round"], metrics["rounds"]) == (0, 1)
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert adapter and not any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize("changes", [{"start_from": "sft", "keep": "tilted", "keep_draws": 3},
                                     {"start_from": "previous"}])
def test_an_interrupted_run_resumes_to_equal_bytes(changes, inputs, tmp_path, monkeypatch):
    """Stopped within the sampling of round 2, within its training, and before its result is stored."""
    settings = {"rounds": 2, "patience_rounds": None, **changes}
    metrics = make(tmp_path / "whole", inputs, **settings)

    for owner, name, calls in ((rounds.CandidateSampler, "_sample_part", 4), (callbacks, "seal_checkpoint", 1),
                               (rounds.RoundLoop, "_evaluate", 1)):
        monkeypatch.setattr(owner, name, stop_at(getattr(owner, name), calls))
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "cut", inputs, **settings)
        monkeypatch.undo()
    again = make(tmp_path / "cut", inputs, **settings)
    assert again == metrics and contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_rounds_from_sft_and_from_the_previous_one_differ(inputs, tmp_path):
    histories = []
    for start_from in ("sft", "previous"):
        make(tmp_path / start_from, inputs, start_from=start_from, rounds=2, patience_rounds=None)
        histories.append(read_history(tmp_path / start_from))
    (_, *sft), (_, *previous) = histories
    assert sft[0] == previous[0]  # both start from SFT in the first round
    assert sft[1]["reward"] == previous[1]["reward"] and sft[1]["validation_kl"] != previous[1]["validation_kl"]


@pytest.mark.parametrize(("keep", "above", "share", "expected"), [
    ("best", None, None, [[0, 1, 0], [1, 0, 0]]),
    ("above", 0.4, None, [[1, 1, 0], [1, 0, 0]]),
    ("share", None, 0.4, [[0, 1, 0], [1, 0, 0]]),
    ("share", None, 1.0, [[1, 1, 0], [1, 1, 1]])])
def test_winners(keep, above, share, expected):
    chosen = choose_winners(REWARDS, DISTINCT, keep, above, share)
    assert chosen.astype(int).tolist() == expected


def test_tilted_draws_have_the_frequencies_of_their_weights():
    """Of each prompt as many as there are draws; of a response at most one more or less than its share, which is the
    mean over many draws."""
    rewards = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    draws = np.array([draw_tilted(rewards, 0.5, 7, np.random.default_rng(seed)) for seed in range(2000)])
    shares = np.array([[math.exp(r / 0.5) / sum(math.exp(x / 0.5) for x in row) * 7 for r in row] for row in rewards])
    assert (draws.sum(2) == 7).all() and (abs(draws - shares) < 1).all()
    assert draws.mean(0) == pytest.approx(shares, abs=0.04)
    assert draw_tilted(np.array([[0.0, 1e30, -1e30]]), 1e-6, 3, np.random.default_rng(0)).tolist() == [[0, 3, 0]]


@pytest.mark.parametrize("rounds", [1, 3])
def test_after_all_rounds_the_draws_are_those_of_the_optimal_policy(rounds):
    """A bandit of four arms: the optimum of E[r] - beta KL is sft exp(r / beta), in closed form."""
    sft, reward, beta = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.0, 0.5, 1.0, 1.0]), 0.5
    policy, generator = sft, np.random.default_rng(0)
    for _ in range(rounds):
        arms = generator.choice(4, size=(1, 200_000), p=policy)
        counts = draw_tilted(reward[arms], rounds * beta, 100_000, generator)
        policy = np.bincount(arms[0], weights=counts[0], minlength=4) / counts.sum()
    optimum = sft * np.exp(reward / beta)
    assert policy == pytest.approx(optimum / optimum.sum(), abs=0.01)


def test_winners_are_listed_as_often_as_chosen_with_their_prompts_across_parts():
    parts = [Candidates([[[7], [8]]], [[True, True]], np.zeros((1, 2))),
             Candidates([[[9], [9]], [[5], [6]]], [[True, True]] * 2, np.zeros((2, 2)))]
    assert parts[1].distinct().tolist() == [[True, False], [True, True]]
    chosen = np.array([[False, True], [True, False], [True, True]])
    assert list(list_winners([[1], [2], [3]], parts, chosen)) == [([1], [8]), ([2], [9]), ([3], [5]), ([3], [6])]
    counts = np.array([[2, 0], [0, 1], [0, 0]])
    assert list(list_winners([[1], [2], [3]], parts, counts)) == [([1], [7]), ([1], [7]), ([2], [9])]


def test_a_threshold_that_no_response_passes_is_one_line(inputs, tmp_path):
    with pytest.raises(ValueError, match=r"^no sampled response has a reward above keep_above \(7\): the highest is"):
        make(tmp_path / "out", inputs, keep="above", keep_above=7.0)


@pytest.mark.parametrize(("settings", "words"), [
    ({"keep": "above"}, "keep_above and keep 'above' belong together"),
    ({"keep_share": 0.5}, "keep_share and keep 'share' belong together"),
    ({"keep": "tilted"}, "keep_draws and keep 'tilted' belong together"),
    ({"keep": "tilted", "keep_draws": 4, "kl_coefficient": 0.0}, "keep 'tilted' divides rewards by kl_coefficient"),
    ({"batch_sequences": 3}, r"batch_sequences \(3\) must be a multiple of microbatch_sequences"),
    ({"reward_scaling": "running"}, "reward_scaling"),
    ({"spread_penalty": 1.0}, "spread_penalty is the coefficient of")])
def test_settings_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(SettingsError, match=f"expert_iteration: {words}"):
        override(ExpertIteration(), settings, "expert_iteration")


def test_the_prompts_of_the_rounds_follow_each_other(inputs, tmp_path, monkeypatch):
    drawn, draw_prompts = [], rounds.RoundLoop._draw_prompts
    monkeypatch.setattr(rounds.RoundLoop, "_draw_prompts",
                        lambda self, number: drawn.append(draw_prompts(self, number)) or drawn[-1])
    make(tmp_path / "out", inputs, rounds=3, round_prompts=4, patience_rounds=None)
    assert drawn == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 8]]


def test_without_room_nothing_is_sampled(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"^checkpoints and weights: needs .* of disk space .*1,000 bytes are free"):
        make(tmp_path / "out", inputs)
    assert not list((tmp_path / "out").iterdir())
