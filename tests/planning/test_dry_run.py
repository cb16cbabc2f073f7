"""The peak of a step on the meta device, beside what torch's CPU allocator hands out in the same step."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stages.modeling.load import resolve_cpu_kernels
from stages.modeling.lora import unwrap_peft
from stages.modeling.packed import attention, sequences, token_logprobs
from stages.modeling.packed.forward import use_packed_attention
from stages.planning import shapes
from stages.planning.dry_run import dry_run
from stages.planning.stage_plan import preset_gradients
from stages.planning.step_meter import measure_step
from tests.planning.small_model import SECTIONS, STEPS, small_config

ROWS = {"grpo": 4}  # the responses to a prompt


def test_dry_run_counts_what_is_alive_and_multiplies():
    weight = torch.empty(100, 50, device="meta")

    def step():
        first = torch.empty(10, 100, device="meta") @ weight  # 4,000 bytes, dropped, and 2,000
        return first @ torch.empty(50, 10, device="meta")  # 2,000 and 400
    assert dry_run(step) == (6000, 2 * 10 * 100 * 50 + 2 * 10 * 50 * 10)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let the CPU compute by the operations of a GPU: fused attention of one bucket, logits in large chunks."""
    class Fused:
        @staticmethod
        def apply(*arguments):
            return attention._attend_fused(*arguments)
    monkeypatch.setattr(attention, "_PackedAttention", Fused)
    monkeypatch.setitem(sequences.BUCKET_SCORES, "cpu", sequences.BUCKET_SCORES["meta"])
    monkeypatch.setitem(token_logprobs.CHUNK_LOGITS, "cpu", token_logprobs.CHUNK_LOGITS["meta"])


def allocated_peak(stage: str, settings, monkeypatch, cpu_kernels: bool = False) -> int:
    """Run a step with real weights, and return the allocator's peak by its own records."""
    monkeypatch.setattr(shapes, "META", torch.device("cpu"))
    step = STEPS[stage](small_config(), settings, ROWS.get(stage, 2))
    monkeypatch.undo()
    if cpu_kernels:
        use_packed_attention(unwrap_peft(step.model), cpu_kernels=True)
    preset_gradients(step.model)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step.run()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def planned_peak(stage: str, settings) -> int:
    return measure_step(small_config(), lambda config: STEPS[stage](config, settings, ROWS.get(stage, 2))).peak_bytes


@pytest.mark.parametrize(("stage", "change"), [
    ("sft", {}), ("sft", {"gradient_checkpointing": True}), ("sft", {"tune": "full"}), ("reward", {}),
    ("reward", {"gradient_checkpointing": True, "tune": "full"}), ("dpo", {}), ("ilql", {}), ("ppo", {}),
    ("ppo", {"gradient_checkpointing": True}), ("ppo", {"precision": "bf16"}), ("grpo", {})])
def test_the_peak_of_a_step_is_that_of_the_allocator(stage, change, as_on_a_gpu, monkeypatch):
    """The memory beside weights, gradients and optimizer state, which are counted exactly. 15 % are permitted."""
    settings = replace(SECTIONS[stage], **change)
    with monkeypatch.context() as patch:
        measured = allocated_peak(stage, settings, patch)
    assert planned_peak(stage, settings) == pytest.approx(measured, rel=0.03)


def test_the_peak_with_this_projects_cpu_kernels_is_within_15_percent(monkeypatch):
    """They store less than the operations of a GPU that are planned."""
    assert resolve_cpu_kernels("auto")
    monkeypatch.setitem(token_logprobs.CHUNK_LOGITS, "meta", token_logprobs.CHUNK_LOGITS["cpu"])
    settings = SECTIONS["sft"]
    with monkeypatch.context() as patch:
        measured = allocated_peak("sft", settings, patch, cpu_kernels=True)
    assert measured <= planned_peak("sft", settings) <= 1.15 * measured
