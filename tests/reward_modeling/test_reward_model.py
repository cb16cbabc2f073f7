"""The head, where it is read, and that it is never lost (CORRECTNESS R2-R4, R6, M2, failures 1 and 8)."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from stages.modeling import lora, tokenizer
from stages.modeling.load import load_causal
from stages.modeling.packed import forward
from stages.modeling.packed.sequences import pack_responses, scatter_to_rows
from stages.reward_modeling.dataset import build_examples, collate_examples, pair_indices
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.reward_model import (
    SUM_UNIT_TOKENS,
    check_tied_embeddings,
    initialise_head,
    occurrence_weights,
    score_packed,
)
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import Scoring, describe_scoring, save_scoring
from tests.helpers import tiny_models
from tests.helpers.padded_states import last_hidden_states

TEXTS = [[1, 40, 50, 60, 2], [1, 45, 2], [1, 90, 2, 91, 92, 93, 2]]  # the last has an EOS inside


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """A reward adapter that has moved away from its initial values, as after training."""
    model = load_classifier(base, "fp32", new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0))
    model = lora.add_lora(model, r=4, alpha=8, dropout=0.0, target_modules=(), precision="fp32", scorer=True)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    folder = tmp_path_factory.mktemp("models") / "reward"
    model.eval().save_pretrained(folder)
    tokenizer.load_tokenizer(base).save_pretrained(folder)
    scores = score(model, TEXTS)
    reference = [row[:1] for row in TEXTS], [row[1:] for row in TEXTS]
    save_scoring(folder, describe_scoring(Scoring(), "fp32", reference, scores))
    return folder, scores


@pytest.fixture(scope="module")
def scorer_model(base):
    model = load_classifier(base, "fp32", new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0))
    return model


@torch.no_grad()
def score(model, rows, weight=0.0, pooling="last"):
    """Raw scores of rows whose first token is the prompt."""
    texts = pack_responses([row[:1] for row in rows], [row[1:] for row in rows], torch.device("cpu"))
    return score_packed(model, texts, Scoring(pooling, weight)).scores


@pytest.mark.parametrize("pooling", ["last", "mean", "sum"])
@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_score_does_not_depend_on_the_other_rows_or_their_order(scorer_model, weight, pooling):
    alone = torch.cat([score(scorer_model, [row], weight, pooling) for row in TEXTS])
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        actual = score(scorer_model, [TEXTS[i] for i in order], weight, pooling)
        assert torch.allclose(actual, alone[order], atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [0, 2, 7])
def test_transformers_own_head_gives_the_same_whatever_the_padding(scorer_model, side, pad):
    """Right and left padding, and any filler: what others compute with our folders is what we compute without pads."""
    ids, mask = forward.pad_batch(TEXTS, side)
    ids = torch.where(mask.bool(), ids, pad)
    with torch.no_grad():
        states = last_hidden_states(scorer_model, ids, mask)
        last = (mask * torch.arange(ids.shape[1])).argmax(-1)
        theirs = scorer_model.score(states[range(len(TEXTS)), last]).squeeze(-1)
    assert torch.allclose(theirs, score(scorer_model, TEXTS), atol=1e-5)


def test_pooling_reads_the_answers_tokens(scorer_model):
    """By hand: the head's outputs at them, averaged, or summed in hundreds, repeated ones for less."""
    for row in [*TEXTS, [1, 9, 8, 9, 9, 8, 2]]:
        with torch.no_grad():
            outputs = (scorer_model.model(torch.tensor([row])).last_hidden_state[0] @ scorer_model.score.weight[0])[1:]
        weights = [math.log2(1 + 1 / (1 + row[1:i].count(token))) for i, token in enumerate(row) if i]
        summed = (outputs * torch.tensor(weights)).sum() / SUM_UNIT_TOKENS
        for pooling, expected in (("mean", outputs.mean()), ("sum", summed)):
            assert float(score(scorer_model, [row], 0.0, pooling)) == pytest.approx(float(expected), abs=1e-6)


def test_only_the_last_real_position_is_read(scorer_model):
    """By hand: the trunk's state at that position times the head."""
    with torch.no_grad():
        hidden = scorer_model.model(torch.tensor([TEXTS[2]])).last_hidden_state[0] @ scorer_model.score.weight[0]
    assert float(score(scorer_model, [TEXTS[2]])) == pytest.approx(float(hidden[-1]), abs=1e-6)


def test_n_occurrences_of_a_token_count_as_their_logarithm():
    answers = [[5] * 7, [5, 6, 5, 5], [7]]
    texts = pack_responses([[1]] * 3, answers, torch.device("cpu"))
    weights = scatter_to_rows(occurrence_weights(texts), texts).sum(-1)
    assert weights.tolist() == pytest.approx([math.log2(8), math.log2(4) + 1, 1.0])


def test_the_log_probability_term_is_the_language_models_own(scorer_model, base):
    """Against the causal model of the same weights, the mean over the answer's tokens by hand."""
    language_model = load_causal(base)
    for row in TEXTS:
        with torch.no_grad():
            log_p = torch.log_softmax(language_model(torch.tensor([row])).logits[0].double(), -1)
        mean = sum(float(log_p[t - 1, row[t]]) for t in range(1, len(row))) / (len(row) - 1)
        term = score(scorer_model, [row], 2.0) - score(scorer_model, [row], 0.0)
        assert float(term) == pytest.approx(2.0 * mean, abs=1e-4)


def test_the_log_probability_term_is_refused_where_the_output_layer_is_not_tied(scorer_model):
    check_tied_embeddings(scorer_model.config, 1.0, "log_probability_weight")
    untied = type(scorer_model.config)(tie_word_embeddings=False)
    check_tied_embeddings(untied, 0.0, "log_probability_weight")
    with pytest.raises(ValueError, match=r"reward\.language_model_weight needs .* tied"):
        check_tied_embeddings(untied, 1.0, "language_model_weight")


def test_agrees_with_transformers_own_head(scorer_model):
    with torch.no_grad():
        for row in TEXTS:
            ids = torch.tensor([row])
            own = scorer_model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            assert float(own) == pytest.approx(float(score(scorer_model, [row])), abs=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_plain_transformers_gives_the_reward_that_ppo_sees(base, adapter, tmp_path, side):
    """The logit of AutoModelForSequenceClassification, minus config.reward_mean, with padded rows."""
    tiny_models.merge(base, [adapter[0]], tmp_path / "merged")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tok = AutoTokenizer.from_pretrained(tmp_path / "merged", padding_side=side)
    batch = tok.pad({"input_ids": TEXTS}, return_tensors="pt")
    assert batch.input_ids.eq(model.config.pad_token_id).any() and type(model).__module__.startswith("transformers.")
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.squeeze(-1)
    scorer = Scorer(load_classifier(tmp_path / "merged"), "fp32")
    rewards = scorer([row[:1] for row in TEXTS], [row[1:] for row in TEXTS])
    assert scorer.mean != 0 and torch.allclose(logits - model.config.reward_mean, rewards, atol=1e-5)


def test_head_starts_normal_with_variance_one_over_width_plus_one(base):
    model = load_classifier(base, "fp32", new_head=True)
    draws = []
    for seed in range(200):
        initialise_head(model, torch.Generator().manual_seed(seed))
        draws.append(model.score.weight.detach().clone())
    width = model.config.hidden_size
    assert float(torch.cat(draws).std()) == pytest.approx(1 / math.sqrt(width + 1), rel=0.05)
    initialise_head(model, torch.Generator().manual_seed(0), "sum")
    assert not model.score.weight.any()


def test_scores_are_the_same_before_saving_after_reload_and_after_merging(base, adapter, tmp_path):
    folder, before = adapter
    tiny_models.merge(base, [folder], tmp_path / "merged")
    merged = load_classifier(tmp_path / "merged")
    assert torch.allclose(score(merged, TEXTS), before, atol=1e-4)
    saved = load_file(folder / "adapter_model.safetensors")
    assert torch.equal(merged.score.weight, next(t for name, t in saved.items() if name.endswith("score.weight")))


def test_reference_answers_average_zero_through_the_scorer(base, adapter, tmp_path):
    tiny_models.merge(base, [adapter[0]], tmp_path / "merged")
    scorer = Scorer(load_classifier(tmp_path / "merged"), "fp32", batch_rows=2)
    rewards = scorer([text[:1] for text in TEXTS], [text[1:] for text in TEXTS])
    assert float(rewards.mean()) == pytest.approx(0.0, abs=1e-5) and float(rewards.std()) > 1e-3


def test_scoring_with_dropout_on_is_refused(scorer_model):
    scorer_model.train()
    with pytest.raises(AssertionError, match="dropout"):
        Scorer(scorer_model, "fp32")([[1]], [[5, 2]])
    scorer_model.eval()


def test_an_adapter_without_its_head_is_refused(base, adapter, tmp_path):
    shutil.copytree(adapter[0], tmp_path / "headless")
    weights = tmp_path / "headless" / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(weights).items() if "score" not in name}, weights)
    with pytest.raises(ValueError, match="no score head"):
        tiny_models.merge(base, [tmp_path / "headless"], tmp_path / "merged")


def test_a_merged_model_without_its_head_is_refused(base):
    with pytest.raises(ValueError, match=r"score\.weight"):
        load_classifier(base)


def rows(pairs):
    return [{"site": "s", "qid": q, "question": f"q{q}", "response_j": j, "response_k": k, "score_j": 3, "score_k": 1}
            for q, j, k in pairs]


def test_by_question_every_answer_stands_once_and_every_pair_is_kept():
    tok = tiny_models.tokenizer()
    table = rows([(1, "a", "b"), (1, "a", "c"), (1, "b", "c"), (2, "d", "e")])
    made, dropped = build_examples(table, tok, max_length_tokens=99, by_question=True, max_pairs=99)
    assert [(len(e.answers), e.pairs) for e in made] == [(3, [(0, 1), (0, 2), (1, 2)]), (2, [(0, 1)])] and dropped == 0
    assert pair_indices(made) == ([0, 0, 1, 3], [1, 2, 2, 4])
    assert collate_examples(made) == {"content": made, "items": 4, "lengths": [17, 15]}
    assert made[0].score_gaps == [2, 2, 2]


def test_over_long_pairs_are_dropped_and_counted():
    tok = tiny_models.tokenizer()
    made, dropped = build_examples(
        rows([(1, "a", "b" * 400), (2, "a", "b")]), tok, max_length_tokens=60, by_question=False, max_pairs=9
    )
    assert len(made) == 1 and dropped == 1


def test_a_prompt_is_computed_with_each_answer_unless_it_is_to_be_shared(base, scorer_model):
    """Scores of answers to one prompt have the bits that they have beside other prompts: PPO's reward has them."""
    prompts, answers = [[1, 40, 50, 60]] * 3, [[70, 2], [45, 46, 2], [90, 91, 92, 2]]
    packed = pack_responses(prompts[::-1], answers[::-1], scorer_model.device)  # by length, as a batch is sorted
    expected = score_packed(scorer_model, packed, Scoring()).scores.flip(0)
    assert torch.equal(Scorer(scorer_model, "fp32")(prompts, answers), expected)
    tokens = []
    hook = scorer_model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True)
    try:
        shared = Scorer(scorer_model, "fp32", share_prompts=True)(prompts, answers)
        Scorer(scorer_model, "fp32")(prompts, answers)
    finally:
        hook.remove()
    torch.testing.assert_close(shared, expected, atol=1e-5, rtol=1e-5)
    assert tokens[0] < tokens[1]
