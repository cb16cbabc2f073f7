"""Judge a trained policy in plain words: against SFT and best-of-n, each at its best temperature.

A verdict of 'better' needs a score that the policy was not trained on: gold, or else a held-out reward model. What the
policy learnt beside length is said where the metrics have `length_control` (PolicyComparison.compare).
"""

from collections.abc import Iterator

from stages.evaluation.statistics import flatten_estimates
from stages.evaluation.summary import (
    BEST,
    BEST_OF_N,
    CONTROLS,
    NO_JUDGE,
    against_start,
    capitalise,
    change_direction,
    cheaper_policies,
    describe_policy,
    difference_to,
    display_name,
    format_change,
    format_estimate,
    format_percent,
    judged_by,
    mean_score,
    samples_per_answer,
    strongest_best_of_n,
)
from stages.evaluation.tasks.wording import find_wording, greedy_name, start_model

GOLD = "the gold score, which knows the truth"
RISE_WORDS = {1: "rose", 0: "did not move beyond chance", -1: "fell"}
MIN_PAIRS = 30  # of about equal length: of fewer, no share is shown
WEAK_SHARE = 0.5  # of the policy's KL: a control below it is no match
JUDGES = {"gold": "the gold score", "judge": "the judge", "reward": "the {}"}


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


def only_length_headline(metrics: dict, policy: str) -> str | None:
    """Return one line that says that a policy only learnt length, by which evidence; None if nothing says so.

    Either its reward rose, but not between answers of equal length, or it is not above its control. For a policy that
    beats the model it started from: another one learnt not even length.
    """
    if policy not in metrics.get("length_control", {}):
        return None
    name, bins = display_name(policy), metrics["length_control"][policy]["within_bins"][policy]
    if change_direction(bins["gain"]) > 0 and bins["within"] and change_direction(bins["within"]) <= 0:
        return f"{name} only learnt length: at equal length nothing is gained"
    if change_direction(difference_to(metrics, policy, _control(policy))) > 0:
        return None
    return f"{name} only learnt length, as far as can be told: {display_name(CONTROLS[policy])} does as well"


def describe_length(metrics: dict, policy: str) -> list[str]:
    """Say how much of a policy's gain is at equal length, how it compares with its control, and who is preferred."""
    if policy not in metrics.get("length_control", {}):
        return []
    return [_describe_bins(metrics, policy), *_describe_control(metrics, policy),
            f"{', '.join(_list_preferences(metrics, policy))}."]


def list_length_rows(metrics: dict) -> list[list[str]]:
    """List [label, value] rows for the short table."""
    rows = []
    for policy in metrics.get("length_control", {}):
        name, control, measure = display_name(policy), CONTROLS[policy], judged_by(metrics, policy)
        rows += [[f"reward gain at equal length, {each}", _format_gain(metrics, policy, key)]
                 for key, each in ((policy, name), (control, display_name(control)))]
        scores = [mean_score(metrics["policies"][f"{each}{BEST}"], measure) for each in (control, policy)]
        rows += [[f"{measure} at best temperature, {display_name(control)} -> {name}",
                  format_change(*scores, difference_to(metrics, policy, _control(policy)))],
                 [f"KL to {find_wording(metrics['policies']).start}, nats a response, {display_name(control)}",
                  format_estimate(metrics["comparisons"][control]["kl_k1"], ".2f")]]
        rows += [[f"{name} preferred by {measure}, against {describe_policy(each, metrics['policies'])}",
                  _format_preference(metrics, policy, each)] for each in _list_opponents(metrics, policy)]
    return rows


def list_length_numbers(metrics: dict) -> dict[str, float]:
    """Return the numbers for the manifest."""
    numbers = {}
    for policy, length in metrics.get("length_control", {}).items():
        bins, above = length["within_bins"][policy], difference_to(metrics, policy, _control(policy))
        numbers |= flatten_estimates({"gain_at_equal_length": bins["within"], "share_at_equal_length": bins["share"],
                                      f"{judged_by(metrics, policy)}_above_length_control": above})
    return numbers


def _list_opponents(metrics: dict, policy: str) -> list[str]:
    """List whom a policy is compared with: SFT, its control and the largest best-of-n, each at its best temperature."""
    names = metrics["length_control"][policy]["preferred"]
    best_of_n = [name for name in cheaper_policies(names) if BEST_OF_N.fullmatch(name)]
    return [f"{start_model(names)}{BEST}", _control(policy), *best_of_n[-1:]]


def _control(policy: str) -> str:
    return f"{CONTROLS[policy]}{BEST}"


def _describe_bins(metrics: dict, policy: str) -> str:
    bins, wording = metrics["length_control"][policy]["within_bins"][policy], find_wording(metrics["policies"])
    name, gain = display_name(policy), format_estimate(bins["gain"], signed=True)
    if change_direction(bins["gain"]) <= 0:
        return f"{name}'s {wording.reward} did not rise, so that there is no gain to look for at equal length."
    if bins["within"] is None:
        return (f"No answer of {name} is about as long as one of {wording.start}: how much of its gain in "
                f"{wording.reward} ({gain}) is more than length is not known.")
    share = "" if bins["share"] is None else f", a share of {format_estimate(bins['share'], '.2f')}"
    return (f"Of the gain in {wording.reward} ({gain}), {format_estimate(bins['within'], signed=True)} is left "
            f"between answers of equal length{share}; {100 * bins['overlap']:.0f}\u00a0% of the answers are of a "
            f"length that both have.")


def _describe_control(metrics: dict, policy: str) -> Iterator[str]:
    control, name, policies = CONTROLS[policy], display_name(policy), metrics["policies"]
    difference = difference_to(metrics, policy, _control(policy))
    how = {1: "is better than", 0: "cannot be told apart from", -1: "is worse than"}[change_direction(difference)]
    kls = [metrics["comparisons"][each]["kl_k1"]["mean"] for each in (control, policy)]
    tokens = [policies[f"{each}{BEST}"]["response_tokens"] for each in (control, policy)]
    yield (f"{display_name(control)} (KL {kls[0]:.2f} nats, {tokens[0]:.0f} tokens an answer; {name} {kls[1]:.2f} and "
           f"{tokens[1]:.0f}) is the control: {name} {how} it in {_name_judge(metrics, policy).removeprefix('the ')} "
           f"({format_estimate(difference, signed=True)}).")
    if kls[0] < WEAK_SHARE * kls[1]:
        yield f"The control moved much less than {name}: a stronger one might do better."


def _list_preferences(metrics: dict, policy: str) -> Iterator[str]:
    start = f"{capitalise(_name_judge(metrics, policy))} prefers {display_name(policy)} to"
    for other in _list_opponents(metrics, policy):
        yield (f"{start} {describe_policy(other, metrics['policies'])} on "
               f"{_format_preference(metrics, policy, other)}")
        start = "to"


def _format_preference(metrics: dict, policy: str, other: str) -> str:
    measure, pairs = judged_by(metrics, policy), metrics["length_control"][policy]["preferred"][other]
    equal, count = pairs["equal_length"][measure], pairs["equal_length"]["pairs"]
    is_known = equal is not None and count >= MIN_PAIRS
    words = f"{format_estimate(equal)} of {count:.0f} pairs" if is_known else f"{count:.0f} pairs, too few to tell"
    return f"{format_estimate(pairs['all'][measure])} of the questions (at equal length: {words})"


def _format_gain(metrics: dict, policy: str, key: str) -> str:
    bins = metrics["length_control"][policy]["within_bins"][key]
    of_gain = f"of {format_estimate(bins['gain'], signed=True)}"
    if bins["within"] is None:
        return f"not known {of_gain}: the lengths do not overlap"
    share = "" if bins["share"] is None else f", share {format_estimate(bins['share'], '.2f')}"
    return f"{format_estimate(bins['within'], signed=True)} {of_gain}{share}"


def _name_judge(metrics: dict, policy: str) -> str:
    return JUDGES[judged_by(metrics, policy)].format(find_wording(metrics["policies"]).reward)
