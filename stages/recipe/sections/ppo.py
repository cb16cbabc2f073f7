"""Settings of PPO."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.ranges import COEFFICIENT, COUNT_OR_NONE, LEARNING_RATE, POSITIVE, SHARE, Range
from stages.recipe.schema import setting
from stages.recipe.sections.policy_gradient import PolicyGradient


@dataclass(frozen=True)
class Ppo(PolicyGradient):
    """Proximal policy optimisation against the reward model, with a critic and a KL penalty to the SFT model."""

    value_model: Literal["head", "adapter", "model"] = setting(
        "head", "'head': a linear head on the policy's last hidden state, initially 0, whose gradient reaches the "
        "policy [script]; 'adapter': a separate adapter, initialised from the reward model, which --reward then "
        "gives unmerged; 'model': a separate model, initialised from the reward model, all of it trained, in 'mixed' "
        "where the precision is bf16 [N+]")
    critic_learning_rate: float | None = setting(
        None, "learning rate of the value function; null: learning_rate [script: one for both]", within=LEARNING_RATE)
    gamma: float = setting(1.0, "discount factor [TRL default]", within=SHARE)
    gae_lambda: float = setting(0.95, "lambda of generalized advantage estimation [TRL default]", within=SHARE)
    critic_gae_lambda: float | None = setting(
        None, "lambda of the returns that the critic learns; 1: the observed ones, without its own predictions; null: "
        "gae_lambda [VC-PPO]", within=SHARE)
    advantage_variance: Literal["biased", "unbiased"] = setting(
        "biased", "variance in whitening: 'biased' divides by the number of tokens [N implementation details]; "
        "'unbiased', by one less, as TRL")
    critic_warmup_iterations: int = setting(
        0, "first iterations in which only the value head is trained [NeMo-Aligner]", within=COUNT_OR_NONE)
    whiten_rewards: bool = setting(
        False, "scale token rewards to a standard deviation of 1 and keep their mean [TRL default: off]")
    value_clip_range: float | None = setting(
        0.2, "clip range of the new value around the old one; null: no clipping [TRL default]", within=POSITIVE)
    value_coefficient: float = setting(0.1, "coefficient of the value loss [TRL default]", within=COEFFICIENT)
    kl_estimator: Literal["k1", "k2", "k3", "absolute"] = setting(
        "k1", "estimator of the KL penalty in the reward; only the gradient of k1 is that of the KL [TRL default: "
        "'kl']")
    responses_per_prompt: int = setting(
        1, "responses to each prompt of a rollout, which share its computation; all sizes in prompts count a prompt "
        "with its responses [script]", within=Range(1, 1000), absent_means=1)
    # No settings: PPO's loss, with the KL in the reward.
    ratio_level, loss_mean, kl_importance_weight = "token", "token", False

    def __post_init__(self):
        super().__post_init__()
        if self.value_model == "model" and self.precision in ("int8", "nf4"):
            raise ValueError(f"value_model 'model' trains all weights of the critic: it needs precision fp32, mixed or "
                             f"bf16, not {self.precision}; or set value_model to 'adapter'")

    def trains_whole_model(self) -> bool:
        """Tell whether all weights of some model are trained, the policy's or the critic's."""
        return super().trains_whole_model() or self.value_model == "model"
