"""Memory: what is counted is what is there, and a microbatch that does not fit is halved (CORRECTNESS failure 20)."""

import subprocess
import sys
import weakref

import pytest
import torch
from transformers import DynamicCache

from stages.modeling import lora
from stages.modeling.load import load_causal
from stages.modeling.packed import forward
from stages.rl.checks import memory_plan
from stages.training import memory
from tests.helpers import tiny_models

MIB = 2**20
WIDTH, VOCABULARY = 64, 320
# A layer's seven linear weights, as tiny_models.llama makes them: elements and output rows.
LINEAR = [(64 * 64, 64)] * 4 + [(64 * 128, 128)] * 2 + [(128 * 64, 64)]
NORMS = 4 * 5 * WIDTH  # fp32: two a layer, one at the end
ROTARY = 2 * 4 * 16  # two fp32 buffers of half a head
EMBEDDING = 4 * VOCABULARY * WIDTH
LORA = sum(4 * 4 * (inside + outside) for inside, outside in [(64, 64), (64, 64)] * 2)  # r 4 on q and v, fp32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save_base(tmp_path_factory.mktemp("base"), width=WIDTH)


def adapted(folder, precision):
    model = load_causal(folder, precision)
    return lora.add_lora(model, r=4, alpha=8, dropout=0.0, target_modules=(), precision=precision)


def rows_of(policy, others=None, **changes):
    numbers = {"optimizer": "adam", "optimizer_bytes": 2 * LORA, "largest": {}, "costs": {}}
    return {row.name: row for row in memory_plan.estimate_memory(policy, others or {}, **numbers | changes)}


@pytest.mark.parametrize(
    "precision, weight, note",
    [
        ("fp32", lambda elements, rows: 4 * elements, "float32"),
        ("int8", lambda elements, rows: elements + 4 * rows, "float32, int8"),
        ("nf4", lambda elements, rows: elements // 2 + 4 * elements // 64, "float32, nf4"),
    ],
)
def test_plan_counts_the_true_bytes_of_a_frozen_base(folder, precision, weight, note):
    """The tied output layer once; int8 with its scale a row, nf4 with its scale a block of 64 and its code book."""
    policy = adapted(folder, precision)
    rows = rows_of(policy)
    code = sum(layer.quant_state.code.nbytes for layer in policy.parameters() if hasattr(layer, "quant_state"))
    expected = EMBEDDING + NORMS + ROTARY + 2 * sum(weight(*shape) for shape in LINEAR) + code
    assert rows["frozen base"].bytes == expected and rows["frozen base"].note == note
    assert code == (2 * 7 * 16 * 4 if precision == "nf4" else 0)
    assert rows["trained parameters"].bytes == rows["gradients"].bytes == LORA
    assert rows["optimizer state"] == ("optimizer state", 2 * LORA, "adam")
    policy(input_ids=torch.arange(4)[None])  # bitsandbytes moves its scales at the first forward
    assert rows_of(policy)["frozen base"].bytes == expected


def test_a_copy_counts_and_what_is_shared_does_not(folder):
    policy, copy = load_causal(folder), load_causal(folder)
    whole = EMBEDDING + NORMS + 2 * sum(4 * elements for elements, _ in LINEAR)
    rows = rows_of(policy, {"reference": copy, "reward model": copy, "itself": policy})
    assert rows["trained parameters"].bytes == whole and rows["frozen base"].bytes == ROTARY
    assert rows["reference"].bytes == whole + ROTARY
    assert rows["reward model"].bytes == rows["itself"].bytes == 0
    assert rows["gradients"].bytes == whole


def test_weights_in_one_place_count_once_whatever_objects_they_are_reached_by():
    one, other = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    assert memory_plan.distinct_bytes([one.weight, other.weight]) == 2 * 256
    other.weight = torch.nn.Parameter(one.weight.data)
    assert memory_plan.distinct_bytes([one.weight, other.weight, one.weight.detach()]) == 256


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_kv_cache_bytes_are_those_of_the_real_cache(family):
    model = tiny_models.llama(tiny_models.tokenizer()) if family == "llama" else tiny_models.gpt2(VOCABULARY)
    cache = DynamicCache()
    model(input_ids=torch.ones(3, 7).long(), past_key_values=cache, use_cache=True)
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert memory_plan.kv_cache_bytes(model.config, 3, 7, torch.float32) == real
    assert memory_plan.kv_cache_bytes(model.config, 3, 14, torch.bfloat16) == real


def test_kv_cache_of_grouped_heads():
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    # Llama 3 8B: known 128 KiB a token
    assert memory_plan.kv_cache_bytes(config, 1, 1, torch.bfloat16) == 128 * 1024


def test_the_table_is_aligned_and_in_units():
    cost = memory.PhaseCost(seconds=1.25, peak_bytes=13 * 2**30 + 2**29)
    rows = memory_plan.estimate_memory(
        torch.nn.Linear(1024, 256, bias=False), {}, optimizer="adamw_8bit", optimizer_bytes=MIB // 2,
        largest={"logits": 2**30}, costs={"update": cost},
    )  # fmt: skip
    assert memory_plan.format_plan(rows) == [
        "frozen base            0 bytes",
        "trained parameters     1.0 MiB  float32",
        "gradients              1.0 MiB",
        "optimizer state      512.0 KiB  adamw_8bit",
        "logits                 1.0 GiB  at most",
        "peak of update        13.5 GiB  measured, 1.2 s; without optimizer state",
    ]


PHASES = """
import torch
from stages.training import memory
from tests.training.test_memory import MIB

costs = memory.measure_phases({
    "large": lambda: torch.ones(64 * MIB // 4).sum(), "small": lambda: torch.ones(16 * MIB // 4).sum()
})
large, small = costs["large"].peak_bytes, costs["small"].peak_bytes
assert 40 * MIB < large - small < 56 * MIB and costs["large"].seconds > 0, (large, small)
assert memory.peak_bytes() >= large > small
memory.CLEAR = memory.Path("/nowhere/clear_refs")  # not permitted: never too low
with memory.track_peak_memory() as first:
    torch.ones(64 * MIB // 4).sum()
with memory.track_peak_memory() as second:
    pass
# The kernel counts pages a little late.
assert second.peak_bytes >= first.peak_bytes - MIB >= large - 8 * MIB, (second, first, large)
memory.STATUS = memory.Path("/nowhere/status")  # no /proc at all
assert 0.5 < memory._peak_since_reset() / second.peak_bytes < 2
"""


def test_a_phase_is_measured_apart_from_the_others_and_the_run_as_a_whole():
    """In a process of its own: memory that earlier tests freed is reused, and a phase that takes it adds nothing.

    A process takes over the peak of the one that starts it, here a small shell in place of all earlier tests.
    """
    done = subprocess.run(["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, PHASES], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr


def test_a_phase_that_fails_still_costs():
    with pytest.raises(KeyError), memory.track_peak_memory() as cost:
        raise KeyError
    assert cost.peak_bytes > 0


ROWS = [[1, 40, 50, 60, 70, 80, 90], [1, 45], [1, 90, 91, 92], [1, 33, 34, 35, 36, 37, 38, 39, 40, 41],
        [1, 7, 8], [1, 9, 10, 11, 12]]  # fmt: skip


def update(model, after_backward=lambda size: None):
    """A minibatch in microbatches: ragged texts, a sum over tokens divided by the minibatch's."""

    def call(size):
        model.zero_grad()
        tokens, total = sum(len(row) - 1 for row in ROWS), 0.0
        for start in range(0, len(ROWS), size):
            ids, mask = forward.pad_batch(ROWS[start : start + size])
            labels = torch.where(mask.bool(), ids, -100)
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            (loss / tokens).backward()
            after_backward(size)
            total += float(loss.detach()) / tokens
        return total

    return call


def cuda_style():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def past_torch():
    raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")


def cpu_style():
    torch.empty(2**60)  # torch's own words, whatever they are


@pytest.mark.parametrize("error", [cuda_style, past_torch, cpu_style])
@pytest.mark.parametrize("fits", [3, 1])
def test_halving_gives_the_same_gradient_and_says_so(error, fits, capsys):
    model = tiny_models.llama(tiny_models.tokenizer())

    def gradient():
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected, size = memory.retry_with_smaller_batches(update(model), 6)
    whole = gradient()
    assert size == 6 and not capsys.readouterr().err and float(whole.norm()) > 0.1
    # It fails after a backward pass: what that left must not count.
    loss, size = memory.retry_with_smaller_batches(update(model, lambda size: size > fits and error()), 6)
    assert size == fits and loss == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(gradient(), whole, atol=1e-6)
    said = ["microbatch_prompts 6 is out of memory: going on with 3"]
    said += ["microbatch_prompts 3 is out of memory: going on with 1"] if fits == 1 else []
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize("size, smaller", [(64, [32, 16, 8, 4, 2, 1]), (12, [6, 3, 1]), (15, [5, 1]), (7, [1])])
def test_sizes_go_on_dividing_the_minibatch(size, smaller):
    tried = []

    def call(size):
        tried.append(size)
        return cuda_style() if size > 1 else "done"

    assert memory.retry_with_smaller_batches(call, size) == ("done", 1) and tried == [size, *smaller]


def test_at_one_it_says_what_to_lower():
    with pytest.raises(ValueError, match="out of memory even with microbatch_prompts 1: lower max_prompt") as actual:
        memory.retry_with_smaller_batches(lambda size: cuda_style(), 4)
    assert "\n" not in str(actual.value)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("no"), KeyError("x")])
def test_other_errors_pass_through(error):
    tried = []

    def call(size):
        tried.append(size)
        raise error

    with pytest.raises(type(error)) as actual:
        memory.retry_with_smaller_batches(call, 8)
    assert actual.value is error and tried == [8]


def test_what_failed_is_freed_before_the_next_try():
    references = []

    def call(size):
        if references:
            assert references[0]() is None
            return None
        activations = torch.ones(1000)
        references.append(weakref.ref(activations))
        return cuda_style()

    assert memory.retry_with_smaller_batches(call, 2) == (None, 1)
