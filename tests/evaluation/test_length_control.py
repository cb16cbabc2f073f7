"""What a policy learnt beside length: gains within bins and preferences at equal length, against plain loops; words."""

import copy
import html
import json
import re
import shutil
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaForSequenceClassification

from stages import evaluate
from stages.evaluation import summary, verdict
from stages.evaluation.length_bins import BINS, compare_answers, gain_within_bins
from stages.evaluation.statistics import bootstrap_statistic
from stages.generation.best_of_n import best_of_n_weights
from stages.recipe.sections.evaluate import Report
from stages.recipe.variants import LENGTH_CONTROL
from stages.reporting.headline import policy_headline
from tests.helpers import finished_run, tiny_evaluation
from tests.helpers.finished_run import around, differences, metrics

estimate = partial(bootstrap_statistic, samples=300, seed=0)
CONTROL = LENGTH_CONTROL.name


def answers(reward, seed: int = 0, questions: int = 400, mean: float = 60.0) -> dict[str, np.ndarray]:
    """Answers of some 60 tokens; reward: a function of their lengths and of noise."""
    generator = np.random.default_rng(seed)
    tokens = np.clip(generator.normal(mean, 20, questions), 5, 128).round()
    return {"tokens": tokens, "reward": reward(tokens, generator.normal(size=questions))}


# --- gain within bins ----------------------------------------------------------------------------------------------


def test_a_gain_that_is_length_alone_is_not_within_bins():
    def reward(tokens, noise):
        return tokens / 20 + 0.5 * noise

    bins = gain_within_bins(answers(reward), answers(reward, seed=1, mean=80.0), estimate)
    assert bins["gain"]["low"] > 0.7
    assert abs(bins["share"]["mean"]) < 0.1 and bins["within"]["low"] < 0 < bins["within"]["high"]


def test_a_gain_that_ignores_length_is_within_bins():
    better = gain_within_bins(answers(lambda _, noise: noise), answers(lambda _, noise: noise + 1, 1, mean=80.0),
                              estimate)
    assert better["share"]["mean"] == pytest.approx(1, abs=0.1)
    assert better["within"]["low"] > 0.7 and 0.9 < better["overlap"] <= 1


def test_half_of_a_gain_is_within_bins_where_half_is_length():
    both = gain_within_bins(answers(lambda tokens, noise: tokens / 20 + 0.3 * noise),
                            answers(lambda tokens, noise: tokens / 20 + 0.3 * noise + 1, 1, mean=80.0), estimate)
    assert both["share"]["low"] < 0.5 < both["share"]["high"] and both["share"]["mean"] == pytest.approx(0.5, abs=0.06)


def test_the_gain_within_bins_against_a_plain_loop():
    before, after = answers(lambda tokens, noise: tokens / 40 + noise, 2), answers(
        lambda tokens, noise: tokens / 30 + noise, 3, mean=75.0)
    result = gain_within_bins(before, after, estimate)
    pooled = sorted([*before["tokens"], *after["tokens"]])
    edges = sorted({float(np.quantile(pooled, k / BINS)) for k in range(1, BINS)})
    total, weight, rows = 0.0, 0, []
    for low, high in zip([float("-inf"), *edges], [*edges, float("inf")], strict=True):
        inside = [[reward for tokens, reward in zip(side["tokens"], side["reward"], strict=True)
                   if low <= tokens < high] for side in (before, after)]
        if all(inside):
            count = len(inside[0]) + len(inside[1])
            difference = sum(inside[1]) / len(inside[1]) - sum(inside[0]) / len(inside[0])
            total, weight = total + count * difference, weight + count
            rows.append((len(inside[0]), len(inside[1]), pytest.approx(difference)))
    assert result["within"]["mean"] == pytest.approx(total / weight)
    gain = sum(after["reward"]) / 400 - sum(before["reward"]) / 400
    assert result["share"]["mean"] == pytest.approx(total / weight / gain)
    assert [(row["before"], row["after"], row["difference"]) for row in result["bins"]
            if row["difference"] is not None] == rows
    assert len(rows) >= 15 and result["overlap"] == pytest.approx(weight / 800)
    assert result["within"]["low"] < result["within"]["mean"] < result["within"]["high"]


def test_lengths_that_do_not_overlap_leave_the_gain_within_bins_unknown():
    short, long = ({"tokens": np.full(40, tokens), "reward": np.arange(40.0) + tokens} for tokens in (10.0, 100.0))
    bins = gain_within_bins(short, long, estimate)
    assert bins["within"] is None and bins["share"] is None and bins["overlap"] == 0
    assert [row["tokens"] for row in bins["bins"]] == [[10, 10], [100, 100]]
    assert [row["difference"] for row in bins["bins"]] == [None, None]


def test_without_a_gain_there_is_no_share():
    same = answers(lambda _, noise: noise)
    assert gain_within_bins(same, same, estimate)["share"] is None
    assert gain_within_bins(same, same, estimate)["within"]["mean"] == 0


# --- preferences ---------------------------------------------------------------------------------------------------


def sampled(seed: int, questions: int = 60, each: int = 1) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    columns = {name: generator.normal(size=questions * each).round(1) for name in ("reward", "judge", "gold")}
    gold = columns["gold"].reshape(questions, each)
    gold[::7] = np.nan  # the gold scorer does not know these questions
    return columns | {"tokens": generator.integers(20, 40, questions * each).astype(float)}


@pytest.mark.parametrize(("each", "n"), [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_preferences_against_a_plain_loop(each, n):
    policy, other = sampled(0), sampled(1, each=each)
    weights = best_of_n_weights(other["reward"].reshape(60, each), n)
    actual = compare_answers(policy, other, weights, estimate)
    for score in ("reward", "judge", "gold"):
        wins, pairs = {"all": 0.0, "equal_length": 0.0}, {"all": 0.0, "equal_length": 0.0}
        for question in range(60):
            for sample in range(each):
                index, own = question * each + sample, float(policy[score][question])
                theirs, weight = float(other[score][index]), float(weights[question, sample])
                if own != own or theirs != theirs:
                    continue
                lengths = float(policy["tokens"][question]), float(other["tokens"][index])
                is_equal = abs(lengths[0] - lengths[1]) < 0.1 * max(lengths)
                for kind in ("all", "equal_length") if is_equal else ("all",):
                    wins[kind] += weight * (1.0 if own > theirs else 0.5 if own == theirs else 0.0)
                    pairs[kind] += weight
        for kind, share in wins.items():
            assert actual[kind][score]["mean"] == pytest.approx(share / pairs[kind]), (score, kind)
            if score == "judge":
                assert actual[kind]["pairs"] == pytest.approx(pairs[kind])
    assert actual["equal_length"]["pairs"] < actual["all"]["pairs"] == pytest.approx(60)


def test_only_questions_with_a_pair_of_equal_length_are_resampled():
    policy, other = sampled(2), sampled(3)
    other["tokens"] = np.where(np.arange(60) < 5, policy["tokens"], 200.0)
    actual = compare_answers(policy, other, np.ones((60, 1)), estimate)
    assert actual["equal_length"]["pairs"] == 5 == actual["equal_length"]["judge"]["groups"]
    other["tokens"] = np.full(60, 200.0)
    assert compare_answers(policy, other, np.ones((60, 1)), estimate)["equal_length"] == {
        "pairs": 0.0, "gold": None, "judge": None, "reward": None}


# --- an evaluation -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> tuple[dict, list[dict], str]:
    """Metrics, samples and page of a tiny run with PPO and its control."""
    root = tmp_path_factory.mktemp("run")
    folders = finished_run.artifacts(root)
    folders["policy"][CONTROL] = shutil.copytree(folders["policy"]["ppo"], root / CONTROL)
    (root / "models").mkdir()
    inputs = tiny_evaluation.save_inputs(root / "models", tiny_evaluation.make_tokenizer())
    inputs["policy"][CONTROL] = inputs["base"]
    judge = shutil.copytree(inputs["reward"], root / "judge")
    torch.manual_seed(1)
    LlamaForSequenceClassification(LlamaForSequenceClassification.from_pretrained(judge).config).save_pretrained(judge)
    evaluate.run(tiny_evaluation.CONFIG, folders["evaluate"], **inputs, judge=judge)
    page = finished_run.page_of(folders, root, Report(side_by_side=2))
    return (json.loads((folders["evaluate"] / "metrics.json").read_text()),
            pq.read_table(folders["evaluate"] / "samples.parquet").to_pylist(), page)


def test_an_evaluation_measures_ppo_against_its_control(evaluated):
    numbers, samples, _ = evaluated
    rewards = {name: [row[f"reward_{name}_best"] for row in samples] for name in ("sft", "ppo", CONTROL)}
    means = {name: sum(values) / len(values) for name, values in rewards.items()}
    assert len(set(means.values())) == 3
    assert list(numbers["length_control"]) == ["ppo"] and f"{CONTROL}_best" not in numbers["at_best"][CONTROL]
    difference = numbers["at_best"]["ppo"][f"{CONTROL}_best"]["reward"]["mean"]
    assert difference == pytest.approx(means["ppo"] - means[CONTROL])
    length = numbers["length_control"]["ppo"]
    for name in ("ppo", CONTROL):
        assert length["within_bins"][name]["gain"]["mean"] == pytest.approx(means[name] - means["sft"])
    assert set(length["preferred"]) == set(numbers["at_best"]["ppo"])
    for other in ("sft", CONTROL):
        for score in ("reward", "judge"):
            wins = [(row[f"{score}_ppo_best"] > row[f"{score}_{other}_best"])
                    + 0.5 * (row[f"{score}_ppo_best"] == row[f"{score}_{other}_best"]) for row in samples]
            actual = length["preferred"][f"{other}_best"]["all"]
            assert actual[score]["mean"] == pytest.approx(sum(wins) / len(wins)) and actual["pairs"] == len(wins)


def test_its_page_has_the_control_beside_ppo_and_one_verdict(evaluated):
    _, _, page = evaluated
    text = html.unescape(re.sub(r"<[^>]+>", "|", page))
    assert page.count("Did the policy cheat?") == 1
    for words_of_page in ("|PPO on length alone dashboard|", "is the control: PPO ",
                          "|reward gain at equal length, PPO on length alone|", "PPO on length alone at best"):
        assert words_of_page in text, words_of_page


# --- words ---------------------------------------------------------------------------------------------------------


def controlled(gain: float = 0.5, within: float | None = 0.3, above: float = 0.2, control_kl: float = 2.4,
               pairs: float = 80.0, judge: float | None = 0.3) -> dict:
    """Metrics of PPO and its control, judged by a held-out reward model or, for None, by the reward alone.

    above: PPO minus its control.
    """
    numbers = metrics(gain, None, at_best=differences(gain, None, judge=judge))
    numbers["at_best"]["ppo"][f"{CONTROL}_best"] = differences(
        above, None, judge=None if judge is None else above)["sft_best"]
    for name in (CONTROL, f"{CONTROL}_best"):
        numbers["policies"][name] = copy.deepcopy(numbers["policies"][name.replace(CONTROL, "ppo")])
    numbers["policies"][f"{CONTROL}_best"]["response_tokens"] = 55.5
    numbers["comparisons"][CONTROL] = copy.deepcopy(numbers["comparisons"]["ppo"]) | {"kl_k1": around(control_kl)}
    numbers["hacking"][CONTROL] = numbers["hacking"]["ppo"]
    bins = {"gain": around(gain), "within": None if within is None else around(within), "overlap": 0.93, "bins": [],
            "share": around(within / gain) if within and gain > 0.02 else None}
    equal = {"pairs": pairs, "judge": around(0.55), "reward": around(0.6)}
    preferred = {name: {"all": equal | {"pairs": 128.0, "judge": around(0.61)}, "equal_length": equal}
                 for name in numbers["at_best"]["ppo"]}
    numbers["length_control"] = {"ppo": {"within_bins": {"ppo": bins, CONTROL: bins}, "preferred": preferred}}
    return numbers | {"table": summary.short_table(numbers) + verdict.list_length_rows(numbers)}


def test_the_policy_of_the_workflow_is_the_control_of_the_evaluation():
    assert summary.CONTROLS[LENGTH_CONTROL.section] == CONTROL
    summary.check_policy_names([CONTROL])


@pytest.mark.parametrize(("numbers", "kind", "headline", "says"), [
    (controlled(), "better", "PPO made the answers better, says a held-out reward model", (
        "Of the gain in learnt reward (+0.500 [+0.480, +0.520]), +0.300 [+0.280, +0.320] is left between answers of "
        "equal length, a share of 0.60 [0.58, 0.62]; 93\u00a0% of the answers are of a length that both have.",
        "PPO on length alone (KL 2.40 nats, 56 tokens an answer; PPO 2.50 and 30) is the control: PPO is better than "
        "it in judge (+0.200", "The judge prefers PPO to SFT at temperature 0.1 on 0.610",
        "(at equal length: 0.550 [0.530, 0.570] of 80 pairs), to PPO on length alone at temperature 0.3 on 0.610",
        "to best-of-4 of SFT at temperature 0.1 on")),
    (controlled(within=0.01), "length", "PPO only learnt length: at equal length nothing is gained", (
        "PPO only learnt length: at equal length nothing is gained.",)),
    (controlled(above=0.0), "length", "PPO only learnt length, as far as can be told: PPO on length alone does as well",
     ("PPO cannot be told apart from it in judge (+0.000", "PPO on length alone does as well.")),
    (controlled(above=-0.1), "length",
     "PPO only learnt length, as far as can be told: PPO on length alone does as well", ("PPO is worse than it",)),
    (controlled(within=None), "better", "PPO made the answers better, says a held-out reward model", (
        "No answer of PPO is about as long as one of SFT",)),
    (controlled(control_kl=1.0), "better", "PPO made the answers better, says a held-out reward model", (
        "The control moved much less than PPO",)),
    (controlled(pairs=12.0), "better", "PPO made the answers better, says a held-out reward model", (
        "(at equal length: 12 pairs, too few to tell)",)),
    (controlled(judge=None), "unknown", "PPO raised the learnt reward; nothing else is known", (
        "PPO is better than it in learnt reward", "The learnt reward prefers PPO")),
    (controlled(judge=None, within=0.0), "length", "PPO only learnt length: at equal length nothing is gained", ()),
    (controlled(gain=0.0, within=0.0, above=0.0, judge=0.0), "flat",
     "SFT at temperature 0.1 does as well as PPO, says a held-out reward model", (
         "so that there is no gain to look for at equal length", "PPO cannot be told apart from it in judge"))])
def test_the_verdict_says_whether_more_than_length_was_learnt(numbers, kind, headline, says):
    given, text = verdict.policy_verdict(numbers, "ppo")
    assert (given, policy_headline(numbers, "ppo")) == (kind, (kind, headline))
    assert not [words for words in says if words not in text], text
    assert ("only learnt length" in text) == (kind == "length")


def test_a_run_with_a_control_has_its_rows_and_numbers_and_is_still_about_ppo():
    numbers = controlled()
    rows = dict(numbers["table"])
    assert rows["reward gain at equal length, PPO"] == (
        "+0.300 [+0.280, +0.320] of +0.500 [+0.480, +0.520], share 0.60 [0.58, 0.62]")
    assert rows["judge at best temperature, PPO on length alone -> PPO"] == (
        "1.500 -> 1.500 (paired +0.200 [+0.180, +0.220])")
    assert rows["KL to SFT, nats a response, PPO on length alone"] == "2.40 [2.38, 2.42]"
    assert rows["PPO preferred by judge, against PPO on length alone at temperature 0.3"] == (
        "0.610 [0.590, 0.630] of the questions (at equal length: 0.550 [0.530, 0.570] of 80 pairs)")
    assert [label for label, _ in numbers["table"]][:-7] == [label for label, _ in metrics(
        0.5, None, at_best=differences(0.5, None, judge=0.3))["table"]]
    headline = summary.headline_metrics(numbers)
    assert headline == summary.headline_metrics(metrics(0.5, None, at_best=differences(0.5, None, judge=0.3)))
    assert verdict.list_length_numbers(numbers)["judge_above_length_control_low"] == pytest.approx(0.18)
    assert verdict.list_length_numbers(numbers)["share_at_equal_length"] == pytest.approx(0.6)
    assert summary.judged_policies(numbers) == ["ppo"]


def test_a_run_without_a_control_has_none_of_it():
    numbers = metrics()
    assert verdict.list_length_rows(numbers) == [] and verdict.list_length_numbers(numbers) == {}
    assert verdict.describe_length(numbers, "ppo") == [] and verdict.only_length_headline(numbers, "ppo") is None
