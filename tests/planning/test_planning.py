"""Counts and peaks of the plan, beside real small models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from torch.profiler import ProfilerActivity, profile

from stages.finetuning.lm_loss import summed_lm_loss
from stages.finetuning.packing import PackedRow
from stages.modeling import lora
from stages.modeling.load import resolve_cpu_kernels
from stages.modeling.packed import attention, token_logprobs
from stages.modeling.packed.forward import use_packed_attention
from stages.planning import cards, shapes, stage_costs
from stages.planning.dry_run import dry_run
from stages.planning.smallest_change import find_smallest_change
from stages.planning.stage_plan import Hardware, StagePlan
from stages.recipe.sections.models import Lora, Scratch
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.reward import Reward
from stages.recipe.sections.sft import Sft
from stages.training.memory_estimate import PlanRow
from tests.helpers.architectures import FAMILIES

CARD = cards.CARDS[0]
HARDWARE = Hardware(CARD, 1, 0.4)
SMALL = hf.LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
                       num_attention_heads=4, max_position_embeddings=512, tie_word_embeddings=True)
LORA = {"r": 8, "alpha": 16, "dropout": 0.0, "target_modules": ()}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_a_real_model(family):
    real = hf.AutoModelForCausalLM.from_config(FAMILIES[family])
    planned = shapes.build_causal(FAMILIES[family], torch.float32)
    assert shapes.count_parameters(planned)[0] == sum(p.numel() for p in real.parameters())
    planned.requires_grad_(True)
    real, planned = (lora.add_lora(model, precision="fp32", **LORA) for model in (real, planned))
    assert shapes.count_parameters(planned)[1] == sum(p.numel() for p in real.parameters() if p.requires_grad) > 0


def test_the_published_base_has_its_published_parameters():
    config = shapes.find_config("huggyllama/llama-7b", None, None)
    assert shapes.count_parameters(shapes.build_causal(config, torch.bfloat16))[0] == 6_738_415_616


def test_scratch_has_the_shape_of_the_recipe():
    config = shapes.find_config("scratch", None, Scratch(hidden_size=64, layers=3))
    assert (config.hidden_size, config.num_hidden_layers, config.tie_word_embeddings) == (64, 3, True)


def test_a_folder_without_a_configuration_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json: give the folder of a model$"):
        shapes.find_config(str(tmp_path), None, None)


def test_an_unknown_card_is_one_line():
    with pytest.raises(ValueError, match=r"^--device TPU: unknown; choose one of H200"):
        cards.choose_card("TPU", None, None)


def test_dry_run_counts_what_is_alive_and_multiplies():
    weight = torch.empty(100, 50, device="meta")

    def step():
        first = torch.empty(10, 100, device="meta") @ weight  # 4,000 bytes, dropped, and 2,000
        return first @ torch.empty(50, 10, device="meta")  # 2,000 and 400
    assert dry_run(step) == (6000, 2 * 10 * 100 * 50 + 2 * 10 * 50 * 10)


def allocated_peak(step) -> int:
    """The peak bytes that torch's CPU allocator hands out during a step, by its own records."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).max())


@pytest.mark.xfail(strict=False, reason="open: within 15 % in one of two runs with an adapter; not yet run in full")
@pytest.mark.parametrize("tune", ["lora", "full"])
def test_the_peak_of_an_sft_step_is_within_15_percent_of_the_allocators(tune, monkeypatch):
    """The memory beside weights and optimizer, which are counted exactly: activations, logits and gradients."""
    monkeypatch.setitem(token_logprobs.CHUNK_LOGITS, "meta", token_logprobs.CHUNK_LOGITS["cpu"])
    assert resolve_cpu_kernels("auto")  # attention that stores no weights, as a GPU's
    attention.register()
    real = hf.AutoModelForCausalLM.from_config(SMALL, attn_implementation=attention.PACKED)
    planned = shapes.build_causal(SMALL, torch.float32)
    rows = [PackedRow(np.ones(256, int), np.arange(256) > 0)] * 4
    peaks = []
    for model, peak in ((real, allocated_peak), (planned, lambda step: dry_run(step).peak_bytes)):
        model.requires_grad_(True)
        model = lora.add_lora(model, precision="fp32", **LORA) if tune == "lora" else model
        use_packed_attention(lora.unwrap_peft(model), cpu_kernels=peak is allocated_peak)
        peaks.append(peak(lambda model=model: summed_lm_loss(model, rows, "fp32").backward()))
    assert peaks[1] == pytest.approx(peaks[0], rel=0.15)


SECTIONS = {
    "sft": Sft(precision="fp32", lora=Lora(), max_steps=10, sequence_length_tokens=64),
    "reward": Reward(precision="fp32", max_length_tokens=64),
    "ppo": Ppo(precision="fp32", max_prompt_tokens=32, max_response_tokens=32, rollout_prompts=8,
               minibatch_prompts=8),
}
PLANS = {
    "sft": lambda settings: stage_costs.plan_sft(SMALL, settings, HARDWARE, None),
    "reward": lambda settings: stage_costs.plan_reward(SMALL, settings, HARDWARE, None),
    "ppo": lambda settings: stage_costs.plan_ppo(SMALL, settings, None, HARDWARE),
}


@pytest.mark.parametrize("stage", SECTIONS)
def test_a_smaller_microbatch_checkpointing_and_fewer_bits_save_memory(stage):
    settings, plan = SECTIONS[stage], PLANS[stage]
    size = "microbatch_" + {"sft": "sequences", "reward": "pairs", "ppo": "prompts"}[stage]
    whole = plan(settings)
    rows = {row.name: row.bytes for row in whole.memory}
    assert rows["frozen base"] > 0 and whole.trained > 0 and whole.flops > 0
    assert plan(replace(settings, **{size: 1})).peak_bytes < whole.peak_bytes
    checkpointed = plan(replace(settings, gradient_checkpointing=True))
    assert checkpointed.flops > whole.flops
    stored = {precision: {row.name: row.bytes for row in plan(replace(settings, precision=precision)).memory}
              for precision in ("bf16", "int8", "nf4")}
    assert rows["frozen base"] > stored["bf16"]["frozen base"]
    assert stored["int8"]["frozen base"] > stored["nf4"]["frozen base"]


def test_the_smallest_change_is_the_first_that_fits():
    def plan(settings):
        size = settings.microbatch_sequences * (1 if settings.gradient_checkpointing else 4)
        return StagePlan("sft", 0, 0, [PlanRow("activations", size << 30, "")], 0, 0, 0, 0)
    settings = Sft()
    assert find_smallest_change(settings, plan, CARD._replace(memory_gib=8), 1)[0] == {"microbatch_sequences": 2}
    assert find_smallest_change(settings, plan, CARD._replace(memory_gib=2), 1)[0] == {
        "microbatch_sequences": 2, "gradient_checkpointing": True}
    assert find_smallest_change(settings, plan, CARD._replace(memory_gib=0.5), 1) is None
