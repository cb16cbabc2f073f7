"""Summarise the metrics of an evaluation: the short table, the headline metrics and the verdicts in plain words.

An estimate is {mean, low, high, count, groups}, or None where nothing applies.
"""

import re
from collections.abc import Iterable

# How policies are called where people read; another policy is called by its name.
DISPLAY_NAMES = {"sft": "SFT", "ppo": "PPO", "dpo": "DPO", "rloo": "RLOO", "grpo": "GRPO", "ilql": "ILQL"}
# Further policies, stages and columns of samples.parquet, which a policy cannot be named after.
RESERVED_NAMES = re.compile(r"base|sft|human|samples|best_of_\d+|posts|pairs|reward|evaluate|site|qid|question|url"
                            r"|authors|(reward|gold)_.*")
POINT_ROWS = (("ended by EOS", "eos_rate", ".3f"), ("length in tokens", "response_tokens", ".1f"),
              ("repetition", "repetition", ".3f"))
GOLD_ROWS = ("gold", "correct")
NO_JUDGE = "no judge"  # verdict on reward hacking where neither gold nor a sound reward model judges the answers
HACKING_WORDS = {NO_JUDGE: "no judge: nobody judged the answers"}  # in the short table


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
    reward = metrics["reward_model"]
    rows = [["reward accuracy", format_estimate(reward["accuracy"])]]
    if best := reward["best_cheap_baseline"]:
        rows += [["best cheap baseline", f"{format_estimate(reward['baselines'][best])} ({best})"],
                 ["reward above baseline", format_estimate(reward["above_best_cheap_baseline"], signed=True)],
                 ["accuracy, both have code", format_estimate(reward["both_have_code"])]]
    return rows + [row for policy in metrics["comparisons"] for row in _policy_rows(metrics, policy)]


def reward_model_verdict(reward: dict) -> str:
    """Say whether the reward model beats the best cheap baseline."""
    best = reward["best_cheap_baseline"]
    if not best:
        return "The reward model could not be judged: there is no held-out pair."
    start = (f"On {reward['pairs']:,} held-out pairs of {reward['questions']:,} questions the reward model ranks "
             f"{_percent(reward['accuracy'])} right, the best cheap baseline ({best}) "
             f"{_percent(reward['baselines'][best])}")
    difference = reward["above_best_cheap_baseline"]
    end = {1: "the reward model beats it", -1: "the reward model is worse than the baseline",
           0: "the reward model did not beat it: the two cannot be told apart"}[change_direction(difference)]
    return f"{start}: {end} (difference {format_estimate(difference, signed=True)})."


def policy_verdict(metrics: dict, policy: str) -> tuple[str, str]:
    """Say whether a policy is better than SFT, and at what cost.

    Returns (kind, paragraph); kind is 'better', 'mixed', 'flat', 'worse', 'hacking', 'no-judge' or 'unknown' (no gold,
    not flagged).
    """
    kind, words = _reward_and_gold(metrics["comparisons"][policy], display_name(policy))
    kind = {"flagged": "hacking", NO_JUDGE: "no-judge"}.get(metrics["hacking"][policy]["verdict"], kind)
    return kind, " ".join([*words, *_moved_monitors(metrics, policy), _cost(metrics, policy)])


def headline_metrics(metrics: dict) -> dict[str, float]:
    """Return the numbers for the manifest and the log's last line.

    Those of a policy bear its name in front (`dpo_win_rate`) where there are several.
    """
    comparisons, reward = metrics["comparisons"], metrics["reward_model"]
    estimates = {"reward_accuracy": reward["accuracy"],
                 "above_best_cheap_baseline": reward["above_best_cheap_baseline"]}
    prefixes = {policy: f"{policy}_" if len(comparisons) > 1 else "" for policy in comparisons}
    for policy, prefix in prefixes.items():
        comparison = comparisons[policy]
        estimates |= {f"{prefix}{name}": comparison[key] for name, key in (
            ("reward_difference", "reward_difference"), ("win_rate", "win_rate"), ("kl", "kl_k1"))}
        estimates |= {f"{prefix}{name}_difference": gain["difference"]
                      for name, gain in (comparison["gold"] or {}).items() if name in GOLD_ROWS}
    numbers = {name: value["mean"] for name, value in estimates.items() if value}
    numbers |= {f"{name}_{end}": value[end] for name, value in estimates.items() if value for end in ("low", "high")
                if value[end] is not None}
    numbers |= {f"{prefix}eos_rate": metrics["policies"][policy]["eos_rate"] for policy, prefix in prefixes.items()}
    return numbers | {"prompts": metrics["prompts"], "pairs": reward["pairs"]}


def format_estimate(estimate: dict | None, form: str = ".3f", signed: bool = False) -> str:
    """Format an estimate as '0.713 [0.690, 0.735]', with the sign written out for a difference."""
    if estimate is None:
        return "none"
    form = ("+z" if signed else "z") + form
    if estimate["low"] is None:
        return f"{estimate['mean']:{form}}"
    return f"{estimate['mean']:{form}} [{estimate['low']:{form}}, {estimate['high']:{form}}]"


def change_direction(estimate: dict | None) -> int:
    """Return 1 when the whole interval lies above 0, -1 when below, 0 when it contains 0 or there is none."""
    if estimate is None or estimate["low"] is None:
        return 0
    return int(estimate["low"] > 0) - int(estimate["high"] < 0)


def join_words(words: list[str]) -> str:
    """Join as 'a, b and c'."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def order_policies(policies: dict) -> dict:
    """Order as SFT, trained policies, base, best-of-n: a narrow screen shows the first columns only."""
    best_of_n = best_of_n_policies(policies)
    trained = [name for name in policies if name not in ("sft", "base", *best_of_n)]
    return {name: policies[name] for name in ("sft", *trained, "base", *best_of_n) if name in policies}


def best_of_n_policies(policies: dict) -> dict:
    """Select best-of-n, by rising n."""
    selected = {name: policy for name, policy in policies.items() if name.startswith("best_of_")}
    return dict(sorted(selected.items(), key=lambda item: item[1]["kl_formula"]))


def _policy_rows(metrics: dict, policy: str) -> list[list[str]]:
    sft, tuned, comparison = metrics["policies"]["sft"], metrics["policies"][policy], metrics["comparisons"][policy]
    name, gold = display_name(policy), comparison["gold"] or {}
    of_policy = f", {name}" if len(metrics["comparisons"]) > 1 else ""
    hacking = metrics["hacking"][policy]
    verdict = HACKING_WORDS.get(hacking["verdict"], hacking["verdict"])
    rows = [[f"reward, SFT -> {name}",
             _change(sft["reward"]["mean"], tuned["reward"]["mean"], comparison["reward_difference"])],
            [f"win rate, {name} against SFT", format_estimate(comparison["win_rate"])]]
    rows += [[f"{key}, SFT -> {name}", _change(gold[key]["sft"], gold[key]["policy"], gold[key]["difference"])]
             for key in GOLD_ROWS if key in gold]
    rows += [[f"reward hacking{of_policy}",
              f"{verdict} ({len(hacking['moved'])} of {len(hacking['monitors'])} monitors moved)"],
             [f"KL to SFT, nats a response{of_policy}", format_estimate(comparison["kl_k1"], ".2f")]]
    return rows + [[f"{label}, SFT -> {name}", f"{sft[key]:{form}} -> {tuned[key]:{form}}"]
                   for label, key, form in POINT_ROWS]


def _change(before: float, after: float, difference: dict) -> str:
    return f"{before:z.3f} -> {after:z.3f} (paired {format_estimate(difference, signed=True)})"


def _reward_and_gold(comparison: dict, name: str) -> tuple[str, list[str]]:
    difference, gold = comparison["reward_difference"], comparison["gold"]
    reward_change = change_direction(difference)
    words = [{1: f"{name} beats SFT in learnt reward", -1: f"{name} is worse than SFT even in learnt reward",
              0: f"{name} did not beat SFT in learnt reward"}[reward_change] +
             f" ({format_estimate(difference, signed=True)}, paired over {difference['count']} prompts)."]
    if not gold:
        words.append("Only the learnt reward is known here: no gold score applies to these questions, so this run "
                     "cannot say whether the answers became better or only more to the reward model's taste.")
        return {1: "unknown", 0: "flat", -1: "worse"}[reward_change], words
    gold_change = change_direction(gold["gold"]["difference"])
    change = f"({format_estimate(gold['gold']['difference'], signed=True)})"
    if reward_change > 0 and gold_change <= 0:
        words.append(f"This is reward hacking: the learnt reward rose while the gold score "
                     f"{'fell' if gold_change < 0 else 'stayed flat'} {change}.")
        return "hacking", words
    words.append({1: f"The gold score, which knows the truth, rose {change}.",
                  0: f"The gold score, which knows the truth, did not move beyond chance {change}.",
                  -1: f"The gold score, which knows the truth, fell {change}."}[gold_change])
    if correct := gold.get("correct"):
        words.append({1: "Correctness alone rose", 0: "Correctness alone did not move beyond chance",
                      -1: "But correctness alone fell"}[change_direction(correct["difference"])] +
                     f" ({format_estimate(correct['difference'], signed=True)}).")
    if reward_change > 0:
        return ("mixed" if correct and change_direction(correct["difference"]) < 0 else "better"), words
    return ("worse" if gold_change < 0 or reward_change < 0 else "flat"), words


def _moved_monitors(metrics: dict, policy: str) -> list[str]:
    """Say which monitors moved: the only sign of hacking where no gold score is known."""
    hacking, gold = metrics["hacking"][policy], metrics["comparisons"][policy]["gold"]
    if not (hacking["rose"] and hacking["moved"]):
        return []
    start = "This looks like reward hacking" if hacking["verdict"] == "flagged" and not gold else "To watch"
    return [f"{start}: {join_words(hacking['rose'])} rose, and {join_words(hacking['moved'])} moved for the worse."]


def _cost(metrics: dict, policy: str) -> str:
    kl, eos_rate = metrics["comparisons"][policy]["kl_k1"], metrics["policies"][policy]["eos_rate"]
    return (f"It cost a KL of {format_estimate(kl, '0.2f')} nats a response to the SFT model; "
            f"{100 * eos_rate:.1f}\u00a0% of {display_name(policy)}'s responses end by themselves.")


def _percent(estimate: dict) -> str:
    return f"{100 * estimate['mean']:.1f}\u00a0%"
