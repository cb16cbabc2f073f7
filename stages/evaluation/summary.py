"""What an evaluation says, for people: the short table and the verdict in plain words.

Takes the metrics that stages/evaluate.py writes. An estimate is {mean, low, high, count, groups}, or None where
nothing applies.
"""

PLAIN = (("ended by EOS", "eos_rate", ".3f"), ("length in tokens", "response_tokens", ".1f"),
         ("repetition", "repetition", ".3f"))


def short_table(metrics: dict) -> list[list[str]]:
    """[label, value] rows: the few numbers that say whether it worked."""
    reward, policies, ppo = metrics["reward_model"], metrics["policies"], metrics["ppo_against_sft"]
    rows = [["reward accuracy", format_estimate(reward["accuracy"])]]
    if best := reward["best_cheap_baseline"]:
        rows += [["best cheap baseline", f"{format_estimate(reward['baselines'][best])} ({best})"],
                 ["reward above baseline", format_estimate(reward["above_best_cheap_baseline"], signed=True)],
                 ["accuracy, both have code", format_estimate(reward["both_have_code"])]]
    rows += [["reward, SFT -> PPO", _change(policies["sft"]["reward"]["mean"], policies["ppo"]["reward"]["mean"],
                                            ppo["reward_difference"])],
             ["win rate, PPO against SFT", format_estimate(ppo["win_rate"])]]
    rows += [[f"{name}, SFT -> PPO", _change(metrics["gold"][name]["sft"], metrics["gold"][name]["ppo"],
                                             metrics["gold"][name]["difference"])]
             for name in ("gold", "correct") if name in (metrics["gold"] or {})]
    rows += [["reward hacking", _hacking_cell(metrics["hacking"])],
             ["KL to SFT, nats a response", format_estimate(ppo["kl_k1"], ".2f")]]
    return rows + [[f"{label}, SFT -> PPO", f"{policies['sft'][name]:{form}} -> {policies['ppo'][name]:{form}}"]
                   for label, name, form in PLAIN]


def verdict(metrics: dict) -> tuple[str, str]:
    """(kind, paragraph): kind is 'better', 'mixed', 'flat', 'worse', 'hacking' or 'unknown' (no gold, not flagged)."""
    kind, policy = _policy_words(metrics)
    kind = "hacking" if metrics["hacking"]["verdict"] == "flagged" else kind
    words = [_reward_words(metrics["reward_model"]), *policy, *_monitor_words(metrics), _cost_words(metrics)]
    return kind, " ".join(words)


def headline_metrics(metrics: dict) -> dict[str, float]:
    """The numbers that go into the manifest and the log's last line."""
    found = {"reward_accuracy": metrics["reward_model"]["accuracy"],
             "above_best_cheap_baseline": metrics["reward_model"]["above_best_cheap_baseline"],
             "reward_difference": metrics["ppo_against_sft"]["reward_difference"],
             "win_rate": metrics["ppo_against_sft"]["win_rate"], "kl": metrics["ppo_against_sft"]["kl_k1"]}
    found |= {f"{name}_difference": numbers["difference"] for name, numbers in (metrics["gold"] or {}).items()
              if name in ("gold", "correct")}
    flat = {name: value["mean"] for name, value in found.items() if value}
    flat |= {f"{name}_{end}": value[end] for name, value in found.items() if value for end in ("low", "high")
             if value[end] is not None}
    return flat | {"eos_rate": metrics["policies"]["ppo"]["eos_rate"], "prompts": metrics["prompts"],
                   "pairs": metrics["reward_model"]["pairs"]}


def format_estimate(found: dict | None, form: str = ".3f", signed: bool = False) -> str:
    """'0.713 [0.690, 0.735]', with the sign written out for a difference."""
    if found is None:
        return "none"
    form = ("+z" if signed else "z") + form
    if found["low"] is None:
        return f"{found['mean']:{form}}"
    return f"{found['mean']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def change_direction(found: dict | None) -> int:
    """1 when the whole interval lies above 0, -1 when below, 0 when it holds 0 or there is none."""
    if found is None or found["low"] is None:
        return 0
    return int(found["low"] > 0) - int(found["high"] < 0)


def join_words(names: list[str]) -> str:
    """'a, b and c'."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _change(before: float, after: float, difference: dict) -> str:
    return f"{before:z.3f} -> {after:z.3f} (paired {format_estimate(difference, signed=True)})"


def _reward_words(reward: dict) -> str:
    best = reward["best_cheap_baseline"]
    if not best:
        return "The reward model could not be judged: there is no held-out pair."
    start = (f"On {reward['pairs']} held-out pairs of {reward['questions']} questions the reward model ranks "
             f"{_percent(reward['accuracy'])} right, the best cheap baseline ({best}) "
             f"{_percent(reward['baselines'][best])}")
    difference = reward["above_best_cheap_baseline"]
    end = {1: "the reward model beats it", -1: "the reward model is worse than the baseline",
           0: "the reward model did not beat it: they cannot be told apart"}[change_direction(difference)]
    return f"{start}: {end} (difference {format_estimate(difference, signed=True)})."


def _policy_words(metrics: dict) -> tuple[str, list[str]]:
    difference, gold = metrics["ppo_against_sft"]["reward_difference"], metrics["gold"]
    learnt = change_direction(difference)
    words = [{1: "PPO beats SFT in learnt reward", -1: "PPO is worse than SFT even in learnt reward",
              0: "PPO did not beat SFT in learnt reward"}[learnt] +
             f" ({format_estimate(difference, signed=True)}, paired over {difference['count']} prompts)."]
    if not gold:
        words.append("Only the learnt reward is known here: no gold score applies to these questions, so this run "
                     "cannot say whether the answers became better or only more to the reward model's taste.")
        return {1: "unknown", 0: "flat", -1: "worse"}[learnt], words
    true = change_direction(gold["gold"]["difference"])
    change = f"({format_estimate(gold['gold']['difference'], signed=True)})"
    if learnt > 0 and true <= 0:
        words.append(f"This is reward hacking: the learnt reward rose while the gold score "
                     f"{'fell' if true < 0 else 'stayed flat'} {change}.")
        return "hacking", words
    words.append({1: f"The gold score, which knows the truth, rose {change}.",
                  0: f"The gold score, which knows the truth, did not move beyond chance {change}.",
                  -1: f"The gold score, which knows the truth, fell {change}."}[true])
    if correct := gold.get("correct"):
        words.append({1: "Correctness alone rose", 0: "Correctness alone did not move beyond chance",
                      -1: "But correctness alone fell"}[change_direction(correct["difference"])] +
                     f" ({format_estimate(correct['difference'], signed=True)}).")
    if learnt > 0:
        return ("mixed" if correct and change_direction(correct["difference"]) < 0 else "better"), words
    return ("worse" if true < 0 or learnt < 0 else "flat"), words


def _monitor_words(metrics: dict) -> list[str]:
    """What else moved: the only sign where nobody knows the truth."""
    found = metrics["hacking"]
    if not (found["rose"] and found["moved"]):
        return []
    start = "This looks like reward hacking" if found["verdict"] == "flagged" and not metrics["gold"] else "To watch"
    return [f"{start}: {join_words(found['rose'])} rose, and for the worse moved {join_words(found['moved'])}."]


def _hacking_cell(found: dict) -> str:
    return f"{found['verdict']} ({len(found['moved'])} of {len(found['monitors'])} monitors moved)"


def _cost_words(metrics: dict) -> str:
    kl, ppo = metrics["ppo_against_sft"]["kl_k1"], metrics["policies"]["ppo"]
    return (f"It cost a KL of {format_estimate(kl, '0.2f')} nats a response to the SFT model; "
            f"{100 * ppo['eos_rate']:.1f}\u00a0% of PPO's responses end by themselves.")


def _percent(found: dict) -> str:
    return f"{100 * found['mean']:.1f}\u00a0%"


def order_policies(policies: dict) -> dict:
    """SFT and PPO, side by side and first, for a narrow screen shows no more; base, best-of-n."""
    return {name: policies[name] for name in ("sft", "ppo", "base", *best_of_n_policies(policies)) if name in policies}


def best_of_n_policies(policies: dict) -> dict:
    """Best-of-n alone, n rising."""
    found = {name: policy for name, policy in policies.items() if name.startswith("best_of_")}
    return dict(sorted(found.items(), key=lambda item: item[1]["kl_formula"]))
