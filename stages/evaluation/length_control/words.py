"""Say in words and in rows what a policy learnt beside length; metrics without a control give none.

`length_control` in the metrics is from PolicyComparison.compare.
"""

from collections.abc import Iterator

from stages.evaluation.summary import (
    BEST,
    BEST_OF_N,
    CONTROLS,
    capitalise,
    change_direction,
    describe_policy,
    difference_to,
    display_name,
    format_estimate,
    judged_by,
    mean_score,
    samples_per_answer,
)
from stages.evaluation.tasks.wording import find_wording

SCORES = ("gold", "judge", "reward")  # by which answers are preferred
MIN_PAIRS = 30  # of about equal length: of fewer, no share is shown
WEAK_SHARE = 0.5  # of the policy's KL: a control below it is no match
JUDGES = {"gold": "the gold score", "judge": "the judge", "reward": "the {}"}


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
        difference = format_estimate(difference_to(metrics, policy, _control(policy)), signed=True)
        rows += [[f"{measure} at best temperature, {display_name(control)} -> {name}",
                  f"{scores[0]:z.3f} -> {scores[1]:z.3f} (paired {difference})"],
                 [f"KL to {find_wording(metrics['policies']).start}, nats a response, {display_name(control)}",
                  format_estimate(metrics["comparisons"][control]["kl_k1"], ".2f")]]
        rows += [[f"{name} preferred by {measure}, against {describe_policy(each, metrics['policies'])}",
                  _format_preference(metrics, policy, each)] for each in list_opponents(metrics, policy)]
    return rows


def list_length_numbers(metrics: dict) -> dict[str, float]:
    """Return the numbers for the manifest."""
    numbers = {}
    for policy, length in metrics.get("length_control", {}).items():
        bins, above = length["within_bins"][policy], difference_to(metrics, policy, _control(policy))
        estimates = {"gain_at_equal_length": bins["within"], "share_at_equal_length": bins["share"],
                     f"{judged_by(metrics, policy)}_above_length_control": above}
        numbers |= {f"{name}{end and '_'}{end}": value[end or "mean"] for name, value in estimates.items() if value
                    for end in ("", "low", "high") if value[end or "mean"] is not None}
    return numbers


def list_opponents(metrics: dict, policy: str) -> list[str]:
    """List whom a policy is compared with: SFT, its control and the largest best-of-n, each at its best temperature."""
    names = list(metrics["length_control"][policy]["preferred"])
    start = next(name for name in names if name.endswith(BEST) and not BEST_OF_N.fullmatch(name))
    best_of_n = sorted((name for name in names if BEST_OF_N.fullmatch(name)),
                       key=lambda name: (samples_per_answer(name), name.endswith(BEST)))
    return [start, _control(policy), *best_of_n[-1:]]


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
    for other in list_opponents(metrics, policy):
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
