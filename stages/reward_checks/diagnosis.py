"""Say in words what a reward model can do, and which part of a failing pipeline is at fault.

The parts, in the order in which one needs the other: the base model knows which answer is better (its likelihood ranks
pairs); the head reads what the base knows (the reward model ranks pairs better than cheap baselines, and its choice
among samples raises gold); the policy moves.
"""

from typing import Literal

from stages.evaluation.pair_accuracy import LOG_PROBABILITY
from stages.evaluation.reward_model_check import CHANCE, describe_shortfall, find_shortfall, reward_model_verdict
from stages.evaluation.summary import capitalise, change_direction, format_estimate, format_percent

MIN_KL_NATS = 0.1  # of a policy that moved, a response: below it, 10 % is all that a response's odds change on average
MIN_SHIFT_STDS = 0.25  # of scores under another layout that is worth a line
Part = Literal["base", "head", "policy"]
HEADLINES = {"base": "The base does not know which answer is better", "head": "The head does not read what is known",
             "policy": "The policy does not move", None: "No part is at fault",
             "unknown": "Which part is at fault is not known"}
ADVICE = {"base": "take a larger base.model, or train base and sft for longer, before another reward model",
          "head": "train the reward model on more pairs (reward.train_pairs), for longer or with tune: full",
          "policy": "raise ppo.learning_rate or ppo.iterations, or lower ppo.kl_coefficient"}


def diagnose(metrics: dict) -> dict:
    """Diagnose from what `stages.evaluate_reward` measured.

    Returns: `fault`, see find_fault; `verdict`, at most five answers by question.
    """
    fault = find_fault(metrics)
    answers = {"Does it rank pairs?": reward_model_verdict(metrics["reward_model"]) + _ceiling_words(metrics),
               "Which part is at fault?": _fault_words(fault, metrics)}
    answers |= {"Does it prefer better samples?": _gold_words(metrics["gold_curve"])} if metrics["gold_curve"] else {}
    if layout := _layout_words(metrics["layout"]):
        answers["Does it read layout?"] = layout
    if metrics["policy"]:
        answers["Does the policy move?"] = _policy_words(metrics["policy"])
    return {"fault": fault, "verdict": answers}


def find_fault(metrics: dict) -> Part | Literal["unknown"] | None:
    """Return the first part that fails; None if none does, 'unknown' if too little was measured to tell.

    The base knows if SFT's likelihood ranks pairs better than chance, by the whole 95 % interval.
    """
    shortfall, likelihood = find_shortfall(metrics["reward_model"]), _likelihood(metrics)
    knows = bool(likelihood) and likelihood["low"] is not None and likelihood["low"] > CHANCE
    if shortfall == "unknown" or (shortfall and not likelihood):
        return "unknown"
    if shortfall:
        return "head" if knows else "base"
    if metrics["gold_curve"] and change_direction(metrics["gold_curve"][-1]["gold_gain"]) <= 0:
        return "base" if likelihood and not knows else "head"
    return "policy" if metrics["policy"] and not _moved(metrics["policy"]) else None


def _likelihood(metrics: dict) -> dict | None:
    """Return the accuracy of SFT's likelihood; None: not measured."""
    return metrics["reward_model"]["baselines"].get(LOG_PROBABILITY)


def _fault_words(fault: str | None, metrics: dict) -> str:
    reward, likelihood = metrics["reward_model"], _likelihood(metrics)
    ranks = f"SFT's likelihood ranks {format_estimate(likelihood)} of the pairs right" if likelihood else None
    if fault is None:
        return f"{HEADLINES[fault]} of those that were measured."
    if fault == "unknown":
        need = "more held-out pairs" if find_shortfall(reward) == "unknown" else \
            "--sft FOLDER, whose likelihood shows what the base knows"
        return f"{HEADLINES[fault]}: that needs {need}."
    why = ""
    if fault == "base":
        why = f"{ranks}, no better than chance"
    elif fault == "head":
        shortfall = describe_shortfall(reward)
        why = ", while ".join(filter(None, (shortfall, ranks))) if shortfall else (
            "it ranks people's answers, but its choice among SFT's samples does not raise gold")
    return f"{HEADLINES[fault]}{': ' if why else ''}{why}. {capitalise(ADVICE[fault])}."


def _ceiling_words(metrics: dict) -> str:
    ceiling, oracle = metrics["noise_ceiling"]["all"], metrics["reward_model"]["oracle"]
    if not ceiling:
        return ""
    known = f"; an oracle that knows the truth reaches {format_percent(oracle)}" if oracle else ""
    return f" The votes' own noise allows at most {format_percent(ceiling)} if readers vote independently{known}."


def _gold_words(curve: list[dict]) -> str:
    first, last = curve[0], curve[-1]
    how = {1: "raises", 0: "does not raise", -1: "lowers"}[change_direction(last["gold_gain"])]
    return (f"The best of {last['n']} samples of SFT by this model {how} gold, from {first['gold']['mean']:.3f} to "
            f"{last['gold']['mean']:.3f} ({format_estimate(last['gold_gain'], signed=True)}); gold's own choice has "
            f"{last['best_gold']['mean']:.3f}.")


def _layout_words(layout: dict) -> str:
    """Describe the paraphrase that costs most accuracy or shifts scores most, if any does either."""
    lines = []
    for name, measured in layout.items():
        shift, change = measured["shift_stds"], measured["accuracy_change"]
        shifts = change_direction(shift) and abs(shift["mean"]) >= MIN_SHIFT_STDS
        if shifts or change_direction(change) < 0:
            lines.append((change["mean"] if change else 0.0, (
                f"With {name}, which changes {100 * measured['changed_share']:.0f}\u00a0% of the answers but no word, "
                f"scores shift by {format_estimate(shift, '.2f', signed=True)} standard deviations and accuracy on "
                f"these pairs by {format_estimate(change, signed=True)}.")))
    return min(lines)[1] if lines else ""


def _moved(policy: dict) -> bool:
    kl = policy["kl_k3"]
    return kl is None or (kl["mean"] if kl["low"] is None else kl["high"]) >= MIN_KL_NATS


def _policy_words(policy: dict) -> str:
    return (f"{'Yes' if _moved(policy) else 'No'}: its KL to SFT is {format_estimate(policy['kl_k3'], '.3f')} nats a "
            f"response, and its reward differs by {format_estimate(policy['reward_difference'], signed=True)}.")
