"""A GPU's packed attention: offsets, scale and window are those of the CPU's, by a kernel of the same signature."""

import inspect
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from stages.modeling import torch_setup
from stages.modeling.load import load_causal
from stages.modeling.packed import attention, forward, varlen
from stages.modeling.packed.sequences import pack, pack_responses
from stages.modeling.packed.shared_prefix import pack_with_shared_prefix
from tests.helpers import varlen_reference
from tests.helpers.architectures import FAMILIES, save
from tests.helpers.devices import on_gpu

CPU = torch.device("cpu")
PROMPTS = [[5] * 9, [6], [7] * 20]
ANSWERS = [[[8] * 4, [9] * 17, [10]], [[11] * 5], [[12] * 2, [13] * 2, [14] * 7]]
BATCHES = {"rows": pack([[7 + row] * length for row, length in enumerate([3, 40, 17, 16, 1, 40, 33])]),
           "shared prefixes": pack_with_shared_prefix(PROMPTS, ANSWERS, CPU).batch}
every_batch = pytest.mark.parametrize("name", BATCHES)


@pytest.fixture
def reference(monkeypatch):
    """Let a CPU take the way of a GPU."""
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference.varlen_attn)
    monkeypatch.setattr(varlen, "supports", lambda query, dtype: query.device.type == "cpu")


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attend_both_ways(batch, heads, window, way):
    """Output and gradients by the varlen path, or by the CPU's."""
    states = [gaussian(1, count, batch.input_ids.shape[1], 8, seed=i).requires_grad_() for i, count in enumerate(heads)]
    if way == "varlen":
        out = varlen.attend_varlen(*states, batch.varlen_index, 0.3, window, torch.float64)
    else:
        groups = heads[0] // heads[1]
        key, value = (x.repeat_interleave(groups, 1) for x in states[1:])
        out = attention._PackedAttention.apply(states[0], key, value, batch, 0.3, window)
    return [out, *torch.autograd.grad((out * gaussian(*out.shape, seed=5)).sum(), states)]


@every_batch
@pytest.mark.parametrize("window", [None, 5, 1])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_each_row_attends_to_itself_alone(reference, name, window, key_heads):
    compare = partial(attend_both_ways, BATCHES[name], (4, key_heads, key_heads), window)
    for actual, expected in zip(compare("varlen"), compare("padded"), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_offsets_counted_by_hand():
    index = pack_with_shared_prefix([[5, 5], [6]], [[[8], [9, 9]], [[10]]], CPU).batch.varlen_index
    # in the batch: 5 5 | 8 | 9 9 | 6 | 10; rows 5 5 8, 5 5 9 9 (of which 9 9 are queries) and 6 10
    assert index.key_positions.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6]
    assert index.query_positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert index.key_starts.tolist() == [0, 3, 7, 9] and index.query_starts.tolist() == [0, 3, 5, 7]
    assert (index.longest_query, index.longest_key) == (3, 4) and index.key_starts.dtype == torch.int32
    rows = pack([[5, 5, 5], [6]]).varlen_index
    assert rows.key_positions == rows.query_positions == slice(4) and rows.key_starts.tolist() == [0, 1, 4]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2", "gemma 2"])
def test_a_model_computes_the_same_as_without(family, tmp_path, monkeypatch, request):
    model = load_causal(save(FAMILIES[family], tmp_path)).requires_grad_(True)
    separate = [(prompt, answer) for prompt, own in zip(PROMPTS, ANSWERS, strict=True) for answer in own]
    apart = pack_responses(*map(list, zip(*separate, strict=True)), CPU)
    batches = pack_with_shared_prefix(PROMPTS, ANSWERS, CPU), apart
    results = []
    for way in ("cpu", "varlen"):
        if way == "varlen":
            request.getfixturevalue("reference")
            monkeypatch.setattr(attention, "_PackedAttention", None)  # no other way is taken
        for packed in batches:
            states = forward.packed_hidden_states(model, packed.batch, packed.predictor_positions)
            gradients = torch.autograd.grad(states.square().sum(), list(model.parameters()), allow_unused=True)
            results.append([states, *(g for g in gradients if g is not None)])
    assert len(results[0]) > 10
    for actual, expected in zip(results[2:], results[:2], strict=True):
        for own, other in zip(actual, expected, strict=True):
            scale = max(1.0, float(other.detach().abs().max()))
            torch.testing.assert_close(own / scale, other / scale, atol=1e-5, rtol=0)


def test_under_autocast_the_kernel_gets_bf16(reference, tmp_path, monkeypatch):
    """Rotary embeddings leave queries and keys in fp32, and values are in bf16: the kernel takes one format."""
    model, formats = load_causal(save(FAMILIES["llama"], tmp_path)), []

    def kernel(query, key, value, *arguments, **options):
        formats.append({query.dtype, key.dtype, value.dtype})
        return varlen_reference.varlen_attn(query, key, value, *arguments, **options)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    packed = pack_responses([[5, 6, 7]], [[8, 9]], CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        forward.packed_hidden_states(model, packed.batch, packed.positions)
    assert formats == [{torch.bfloat16}] * model.config.num_hidden_layers


def test_the_reference_has_the_signature_of_torchs_kernel():
    own, torchs = (inspect.signature(f).parameters.values() for f in (varlen_reference.varlen_attn,
                                                                    torch_varlen.varlen_attn))
    assert [(p.name, p.kind, p.default) for p in own] == [(p.name, p.kind, p.default) for p in torchs]


@every_batch
@pytest.mark.parametrize("window", [None, 5])
def test_torchs_kernel_takes_what_it_is_given(name, window):
    """The real operator, by its implementation for shapes only: types of all arguments, shapes, and a backward pass."""
    batch = BATCHES[name]
    index = varlen.index_rows(*batch.row_index, torch.device("meta"))
    states = [torch.empty(1, heads, batch.input_ids.shape[1], 8, device="meta", dtype=torch.bfloat16,
                          requires_grad=True) for heads in (4, 2, 2)]
    out = varlen.attend_varlen(*states, index, 0.3, window, torch.bfloat16)
    assert out.shape == (1, batch.input_ids.shape[1], 4, 8) and out.dtype == torch.bfloat16
    assert [g.shape for g in torch.autograd.grad(out.sum(), states)] == [x.shape for x in states]


@on_gpu
@every_batch
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_torchs_kernel_computes_the_same_on_a_gpu(name, window, key_heads, device):
    """Output and gradients in bf16; what rounding changes is within 0.02 of the largest number."""
    batch = BATCHES[name]
    expected = attend_both_ways(batch, (4, key_heads, key_heads), window, "padded")
    states = [gaussian(1, count, batch.input_ids.shape[1], 8, seed=i).to(device, torch.bfloat16).requires_grad_()
              for i, count in enumerate((4, key_heads, key_heads))]
    index = varlen.index_rows(*batch.row_index, torch.device(device))
    out = varlen.attend_varlen(*states, index, 0.3, window, torch.bfloat16)
    weights = gaussian(*out.shape, seed=5).to(out)
    for actual, other in zip([out, *torch.autograd.grad((out * weights).sum(), states)], expected, strict=True):
        assert (actual.cpu().double() - other).abs().max() < 0.02 * other.abs().max()


@pytest.mark.parametrize(("dtype", "width", "capability", "expected"), [
    (torch.bfloat16, 128, (9, 0), True), (torch.float16, 64, (8, 0), True), (torch.float32, 128, (9, 0), False),
    (torch.bfloat16, 20, (9, 0), False), (torch.bfloat16, 264, (9, 0), False), (torch.bfloat16, 128, (7, 5), False),
])  # fmt: skip
def test_what_the_kernel_cannot_compute_is_padded(monkeypatch, dtype, width, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = SimpleNamespace(device=torch.device("cuda"), shape=(1, 4, 16, width))
    assert varlen.supports(query, dtype) is expected


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 300])
def test_gradients_repeat_to_the_bit_on_a_gpu(dtype, window, device):
    """Of rows so long that many blocks of keys add to one query's gradient; by the varlen kernel and the fused one."""
    torch_setup.prepare()
    batch = pack([[7] * length for length in (1500, 700, 900)], torch.device(device))
    states = [gaussian(1, 8, batch.input_ids.shape[1], 64, seed=i).to(device, dtype).requires_grad_() for i in range(3)]

    def gradients() -> list[torch.Tensor]:
        out, _ = attention.attend(None, *states, None, 0.1, sliding_window=window, batch=batch)
        return torch.autograd.grad(out.square().sum(), states)

    first = gradients()
    assert all(gradient.abs().sum() > 0 for gradient in first)
    for _ in range(10):
        assert all(map(torch.equal, gradients(), first))
