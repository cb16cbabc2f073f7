"""Each policy at its best temperature: the choice, the paired differences against plain loops, and the whole stage."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaForSequenceClassification

from stages import evaluate
from stages.evaluation import policy_answers
from stages.evaluation.answer_sampler import choose_temperatures, measure_temperatures
from stages.evaluation.heldout_prompts import EvaluationPrompts
from stages.evaluation.policy_answers import Answers
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import load_tokenizer
from stages.recipe.schema import override
from stages.recipe.sections.evaluate import Evaluate
from stages.stackexchange.prompt import prompt_ids
from tests.helpers.tiny_evaluation import CONFIG, make_tokenizer, save_inputs

GOLD = '''
def score(questions, responses):
    """Knows all questions; `even` applies to some of them."""
    return {"gold": [float(len(r)) for r in responses],
            "even": [float(r.count("a")) if any(c in q for c in "02468") else None
                     for q, r in zip(questions, responses)]}
'''


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("inputs")
    inputs = save_inputs(root, make_tokenizer())
    torch.manual_seed(9)
    LlamaForSequenceClassification(LlamaForSequenceClassification.from_pretrained(root / "reward").config
                                   ).save_pretrained(root / "judge")
    load_tokenizer(root / "reward").save_pretrained(root / "judge")
    return inputs | {"judge": root / "judge"}


@pytest.fixture(scope="module")
def made(folders, tmp_path_factory):
    """Metrics and samples of an evaluation with gold and a judge."""
    place = tmp_path_factory.mktemp("made")
    (place / "truth_at_best.py").write_text(GOLD)
    config = replace(CONFIG, temperatures=(1.0, 0.4, 0.0), gold="truth_at_best:score")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        returned = evaluate.run(config, place, **folders)
    samples = pq.read_table(place / "samples.parquet").to_pylist()
    return returned, json.loads((place / "metrics.json").read_text()), samples


def draw(folders, prompts: int, selection_prompts: int, seed: int = 0) -> EvaluationPrompts:
    return EvaluationPrompts(folders["pairs"], "evaluation", load_tokenizer(folders["sft"]), prompts=prompts,
                             selection_prompts=selection_prompts, max_prompt_tokens=60, max_response_tokens=6,
                             longest=96, seed=seed)


@pytest.mark.parametrize(("prompts", "selection", "chosen", "selected"), [
    (6, 2, 6, 2), (50, 2, 9, 2), (50, 64, 9, 2), (6, 1, 6, 1), (50, 0, 11, 0)])
def test_the_questions_of_the_choice_are_apart_and_few(folders, prompts, selection, chosen, selected):
    for seed in range(3):
        drawn = draw(folders, prompts, selection, seed)
        assert (len(drawn.questions), len(drawn.selection_questions)) == (chosen, selected)
        assert not set(drawn.questions) & set(drawn.selection_questions)
        tokenizer = load_tokenizer(folders["sft"])
        assert drawn.selection_prompts == [prompt_ids(tokenizer, question) for question in drawn.selection_questions]
    assert draw(folders, 6, 2).questions == draw(folders, 6, 0).questions  # the evaluation's stay the same


def test_the_best_temperature_has_the_highest_reward_and_is_the_higher_of_equals():
    def choose(**rewards: float) -> float:
        curve = [{"temperature": float(name[1:]) / 10, "reward": reward} for name, reward in rewards.items()]
        return choose_temperatures({"ppo": curve}, ["ppo"], (), 0.9)["ppo"]

    def choose_samples(best: float, candidates: tuple, default: float) -> float:
        curves = {"sft": [{"temperature": best, "reward": -1.0}]}
        return choose_temperatures(curves, ["sft", "ppo"], candidates, default)["samples"]

    assert choose(t10=1.0, t5=2.0, t0=1.5) == 0.5
    assert choose(t0=2.0, t3=2.0, t10=1.0) == 0.3
    assert choose() == 0.9
    assert choose_samples(0.0, (1.0, 0.3, 0.0, 0.5), 1.0) == 0.3
    assert choose_samples(0.5, (1.0, 0.3, 0.0, 0.5), 1.0) == 0.5
    assert choose_samples(0.0, (0.0,), 0.8) == 0.8


def test_the_curve_has_means_by_falling_temperature():
    swept = {0.0: Answers([[1], [2]], ["a", "b"], [True, False]), 0.5: Answers([[1], [2]], ["b", "b"], [True, True])}
    rewards = {0.0: np.array([1.0, 2.0]), 0.5: np.array([3.0, 5.0])}
    prompts = SimpleNamespace(selection_prompts=[[1], [2]], selection_questions=["q", "r"])
    gold = {"a": 1.0, "b": None}
    curves = measure_temperatures(
        {"ppo": swept}, prompts, lambda texts: {key: rewards[key[1]] for key in texts},
        lambda _, texts: {"gold": [gold[text] for text in texts]}, "sft")
    assert curves["ppo"] == [{"temperature": 0.5, "reward": 4.0, "gold": None, "eos_rate": 1.0},
                     {"temperature": 0.0, "reward": 1.5, "gold": 1.0, "eos_rate": 0.5}]


@pytest.mark.parametrize("mistake", [{"temperatures": ()}, {"temperatures": (0.5, 0.5)}, {"temperatures": (-0.1,)},
                                     {"temperature_prompts": -1}])
def test_bad_settings_are_refused(mistake):
    with pytest.raises(ValueError, match="temperature"):
        override(Evaluate(), mistake, "evaluate")


def test_the_temperatures_are_those_of_the_curves(made):
    _, metrics, _ = made
    curves, policies = metrics["temperature_selection"]["curves"], metrics["policies"]
    assert metrics["temperature_selection"]["prompts"] == 2 and list(curves) == ["sft", "ppo"]
    for name, curve in curves.items():
        assert [row["temperature"] for row in curve] == [1.0, 0.4, 0.0]
        assert policies[f"{name}_best"]["temperature"] == max(curve, key=lambda row: row["reward"])["temperature"]
    assert (policies["sft"]["temperature"], policies["sft_greedy"]["temperature"]) == (1.0, 0.0)
    assert policies["best_of_2"]["temperature"] == 1.0
    assert policies["best_of_3_best"]["temperature"] == (policies["sft_best"]["temperature"] or 0.4)
    assert all(policies[name]["kl_k1"] is None for name in ("sft_greedy", "sft_best", "ppo_best", "best_of_3_best"))
    assert all(policy["gold_scores"].keys() == {"gold", "even"} for policy in policies.values())


def test_the_differences_at_best_are_those_of_the_answers(made):
    returned, metrics, samples = made
    against = metrics["at_best"]["ppo"]
    assert list(against) == ["sft_greedy", "sft_best", "best_of_2", "best_of_3", "best_of_3_best"]
    assert [row["samples_per_answer"] for row in against.values()] == [1, 1, 2, 3, 3]
    for name in ("sft_greedy", "sft_best"):
        for key in ("reward", "judge", "gold", "even"):
            differences = [row[f"{key}_ppo_best"] - row[f"{key}_{name}"] for row in samples
                           if row[f"{key}_ppo_best"] is not None]
            given = against[name][key] if key in ("reward", "judge") else against[name]["gold"][key]
            assert given["mean"] == pytest.approx(sum(differences) / len(differences))
            assert given["count"] == len(differences)
            assert given["low"] <= given["mean"] <= given["high"]
    assert 0 < against["sft_best"]["gold"]["even"]["count"] < len(samples)
    for name in ("best_of_3", "best_of_3_best"):
        for key in ("reward", "judge", "gold"):
            given = against[name][key] if key != "gold" else against[name]["gold"]["gold"]
            best, other = (metrics["policies"][each][key]["mean"] for each in ("ppo_best", name))
            assert given["mean"] == pytest.approx(best - other)
    assert returned["gold_difference_at_best"] == against["sft_best"]["gold"]["gold"]["mean"]


def test_greedy_answers_are_the_likeliest_tokens(made, folders):
    model, tokenizer = load_causal(folders["sft"]), load_tokenizer(folders["sft"])
    for row in made[2][:3]:
        ids = list(prompt_ids(tokenizer, row["question"]))
        start = len(ids)
        with torch.no_grad():
            while len(ids) - start < 6 and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert tokenizer.decode(ids[start:], skip_special_tokens=True) == row["sft_greedy"]


def test_the_judge_is_told_of_and_chooses_nothing(made, folders, tmp_path):
    _, metrics, samples = made
    assert set(metrics["comparisons"]["ppo"]["judge"]) == {"sft", "policy", "human", "difference"}
    difference = [row["judge_ppo"] - row["judge_sft"] for row in samples]
    assert metrics["comparisons"]["ppo"]["judge"]["difference"]["mean"] == pytest.approx(np.mean(difference))
    assert metrics["judge"]["accuracy"]["count"] == metrics["reward_model"]["pairs"]
    evaluate.run(replace(CONFIG, temperatures=(1.0, 0.4, 0.0)), tmp_path, **folders | {"judge": None})
    without = json.loads((tmp_path / "metrics.json").read_text())
    assert without["judge"] is None and without["policies"]["sft"]["judge"] is None
    assert [without["policies"][name]["reward"] for name in ("sft_best", "ppo_best", "best_of_3_best")] == [
        metrics["policies"][name]["reward"] for name in ("sft_best", "ppo_best", "best_of_3_best")]


def test_the_reward_model_is_no_judge_of_itself(folders, tmp_path):
    with pytest.raises(ValueError, match="is the reward model itself"):
        evaluate.run(CONFIG, tmp_path, **folders | {"judge": folders["reward"]})


def test_answers_at_a_temperature_sampled_already_are_used_again(folders, tmp_path):
    evaluate.run(replace(CONFIG, temperatures=(1.0,)), tmp_path, **folders)
    metrics = json.loads((tmp_path / "metrics.json").read_text())["policies"]
    for name, again in (("sft", "sft_best"), ("ppo", "ppo_best"), ("best_of_3", "best_of_3_best")):
        assert metrics[name]["reward"] == metrics[again]["reward"]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_sharing_prefixes_changes_no_token(folders, temperature):
    model, tokenizer = load_causal(folders["sft"]), load_tokenizer(folders["sft"])
    prompts = [prompt_ids(tokenizer, f"What is {number}?") for number in (1, 1, 1, 22, 22, 3, 3, 3, 3)] * 3
    alone, shared = (policy_answers.sample_answers(
        model, tokenizer, prompts, batch_prompts=12, max_new_tokens=12, temperature=temperature, seed=4, label="t",
        share_prefixes=share).responses for share in (False, True))
    assert alone == shared and (len(set(map(tuple, alone))) <= 3) == (temperature == 0)
