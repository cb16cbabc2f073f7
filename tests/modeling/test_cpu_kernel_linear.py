"""Linear layers with packed weights: torch's results to the bit, in a layer and in a model that decodes."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig

from stages.generation import sampler
from stages.modeling import lora
from stages.modeling.cpu_kernels import build, linear
from stages.modeling.cpu_kernels.linear import replace_lora_layers
from stages.modeling.load import load_causal
from tests.helpers.architectures import GROUPED, save
from tests.helpers.kernel_inputs import gaussian, is_close

library = build.load_library()
pytestmark = pytest.mark.skipif(not (library and library.has_bf16_products()),
                                reason=f"no bf16 products on this processor, or no kernels: {build.status()}")
SIZES = [(16, 2), (48, 34), (16, 640), (192, 576), (576, 1536), (1040, 64)]  # outputs, inputs
SAMPLING = {"temperature": 1.0, "stop_ids": [], "precision": "bf16", "max_new_tokens": 12}


class Holder(nn.Module):
    def __init__(self, outputs, inputs, bias):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs, bias=bias)
        self.layer.weight.data = gaussian(outputs, inputs, seed=1) * 0.1


def make_layer(outputs, inputs, rank=None, bias=False):
    holder = Holder(outputs, inputs, bias).bfloat16().requires_grad_(False)
    if rank:
        config = LoraConfig(r=rank, lora_alpha=3 * rank, target_modules=["layer"], init_lora_weights=False)
        inject_adapter_in_model(config, holder)
        holder.layer.lora_A.float(), holder.layer.lora_B.float()
        replace_lora_layers(holder)
    return holder.eval()


@pytest.fixture
def calls(monkeypatch):
    """The rows of each call of the kernel."""
    rows, call = [], linear.call
    monkeypatch.setattr(linear, "call", lambda name, *rest: (
        rows.append(rest[-2]) if name == "linear" else None, call(name, *rest)))
    return rows


def own_and_packed(holder, x):
    """A pass over the rows of an update, of which x are the first, and the kernel's."""
    with torch.no_grad():
        own = holder.layer(torch.cat([x, gaussian(2000, x.shape[1], seed=5).bfloat16()]))[: len(x)]
        with linear.packed_weights(holder, enabled=True):
            return own, holder.layer(x)


@pytest.mark.parametrize(("rank", "bias"), [(None, False), (None, True), (16, False), (32, True)])
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_gives_the_bits_of_torch_for_any_number_of_rows(size, rank, bias, calls):
    holder = make_layer(*size, rank, bias)
    for rows in (1, 2, 3, 8, 13, 16, 31, 64):
        x = gaussian(rows, size[1], seed=rows).bfloat16()
        x[0] *= 1e15
        own, packed = own_and_packed(holder, x)
        assert torch.equal(own, packed) and rows in calls
    with torch.no_grad():
        layer = holder.layer
        exact = functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        if rank:
            down, up = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
            exact += 3 * (x.double() @ down.T @ up.T)
    assert is_close(packed[1:], exact[1:], torch.bfloat16)


def test_sums_that_cancel_out_have_the_rounding_of_torch():
    for outputs, inputs in [*SIZES, (64, 2048)]:
        half, weight = gaussian(5, inputs // 2).bfloat16(), gaussian(outputs, inputs // 2, seed=1).bfloat16()
        holder = make_layer(outputs, inputs)
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(2))
        holder.layer.weight.data = torch.cat([weight, -weight], 1)[:, order]
        own, packed = own_and_packed(holder, torch.cat([half, half], 1)[:, order])
        assert torch.equal(own, packed) and (inputs < 512 or own.any())


def test_a_nan_and_any_number_of_threads():
    before, results = torch.get_num_threads(), []
    holder, x = make_layer(576, 576, 16), gaussian(9, 576).bfloat16()
    x[4, 7] = torch.nan
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(own_and_packed(holder, x)[1])
    finally:
        torch.set_num_threads(before)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert results[0][4].isnan().all() and all(torch.equal(x[others], results[0][others]) for x in results)


def test_what_the_kernel_does_not_know_takes_the_layers_own_forward(monkeypatch, calls):
    holder = make_layer(32, 34, 16)
    x, layer = gaussian(3, 34).bfloat16(), holder.layer
    with linear.packed_weights(holder, enabled=True):
        calls.clear()  # of the comparisons
        packed = layer(x)  # gradients are recorded
        with torch.no_grad():
            assert len(layer(gaussian(65, 34).bfloat16())) == 65 and not calls
            layer.enable_adapters(False)
            assert not torch.equal(layer(x), packed) and not calls
            layer.enable_adapters(True)
            assert torch.equal(layer(x), packed) and calls == [3]
    assert "forward" not in vars(layer)
    for other in (make_layer(32, 34, 8), make_layer(24, 34), make_layer(32, 33), make_layer(32, 34).float()):
        with linear.packed_weights(other, enabled=True):
            assert "forward" not in vars(other.layer)
    monkeypatch.setattr(linear, "BLOCKS", (6,))  # as if oneDNN added in an order that is not known here
    linear.summed_inputs.cache_clear()
    with linear.packed_weights(make_layer(32, 36), enabled=True) as nothing:
        assert nothing is None and linear.summed_inputs(32, 36) is None
    linear.summed_inputs.cache_clear()


def test_weights_are_packed_anew_and_an_error_leaves_no_trace(calls):
    holder, x = make_layer(16, 32), gaussian(2, 32).bfloat16()
    before, _ = own_and_packed(holder, x)
    holder.layer.weight.data *= 2
    own, packed = own_and_packed(holder, x)
    assert torch.equal(own, packed) and torch.equal(own, 2 * before)
    with pytest.raises(KeyError), linear.packed_weights(holder, enabled=True):
        raise KeyError
    assert "forward" not in vars(holder.layer)


@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "lora"])
def test_a_model_samples_the_same_tokens_and_numbers_with_packed_weights(adapter, tmp_path, calls, monkeypatch):
    shape = GROUPED | {"hidden_size": 64, "intermediate_size": 96}
    folder = save(LlamaConfig(**shape, tie_word_embeddings=False), tmp_path / "base")
    model = load_causal(folder, "bf16", cpu_kernels="auto")
    if adapter:
        model = lora.add_lora(model, r=16, alpha=32, dropout=0.0, target_modules=("q_proj", "down_proj", "up_proj"),
                              precision="bf16")
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data = gaussian(*weight.shape, seed=3) * 0.3
    prompts, results = [[1, 7, 9], [1] * 30, [1, 5]], []
    for known in (True, False):
        monkeypatch.setattr(library, "has_bf16_products", lambda known=known: known)
        calls.clear()
        generator = torch.Generator().manual_seed(1)
        results.append(sampler.sample(model, prompts, generator=generator, value_fn=lambda hidden: hidden[:, 0],
                                      **SAMPLING))
        assert bool(calls) == known
    packed, own = results
    assert packed.responses == own.responses and torch.equal(packed.logprobs, own.logprobs)
    assert torch.equal(packed.values, own.values)
    assert not any("forward" in vars(module) for module in model.modules())
