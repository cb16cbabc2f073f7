"""Decoding with a static cache gives what plain decoding gives, and its steps can be captured (no GPU needed)."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from stages.generation import cuda_graphs
from stages.generation.cuda_graphs import HostReads, StepGraphs, decode_with_graphs, set_static_decoding
from stages.generation.sampler import sample, sample_in_batches
from stages.generation.static_decoding import StaticDecoders, StaticDecodeState, bucket_size
from stages.modeling.load import load_causal
from tests.helpers import architectures, tiny_models
from tests.helpers.recorded_graphs import pretend_cuda_graphs

# Rows of 1 to 17 tokens with limits of 1 to 24: they leave the batch at different steps.
PROMPTS = [[3 + (7 * row + i) % 90 for i in range(1 + 5 * row % 17)] for row in range(20)]
LIMITS = [1 + 11 * row % 24 for row in range(20)]
FAMILIES = ("llama", "mistral", "gemma 2", "gptj", "opt")  # shared heads, window, cap, no interface, table of positions


def compare(model, tolerance: float = 1e-5, other_rows: int = 0, prompts=PROMPTS, **changes):
    """Sample with both decoders: log-probabilities agree within rounding, and all tokens but those of a few rows."""
    rollouts = []
    for static in (False, True):
        set_static_decoding(model, static)
        rollouts.append(sample(model, prompts, **{
            "max_new_tokens": LIMITS, "temperature": 1.0, "stop_ids": (5, 6, 7), "generator": torch.Generator(),
            "value_fn": lambda hidden: hidden.float().mean(-1)} | changes))
    plain, static = rollouts
    same = [row for row in range(len(prompts)) if static.responses[row] == plain.responses[row]]
    assert len(same) >= len(prompts) - other_rows and (other_rows or static.ended == plain.ended)
    assert len({len(response) for response in plain.responses}) > 5  # rows did leave
    for name in ("logprobs", "values", "entropy"):
        actual, expected = getattr(static, name)[same], getattr(plain, name)[same]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    if plain.allowed_token_ids is not None:
        assert torch.equal(static.allowed_token_ids, plain.allowed_token_ids)


@contextmanager
def reading_nothing():
    """Let a step fail that could not be captured; count the rows of all steps."""
    rows, decode = [], StaticDecodeState._decode

    def checked(decoder):
        with HostReads() as reads:
            decode(decoder)
        assert not reads.seen
        rows.append(decoder.cache.rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticDecodeState, "_decode", checked)
        yield rows


@contextmanager
def capturing():
    """Capture the steps of decoders on the CPU as if it were a GPU; yield the captured graphs."""
    initialise = StaticDecodeState.__init__

    def with_graphs(decoder, *args):
        initialise(decoder, *args)
        decoder._graphs = StepGraphs()

    with pytest.MonkeyPatch.context() as patch, pretend_cuda_graphs() as graphs:
        patch.setattr(StaticDecodeState, "__init__", with_graphs)
        yield graphs


@pytest.fixture
def model():
    return tiny_models.llama(tiny_models.tokenizer())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_the_same_by_steps_that_can_be_captured(family, tmp_path):
    model = load_causal(architectures.save(architectures.FAMILIES[family], tmp_path))
    with reading_nothing() as rows:
        compare(model)
    assert len(rows) > 15 and sorted(set(rows), reverse=True) == [20, 10, 5]


@pytest.mark.parametrize("family", ["mistral", "gptj"])
def test_replayed_graphs_decode_the_same(family, tmp_path):
    model = load_causal(architectures.save(architectures.FAMILIES[family], tmp_path))
    with capturing() as graphs:
        compare(model)
    assert len(graphs) == 3 and sum(graph.replays for graph in graphs) > 15
    assert all(graph.replays for graph in graphs)


def test_an_adapter_and_filters_by_replayed_graphs(tmp_path):
    folder = architectures.save(architectures.FAMILIES["llama"], tmp_path)
    with capturing() as graphs:
        compare(architectures.adapted(folder), top_k=7, top_p=0.8)
    assert len(graphs) == 3


@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_in_bf16_by_replayed_graphs(tmp_path, precision):
    model = load_causal(architectures.save(architectures.FAMILIES["llama"], tmp_path), precision)
    with capturing() as graphs:
        compare(model, 0.05, other_rows=4, precision=precision)
    assert len(graphs) == 3


@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_equal_prompts_are_computed_once(model, temperature):
    prompts, counts = [PROMPTS[row // 4] for row in range(20)], []
    hook = model.model.register_forward_pre_hook(
        lambda inner, args, kwargs: counts.append(kwargs["input_ids"].shape), with_kwargs=True)
    compare(model, prompts=prompts, share_prefixes=True, temperature=temperature)
    hook.remove()
    prefills = [tuple(shape) for shape in counts if shape[1] > 1]
    assert prefills == [(1, 48)] * 2  # 45 tokens of 5 prompts


def test_batches_share_buffers_and_graphs(model):
    settings = {"seed": 3, "max_new_tokens": 12, "temperature": 1.0, "stop_ids": (5, 6, 7)}
    expected = sample_in_batches(model, PROMPTS, 6, **settings).responses
    set_static_decoding(model, True)
    with capturing() as graphs:
        assert sample_in_batches(model, PROMPTS, 6, **settings).responses == expected
    assert len(graphs) == 1 and graphs[0].replays > 30  # four batches, the last one with padding rows


@pytest.mark.parametrize("precision", ["fp32", "mixed"])  # mixed: autocast caches bf16 copies of weights
def test_weights_may_change_in_place_and_are_captured_anew_where_they_move(model, precision):
    decoders, expected = StaticDecoders(), []
    run = partial(sample, model, PROMPTS[:4], max_new_tokens=8, temperature=0.0, stop_ids=(),
                  generator=torch.Generator(), precision=precision)
    weight = model.model.layers[0].mlp.down_proj.weight
    with capturing() as graphs, torch.no_grad():
        for change, captured in ((lambda: None, 1), (lambda: weight.mul_(-3), 1),
                                 (lambda: setattr(weight, "data", weight.data / -3), 2)):
            change()
            set_static_decoding(model, False)
            expected.append(run().responses)
            set_static_decoding(model, True)
            assert run(static=decoders).responses == expected[-1] and len(graphs) == captured
    assert expected[0] == expected[2] != expected[1]


def test_a_larger_batch_takes_the_place_of_the_decoder(model):
    decoders = StaticDecoders()
    first = decoders.start(model, [[1, 2, 3]] * 9, 100, False)
    assert first.cache.columns == 128 and decoders.start(model, [[1] * 29] * 4, 100, False) is first
    assert first.cache.rows == 5 and first.hidden.shape[0] == 4
    longer = decoders.start(model, [[1] * 30] * 9, 100, False)
    assert longer is not first and longer.cache.columns == 256
    assert decoders.start(model, [[1, 2, 3]] * 10, 100, False) is not longer


def test_buffers_are_allocated_once(model):
    decoder = StaticDecoders().start(model, PROMPTS, 24, False)

    def places():
        return [x.data_ptr() for layer in decoder.cache.layers for x in layer]

    before = places()
    for rows in (20, 11, 7):
        decoder.select_rows(torch.arange(rows))
        decoder.step(torch.full((rows,), 4))
        assert places() == before and decoder.hidden.shape[0] == rows
    assert decoder.cache.rows == 10


def test_numbers_of_rows():
    sizes = [[bucket_size(rows, most) for rows in (most, most // 2, 3, 1)] for most in (64, 20, 8, 3)]
    assert sizes == [[64, 32, 8, 8], [20, 10, 5, 5], [8, 8, 8, 8], [3, 3, 3, 3]]


def test_a_text_longer_than_the_table_of_positions_is_refused_before_decoding(tmp_path):
    model = load_causal(architectures.save(architectures.FAMILIES["gpt2"], tmp_path))
    set_static_decoding(model, True)
    run = partial(sample, model, [[5] * 40], temperature=0.0, stop_ids=(), generator=torch.Generator())
    assert len(run(max_new_tokens=25).responses[0]) == 25
    with pytest.raises(ValueError, match="a table of 64 positions"):
        run(max_new_tokens=26)


@pytest.mark.parametrize("operation", [
    lambda x: x.sum().item(), lambda x: bool((x > 0).any()), lambda x: x[x > 0], lambda x: x.nonzero(),
    lambda x: x.unique(), lambda x: x.__setitem__(x > 0, 1.0)])
def test_what_cannot_be_captured_is_seen(operation):
    with HostReads() as reads:
        operation(torch.tensor([1.0, -1.0]))
    assert reads.seen
    with HostReads() as reads:
        torch.tensor([1.0, -1.0]).index_copy_(0, torch.tensor([0]), torch.ones(1))[torch.tensor([1, 0])].add_(1)
    assert not reads.seen


def test_a_model_that_reads_numbers_decodes_without_graphs(model, capsys):
    cuda_graphs._say_once.cache_clear()
    model.model.register_forward_pre_hook(
        lambda inner, args, kwargs: int(kwargs["position_ids"].max()) and None, with_kwargs=True)
    with capturing() as graphs:
        compare(model)
    assert not graphs
    lines = [line for line in capsys.readouterr().err.splitlines() if "cuda_graphs" in line]
    assert len(lines) == 1 and "reads numbers on the host (aten._local_scalar_dense)" in lines[0]


def test_a_step_that_cannot_be_captured_says_what_to_do(model):
    steps = iter([lambda: None, lambda: torch.ones(1).item()])
    with pretend_cuda_graphs():
        graphs = StepGraphs()
        graphs.run(1, next(steps))
        with pytest.raises(ValueError, match="set cuda_graphs to false"):
            graphs.run(1, next(steps))


@pytest.mark.parametrize(("int8", "sharded", "reason"), [
    (True, False, "outlier columns"), (False, True, "of each layer from other processes"), (False, False, None)])
def test_precisions_and_sharding_that_cannot_be_captured(int8, sharded, reason, monkeypatch):
    monkeypatch.setattr(cuda_graphs.sharding, "has_shards", lambda model: sharded)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    said = cuda_graphs._obstacle(SimpleNamespace(parameters=lambda: iter([on_gpu]), is_loaded_in_8bit=int8))
    assert reason in said if reason else said is None


def test_without_a_gpu_a_line_says_so_and_nothing_changes(model, capsys):
    cuda_graphs._say_once.cache_clear()
    for _ in range(2):
        decode_with_graphs(model, True)
    line, = capsys.readouterr().err.splitlines()
    assert line.endswith("cuda_graphs: decoding without CUDA graphs: there is no CUDA device")
    assert not cuda_graphs.has_static_decoding(model)
    decode_with_graphs(model, False)
    assert not capsys.readouterr().err
