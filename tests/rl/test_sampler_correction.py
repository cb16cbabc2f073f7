"""The weights of the policy loss where the sampler's probabilities are not the old ones, against plain loops."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stages.modeling.load import load_causal
from stages.recipe.sections.ppo import Ppo
from stages.rl.checks import logprob_agreement
from stages.rl.losses import minibatch_weights, sampler_metrics, sampler_weights
from stages.rl.policy_gradient_trainer import MinibatchSize, UpdateSettings, policy_gradient_loss
from stages.rl.trajectory import Trajectory
from tests.helpers import tiny_models, tiny_stages
from tests.helpers.settings import take_settings

LENGTHS, COLUMNS, LARGEST = [3, 5, 1, 4], 6, 1.5
SETTINGS = take_settings(
    UpdateSettings, Ppo(), max_sampler_ratio=None, value_clip_range=None, value_coefficient=0.0,
    epochs=1, minibatch_prompts=4, microbatch_prompts=4, clip_range=0.2, max_gradient_norm=None,
                          max_ratio=10.0, update_kl_limit=None)


def make_trajectory(corrected=True):
    """Four responses, float64, with numbers after each end that must not matter."""
    generator = torch.Generator().manual_seed(0)
    old, sampled, reference, advantages = torch.randn(4, 4, COLUMNS, generator=generator, dtype=torch.float64)
    mask = (torch.arange(COLUMNS) < torch.tensor(LENGTHS)[:, None]).double()
    zeros = torch.zeros_like(old)
    return Trajectory(
        logprobs=old, ref_logprobs=reference, values=zeros, mask=mask, prompts=[[1]] * 4,
        responses=[[2] * length for length in LENGTHS], advantages=advantages, returns=zeros,
        sampler_logprobs=old + 0.5 * sampled if corrected else None)


def plain_weights(trajectory, level):
    rows = []
    for row, length in enumerate(LENGTHS):
        logs = [float(trajectory.logprobs[row, i] - trajectory.sampler_logprobs[row, i]) for i in range(length)]
        logs = [sum(logs)] * length if level == "sequence" else logs
        rows.append([min(math.exp(x), LARGEST) for x in logs])
    return rows


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_and_their_metrics_against_plain_loops(level):
    trajectory = make_trajectory()
    weights = sampler_weights(trajectory.logprobs, trajectory.sampler_logprobs, trajectory.mask, level, LARGEST)
    expected = plain_weights(trajectory, level)
    for row, plain in zip(weights.tolist(), expected, strict=True):
        assert row == pytest.approx([*plain, *[1.0] * (COLUMNS - len(plain))], abs=1e-12)
    every = [weight for row in expected for weight in row]
    assert 0 < every.count(LARGEST) < len(every) and min(every) < 0.9
    metrics = sampler_metrics(trajectory, level, LARGEST)
    difference = sum(abs(float(trajectory.logprobs[row, i] - trajectory.sampler_logprobs[row, i]))
                     for row, length in enumerate(LENGTHS) for i in range(length))
    assert metrics == {
        "sampler_logprob_difference": pytest.approx(difference / sum(LENGTHS)),
        "sampler_weight": pytest.approx(sum(every) / len(every)),
        "sampler_weight_truncated": pytest.approx(every.count(LARGEST) / len(every))}
    assert list(sampler_metrics(trajectory, level, None)) == ["sampler_logprob_difference"]


def test_without_another_samplers_numbers_nothing_is_weighted_and_nothing_logged():
    trajectory = make_trajectory(corrected=False)
    assert minibatch_weights(trajectory, torch.arange(4), trajectory.mask, "token", 2.0) == 1.0
    assert minibatch_weights(make_trajectory(), torch.arange(4), trajectory.mask, "token", None) == 1.0
    assert sampler_metrics(trajectory, "token", 2.0) == {}


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_policy_loss_and_its_gradient_are_weighted_token_by_token(level, loss_mean):
    trajectory, rows = make_trajectory(), torch.tensor([2, 0])
    generator = torch.Generator().manual_seed(1)
    new = (trajectory.logprobs[rows, :3] + 0.1 * torch.randn(2, 3, generator=generator, dtype=torch.float64))
    new.requires_grad_()
    mask = trajectory.mask[rows, :3]
    policy = lambda *texts: SimpleNamespace(logprobs=new, values=torch.zeros_like(new), mask=mask)  # noqa: E731
    settings = replace(SETTINGS, ratio_level=level, loss_mean=loss_mean, max_sampler_ratio=LARGEST)
    loss, _ = policy_gradient_loss(policy, trajectory, rows, MinibatchSize(mask.sum(), 2), settings)
    (gradient,) = torch.autograd.grad(loss, new)
    weights, expected = plain_weights(trajectory, level), 0.0
    plain = [[float(x) for x in row] for row in new.detach()]
    for position, row in enumerate(rows.tolist()):
        length = LENGTHS[row]
        logs = [plain[position][i] - float(trajectory.logprobs[row, i]) for i in range(length)]
        logs = [sum(logs)] * length if level == "sequence" else logs
        losses = []
        for i, log_ratio in enumerate(logs):
            ratio, advantage = math.exp(log_ratio), float(trajectory.advantages[row, i])
            clipped = min(max(ratio, 0.8), 1.2)
            losses.append(weights[row][i] * max(-advantage * ratio, -advantage * clipped))
        expected += sum(losses) / (4 if loss_mean == "token" else 2 * length)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-12) and gradient.abs().sum() > 0
    unweighted, _ = policy_gradient_loss(policy, trajectory, rows, MinibatchSize(mask.sum(), 2),
                                         replace(settings, max_sampler_ratio=None))
    assert abs(float(unweighted.detach()) - expected) > 1e-3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A base with bf16 weights, and its pairs."""
    folder = tmp_path_factory.mktemp("bf16")
    tiny_models.save_base(folder / "fp32")
    load_causal(folder / "fp32").bfloat16().save_pretrained(folder / "base")
    tiny_models.tokenizer().save_pretrained(folder / "base")
    tiny_models.save_pairs(folder / "pairs", questions_per_split=12)
    return {"policy": folder / "base", "reward": None, "pairs": folder / "pairs"}


@pytest.mark.parametrize("precision", ["bf16", "mixed"])
@pytest.mark.parametrize("reuse", [True, False])
def test_ppo_runs_in_bf16_with_the_samplers_numbers_and_with_weights(inputs, precision, reuse, tmp_path, monkeypatch):
    if not reuse:
        monkeypatch.setattr(logprob_agreement, "can_reuse_rollout", lambda *_: False)
    config = replace(tiny_stages.TINY["ppo"], precision=precision, max_response_tokens=12, learning_rate=1e-3)
    out = tmp_path / "ppo"
    out.mkdir()
    tiny_stages.RUNS["ppo"](config, out, **inputs)
    rows = [row for row in map(json.loads, (out / "history.jsonl").read_text().splitlines()) if "policy_loss" in row]
    assert len(rows) == config.iterations and all(math.isfinite(row["policy_loss"]) for row in rows)
    names = {"sampler_logprob_difference", "sampler_weight", "sampler_weight_truncated"}
    assert all((names <= set(row)) is not reuse and names & set(row) in (set(), names) for row in rows)
    if not reuse:
        assert all(row["sampler_weight"] == pytest.approx(1, abs=0.1) for row in rows)
    assert json.loads((out / "startup.json").read_text())["keep_rollout_log_p"] is reuse
