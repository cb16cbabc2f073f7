"""On a GPU: CUDA graphs give the tokens of plain decoding, in no more time. On a CPU the same steps run without one."""

import time
from functools import partial

import pytest
import torch

from stages.generation.cuda_graphs import StepGraphs, set_static_decoding
from stages.generation.sampler import sample
from stages.modeling.load import load_causal
from tests.generation.test_static_decoding import compare
from tests.helpers import architectures, tiny_models
from tests.helpers.devices import computing_on, every_device


@pytest.fixture
def captured(monkeypatch):
    """Count the rows of the graphs that are captured."""
    rows, capture = [], StepGraphs._capture

    def counted(graphs, step):
        rows.append(step.__self__.cache.rows)
        return capture(graphs, step)

    monkeypatch.setattr(StepGraphs, "_capture", counted)
    return rows


@every_device
@pytest.mark.parametrize("family", ["mistral", "gemma 2"])
def test_the_same_tokens(family, tmp_path, device, captured):
    with computing_on(device):
        compare(load_causal(architectures.save(architectures.FAMILIES[family], tmp_path)), 1e-4)
    assert captured == ([20, 10, 5] if device == "cuda" else [])


@every_device
@pytest.mark.parametrize("precision", ["mixed", "bf16", "nf4"])
def test_nearly_the_same_tokens_with_an_adapter(precision, tmp_path, device, captured):
    with computing_on(device):
        model = load_causal(tiny_models.save_base(tmp_path / "base", width=64), precision)
        compare(architectures.add_adapter(model, precision=precision), 0.1, other_rows=6, precision=precision)
    assert captured == ([20, 10, 5] if device == "cuda" else [])


@every_device
def test_graphs_take_no_more_time(device, captured):
    """A model whose steps are all launches: many small layers."""
    with computing_on(device) as where:
        torch.manual_seed(0)
        layers, tokens = (32, 128) if device == "cuda" else (4, 8)
        model = tiny_models.build_small_llama(
            tiny_models.tokenizer(), hidden_size=64, intermediate_size=128, layers=layers, heads=2,
            max_position_tokens=256, initializer_range=0.02).eval().to(where)
        run = partial(sample, model, [[5, 6, 7]] * 16, max_new_tokens=tokens, temperature=0.0, stop_ids=(),
                      generator=torch.Generator())
        seconds, responses = {}, {}
        for static in (False, True):
            set_static_decoding(model, static)
            for _ in range(2):  # the first call loads the libraries
                start = time.perf_counter()
                responses[static] = run().responses
                seconds[static] = time.perf_counter() - start
    assert responses[True] == responses[False]
    if device == "cuda":
        assert captured == [16, 16] and seconds[True] <= seconds[False]
