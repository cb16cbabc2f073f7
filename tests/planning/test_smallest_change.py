"""The smallest change that makes a stage fit."""

from dataclasses import replace

import pytest

from stages.planning import hardware
from stages.planning.stage_plan import StagePlan, find_smallest_change
from stages.recipe.sections.evaluate import Evaluate
from stages.recipe.sections.models import Merge
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.rejection_sampling import ExpertIteration
from stages.recipe.sections.sft import Sft

CARD = hardware.CARDS[0]
BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "nf4": 0.5}


def plan_sft(settings) -> StagePlan:
    """16 GiB of weights in fp32, which fsdp halves, and a GiB a row, a quarter of it with checkpointing."""
    weights = 4 * BYTES[settings.precision] / (2 if settings.sharding == "fsdp" else 1)
    rows = settings.microbatch_sequences / (4 if settings.gradient_checkpointing else 1)
    return as_plan(weights + rows)


def plan_ppo(settings) -> StagePlan:
    return as_plan(settings.rollout_prompts / 4 + settings.microbatch_prompts / 8)


def as_plan(gib: float) -> StagePlan:
    return StagePlan("stage", 0, 0, {"activations, logits": int(gib * (1 << 30))}, 0, 0, 0, 0)


def cards_of(usable_gib: float, devices: int) -> hardware.Hardware:
    return hardware.Hardware(CARD._replace(memory_gib=usable_gib / hardware.USABLE_SHARE + 1e-6), devices, 0.4)


@pytest.mark.parametrize(("gib", "devices", "change"), [
    (18.5, 1, {"microbatch_sequences": 2}),
    (16.6, 1, {"microbatch_sequences": 2, "gradient_checkpointing": True}),
    (16.0, 1, {"precision": "bf16"}),
    (9.0, 2, {"sharding": "fsdp", "microbatch_sequences": 1}),
    (8.3, 2, {"sharding": "fsdp", "microbatch_sequences": 1, "gradient_checkpointing": True}),
    (1.0, 2, {})])
def test_the_first_that_fits_is_taken(gib, devices, change):
    settings = Sft(precision="fp32")
    assert find_smallest_change(settings, plan_sft, cards_of(gib, devices)).settings == change


def test_a_smaller_rollout_comes_last_and_its_sizes_divide_each_other():
    settings = Ppo(precision="nf4", rollout_prompts=64, minibatch_prompts=32, microbatch_prompts=8)
    change, peak_bytes = find_smallest_change(settings, plan_ppo, cards_of(4.5, 1))
    assert change == {"rollout_prompts": 16, "minibatch_prompts": 16, "microbatch_prompts": 4}
    assert peak_bytes == plan_ppo(replace(settings, **change)).peak_bytes


def test_a_merge_is_checked_in_bf16():
    def plan_merge(settings) -> StagePlan:
        return as_plan(4 * BYTES[settings.check_precision])

    assert find_smallest_change(Merge(), plan_merge, cards_of(8.5, 1))[0] == {"check_precision": "bf16"}
    assert find_smallest_change(Merge(), plan_merge, cards_of(7.5, 1)) == ({}, 0)


def test_an_evaluation_samples_fewer_prompts_at_once():
    change, _ = find_smallest_change(Evaluate(), lambda settings: as_plan(settings.batch_prompts), cards_of(40, 1))
    assert change == {"batch_prompts": 32}


def test_a_constant_of_a_section_is_not_changed():
    """Expert iteration has sharding as a constant, and so no other value on several cards."""
    change, _ = find_smallest_change(
        ExpertIteration(), lambda settings: as_plan(4 * BYTES[settings.precision]), cards_of(4.5, 8))
    assert change == {"precision": "int8"}
