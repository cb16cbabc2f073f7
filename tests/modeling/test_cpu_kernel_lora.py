"""Adapted linear layers by the kernels against PEFT's in float64, forward and backward, and the kernel's dropout."""

from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from stages.modeling import lora
from stages.modeling.cpu_kernels import build
from stages.modeling.cpu_kernels import linear as kernel_lora
from stages.modeling.load import autocast, load_causal
from stages.modeling.packed.forward import packed_hidden_states
from stages.reward_modeling.load import load_classifier
from tests.helpers.architectures import FAMILIES, save
from tests.helpers.kernel_inputs import dtypes, gaussian, is_close, pack_lengths

pytestmark = pytest.mark.skipif(build.load_library() is None, reason=f"no kernels: {build.status()}")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KEEP_SHARE = 2 / 3
INPUTS, OUTPUTS, RANK = 40, 24, 6


class Holder(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.layer = nn.Linear(INPUTS, OUTPUTS, bias=bias)

    def forward(self, x):
        return self.layer(x)


@pytest.fixture
def adapted(monkeypatch):
    """A function that returns an adapted bf16 layer with kernels, and a list of its kernels' calls."""
    calls = []
    plain = kernel_lora.apply
    monkeypatch.setattr(kernel_lora, "apply", lambda *rest: (calls.append(rest[0]), plain(*rest))[1])

    def build_layer(dropout=0.0, bias=False, dtype=torch.bfloat16):
        torch.manual_seed(3)
        config = LoraConfig(r=RANK, lora_alpha=5, lora_dropout=dropout, target_modules=["layer"],
                            init_lora_weights=False)
        holder = Holder(bias).to(dtype).requires_grad_(False)
        inject_adapter_in_model(config, holder)
        layer = holder.layer
        for matrices in (layer.lora_A, layer.lora_B):
            matrices.float()
        kernel_lora.replace_lora_layers(holder)
        return layer

    build_layer.calls = calls
    return build_layer


def gradients(layer, x):
    """What the layer computes, and the gradients of its input and its adapter."""
    x = x.detach().requires_grad_()
    out = layer(x)
    adapter = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    return out.detach(), *torch.autograd.grad(out, [x, *adapter], gaussian(*out.shape, seed=8).to(out))


@dtypes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(19,), (3, 5)])
def test_outputs_and_gradients_are_pefts(adapted, rows, bias, dtype):
    layer, x = adapted(bias=bias, dtype=dtype), gaussian(*rows, INPUTS, dtype=dtype)
    exact = deepcopy(layer).double()
    actual, expected = gradients(layer, x), gradients(exact, x.double())
    assert adapted.calls == [kernel_lora.LoraProduct]  # the exact layer is PEFT's own
    assert [one.dtype for one in actual] == [dtype, dtype, torch.float32, torch.float32]
    assert all(is_close(a, b, dtype) for a, b in zip(actual, expected, strict=True))


def test_the_backward_pass_has_the_forwards_mask(adapted):
    """The layer's own matrix is 0 and those of the adapter choose inputs, so that the output shows the mask."""
    layer = adapted(dropout=1 - KEEP_SHARE).train()
    with torch.no_grad():
        layer.get_base_layer().weight.zero_()
        layer.lora_A["default"].weight.copy_(torch.eye(RANK, INPUTS))
        layer.lora_B["default"].weight.copy_(torch.eye(OUTPUTS, RANK))
    x = torch.ones(400, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(5)
    out = layer(x)
    out.sum().backward()
    mask = out[:, :RANK] != 0
    scale = layer.scaling["default"] / KEEP_SHARE
    assert torch.allclose(out[:, :RANK].float(), mask * scale, rtol=0.01)
    assert torch.allclose(x.grad[:, :RANK].float(), mask * scale, rtol=0.01) and not x.grad[:, RANK:].any()
    counts = mask.float().sum(0)
    gradient = layer.lora_A["default"].weight.grad
    assert torch.allclose(gradient[:, :RANK].diagonal(), counts * scale, rtol=0.01)
    torch.manual_seed(5)
    assert torch.equal(layer(x), out) and not torch.equal(layer(x), out)  # drawn from torch's generator
    assert torch.equal(layer.eval()(x)[:, :RANK], torch.full((400, RANK), layer.scaling["default"]).bfloat16())


def drop(x, seed, probability=1 - KEEP_SHARE, added_to=None):
    out = torch.empty_like(x) if added_to is None else added_to
    build.call("dropout", x, x, out, x.numel(), seed, probability, int(added_to is not None))
    return out


@dtypes
def test_dropout_keeps_its_share_of_values_and_scales_them(dtype):
    x, count = gaussian(100_003, dtype=dtype), 100_003
    mask = drop(x, 1 << 61) != 0
    assert is_close(drop(x, 1 << 61), (mask * x.double() / KEEP_SHARE), dtype)
    assert abs(mask.float().mean() - KEEP_SHARE) < 4 * (KEEP_SHARE * (1 - KEEP_SHARE) / count) ** 0.5
    assert torch.equal(drop(x[:77].clone(), 1 << 61), drop(x, 1 << 61)[:77])
    assert is_close(drop(x, 9, added_to=x.clone()), x.double() + drop(x.double().float(), 9).double(), dtype)
    assert torch.equal(drop(x, 9, probability=0.0), x)


def test_masks_of_neighbours_and_of_other_seeds_are_independent():
    ones, both, deviation = torch.ones(100_000), KEEP_SHARE ** 2 + (1 - KEEP_SHARE) ** 2, 4 * (0.25 / 100_000) ** 0.5
    seeds = (0, 1, 2, 1 << 32, (1 << 32) + 1, 123456789123456789)
    masks = [drop(ones, seed) != 0 for seed in seeds]
    for index, mask in enumerate(masks):
        for shift in (1, 2, 16, 64, 576, 4096):
            assert abs((mask == mask.roll(shift)).float().mean() - both) < deviation, (index, shift)
        for other in masks[:index]:
            assert abs((mask == other).float().mean() - both) < deviation, index


def test_what_the_kernels_do_not_compute_goes_pefts_way(adapted):
    layer, x = adapted(), gaussian(4, INPUTS, dtype=torch.bfloat16)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.get_base_layer()(x))
    layer.enable_adapters(True)
    layer.update_layer("other", r=3, lora_alpha=3, init_lora_weights=True, config=LoraConfig(r=3, lora_alpha=3))
    layer.set_adapter(["default", "other"])
    assert layer(x).shape == (4, OUTPUTS) and not adapted.calls
    layer.set_adapter("other")
    assert torch.equal(layer(x), layer.get_base_layer()(x)) and len(adapted.calls) == 1  # it begins at 0
    with torch.autocast("cpu", torch.bfloat16):
        assert adapted(dtype=torch.float32)(x.float()).dtype == torch.bfloat16 and len(adapted.calls) == 1


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_row_does_not_depend_on_the_others(adapted, rows):
    """Decoding and the forward pass of an update compute few and many rows."""
    layer, x = adapted(), gaussian(300, INPUTS, dtype=torch.bfloat16)
    assert torch.equal(layer(x[:rows]), layer(x)[:rows])


@pytest.mark.parametrize(("precision", "setting", "uses"), [("bf16", "auto", True), ("bf16", "off", False),
                                                            ("fp32", "auto", True), ("mixed", "auto", False)])
def test_the_model_that_is_trained_computes_with_them(adapted, tmp_path, precision, setting, uses):
    folder = save(FAMILIES["llama"], tmp_path / "base")
    model = lora.add_lora(load_causal(folder, precision, setting), r=2, alpha=4, dropout=0.0,
                          target_modules=TARGETS, precision=precision)
    with autocast(precision):
        packed_hidden_states(model.get_base_model(), pack_lengths([3, 5])[0], torch.tensor([2, 7]))
    assert len(adapted.calls) == (len(lora.adapted_layers(model)) if uses else 0)


def test_all_that_learns_is_in_fp32(tmp_path):
    """A step of 1e-4 would be rounded away in bf16."""
    base = load_classifier(save(FAMILIES["llama"], tmp_path / "base"), "bf16", new_head=True)
    model = lora.add_lora(base, r=2, alpha=4, dropout=0.0, target_modules=TARGETS, precision="bf16", scorer=True)
    learning = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert set(learning.values()) == {torch.float32} and any("score" in name for name in learning)
