"""Settings of RLOO."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.ranges import COEFFICIENT, Range
from stages.recipe.schema import setting
from stages.recipe.sections.policy_gradient import GroupedPolicyGradient


@dataclass(frozen=True)
class Rloo(GroupedPolicyGradient):
    """REINFORCE leave-one-out: each response's reward against the mean of the others to its prompt; no critic."""

    epochs: int = setting(1, "passes over each rollout [RLOO paper, TRL default]", within=Range(1, 10**6))
    kl_coefficient: float = setting(0.05, "initial KL coefficient, beta [TRL default]", within=COEFFICIENT)
    kl_estimator: Literal["k1", "k2", "k3", "absolute"] = setting(
        "k1", "estimator of the KL penalty in the reward [RLOO paper, TRL]")
    normalize_advantages: bool = setting(
        False, "scale the advantages of a rollout to mean 0 and standard deviation 1 [TRL default: off]")
    ratio_level: Literal["token", "sequence"] = setting(
        "sequence", "whose probability ratio is clipped, that of a whole response or of each token [TRL: sequence]")
    loss_mean: Literal["token", "sequence"] = setting(
        "sequence", "the loss is a mean over all tokens, or over responses of the mean over their tokens [RLOO paper: "
        "sequence]")
    kl_importance_weight = False  # no setting: the KL is in the reward
