"""Plans of trainings: their parts, and how these change with the settings."""

from dataclasses import replace

import pytest

from stages.planning.hardware import Hardware
from stages.planning.stage_plan import StagePlan
from tests.planning.small_model import HARDWARE, SECTIONS, plan, small_shape


@pytest.mark.parametrize("stage", SECTIONS)
def test_a_plan_has_all_parts(stage):
    planned = plan(stage, SECTIONS[stage])
    rows = planned.memory
    assert rows["frozen base"] > 4 * 4 * 344 * 128 and planned.parameters > planned.trained
    assert rows["gradients"] == rows["trained parameters"] > 0 and rows["optimizer state"] == 2 * rows["gradients"]
    assert planned.flops > 0 and planned.seconds > 0 and planned.tokens > 0 and planned.disk_bytes > 0
    assert ("reward model" in rows) == (stage in ("ppo", "grpo"))


def test_a_reward_model_of_the_first_layers_is_planned():
    settings = replace(SECTIONS["reward"], tune="full")
    whole, cut = (plan("reward", replace(settings, layers=layers), layers=4)
                  for layers in (None, 3))
    layer = small_shape().layer_weights + small_shape().layer_vectors
    assert whole.parameters - cut.parameters == layer and cut.flops < 0.85 * whole.flops


def test_by_time_a_checkpoint_may_follow_every_step():
    settings = replace(SECTIONS["sft"], max_steps=3, save_every_steps=100, save_every_minutes=None)
    by_steps, by_time = (plan("sft", replace(settings, save_every_minutes=minutes)).disk_bytes
                         for minutes in (None, 30.0))
    trained = plan("sft", settings).trained
    assert by_time - by_steps == 2 * 3 * 4 * trained  # two more, each of weights and Adam's moments


def test_fewer_rows_recomputation_and_fewer_bits_need_less():
    settings = SECTIONS["ppo"]
    whole = plan("ppo", settings)
    assert plan("ppo", replace(settings, microbatch_prompts=1)).peak_bytes < whole.peak_bytes
    recomputed = plan("ppo", replace(settings, gradient_checkpointing=True))
    assert recomputed.flops > whole.flops and recomputed.peak_bytes < whole.peak_bytes
    stored = [plan("ppo", replace(settings, precision=precision)).memory["frozen base"]
              for precision in ("fp32", "bf16", "int8", "nf4")]
    assert stored == sorted(stored, reverse=True) and len(set(stored)) == 4


def test_cards_share_the_work_and_with_fsdp_the_layers():
    settings = replace(SECTIONS["sft"], tune="full", precision="bf16", sharding="fsdp")
    four = Hardware(HARDWARE.card, 4, HARDWARE.share)
    alone, sharded = (plan("sft", settings, cards) for cards in (HARDWARE, four))
    assert sharded.seconds == pytest.approx(alone.seconds / 4)
    layers = 2 * 2 * (small_shape().layer_weights + small_shape().layer_vectors)
    parts = [planned.memory for planned in (alone, sharded)]
    for name, factor in (("trained parameters", 1), ("gradients", 1), ("optimizer state", 2)):
        assert parts[0][name] - parts[1][name] == layers * 3 // 4 * factor
    assert parts[1]["gathered layers"] == 2 * layers // 2  # of two layers, both


def test_a_critic_of_its_own_and_an_adapter_as_critic_are_planned():
    settings = SECTIONS["ppo"]
    head = plan("ppo", settings)
    adapter = plan("ppo", replace(settings, value_model="adapter"))
    model = plan("ppo", replace(settings, value_model="model"))
    assert head.trained < adapter.trained < model.trained
    assert "reward model" not in adapter.memory  # it shares the base


def test_of_two_phases_the_one_that_needs_more_counts():
    plan = StagePlan("reward", 0, 0, {"activations, logits": 2}, 1, 1, 1, 0)
    assert plan.after({"keys and values": 3}, 1, 1, 1).memory == {"keys and values": 3}
    assert plan.after({"keys and values": 1}, 1, 1, 1).memory == plan.memory
