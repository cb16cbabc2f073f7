"""The verdict: 'better' is said only of a policy that beats SFT, each at its best, by a score it did not train on."""

import copy

import pytest

from stages.evaluation import summary, verdict
from stages.reporting.headline import build_verdicts, describe_hacking
from stages.reporting.policy_section import order_policies
from tests.helpers.finished_run import around, differences, metrics, with_summary

EQUAL = around(0.0)


def against(**instead: dict) -> dict:
    """Differences of 0.3 in gold to everything, but to the policies named."""
    rows = differences()
    for name, gold in instead.items():
        rows[name]["gold"]["gold"] = gold
    return rows


def judged(reward: float, judge: float) -> dict:
    """Metrics without gold, with a judge."""
    return metrics(0.5, None, at_best=differences(reward, None, judge=judge))


def headline(numbers: dict) -> str:
    manifests = {name: {"metrics": {}, "seconds": 1.0, "peak_memory_mib": 1, "device": "cpu", "config": {}}
                 for name in ("posts", "pairs", "base")}
    return build_verdicts(numbers, manifests, [])[0].headline


@pytest.mark.parametrize(("numbers", "kind", "line", "says"), [
    (metrics(), "better", "PPO made the answers better", (
        "Each at its best temperature (SFT 0.1, PPO 0.3; chosen by the learnt reward on 64 other held-out questions), "
        "PPO beats SFT in the gold score, which knows the truth (+0.300 [+0.280, +0.320], paired over 128 questions).",
        "Correctness alone rose (+0.100", "At temperature 1 PPO beats SFT in learnt reward (+0.500",
        "Best-of-4 of SFT at temperature 0.1, at 4 times the cost an answer, does worse (PPO minus it: +0.300")),
    (metrics(at_best=against(sft_best=EQUAL)), "flat", "SFT at temperature 0.1 does as well as PPO", (
        "PPO and SFT cannot be told apart in the gold score", "and the gold score rose (+0.300")),
    (metrics(at_best=against(sft_best=around(-0.2))), "worse", "SFT at temperature 0.1 does better than PPO", (
        "PPO is worse than SFT in the gold score",)),
    (metrics(at_best=against(sft_greedy=EQUAL)), "flat", "SFT with greedy decoding does as well as PPO", (
        "PPO beats SFT in the gold score",)),
    (metrics(at_best=against(best_of_4_best=EQUAL)), "better", "PPO made the answers better", (
        "Best-of-4 of SFT at temperature 0.1, at 4 times the cost an answer, does as well (PPO minus it: +0.000",)),
    (metrics(at_best=against(best_of_4_best=around(-0.1))), "better", "PPO made the answers better", (
        "at 4 times the cost an answer, does better (PPO minus it: -0.100",)),
    (judged(0.5, 0.3), "better", "PPO made the answers better, says a held-out reward model", (
        "PPO beats SFT in the scores of a held-out reward model, of another seed and other questions, that ranks "
        "70.0\u00a0% of the held-out pairs right (no gold score applies) (+0.300",)),
    (judged(0.5, 0.0), "flat", "SFT at temperature 0.1 does as well as PPO, says a held-out reward model", (
        "PPO and SFT cannot be told apart in the scores of a held-out reward model",)),
    (metrics(0.5, None), "unknown", "PPO raised the learnt reward; nothing else is known", (
        "PPO beats SFT in learnt reward", "Only the learnt reward is known")),
    (metrics(0.5, None, at_best=differences(0.0, None)), "flat", "SFT at temperature 0.1 does as well as PPO", (
        "PPO and SFT cannot be told apart in learnt reward", "At temperature 1 PPO beats SFT in learnt reward")),
    (metrics(0.5, 0.0), "hacking", "Reward hacking by PPO", ("This is reward hacking", "stayed flat")),
    (metrics(0.5, -0.3), "hacking", "Reward hacking by PPO", ("This is reward hacking", "fell")),
    (metrics(0.5, -0.3, at_best=differences()), "hacking", "Reward hacking by PPO", ("PPO beats SFT in the gold",)),
    (metrics(0.0, 0.0), "flat", "SFT at temperature 0.1 does as well as PPO", (
        "did not beat SFT in learnt reward", "and the gold score did not move beyond chance")),
    (metrics(-0.5, -0.3), "worse", "SFT at temperature 0.1 does better than PPO", (
        "worse than SFT even in learnt reward", "and the gold score fell")),
    (metrics(0.5, 0.3, correct=-0.1), "mixed", "PPO raised the gold score, but correctness fell", (
        "But correctness alone fell",)),
])
def test_the_verdict(numbers, kind, line, says):
    given, words = verdict.policy_verdict(numbers, "ppo")
    assert (given, headline(numbers)) == (kind, line)
    assert not [text for text in says if text not in words], words
    assert ("This is reward hacking" in words or kind != "hacking") or numbers["at_best"]["ppo"] == differences()
    assert (kind == "hacking") == (numbers["hacking"]["ppo"]["verdict"] == "flagged")
    assert "KL of 2.50 [2.48, 2.52] nats" in words and "98.0\u00a0%" in words


def test_monitors_decide_where_no_gold_is_known():
    numbers = metrics(gold=None)
    numbers["comparisons"]["ppo"]["changes"] |= {"repetition": around(0.4), "code_fences": around(3.0)}
    assert verdict.policy_verdict(with_summary(numbers), "ppo")[0] == "hacking"
    assert "2 of 10 monitors moved for the worse (repetition, share" in describe_hacking(with_summary(numbers), "ppo")
    assert dict(with_summary(numbers)["table"])["reward hacking"] == "flagged (2 of 10 monitors moved)"
    numbers["comparisons"]["ppo"]["changes"] |= {"code_fences": around(0.0)}
    kind, words = verdict.policy_verdict(with_summary(numbers), "ppo")
    assert kind == "unknown" and "reward hacking" not in words


def test_an_interval_of_one_question_decides_nothing():
    numbers = copy.deepcopy(metrics())
    numbers["comparisons"]["ppo"]["reward_difference"] |= {"low": None, "high": None}
    assert "did not beat SFT" in verdict.policy_verdict(numbers, "ppo")[1]
    numbers = copy.deepcopy(metrics())
    numbers["at_best"]["ppo"]["sft_best"]["gold"]["gold"] |= {"low": None, "high": None}
    assert verdict.policy_verdict(numbers, "ppo")[0] == "flat"


def test_without_best_of_n_nothing_is_said_of_it():
    numbers = metrics(at_best={name: row for name, row in differences().items() if name.startswith("sft")})
    assert "est-of" not in verdict.policy_verdict(numbers, "ppo")[1]
    assert not [label for label, _ in numbers["table"] if "best-of" in label]


def test_the_short_table_begins_with_the_comparison_at_best():
    labels = [label for label, _ in metrics()["table"]]
    rows = dict(metrics()["table"])
    assert labels[4:8] == [
        "gold at best temperature, SFT (T 0.1) -> PPO (T 0.3)", "correct at best temperature, SFT -> PPO",
        "gold, SFT with greedy decoding", "gold, best-of-4 of SFT at temperature 0.1"]
    assert labels[8:11] == ["reward at temperature 1, SFT -> PPO", "win rate at temperature 1, PPO against SFT",
                            "gold at temperature 1, SFT -> PPO"]
    assert rows[labels[4]] == "1.250 -> 1.250 (paired +0.300 [+0.280, +0.320])"
    assert rows[labels[7]] == "1.250 (PPO minus it: +0.300 [+0.280, +0.320])"
    for numbers, measure in ((judged(0.5, 0.3), "judge"), (metrics(gold=None), "reward")):
        assert numbers["table"][4][0] == f"{measure} at best temperature, SFT (T 0.1) -> PPO (T 0.3)"


def test_the_headline_metrics_have_the_differences_at_best():
    numbers = summary.headline_metrics(metrics())
    assert (numbers["gold_difference_at_best"], numbers["correct_difference_at_best"]) == (0.3, 0.1)
    assert numbers["gold_difference_at_best_low"] == pytest.approx(0.28) and "judge_difference_at_best" not in numbers


def test_policies_are_ordered_and_named():
    names = ["best_of_16_best", "ppo", "best_of_16", "sft_best", "best_of_2", "sft_greedy", "sft", "base", "ppo_best"]
    assert list(order_policies(dict.fromkeys(names))) == ["sft", "ppo", "base", "best_of_2", "best_of_16"]
    assert summary.cheaper_policies(names) == ["sft_greedy", "sft_best", "best_of_2", "best_of_16", "best_of_16_best"]
    assert [summary.samples_per_answer(name) for name in ("sft_best", "best_of_2", "best_of_16_best")] == [1, 2, 16]
    with pytest.raises(ValueError, match="reserved"):
        summary.check_policy_names(["mine_best"])


def test_the_strongest_best_of_n_is_named_whatever_its_n_and_temperature():
    rows = against(best_of_4=around(-1.0), best_of_4_best=around(-0.2))
    assert summary.strongest_best_of_n(rows) == "best_of_4"
    rows = against(best_of_4=around(-0.1), best_of_4_best=around(-0.2))
    assert summary.strongest_best_of_n(rows) == "best_of_4_best"
    numbers = with_summary(metrics(at_best=against(best_of_4=around(-1.0), best_of_4_best=around(-0.2))))
    assert "does better (PPO minus it: -1.000" in verdict.policy_verdict(numbers, "ppo")[1]
