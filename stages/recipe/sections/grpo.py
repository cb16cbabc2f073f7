"""Settings of GRPO."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.ranges import COEFFICIENT, Range
from stages.recipe.schema import setting
from stages.recipe.sections.policy_gradient import GroupedPolicyGradient


@dataclass(frozen=True)
class Grpo(GroupedPolicyGradient):
    """Group relative policy optimisation: rewards normalised among the responses to a prompt; the KL is in the loss."""

    epochs: int = setting(1, "passes over each rollout [GRPO paper, TRL default]", within=Range(1, 10**6))
    kl_coefficient: float = setting(
        0.04, "coefficient of the KL (k3) in the loss, beta [GRPO paper; TRL: 0]", within=COEFFICIENT)
    kl_importance_weight: bool = setting(
        True, "weight the KL in the loss by the probability ratio: its gradient is then that of the KL [TRL default, "
        "DeepSeek-V3.2, arXiv 2512.02556; GRPO paper: off]")
    scale_rewards: Literal["group", "batch", "none"] = setting(
        "group", "divide advantages by the standard deviation of a prompt's rewards ('group') [GRPO paper, TRL "
        "default], of all rewards ('batch') [arXiv 2508.08221], or by nothing ('none') [Dr. GRPO, arXiv 2503.20783]")
    loss_mean: Literal["token", "sequence"] = setting(
        "sequence", "the loss is a mean over responses of the mean over their tokens [GRPO paper], or over all tokens "
        "of a minibatch [DAPO, arXiv 2503.14476]")
    ratio_level = "token"  # no setting
