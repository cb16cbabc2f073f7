"""Check whether a reward model can judge: whether it ranks held-out pairs better than chance and than cheap baselines.

`measured` is the accuracy on held-out pairs as evaluate's `reward_model` and scoring.json's `held_out_pairs` have it:
{pairs, accuracy, baselines, best_cheap_baseline, above_best_cheap_baseline}. None: it was not measured.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from stages.evaluation.summary import capitalise, change_direction, display_name, format_estimate, format_percent

CHANCE = 0.5
Shortfall = Literal["unknown", "chance", "baseline"]
REFUSED = {"none": (), "chance": ("chance",), "baseline": ("chance", "baseline")}  # shortfalls, by what is required
ADVICE = ("Train it on more pairs (pairs.reward_share, reward.train_pairs) or on another base (base.model), or set "
          "{}.require_reward to {} to go on with it")


def find_shortfall(measured: dict | None) -> Shortfall | None:
    """Return what a reward model was not shown to beat, by the whole 95 % interval; None if it beats both.

    'chance': half of the pairs. 'baseline': the best cheap baseline on the same pairs. 'unknown': there are no pairs,
    or too few for an interval.
    """
    accuracy = (measured or {}).get("accuracy")
    if not accuracy or accuracy["low"] is None:
        return "unknown"
    if not accuracy["low"] > CHANCE:
        return "chance"
    return None if change_direction(measured["above_best_cheap_baseline"]) > 0 else "baseline"


def describe_shortfall(measured: dict | None) -> str:
    """Describe what the reward model does not beat, as a clause with its accuracy; '' if it beats both."""
    shortfall = find_shortfall(measured)
    if shortfall is None:
        return ""
    if shortfall == "unknown":
        return "it is not known whether the reward model ranks pairs better than chance: too few pairs are held out"
    ranks = f"the reward model ranks {format_estimate(measured['accuracy'])} of {measured['pairs']:,} held-out pairs " \
            f"right, no better than"
    if shortfall == "chance":
        return f"{ranks} chance"
    best, above = measured["best_cheap_baseline"], measured["above_best_cheap_baseline"]
    return (f"{ranks} the best cheap baseline, {best}: {format_estimate(measured['baselines'][best])} (difference "
            f"{format_estimate(above, signed=True)})")


def reward_model_verdict(reward: dict) -> str:
    """Say whether the reward model beats the best cheap baseline."""
    best = reward["best_cheap_baseline"]
    if not best:
        return "The reward model could not be judged: there is no held-out pair."
    start = (f"On {reward['pairs']:,} held-out pairs of {reward['questions']:,} questions the reward model ranks "
             f"{format_percent(reward['accuracy'])} right, the best cheap baseline ({best}) "
             f"{format_percent(reward['baselines'][best])}")
    difference = reward["above_best_cheap_baseline"]
    end = {1: "the reward model beats it", -1: "the reward model is worse than the baseline",
           0: "the reward model did not beat it: the two cannot be told apart"}[change_direction(difference)]
    return f"{start}: {end} (difference {format_estimate(difference, signed=True)})."


def check_reward_models(measured: dict[Path, dict | None], required: Literal["chance", "baseline", "none"],
                        say: Callable[[str], None], stage: str = "ppo") -> list[str]:
    """Warn of the reward models, by folder, that beat too little, and return their shortfalls in words.

    Raises ValueError for one that does not beat what is required; the baseline includes chance. One that was not
    measured is only warned about. stage: that they are used in.
    """
    shortfalls = {folder: words for folder, numbers in measured.items() if (words := describe_shortfall(numbers))}
    for folder, words in shortfalls.items():
        shortfall = find_shortfall(measured[folder])
        if shortfall in REFUSED[required]:
            weaker = "none" if shortfall == "chance" else "chance or none"
            raise ValueError(f"{folder}: {words}. {capitalise(display_name(stage))} would optimise what nobody asked "
                             f"for. {ADVICE.format(stage, weaker)}")
        if required != "none":
            say(f"WARNING: {folder}: {words}")
    return list(shortfalls.values())
