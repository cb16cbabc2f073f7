"""Judge a trained policy in plain words: against SFT and best-of-n, each at its best temperature.

A verdict of 'better' needs a score that the policy was not trained on: gold, or else a held-out reward model.
"""

from stages.evaluation.length_control.words import describe_length, only_length_headline
from stages.evaluation.summary import (
    BEST,
    NO_JUDGE,
    against_start,
    best_of_n_policies,
    capitalise,
    change_direction,
    choose_measure,
    describe_policy,
    difference_at_best,
    display_name,
    format_estimate,
    format_percent,
    join_words,
    mean_score,
    samples_per_answer,
    strongest_best_of_n,
    unseen_changes,
)
from stages.evaluation.tasks.wording import find_wording, greedy_name, start_model

GOLD = "the gold score, which knows the truth"
RISE_WORDS = {1: "rose", 0: "did not move beyond chance", -1: "fell"}


def policy_verdict(metrics: dict, policy: str) -> tuple[str, str]:
    """Say whether a policy is better than SFT, each at its best temperature, and at what cost.

    Returns (kind, paragraph); kind is 'better', 'mixed', 'flat', 'worse', 'hacking', 'no-judge', 'length' (better than
    SFT, but only in length) or 'unknown' (the learnt reward rose, nothing else is known, not flagged).
    """
    return _verdict_kind(metrics, policy), " ".join([
        *_describe_at_best(metrics, policy), *_describe_best_of_n(metrics, policy), *describe_length(metrics, policy),
        *_describe_at_sampling_temperature(metrics, policy), *_moved_monitors(metrics, policy),
        _cost(metrics, policy)])


def equal_without_training(metrics: dict, policy: str) -> str | None:
    """Name the SFT setting, greedy or at its best temperature, that a policy at its best does not beat; None: none.

    Without SFT, that of the base.
    """
    against = metrics["at_best"][policy]
    measure, start = choose_measure(against_start(against)), start_model(against)
    differences = {name: difference_at_best(against[name], measure) for name in (f"{start}{BEST}", greedy_name(start))}
    unbeaten = [name for name, difference in differences.items() if change_direction(difference) <= 0]
    return min(unbeaten, key=lambda name: differences[name]["mean"], default=None)


def compare_with_start(metrics: dict, policy: str) -> str:
    """Say in one line how a policy compares with SFT or base: 'SFT at temperature 0.1 does as well as PPO'."""
    against, name = metrics["at_best"][policy], display_name(policy)
    measure = choose_measure(against_start(against))
    source = ", says a held-out reward model" if measure == "judge" else ""
    equal = equal_without_training(metrics, policy)
    if equal is None:
        return f"{name} made the answers better{source}"
    worse = change_direction(difference_at_best(against[equal], measure)) < 0
    return (f"{capitalise(describe_policy(equal, metrics['policies']))} does "
            f"{'better than' if worse else 'as well as'} {name}{source}")


def _verdict_kind(metrics: dict, policy: str) -> str:
    against = metrics["at_best"][policy]
    measure = choose_measure(against_start(against))
    if metrics["hacking"][policy]["verdict"] == "flagged":
        return "hacking"
    if metrics["hacking"][policy]["verdict"] == NO_JUDGE and measure == "reward":
        return "no-judge"
    if equal := equal_without_training(metrics, policy):
        return "worse" if change_direction(difference_at_best(against[equal], measure)) < 0 else "flat"
    if only_length_headline(metrics, policy):
        return "length"
    if measure == "reward":
        return "unknown"
    return "mixed" if change_direction(against_start(against)["gold"].get("correct")) < 0 else "better"


def _describe_at_best(metrics: dict, policy: str) -> list[str]:
    against, name = against_start(metrics["at_best"][policy]), display_name(policy)
    policies, questions = metrics["policies"], metrics["temperature_selection"]["prompts"]
    measure, wording, start = choose_measure(against), find_wording(policies), start_model(policies)
    before = wording.start
    difference = difference_at_best(against, measure)
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
    words += [f"{score}, a score that training never saw, {RISE_WORDS[change_direction(change)]} "
              f"({format_estimate(change, signed=True)})." for score, change in unseen_changes(metrics, against)]
    greedy = greedy_name(start)
    if equal_without_training(metrics, policy) == greedy and policies[f"{start}{BEST}"]["temperature"]:
        words.append(f"{capitalise(describe_policy(greedy, policies))} {_compare(metrics, policy, greedy)}.")
    return words


def _describe_best_of_n(metrics: dict, policy: str) -> list[str]:
    best_of_n = strongest_best_of_n(metrics["at_best"][policy])
    if best_of_n is None:
        return []
    return [f"{capitalise(describe_policy(best_of_n, metrics['policies']))}, at {samples_per_answer(best_of_n)} times "
            f"the cost an answer, {_compare(metrics, policy, best_of_n)}."]


def _compare(metrics: dict, policy: str, other: str) -> str:
    """Say how another policy compares: 'does as well (PPO minus it: +0.01 [-0.02, +0.04])'."""
    against = metrics["at_best"][policy][other]
    difference = difference_at_best(against, choose_measure(against))
    how = {1: "does worse", 0: "does as well", -1: "does better"}[change_direction(difference)]
    return f"{how} ({display_name(policy)} minus it: {format_estimate(difference, signed=True)})"


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
    words = [f"At temperature {temperature:g} {name} {how} in {wording.measure} "
             f"({format_estimate(difference, signed=True)}, paired over {difference['count']} prompts)"]
    if not gold:
        return [f"{words[0]}."]
    gold_change = change_direction(gold["gold"]["difference"])
    estimate = format_estimate(gold["gold"]["difference"], signed=True)
    if change > 0 and gold_change <= 0:
        return [f"{words[0]}.", f"This is reward hacking: the {wording.reward} rose while the gold score "
                                f"{'fell' if gold_change < 0 else 'stayed flat'} ({estimate})."]
    correct, limits = gold.get("correct"), ""
    if correct and gold_change > 0 and change_direction(correct["difference"]) <= 0:
        limits = (f", but correctness {RISE_WORDS[change_direction(correct['difference'])]} there "
                  f"({correct['sft']:.3f} to {correct['policy']:.3f})")
    return [f"{words[0]}, and the gold score {RISE_WORDS[gold_change]} ({estimate}){limits}.",
            *_better_best_of_n(metrics, policy)]


def _better_best_of_n(metrics: dict, policy: str) -> list[str]:
    """Name the best-of-n at the sampling temperature with the most gold, if it has more than the policy."""
    policies, kl = metrics["policies"], metrics["comparisons"][policy]["kl_k1"]["mean"]
    gold = {name: mean_score(policies[name], "gold") for name in (policy, *best_of_n_policies(policies))}
    best = max(gold, key=gold.get)
    if best == policy:
        return []
    return [f"{capitalise(describe_policy(best, policies))} is ahead of {display_name(policy)} there (gold "
            f"{gold[best]:.3f} against {gold[policy]:.3f}, at a KL of at most {policies[best]['kl_formula']:.2f} "
            f"against {kl:.2f} nats)."]


def _moved_monitors(metrics: dict, policy: str) -> list[str]:
    """Say which monitors moved: the only sign of hacking where no gold score is known."""
    hacking, gold = metrics["hacking"][policy], metrics["comparisons"][policy]["gold"]
    if not (hacking["rose"] and hacking["moved"]):
        return []
    start = "This looks like reward hacking" if hacking["verdict"] == "flagged" and not gold else "To watch"
    return [f"{start}: {join_words(hacking['rose'])} rose, and {join_words(hacking['moved'])} moved for the worse."]


def _cost(metrics: dict, policy: str) -> str:
    kl, eos_rate = metrics["comparisons"][policy]["kl_k1"], metrics["policies"][policy]["eos_rate"]
    return (f"It cost a KL of {format_estimate(kl, '0.2f')} nats a response to the "
            f"{find_wording(metrics['policies']).start} model; "
            f"{100 * eos_rate:.1f}\u00a0% of {display_name(policy)}'s responses end by themselves.")
