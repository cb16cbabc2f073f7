"""The attainable objective: in closed form on a bandit, beside plain Python, of a policy tilted exactly (issue 34)."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages import evaluate
from stages.artifacts.artifact import digest
from stages.evaluation.attainable import Objective, compare_with_optimum, read_objective
from stages.evaluation.statistics import bootstrap_mean
from stages.generation.best_of_n import (
    BETAS,
    attainable_objective,
    extrapolated_objective,
    measure_optimum,
    tilt_curve,
    tilt_kl,
    tilt_weights,
)
from stages.rewards.shaping import RewardShaper
from tests.helpers.settings import shaping
from tests.helpers.tiny_evaluation import CONFIG, make_tokenizer, save_inputs

BOOTSTRAP = {"samples": 400, "seed": 0}
MEASURE = partial(measure_optimum, estimate_mean=partial(bootstrap_mean, **BOOTSTRAP))


@pytest.mark.parametrize("beta", [0.1, 1.0, 7.0])
def test_a_bandit_with_exact_frequencies_has_its_closed_form(beta):
    """Answers of probability 1/8, 3/8, 4/8, as often among 8 samples: the mean over samples is the expectation."""
    answers = [(0.125, 2.0), (0.375, -1.0), (0.5, 0.25)]
    rewards = np.repeat([[reward for _, reward in answers]], [1, 3, 4], axis=1)
    total = math.fsum(p * math.exp(reward / beta) for p, reward in answers)
    tilt = [p * math.exp(reward / beta) / total for p, reward in answers]
    optimum = MEASURE(rewards, beta)
    assert optimum["objective"]["mean"] == pytest.approx(beta * math.log(total), rel=1e-12)
    assert optimum["reward"]["mean"] == pytest.approx(math.fsum(
        q * reward for q, (_, reward) in zip(tilt, answers, strict=True)), rel=1e-12)
    assert optimum["kl"]["mean"] == pytest.approx(math.fsum(
        q * math.log(q / p) for q, (p, _) in zip(tilt, answers, strict=True)), rel=1e-12)
    assert optimum["objective"]["mean"] == pytest.approx(
        optimum["reward"]["mean"] - beta * optimum["kl"]["mean"], rel=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_estimate_is_that_of_plain_python_at_any_scale(scale):
    rewards, beta = np.random.default_rng(0).normal(size=(5, 12)) * scale, 0.1
    objective, weights = attainable_objective(rewards, beta), tilt_weights(rewards, beta)
    kl = tilt_kl(weights)
    for index, row in enumerate(rewards.tolist()):
        highest = max(row)
        powers = [math.exp((reward - highest) / beta) for reward in row]
        total = math.fsum(powers)
        assert objective[index] == pytest.approx(highest + beta * math.log(total / 12), rel=1e-12)
        assert weights[index] == pytest.approx([power / total for power in powers], rel=1e-12)
        assert kl[index] == pytest.approx(math.fsum(
            power / total * math.log(12 * power / total) for power in powers if power), abs=1e-12)


def test_the_extrapolated_estimate_lacks_the_bias_of_few_samples():
    """A bandit whose optimum has a closed form; 16 samples of each of 40,000 questions, so that noise is small."""
    probabilities, values, beta = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.0, 0.3, 0.8, 1.0]), 0.25
    optimum = beta * math.log(math.fsum(p * math.exp(v / beta) for p, v in zip(probabilities, values, strict=True)))
    rewards = values[np.random.default_rng(0).choice(4, size=(40_000, 16), p=probabilities)]
    missing = optimum - attainable_objective(rewards, beta).mean()
    assert missing > 0.02
    assert abs(optimum - extrapolated_objective(rewards, beta).mean()) < 0.2 * missing


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_the_extrapolated_estimate_is_that_of_plain_python(samples):
    """The bias b / S of S samples, known from two numbers of samples, is removed."""
    rewards = np.random.default_rng(0).normal(size=(3, samples))
    for row, value in zip(rewards, extrapolated_objective(rewards, 0.5), strict=True):
        def estimate(*part):
            return 0.5 * math.log(math.fsum(math.exp(reward / 0.5) for reward in part) / len(part))
        half = samples // 2
        expected = estimate(*row)
        if half:
            halves = (estimate(*row[:half]) + estimate(*row[half : 2 * half])) / 2
            bias = (expected - halves) / (1 / samples - 1 / half)
            expected -= bias / samples
        assert value == pytest.approx(expected, rel=1e-12)


def draw_bandit(questions: int, samples: int, beta: float):
    """Draw rewards of a start policy [N, S] and, of one answer of the exact tilt each, reward and log ratio [N]."""
    generator = np.random.default_rng(1)
    rewards, own, kl = np.empty((questions, samples)), np.empty(questions), np.empty(questions)
    for row in range(questions):
        probabilities, values = generator.dirichlet(np.ones(6)), generator.normal(size=6)
        tilt = probabilities * np.exp(values / beta)
        tilt /= tilt.sum()
        rewards[row] = values[generator.choice(6, samples, p=probabilities)]
        chosen = generator.choice(6, p=tilt)
        own[row], kl[row] = values[chosen], np.log(tilt[chosen] / probabilities[chosen])
    return rewards, own, kl


def test_a_policy_tilted_exactly_has_the_whole_share():
    rewards, own, kl = draw_bandit(questions=300, samples=512, beta=0.5)
    measured = compare_with_optimum(rewards, own - 0.5 * kl, rewards[:, 0], 0.5, **BOOTSTRAP)
    share = measured["share"]
    assert share["low"] < 1 < share["high"] and share["high"] - share["low"] < 0.05 and measured["optimum"]["settled"]
    few = compare_with_optimum(rewards[:, :8], own - 0.5 * kl, rewards[:, 0], 0.5, **BOOTSTRAP)
    excess = few["share"]["mean"] - 1
    assert excess > 0.1 and abs(few["share_extrapolated"]["mean"] - 1) < 0.2 * excess
    start = compare_with_optimum(rewards, rewards[:, 0], rewards[:, 1], 0.5, **BOOTSTRAP)["share"]
    assert start["low"] < 0 < start["high"]
    means = rewards.mean(1)
    assert compare_with_optimum(rewards, means, means, 0.5, **BOOTSTRAP)["share"]["mean"] == pytest.approx(0)


def test_a_policy_that_is_its_start_has_no_share():
    """With few questions, too, where one answer is far from the mean of others."""
    rewards = np.random.default_rng(3).normal(size=(8, 4))
    one = np.random.default_rng(4).normal(size=8) + 2
    share = compare_with_optimum(rewards, one, one, 0.5, **BOOTSTRAP)["share"]
    assert [share[name] for name in ("mean", "low", "high")] == pytest.approx([0, 0, 0], abs=1e-9)


def test_an_answer_by_the_same_random_numbers_narrows_the_interval_and_moves_no_mean():
    generator, errors, widths = np.random.default_rng(5), {}, {}
    for _ in range(200):
        rewards, one = generator.normal(size=(100, 16)), generator.normal(size=100)
        own = 0.8 * one + 0.3 + generator.normal(size=100) * 0.6  # the policy gains 0.3 for certain
        for name, control in (("with", one), ("without", rewards.mean(1))):
            measured = compare_with_optimum(rewards, own, control, 1.0, samples=50, seed=0)
            gain = measured["optimum"]["objective"]["mean"] - measured["start"]["mean"]
            errors.setdefault(name, []).append(measured["share"]["mean"] * gain - 0.3)
            widths.setdefault(name, []).append(measured["share"]["high"] - measured["share"]["low"])
    assert abs(np.mean(errors["with"])) < 4 * np.std(errors["with"]) / math.sqrt(200)
    assert np.std(errors["with"]) < 0.75 * np.std(errors["without"])
    assert np.mean(widths["with"]) < 0.75 * np.mean(widths["without"])


def test_the_share_is_the_ratio_of_mean_gains_and_not_the_mean_of_ratios():
    rewards, own = np.array([[0.0, 1.0], [0.0, 10.0]]), np.array([0.75, 9.0])
    gains = [beta_log_mean(row, 0.5) - sum(row) / 2 for row in rewards.tolist()]
    share = compare_with_optimum(rewards, own, rewards.mean(1), 0.5, **BOOTSTRAP)["share"]
    assert share["mean"] == pytest.approx((0.25 + 4.0) / sum(gains), rel=1e-12)


def beta_log_mean(row: list[float], beta: float) -> float:
    return beta * math.log(math.fsum(math.exp(reward / beta) for reward in row) / len(row))


def test_the_estimate_rises_with_the_number_of_samples_until_it_is_settled():
    rewards = draw_bandit(questions=200, samples=256, beta=0.1)[0]
    few, many = (MEASURE(rewards[:, :count], 0.1) for count in (8, 256))
    assert list(few["by_samples"]) == ["2", "4", "8"] and list(many["by_samples"]) == ["64", "128", "256"]
    values = [*few["by_samples"].values(), *many["by_samples"].values()]
    assert values == sorted(values) and many["settled"] and not few["settled"]
    halves = (attainable_objective(rewards[:, part], 0.1).mean() for part in (slice(0, 128), slice(128, None)))
    assert many["by_samples"]["128"] == pytest.approx(sum(halves) / 2, rel=1e-12)
    assert many["objective"]["mean"] == pytest.approx(many["by_samples"]["256"], rel=1e-12)


@pytest.mark.parametrize("rewards", [[[0.1, 0.1, 0.1]], [[2.0]], [[0.1] * 3, [0.7] * 3]])
def test_without_a_better_sample_the_share_is_not_defined(rewards):
    rewards = np.array(rewards)
    measured = compare_with_optimum(rewards, np.array([5.0] * len(rewards)), rewards[:, 0], 0.1, **BOOTSTRAP)
    assert measured["share"] is None and measured["optimum"]["kl"]["mean"] == pytest.approx(0, abs=1e-12)
    assert measured["optimum"]["objective"]["mean"] == pytest.approx(np.mean(rewards))


def test_one_question_has_a_share_without_an_interval():
    measured = compare_with_optimum(np.array([[0.0, 1.0]]), np.array([0.9]), np.array([1.0]), 0.1, **BOOTSTRAP)
    assert measured["share"]["mean"] == pytest.approx(0.4 / (beta_log_mean([0.0, 1.0], 0.1) - 0.5), rel=1e-9)
    assert measured["share"]["low"] is None


def test_the_curve_rises_with_the_kl_from_nothing_to_the_best_sample():
    rewards = np.random.default_rng(2).normal(size=(50, 16))
    curve = tilt_curve(rewards)
    assert [row["beta"] for row in curve] == sorted(BETAS, reverse=True)
    for name in ("kl", "gain"):
        values = [row[name] for row in curve]
        assert values == sorted(values) and values[0] < 1e-2
    assert curve[-1]["kl"] == pytest.approx(math.log(16), rel=1e-3)
    assert curve[-1]["gain"] == pytest.approx((rewards.max(1) - rewards.mean(1)).mean(), rel=1e-3)


def write_training(root, stage: str = "ppo", inputs: dict | None = None, **changes):
    """Write manifests of a training and its merge, and the training's history; return the merge's folder."""
    config = vars(shaping(missing_eos_penalty=2.0)) | {
        "rewards": [{"source": "model", "weight": 2.0}], "kl_coefficient": 0.1, "temperature": 1.0} | changes
    training, merged, reward = root / "ppo", root / "ppo-merged", root / "reward-merged"
    for folder in (training, merged, reward):
        folder.mkdir(parents=True, exist_ok=True)
    (reward / "manifest.json").write_text(json.dumps({"stage": "merge"}))
    (training / "manifest.json").write_text(json.dumps({
        "stage": stage, "config": config, "metrics": {"best_iteration": 10} if stage == "ppo" else {},
        "inputs": inputs or {"reward": {"path": "reward-merged", "sha256": digest(reward)}}}))
    rows = [{"iteration": at, "beta": 0.02 * at, "kl": 1.0} for at in (10, 20)] if stage == "ppo" else []
    rows += [{"iteration": at, "validation_reward_scale": 1.0 + at / 10, "validation_kl": 1.0} for at in (0, 10, 20)]
    (training / "history.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (merged / "manifest.json").write_text(json.dumps({"stage": "merge", "inputs": {"adapter": [
        {"path": "ppo/manifest.json", "sha256": digest(training)}]}}))
    return merged


def test_the_objective_is_that_of_the_published_iteration(tmp_path):
    merged, reward = write_training(tmp_path, reward_scaling="running"), tmp_path / "reward-merged"
    objective = read_objective(merged, reward, 1.0)
    assert (objective.beta, objective.weight, objective.scale) == (0.1, 2.0, 2.0)
    assert objective.shape(np.array([3.0, 3.0]), [True, False]).tolist() == [3.0, 1.0]
    assert read_objective(merged, None, 1.0).weight == 1.0  # the reward of own prompts is the weighted sum
    adaptive = read_objective(write_training(tmp_path / "adaptive", kl_target_nats=6.0), None, 1.0)
    assert adaptive.beta == pytest.approx(0.2) and adaptive.scale == 2.0
    annealed = write_training(tmp_path / "annealed", kl_target_nats=None, kl_anneal_factor=4.0)
    assert read_objective(annealed, None, 1.0).beta == 0.1  # the penalty that the policy is chosen by
    rounds = write_training(tmp_path / "rounds", "expert_iteration")
    assert read_objective(rounds, None, 1.0).scale == 3.0  # the last row's, of a scale that does not change


def test_dpo_maximises_the_score_itself_with_its_own_beta(tmp_path):
    merged = write_training(tmp_path, "dpo", beta=0.3, loss="sigmoid")
    assert read_objective(merged, tmp_path / "reward-merged", 1.0) == Objective(0.3)
    assert read_objective(merged, None, 0.7) is None
    assert read_objective(write_training(tmp_path / "ipo", "dpo", beta=0.3, loss="ipo"), None, 1.0) is None
    assert Objective(0.3).shape(np.array([1.5]), [False]).tolist() == [1.5]


@pytest.mark.parametrize("changes", [
    {"kl_coefficient": 0.0}, {"temperature": 0.7}, {"reward_combine": "min"},
    {"reward_scaling": "start", "reward_clip": 5.0}, {"reward_scaling": "start", "missing_eos": "replace"},
    {"rewards": [{"source": "response_tokens", "weight": 1.0}]},
    {"inputs": {"reward": {"path": "reward-merged", "sha256": "of another model"}}}])
def test_an_objective_that_the_evaluation_cannot_compute_is_left_out(changes, tmp_path):
    assert read_objective(write_training(tmp_path, **changes), tmp_path / "reward-merged", 1.0) is None


def test_a_policy_whose_training_is_gone_or_has_changed_has_no_objective(tmp_path):
    merged, reward = write_training(tmp_path), tmp_path / "reward-merged"
    assert read_objective(merged, reward, 1.0)
    (tmp_path / "ppo/history.jsonl").rename(tmp_path / "history.jsonl")  # logged to a tracker alone
    assert read_objective(merged, reward, 1.0) is None
    (tmp_path / "history.jsonl").rename(tmp_path / "ppo/history.jsonl")
    (tmp_path / "ppo/manifest.json").write_text("{}")
    assert read_objective(merged, reward, 1.0) is None
    (tmp_path / "ppo/manifest.json").unlink()
    (tmp_path / "ppo/request.json").write_text("{}")  # it is being trained again
    assert read_objective(merged, reward, 1.0) is None
    assert read_objective(reward / "nothing", reward, 1.0) is None


@pytest.mark.parametrize("changes", [
    {"missing_eos_penalty": 0.75}, {"missing_eos": "replace"}, {"reward_clip": 0.5}, {"reward_baseline": 1.0}])
def test_rewards_are_shaped_as_in_training(changes, tmp_path):
    scores, ended = [1.5, -2.0, 0.25], [True, False, True]
    source = SimpleNamespace(part="p", name="p", weight=1.0, reads="ids", score=None)
    settings = shaping(**changes)
    shaper = RewardShaper([source], None, settings)
    shaper.sum_parts = lambda prompts, responses: (torch.tensor(scores), {})
    shaped = shaper(SimpleNamespace(prompts=[], responses=[], ended=ended), update_statistics=False)
    assert Objective(0.1, 1.0, settings).shape(np.array(scores), ended) == pytest.approx(shaped.rewards.tolist())


def test_an_evaluation_has_the_row_of_a_policy_whose_objective_is_known(tmp_path, monkeypatch):
    (tmp_path / "inputs").mkdir()
    inputs = save_inputs(tmp_path / "inputs", make_tokenizer())
    calls = []
    monkeypatch.setattr(evaluate, "read_objective", lambda *arguments: calls.append(arguments) or Objective(0.5))
    metrics, returned = {}, {}
    for best_of in ((2, 3), ()):
        (out := tmp_path / f"of-{len(best_of)}").mkdir()
        returned[best_of] = evaluate.run(replace(CONFIG, best_of=best_of), out, **inputs)
        metrics[best_of] = json.loads((out / "metrics.json").read_text())
    assert calls[0] == (inputs["policy"]["ppo"], inputs["reward"], 1.0)
    measured = metrics[2, 3]["attainable"]
    assert measured["samples"] == 3 and measured["policies"]["ppo"]["share"] and len(measured["curve"]) == len(BETAS)
    rows = dict(metrics[2, 3]["table"])
    share = measured["policies"]["ppo"]["share"]["mean"]
    assert rows["share of the attainable objective at temperature 1, PPO"].startswith(f"{share:.3f} [")
    assert "estimated from 3 samples" in rows["share of the attainable objective at temperature 1, PPO"]
    assert returned[2, 3]["attainable_share"] == share and "attainable_share" not in returned[()]
    assert metrics[()]["attainable"] is None and not any("attainable" in label for label, _ in metrics[()]["table"])
