"""Lengths and ends of responses in a run (CORRECTNESS G3, G4, G5; the published 32 to 128)."""

import pytest
import torch

from stages.generation.rollout import Rollout
from stages.generation.sampling_params import SamplingParams, cut_at_stop
from stages.rl.collect_rollouts import collect_rollout
from tests.rl.test_policy import PROMPTS, make_policy, perturb

MOST = 12


def drawn(kind="until_stop", stop_ids=(2,), seed=0, policy=None, rows=8):
    how = SamplingParams(1.0, stop_ids, kind, min_response_tokens=5, max_response_tokens=MOST,
                         top_k=0, top_p=1.0)
    policy = policy or perturb(make_policy())
    return collect_rollout(policy, PROMPTS * rows, how, torch.Generator().manual_seed(seed), forward_prompts=8)


def frequent_ids(count=4):
    """Ids that a few responses of this policy hold, so that some end early, some late and some never."""
    tokens = torch.tensor([token for response in drawn(stop_ids=()).responses for token in response])
    return tuple(torch.bincount(tokens).argsort(descending=True)[:count].tolist())


def test_fixed_length_cut_at_the_first_stop_id_is_a_true_stop():
    """Each row draws its own random numbers, so the tokens up to the stop are the same."""
    stop = frequent_ids()
    stopped, cut = drawn(stop_ids=stop), drawn("fixed", stop_ids=stop)
    assert cut.responses == stopped.responses and cut.ended == stopped.ended
    assert {True, False} == set(cut.ended) and len({len(r) for r in cut.responses}) > 3
    for name in ("logprobs", "values", "entropy"):
        assert torch.allclose(getattr(cut, name), getattr(stopped, name), atol=1e-5)
    assert all((row[len(r) :] == 0).all() for row, r in zip(cut.logprobs, cut.responses, strict=True))


def test_the_stop_id_is_kept_and_what_follows_is_gone():
    numbers = torch.arange(6.0).view(2, 3) + 1
    rollout = Rollout([[1, 9], [1]], [[5, 9, 6], [7, 8, 6]], [False, False], numbers, numbers, numbers)
    cut = cut_at_stop(rollout, (9,))
    assert cut.responses == [[5, 9], [7, 8, 6]] and cut.ended == [True, False]
    assert cut.logprobs.tolist() == [[1, 2, 0], [4, 5, 6]]
    alone = cut_at_stop(Rollout([[9]], [[5, 9, 6]], [False], numbers[:1], None, None), (9,))
    assert alone.logprobs.tolist() == [[1, 2]] and alone.values is None


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
