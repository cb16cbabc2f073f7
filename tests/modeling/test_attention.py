"""Rows laid end to end against rows one by one, in float64: states and gradients; output layer; feed-forward block."""

import math

import pytest
import torch
from torch import nn

from stages.modeling.packed import attention, forward, sequences
from stages.modeling.packed.token_logprobs import selective_log_softmax

LENGTHS = [3, 40, 17, 16, 1, 40, 33]
HEADS, WIDTH = 4, 6


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pack_lengths(lengths):
    return sequences.pack([[7 + row] * length for row, length in enumerate(lengths)])


def attend_by_loops(query, key, value, scaling, window):
    """[H, L, W] of one row: each query over the keys that it sees, one at a time."""
    shared, out = query.shape[0] // key.shape[0], torch.zeros_like(query)
    for head in range(query.shape[0]):
        k, v = key[head // shared], value[head // shared]
        for i in range(query.shape[1]):
            first = 0 if window is None else max(0, i - window + 1)
            scores = [float(query[head, i] @ k[j]) * scaling for j in range(first, i + 1)]
            shares = [math.exp(score - max(scores)) for score in scores]
            out[head, i] = sum(share * v[first + j] for j, share in enumerate(shares)) / sum(shares)
    return out


@pytest.fixture(params=[(192, 1 << 15), (16, 1), (16, 1 << 15), (192, 1200)], ids=str)
def cut(request, monkeypatch):
    """Blocks of queries and parts of the batch, of several sizes."""
    monkeypatch.setattr(attention, "BLOCK_QUERIES", request.param[0])
    monkeypatch.setitem(sequences.BUCKET_SCORES, "cpu", request.param[1])


def attend_packed(states, batch, window):
    return attention.attend(None, *states, None, scaling=0.3, sliding_window=window, batch=batch)[0]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_each_row_attends_to_itself_alone(cut, key_heads, window):
    batch = pack_lengths(LENGTHS)
    size = batch.input_ids.shape[1]
    heads = (HEADS, key_heads, key_heads)
    states = [gaussian(1, size, count, WIDTH, seed=i).transpose(1, 2) for i, count in enumerate(heads)]
    actual = attend_packed(states, batch, window)
    assert actual.shape == (1, size, HEADS, WIDTH) and (actual[0, batch.num_tokens :] == 0).all()
    for start, length in zip(batch.starts.tolist(), LENGTHS, strict=True):
        expected = attend_by_loops(*(x[0, :, start : start + length] for x in states), 0.3, window)
        assert torch.allclose(actual[0, start : start + length].transpose(0, 1), expected, atol=1e-12)


@pytest.mark.parametrize(("key_heads", "window"), [(4, None), (2, 5)])
def test_gradients_are_those_of_finite_differences(cut, key_heads, window):
    batch = pack_lengths([3, 20, 2])
    size = batch.input_ids.shape[1]
    states = [gaussian(1, heads, size, 2, seed=i).requires_grad_() for i, heads in enumerate((4, key_heads, key_heads))]
    read = batch.input_ids[0] > 0  # nobody reads the filler
    assert torch.autograd.gradcheck(lambda *x: attend_packed(x, batch, window)[:, read], states, fast_mode=True)


@pytest.mark.parametrize("window", [None, 5])
def test_a_gpus_way_is_the_same(monkeypatch, window):
    monkeypatch.setitem(sequences.BUCKET_SCORES, "cpu", sequences.BUCKET_SCORES["cuda"])
    batch = pack_lengths(LENGTHS)
    states = [gaussian(1, HEADS, batch.input_ids.shape[1], WIDTH, seed=i).requires_grad_() for i in range(3)]
    ways = [f(*states, batch, 0.3, window) for f in (attention._attend_fused, attention._PackedAttention.apply)]
    assert torch.allclose(*ways, atol=1e-12)
    gradients_of_both = [torch.autograd.grad((way * gaussian(*way.shape, seed=5)).sum(), states) for way in ways]
    assert all(torch.allclose(*pair, atol=1e-12) for pair in zip(*gradients_of_both, strict=True))


def test_rows_lie_end_to_end_and_keep_their_places():
    rows = [[7 + row] * length for row, length in enumerate(LENGTHS)]
    batch = sequences.pack(rows)
    for row, start in zip(rows, batch.starts.tolist(), strict=True):
        assert batch.input_ids[0, start : start + len(row)].tolist() == row
        assert batch.position_ids[0, start : start + len(row)].tolist() == list(range(len(row)))
    assert batch.num_tokens == sum(LENGTHS) and batch.input_ids[0, batch.num_tokens :].eq(0).all()
    assert sum(bucket.mask.sum() for bucket in batch.buckets) == batch.num_tokens


def test_response_tokens_point_at_the_token_before():
    prompts, responses = [[1, 2, 3], [4], [5, 6]], [[11], [12, 13, 14], [15, 16]]
    texts = sequences.pack_responses(prompts, responses, torch.device("cpu"))
    assert texts.token_ids.tolist() == [11, 12, 13, 14, 15, 16]
    assert texts.batch.input_ids[0, texts.predictor_positions].tolist() == [3, 4, 12, 13, 6, 15]
    assert sequences.scatter_to_rows(texts.token_ids, texts).tolist() == [[11, 0, 0], [12, 13, 14], [15, 16, 0]]


def test_sizes_are_few_and_little_is_added():
    counts = range(1, 5000)
    assert all(count <= sequences.round_up_tokens(count) <= max(count + 16, count * 34 / 32) for count in counts)
    assert len({sequences.round_up_tokens(count) for count in range(1024, 2049)}) <= 33


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [True, False])
def test_log_probabilities_and_their_gradient(temperature, bias):
    layer = nn.Linear(6, 30, bias=bias, dtype=torch.float64).requires_grad_(False)
    hidden, chosen = gaussian(150, 6).requires_grad_(), torch.arange(150) % 30
    expected = torch.log_softmax(layer(hidden) / temperature, -1)[torch.arange(150), chosen]
    actual = selective_log_softmax(layer, hidden, chosen, temperature)
    assert torch.allclose(actual.double(), expected, atol=1e-5)
    weight = gaussian(150, seed=1)
    gradients_of_both = [torch.autograd.grad((x * weight).sum(), hidden)[0] for x in (actual, expected)]
    assert torch.allclose(*gradients_of_both, atol=1e-5)


def test_the_most_unlikely_token_has_a_log_probability():
    layer = nn.Linear(1, 2, bias=False).requires_grad_(False)
    layer.weight[:] = torch.tensor([[200.0], [-200.0]])
    assert selective_log_softmax(layer, torch.ones(1, 1), torch.tensor([1]), 1.0).tolist() == [-400.0]


class Trunk(nn.Module):
    """A feed-forward block with a residual path, as in a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Module()
        self.layer.mlp = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5)).double()
        self.met = []
        self.layer.mlp.register_forward_hook(lambda block, given, out: self.met.append(out.shape[1]))

    def forward(self, states):
        return states + self.layer.mlp(states)


def test_the_last_block_computes_the_wanted_tokens_alone_and_exactly():
    trunk, states, wanted = Trunk(), gaussian(1, 90, 5).requires_grad_(), torch.tensor([3, 88, 40, 41])
    full = trunk(states)[0, wanted]
    with forward.mlp_at_positions(trunk, wanted, 90):
        actual = trunk(states)[0, wanted]
    assert trunk.met == [90, 16]
    assert torch.allclose(actual, full, atol=1e-14)
    gradients_of_both = [torch.autograd.grad((x * gaussian(4, 5, seed=2)).sum(), states)[0] for x in (actual, full)]
    assert torch.allclose(*gradients_of_both, atol=1e-14)


def test_a_layer_that_is_computed_again_computes_all():
    trunk = Trunk()
    trunk.layer.forward = lambda: None
    with forward.mlp_at_positions(trunk, torch.tensor([1]), 90):
        trunk(gaussian(1, 90, 5))
    assert trunk.met == [90]
