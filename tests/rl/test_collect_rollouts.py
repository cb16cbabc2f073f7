"""Lengths and ends of responses in a run (CORRECTNESS G3, G4, G5; the published 32 to 128)."""

import pytest
import torch

from stages.rl.collect_rollouts import SamplingParams, collect_rollout
from tests.rl.test_policy import PROMPTS, make_policy, perturb

MOST = 12


def drawn(kind="until_stop", stop_ids=(2,), seed=0, policy=None, rows=8):
    how = SamplingParams(1.0, stop_ids, kind, min_response_tokens=5, max_response_tokens=MOST)
    policy = policy or perturb(make_policy())
    return collect_rollout(policy, PROMPTS * rows, how, torch.Generator().manual_seed(seed), forward_prompts=8)


def test_sampled_lengths_fill_the_published_range():
    actual = drawn("sampled", stop_ids=(), rows=60)
    lengths = [len(response) for response in actual.responses]
    assert set(lengths) == set(range(5, MOST + 1)) and not any(actual.ended)
    assert sum(lengths) / len(lengths) == pytest.approx((5 + MOST) / 2, abs=0.6)
    assert lengths != [len(response) for response in drawn("sampled", stop_ids=(), rows=60, seed=1).responses]


def test_sampling_from_merged_weights_gives_them_back_to_the_last_bit():
    policy = perturb(make_policy())
    before = {name: p.clone() for name, p in policy.named_parameters()}
    merged = drawn(policy=policy)
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    with torch.no_grad():
        scored = policy(merged.prompts, merged.responses)
        assert torch.allclose(scored.logprobs, merged.logprobs, atol=2e-5)
        assert (policy.ref_logprobs(merged.prompts, merged.responses) - merged.logprobs).abs().max() > 0.1
    with pytest.raises(RuntimeError), policy.merge_adapter():
        raise RuntimeError
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
