"""Questions computed once for all their answers: the same states and gradients as separate texts."""

import random

import pytest
import torch

from stages.modeling.load import load_causal
from stages.modeling.packed import forward
from stages.modeling.packed.sequences import pack_responses, scatter_to_rows
from stages.modeling.packed.shared_prefix import pack_rows, pack_with_shared_prefix, row_lengths
from stages.modeling.packed.token_logprobs import response_logprobs
from tests.helpers.architectures import FAMILIES, save

RNG = random.Random(0)


def ids(count: int) -> list[int]:
    return [RNG.randrange(3, 120) for _ in range(count)]


PROMPTS = [ids(9), ids(1), ids(30)]
ANSWERS = [[ids(4), ids(17), ids(1)], [ids(5)], [ids(2), ids(2), ids(20), ids(7)]]
SEPARATE = [(prompt, answer) for prompt, own in zip(PROMPTS, ANSWERS, strict=True) for answer in own]
every_family = pytest.mark.parametrize("family", FAMILIES)


def states(model, texts, wanted):
    return forward.packed_hidden_states(model, texts.batch, wanted)


def both():
    device = torch.device("cpu")
    separate = pack_responses(*map(list, zip(*SEPARATE, strict=True)), device)
    return pack_with_shared_prefix(PROMPTS, ANSWERS, device), separate


def test_question_tokens_stand_once_and_texts_say_where_everything_is():
    shared, apart = both()
    assert shared.batch.num_tokens == sum(map(len, PROMPTS)) + sum(len(a) for own in ANSWERS for a in own)
    assert shared.token_ids.tolist() == apart.token_ids.tolist() == [t for _, answer in SEPARATE for t in answer]
    flat = shared.batch.input_ids[0]
    assert flat[shared.last_positions].tolist() == [answer[-1] for _, answer in SEPARATE]
    starts = [0, *torch.tensor([len(answer) for _, answer in SEPARATE]).cumsum(0).tolist()[:-1]]
    assert flat[shared.predictor_positions[starts]].tolist() == [prompt[-1] for prompt, _ in SEPARATE]
    assert torch.equal(shared.scatter_index, apart.scatter_index) and torch.equal(shared.mask, apart.mask)


@every_family
def test_states_and_gradients_are_those_of_separate_texts(family, tmp_path):
    model = load_causal(save(FAMILIES[family], tmp_path))
    weights = torch.randn(sum(len(answer) for _, answer in SEPARATE), generator=torch.Generator().manual_seed(0))
    actual = []
    for texts in both():
        model.requires_grad_(True).zero_grad()
        own, before = states(model, texts, texts.positions), states(model, texts, texts.predictor_positions)
        ((own + 2 * before).sum(-1) * weights).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        actual.append((own.detach(), before.detach(), gradients))
    (own, before, gradients), (own_, before_, gradients_) = actual
    torch.testing.assert_close(own, own_, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(before, before_, atol=2e-5, rtol=1e-4)
    assert gradients.keys() == gradients_.keys() and len(gradients) > 10
    for name, gradient in gradients.items():
        scale = max(1.0, float(gradients_[name].abs().max()))
        torch.testing.assert_close(gradient / scale, gradients_[name] / scale, atol=1e-5, rtol=0)


def pack_both(prompts, answers):
    device = torch.device("cpu")
    return tuple(pack_rows(prompts, answers, device, share_prompts=share) for share in (True, False))


def test_prompts_that_come_several_times_in_any_order_are_packed_once(tmp_path):
    rows = [SEPARATE[i] for i in (5, 0, 3, 7, 1, 4, 2, 6)]
    prompts, answers = map(list, zip(*rows, strict=True))
    shared, apart = pack_both(prompts, answers)
    assert shared.batch.num_tokens == sum(map(len, PROMPTS)) + sum(map(len, answers)) < apart.batch.num_tokens
    assert torch.equal(shared.mask, apart.mask) and torch.equal(shared.batch.lengths, apart.batch.lengths)
    model = load_causal(save(FAMILIES["llama"], tmp_path))
    for name in ("token_ids", "positions", "predictor_positions"):
        one, other = (scatter_to_rows(getattr(texts, name).float() if name == "token_ids" else
                                      states(model, texts, getattr(texts, name)).sum(-1), texts)
                      for texts in (shared, apart))
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    last, last_ = (states(model, texts, texts.last_positions) for texts in (shared, apart))
    torch.testing.assert_close(last, last_, atol=2e-5, rtol=1e-4)


def test_prompts_that_take_turns_keep_their_responses_log_probabilities(tmp_path):
    prompts, responses = [[5, 6, 7], [8, 9, 10], [5, 6, 7], [8, 9, 10]], [[7, 8], [9, 10], [11, 12], [13, 14]]
    model = load_causal(save(FAMILIES["llama"], tmp_path))
    together = response_logprobs(model, prompts, responses, 1.0)
    alone = [response_logprobs(model, [prompts[i]], [responses[i]], 1.0)[0] for i in range(len(prompts))]
    torch.testing.assert_close(torch.stack(together), torch.stack(alone), atol=2e-5, rtol=1e-4)


def test_prompts_that_differ_are_packed_as_they_were():
    prompts, answers = PROMPTS, [own[0] for own in ANSWERS]
    shared, apart = pack_both(prompts, answers)
    assert not shared.batch.shares_prefixes and torch.equal(shared.batch.input_ids, apart.batch.input_ids)


def test_rows_of_a_prompt_have_the_length_of_its_longest():
    assert row_lengths([[1, 2], [3], [1, 2]], [[4], [5], [6, 7, 8]], share_prompts=True) == [5, 2, 5]
