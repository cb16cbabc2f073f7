"""RLOO and GRPO against trl 1.16's trainers: advantages, losses and gradients of two passes (tests/parity/golden)."""

import json

import pytest
import torch

from stages import grpo, rloo
from stages.ppo import update_settings
from stages.recipe.sections.policy_gradient import Grpo, Rloo
from stages.rewards.kl import kl_penalised_rewards
from stages.rl.policy_gradient_trainer import MinibatchSize, UpdateSettings, policy_gradient_loss
from stages.rl.trajectory import Trajectory
from tests.parity.golden.support import FOLDER, GivenPolicy, rows_of, same

GOLDEN = json.loads((FOLDER / "trl_1_16_groups.json").read_text())
K = GOLDEN["responses_per_prompt"]
SINGLE = 1e-5  # relative; trl's rewards are fp32
# The recipe with trl's conventions.
SECTIONS = {
    "rloo": Rloo(responses_per_prompt=K, kl_coefficient=0.15),
    "rloo normalized": Rloo(responses_per_prompt=K, kl_coefficient=0.15, normalize_advantages=True),
    "grpo": Grpo(responses_per_prompt=K, kl_coefficient=0.04),
    "grpo paper": Grpo(responses_per_prompt=K, kl_coefficient=0.04, kl_importance_weight=False),
    "grpo batch": Grpo(responses_per_prompt=K, kl_coefficient=0.04, scale_rewards="batch", loss_mean="token"),
    "grpo none": Grpo(responses_per_prompt=K, kl_coefficient=0.0, scale_rewards="none", loss_mean="token"),
}


def compute(case: str, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a pass of trl's, our advantages [B, R] of it, and our loss with its gradient for the tokens [B, R]."""
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in
         GOLDEN["values"][case]["passes"][number].items()}
    config = SECTIONS[case]
    method = (rloo if isinstance(config, Rloo) else grpo).make_method(config)
    in_loss = method.kl_in == "loss"
    token_rewards = kl_penalised_rewards(
        x["rewards"], x["old"], x["ref"], x["mask"], 0.0 if in_loss else config.kl_coefficient)
    zeros = torch.zeros_like(x["mask"])
    advantages, returns = method.estimate_advantages(token_rewards, zeros, x["mask"])
    trajectory = Trajectory(logprobs=x["old"], ref_logprobs=x["ref"], values=zeros, mask=x["mask"],
                            advantages=advantages, returns=returns, **rows_of(x["mask"]))
    policy = GivenPolicy(x["new"], zeros, x["mask"])
    settings = UpdateSettings(**vars(update_settings(config)) | {
        "clip_range": GOLDEN["clip_range"]})
    rows = len(x["mask"])
    # In two microbatches, as shares of one mean.
    size = MinibatchSize(x["mask"].sum(), rows)
    loss = sum(policy_gradient_loss(policy, trajectory, part, size, settings,
                                    config.kl_coefficient if in_loss else 0.0)[0]
               for part in torch.arange(rows).split(7))
    (gradient,) = torch.autograd.grad(loss, [policy.logprobs])
    return x, advantages, loss, gradient


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("case", SECTIONS)
def test_advantages_loss_and_gradient(case, number):
    x, advantages, loss, gradient = compute(case, number)
    same(advantages, x["advantages"][:, None] * x["mask"], rel=SINGLE)
    same(loss, x["loss"], rel=SINGLE)
    torch.testing.assert_close(gradient * x["mask"], x["gradient"] * x["mask"], rtol=0,
                               atol=SINGLE * float(x["gradient"].abs().max()))
    assert float(advantages.abs().max()) > 0.5 and float(x["gradient"].abs().max()) > 1e-3
    outside = (x["new"] - x["old"]).exp().sub(1).abs() > GOLDEN["clip_range"]
    assert bool((outside & x["mask"].bool()).any()) == bool(number)  # in the second pass the clip is in the way
