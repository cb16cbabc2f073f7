"""Sampling, scoring and updates in bf16 through 30 layers: they agree to the bit, or the check tells rounding from
faults and the loss corrects for what remains.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.generation.kv_cache import PackedKVCache
from stages.generation.sampler import sample
from stages.modeling import lora
from stages.modeling.cpu_kernels.build import load_library
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import load_tokenizer
from stages.rl.checks import startup
from stages.rl.policy import Policy
from tests.helpers import tiny_models

PROMPTS = [[1, *range(40 + i, 60 + 2 * i)] for i in range(8)]
TARGETS = ("q_proj", "o_proj", "down_proj")
LAYERS = 30
needs_kernels = pytest.mark.skipif(load_library() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A base of 30 layers, width 64, with 2 query heads per key head, in bf16.

    No product of 8 rows has fewer than 4,096 multiplications: torch computes smaller ones in another way, and some of
    them round differently from those of many rows.
    """
    folder, tokenizer = tmp_path_factory.mktemp("models") / "deep", tiny_models.tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1,
        bos_token_id=1, eos_token_id=2, pad_token_id=0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make(base, precision, cpu_kernels):
    torch.manual_seed(0)
    model = load_causal(base, precision, cpu_kernels)
    adapted = lora.add_lora(model, r=16, alpha=16, dropout=0.0, target_modules=TARGETS, precision=precision)
    return Policy(adapted, 1.0, precision)


def draw(policy, temperature=1.0, tokens=24):
    with policy.merge_adapter() as model:
        return sample(model, PROMPTS, max_new_tokens=tokens, temperature=temperature, stop_ids=[],
                      precision=policy.precision, generator=torch.Generator().manual_seed(0),
                      value_fn=policy.values_from_hidden)


def start(policy, rollout, base):
    lines = []
    report = startup.run_checks(policy, rollout, load_tokenizer(base), {}, clip_range=0.2, microbatch_prompts=4,
                                say=lines.append)
    return report, lines


@needs_kernels
@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_with_the_kernels_an_adapter_that_has_learnt_is_sampled_and_scored_to_the_bit(deep, precision):
    policy = make(deep, precision, "auto")
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters().items():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    rollout = draw(policy)
    with torch.no_grad():
        scores = policy(rollout.prompts, rollout.responses)
    assert (scores.logprobs - rollout.logprobs).abs().max() < 2e-6  # the softmax alone is computed in two ways
    assert (scores.values - rollout.values).abs().max() < 2e-6 * scores.values.abs().max()


@needs_kernels
@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_with_the_kernels_the_samplers_numbers_are_reused(deep, precision):
    policy = make(deep, precision, "auto")
    report, _ = start(policy, draw(policy), deep)
    assert report.keep_rollout_log_p and report.rollout_log_p_difference < 1e-5 and report.ratio_deviation < 1e-5


def later_positions(monkeypatch):
    step = PackedKVCache.step
    monkeypatch.setattr(PackedKVCache, "step", lambda self: step(self) + 1)


def short_mask(monkeypatch):
    mask = PackedKVCache.mask
    monkeypatch.setattr(PackedKVCache, "mask", lambda self, window: mask(self, 8))


def nothing(monkeypatch):
    pass


@needs_kernels
@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_another_samplers_rounding_passes_and_a_fault_does_not(deep, precision, monkeypatch):
    policy, sampler = make(deep, precision, "auto"), make(deep, precision, "off")
    report, lines = start(policy, draw(sampler), deep)
    assert not report.keep_rollout_log_p and report.rollout_log_p_difference > 0.005
    assert sum("ratio of old to sampler's  1 within" in line for line in lines) == 1
    for fault, temperature in ((later_positions, 1.0), (short_mask, 1.0), (nothing, 0.8)):
        with monkeypatch.context() as patched:
            fault(patched)
            with pytest.raises(ValueError, match=r"and rounding explains .* sampling and scoring differ in temperatur"):
                start(policy, draw(sampler, temperature), deep)
