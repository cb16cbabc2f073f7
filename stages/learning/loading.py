"""Policies and reward models, from the folders and names that a recipe gives."""

from pathlib import Path

from stages.learning.ensemble import Ensemble, scorer_of
from stages.learning.policy import Policy
from stages.learning.reward_model import Scorer, members_of
from stages.modeling.adapters import check_base, is_adapter
from stages.modeling.load import load_causal, load_scorer
from stages.modeling.lora import add_lora


def load_policy(
    folder: Path,
    reward: Path,
    *,
    tune: str,
    value_model: str,
    lora: dict,
    precision: str,
    temperature: float,
    gradient_checkpointing: bool = False,
    compiled: bool = False,
) -> Policy:
    """A fresh policy on the model in `folder`; the names are those of the recipe's section ppo.

    reward: the artifact that a value function with an adapter of its own starts from; ValueError if it is a merged one.
    """
    if value_model == "adapter":
        if not is_adapter(reward):
            raise ValueError(f"value_model 'adapter' starts from the reward model's adapter, and {reward} is a whole "
                             f"model: give the artifact of stages.reward as --reward, or set value_model to 'head'")
        check_base(reward, folder)
    model = load_causal(folder, precision)
    if tune == "lora":
        model = add_lora(model, precision=precision, **lora)
    policy = Policy(
        model, temperature, precision, gradient_checkpointing=gradient_checkpointing, compiled=compiled
    )
    if value_model == "adapter":
        policy.values_start_from(reward)
    return policy


def load_reward(
    reward: Path, policy: Policy, folder: Path, forward_prompts: int = 64, spread_penalty: float = 0.0
) -> Scorer | Ensemble:
    """The scorer in `reward`: an adapter goes onto the policy's base, which is that in `folder`; a merged model is a
    model of its own. ValueError where the adapter is of another base. spread_penalty: see Ensemble."""
    if not is_adapter(reward):
        return merged_reward(reward, policy.precision, forward_prompts, spread_penalty)
    check_base(reward, folder)
    members = [policy.scorer(member, forward_prompts, f"reward-{n}") for n, member in enumerate(members_of(reward))]
    return scorer_of(members, spread_penalty)


def merged_reward(
    reward: Path, precision: str, batch_rows: int = 64, spread_penalty: float = 0.0
) -> Scorer | Ensemble:
    """The scorer of a merged reward model, or of several in one artifact."""
    models = [load_scorer(member, precision) for member in members_of(reward)]
    return scorer_of([Scorer(model, precision, batch_rows=batch_rows) for model in models], spread_penalty)
