"""In fp32, a GPU computes what the CPU does: log-probabilities, rewards, samples, a PPO iteration, training steps."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from stages.generation.sampler import sample
from stages.modeling.load import load_causal
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.reward_model import initialise_head
from stages.reward_modeling.scorer import Scorer
from stages.rewards.kl import KlController
from stages.rewards.shaping import ShapedRewards
from stages.rl.advantages import gae_advantages, grpo_advantages
from stages.rl.collect_rollouts import SamplingParams
from stages.rl.inputs import load_policy
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer
from stages.training.optimizers import build_optimizer
from tests.helpers import architectures, tiny_models
from tests.helpers.devices import GPU, computing_on, every_device, move_adapter
from tests.helpers.tiny_stages import run_stage
from tests.rl.test_policy import PROMPTS, UPDATE

RESPONSES = [[50, 60, 2], [41, 42, 43, 44, 45, 46, 2], [90, 2], [34] * 12]
ADAPTER = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": ()}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_models.save_base(tmp_path_factory.mktemp("base"), width=64)


def moved_policy(base: Path, share_prompts: bool = False):
    torch.manual_seed(0)
    policy = load_policy(base, None, tune="lora", value_model="head", lora=ADAPTER, precision="fp32", temperature=0.7,
                         share_prompts=share_prompts)
    move_adapter(policy)
    return policy


def assert_equal_within(actual, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def compute_scores(base: Path, device: str) -> list[torch.Tensor]:
    """Log-probabilities, values, those under the reference, and rewards."""
    with computing_on(device), torch.no_grad():
        policy = moved_policy(base)
        classifier = load_classifier(base, "fp32", new_head=True)
        initialise_head(classifier, torch.Generator().manual_seed(0))
        assert {p.device.type for p in (*policy.parameters(), *classifier.parameters())} == {device}
        scores = [*policy(PROMPTS, RESPONSES), policy.ref_logprobs(PROMPTS, RESPONSES),
                  Scorer(classifier, "fp32")(PROMPTS, RESPONSES)]
    return [x.cpu() for x in scores]


@every_device
def test_log_probabilities_values_and_rewards(base, device):
    expected = compute_scores(base, "cpu")
    assert_equal_within(compute_scores(base, device), expected)
    assert (expected[0] - expected[3]).abs().max() > 0.01 and expected[4].std() > 0.01  # they say something


class MeanTokenReward:
    """A reward without a model, on the CPU as those of models are."""

    def __call__(self, rollout, *, update_statistics):
        return ShapedRewards(torch.tensor([sum(r) / len(r) / 100 for r in rollout.responses]), {}, 1.0)


def iterate(base: Path, device: str, responses: int = 1) -> tuple[dict, list[torch.Tensor]]:
    """One iteration of PPO, or of GRPO with several responses to a prompt: the row of the history, and the weights."""
    ppo = partial(gae_advantages, gamma=0.98, gae_lambda=0.9)
    grpo = partial(grpo_advantages, responses_per_prompt=responses, scale_rewards="none")
    with computing_on(device):
        policy = moved_policy(base, share_prompts=responses > 1)
        trainer = PolicyGradientTrainer(
            policy=policy, reward_shaper=MeanTokenReward(), kl_controller=KlController(0.1, None, 1),
            optimizer=build_optimizer("adam", policy.trainable_parameters().values(), learning_rate=1e-3, epsilon=1e-5,
                                      weight_decay=0.0),
            update_settings=replace(UPDATE, minibatch_prompts=4 * responses, responses_per_prompt=responses),
            sampling=SamplingParams(0.7, (2,), "until_stop", 1, 12),
            estimate_advantages=ppo if responses == 1 else grpo, kl_estimator="k1", forward_prompts=2 * responses,
            reuse_rollout_logprobs=responses == 1)
        prompts = [prompt for prompt in PROMPTS for _ in range(responses)]
        row, _ = trainer.step(prompts, lambda purpose: torch.Generator().manual_seed(0))
        return row, [p.detach().cpu() for p in policy.trainable_parameters().values()]


@every_device
@pytest.mark.parametrize("responses", [1, 2])
def test_one_iteration(base, device, responses):
    (row, weights), (expected, expected_weights) = (iterate(base, name, responses) for name in (device, "cpu"))
    assert row.keys() == expected.keys() and row["skipped"] == expected["skipped"] == 0
    for name, value in row.items():
        if name != "skipped":
            assert value == pytest.approx(expected[name], abs=TOLERANCE, rel=TOLERANCE), name
    assert_equal_within(weights, expected_weights)
    with computing_on("cpu"):
        before = [p.detach() for p in moved_policy(base).trainable_parameters().values()]
    assert max(float((a - b).abs().max()) for a, b in zip(weights, before, strict=True)) > 1e-3


def decode(folder: Path, device: str) -> list[list[int]]:
    with computing_on(device):
        prompts = [[5, 6, 7], [8], [9] * 20]
        return sample(load_causal(folder), prompts, max_new_tokens=[20, 3, 9], temperature=0.0, stop_ids=(),
                      generator=torch.Generator(), share_prefixes=True).responses


@every_device
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_decoding_with_a_window_and_with_shared_heads(family, tmp_path, device):
    folder = architectures.save(architectures.FAMILIES[family], tmp_path)
    assert decode(folder, device) == decode(folder, "cpu")


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ilql"])
@pytest.mark.parametrize("device", [GPU])
def test_training_stages(stage, tmp_path, device):
    check_stage(stage, tmp_path, device)


def test_a_training_stage_on_the_cpu(tmp_path):
    check_stage("sft", tmp_path, "cpu")


def check_stage(stage: str, folder: Path, device: str) -> None:
    base, pairs = tiny_models.save_base(folder / "base", width=32), tiny_models.save_pairs(folder / "pairs", 12)
    name = "base" if stage in ("sft", "reward") else "policy"
    inputs, histories = {stage: {name: base, "pairs": pairs}}, []
    for name in (device, "cpu"):
        out = folder / f"{name}-{len(histories)}"
        with computing_on(name):
            run_stage(stage, {}, out, inputs)
        histories.append([json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()])
    for row, expected in zip(*histories, strict=True):
        assert row.keys() == expected.keys()
        for key, value in row.items():
            assert value == pytest.approx(expected[key], abs=TOLERANCE, rel=10 * TOLERANCE), key
