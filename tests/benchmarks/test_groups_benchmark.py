"""The benchmark of RLOO and GRPO beside PPO and TRL, at a tiny shape: the work is equal, and goals are ratios."""

import pytest
import torch

from benchmarks.ppo import group_steps, groups, workload

TINY = workload.Shape(width=32, layers=1, vocabulary=64, prompts=(3, 5), response=4, batch=8, minibatch=4, epochs=2)


@pytest.mark.parametrize("method", ["ppo_model", "rloo", "grpo"])
def test_a_step_has_the_same_responses_and_minibatches_whatever_the_method(method):
    trainer = group_steps.build(TINY, method, responses=4)
    count = trainer.update_settings.responses_per_prompt
    assert count == (1 if method == "ppo_model" else 4) and trainer.policy.has_critic == (method == "ppo_model")
    (prompts,) = workload.prompts(TINY, 1)
    group_steps.take_step(trainer, prompts, TINY, torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError):
        group_steps.take_step(trainer, prompts[:1], TINY, torch.Generator().manual_seed(0))


def test_goals_compare_with_ppo_and_with_trl():
    seconds = {"ours ppo_head": 10.0, "ours ppo_model": 20.0, "ours rloo": 5.0, "ours grpo": 8.0, "TRL rloo": 20.0}
    goals = groups.compute_goals({name: {"cpu": value} for name, value in seconds.items()}, "cpu")
    assert {goal.name: (goal.value, goal.met) for goal in goals} == {
        "rloo / ppo_head": (0.5, True), "rloo / ppo_model": (0.25, True), "TRL rloo / ours": (4.0, True),
        "grpo / ppo_head": (0.8, False), "grpo / ppo_model": (0.4, True)}
