"""Kernels of layers against float64, forward and backward, and which models compute with them."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import LlamaConfig, modeling_llama

from stages.modeling.cpu_kernels import build, layers
from stages.modeling.cpu_kernels.layers import subclass
from stages.modeling.load import load_causal
from stages.modeling.packed import forward
from tests.helpers.architectures import FAMILIES, save
from tests.helpers.kernel_inputs import NEAR, dtypes, gaussian, is_close, llama_norm, pack_lengths, with_gradients

pytestmark = pytest.mark.skipif(build.load_library() is None, reason=f"no kernels: {build.status()}")


@pytest.fixture
def llama(tmp_path):
    return load_causal(save(FAMILIES["llama"], tmp_path / "base"), cpu_kernels="auto")


def with_kernel(module, mixin):
    module.__class__ = subclass(type(module), mixin)
    return module


def rotary():
    """LLaMA's function of queries and keys, as a model with kernels calls it."""
    return layers._rotary_subclass(modeling_llama.LlamaAttention).forward.__globals__[layers.ROTARY]


@pytest.fixture
def called(monkeypatch):
    """Names of the kernels that layers call, in order."""
    names = []
    monkeypatch.setattr(layers, "call", lambda name, *rest: (names.append(name), build.call(name, *rest)))
    return names


def all_close(actual, expected, dtype=torch.float32):
    return all(x.dtype == dtype and is_close(x, y, dtype) for x, y in zip(actual, expected, strict=True))


@dtypes
@pytest.mark.parametrize("width", [16, 40, 7])
def test_the_norm_is_the_familys_and_so_are_its_gradients(called, width, dtype):
    def exact(x, weight):
        return weight * x / (x.square().mean(-1, keepdim=True) + 0.3).sqrt()

    def by_class(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, x)

    norm = with_kernel(llama_norm(width), layers.KernelRMSNorm)
    given = (gaussian(2, 9, width, dtype=dtype) / 2, gaussian(width, seed=4, dtype=dtype))
    doubles = [x.double() for x in given]
    actual, expected = with_gradients(by_class, *given), with_gradients(exact, *doubles)
    assert called == ["rms_norm", "rms_norm_backward"] and all_close(actual, expected, dtype)
    assert is_close(by_class(*doubles), expected[0]) and len(called) == 2


@dtypes
def test_the_gated_block_is_the_familys_and_so_are_its_gradients(called, dtype):
    config = LlamaConfig(hidden_size=24, intermediate_size=50, num_attention_heads=2)
    block, exact = (modeling_llama.LlamaMLP(config).to(kind) for kind in (dtype, torch.float64))
    exact.load_state_dict(block.state_dict())
    with_kernel(block, layers.KernelMLP)
    x = gaussian(3, 11, 24, dtype=dtype)
    actual = with_gradients(block, x)
    assert called == ["swiglu", "swiglu_backward"] and all_close(actual, with_gradients(exact, x.double()), dtype)
    assert len(called) == 2


def test_without_gradients_the_same_bytes_come_without_autograds_wrapper(llama, monkeypatch):
    batch = torch.arange(20).view(2, 10)
    recorded = llama(batch).logits
    monkeypatch.setattr(torch.autograd.Function, "apply", None)
    with torch.no_grad():
        assert torch.equal(llama(batch).logits, recorded)


@dtypes
def test_gates_of_any_size(dtype):
    gate = torch.cat([torch.linspace(-200, 200, 4001), torch.linspace(-3, 3, 999)]).to(dtype)
    up = gaussian(len(gate), dtype=dtype)
    actual = with_gradients(layers.SwiGLU.apply, gate, up)
    expected = with_gradients(lambda x, y: functional.silu(x) * y, gate.double(), up.double())
    for x, y, least in zip(actual, expected, (1e-35, NEAR[dtype] / 10, NEAR[dtype] / 10), strict=True):
        assert torch.allclose(x.double(), y, rtol=NEAR[dtype], atol=least)
    assert torch.equal(actual[0], layers.SwiGLU.apply(gate.float(), up.float()).to(dtype))  # rounded to nearest, even


@dtypes
@pytest.mark.parametrize("shape", [(1, 3, 17, 12), (5, 3, 1, 64), (1, 2, 1, 20)])
def test_the_rotation_is_the_familys_and_so_are_its_gradients(called, shape, dtype):
    rotate, places = rotary(), (shape[0], shape[2], shape[3])
    cos, sin = (gaussian(*places, seed=i, dtype=dtype) for i in (5, 6))  # no two halves alike
    query = gaussian(shape[0], shape[2], *shape[1:4:2], dtype=dtype).transpose(1, 2)
    for which in (0, 1):
        actual = with_gradients(lambda x, which=which: rotate(x, x, cos, sin)[which], query)
        exact = [x.double() for x in (cos, sin, query)]
        expected = with_gradients(lambda x, which=which, exact=exact: rotate(x, x, *exact[:2])[which], exact[2])
        assert all_close(actual, expected, dtype)
    assert called == ["apply_rotary"] * 6


def test_a_batch_side_by_side_turns_the_familys_own_way(called):
    query, cos = gaussian(2, 3, 5, 8), gaussian(2, 5, 8, seed=1)
    expected = modeling_llama.apply_rotary_pos_emb(*(x.double() for x in (query, query, cos, cos)))[0]
    assert is_close(rotary()(query, query, cos, cos)[0], expected) and not called


def test_other_families_functions_stay_their_own():
    """Cohere turns neighbours; SeedOss drops out behind its gate, in training alone."""
    shape = {"hidden_size": 24, "intermediate_size": 50, "num_attention_heads": 2, "num_key_value_heads": 2,
             "num_hidden_layers": 1, "vocab_size": 8, "head_dim": 12, "pad_token_id": 0}
    replaced = []
    for family, name in [("cohere", "self_attn"), ("seed_oss", "mlp"), ("qwen3", "mlp"), ("qwen3", "self_attn")]:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
        module = getattr(model.model.layers[0], name)
        own = type(module)
        layers.replace_layers(model)
        replaced.append(type(module) is not own)
    assert replaced == [False, False, True, True]


def test_other_dtypes_and_compiled_models_go_the_ordinary_way(called):
    assert build.supports(gaussian(1)) and not build.supports(gaussian(1).half())
    assert not build.supports(gaussian(1), gaussian(1).double())
    norm = with_kernel(llama_norm(8), layers.KernelRMSNorm)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)(gaussian(2, 8))
    assert not called and torch.allclose(compiled, norm(gaussian(2, 8)), atol=1e-6) and called == ["rms_norm"]


def test_only_the_loaded_model_computes_with_kernels(called, llama, tmp_path):
    kinds = [modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP, modeling_llama.LlamaAttention]
    forwards = [vars(kind)["forward"] for kind in kinds]
    other, again = load_causal(tmp_path / "base"), load_causal(tmp_path / "base", cpu_kernels="auto")
    assert [vars(kind)["forward"] for kind in kinds] == forwards
    assert modeling_llama.apply_rotary_pos_emb.__module__ == modeling_llama.__name__
    assert {type(module) for module in other.modules()} & {type(module) for module in again.modules()} >= {nn.Linear}
    used = {}
    for name, model in {"other": other, "llama": llama, "again": again, "copy": deepcopy(again)}.items():
        called.clear()
        forward.packed_hidden_states(model, pack_lengths([3, 5])[0], torch.tensor([2, 7]))
        used[name] = set(called), forward.uses_cpu_kernels(model)
        assert all(isinstance(model.model.layers[0].get_submodule(part), kind)
                   for part, kind in zip(("input_layernorm", "mlp", "self_attn"), kinds, strict=True))
    kernels = {"rms_norm", "swiglu", "apply_rotary"}
    assert used == {"other": (set(), False)} | dict.fromkeys(("llama", "again", "copy"), (kernels, True))
