"""Inputs of the CPU kernels, and how near their results must come to float64."""

import pytest
import torch
from transformers.models.llama import modeling_llama

from stages.modeling.packed.sequences import pack

NEAR = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # of the largest value
dtypes = pytest.mark.parametrize("dtype", NEAR, ids=["fp32", "bf16"])


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def is_close(actual, expected, dtype=torch.float32):
    difference = float((actual.double() - expected).detach().abs().max())
    return difference <= NEAR[dtype] * float(expected.detach().abs().max())


def pack_lengths(lengths):
    """And its rows' tokens."""
    batch = pack([[7] * length for length in lengths])
    pairs = zip(batch.starts.tolist(), lengths, strict=True)
    return batch, [list(range(start, start + length)) for start, length in pairs]


def llama_norm(width):
    norm = modeling_llama.LlamaRMSNorm(width, eps=0.3)
    norm.weight.data = gaussian(width, seed=4)
    return norm


def with_gradients(compute, *inputs):
    """What it computes, and its gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    actual = compute(*inputs)
    return actual.detach(), *torch.autograd.grad(actual, inputs, gaussian(*actual.shape, seed=8).to(actual))
