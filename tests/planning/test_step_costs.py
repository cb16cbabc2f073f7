"""The peak and the work of a step by the plan's formulas, beside those of the same step with real weights."""

from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from stages.modeling.load import resolve_cpu_kernels
from stages.modeling.lora import unwrap_peft
from stages.modeling.packed import attention, sequences, token_logprobs
from stages.modeling.packed.forward import use_packed_attention
from stages.planning.steps import Training, step_cost
from stages.planning.training_costs import pair_batch, policy_gradient_cost
from tests.planning import real_steps
from tests.planning.small_model import REWARD, SECTIONS, plan, small_config, small_shape

STEPS = {
    "sft": real_steps.lm_step, "reward": real_steps.reward_step, "dpo": real_steps.dpo_step,
    "ilql": real_steps.ilql_step,
    "ppo": partial(real_steps.policy_gradient_step, reward_lora=REWARD.lora, members=1),
    "grpo": partial(real_steps.policy_gradient_step, value_model=None, reward_lora=REWARD.lora, members=1),
}
ROWS = {"grpo": 4}  # the responses to a prompt
FUSED_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        lambda query, key, value, *rest, **more: sdpa_flop_count(query, key, value),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda grad, query, key, value, *rest, **more: sdpa_backward_flop_count(grad, query, key, value),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let the CPU compute by the operations of a GPU: fused attention of one bucket, logits in large chunks.

    One thread: each further one has buffers of its own in the backward pass of attention. oneDNN has buffers too.
    """
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    class Fused:
        @staticmethod
        def apply(*arguments):
            return attention._attend_fused(*arguments)
    monkeypatch.setattr(attention, "_PackedAttention", Fused)
    monkeypatch.setitem(sequences.BUCKET_SCORES, "cpu", sequences.BUCKET_SCORES["cuda"])
    monkeypatch.setitem(token_logprobs.CHUNK_LOGITS, "cpu", token_logprobs.CHUNK_LOGITS["cuda"])
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def build(stage: str, settings) -> real_steps.Step:
    torch.manual_seed(0)
    more = {"value_model": settings.value_model} if stage == "ppo" else {}
    step = STEPS[stage](small_config(), settings, ROWS.get(stage, 2), **more)
    real_steps.preset_gradients(step.model)
    return step


def allocated_peak(step: real_steps.Step) -> int:
    """Run a step, and return the allocator's peak by its own records."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step.run()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def planned_peak(stage: str, settings) -> int:
    if stage in ("ppo", "grpo"):  # its plan may have the memory of the rollout
        return policy_gradient_cost(small_shape(), settings, ROWS.get(stage, 2),
                                    getattr(settings, "value_model", None), REWARD).peak_bytes
    return plan(stage, settings).memory["activations, logits"]


@pytest.mark.parametrize(("stage", "change"), [
    ("sft", {}), ("sft", {"gradient_checkpointing": True}), ("sft", {"tune": "full"}), ("reward", {}),
    ("reward", {"gradient_checkpointing": True, "tune": "full"}), ("dpo", {}), ("ilql", {}), ("ppo", {}),
    ("ppo", {"gradient_checkpointing": True}), ("ppo", {"precision": "bf16"}), ("grpo", {}),
    ("ppo", {"value_model": "adapter"}), ("ppo", {"value_model": "model"})])
def test_the_peak_of_a_step_is_that_of_the_allocator(stage, change, as_on_a_gpu):
    """The memory beside weights, gradients and optimizer state, which are counted exactly. 15 % are permitted."""
    settings = replace(SECTIONS[stage], **change)
    assert planned_peak(stage, settings) == pytest.approx(allocated_peak(build(stage, settings)), rel=0.03)


@pytest.mark.parametrize("stage", ["reward", "dpo", "ppo", "grpo"])
def test_the_work_of_a_step_is_what_torch_counts(stage, as_on_a_gpu):
    settings, shape = SECTIONS[stage], small_shape()
    if stage in ("reward", "dpo"):
        planned = step_cost(shape, Training.read(settings), pair_batch(settings, 2, stage == "reward")).flops
    else:
        value_model = getattr(settings, "value_model", None)
        planned = policy_gradient_cost(shape, settings, ROWS.get(stage, 2), value_model, REWARD).flops
    step = build(stage, settings)
    with FlopCounterMode(display=False, custom_mapping=FUSED_ATTENTION) as counter:
        step.run()
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_the_peak_with_this_projects_cpu_kernels_is_within_15_percent():
    """They store less than the operations of a GPU that are planned."""
    assert resolve_cpu_kernels("auto")
    settings = SECTIONS["sft"]
    step = build("sft", settings)
    use_packed_attention(unwrap_peft(step.model), cpu_kernels=True)
    measured = allocated_peak(step)
    assert measured <= planned_peak("sft", settings) <= 1.15 * measured
