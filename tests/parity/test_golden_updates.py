"""One whole update against trl 0.11.4's PPOTrainer.step, with its conventions set in the recipe (tests/parity/golden).

A tiny LLaMA in fp32, LoRA with B not 0, a value head that is not 0, given prompts, responses and rewards; 6 optimiser
steps in which both clip ranges bind. TRL pads on the left and uses its own transformers and PEFT.
"""

from dataclasses import fields, replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.generation.rollout import Rollout
from stages.modeling.lora import add_lora
from stages.recipe.recipe import select_settings
from stages.recipe.sections.ppo import Ppo
from stages.rewards.kl import KlController
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import UpdateSettings, update_policy
from stages.rl.trajectory import Trajectory
from stages.training import optimizers
from tests.helpers.trajectories import build_trajectory
from tests.parity.golden import common
from tests.parity.golden.support import UPDATES

U, ROLLOUT, RELATIVE = common.UPDATE, UPDATES["rollout"], 1e-5
RECIPE = Ppo(
    rollout_prompts=U["batch"],
    minibatch_prompts=U["minibatch"],
    microbatch_prompts=1,  # theirs is a minibatch's two rows at once
    epochs=U["epochs"],
    learning_rate=U["learning_rate"],
    optimizer="adam",
    adam_epsilon=U["adam_epsilon"],
    max_gradient_norm=None,
    gamma=U["gamma"],
    gae_lambda=U["lam"],
    advantage_variance="unbiased",
    clip_range=U["clip"],
    value_clip_range=U["value_clip"],
    value_coefficient=U["value_coefficient"],
    kl_coefficient=U["beta"],
    kl_target_nats=U["target"],
    kl_horizon_responses=U["horizon"],
    update_kl_limit=None,
    max_ratio=10.0,
)
CASES = {
    "k1": RECIPE,
    "absolute": replace(RECIPE, kl_estimator="absolute"),
    "k2_whitened_rewards": replace(RECIPE, kl_estimator="k2", whiten_rewards=True),
}


def make_policy() -> Policy:
    config = LlamaConfig(
        vocab_size=U["vocabulary"],
        hidden_size=U["width"],
        intermediate_size=U["hidden"],
        num_hidden_layers=U["layers"],
        num_attention_heads=U["heads"],
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    lora = {"r": U["r"], "alpha": U["alpha"], "dropout": 0.0, "target_modules": ("q_proj", "v_proj")}
    policy = Policy(add_lora(LlamaForCausalLM(config), **lora, precision="fp32"), 1.0, "fp32")
    weights = common.update_weights()
    assert common.digest(weights) == UPDATES["weights_sha256"], "numpy draws other weights than when the file was made"
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(torch.tensor(weights.pop(common.base_name(name))))
    assert not weights
    return policy


def prepare_update(recipe: Ppo) -> tuple[Policy, torch.optim.Optimizer, Trajectory, UpdateSettings]:
    """Build what an update needs from the recipe, as the stage does."""
    policy = make_policy()
    settings = UpdateSettings(**select_settings(UpdateSettings, recipe))
    optimizer = optimizers.build_optimizer(
        recipe.optimizer,
        policy.trainable_parameters().values(),
        learning_rate=recipe.learning_rate,
        epsilon=recipe.adam_epsilon,
        weight_decay=recipe.weight_decay,
    )
    rollout = Rollout(ROLLOUT["prompts"], ROLLOUT["responses"], [True] * U["batch"])
    trajectory = build_trajectory(
        policy, rollout, torch.tensor(ROLLOUT["scores"]), U["beta"], kl_estimator=recipe.kl_estimator,
        gamma=recipe.gamma, gae_lambda=recipe.gae_lambda, variance=recipe.advantage_variance,
        whiten_rewards=recipe.whiten_rewards)
    return policy, optimizer, trajectory, settings


def assert_close_to_largest(computed: torch.Tensor, expected) -> None:
    """Within 1e-5 of the largest number there: what is small beside it is a sum in which digits went."""
    expected = torch.tensor(expected)
    torch.testing.assert_close(computed, expected, rtol=0, atol=RELATIVE * float(expected.abs().max()))


def check_weights(policy: Policy, golden: dict[str, list]) -> None:
    """The weights, and how far they moved: most of each weight is where it started."""
    start = common.update_weights()
    computed = {common.base_name(name): p.detach() for name, p in policy.trainable_parameters().items()}
    assert sorted(computed) == sorted(golden) and len(computed) == 4 * U["layers"] + 2
    moved, expected = [], []
    for name, value in computed.items():
        assert_close_to_largest(value, golden[name])
        moved.append((value - torch.tensor(start[name])).flatten())
        expected.append((torch.tensor(golden[name]) - torch.tensor(start[name])).flatten())
    moved, expected = torch.cat(moved), torch.cat(expected)
    assert float((moved - expected).norm() / expected.norm()) < RELATIVE


@pytest.mark.parametrize("case", CASES)
def test_the_trajectory(case):
    golden, (_, _, trajectory, _) = UPDATES[case], prepare_update(CASES[case])
    names = {"log_p": "logprobs", "log_ref": "ref_logprobs", "values": "values", "advantages": "advantages",
             "returns": "returns"}
    for name, attribute in names.items():
        for row, expected in enumerate(golden[name]):
            assert_close_to_largest(getattr(trajectory, attribute)[row, : len(expected)], expected)
    assert float((trajectory.logprobs - trajectory.ref_logprobs).abs().max()) > 0.5  # B is not 0


@pytest.mark.parametrize("case", CASES)
def test_losses_of_every_minibatch(case):
    """Update on the rows of each minibatch alone, with one optimiser."""
    golden, (policy, optimizer, trajectory, settings) = UPDATES[case], prepare_update(CASES[case])
    minibatches = [rows for order in golden["order"] for rows in torch.tensor(order).split(U["minibatch"])]
    for rows, expected in zip(minibatches, golden["minibatches"], strict=True):
        statistics = update_policy(
            policy, optimizer, select_rows(trajectory, rows), replace(settings, epochs=1), torch.Generator())
        assert statistics["policy_loss"] == pytest.approx(expected["policy_loss"], rel=RELATIVE, abs=1e-6)
        assert statistics["value_loss"] == pytest.approx(expected["value_loss"], rel=RELATIVE)
        assert statistics["skipped"] == 0
    check_weights(policy, golden["weights_after_6"])
    assert sum(row["clip_fraction"] > 0.1 for row in golden["minibatches"]) >= 4  # the clip ranges are in the way
    assert sum(row["value_clip_fraction"] > 0.1 for row in golden["minibatches"]) >= 4


def select_rows(trajectory: Trajectory, rows: torch.Tensor) -> Trajectory:
    """Select rows of a trajectory."""
    selected = {}
    for field in fields(Trajectory):
        value = getattr(trajectory, field.name)
        if isinstance(value, torch.Tensor):
            selected[field.name] = value[rows]
        elif isinstance(value, list):
            selected[field.name] = [value[i] for i in rows.tolist()]
    return replace(trajectory, **selected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("epochs", [1, 2])
def test_weights_after_three_and_six_steps(case, epochs):
    golden, (policy, optimizer, trajectory, settings) = UPDATES[case], prepare_update(CASES[case])
    generator = torch.Generator().manual_seed(U["order_seed"])
    assert [torch.randperm(U["batch"], generator=generator).tolist() for _ in range(2)] == golden["order"]
    statistics = update_policy(
        policy, optimizer, trajectory, replace(settings, epochs=epochs), generator.manual_seed(U["order_seed"]))
    assert statistics["minibatches"] == 3 * epochs
    check_weights(policy, golden[f"weights_after_{3 * epochs}"])


def test_the_kl_that_steers_beta():
    """With k1: their controller reads the penalty that the recipe names, ours always k1 (README.md)."""
    golden, (_, _, trajectory, _) = UPDATES["k1"], prepare_update(RECIPE)
    assert trajectory.sequence_kl() == pytest.approx(golden["objective_kl"], rel=1e-5)
    controller = KlController(RECIPE.kl_coefficient, RECIPE.kl_target_nats, RECIPE.kl_horizon_responses)
    controller.update(trajectory.sequence_kl(), U["batch"])
    assert controller.kl_coefficient == pytest.approx(golden["beta_after"], rel=1e-6) != U["beta"]
