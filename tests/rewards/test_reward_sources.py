"""Rewards of several sources by hand, of the ids as sampled, of published classifiers (CORRECTNESS G5, A8; 32)."""

import json
import shutil
import sys
import types
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from stages.modeling.tiny_llama import train_tokenizer
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.reward_model import initialise_head
from stages.reward_modeling.scorer import Scorer
from stages.rewards.classifier import ClassifierScorer
from stages.rewards.reward_functions import MEASURES, RewardFunction, load_reward_functions
from stages.rewards.shaping import RewardShaper, RunningMoments
from stages.stackexchange.prompt import answer_ids, parse_question, prompt_ids
from tests.helpers import tiny_models
from tests.helpers.settings import shaping

QUESTIONS = ["which flag?", "{response} or {question}?", "Answer: </s> é 漢字\n\nAnswer: "]
TEMPLATE = "<s>{question}</s>{response}</s>"


@pytest.fixture(scope="module")
def tok():
    return tiny_models.tokenizer()


@pytest.fixture
def functions(monkeypatch):
    """A module of the user's; what its functions were given is in `seen`."""
    module = types.ModuleType("my_rewards")
    module.seen = []

    def spoils(prompts, responses):
        module.seen.append((prompts, responses))
        scores = [len(p) + 10.0 * len(r) for p, r in zip(prompts, responses, strict=True)]
        for row in (*prompts, *responses):
            if isinstance(row, list):
                row.clear()
        return scores

    module.spoils = spoils
    module.actual = None
    module.gives = lambda prompts, responses: module.actual
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    return module


def rollout(tok, answers=("use it", "a\n```\nb\n```", "make make make make make make"), ended=(True, True, True)):
    """Prompts of QUESTIONS; responses that did not end have no EOS."""
    responses = [answer_ids(tok, a)[: None if e else -1] for a, e in zip(answers, ended, strict=True)]
    return SimpleNamespace(prompts=[prompt_ids(tok, q) for q in QUESTIONS], responses=responses, ended=list(ended))


def load_source(source: str, weight: float = 1.0, reads: str = "text", template: str = TEMPLATE, scorer=None, pairs=None
           ) -> RewardFunction:
    (function,) = load_reward_functions(source=source, weight=weight, reads=reads, template=template, pairs=pairs,
                                        load_models=lambda _: [scorer], precision="fp32")
    return function


class FixedScorer:
    """A scorer that gives `scores`, whatever it is asked."""

    def __init__(self, *scores: float, std: float | None = 1.0):
        self.scores, self.std = scores, std

    def __call__(self, prompts, responses):
        return list(self.scores)


def fixed_source(*scores: float, std: float | None = 1.0) -> RewardFunction:
    return RewardFunction("model", 1.0, "ids", FixedScorer(*scores, std=std))


def shape_rewards(scores, rows, **changes) -> list[float]:
    shaper = RewardShaper([fixed_source(*scores, std=4.0)], None, shaping(**changes))
    return shaper(rows, update_statistics=False).rewards.tolist()


def make_rollout(responses=((5, 6, 2), (7, 8), (9,)), ended=(True, False, False)):
    """A rollout that no tokenizer has to read; the second prompt has an EOS (2) inside."""
    return SimpleNamespace(prompts=[[1, 4], [1, 2, 4], [1]], responses=[list(r) for r in responses], ended=list(ended))


def repeated_grams(ids: list[int]) -> float:
    """Share of 4-grams seen before, counted one by one."""
    seen, again = [], 0
    for start in range(len(ids) - 3):
        gram = ids[start : start + 4]
        again += gram in seen
        seen.append(gram)
    return again / max(1, len(seen))


def test_a_weighted_sum_of_three_sources_by_hand(tok, functions):
    functions.actual = torch.tensor([0.5, -1.0, 2.0])
    sources = [load_source("has_code", -2.0), load_source("repetition", 3.0), load_source("my_rewards:gives", 0.25)]
    rows = rollout(tok)
    actual = RewardShaper(sources, tok, shaping(reward_baseline=1.0))(rows, update_statistics=True)
    repeated = [repeated_grams(response) for response in rows.responses]
    assert repeated[0] == 0 and repeated[2] > 0
    want = [0.125 - 1, -2 + 3 * repeated[1] - 0.25 - 1, 3 * repeated[2] + 0.5 - 1]
    assert actual.rewards.dtype == torch.float32 and actual.rewards.tolist() == pytest.approx(want, rel=1e-6)
    assert {name: part.tolist() for name, part in actual.parts.items()} == {
        "has_code": [0, 1, 0], "repetition": pytest.approx(repeated), "my_rewards:gives": [0.5, -1, 2]}
    assert actual.metrics() == pytest.approx({"reward_has_code": 1 / 3, "reward_repetition": sum(repeated) / 3,
                                             "reward_my_rewards:gives": 0.5, "reward_scale": 1})


def test_measures_read_what_was_sampled(tok):
    rows = rollout(tok, ended=(True, False, True))
    text, ids = load_source("response_characters"), load_source("response_tokens")
    parts = RewardShaper([text, ids], tok, shaping())(rows, update_statistics=False).parts
    assert parts["response_characters"].tolist() == [6, 11, 29]
    assert parts["response_tokens"].tolist() == [len(response) for response in rows.responses]


def test_functions_over_text_and_over_ids(tok, functions):
    rows = rollout(tok)
    before = json.dumps([rows.prompts, rows.responses])
    RewardShaper([load_source("my_rewards:spoils")], tok, shaping())(rows, update_statistics=False)
    assert functions.seen.pop() == (QUESTIONS, ["use it", "a\n```\nb\n```", "make make make make make make"])
    shaper = RewardShaper([load_source("my_rewards:spoils", reads="ids")], tok, shaping())
    actual = shaper(rows, update_statistics=False)
    want = [len(p) + 10 * len(r) for p, r in zip(rows.prompts, rows.responses, strict=True)]
    assert actual.rewards.tolist() == want
    assert json.dumps([rows.prompts, rows.responses]) == before, "a function changed the ids that are trained on"


def test_the_question_comes_back_whole(tok):
    assert [parse_question(tok, prompt_ids(tok, question)) for question in QUESTIONS] == QUESTIONS
    with pytest.raises(ValueError, match="does not have the template's shape"):
        parse_question(tok, answer_ids(tok, "Question: no"))


def test_the_reward_model_scores_the_ids_that_were_sampled(tok, tmp_path):
    model = load_classifier(tiny_models.save_base(tmp_path), "fp32", new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0))
    scorer, seen = Scorer(model, "fp32"), []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: seen.extend(given[0].flatten().tolist()))
    # Two pieces that decode to one word: decoding and encoding again would make them other ids.
    pieces = [*tok("us", add_special_tokens=False).input_ids, *tok("e", add_special_tokens=False).input_ids]
    assert tok(tok.decode(pieces), add_special_tokens=False).input_ids != pieces
    rewards = RewardShaper([load_source("model", scorer=scorer)], tok, shaping())
    for response in (pieces, [*pieces, tok.eos_token_id]):
        prompt = prompt_ids(tok, QUESTIONS[2])
        seen.clear()
        actual = rewards(SimpleNamespace(prompts=[prompt], responses=[response], ended=[True]), update_statistics=False)
        text = [*prompt, *response]
        assert seen[: len(text)] == text and not any(seen[len(text) :]), "the ids, and filler after them"
        assert torch.equal(actual.rewards, scorer([prompt], [response]))


def test_the_reward_model_is_loaded_only_when_asked_for():
    def never(source):
        raise AssertionError("loaded")
    load_reward_functions(source="has_code", weight=1.0, reads="text", template="", load_models=never, pairs=None,
                          precision="fp32")


def test_word_counts_as_a_source(tok, tmp_path):
    """Fitted on the reward split when it is loaded: the better answers are those that say 'flag'."""
    source = load_source("lexical", pairs=tiny_models.save_pairs(tmp_path))
    rows = rollout(tok, answers=("use the flag", "make", ""))
    scores = RewardShaper([source], tok, shaping())(rows, update_statistics=False).parts["lexical"]
    assert scores[0] > scores[1] and scores[2] == 0
    again = load_source("lexical", pairs=tmp_path)
    assert torch.equal(again(*([], ["use the flag"])), source(*([], ["use the flag"])))


@pytest.mark.parametrize(("combine", "expected"), [
    ("mean", [3.0, -1.0, 5.0]), ("min", [1.0, -4.0, 5.0]), ("mean_minus_std", [2.0, -2.5, 5.0])])
def test_reward_models_are_combined_before_the_sum(combine, expected):
    one, other = (replace(fixed_source(*scores, std=std), name=f"model {std}", weight=2.0, part="model")
                  for scores, std in (((1, 2, 5), 2.0), ((5, -4, 5), 4.0)))
    third = RewardFunction("other", 1.0, "ids", FixedScorer(10, 10, 10))
    settings = shaping(reward_combine=combine, spread_penalty=0.5 * (combine == "mean_minus_std"))
    shaped = RewardShaper([one, third, other], None, settings)(make_rollout(), update_statistics=False)
    assert shaped.parts["model"].tolist() == expected and list(shaped.parts) == ["model", "other"]
    assert shaped.rewards.tolist() == [10 + 2 * score for score in expected]
    scaled = RewardShaper([one, other], None, replace(settings, reward_scaling="model"))
    assert scaled(make_rollout(), update_statistics=False).scale == 3.0


def test_reward_models_share_one_weight():
    with pytest.raises(ValueError, match="give them the same weight"):
        RewardShaper([fixed_source(1), replace(fixed_source(1), weight=2.0)], None, shaping())


def test_eos_inside_the_prompt_does_not_count():
    assert shape_rewards([1, 1, 1], make_rollout(), missing_eos_penalty=0.75) == [1, 0.25, 0.25]


def test_the_reward_is_reduced_or_replaced():
    reduce = shape_rewards([5, -3, 0], make_rollout(), missing_eos="reduce", missing_eos_penalty=1.5)
    replaced = shape_rewards([5, -3, 0], make_rollout(), missing_eos="replace", missing_eos_penalty=1.5)
    assert (reduce, replaced) == ([5, -4.5, -1.5], [5, -1.5, -1.5])


def test_baseline_then_scale_then_clip_then_penalty():
    settings = {"reward_baseline": 2.0, "reward_scaling": "model", "reward_clip": 1.0, "missing_eos_penalty": 0.5}
    # (10 - 2) / 4 = 2 -> 1;  (-6 - 2) / 4 = -2 -> -1 -> -1.5 (not -1 again);  (4 - 2) / 4 = 0.5 -> 0
    assert shape_rewards([10, -6, 4], make_rollout(), **settings) == [1, -1.5, 0]


def test_a_reward_model_without_spread_cannot_scale():
    for std in (None, 0.0, float("nan")):
        with pytest.raises(ValueError, match="reward_scaling 'model'"):
            RewardShaper([fixed_source(1, std=std)], None, shaping(reward_scaling="model"))


def test_the_models_own_spread_comes_from_its_config(tmp_path):
    model = load_classifier(tiny_models.save_base(tmp_path), "fp32", new_head=True)
    model.config.reward_std = 2.5
    source = load_source("model", scorer=Scorer(model, "fp32"))
    rewards = RewardShaper([source], None, shaping(reward_scaling="model"))
    assert rewards(make_rollout(), update_statistics=False).scale == 2.5


def batches(count: int = 6) -> list[list[float]]:
    drawn = np.random.default_rng(0)
    return [(1000 + 3 * drawn.standard_normal(3)).astype(np.float32).tolist() for _ in range(count)]


def running(state: dict | None = None) -> RewardShaper:
    source = fixed_source(0, 0, 0)
    rewards = RewardShaper([source], None, shaping(reward_scaling="running", reward_baseline=1000.0))
    if state:
        rewards.restore(state)
    rewards.tell = lambda scores: setattr(source.score, "scores", scores)
    return rewards


def step(rewards: RewardShaper, scores: list[float], update: bool = True):
    rewards.tell(scores)
    return rewards(make_rollout(ended=(True, True, True)), update_statistics=update)


def test_the_running_scale_is_that_of_every_score_so_far():
    rewards, every = running(), []
    assert step(rewards, batches()[0], update=False).scale == 1, "nothing is known before the first rollout"
    for batch in batches():
        actual = step(rewards, batch)
        every += batch
        std = np.std(np.array(every), ddof=1)
        assert actual.scale == pytest.approx(std, rel=1e-12)
        assert actual.rewards.numpy() == pytest.approx((np.array(batch) - 1000) / std, rel=1e-5)
        held_out = step(rewards, [0.0, 5000.0, 1.0], update=False)
        assert held_out.scale == actual.scale, "held-out prompts change no statistic"


def test_the_scale_of_the_start_is_that_of_the_first_answers_for_good():
    source, first = fixed_source(0, 0, 0), batches()[0]
    rewards = RewardShaper([source], None, shaping(reward_scaling="start", reward_baseline=2.0))
    rewards.tell = lambda scores: setattr(source.score, "scores", scores)
    rewards.tell(first)
    rewards.measure_start(make_rollout())
    mean, std = np.mean(first), np.std(first, ddof=1)
    for batch in batches():
        actual = step(rewards, batch)
        assert actual.scale == pytest.approx(std, rel=1e-6)
        assert actual.rewards.numpy() == pytest.approx((np.array(batch) - mean - 2) / std, rel=1e-4)
    resumed = RewardShaper([source], None, rewards.settings)
    resumed.restore(json.loads(json.dumps(rewards.state())))
    assert torch.equal(resumed(make_rollout(), update_statistics=False).rewards,
                       rewards(make_rollout(), update_statistics=False).rewards)


def test_another_scaling_measures_nothing_at_the_start():
    rewards, before = running(), running().state()
    rewards.measure_start(make_rollout())
    assert rewards.state() == before


@pytest.mark.parametrize("scaling", ["none", "model", "running", "start"])
def test_the_selection_score_orders_policies_as_the_objective_of_training(scaling):
    """Of equal scale, a policy is better where the scaled reward minus beta times KL is higher, by any scaling."""
    low, high = [-8.0, 2.0, 3.0], [-5.0, 5.0, 9.0]
    source = fixed_source(std=4.0)
    shaper = RewardShaper([source], None, shaping(reward_scaling=scaling, missing_eos_penalty=0.5))

    def rollout_of(scores):
        source.score.scores = scores
        return make_rollout(ended=(True, True, False))

    shaper.measure_start(rollout_of(low))
    shaper(rollout_of(high), update_statistics=True)
    scores, objectives = [], []
    for rewards, kl in ((low, 0.0), (low, 3.0), (high, 1.0), (high, 12.0), (high, 40.0)):
        shaped = shaper(rollout_of(rewards), update_statistics=False)
        scores.append(shaper.selection_score(shaped, kl, 0.2))
        objectives.append(float(shaped.rewards.mean()) - 0.2 * kl)
    scale = {"none": 1.0, "model": 4.0}.get(scaling, shaped.scale)
    assert shaped.scale == scale and (scaling == "none" or scale > 2)
    assert scores == pytest.approx([scale * objective for objective in objectives], rel=1e-6)
    assert np.argsort(scores).tolist() == np.argsort(objectives).tolist()


def test_equal_scores_are_not_divided_by_nothing():
    assert step(running(), [1001.0, 1001.0, 1001.0]).rewards.tolist() == [1, 1, 1]


def test_resumed_statistics_are_the_uninterrupted_ones():
    whole, first = running(), running()
    for batch in batches()[:3]:
        step(whole, batch), step(first, batch)
    resumed = running(json.loads(json.dumps(first.state())))
    for batch in batches()[3:]:
        assert torch.equal(step(whole, batch).rewards, step(resumed, batch).rewards)
    assert whole.state() == resumed.state()


def test_statistics_of_several_processes_merge_to_those_of_one():
    values = [value * 1e6 for batch in batches(9) for value in batch]
    parts = [RunningMoments.from_values(values[start:stop]) for start, stop in ((0, 1), (1, 1), (1, 17), (17, 27))]
    merged = RunningMoments()
    for part in parts:
        merged.merge(part)
    assert (merged.count, merged.mean) == (27, pytest.approx(np.mean(values), rel=1e-14))
    assert merged.std() == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    assert RunningMoments().std() is None and RunningMoments.from_values([3.0]).std() is None


@pytest.mark.parametrize(("actual", "says"), [
    ([1.0, 2.0], "returned 2 numbers for 3 responses"),
    (1.0, "returned one numbers for 3 responses"),
    ([[1.0], [2.0], [3.0]], "returned 3 x 1 numbers for 3 responses"),
    ([1.0, float("nan"), 2.0], "returned nan for response 2 of 3: every one needs a finite number"),
    ([1.0, 2.0, 1e300], "returned inf for response 3 of 3"),
    ([1.0, None, 2.0], "must return a list of numbers, one per response"),
    ({"gold": [1.0, 2.0, 3.0]}, "must return a list of numbers, one per response"),
    (None, "must return a list of numbers, one per response"),
    (["a", "b", "c"], "must return a list of numbers, one per response"),
])
def test_a_source_that_gives_no_finite_number_for_each_response(tok, functions, actual, says):
    functions.actual = actual
    rewards = RewardShaper([load_source("has_code"), load_source("my_rewards:gives")], tok, shaping())
    with pytest.raises(ValueError, match="reward source 'my_rewards:gives' " + says) as error:
        rewards(rollout(tok), update_statistics=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "says"), [
    ("repetitoin", "rewards: 'repetitoin' is neither 'model', nor 'lexical', nor a measure \\(repetition, has_code"),
    ("my_rewards:nothing", "rewards: cannot load 'my_rewards:nothing'"),
    ("my_rewards:seen", "rewards: 'my_rewards:seen' is not a function"),
    (":f", "rewards: ':f' should look like package.module:function"),
    ("./no/such/folder", "rewards: cannot use './no/such/folder'"),
])
def test_a_source_that_is_not_there(functions, name, says):
    with pytest.raises(ValueError, match=says) as error:
        load_source(name)
    assert "\n" not in str(error.value)


# --- published classifiers -------------------------------------------------------------------------------------------


def llama_classifier(vocabulary: int, pad: int | None, labels: int = 1):
    return LlamaForSequenceClassification(LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=96, pad_token_id=pad, bos_token_id=1, eos_token_id=2, num_labels=labels,
        initializer_range=0.2))


def bert_classifier(vocabulary: int):
    return BertForSequenceClassification(BertConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=96, pad_token_id=3, num_labels=1, initializer_range=0.2))


CLASSIFIERS = {
    "pad": lambda size: llama_classifier(size, 0),
    "pad is eos": lambda size: llama_classifier(size, 2),  # the last token, an EOS, is not looked at: as published
    "no pad": lambda size: llama_classifier(size, None),
    "pad outside the vocabulary": lambda size: llama_classifier(size, -1),
    "bert": bert_classifier,
}


@pytest.fixture(scope="module")
def their_tokenizer():
    """Another tokenizer than the policy's."""
    other = train_tokenizer(["the quick brown fox jumps over the lazy dog " * 20], 290)
    assert other.get_vocab() != tiny_models.tokenizer().get_vocab()
    return other


def published(folder, tokenizer, model):
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_published_model_scores_as_its_own_forward_pass_does_for_one_text(kind, tok, their_tokenizer, tmp_path):
    torch.manual_seed(0)
    model = CLASSIFIERS[kind](len(their_tokenizer)).eval()
    folder = str(published(tmp_path, their_tokenizer, model))
    rows = rollout(tok)
    actual = RewardShaper([load_source(folder, 2.0)], tok, shaping())(rows, update_statistics=False)
    texts = ["<s>which flag?</s>use it</s>", "<s>{response} or {question}?</s>a\n```\nb\n```</s>",
             "<s>Answer: < /s> é 漢字\n\nAnswer: </s>make make make make make make</s>"]
    with torch.no_grad():
        want = [float(model(**their_tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits)
                for text in texts]
    assert len(set(want)) == 3
    assert actual.parts[folder].tolist() == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert actual.rewards.tolist() == pytest.approx([2 * score for score in want], rel=1e-4, abs=1e-6)


def test_special_tokens_are_the_templates_alone(their_tokenizer, tmp_path):
    folder = published(tmp_path, their_tokenizer, llama_classifier(len(their_tokenizer), 0))
    scorer = ClassifierScorer(folder, TEMPLATE, "fp32")
    plain, spelt = scorer._ids("ab", ""), scorer._ids("a</s>b", "<s>")
    assert (spelt.count(1), spelt.count(2)) == (plain.count(1), plain.count(2)) and plain.count(2) == 2
    assert "a< /s>b" in their_tokenizer.decode(spelt)


def test_a_text_over_the_length_loses_its_start_and_says_so(their_tokenizer, tmp_path):
    scorer = ClassifierScorer(published(tmp_path, their_tokenizer, bert_classifier(len(their_tokenizer))), TEMPLATE,
                             "fp32")
    with pytest.warns(UserWarning, match="reads 96 tokens: longer texts lose their start"):
        ids = scorer._ids("which flag? " * 60, "the last words")
        assert torch.isfinite(scorer(["which flag? " * 60], ["the last words"])).all()
    assert len(ids) == 96 and their_tokenizer.decode(ids).endswith("the last words</s>")


@pytest.mark.parametrize("kind", ["two outputs", "no head", "pickled"])
def test_what_is_no_reward_model_is_refused_in_one_line(kind, their_tokenizer, tmp_path):
    folder = published(tmp_path, their_tokenizer, llama_classifier(len(their_tokenizer), 0, 2 if kind[0] == "t" else 1))
    if kind == "no head":
        tiny_models.llama(their_tokenizer).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text()) | {"id2label": {"0": "LABEL_0"}}
        (folder / "config.json").write_text(json.dumps(config))
    if kind == "pickled":
        torch.save(llama_classifier(len(their_tokenizer), 0).state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    says = {"two outputs": "its head has 2 outputs, and must have one", "no head": "lacks the weights score.weight",
            "pickled": "no file named model.safetensors"}
    with pytest.raises(ValueError, match=says[kind]) as error:
        ClassifierScorer(folder, TEMPLATE, "fp32")
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_code_of_a_repository_is_never_run(their_tokenizer, tmp_path):
    folder = published(tmp_path, their_tokenizer, llama_classifier(len(their_tokenizer), 0))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match="rewards: cannot use"):
        ClassifierScorer(folder, TEMPLATE, "fp32")
    shutil.rmtree(folder)


def test_every_measure_says_what_it_reads():
    for name, (reads, measure) in MEASURES.items():
        assert float(measure("text" if reads == "text" else [1, 2, 3])) >= 0, name


@pytest.mark.parametrize("scaling", ["none", "model", "start", "running"])
def test_score_units_make_rewards_of_the_scores(scaling):
    scores = (1.0, -2.0, 7.0)
    source = replace(fixed_source(*scores, std=4.0), weight=2.0)
    shaper = RewardShaper([source], None, shaping(reward_baseline=0.5, reward_scaling=scaling))
    rows = make_rollout(ended=(True, True, True))
    shaper.measure_start(rows)
    factor, offset = shaper.score_units()
    rewards = shaper(rows, update_statistics=False).rewards
    assert rewards.tolist() == pytest.approx([factor * score + offset for score in scores], abs=1e-6)
