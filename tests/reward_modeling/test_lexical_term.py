"""The reward model's lexical term: the right counts, the right minimum, unseen questions only, and never lost."""

import json
import math
import shutil
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from stages import reward
from stages.evaluation.surface_baseline import PENALTY, logistic
from stages.modeling import tokenizer
from stages.recipe.models import Lora
from stages.recipe.reward import Reward
from stages.reward_modeling import consistency, lexical_fit
from stages.reward_modeling.dataset import examples, pair_indices
from stages.reward_modeling.lexical_term import BLOCK, FILE, MIXING, Lexical, characters_of, counts, fitted
from stages.reward_modeling.load import load_merged_reward, load_scorer
from stages.reward_modeling.loss import PairwiseLoss
from stages.reward_modeling.reward_model import initialise_head, read
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import SCORING, Scoring
from stages.rl.load import load_policy
from stages.stackexchange.pairs.table import rows_of
from tests.helpers import tiny_models

ANSWERS = [[5, 6, 5, 7], [9], [5, 6, 6, 6, 6], [7, 5, 2], [8, 8, 2], [5, 7, 9, 11, 13]]
CHARACTERS = 1 + torch.arange(200_000) % 5  # of each token
PAIRS = [(0, 1), (0, 4), (2, 3), (2, 4), (3, 4), (5, 1), (1, 2)]


def bag(answer, buckets) -> list[float]:
    """Of one answer [K + 1], in plain Python."""
    single, pair = MIXING
    words = [(token + 1) * single for token in answer]
    words += [((a * single % 2**64) ^ b) * pair for a, b in pairwise(answer)]
    found = Counter(word % 2**64 // 2**32 % buckets for word in words)
    return [math.log1p(found[bucket]) for bucket in range(buckets)] + [
        10 * math.log1p(sum(1 + token % 5 for token in answer))]


def test_counts_against_plain_python():
    weights = torch.randn(14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = np.array([bag(answer, 13) for answer in ANSWERS]) @ weights.numpy()
    assert np.allclose(counts(ANSWERS, 13, CHARACTERS).scores(weights).numpy(), expected, rtol=0, atol=1e-12)
    assert np.allclose(Lexical(weights, CHARACTERS)(ANSWERS).numpy(), expected, rtol=1e-6, atol=1e-5)
    assert len({tuple(bag([a, b], 1 << 18)) for a in range(6) for b in range(6)}) == 36, "order matters, none collide"


def test_the_fit_is_that_of_newtons_method():
    bags = counts(ANSWERS, 13, CHARACTERS)
    better, worse = zip(*PAIRS, strict=True)
    others = torch.zeros(len(ANSWERS), dtype=torch.float64)
    found = fitted(bags, better, worse, buckets=13, penalty=PENALTY, others=others)
    rows = np.array([bag(answer, 13) for answer in ANSWERS])
    assert np.allclose(found.numpy(), logistic(rows[list(better)] - rows[list(worse)]), atol=1e-6)


def test_the_fit_leaves_no_slope_beside_what_is_given():
    bags, (better, worse) = counts(ANSWERS, 13, CHARACTERS), zip(*PAIRS, strict=True)
    others = torch.tensor([0.0, 2.0, -1.0, 0.5, 1.0, 3.0], dtype=torch.float64)
    weights = fitted(bags, better, worse, buckets=13, penalty=0.3, others=others).numpy()
    rows = np.array([bag(answer, 13) for answer in ANSWERS])
    slope = 0.3 * weights
    for j, k in PAIRS:
        gap = (rows[j] - rows[k]) @ weights + float(others[j] - others[k])
        slope -= (rows[j] - rows[k]) / (1 + math.exp(gap))
    assert np.abs(slope).max() < 1e-5 and np.abs(weights).max() > 0.1  # at weights of 0 it is above 10


@pytest.mark.parametrize("answers", [[], [[]], [[], [5]], [[5], [], []]])
def test_no_answer_and_an_empty_one_have_a_score(answers):
    weights = torch.arange(1.0, 15.0, dtype=torch.float64)
    assert Lexical(weights, CHARACTERS)(answers).tolist() == pytest.approx(
        [float(np.dot(bag(answer, 13), weights)) for answer in answers], rel=1e-6)


def test_more_answers_than_are_worked_on_at_a_time():
    generator = np.random.default_rng(0)
    answers = [generator.integers(0, 200_000, generator.integers(0, 40)).tolist() for _ in range(2 * BLOCK + 1)]
    weights = torch.randn(98, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bags = counts(answers, 97, CHARACTERS)
    rows = torch.tensor([bag(answer, 97) for answer in answers], dtype=torch.float64)
    by_score = torch.randn(len(answers), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(bags.scores(weights), rows @ weights, rtol=0, atol=1e-10)
    assert torch.allclose(bags.slope(by_score, 97), rows.T @ by_score, rtol=0, atol=1e-10)


def test_bags_of_many_answers_take_little_memory():
    answers = [list(range(first, first + 500)) for first in range(400)]
    found = counts(answers, 1 << 18, CHARACTERS)
    entries = int(found.sizes.sum())
    assert entries > 390_000
    assert sum(part.numel() * part.element_size() for part in found) < 6.1 * entries


def test_characters_are_those_of_the_text():
    tok = tiny_models.tokenizer()
    characters = characters_of(tok)
    for text in ("use the flag port file", " with  tool\n\nrun: `--x`", "naïve"):
        assert int(characters[tok.encode(text, add_special_tokens=False)].sum()) == len(text.encode())
    assert not characters[tok.all_special_ids].any() and len(characters) == 1 + max(tok.get_vocab().values())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lexical")
    return tiny_models.save_base(folder / "base"), tiny_models.save_pairs(folder / "pairs")


def learnt(base, pairs, change=lambda items: None, weight=0.0, by_question=True):
    """The term, and the items with what they are given."""
    items, _ = examples(rows_of(pairs, "reward"), tokenizer.load_tokenizer(base), max_length_tokens=200,
                        by_question=by_question, max_pairs=99)
    change(items)
    model = load_scorer(base, "fp32", new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0))
    term = lexical_fit.stacked(model, items, Scoring("last", weight), "fp32", buckets=256, penalty=1.0,
                            characters=characters_of(tokenizer.load_tokenizer(base)))
    return term, items


@pytest.mark.parametrize("by_question", [True, False])
def test_what_an_item_is_given_comes_from_other_questions(made, by_question):
    """The first question's answers swapped: its own given scores stay, those of other folds move."""
    def swap(items):
        for item in items:
            if item.question == items[0].question:
                item.pairs = [(k, j) for j, k in item.pairs]

    (_, before), (_, after) = (learnt(*made, change, by_question=by_question) for change in (lambda _: None, swap))
    moved = {item.question: not np.allclose(item.given, other.given, atol=1e-7)
             for item, other in zip(before, after, strict=True)}
    assert not moved[before[0].question]
    assert sum(moved.values()) == pytest.approx(0.8 * len(moved), abs=1)


def test_the_term_finds_the_word_that_decides(made):
    term, items = learnt(*made)
    better, worse = pair_indices(items)
    given = np.concatenate([item.given for item in items])
    assert (given[better] > given[worse]).mean() > 0.95
    with_flag, without = (tokenizer.load_tokenizer(made[0]).encode(text, add_special_tokens=False)
                          for text in ("use the flag 7", "use the port 7"))
    one, other = term([with_flag, without])
    assert one > other


def test_the_log_probability_is_taken_into_account_and_not_learnt_twice(made):
    (term, items), (alone, _) = learnt(*made, weight=3.0), learnt(*made)
    assert not torch.allclose(term.weights, alone.weights, atol=1e-3)
    better, worse = pair_indices(items)
    model = load_scorer(made[0], "fp32", new_head=True)
    with torch.no_grad():
        expected = [
            float(read(model, lexical_fit.branching([item.prompt], [[answer]], model.device), Scoring(), True).log_p)
            for item in items for answer in item.answers]
    bags = counts([answer for item in items for answer in item.answers], 256, term.characters)
    again = fitted(bags, better, worse, buckets=256, penalty=1.0, others=3 * torch.tensor(expected).double())
    assert torch.allclose(term.weights, again, atol=1e-4)


def test_the_loss_is_that_of_head_and_given_scores_together(made):
    _, items = learnt(*made)
    model = load_scorer(made[0], "fp32", new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0))
    plain = deepcopy(items)
    for item in plain:
        item.given = []
    expected = 0.0
    with torch.no_grad():
        for item, bare in zip(items, plain, strict=True):
            texts = lexical_fit.branching([bare.prompt], [bare.answers], model.device)
            scores = (read(model, texts, Scoring()).scores + torch.tensor(item.given)).tolist()
            expected += sum(math.log1p(math.exp(scores[k] - scores[j])) for j, k in item.pairs)
        found = PairwiseLoss().summed_loss(model, items, Scoring(), "fp32")
        assert float(found) == pytest.approx(expected, rel=1e-5)
        assert float(found) != pytest.approx(float(PairwiseLoss().summed_loss(model, plain, Scoring(), "fp32")), rel=1e-3)


CONFIG = Reward(lora=Lora(r=4, dropout=0.0), precision="fp32", batching="question", pooling="sum", batch_pairs=4,
                microbatch_pairs=2, epochs=1.0, learning_rate=1e-3, validation_share=0.2, save_every_steps=4,
                log_probability_weight=0.5, lexical_buckets=256, lexical_penalty=1.0, members=2)
TEXTS = [[1, 5, 6], [1, 9], [1, 12]], [[40, 41, 2], [42, 2], [50, 51, 52, 2]]


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory):
    out = tmp_path_factory.mktemp("lexical") / "reward"
    out.mkdir()
    return out, reward.run(CONFIG, out, base=made[0], pairs=made[1])


@pytest.mark.parametrize("member", ["", "member-1"])
def test_adapter_and_merged_model_score_with_the_term(made, trained, member, tmp_path):
    folder = trained[0] / member
    tiny_models.merge(made[0], [folder], tmp_path / "merged")
    merged = load_merged_reward(tmp_path / "merged", "fp32")
    policy = load_policy(made[0], trained[0], tune="lora", value_model="head", precision="fp32",
                                 temperature=1.0, lora={"r": 2, "alpha": 4, "dropout": 0.0, "target_modules": ()})
    shared = policy.scorer(folder, 8, "reward")
    scores = merged(*TEXTS)
    assert torch.allclose(scores, shared(*TEXTS), atol=1e-4)
    term = Lexical.load(folder)
    without = Scorer(merged.model, "fp32", words=Lexical(0 * term.weights, term.characters))(*TEXTS)
    assert torch.allclose(scores - without, term(TEXTS[1]), atol=1e-5) and float(term(TEXTS[1]).std()) > 1e-3
    assert consistency.agreement(merged, folder).correlation == pytest.approx(1, abs=1e-5)
    assert (tmp_path / "merged" / FILE).read_bytes() == (folder / FILE).read_bytes()


def test_the_stage_ranks_better_with_the_term_and_keeps_its_zero(made, trained, tmp_path):
    out, metrics = trained
    alone = reward.run(replace(CONFIG, lexical_buckets=0, members=1), tmp_path, base=made[0], pairs=made[1])
    assert metrics["validation_accuracy"] > 0.95 > alone["validation_accuracy"]
    assert not (tmp_path / FILE).exists()
    known = json.loads((out / SCORING).read_text())
    assert np.mean([example["score"] for example in known["examples"]]) == pytest.approx(known["mean"], abs=1e-4)


def test_a_term_that_is_lost_is_missed(made, trained, tmp_path):
    tiny_models.merge(made[0], [trained[0]], tmp_path / "merged")
    (tmp_path / "merged" / FILE).unlink()
    with pytest.raises(ValueError, match=f"merged has lost its {FILE}"):
        load_merged_reward(tmp_path / "merged", "fp32")
    shutil.copytree(trained[0], tmp_path / "adapter")
    (tmp_path / "adapter" / FILE).unlink()
    with pytest.raises(ValueError, match=f"adapter has lost its {FILE}"):
        tiny_models.merge(made[0], [tmp_path / "adapter"], tmp_path / "other")


def test_a_new_head_begins_without_the_term_of_the_model_it_is_put_on(made, trained, tmp_path):
    tiny_models.merge(made[0], [trained[0]], tmp_path / "merged")
    assert load_scorer(tmp_path / "merged").lexical is not None
    assert load_scorer(tmp_path / "merged", new_head=True).lexical is None


@pytest.mark.parametrize("log_to", [("jsonl",), ("terminal", "jsonl")])
def test_it_is_as_silent_as_the_training(made, tmp_path, capsys, log_to):
    capsys.readouterr()
    reward.run(replace(CONFIG, log_to=log_to, members=1), tmp_path, base=made[0], pairs=made[1])
    said = capsys.readouterr().err
    assert ("reward, lexical term" in said, "log-probabilities" in said) == (("terminal" in log_to),) * 2
    assert ("reward, " in said) == ("terminal" in log_to)


@pytest.mark.parametrize("wrong", [{"lexical_buckets": -1}, {"lexical_penalty": 0.0}])
def test_absurd_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="lexical_buckets must be 0 or more"):
        Reward(**wrong)
