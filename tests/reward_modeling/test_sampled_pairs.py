"""Pairs of a human answer and a sampled one: of which questions, alike in length and end; what a head learns."""

import json
from dataclasses import replace

import pytest

from stages import reward
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import load_tokenizer
from stages.recipe.sections.reward import Reward
from stages.reward import sample_pairs
from stages.reward_modeling.dataset import Example, PairSplit
from stages.reward_modeling.sampled_pairs import (
    SAMPLED_PAIRS,
    TEMPERATURES,
    best_answer,
    cut_like,
    select_questions,
)
from tests.helpers import tiny_models

CONFIG = Reward(tune="head", pooling="mean", precision="fp32", head_penalty=1.0, batching="question",
                validation_share=0.25, sampled_questions=12, max_sampled_tokens=24)
EOS = 7


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    return {"base": tiny_models.save_base(folder / "base"), "pairs": tiny_models.save_pairs(folder / "pairs", 20)}


def made(config, folder, inputs):
    folder.mkdir()
    metrics = reward.run(config, folder, **inputs)
    lines = (folder / SAMPLED_PAIRS).read_text().splitlines() if (folder / SAMPLED_PAIRS).exists() else []
    return metrics, [json.loads(line) for line in lines]


@pytest.mark.parametrize(("human", "sampled", "ended", "cut"), [
    ([1, 2, 3, 4, EOS], [9, 9, 9], False, [1, 2, 3]),
    ([1, 2, 3, 4, EOS], [9, 9, EOS], True, [1, 2, EOS]),
    ([1, EOS], [9, 9, EOS], True, [1, EOS]),
    ([1, 2, EOS], [9, 9, EOS], True, [1, 2, EOS]),
    ([1, EOS], [9, 9, 9], False, [1, EOS]),
    ([1, 2, EOS], [EOS], True, [EOS])])
def test_both_answers_are_as_long_and_end_alike_unless_the_human_one_is_shorter(human, sampled, ended, cut):
    assert cut_like(human, sampled, ended) == cut


def test_the_best_answer_wins_and_never_loses():
    assert best_answer(Example((), [], [[1], [2], [3]], [(0, 1), (2, 0), (2, 1)])) == [3]


def test_questions_are_distinct_evenly_spaced_and_short_enough():
    items = [Example(("s", number // 2), [0] * (50 if number == 4 else 5)) for number in range(20)]
    chosen = select_questions(items, 5, 10)
    assert [item.question[1] for item in chosen] == [0, 2, 4, 6, 8]
    assert [item.question[1] for item in select_questions(items, 99, 10)] == list(range(10))
    assert [item.question[1] for item in select_questions(items[4:5], 3, 10)] == []


def test_a_greedy_pair_holds_the_models_greedy_answer(inputs):
    """One question of the pairs, decoded token by token without a cache."""
    tokenizer, model = load_tokenizer(inputs["base"]), load_causal(inputs["base"], "fp32")
    training, _ = PairSplit(inputs["pairs"], "reward", 0.25).training_examples(
        tokenizer, max_length_tokens=512, max_pairs=1000, by_question=True)
    pairs = sample_pairs(replace(CONFIG, max_sampled_tokens=6), model, tokenizer, training[:3], 3, "test")
    assert list(pairs) == list(TEMPERATURES)
    for item, pair in zip(training, pairs[0.0], strict=False):
        ids = []
        while len(ids) < 6 and (not ids or ids[-1] != tokenizer.eos_token_id):
            logits = model(input_ids=model.dummy_inputs["input_ids"].new_tensor([item.prompt + ids])).logits
            ids.append(int(logits[0, -1].argmax()))
        human, sampled = pair.answers
        assert (pair.question, pair.prompt, sampled, pair.pairs) == (item.question, item.prompt, ids, [(0, 1)])
        assert human[:-1] == best_answer(item)[:len(human) - 1]


def test_training_questions_are_sampled_and_held_out_ones_measure(inputs, tmp_path):
    metrics, lines = made(CONFIG, tmp_path / "with", inputs)
    plain, none = made(replace(CONFIG, sampled_questions=0), tmp_path / "without", inputs)
    assert metrics["sampled_pairs"] == len(lines) == 2 * 12 and none == [] and "sampled_pairs" not in plain
    assert metrics["pairs"] == plain["pairs"]
    assert {line["temperature"] for line in lines} == set(TEMPERATURES)
    data = reward.load_data(CONFIG, load_tokenizer(inputs["base"]), inputs["base"], inputs["pairs"], "reward")
    held_out = {item.question for item in data.held_out_sampled[0.0]}
    trained = {item.question for item in data.sampled[0.0]}
    assert held_out and not held_out & {item.question for item in data.training} and len(trained) == 12
    assert {(line["site"], line["qid"]) for line in lines} == trained
    scoring = json.loads((tmp_path / "with" / "scoring.json").read_text())["held_out_pairs"]["sampled_pairs"]
    assert [scoring[f"{t:g}"]["mean"] for t in TEMPERATURES] == [
        metrics[f"validation_sampled_accuracy_at_{t:g}"] for t in TEMPERATURES]
    assert "sampled_pairs" not in json.loads((tmp_path / "without" / "scoring.json").read_text())["held_out_pairs"]


def swap(pairs: dict) -> dict:
    return {temperature: [replace(item, pairs=[(1, 0)]) for item in items] for temperature, items in pairs.items()}


def test_the_head_learns_from_them(inputs, tmp_path, monkeypatch):
    """Told that samples are better, it ranks them so on other questions; without such pairs it ranks human text higher.
    """
    monkeypatch.setattr(reward, "sample_pairs", lambda *args, **options: swap(sample_pairs(*args, **options)))
    learnt, _ = made(CONFIG, tmp_path / "learnt", inputs)
    monkeypatch.setattr(reward.RewardData, "all_training", lambda self: self.training)
    plain, _ = made(CONFIG, tmp_path / "plain", inputs)
    for temperature in TEMPERATURES:
        name = f"validation_sampled_accuracy_at_{temperature:g}"
        assert plain[name] < 0.2 and learnt[name] > 0.8


def test_the_zero_of_the_scale_is_of_human_answers_alone(inputs, tmp_path):
    for name, count in (("with", 12), ("without", 0)):
        made(replace(CONFIG, sampled_questions=count), tmp_path / name, inputs)
    content = [json.loads((tmp_path / name / "scoring.json").read_text()) for name in ("with", "without")]
    one, other = ([example["answer"] for example in scoring["examples"]] for scoring in content)
    assert one == other


def test_an_adapter_trains_on_them_too(inputs, tmp_path):
    config = replace(CONFIG, tune="lora", batch_pairs=4, microbatch_pairs=4, learning_rate=1e-3)
    metrics, lines = made(config, tmp_path / "lora", inputs)
    assert metrics["sampled_pairs"] == len(lines) == 24


def test_a_sample_must_fit_beside_its_question():
    with pytest.raises(ValueError, match="max_sampled_tokens must be below max_length_tokens"):
        replace(CONFIG, max_sampled_tokens=512)
