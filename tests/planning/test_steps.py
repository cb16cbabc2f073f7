"""Steps measured at two depths, and plans of stages from them."""

from dataclasses import replace

import pytest
import transformers as hf

from stages.planning import shapes
from stages.planning.dry_run import dry_run
from stages.planning.stage_plan import Hardware, preset_gradients
from stages.planning.step_meter import StepMeter, measure_step
from tests.planning.small_model import HARDWARE, SECTIONS, STEPS, plan, small_config


@pytest.mark.parametrize(("stage", "change"), [
    ("sft", {"gradient_checkpointing": True, "tune": "full"}), ("dpo", {}), ("ppo", {"gradient_checkpointing": True})])
def test_memory_and_work_grow_by_the_same_amount_with_each_layer(stage, change):
    settings, config = replace(SECTIONS[stage], **change), small_config(layers=4)
    whole = STEPS[stage](config, settings, 2)
    preset_gradients(whole.model)
    measured = dry_run(whole.run)
    planned = measure_step(config, lambda shallow: STEPS[stage](shallow, settings, 2))
    assert planned.flops == measured.flops
    assert planned.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)


def test_layers_of_several_kinds_are_measured_by_period():
    config = hf.Qwen2Config(num_hidden_layers=6, use_sliding_window=True, max_window_layers=0, layer_types=[
        "sliding_attention", "sliding_attention", "full_attention"] * 2)
    assert shapes.layer_period(config) == 3
    shallow = shapes.with_layers(config, 3)
    assert (shallow.num_hidden_layers, shallow.layer_types) == (3, config.layer_types[:3])
    assert shapes.layer_period(small_config()) == 1


@pytest.mark.parametrize("stage", SECTIONS)
def test_a_plan_has_all_parts(stage):
    planned = plan(stage, SECTIONS[stage])
    rows = {row.name: row.bytes for row in planned.memory}
    assert rows["frozen base"] > 4 * 4 * 344 * 128 and planned.parameters > planned.trained
    assert rows["gradients"] == rows["trained parameters"] > 0 and rows["optimizer state"] == 2 * rows["gradients"]
    assert planned.flops > 0 and planned.seconds > 0 and planned.tokens > 0 and planned.disk_bytes > 0
    assert ("reward model" in rows) == (stage in ("ppo", "grpo"))


def test_a_reward_model_of_the_first_layers_is_planned():
    settings = replace(SECTIONS["reward"], tune="full")
    whole, cut = (plan("reward", replace(settings, layers=layers), meter=StepMeter(small_config(layers=4)))
                  for layers in (None, 3))
    layer = sum(p.numel() for p in shapes.build_causal(small_config(1), shapes.weights_dtype("fp32")).model.layers[0]
                .parameters())
    assert whole.parameters - cut.parameters == layer and cut.flops < 0.85 * whole.flops


def test_by_time_a_checkpoint_may_follow_every_step():
    settings = replace(SECTIONS["sft"], max_steps=3, save_every_steps=100, save_every_minutes=None)
    meter = StepMeter(small_config())
    by_steps, by_time = (plan("sft", replace(settings, save_every_minutes=minutes), meter=meter).disk_bytes
                         for minutes in (None, 30.0))
    trained = plan("sft", settings, meter=meter).trained
    assert by_time - by_steps == 2 * 3 * 4 * trained  # two more, each of weights and Adam's moments


def test_fewer_rows_recomputation_and_fewer_bits_need_less():
    settings = SECTIONS["ppo"]
    whole = plan("ppo", settings)
    assert plan("ppo", replace(settings, microbatch_prompts=1)).peak_bytes < whole.peak_bytes
    recomputed = plan("ppo", replace(settings, gradient_checkpointing=True))
    assert recomputed.flops > whole.flops and recomputed.peak_bytes < whole.peak_bytes
    stored = [plan("ppo", replace(settings, precision=precision)).memory[0].bytes
              for precision in ("fp32", "bf16", "int8", "nf4")]
    assert stored == sorted(stored, reverse=True) and len(set(stored)) == 4


def test_cards_share_the_work_and_with_fsdp_the_layers():
    settings = replace(SECTIONS["sft"], tune="full", precision="bf16", sharding="fsdp")
    four = Hardware(HARDWARE.card, 4, HARDWARE.share)
    alone, sharded = (plan("sft", settings, cards, StepMeter(small_config())) for cards in (HARDWARE, four))
    assert sharded.seconds == pytest.approx(alone.seconds / 4)
    model = shapes.build_causal(small_config(), shapes.weights_dtype("bf16"))
    layers = sum(p.nbytes for p in model.model.layers.parameters())
    parts = [{row.name: row.bytes for row in planned.memory} for planned in (alone, sharded)]
    for name, factor in (("trained parameters", 1), ("gradients", 1), ("optimizer state", 2)):
        assert parts[0][name] - parts[1][name] == layers * 3 // 4 * factor
    assert parts[1]["gathered layers"] == 2 * layers // 2  # of two layers, both


def test_a_critic_of_its_own_and_an_adapter_as_critic_are_planned():
    settings = SECTIONS["ppo"]
    head = plan("ppo", settings)
    adapter = plan("ppo", replace(settings, value_model="adapter"))
    model = plan("ppo", replace(settings, value_model="model"))
    assert head.trained < adapter.trained < model.trained
    assert "reward model" not in {row.name for row in adapter.memory}  # it shares the base
