"""Check and load what a policy gradient method is given: the policy, and the reward model on the policy's base."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.modeling.adapters import check_base, is_adapter
from stages.modeling.load import load_causal
from stages.modeling.lora import add_lora
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import member_folders
from stages.rewards.reward_functions import LEXICAL, MODEL
from stages.rl.policy import Policy

OWN_REWARD = "set rewards to your own, as [{source: package.module:function}]"


@dataclass(frozen=True)
class Inputs:
    """What a program is given: the model to train, reward model, and pairs or the user's own prompts."""

    policy: Path
    reward: Path | None = None
    pairs: Path | None = None
    prompts: Path | None = None


def check_inputs(inputs: Inputs, rewards: Sequence[str], value_model: str | None, prompt_template: str) -> None:
    """Raise ValueError, in one line, for inputs that are missing or given twice.

    rewards: the sources that the settings name. value_model: of the algorithm; None: no critic.
    """
    if (inputs.pairs is None) == (inputs.prompts is None):
        raise ValueError(f"give the prompts {'one way, not both: either' if inputs.pairs else 'by one of'} --pairs "
                         f"FOLDER (its rl split) or --prompts FILE (your own)")
    if inputs.reward is None and MODEL in rewards:
        raise ValueError(f"rewards names '{MODEL}', and no reward model is given: give --reward FOLDER, or "
                         f"{OWN_REWARD}")
    if inputs.pairs is None and LEXICAL in rewards:
        raise ValueError(f"rewards names '{LEXICAL}', which learns from pairs: give --pairs FOLDER, or {OWN_REWARD}")
    if inputs.reward is None and value_model in ("adapter", "model"):
        raise ValueError(f"value_model '{value_model}' starts from a reward model: give --reward FOLDER, or set "
                         f"value_model to 'head'")
    if prompt_template == "chat" and MODEL in rewards:
        raise ValueError(f"rewards names '{MODEL}', which was trained on prompts of prompt_template 'question', and "
                         f"would read those of a chat template: set prompt_template to question, or {OWN_REWARD}")


def load_policy(
    folder: Path, reward: Path | None, *, tune: str, value_model: str | None, lora: dict, precision: str,
    temperature: float, gradient_checkpointing: bool = False, cpu_kernels: str = "off",
    share_prompts: bool = False,
) -> Policy:
    """Load the model in `folder` as an untrained policy; arguments are named as in the recipe's section `ppo`.

    value_model: None: without a critic. reward: what initialises a separate value function: the reward model's adapter,
    or a whole reward model. share_prompts: see Policy. Raises ValueError if `reward` is the other one.
    """
    if value_model == "adapter":
        if not is_adapter(reward):
            raise ValueError(f"value_model 'adapter' starts from the reward model's adapter, and {reward} is a whole "
                             f"model: give the artifact of stages.reward as --reward, or set value_model to 'head'")
        check_base(reward, folder)
    if value_model == "model" and is_adapter(reward):
        raise ValueError(f"value_model 'model' starts from a whole reward model, and {reward} is an adapter: give the "
                         f"merged reward model as --reward, or set value_model to 'adapter'")
    model = load_causal(folder, precision, cpu_kernels)
    if tune == "lora":
        model = add_lora(model, precision=precision, **lora)
    policy = Policy(model, temperature, precision, gradient_checkpointing=gradient_checkpointing,
                    critic=value_model is not None, share_prompts=share_prompts)
    if value_model in ("adapter", "model"):
        policy.init_value_from_reward(reward, cpu_kernels)
    return policy


def load_scorers(
    reward: Path, policy: Policy, folder: Path, forward_prompts: int = 64, cpu_kernels: str = "off"
) -> list[Scorer]:
    """Load every reward model of an artifact: adapters as roles on the policy's base, merged ones as separate models.

    folder: the policy's base. Raises ValueError if an adapter was trained on another base.
    """
    if not is_adapter(reward):
        return load_reward_models(reward, policy.precision, forward_prompts, cpu_kernels, policy.share_prompts)
    check_base(reward, folder)
    first = len(getattr(policy.base, "peft_config", ()))  # adapters have unique names
    return [policy.add_scorer(member, forward_prompts, f"reward-{number}")
            for number, member in enumerate(member_folders(reward), first)]
