"""The folders and files that a policy gradient method is given, and whether they are enough for its settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.rewards.sources import LEXICAL, MODEL

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
