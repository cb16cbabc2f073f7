"""Sampling: the sampled distribution is the scored one, batches do not matter (CORRECTNESS G1-G4, failures 9, 24)."""

import pytest
import torch

from stages.generation.sampler import rollout_mode, sample, sample_in_batches
from tests.helpers import tiny_models

PROMPTS = [[1, 40, 50, 60, 70, 80], [1, 45], [1, 90, 91, 92], [1, 33, 34, 35, 36, 37, 38, 39]]


def draw(model, prompts, **changes):
    generator = torch.Generator().manual_seed(3)
    settings = {"max_new_tokens": 24, "temperature": 1.0, "stop_ids": (2,), "generator": generator}
    return sample(model, prompts, **(settings | changes))


@pytest.fixture(scope="module")
def models():
    tok = tiny_models.tokenizer()
    return {"llama": tiny_models.llama(tok), "gpt2": tiny_models.gpt2(len(tok))}


def eager_to_end(model, eos_bias: float):
    """The same model with EOS made likelier, so that rows end at different steps."""
    head = model.get_output_embeddings()
    head.register_forward_hook(
        lambda module, inputs, output: output.index_add(
            -1, torch.tensor([2]), torch.full((*output.shape[:-1], 1), eos_bias)
        )
    )
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_batched_greedy_equals_single_greedy_for_ragged_prompts(models, family):
    batched = draw(models[family], PROMPTS, temperature=0)
    single = [draw(models[family], [prompt], temperature=0).responses[0] for prompt in PROMPTS]
    assert batched.responses == single


def test_responses_stop_at_the_first_eos_and_keep_it():
    rollout = draw(eager_to_end(tiny_models.llama(tiny_models.tokenizer()), 5.0), PROMPTS * 8)
    assert any(rollout.ended) and len({len(r) for r in rollout.responses}) > 2
    for response, ended in zip(rollout.responses, rollout.ended, strict=True):
        assert (2 in response) == ended and 2 not in response[:-1]
        assert ended or len(response) == 24


def test_a_row_does_not_depend_on_which_others_have_ended():
    model = eager_to_end(tiny_models.llama(tiny_models.tokenizer()), 4.0)
    with_others = draw(model, PROMPTS * 4)
    never_ending = draw(model, PROMPTS * 4, stop_ids=())  # nobody leaves the batch
    for prefix, long in zip(with_others.responses, never_ending.responses, strict=True):
        assert long[: len(prefix)] == prefix


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_are_drawn_from_the_softmax_at_the_temperature(models, temperature):
    model, prompt, draws = models["llama"], [1, 40, 50], 6000
    rollout = draw(model, [prompt] * draws, max_new_tokens=1, temperature=temperature)
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double() / temperature, -1)
    counts = torch.bincount(torch.tensor([r[0] for r in rollout.responses]), minlength=len(expected)) / draws
    sd = (expected * (1 - expected) / draws).sqrt()
    assert ((counts - expected).abs() < 5 * sd + 2 / draws).all()
    assert (counts - expected).abs().sum() < 0.2


def test_same_generator_same_tokens_and_another_seed_others(models):
    again = [draw(models["llama"], PROMPTS).responses for _ in range(2)]
    assert again[0] == again[1] != draw(models["llama"], PROMPTS, generator=torch.Generator().manual_seed(4)).responses


def test_batches_keep_the_order_of_the_prompts(models):
    rollout = sample_in_batches(
        models["llama"],
        PROMPTS,
        3,
        seed=0,
        max_new_tokens=8,
        temperature=0,
        stop_ids=(2,),
    )
    assert rollout.responses == [
        draw(models["llama"], [p], temperature=0, max_new_tokens=8).responses[0] for p in PROMPTS
    ]


def test_two_models_meet_the_same_random_numbers_however_long_their_answers():
    """One model ends its answers early, the other never: the second batch must not feel it."""
    settings = {"seed": 5, "max_new_tokens": 12, "temperature": 1.0}
    model = eager_to_end(tiny_models.llama(tiny_models.tokenizer()), 5.0)
    short = sample_in_batches(model, PROMPTS * 2, 3, stop_ids=(2,), **settings)
    long = sample_in_batches(model, PROMPTS * 2, 3, stop_ids=(), **settings)
    assert sum(map(len, short.responses)) < sum(map(len, long.responses))
    assert all(b[: len(a)] == a for a, b in zip(short.responses, long.responses, strict=True))


def test_the_mode_is_restored_even_when_sampling_fails(models):
    model = models["llama"].train()
    with pytest.raises(RuntimeError), rollout_mode(model):
        assert not model.training
        raise RuntimeError
    assert model.training
    model.eval()
