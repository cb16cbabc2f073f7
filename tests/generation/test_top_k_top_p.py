"""Top-k and top-p: what is sampled is what is scored, under old, new and reference (CORRECTNESS G1, feature 6)."""

import math

import pytest
import torch

from stages.generation.sampler import sample
from stages.generation.token_sampling import allowed_token_ids
from stages.recipe.sections.ppo import Ppo
from stages.rl.policy_gradient_trainer import update_policy
from tests.helpers import tiny_models
from tests.helpers.trajectories import build_trajectory
from tests.rl.test_policy import PROMPTS, UPDATE, make_policy, perturb

HOW = {"max_new_tokens": 10, "temperature": 0.7, "stop_ids": (2,), "top_k": 7, "top_p": 0.8}


def drawn(policy, prompts=PROMPTS, **changed):
    settings = HOW | {"generator": torch.Generator().manual_seed(0), "value_fn": policy.values_from_hidden} | changed
    return sample(policy.model, prompts, **settings)


def filtered_by_hand(logits, top_k, top_p):
    """{id: log-probability} of one row, in plain Python: the likeliest k, then those before top_p is reached."""
    whole = math.log(sum(math.exp(x) for x in logits))
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    of_k, top_ids, mass = sum(math.exp(logits[i] - whole) for i in order), [], 0.0
    for i in order:
        if mass < top_p:
            top_ids.append(i)
        mass += math.exp(logits[i] - whole) / of_k
    rest = sum(math.exp(logits[i] - whole) for i in top_ids)
    return {i: logits[i] - whole - math.log(rest) for i in top_ids}


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (9, 0.6), (1, 0.5), (400, 0.9)])
def test_the_sampler_scores_what_it_sampled_from(top_k, top_p):
    policy = perturb(make_policy(temperature=0.7))
    rollout = drawn(policy, top_k=top_k, top_p=top_p)
    vocabulary = policy.model.get_output_embeddings().out_features
    assert rollout.allowed_token_ids.shape[-1] == min(top_k, vocabulary) < 400  # no room for more than there are
    rows = zip(PROMPTS, rollout.responses, rollout.logprobs, rollout.allowed_token_ids, strict=True)
    for prompt, response, logprobs, ids in rows:
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double() / 0.7
        for place, token in enumerate(response):
            expected = filtered_by_hand(logits[place].tolist(), top_k, top_p)
            assert set(ids[place].tolist()) - {-1} == set(expected)
            assert float(logprobs[place]) == pytest.approx(expected[token], abs=1e-4)


def test_old_new_and_reference_are_of_the_same_tokens():
    policy = perturb(make_policy(temperature=0.7))
    rollout = drawn(policy)
    still = torch.optim.SGD(policy.trainable_parameters().values(), lr=0.0)
    for keep in (True, False):
        seen = build_trajectory(policy, rollout, torch.tensor([1.0, -1.0, 0.5, 2.0]), 0.1, reuse_rollout_logprobs=keep)
        assert torch.allclose(seen.logprobs, rollout.logprobs, atol=1e-5)
        actual = update_policy(policy, still, seen, UPDATE, torch.Generator().manual_seed(0))
        assert actual["ratio"] == pytest.approx(1.0, abs=1e-5) and actual["clip_fraction"] == 0
    with policy.model.disable_adapter(), torch.no_grad():
        prompt, response = rollout.prompts[0], rollout.responses[0]
        logits = policy.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double() / 0.7
        allowed = rollout.allowed_token_ids[0, : len(response)]
        for place, token in enumerate(response):
            ids = [i for i in allowed[place].tolist() if i >= 0]
            expected = logits[place, token] - logits[place, ids].logsumexp(0)
            assert float(seen.ref_logprobs[0, place]) == pytest.approx(float(expected), abs=1e-4)


def test_a_fresh_adapter_has_no_kl_under_a_filter_either():
    policy = make_policy(temperature=0.7)
    assert build_trajectory(policy, drawn(policy), torch.zeros(4), 0.1).sequence_kl() == 0.0


def test_its_gradient_is_that_of_autograd():
    policy = perturb(make_policy(temperature=0.7))
    rollout = drawn(policy, PROMPTS[:1])
    ids, length = torch.tensor([rollout.prompts[0] + rollout.responses[0]]), len(rollout.prompts[0])

    def gradient(total):
        policy.zero_grad()
        total.backward()
        return torch.cat([p.grad.flatten() for p in policy.trainable_parameters().values() if p.grad is not None])

    ours = gradient(policy(rollout.prompts, rollout.responses, rollout.allowed_token_ids).logprobs.sum())
    logits = policy.model(ids).logits[0, length - 1 : -1] / 0.7
    outside = torch.ones_like(logits, dtype=torch.bool)
    for place in range(len(logits)):
        outside[place, [i for i in rollout.allowed_token_ids[0, place].tolist() if i >= 0]] = False
    scores = logits.masked_fill(outside, float("-inf")).log_softmax(-1)
    expected = gradient(scores.gather(-1, ids[0, length:, None]).sum())
    assert torch.allclose(ours, expected, atol=1e-5) and expected.norm() > 0.1


def test_greedy_is_greedy_and_top_p_keeps_at_least_one():
    policy = perturb(make_policy())
    assert drawn(policy, temperature=0).responses == drawn(policy, temperature=0, top_k=0, top_p=1.0).responses
    assert allowed_token_ids(torch.tensor([[9.0, 1.0, 0.0]]), 3, 0.01).tolist() == [[0, -1, -1]]


def test_top_p_alone_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="top_p alone may keep any number of tokens"):
        Ppo(top_p=0.9)
    assert Ppo(top_p=0.9, top_k=50).top_k == 50


def test_a_filter_larger_than_the_vocabulary_is_none():
    policy = perturb(make_policy())
    everything = len(tiny_models.tokenizer()) + 100
    plain, filtered = drawn(policy, top_k=0, top_p=1.0), drawn(policy, top_k=everything, top_p=1.0)
    assert torch.allclose(plain.entropy[:, 0], filtered.entropy[:, 0], atol=1e-5)
