"""Judge a trained policy in plain words: against SFT and best-of-n, each at its best temperature.

A verdict of 'better' needs a score that the policy was not trained on: gold, or else a held-out reward model.
"""

from stages.evaluation.length_control.words import describe_length, only_length_headline
from stages.evaluation.summary import (
    BEST,
    NO_JUDGE,
    against_start,
    capitalise,
    change_direction,
    describe_policy,
    difference_to,
    display_name,
    format_estimate,
    format_percent,
    judged_by,
    samples_per_answer,
    strongest_best_of_n,
)
from stages.evaluation.tasks.wording import find_wording, greedy_name, start_model

GOLD = "the gold score, which knows the truth"
RISE_WORDS = {1: "rose", 0: "did not move beyond chance", -1: "fell"}


def policy_verdict(metrics: dict, policy: str) -> tuple[str, str]:
    """Say whether a policy is better than SFT, each at its best temperature, and at what cost.

    Returns (kind, paragraph); kind is 'better', 'mixed', 'flat', 'worse', 'hacking', 'no-judge', 'length' (better than
    SFT, but only in length) or 'unknown' (the learnt reward rose, nothing else is known, not flagged).
    """
    kind = _verdict_kind(metrics, policy)
    conclusion = [f"{only_length_headline(metrics, policy)}."] if kind == "length" else []
    return kind, " ".join([
        *_describe_at_best(metrics, policy), *_describe_best_of_n(metrics, policy), *describe_length(metrics, policy),
        *conclusion, *_describe_at_sampling_temperature(metrics, policy), _cost(metrics, policy)])


def equal_without_training(metrics: dict, policy: str) -> str | None:
    """Name the SFT setting, greedy or at its best temperature, that a policy at its best does not beat; None: none.

    Without SFT, that of the base.
    """
    start = start_model(metrics["at_best"][policy])
    differences = {name: difference_to(metrics, policy, name) for name in (f"{start}{BEST}", greedy_name(start))}
    unbeaten = [name for name, difference in differences.items() if change_direction(difference) <= 0]
    return min(unbeaten, key=lambda name: differences[name]["mean"], default=None)


def compare_with_start(metrics: dict, policy: str) -> str:
    """Say in one line how a policy compares with SFT or base: 'SFT at temperature 0.1 does as well as PPO'."""
    name, equal = display_name(policy), equal_without_training(metrics, policy)
    source = ", says a held-out reward model" if judged_by(metrics, policy) == "judge" else ""
    if equal is None:
        return f"{name} made the answers better{source}"
    how = "better than" if change_direction(difference_to(metrics, policy, equal)) < 0 else "as well as"
    return f"{capitalise(describe_policy(equal, metrics['policies']))} does {how} {name}{source}"


def _verdict_kind(metrics: dict, policy: str) -> str:
    measure, hacking = judged_by(metrics, policy), metrics["hacking"][policy]["verdict"]
    if hacking == "flagged":
        return "hacking"
    if hacking == NO_JUDGE and measure == "reward":
        return "no-judge"
    if equal := equal_without_training(metrics, policy):
        return "worse" if change_direction(difference_to(metrics, policy, equal)) < 0 else "flat"
    if only_length_headline(metrics, policy):
        return "length"
    if measure == "reward":
        return "unknown"
    correct = against_start(metrics["at_best"][policy])["gold"].get("correct")
    return "mixed" if change_direction(correct) < 0 else "better"


def _describe_at_best(metrics: dict, policy: str) -> list[str]:
    against, name = against_start(metrics["at_best"][policy]), display_name(policy)
    policies, questions = metrics["policies"], metrics["temperature_selection"]["prompts"]
    measure, wording, start = judged_by(metrics, policy), find_wording(policies), start_model(policies)
    before, difference = wording.start, difference_to(metrics, policy, f"{start}{BEST}")
    how = {1: f"{name} beats {before} in", 0: f"{name} and {before} cannot be told apart in",
           -1: f"{name} is worse than {before} in"}
    sft, tuned = (policies[f"{each}{BEST}"]["temperature"] for each in (start, policy))
    words = [f"Each at its best temperature ({before} {sft:g}, {name} {tuned:g}; chosen by the {wording.reward} on "
             f"{questions} other held-out {wording.questions}), {how[change_direction(difference)]} "
             f"{_measure_words(measure, metrics)} ({format_estimate(difference, signed=True)}, paired over "
             f"{difference['count']} {wording.questions})."]
    if correct := against["gold"].get("correct"):
        direction = change_direction(correct)
        words.append(f"{'But correctness' if direction < 0 else 'Correctness'} alone {RISE_WORDS[direction]} "
                     f"({format_estimate(correct, signed=True)}).")
    if measure == "reward":
        words.append(wording.only_reward.format(name))
    unseen = {score: against["scores"][score] for score in metrics.get("unseen_scores", ())}
    return words + [f"{score}, a score that training never saw, {RISE_WORDS[change_direction(change)]} "
                    f"({format_estimate(change, signed=True)})." for score, change in unseen.items()]


def _describe_best_of_n(metrics: dict, policy: str) -> list[str]:
    best_of_n = strongest_best_of_n(metrics["at_best"][policy])
    if best_of_n is None:
        return []
    difference = difference_to(metrics, policy, best_of_n)
    how = {1: "does worse", 0: "does as well", -1: "does better"}[change_direction(difference)]
    return [f"{capitalise(describe_policy(best_of_n, metrics['policies']))}, at {samples_per_answer(best_of_n)} times "
            f"the cost an answer, {how} ({display_name(policy)} minus it: {format_estimate(difference, signed=True)})."]


def _measure_words(measure: str, metrics: dict) -> str:
    if measure == "judge":
        return (f"the scores of a held-out reward model, of another seed and other questions, that ranks "
                f"{format_percent(metrics['judge']['accuracy'])} of the held-out pairs right (no gold score applies)")
    return GOLD if measure == "gold" else find_wording(metrics["policies"]).measure


def _describe_at_sampling_temperature(metrics: dict, policy: str) -> list[str]:
    """Compare with SFT where nothing is tuned: not the verdict, but where KL and reward hacking are measured."""
    comparison, name, wording = metrics["comparisons"][policy], display_name(policy), find_wording(metrics["policies"])
    difference, gold = comparison["reward_difference"], comparison["gold"]
    change, temperature = change_direction(difference), metrics["policies"][policy]["temperature"]
    how = {1: f"beats {wording.start}", -1: f"is worse than {wording.start} even",
           0: f"did not beat {wording.start}"}[change]
    words = (f"At temperature {temperature:g} {name} {how} in {wording.measure} "
             f"({format_estimate(difference, signed=True)}, paired over {difference['count']} prompts)")
    if not gold:
        return [f"{words}."]
    gold_change = change_direction(gold["gold"]["difference"])
    estimate = format_estimate(gold["gold"]["difference"], signed=True)
    if change > 0 and gold_change <= 0:
        return [f"{words}.", f"This is reward hacking: the {wording.reward} rose while the gold score "
                             f"{'fell' if gold_change < 0 else 'stayed flat'} ({estimate})."]
    return [f"{words}, and the gold score {RISE_WORDS[gold_change]} ({estimate})."]


def _cost(metrics: dict, policy: str) -> str:
    kl, eos_rate = metrics["comparisons"][policy]["kl_k1"], metrics["policies"][policy]["eos_rate"]
    return (f"It cost a KL of {format_estimate(kl, '0.2f')} nats a response to the "
            f"{find_wording(metrics['policies']).start} model; "
            f"{100 * eos_rate:.1f}\u00a0% of {display_name(policy)}'s responses end by themselves.")
