"""Name the model that policies start from, and say in which words runs on own prompts differ from those on a dump."""

from collections.abc import Container
from dataclasses import dataclass

SFT, BASE = "sft", "base"


@dataclass(frozen=True)
class Wording:
    """start: the model that policies start from and are compared with. reward: what they were trained on; measure: the
    same, where policies are compared in it.

    only_reward: what is not known where no other score is; unknown: the headline then. Both have a place for the
    policy's name.
    """

    start: str
    reward: str
    measure: str
    questions: str
    only_reward: str
    unknown: str


WORDINGS = {
    SFT: Wording(
        "SFT", "learnt reward", "learnt reward", "questions",
        "Only the learnt reward is known here: no gold score applies to these questions, so this run cannot say "
        "whether the answers became better or only more to the reward model's taste.",
        "{} raised the learnt reward; nothing else is known"),
    BASE: Wording(
        "base", "reward", "the reward that it was trained on", "prompts",
        "This reward is the one that {} was trained on: it cannot say whether the answers are better than the reward "
        "function knows.",
        "{} beats base in the reward that it was trained on; nothing else is known")}


def start_model(policies: Container[str]) -> str:
    """Return the name of the model that policies start from and are compared with: 'sft' or, without SFT, 'base'.

    policies: names, which may all be of policies at their best temperature.
    """
    return SFT if SFT in policies or f"{SFT}_best" in policies else BASE


def find_wording(policies: Container[str]) -> Wording:
    """Return the words for these policies; see start_model."""
    return WORDINGS[start_model(policies)]


def greedy_name(start: str) -> str:
    """Return the name of the start model with greedy decoding."""
    return f"{start}_greedy"
