"""Kernels of our own against float64, one query at a time; bits that depend on nothing else; what happens without."""

import itertools
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import LlamaConfig, modeling_llama

from stages.generation.kv_cache import GROWTH_COLUMNS, PackedKVCache
from stages.generation.sampler import sample
from stages.modeling.cpu_kernels import bindings, build, layers
from stages.modeling.load import load_causal
from stages.modeling.packed import attention, forward, token_logprobs
from stages.modeling.packed.sequences import pack
from stages.modeling.packed.shared_prefix import pack_with_shared_prefix
from stages.recipe.recipe import load_recipe, section_settings
from stages.runtime.environment import describe_environment
from tests.helpers.architectures import FAMILIES, save

pytestmark = pytest.mark.skipif(build.load_library() is None, reason=f"no kernels: {build.status()}")

LENGTHS, HEADS, SCALING = [33, 1, 100, 31, 32], 4, 0.3
WINDOWS = [None, 1, 5, 50]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # of the largest value
dtypes = pytest.mark.parametrize("dtype", NEAR, ids=["fp32", "bf16"])


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def is_close(actual, expected, dtype=torch.float32):
    difference = float((actual.double() - expected).detach().abs().max())
    return difference <= NEAR[dtype] * float(expected.detach().abs().max())


def attend_newest(query, keys, values, window):
    """Of one query [H, W], over the keys [L, G, W] up to its own, in float64."""
    seen = slice(max(0, len(keys) - window) if window else 0, None)
    keys, values = (x[seen].double().repeat_interleave(len(query) // x.shape[1], 1) for x in (keys, values))
    scores = torch.einsum("hw,jhw->hj", query.double(), keys) * SCALING
    return torch.einsum("hj,jhw->hw", scores.softmax(-1), values)


def attend_reference(query, key, value, rows, window):
    """[N, H, W] of rows of tokens; a token in several rows sees the same in each."""
    out = list(torch.zeros(query.shape, dtype=torch.float64))
    for row in rows:
        for i, token in enumerate(row):
            out[token] = attend_newest(query[token], key[row[: i + 1]], value[row[: i + 1]], window)
    return torch.stack(out)


def random_states(size, key_heads=2, width=40, dtype=torch.float32, heads=HEADS):
    """Query, key, value as a model gives them: [1, heads, size, width], a token's heads side by side."""
    counts = (heads, key_heads, key_heads)
    return [gaussian(1, size, count, width, seed=i, dtype=dtype).transpose(1, 2) for i, count in enumerate(counts)]


def attend_packed(states, batch, window=None):
    actual, _ = attention.attend_with_kernels(None, *states, None, scaling=SCALING, sliding_window=window, batch=batch)
    return actual


def attend_with_gradients(states, gradient, batch, window=None):
    """What was attend_packed to, and the gradients of query, key and value, all [N, heads, W]."""
    states = [x.detach().requires_grad_() for x in states]
    actual = attend_packed(states, batch, window)
    assert type(actual.grad_fn).__name__ == "_KernelAttentionBackward"
    return [actual[0].detach(), *(x[0].transpose(0, 1) for x in torch.autograd.grad(actual, states, gradient))]


def pack_lengths(lengths):
    """And its rows' tokens."""
    batch = pack([[7] * length for length in lengths])
    pairs = zip(batch.starts.tolist(), lengths, strict=True)
    return batch, [list(range(start, start + length)) for start, length in pairs]


def check(batch, rows, key_heads, width, window, dtype):
    size = batch.input_ids.shape[1]
    states = random_states(size, key_heads, width, dtype)
    gradient = gaussian(1, size, HEADS, width, seed=9, dtype=dtype)
    for x in (*states, gradient.transpose(1, 2)):
        x[:, :, batch.num_tokens :] = torch.nan  # filler
    actual = attend_with_gradients(states, gradient, batch, window)
    exact = [x[0, :, : batch.num_tokens].transpose(0, 1).double().requires_grad_() for x in states]
    expected = attend_reference(*exact, rows, window)
    gradients = torch.autograd.grad(expected, exact, gradient[0, : batch.num_tokens].double())
    assert batch.num_tokens < size and all((x[batch.num_tokens :] == 0).all() and x.dtype == dtype for x in actual)
    assert all(is_close(x[: batch.num_tokens], y, dtype) for x, y in zip(actual, (expected, *gradients), strict=True))


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("width", [6, 32, 40, 64])
@dtypes
def test_each_query_sees_its_rows_keys_in_the_window_forward_and_backward(width, key_heads, dtype):
    for window in WINDOWS if dtype == torch.float32 else WINDOWS[:3:2]:
        check(*pack_lengths(LENGTHS), key_heads, width, window, dtype)


@pytest.mark.parametrize("window", [None, 5])
def test_a_question_that_answers_share_gets_the_gradients_of_all(window):
    prompts, answers = [9, 1, 40], [[4, 33, 1], [5], [2, 2, 20, 70]]
    ids = [[7] * n for n in prompts], [[[8] * n for n in own] for own in answers]
    batch, token, rows = pack_with_shared_prefix(*ids, torch.device("cpu")).batch, itertools.count(), []
    for prompt, own in zip(prompts, answers, strict=True):
        question = list(itertools.islice(token, prompt))
        rows += [question + list(itertools.islice(token, answer)) for answer in own]
    check(batch, rows, 2, 40, window, torch.float32)


def test_autocast_is_bf16_whatever_dtype_each_of_them_has():
    batch, _ = pack_lengths(LENGTHS)
    states, gradient = random_states(batch.input_ids.shape[1]), gaussian(1, batch.input_ids.shape[1], HEADS, 40, seed=9)
    low = attend_with_gradients([x.bfloat16() for x in states], gradient.bfloat16(), batch)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attend_with_gradients([*states[:2], states[2].bfloat16()], gradient.bfloat16(), batch)
    assert [x.dtype for x in mixed] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert all(torch.equal(*pair) for pair in zip(low, mixed, strict=True))


def test_strides_change_nothing():
    batch, _ = pack_lengths(LENGTHS)
    states = random_states(batch.input_ids.shape[1])
    apart = [x.repeat_interleave(2, -1)[..., ::2] for x in states]
    one = torch.ones(()).expand(1, batch.input_ids.shape[1], HEADS, 40)
    results = attend_with_gradients(states, one.contiguous(), batch), attend_with_gradients(apart, one, batch)
    assert apart[0].stride(-1) == 2 and all(torch.equal(*pair) for pair in zip(*results, strict=True))


def decode_rows(lengths, key_heads=2, width=40, window=None, dtype=torch.float32, steps=40, stay=()):
    """Rows that grow: (step, row's first length) to what its attend_newest token gets, by the kernels and in float64.

    stay: (step, places of the rows that go on). What a row holds depends on its first length alone.
    """
    batch, rows = pack_lengths(lengths)
    whole = {n: [gaussian(n + steps, key_heads, width, seed=2 * n + i, dtype=dtype) for i in range(2)] for n in lengths}
    packed = torch.zeros(2, 1, key_heads, batch.input_ids.shape[1], width, dtype=dtype)
    for row, n in zip(rows, lengths, strict=True):
        packed[:, 0, :, row] = torch.stack([x[:n] for x in whole[n]]).transpose(1, 2)
    cache, actual = PackedKVCache(batch, cpu_kernels=True), {}
    cache.update(*packed, 0)
    for step in range(steps):
        if step in dict(stay):
            cache.select_rows(torch.tensor(dict(stay)[step]))
            lengths = [lengths[place] for place in dict(stay)[step]]
        cache.step()
        given = cache.update(*(torch.stack([whole[n][i][n + step] for n in lengths])[:, :, None] for i in range(2)), 0)
        query = torch.stack([gaussian(HEADS, width, seed=1000 * n + step, dtype=dtype) for n in lengths])
        out = attend_packed((query[:, :, None], *given), cache, window)[:, 0]
        for n, own, got in zip(lengths, query, out, strict=True):
            actual[step, n] = got, attend_newest(own, *(x[: n + step + 1] for x in whole[n]), window)
    assert cache.cpu_kernels
    return actual


@pytest.mark.parametrize(("key_heads", "width", "window", "dtype"), [
    (4, 6, None, torch.float32), (2, 40, None, torch.float32), (1, 64, 5, torch.float32), (2, 32, 1, torch.float32),
    (2, 40, 50, torch.float32), (2, 40, None, torch.bfloat16), (1, 6, 20, torch.bfloat16),
])
def test_decoding_sees_all_tokens_so_far_however_rows_grow_and_leave(key_heads, width, window, dtype):
    steps, stay = 2 * GROWTH_COLUMNS + 9, [(9, [3, 0, 1]), (30, [2, 1])]
    actual = decode_rows([3, 60, 1, 33], key_heads, width, window, dtype, steps, stay)
    assert len(actual) == 9 * 4 + 21 * 3 + 43 * 2
    assert all(is_close(got, expected, dtype) for got, expected in actual.values())


@dtypes
def test_no_row_feels_its_neighbours_bit_for_bit(dtype):
    batch, rows = pack_lengths(LENGTHS)
    size = batch.input_ids.shape[1]
    whole = [*random_states(size, dtype=dtype), gaussian(1, HEADS, size, 40, dtype=dtype)]  # last: a gradient
    together = attend_with_gradients(whole[:3], whole[3].transpose(1, 2), batch, 50)
    for row in rows:
        alone, _ = pack_lengths([len(row)])
        own = [functional.pad(x[:, :, row], (0, 0, 0, alone.input_ids.shape[1] - len(row))) for x in whole]
        actual = attend_with_gradients(own[:3], own[3].transpose(1, 2), alone, 50)
        assert all(torch.equal(x[: len(row)], y[row]) for x, y in zip(actual, together, strict=True))
    many, one = decode_rows([3, 60, 33], dtype=dtype, window=20), decode_rows([3], dtype=dtype, window=20)
    assert all(torch.equal(got, many[key][0]) for key, (got, _) in one.items())
    norm, (gate, up) = llama_norm(40).to(dtype), gaussian(2, 7, 40, dtype=dtype)
    ways = (lambda x: layers.RMSNorm.apply(x, norm.weight, 0.3), lambda x: layers.SwiGLU.apply(x, up[: len(x)]))
    assert all(torch.equal(way(gate)[:3], way(gate[:3])) for way in ways)


def llama_norm(width):
    norm = modeling_llama.LlamaRMSNorm(width, eps=0.3)
    norm.weight.data = gaussian(width, seed=4)
    return norm


def with_kernel(module, mixin):
    module.__class__ = layers._subclass(type(module), mixin)
    return module


def rotary():
    """LLaMA's function of queries and keys, as a model with kernels calls it."""
    return layers._rotary_subclass(modeling_llama.LlamaAttention).forward.__globals__[layers.ROTARY]


@pytest.fixture
def called(monkeypatch):
    """Names of the kernels that layers call, in order."""
    names = []
    monkeypatch.setattr(layers, "call", lambda name, *rest: (names.append(name), bindings.call(name, *rest)))
    return names


def with_gradients(compute, *inputs):
    """What it computes, and its gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    actual = compute(*inputs)
    return actual.detach(), *torch.autograd.grad(actual, inputs, gaussian(*actual.shape, seed=8).to(actual))


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


@pytest.mark.parametrize("width", [3, 16, 40, 1000])
def test_log_probabilities_and_shares_of_any_vocabulary(width):
    logits, chosen = 30 * gaussian(9, width), torch.arange(9) * 7 % width
    logits[4], logits[5, chosen[5]], logits[6, 0] = 2e4, -3e4, torch.nan
    exact, shares = logits.double().log_softmax(-1), logits.clone()
    actual = token_logprobs._softmax_(shares, chosen[:8], cpu_kernels=True)
    fine = [row for row in range(8) if row != 6]
    assert torch.allclose(actual[fine].double(), exact[range(8), chosen[:8]][fine], rtol=2e-7, atol=2e-6)
    assert torch.allclose(shares[fine].double(), exact[fine].exp(), rtol=1e-5, atol=1e-7)
    assert actual[6].isnan() and shares[6].isnan().any() and torch.equal(shares[8], logits[8])


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@dtypes
def test_any_number_of_threads_gives_the_same_bits(threads, dtype):
    batch, _ = pack_lengths([90, 200, 130])
    size, actual = batch.input_ids.shape[1], []
    states, norm = random_states(size, 4, 40, dtype), llama_norm(400).to(dtype)
    gradient, (gate, up) = gaussian(1, size, HEADS, 40, dtype=dtype), gaussian(2, size, 400, dtype=dtype)
    angles = gaussian(2, 1, size, 40, dtype=dtype)
    cached = [gaussian(8, 4, *shape, dtype=dtype) for shape in ((40, 96), (96, 48))]
    new, lengths = gaussian(2, 8, 4, 40, dtype=dtype), torch.arange(88, 96)
    assert min(gate.numel(), states[0].numel(), cached[0].numel()) > 1 << 15
    for count in (1, 2, 3):
        threads(count)
        keys_values = [x.clone() for x in cached]
        attention.kernels.append_key_value(*new, *keys_values, lengths)
        actual.append([
            *attend_with_gradients(states, gradient, batch),
            attention.kernels.decode(new[0], *keys_values, lengths, SCALING, None),
            *with_gradients(layers.SwiGLU.apply, gate, up),
            *with_gradients(lambda x: layers.RMSNorm.apply(x, norm.weight, 0.3), gate),
            *with_gradients(lambda x: layers.Rotary.apply(x, *angles), states[0]),
        ])
    assert all(torch.equal(*pair) for other in actual[1:] for pair in zip(actual[0], other, strict=True))


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, 0x7FFFFFFF], ids=["torch's", "a CPU's", "a GPU's"])
def test_a_nan_spoils_its_row_alone_and_is_not_hidden(bits):
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    batch, rows = pack_lengths(LENGTHS)
    for place in range(3):
        states = random_states(batch.input_ids.shape[1])
        states[place][0, :, rows[2][0]] = nan
        actual = attend_with_gradients(states, gaussian(1, batch.input_ids.shape[1], HEADS, 40), batch)
        others = [token for row in (0, 1, 3, 4) for token in rows[row]]
        assert all(x[others].isfinite().all() for x in actual)
        assert actual[0][rows[2][:1] if place == 0 else rows[2]].isnan().all()
        assert all(x[rows[2]].isnan().any() for x in actual[1:3])
    x = gaussian(3, 20)
    x[1, 3] = nan
    for out in (layers.RMSNorm.apply(x, torch.ones(20), 0.1), layers.SwiGLU.apply(x, x)):
        assert out[1].isnan().any() and out[[0, 2]].isfinite().all()


def test_scores_may_be_huge_and_equal_ones_give_the_mean():
    batch, (row,) = pack_lengths([50])
    query, key, value = random_states(batch.input_ids.shape[1])
    mean = value[0, 0, row].double().cumsum(0) / torch.arange(1, 51)[:, None]
    assert is_close(attend_packed((query * 0, key, value), batch)[0, row, 0], mean)
    assert is_close(attend_packed((query * 0 + 1e15, key * 0 - 1e15, value), batch)[0, row, 0], mean)
    ones = torch.ones(1, batch.input_ids.shape[1], HEADS, 40)
    huge = attend_with_gradients((query * 1e15, key * 1e15, value), ones, batch)
    assert all(x.isfinite().all() for x in huge)
    keys, values = gaussian(1, 2, 40, 64) * 1e15, gaussian(1, 2, 64, 48)
    actual = attention.kernels.decode(query[:, :, 0] * 1e15, keys, values, torch.tensor([60]), SCALING, None)
    rows = keys[0].permute(2, 0, 1)[:60], values[0].transpose(0, 1)[:60, :, :40]
    assert is_close(actual[0], attend_newest(query[0, :, 0] * 1e15, *rows, None))


def test_other_dtypes_and_compiled_models_go_the_ordinary_way(called):
    assert build.supports(gaussian(1)) and not build.supports(gaussian(1).half())
    assert not build.supports(gaussian(1), gaussian(1).double())
    norm = with_kernel(llama_norm(8), layers.KernelRMSNorm)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)(gaussian(2, 8))
    assert not called and torch.allclose(compiled, norm(gaussian(2, 8)), atol=1e-6) and called == ["rms_norm"]


def test_no_gradient_of_a_gradient_is_made_up():
    batch, _ = pack_lengths([5])
    x = random_states(batch.input_ids.shape[1])[0].requires_grad_()
    whole, flat = attend_packed((x, x[:, :2], x[:, :2]), batch), x[0, 0]
    angles = gaussian(2, 1, x.shape[2], 40)
    for actual in (whole, layers.RMSNorm.apply(flat, torch.ones(40), 0.1), layers.SwiGLU.apply(flat, flat),
                  layers.Rotary.apply(x, *angles)):
        gradient, = torch.autograd.grad(actual.square().sum(), x, create_graph=True, retain_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward(retain_graph=True)


@pytest.fixture
def llama(tmp_path):
    return load_causal(save(FAMILIES["llama"], tmp_path / "base"), cpu_kernels="auto")


SMALL = 'extern "C" { int one() { return 1; } long simd_width() { return 16; } }'


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a new process that finds an empty cache; what is compiled is small. A function that starts once more."""
    def start():
        monkeypatch.setattr(build, "_load", cache(build._load.__wrapped__))

    small = tmp_path / "small.cpp"
    small.write_text(SMALL)
    monkeypatch.setattr(build, "SOURCES", (small,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    start()
    return start


@pytest.mark.parametrize("how", ["no compiler", "broken sources"])
@torch.no_grad()
def test_without_kernels_a_model_computes_the_same_and_one_line_says_why(
    how, llama, fresh, monkeypatch, tmp_path, capsys
):
    batch, _ = pack_lengths([3, 40, 17])
    wanted = torch.arange(batch.num_tokens)
    if how == "no compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    build.SOURCES[0].write_text("int broken(;")
    assert build.load_library() is None and not build.supports(gaussian(1))
    assert build.status().startswith("none: ") and len(build.status().splitlines()) == 1
    assert ("no C++ compiler" if how == "no compiler" else "small.cpp:1") in build.status()
    assert capsys.readouterr().err.count(build.status().removeprefix("none: ")) == 1 and build.load_library() is None
    assert [*tmp_path.glob("cache/*/*")] == []
    actual = forward.packed_hidden_states(llama, batch, wanted)
    monkeypatch.undo()
    expected = forward.packed_hidden_states(llama, batch, wanted)
    assert build.load_library() and torch.allclose(actual, expected, atol=1e-5)


def test_what_was_compiled_is_there_for_the_next_process(fresh, monkeypatch, tmp_path):
    run, commands = subprocess.run, []

    def noted(command, **how):
        done = run(command, **how)
        commands.append((command[1], [*tmp_path.glob("cache/stackllama/*.so")]))
        return done

    monkeypatch.setattr(build.subprocess, "run", noted)
    assert build.load_library().one() == build.load_library().one() == 1
    assert [option for option, _ in commands] == ["--version", build.FLAGS[0]]
    assert commands[1][1] == []  # nobody meets half a file
    fresh()
    assert build.load_library().one() == 1 and len(commands) == 3
    build.SOURCES[0].write_text(SMALL.replace("1;", "2;"))
    fresh()
    assert build.load_library().one() == 2 and len([*tmp_path.glob("cache/stackllama/*.so")]) == 2


@pytest.mark.parametrize("harm", ["cut", "replaced", "writable", "without a digest"])
def test_a_file_that_is_not_what_was_compiled_is_compiled_anew(harm, fresh, tmp_path, capsys):
    build.load_library()
    (library,) = tmp_path.glob("cache/stackllama/*.so")
    content = library.read_bytes()
    library.unlink()  # the file that this process has mapped stays whole
    library.write_bytes({"cut": content[: len(content) // 2], "replaced": content[:-1] + b"x"}.get(harm, content))
    library.chmod(0o666 if harm == "writable" else 0o700)
    if harm == "without a digest":
        library.with_suffix(".sha256").unlink()
    fresh()
    assert build.load_library().one() == 1
    assert capsys.readouterr().err.count("compiled by") == 2 and library.stat().st_mode & 0o777 == 0o700
    assert len(library.read_bytes()) == len(content)


@pytest.mark.parametrize("harm", ["writable", "link"])
def test_nothing_is_loaded_from_a_folder_that_others_can_write_to(harm, fresh, tmp_path):
    folder = tmp_path / "cache/stackllama"
    folder.parent.mkdir()
    if harm == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert build.load_library() is None and [*folder.iterdir()] == []
    assert "what is loaded from it runs as you. Make it yours (chmod 700)" in build.status()


def test_two_processes_that_start_together_compile_once(fresh, monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"""#!/bin/sh
[ "$1" = --version ] || {{ echo compiled >> {tmp_path}/compilations; sleep 1; }}
exec {shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")} "$@"
""")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    code = (f"import pathlib; from stages.modeling.cpu_kernels import build; build.SOURCES = "
            f"(pathlib.Path({str(build.SOURCES[0])!r}),); assert build.load_library().one() == 1, build.status()")
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE,
                             text=True) for _ in range(2)]
    logs = [one.communicate()[1] for one in both]
    assert [one.returncode for one in both] == [0, 0] and len([*tmp_path.glob("cache/stackllama/*.so")]) == 1
    assert (tmp_path / "compilations").read_text() == "compiled\n"
    assert sorted(log.count("cpu_kernels: compiled by") for log in logs) == [0, 1]


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


def test_off_loads_no_library_and_the_manifest_says_what_was_loaded(fresh, tmp_path):
    model = load_causal(save(FAMILIES["llama"], tmp_path / "base"))
    logprobs = token_logprobs.response_logprobs(model, [[1, 2]], [[3, 4]], 1.0)
    sample(model, [[1, 2]], max_new_tokens=3, temperature=1.0, stop_ids=[0], generator=torch.Generator())
    assert logprobs[0].isfinite().all()
    assert build.status() == "off" and not (tmp_path / "cache").exists()
    assert describe_environment()["cpu_kernels"] == "off"
    build.load_library()
    assert re.match(r"(256|512)-bit vectors, .*\d", build.status())
    assert describe_environment()["cpu_kernels"] == build.status()


def test_every_section_of_a_stage_with_a_model_has_the_setting():
    recipe = load_recipe("configs/tiny.yaml", {"cpu_kernels": "off", "sft": {"cpu_kernels": "auto"}})
    chosen = {field.name: getattr(getattr(recipe, field.name), "cpu_kernels", None) for field in fields(recipe)}
    assert {name for name, value in chosen.items() if value == "off"} == {"base", "reward", "merge", "ppo", "evaluate"}
    assert chosen["sft"] == "auto" and section_settings(recipe, "ppo")["cpu_kernels"] == "off"
