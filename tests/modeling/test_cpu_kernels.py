"""Kernels of attention against float64, one query at a time; of all kernels, bits that depend on nothing else."""

import itertools

import pytest
import torch
from torch.nn import functional

from stages.generation.kv_cache import GROWTH_COLUMNS, PackedKVCache
from stages.modeling.cpu_kernels import build, layers
from stages.modeling.packed import attention, token_logprobs
from stages.modeling.packed.shared_prefix import pack_with_shared_prefix
from tests.helpers.kernel_inputs import dtypes, gaussian, is_close, llama_norm, pack_lengths, with_gradients

pytestmark = pytest.mark.skipif(build.load_library() is None, reason=f"no kernels: {build.status()}")

LENGTHS, HEADS, SCALING = [33, 1, 100, 31, 32], 4, 0.3
WINDOWS = [None, 1, 5, 50]


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


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("key_heads", "width"), [(4, 6), (2, 40), (1, 64), (2, 32)])
def test_in_bf16_decoding_and_the_packed_pass_agree_to_the_bit(key_heads, width, window):
    """A last bit's difference would grow, layer by layer, to the rounding of every activation."""
    batch, _ = pack_lengths([1, 2, 3, 5, 16, 17, 31, 32, 33, 34, 65, 97])
    query, key, value = random_states(batch.input_ids.shape[1], key_heads, width, dtype=torch.bfloat16)
    packed = attend_packed((query, key, value), batch, window)[0]
    cache = PackedKVCache(batch, cpu_kernels=True)
    cache.update(key, value, 0)
    last = batch.starts + batch.lengths - 1
    newest = attention.kernels.decode(
        query[0].transpose(0, 1)[last], *cache.layers[0], batch.lengths, SCALING, window)
    assert torch.equal(newest, packed[last])


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
    stride = -(-40 // attention.kernels.simd_width()) * attention.kernels.simd_width()
    keys, values = gaussian(1, 2, 40, 64) * 1e15, gaussian(1, 2, 64, stride)
    actual = attention.kernels.decode(query[:, :, 0] * 1e15, keys, values, torch.tensor([60]), SCALING, None)
    rows = keys[0].permute(2, 0, 1)[:60], values[0].transpose(0, 1)[:60, :, :40]
    assert is_close(actual[0], attend_newest(query[0, :, 0] * 1e15, *rows, None))


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
