"""What a policy gradient method is given, and whether it is enough for its settings."""

from dataclasses import dataclass
from pathlib import Path

from stages.modeling.pretrained import check_causal
from stages.recipe.sections.policy_gradient import PolicyGradient
from stages.rewards.sources import LEXICAL, MODEL

OWN_REWARD = "set rewards to your own, as [{source: package.module:function}]"
OF_OWN_PROMPTS = ("prompt_column", "prompt_template", "evaluation_prompts")


@dataclass(frozen=True)
class Sources:
    """What a program is given: the model to train, reward model, and pairs or the user's own prompts."""

    policy: Path
    reward: Path | None = None
    pairs: Path | None = None
    prompts: Path | None = None


def check_sources(config: PolicyGradient, value_model: str | None, sources: Sources) -> None:
    """Raise ValueError, in one line, for what is missing, given twice or without effect, and for a policy that is none.

    value_model: of the algorithm.
    """
    if (sources.pairs is None) == (sources.prompts is None):
        raise ValueError(f"give the prompts {'one way, not both: either' if sources.pairs else 'by one of'} --pairs "
                         f"FOLDER (its rl split) or --prompts FILE (your own)")
    names = [entry.source for entry in config.rewards]
    if sources.reward is None and MODEL in names:
        raise ValueError(f"rewards names '{MODEL}', and no reward model is given: give --reward FOLDER, or "
                         f"{OWN_REWARD}")
    if sources.pairs is None and LEXICAL in names:
        raise ValueError(f"rewards names '{LEXICAL}', which learns from pairs: give --pairs FOLDER, or {OWN_REWARD}")
    if sources.reward is None and value_model in ("adapter", "model"):
        raise ValueError(f"value_model '{value_model}' starts from a reward model: give --reward FOLDER, or set "
                         f"value_model to 'head'")
    if config.prompt_template == "chat" and MODEL in names:
        raise ValueError(f"rewards names '{MODEL}', which was trained on prompts of prompt_template 'question', and "
                         f"would read those of a chat template: set prompt_template to question, or {OWN_REWARD}")
    if sources.prompts is None and any(
            getattr(config, name) != getattr(PolicyGradient, name) for name in OF_OWN_PROMPTS):
        raise ValueError(f"{', '.join(OF_OWN_PROMPTS)} are those of --prompts FILE, and have no effect with --pairs: "
                         f"leave them out")
    if sources.prompts is not None:
        check_causal(sources.policy)
