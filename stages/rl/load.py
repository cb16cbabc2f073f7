"""Policies and reward models, from the folders and names that a recipe gives."""

from pathlib import Path

from stages.modeling.adapters import check_base, is_adapter
from stages.modeling.load import load_causal
from stages.modeling.lora import add_lora
from stages.reward_modeling.ensemble import Ensemble, scorer_of
from stages.reward_modeling.load import load_merged_reward
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import member_folders
from stages.rl.policy import Policy


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
        return load_merged_reward(reward, policy.precision, forward_prompts, spread_penalty)
    check_base(reward, folder)
    members = [policy.scorer(member, forward_prompts, f"reward-{n}") for n, member in enumerate(member_folders(reward))]
    return scorer_of(members, spread_penalty)


