"""Summarise the metrics of an evaluation: names of policies, the short table and the headline metrics.

An estimate is {mean, low, high, count, groups}, or None where nothing applies.
"""

import re
from collections.abc import Iterable

from stages.evaluation.tasks.wording import find_wording, greedy_name, start_model
from stages.recipe.algorithms import ALGORITHMS

# How policies are called where people read; another policy is called by its name.
DISPLAY_NAMES = {"sft": "SFT", **{name: algorithm.title for name, algorithm in ALGORITHMS.items()},
                 "ppo-length": "PPO on length alone"}
CONTROLS = {"ppo": "ppo-length"}  # of a policy: the same training, paid for the length of the answers alone
# Further policies, stages and columns of samples.parquet, which a policy cannot be named after.
RESERVED_NAMES = re.compile(r"base|sft|human|samples|best_of_\d+|posts|pairs|reward|judge|evaluate|site|qid|question"
                            r"|url|authors|author_urls|licenses|(reward|gold|judge)_.*|(sft|base)_greedy|.*_best")
SAMPLES = "samples"  # several answers of SFT to each prompt, those of a prompt together: for best-of-n
BEST = "_best"  # end of the name of a policy at its best temperature
BEST_OF_N = re.compile(r"best_of_(\d+)(_best)?")
POINT_ROWS = (("ended by EOS", "eos_rate", ".3f"), ("length in tokens", "response_tokens", ".1f"),
              ("repetition", "repetition", ".3f"))
GOLD_ROWS = ("gold", "correct", "contested_correct", "complete")
NO_JUDGE = "no judge"  # verdict on reward hacking where neither gold nor a sound reward model judges the answers
HACKING_WORDS = {NO_JUDGE: "no judge: the reward model was not shown to beat a baseline"}  # in the short table
OWN_REWARD_ROW = ("the reward", "the one trained on: it cannot say whether answers are better than it knows")


def check_policy_names(names: Iterable[str]) -> None:
    """Raise ValueError, in one line, for a policy with a name that is taken."""
    for name in names:
        if RESERVED_NAMES.fullmatch(name):
            raise ValueError(f"--policy {name}=FOLDER: the name {name!r} is reserved; give the policy another one")


def display_name(policy: str) -> str:
    """Return the name of a policy for people: 'PPO', 'best of 4'."""
    return DISPLAY_NAMES.get(policy, policy.replace("_", " ") if policy.startswith("best_of_") else policy)


def short_table(metrics: dict) -> list[list[str]]:
    """List [label, value] rows: the few numbers that say whether it worked."""
    rows = _reward_model_rows(metrics["reward_model"]) if "reward_model" in metrics else [list(OWN_REWARD_ROW)]
    if not metrics["comparisons"]:
        return rows + _rows_without_policies(metrics)
    return rows + [row for policy in judged_policies(metrics) for row in _policy_rows(metrics, policy)]


def judged_policies(metrics: dict) -> list[str]:
    """List the trained policies that the run is about: without those that are controls of another."""
    controls = {CONTROLS.get(policy) for policy in metrics["comparisons"]}
    return [policy for policy in metrics["comparisons"] if policy not in controls]


def _reward_model_rows(reward: dict) -> list[list[str]]:
    rows = [["reward accuracy", format_estimate(reward["accuracy"])]]
    if best := reward["best_cheap_baseline"]:
        rows += [["best cheap baseline", f"{format_estimate(reward['baselines'][best])} ({best})"],
                 ["reward above baseline", format_estimate(reward["above_best_cheap_baseline"], signed=True)],
                 ["accuracy, both have code", format_estimate(reward["both_have_code"])]]
    return rows


def headline_metrics(metrics: dict) -> dict[str, float]:
    """Return the numbers for the manifest and the log's last line.

    Those of a policy bear its name in front (`dpo_win_rate`) where there are several.
    """
    comparisons, reward = metrics["comparisons"], metrics.get("reward_model")
    estimates = {"reward_accuracy": reward["accuracy"],
                 "above_best_cheap_baseline": reward["above_best_cheap_baseline"]} if reward else {}
    policies = judged_policies(metrics)
    prefixes = {policy: f"{policy}_" if len(policies) > 1 else "" for policy in policies}
    for policy, prefix in prefixes.items():
        comparison = comparisons[policy]
        estimates |= {f"{prefix}{name}": comparison[key] for name, key in (
            ("reward_difference", "reward_difference"), ("win_rate", "win_rate"), ("kl", "kl_k1"))}
        estimates |= {f"{prefix}{name}_difference": gain["difference"]
                      for name, gain in (comparison["gold"] or {}).items() if name in GOLD_ROWS}
        against = against_start(metrics["at_best"][policy])
        estimates[f"{prefix}attainable_share"] = (_read_attainable(metrics, policy) or {}).get("share")
        estimates |= {f"{prefix}{name}_difference_at_best": difference_at_best(against, name)
                      for name in ("reward", "judge", *GOLD_ROWS)}
    numbers = {name: value["mean"] for name, value in estimates.items() if value}
    numbers |= {f"{name}_{end}": value[end] for name, value in estimates.items() if value for end in ("low", "high")
                if value[end] is not None}
    numbers |= {f"{prefix}eos_rate": metrics["policies"][policy]["eos_rate"] for policy, prefix in prefixes.items()}
    return numbers | {"prompts": metrics["prompts"]} | ({"pairs": reward["pairs"]} if reward else {})


def format_estimate(estimate: dict | None, form: str = ".3f", signed: bool = False) -> str:
    """Format an estimate as '0.713 [0.690, 0.735]', with the sign written out for a difference."""
    if estimate is None:
        return "none"
    form = ("+z" if signed else "z") + form
    if estimate["low"] is None:
        return f"{estimate['mean']:{form}}"
    return f"{estimate['mean']:{form}} [{estimate['low']:{form}}, {estimate['high']:{form}}]"


def format_percent(estimate: dict) -> str:
    """Format the mean of a share as '71.3 %', without a line break."""
    return f"{100 * estimate['mean']:.1f}\u00a0%"


def change_direction(estimate: dict | None) -> int:
    """Return 1 when the whole interval lies above 0, -1 when below, 0 when it contains 0 or there is none."""
    if estimate is None or estimate["low"] is None:
        return 0
    return int(estimate["low"] > 0) - int(estimate["high"] < 0)


def join_words(words: list[str]) -> str:
    """Join as 'a, b and c'."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def capitalise(words: str) -> str:
    """Begin with a capital letter; the rest stays as it is."""
    return words[:1].upper() + words[1:]


def best_of_n_policies(policies: dict) -> dict:
    """Select best-of-n at the sampling temperature, by rising n."""
    names = [name for name in policies if BEST_OF_N.fullmatch(name) and not name.endswith(BEST)]
    return {name: policies[name] for name in sorted(names, key=samples_per_answer)}


def cheaper_policies(policies: Iterable[str]) -> list[str]:
    """List what needs no training beyond SFT: SFT, greedy and at its best temperature, then best-of-n by rising n."""
    best_of_n = sorted((name for name in policies if BEST_OF_N.fullmatch(name)),
                       key=lambda name: (name.endswith(BEST), samples_per_answer(name)))
    start = start_model(list(policies))
    return [name for name in (greedy_name(start), f"{start}{BEST}") if name in policies] + best_of_n


def samples_per_answer(policy: str) -> int:
    """Return the number of samples that an answer costs: n for best-of-n."""
    match = BEST_OF_N.fullmatch(policy)
    return int(match[1]) if match else 1


def describe_policy(policy: str, policies: dict) -> str:
    """Describe a policy with its temperature: 'SFT at temperature 0.1', 'best-of-4 of SFT at temperature 1'."""
    temperature = policies[policy]["temperature"]
    how = "with greedy decoding" if temperature == 0 else f"at temperature {temperature:g}"
    if BEST_OF_N.fullmatch(policy):
        return f"best-of-{samples_per_answer(policy)} of {find_wording(policies).start} {how}"
    start = start_model(policies)
    return f"{display_name(start if policy == greedy_name(start) else policy.removesuffix(BEST))} {how}"


def against_start(against: dict) -> dict:
    """Return the differences of a policy minus the model it started from, each at its best; against: of at_best."""
    return against[f"{start_model(against)}{BEST}"]


def strongest_best_of_n(against: dict) -> str | None:
    """Return the best-of-n, of any n and temperature, that a policy compares worst with; None without best-of-n.

    Of equal ones the largest n counts. against: an entry of at_best.
    """
    names = [name for name in cheaper_policies(against) if BEST_OF_N.fullmatch(name)]
    measure = choose_measure(against_start(against))
    return min(reversed(names), key=lambda name: difference_at_best(against[name], measure)["mean"], default=None)


def choose_measure(against: dict) -> str:
    """Choose what a policy at its best is judged by: 'gold', else 'judge', else 'reward'; against: an entry of at_best.

    Nothing but gold knows the truth. A judge is a reward model that nothing was trained on or chosen by.
    """
    return "gold" if "gold" in against["gold"] else "judge" if against["judge"] else "reward"


def judged_by(metrics: dict, policy: str) -> str:
    """Return what a policy at its best is judged by; see choose_measure."""
    return choose_measure(against_start(metrics["at_best"][policy]))


def difference_to(metrics: dict, policy: str, other: str) -> dict | None:
    """Return the paired difference of a policy minus another one, each at its best, in what the policy is judged by."""
    return difference_at_best(metrics["at_best"][policy][other], judged_by(metrics, policy))


def choose_measure_of_sft(metrics: dict) -> str:
    """Choose what SFT at its best is judged by: as the policies that are compared with it or, without one, likewise."""
    if metrics["at_best"]:
        return judged_by(metrics, next(iter(metrics["at_best"])))
    return "gold" if knows_gold(metrics) else "judge" if metrics["policies"][f"sft{BEST}"]["judge"] else "reward"


def knows_gold(metrics: dict) -> bool:
    """Check whether a gold score applies to any question that policies answered."""
    return bool(metrics["policies"][start_model(metrics["policies"])]["gold"]) or any(
        comparison["gold"] for comparison in metrics["comparisons"].values())


def mean_score(policy: dict, measure: str) -> float:
    """Return a policy's mean reward, judge's score or gold score."""
    return policy[measure]["mean"] if measure in ("judge", "reward") else policy["gold_scores"][measure]


def difference_at_best(against: dict, measure: str) -> dict | None:
    """Return the paired difference in gold, judge or reward, or in a further gold score; None where there is none."""
    return against[measure] if measure in ("judge", "reward") else against["gold"].get(measure)


def _policy_rows(metrics: dict, policy: str) -> list[list[str]]:
    policies, comparison = metrics["policies"], metrics["comparisons"][policy]
    start = start_model(policies)
    sft, tuned, before = policies[start], policies[policy], display_name(start)
    name, gold = display_name(policy), comparison["gold"] or {}
    of_policy = f", {name}" if len(judged_policies(metrics)) > 1 else ""
    hacking = metrics["hacking"][policy]
    verdict = HACKING_WORDS.get(hacking["verdict"], hacking["verdict"])
    attainable = _read_attainable(metrics, policy)
    at = f"at temperature {sft['temperature']:g}"
    rows = [*_rows_at_best(metrics, policy), *_rows_of_scores(metrics, policy)]
    rows += [[f"reward {at}, {before} -> {name}",
              format_change(sft["reward"]["mean"], tuned["reward"]["mean"], comparison["reward_difference"])],
             [f"win rate {at}, {name} against {before}", format_estimate(comparison["win_rate"])]]
    if attainable:
        rows += [[f"share of the attainable objective {at}, {name}",
                  _format_share(attainable, metrics["attainable"]["samples"])]]
    if "gold" in gold:
        rows += [[f"gold {at}, {before} -> {name}",
                  format_change(gold["gold"][start], gold["gold"]["policy"], gold["gold"]["difference"])]]
    rows += [[f"reward hacking{of_policy}",
              f"{verdict} ({len(hacking['moved'])} of {len(hacking['monitors'])} monitors moved)"],
             [f"KL to {before}, nats a response{of_policy}", format_estimate(comparison["kl_k1"], ".2f")]]
    return rows + [[f"{label}, {before} -> {name}", f"{sft[key]:{form}} -> {tuned[key]:{form}}"]
                   for label, key, form in POINT_ROWS]


def _rows_without_policies(metrics: dict) -> list[list[str]]:
    """List the scores of SFT and of its best-of-n, at the sampling temperature and at the best one."""
    policies = metrics["policies"]
    names = ["sft", *best_of_n_policies(policies), *(n for n in cheaper_policies(policies) if n.endswith(BEST))]
    return [[f"{measure}, {describe_policy(name, policies)}", format_estimate(policies[name][measure])]
            for measure in ("gold", "judge", "reward") for name in names if policies[name][measure]]


def _rows_at_best(metrics: dict, policy: str) -> list[list[str]]:
    """List what is compared at best temperatures: with SFT by every score shown; by one, greedy SFT and best-of-n."""
    policies, against, name = metrics["policies"], metrics["at_best"][policy], display_name(policy)
    start, measure, differences = start_model(policies), judged_by(metrics, policy), against_start(against)
    sft, tuned, before = policies[f"{start}{BEST}"], policies[f"{policy}{BEST}"], display_name(start)
    shown = [key for key in GOLD_ROWS if key in differences["gold"]] if measure == "gold" else [measure]
    shown = list(dict.fromkeys([*([] if "reward_model" in metrics else ["reward"]), *shown]))
    first = f"at best temperature, {before} (T {sft['temperature']:g}) -> {name} (T {tuned['temperature']:g})"
    labels = [first, *[f"at best temperature, {before} -> {name}"] * (len(shown) - 1)]
    rows = [[f"{key} {label}",
             format_change(mean_score(sft, key), mean_score(tuned, key), difference_at_best(differences, key))]
            for key, label in zip(shown, labels, strict=True)]
    of_policy = f", against {name}" if len(judged_policies(metrics)) > 1 else ""
    others = [each for each in (greedy_name(start), strongest_best_of_n(against))
              if each and describe_policy(each, policies) != describe_policy(f"{start}{BEST}", policies)]
    return rows + [[f"{measure}, {describe_policy(each, policies)}{of_policy}",
                    f"{mean_score(policies[each], measure):z.3f} ({name} minus it: "
                    f"{format_estimate(difference_to(metrics, policy, each), signed=True)})"] for each in others]


def _rows_of_scores(metrics: dict, policy: str) -> list[list[str]]:
    """List the parts of a user's own reward, and the scores that training never saw, at best temperatures."""
    policies, start = metrics["policies"], start_model(metrics["policies"])
    rows = []
    for score, difference in against_start(metrics["at_best"][policy]).get("scores", {}).items():
        before, after = (policies[f"{each}{BEST}"]["scores"][score]["mean"] for each in (start, policy))
        unseen = " (never seen in training)" if score in metrics["unseen_scores"] else ""
        rows.append([f"{score}{unseen} at best temperature, {display_name(start)} -> {display_name(policy)}",
                     format_change(before, after, difference)])
    return rows


def _read_attainable(metrics: dict, policy: str) -> dict | None:
    """Read how a policy compares with its optimum; None where the evaluation does not know, or is older."""
    return (metrics.get("attainable") or {"policies": {}})["policies"].get(policy)


def _format_share(attainable: dict, samples: int) -> str:
    """Format a policy's share of the optimum, and say how far the estimate of the optimum can be trusted."""
    if attainable["share"] is None:
        return f"not defined: the {samples} samples of every question have the same reward"
    words = "settled" if attainable["optimum"]["settled"] else "which still rises with their number"
    extrapolated = attainable.get("share_extrapolated")  # an older evaluation has none
    further = f"; extrapolated to many, {format_estimate(extrapolated)}" if extrapolated else ""
    return f"{format_estimate(attainable['share'])} (of an optimum estimated from {samples} samples, {words}{further})"


def format_change(before: float, after: float, difference: dict) -> str:
    """Format two means and their paired difference: '0.100 -> 0.600 (paired +0.500 [+0.480, +0.520])'."""
    return f"{before:z.3f} -> {after:z.3f} (paired {format_estimate(difference, signed=True)})"
