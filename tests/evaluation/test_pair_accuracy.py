"""The reward model beside baselines on literal pairs; two policies compared; the whole stage on tiny models."""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from stages import evaluate
from stages.evaluation import policy_answers
from stages.evaluation.pair_accuracy import (
    BAG_OF_WORDS,
    LOG_PROBABILITY,
    SURFACE,
    accuracy_breakdown,
    draw_held_out_pairs,
    evaluate_pairs,
)
from stages.evaluation.statistics import bootstrap_mean
from stages.generation import sampler
from stages.generation.text_metrics import count_fences, distinct, distinct_leave_one_out, has_code, repetition
from stages.modeling.load import load_causal
from stages.modeling.packed import token_logprobs
from stages.modeling.tiny_llama import train_tokenizer
from stages.recipe.user_functions import load_function
from stages.stackexchange.prompt import answer_ids, prompt_ids
from tests.helpers.tiny_evaluation import CODE, CONFIG, PAIRS, make_model, make_tokenizer, row, save_inputs

means = partial(bootstrap_mean, samples=50, seed=0)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    return save_inputs(tmp_path_factory.mktemp("models"), tokenizer)


class Words:
    """A tokenizer of one id a word: enough to count lengths."""

    bos_token_id, eos_token_id = None, 0

    def __call__(self, text, **_):
        return SimpleNamespace(input_ids=[1] * len(text.split()))


def draw(rows=PAIRS, max_pairs=50, max_tokens=999):
    return draw_held_out_pairs(rows, Words(), max_pairs=max_pairs, max_tokens=max_tokens, seed=0)


def test_each_text_is_held_once_and_pairs_point_at_it():
    pairs = draw()
    assert len(pairs.texts) == len(set(pairs.texts)) == 9
    assert pairs.texts[pairs.worse[1]] == pairs.texts[pairs.better[0]] == ("What is 1?", "a long answer")
    assert pairs.groups.tolist() == [0, 0, 1, 1, 2]


def test_long_pairs_are_dropped_and_counted_and_the_choice_is_seeded():
    assert [r["qid"] for r in draw(max_tokens=9).rows] == [1, 2, 3] and draw(max_tokens=9).dropped == 2
    rows = [row(number, "a", "b") for number in range(200)]
    some = [r["qid"] for r in draw(rows, max_pairs=20).rows]
    assert len(some) == 20 and some == sorted(some) == [r["qid"] for r in draw(rows, max_pairs=20).rows]
    assert max(some) > 100


def test_baselines_on_literal_pairs():
    pairs = draw()
    reward = np.arange(len(pairs.texts), 0, -1, dtype=float)  # texts that come earlier score higher
    tags = {("s", 2): ["ale", "hops"], ("s", 3): ["ale"]}
    actual = evaluate_pairs(pairs, reward, {SURFACE: reward * 0, LOG_PROBABILITY: -reward}, reward, tags, means)
    assert actual["baselines"]["longer answer wins"]["mean"] == (1 + 1 + 0 + 1 + 0.5) / 5
    assert actual["baselines"]["has code"]["mean"] == (0.5 + 1 + 0.5 + 0.5 + 0.5) / 5
    assert actual["baselines"]["surface features (logistic)"]["mean"] == 0.5
    assert actual["best_cheap_baseline"] == "longer answer wins"
    as_good = evaluate_pairs(pairs, reward, {SURFACE: reward * 0, BAG_OF_WORDS: reward}, reward, {}, means)
    assert as_good["best_cheap_baseline"] == BAG_OF_WORDS and as_good["above_best_cheap_baseline"]["mean"] == 0
    likely = evaluate_pairs(pairs, reward, {LOG_PROBABILITY: reward}, reward, {}, means)
    assert likely["best_cheap_baseline"] == "SFT log-probability" and likely["baselines"].keys() == {
        "longer answer wins", "has code", "SFT log-probability"}
    right = [1, 0, 1, 1, 1]
    assert actual["accuracy"]["mean"] == actual["oracle"]["mean"] == pytest.approx(0.8)
    assert actual["oracle_both_have_code"] == actual["both_have_code"]
    assert actual["baselines"]["SFT log-probability"]["mean"] == pytest.approx(0.2)
    assert actual["above_best_cheap_baseline"]["mean"] == pytest.approx(0.8 - 0.7)
    assert (actual["both_have_code"]["count"], actual["both_have_code"]["mean"]) == (1, right[3])
    assert actual["better_is_later"] is None  # these rows have no dates
    assert actual["by_length"]["about equal"]["count"] == 2  # code against code, four against five
    assert {name: got["count"] for name, got in actual["by_score_gap"].items()} == {"1": 2, "2": 1, "3+": 2}
    assert actual["by_score_gap"]["2"]["mean"] == 0
    assert (actual["pairs"], actual["questions"]) == (5, 3)
    assert {name: got["count"] for name, got in actual["by_tag"].items()} == {"ale": 3, "hops": 2}
    assert actual["by_tag"]["hops"]["mean"] == 1 and actual["by_site"]["s"] == actual["accuracy"]


def test_pairs_whose_better_answer_was_written_later():
    days = [("2020-01-02", "2020-01-01"), ("2020-01-01", "2020-01-02"), ("2020-01-02", "2020-01-02"),
            ("2020-01-03", "2020-01-01"), ("", "2020-01-01")]
    pairs = draw([pair | {"date_j": j, "date_k": k} for pair, (j, k) in zip(PAIRS, days, strict=True)])
    scores = np.zeros(len(pairs.texts))
    scores[pairs.better[0]] = 1
    actual = accuracy_breakdown(pairs, scores, means)["better_is_later"]
    assert (actual["count"], actual["mean"]) == (2, (1 + 0.5) / 2)


def test_text_measures():
    assert has_code(CODE) and has_code("```\nx\n```") and not has_code("`x` and ``` in a line")
    assert repetition([1, 2, 3, 4, 5]) == 0 and repetition([1]) == 0
    assert count_fences(CODE) == 2 and count_fences("a ``` b ```") == 2 and count_fences("`x`") == 0
    assert repetition([7] * 8) == 1 - 1 / 5
    assert distinct([[1, 2, 3], [1, 2]]) == 2 / 3 and distinct([[1]]) == 0
    texts = [[1, 2, 3, 1, 2], [1, 2], [3, 1, 4], [5]]
    left_out = [distinct(texts[:i] + texts[i + 1:]) for i in range(4)]
    assert distinct_leave_one_out(texts).tolist() == left_out


def test_log_probabilities_are_those_of_single_texts(folders, tokenizer):
    model = load_causal(folders["sft"])
    prompts = [prompt_ids(tokenizer, question) for question in ("What is 1?", "a long answer to what is short", "x")]
    responses = [answer_ids(tokenizer, answer) for answer in ("short", "a", "four five a long answer")]
    together = token_logprobs.response_logprobs(model, prompts, responses, 1.0, "t")
    for prompt, response, got in zip(prompts, responses, together, strict=True):
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            scores = model(ids).logits[0].double().log_softmax(-1)
        alone = scores[range(len(prompt) - 1, ids.shape[1] - 1), response]
        torch.testing.assert_close(got.double(), alone, atol=1e-4, rtol=1e-4)
    hot = token_logprobs.response_logprobs(model, prompts, responses, 2.0, "t")
    assert not torch.allclose(hot[0], together[0])


def test_each_batch_has_its_own_random_numbers(folders, tokenizer, monkeypatch):
    """A model that stops at once must not shift the numbers of the next batch."""
    model = load_causal(folders["sft"])
    prompts = [prompt_ids(tokenizer, f"What is {number}?") for number in range(6)]
    first_numbers, generate = [], sampler.generate_stepwise

    def watched(*args, generator, **settings):
        first_numbers.append(float(torch.rand(1, generator=generator.clone_state())))
        return generate(*args, generator=generator, **settings)

    monkeypatch.setattr(sampler, "generate_stepwise", watched)
    for longest in (8, 1):
        policy_answers.sample_answers(model, tokenizer, prompts, batch_prompts=3, max_new_tokens=longest,
                                      temperature=1.0, seed=1, label="t")
    assert first_numbers[:2] == first_numbers[2:] and len(set(first_numbers)) == 2


def run(folders, out, config=CONFIG, **instead) -> tuple[dict, dict]:
    out.mkdir(exist_ok=True)
    returned = evaluate.run(config, out, **{**folders, **instead})
    return returned, json.loads((out / "metrics.json").read_text())


def numbers(value) -> list[float]:
    if isinstance(value, dict | list):
        return [n for part in (value.values() if isinstance(value, dict) else value) for n in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def test_the_stage_end_to_end(folders, tmp_path):
    returned, metrics = run(folders, tmp_path / "out")
    assert all(map(math.isfinite, numbers(metrics))) and all(map(math.isfinite, returned.values()))
    against = metrics["comparisons"]["ppo"]
    assert against["gold"] is None and metrics["prompts"] == 6 and metrics["reward_model"]["pairs"] == 13
    assert against["kl_k3"]["mean"] > 0
    assert set(metrics["policies"]) == {"base", "sft", "ppo", "best_of_2", "best_of_3", "sft_greedy", "sft_best",
                                        "ppo_best", "best_of_3_best"}
    assert metrics["policies"]["best_of_3"]["reward"]["mean"] > metrics["policies"]["best_of_2"]["reward"]["mean"]
    assert {tag: actual["groups"] for tag, actual in metrics["reward_model"]["by_tag"].items()} == {"all": 9, "even": 4}
    assert 8 <= len(metrics["table"]) <= 17 and all(len(line) == 2 for line in metrics["table"])
    samples = pq.read_table(tmp_path / "out/samples.parquet").to_pylist()
    assert len(samples) == 6 and len({line["qid"] for line in samples}) == 6
    assert samples[0]["authors"] == ["ann", "bob"] and samples[0]["url"].startswith("https://s/")
    difference = [line["reward_ppo"] - line["reward_sft"] for line in samples]
    assert against["reward_difference"]["mean"] == pytest.approx(np.mean(difference))
    pairs = pq.read_table(tmp_path / "out/per_pair.parquet").to_pandas()
    assert metrics["reward_model"]["accuracy"]["mean"] == pytest.approx(((pairs.reward_j > pairs.reward_k) + 0.5 * (
        pairs.reward_j == pairs.reward_k)).mean())
    check_question_scores(pq.read_table(tmp_path / "out/per_question.parquet").to_pandas(), metrics, samples)
    assert run(folders, tmp_path / "again")[1] == metrics


def check_question_scores(scores, metrics: dict, samples: list[dict]) -> None:
    """The scores by question have the means of metrics.json, and those of samples.parquet where these have them."""
    assert set(scores.policy) == {"base", "ppo", "sft", "best_of_2", "best_of_3"}
    for policy, rows in scores.groupby("policy"):
        expected = metrics["policies"][policy]
        assert rows.reward.mean() == pytest.approx(expected["reward"]["mean"])
        assert list(rows.qid) == [line["qid"] for line in samples]
        if policy.startswith("best_of_"):
            assert rows.kl_k1.isna().all()
        else:
            assert rows.kl_k1.mean() == pytest.approx(expected["kl_k1"]["mean"])
            assert list(rows.reward) == [line[f"reward_{policy}"] for line in samples]


def test_a_policy_against_itself_gains_nothing(folders, tmp_path):
    metrics = run(folders, tmp_path / "out", policy={"ppo": folders["sft"]})[1]
    against = metrics["comparisons"]["ppo"]
    assert (against["kl_k1"]["mean"], against["kl_k3"]["mean"]) == (0.0, 0.0)
    assert [against["win_rate"][name] for name in ("mean", "low", "high")] == [0.5] * 3
    assert against["reward_difference"]["mean"] == against["reward_difference"]["high"] == 0.0
    assert metrics["policies"]["sft"] == metrics["policies"]["ppo"]


GOLD = '''
def score(questions, responses):
    """Knows questions with an even number; the more words the better."""
    known = [any(c in q for c in "02468") for q in questions]
    return {"gold": [float(len(r.split())) if k else None for k, r in zip(known, responses)],
            "correct": [1.0 if k else None for k in known]}
def nothing(questions, responses):
    return {"gold": [None] * len(questions)}
def nameless(questions, responses):
    return {"points": [1.0] * len(questions)}
'''


def test_every_policy_is_compared_with_sft(folders, tmp_path):
    alone, both = run(folders, tmp_path / "alone"), run(
        folders, tmp_path / "both", policy=folders["policy"] | {"dpo": folders["base"]})
    assert list(both[1]["comparisons"]) == list(both[1]["hacking"]) == ["ppo", "dpo"]
    assert both[1]["comparisons"]["ppo"] == alone[1]["comparisons"]["ppo"]  # another one changes nothing
    base, dpo = (both[1]["policies"][name] for name in ("base", "dpo"))
    assert dpo == base and both[1]["comparisons"]["dpo"]["win_rate"] == base["win_rate"]
    assert both[0]["ppo_win_rate"] == alone[0]["win_rate"] and both[0]["dpo_win_rate"] == base["win_rate"]["mean"]
    labels = [label for label, _ in both[1]["table"]]
    assert len(labels) == len(set(labels)) and {
        f"win rate at temperature 1, {name} against SFT" for name in ("PPO", "DPO")} <= set(labels)
    samples = pq.read_table(tmp_path / "both/samples.parquet").to_pylist()
    assert [line["dpo"] for line in samples] == [line["base"] for line in samples]
    assert [line["reward_dpo"] for line in samples] == [line["reward_base"] for line in samples]


@pytest.mark.parametrize("name", ["sft", "base", "human", "best_of_4", "samples", "question", "reward_sft",
                                  "sft_greedy", "sft_best", "dpo_best", "judge", "judge_x"])
def test_a_policy_cannot_have_a_name_that_is_taken(folders, tmp_path, name):
    with pytest.raises(ValueError, match=f"the name '{name}' is reserved") as error:
        run(folders, tmp_path / "out", policy={name: folders["sft"]})
    assert "\n" not in str(error.value)


def test_gold_is_told_where_it_applies(folders, tmp_path, monkeypatch, capsys):
    (tmp_path / "truth_of_this_test.py").write_text(GOLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = replace(CONFIG, prompts=50, temperature_prompts=0, gold="truth_of_this_test:score")
    returned, metrics = run(folders, tmp_path / "out", config)
    gold = metrics["comparisons"]["ppo"]["gold"]
    assert gold["gold"]["difference"]["count"] == 5 < metrics["prompts"]  # 2, 4, 6, 8 and 10
    assert gold["correct"]["difference"]["mean"] == 0 and gold["gold"]["human"] > 0
    assert 0 < metrics["reward_model"]["oracle"]["count"] < metrics["reward_model"]["pairs"]
    assert returned["correct_difference"] == 0 and "gold at temperature 1, SFT -> PPO" in [
        label for label, _ in metrics["table"]]
    samples = pq.read_table(tmp_path / "out/samples.parquet").to_pylist()
    assert {line["qid"] for line in samples if line["gold_ppo"] is None} == {1, 3, 5, 7, 9, 11}
    scores = pq.read_table(tmp_path / "out/per_question.parquet").to_pandas().pivot(
        index="qid", columns="policy", values="gold")
    assert list(scores.ppo.dropna()) == [line["gold_ppo"] for line in samples if line["gold_ppo"] is not None]
    assert set(scores.best_of_3.dropna().index) == {2, 4, 6, 8, 10}
    assert scores.best_of_3.mean() == pytest.approx(metrics["policies"]["best_of_3"]["gold"]["mean"])
    metrics = run(folders, tmp_path / "none", replace(config, gold="truth_of_this_test:nothing"))[1]
    assert metrics["comparisons"]["ppo"]["gold"] is None and metrics["reward_model"]["oracle"] is None
    assert "knows none of these questions" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "says"), [
    ("nowhere.at_all:score", "cannot load 'nowhere.at_all:score'"), ("json:nothing_there", "cannot load"),
    ("json", "should look like package.module:function"), ("json:__name__", "is not a function")])
def test_a_wrong_gold_name_is_one_line(name, says):
    with pytest.raises(ValueError, match=says) as error:
        load_function(name, "gold")
    assert "\n" not in str(error.value)


def test_a_gold_scorer_must_give_gold_for_every_response():
    with pytest.raises(ValueError, match="no 'gold'"):
        policy_answers.score_gold(lambda q, r: {"points": [1.0]}, ["q"], ["r"])
    with pytest.raises(ValueError, match="1 values of 'gold' for 2 responses"):
        policy_answers.score_gold(lambda q, r: {"gold": [1.0]}, ["q", "q"], ["r", "r"])


def test_what_cannot_be_evaluated_is_said(folders, tmp_path, tokenizer, capsys):
    with pytest.raises(ValueError, match="no held-out question of at most 2 tokens"):
        run(folders, tmp_path / "a", replace(CONFIG, max_prompt_tokens=2))
    assert run(folders, tmp_path / "no best-of-n", replace(CONFIG, best_of=()))[1]["policies"].keys() == {
        "base", "sft", "ppo", "sft_greedy", "sft_best", "ppo_best"}
    other = train_tokenizer(["something else entirely, entirely else"], 290)
    make_model(other).save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="has another tokenizer"):
        run(folders, tmp_path / "c", policy={"ppo": tmp_path / "other"})
    assert "base" not in run(folders, tmp_path / "d", base=tmp_path / "other")[1]["policies"]
    assert "is left out" in capsys.readouterr().err
