"""One PPO step and its parts, and what a run prints and writes before and while it trains."""

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

from stages import ppo
from stages.recipe.sections.models import Lora
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.rewards import RewardSource
from stages.rewards.kl import KlController
from stages.rewards.shaping import ShapedRewards
from stages.rl import policy_gradient_trainer
from stages.rl.advantages import gae_advantages
from stages.rl.checks.memory_plan import longest_rollout, plan_memory
from stages.rl.collect_rollouts import SamplingParams, collect_rollout
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer, policy_gradient_loss, update_policy
from tests.helpers import tiny_models
from tests.helpers.trajectories import build_trajectory
from tests.rl.test_policy import PROMPTS, UPDATE, make_policy, perturb

PHASES = {"rollout", "score", "experience", "update"}


class LengthReward:
    """A reward that a policy can learn: the number of response tokens."""

    def __call__(self, rollout, *, update_statistics):
        return ShapedRewards(torch.tensor([float(len(r)) for r in rollout.responses]), {}, 1.0)


def make_trainer(policy, **settings):
    return PolicyGradientTrainer(
        policy=policy, reward_shaper=LengthReward(), kl_controller=KlController(0.1, None, 1),
        optimizer=torch.optim.Adam(policy.trainable_parameters().values(), lr=0.01),
        update_settings=replace(UPDATE, **settings), sampling=SamplingParams(1.0, (2,), "until_stop", 1, 12),
        estimate_advantages=partial(gae_advantages, gamma=0.98, gae_lambda=0.9), kl_estimator="k1", forward_prompts=8,
        reuse_rollout_logprobs=True,
    )


def step(trainer, seed=0, **options):
    return trainer.step(PROMPTS, lambda purpose: torch.Generator().manual_seed(seed), **options)


def weights(policy):
    return {name: p.detach().clone() for name, p in policy.trainable_parameters().items()}


@pytest.mark.parametrize("reuse", [True, False])
def test_a_step_updates_on_the_trajectory_of_the_golden_values(monkeypatch, reuse):
    """The parity tests check tests/helpers/trajectories.py against the peers; here `step` is checked against that."""
    trainer, seen = make_trainer(perturb(make_policy())), []
    trainer.reuse_rollout_logprobs, trainer.kl_estimator = reuse, "k3"
    monkeypatch.setattr(
        policy_gradient_trainer, "update_policy", lambda *args: seen.append(args[2]) or update_policy(*args))
    before = deepcopy(trainer.policy)
    step(trainer)
    generator = torch.Generator().manual_seed(0)
    rollout = collect_rollout(before, PROMPTS, trainer.sampling, generator, 8)
    rewards = torch.tensor([float(len(response)) for response in rollout.responses])
    expected = build_trajectory(before, rollout, rewards, 0.1, gamma=0.98, gae_lambda=0.9, kl_estimator="k3",
                                reuse_rollout_logprobs=reuse)
    assert seen[0].responses == expected.responses
    for name in ("logprobs", "ref_logprobs", "values", "mask", "advantages", "returns"):
        assert torch.equal(getattr(seen[0], name), getattr(expected, name)), name
    assert expected.advantages.abs().max() > 0.1 and abs(expected.sequence_kl()) > 1e-3


def test_a_schedule_of_the_kl_coefficient_is_the_coefficient_of_that_iteration():
    rows, moved = [], []
    for coefficient, factor in ((0.4, 1.0), (0.1, 4.0)):
        trainer = make_trainer(perturb(make_policy()))
        trainer.kl_controller.kl_coefficient = coefficient
        rows.append(step(trainer, kl_factor=factor)[0])
        moved.append(weights(trainer.policy))
        assert trainer.kl_controller.kl_coefficient == coefficient
    assert rows[0] == rows[1] and rows[0]["beta"] == 0.4 and rows[0]["kl"] != 0
    assert all(torch.equal(moved[0][name], moved[1][name]) for name in moved[0])


def test_in_critic_warm_up_the_value_head_alone_learns():
    policy = make_policy()
    trainer, before = make_trainer(policy), weights(policy)
    step(trainer, critic_only=True)
    moved = {name for name, p in policy.trainable_parameters().items() if not torch.equal(p, before[name])}
    assert moved == {"value_head.weight", "value_head.bias"}
    step(trainer)
    moved = {name for name, p in policy.trainable_parameters().items() if not torch.equal(p, before[name])}
    assert moved == set(before)


def test_reused_and_forwarded_log_probabilities_learn_the_same():
    runs = []
    for reuse in (True, False):
        torch.manual_seed(0)
        trainer = make_trainer(make_policy())
        trainer.reuse_rollout_logprobs = reuse
        rows = [step(trainer, seed)[0] for seed in range(3)]
        runs.append((rows, torch.cat([p.flatten() for p in weights(trainer.policy).values()])))
    (reused, reused_weights), (forwarded, forwarded_weights) = runs
    assert torch.allclose(reused_weights, forwarded_weights, atol=1e-4)
    for a, b in zip(reused, forwarded, strict=True):
        assert a["first_ratio"] == pytest.approx(1, abs=1e-5) and a["kl"] == pytest.approx(b["kl"], abs=1e-4)
        assert a["value_loss"] == pytest.approx(b["value_loss"], rel=1e-3)


def test_each_phase_has_its_seconds_and_tokens_per_second():
    row, timing = step(make_trainer(make_policy()))
    assert {f"{phase}_{what}" for phase in PHASES for what in ("seconds", "tokens_per_second")} <= set(timing)
    assert timing["peak_memory_mib"] > 100 and timing["tokens"] == round(row["response_tokens"] * 4)
    assert {"kl", "kl_per_token", "entropy", "reference_perplexity", "clip_fraction", "explained_variance",
            "response_tokens", "eos_rate", "skipped"} <= set(row)  # CORRECTNESS P14, K5


def test_the_dry_run_moves_nothing_and_makes_microbatches_that_fit(monkeypatch):
    policy = make_policy()
    trainer, before = make_trainer(policy, microbatch_prompts=4), weights(policy)
    monkeypatch.setattr(policy_gradient_trainer, "policy_gradient_loss", out_of_memory_above(2))
    lines = plan_memory(trainer, "adam", PROMPTS, [])
    assert trainer.update_settings.microbatch_prompts == 2
    parameters = policy.trainable_parameters()
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in parameters.items())
    assert [line.split("  ")[0] for line in lines[-3:]] == ["peak of rollout", "peak of forward", "peak of update"]


def test_the_longest_rollout_of_a_small_site_has_its_prompts_several_times():
    """7 prompts and rollouts of 16: an IndexError once."""
    prompts = [[1] * length for length in (3, 9, 5, 2, 7, 4, 6)]
    assert [len(prompt) for prompt in longest_rollout(prompts, 3)] == [9, 7, 6]
    rollout = longest_rollout(prompts, 16)
    assert [len(prompt) for prompt in rollout] == 2 * [9, 7, 6, 5, 4, 3, 2] + [9, 7]
    trainer = make_trainer(make_policy())
    size = trainer.update_settings.minibatch_prompts
    assert plan_memory(trainer, "adam", longest_rollout(PROMPTS[:1], size), [])


def out_of_memory_above(max_rows):
    def loss(policy, trajectory, rows, tokens, settings, kl_coefficient, roles):
        if len(rows) > max_rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return policy_gradient_loss(policy, trajectory, rows, tokens, settings, kl_coefficient, roles)

    return loss


def test_out_of_memory_in_an_update_takes_smaller_microbatches_and_learns_the_same(monkeypatch):
    runs = []
    for max_rows in (4, 1):
        torch.manual_seed(0)
        trainer = make_trainer(make_policy(), microbatch_prompts=4)
        with monkeypatch.context() as patch:
            patch.setattr(policy_gradient_trainer, "policy_gradient_loss", out_of_memory_above(max_rows))
            step(trainer)
        runs.append(torch.cat([p.flatten() for p in weights(trainer.policy).values()]))
    assert torch.allclose(*runs, atol=1e-5) and trainer.update_settings.microbatch_prompts == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run of the stage itself, rewarded by a rule: no reward model is loaded."""
    return train(tmp_path_factory.mktemp("engine"))


def train(folder, rewards=(RewardSource("response_tokens"), RewardSource("repetition", weight=-2.0)), **settings):
    tiny_models.save_base(folder / "base")
    tiny_models.save_pairs(folder / "pairs")
    (folder / "out").mkdir()
    config = Ppo(
        lora=Lora(r=4, dropout=0.0), precision="fp32", iterations=3, rollout_prompts=8, minibatch_prompts=4,
        microbatch_prompts=2, epochs=1, max_response_tokens=8, learning_rate=1e-3, validation_prompts=8,
        evaluate_every_iterations=2, rewards=rewards, **settings)
    where = {"policy": folder / "base", "reward": folder / "none", "pairs": folder / "pairs"}
    return folder, config, ppo.run(config, folder / "out", **where)


def read_rows(folder, name):
    return [json.loads(line) for line in (folder / "out" / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_evaluates_at_the_start_and_the_end_and_logs_every_source(run):
    folder, _, metrics = run
    rows = read_rows(folder, "history")
    assert [row["iteration"] for row in rows if "validation_reward" in row] == [0, 2, 3]
    assert rows[0]["validation_kl"] == pytest.approx(0, abs=1e-5)
    for row in (row for row in rows if "reward" in row):
        total = row["reward_response_tokens"] - 2 * row["reward_repetition"] - (1 - row["eos_rate"])
        assert row["reward"] == pytest.approx(total, abs=1e-4)
    assert len(read_rows(folder, "samples")) == 3 * 8 and metrics["iterations"] == 3


def test_validation_has_a_selection_score_with_the_initial_coefficient_and_no_objective(run):
    folder, config, _ = run
    rows = [row for row in read_rows(folder, "history") if "validation_reward" in row]
    for row in rows:
        score = row["validation_reward"] * row["validation_reward_scale"] - config.kl_coefficient * row["validation_kl"]
        assert row["validation_selection_score"] == pytest.approx(score, abs=1e-6)
        assert "validation_objective" not in row
    updates = [row for row in read_rows(folder, "history") if "objective" in row]
    assert len(updates) == 3
    for row in updates:
        assert row["objective"] == pytest.approx(row["reward"] - row["beta"] * row["kl"], abs=1e-6)


def test_a_running_scale_weighs_the_kl_of_the_selection_score_as_training_does(tmp_path):
    folder, config, _ = train(tmp_path, rewards=(RewardSource("response_characters"),), reward_scaling="running")
    *_, row = [row for row in read_rows(folder, "history") if "validation_reward" in row]
    objective = row["validation_reward"] - config.kl_coefficient * row["validation_kl"]
    assert row["validation_kl"] and abs(row["validation_reward_scale"] - 1) > 0.1
    assert row["validation_selection_score"] == pytest.approx(objective * row["validation_reward_scale"], abs=1e-6)


def test_the_scale_of_the_start_centres_the_answers_before_training_and_weighs_the_kl(tmp_path):
    folder, config, _ = train(tmp_path, rewards=(RewardSource("response_characters"),), reward_scaling="start",
                              missing_eos_penalty=0.0)
    first, *_, last = [row for row in read_rows(folder, "history") if "validation_reward" in row]
    assert first["validation_reward"] == pytest.approx(0, abs=1e-5) and first["validation_reward_scale"] > 0.1
    assert last["validation_reward_scale"] == first["validation_reward_scale"] and last["validation_kl"]
    objective = last["validation_reward"] - config.kl_coefficient * last["validation_kl"]
    assert last["validation_selection_score"] == pytest.approx(objective * last["validation_reward_scale"], abs=1e-6)


def test_a_run_that_matches_another_ends_at_its_kl(run, tmp_path):
    folder, config, _ = run
    where = {"policy": folder / "base", "reward": folder / "none", "pairs": folder / "pairs"}
    for name, kl_nats in (("moved", 0.3), ("still", 0.0), ("none", None)):
        (tmp_path / name).mkdir()
        metrics = {} if kl_nats is None else {"validation_kl": kl_nats}
        (tmp_path / name / "manifest.json").write_text(json.dumps({"stage": "ppo", "metrics": metrics}))
    assert [ppo.read_kl_limit(tmp_path / name) for name in ("moved", "still")] == [0.3, ppo.MIN_KL_NATS]
    with pytest.raises(ValueError, match="has no validation_kl in its manifest: give a finished training of PPO"):
        ppo.run(config, tmp_path, **where, match=tmp_path / "none")
    fast = replace(config, iterations=40, learning_rate=2e-2, kl_coefficient=0.0, evaluate_every_iterations=1)
    (tmp_path / "out").mkdir()
    metrics = ppo.run(fast, tmp_path / "out", **where, match=tmp_path / "moved")
    assert metrics["stopped_early"] and metrics["validation_kl"] <= 0.3
    rows = [json.loads(line) for line in (tmp_path / "out/history.jsonl").read_text().splitlines()]
    assert [row["validation_kl"] for row in rows if "validation_kl" in row][-1] > 0.3


def test_a_run_leaves_its_checks_with_their_values(run):
    checks = json.loads((run[0] / "out" / "startup.json").read_text())
    assert abs(checks["kl_nats"]) < 1e-4 and checks["keep_rollout_log_p"] and checks["smallest_gradient_norm"] > 0


def test_a_run_prints_its_plan(run, capsys, tmp_path):
    folder, config, _ = run
    where = {"policy": folder / "base", "reward": folder / "none", "pairs": folder / "pairs"}
    ppo.run(replace(config, iterations=1), tmp_path, **where)
    printed = capsys.readouterr().err
    assert "1 iterations x 8 prompts x 1 epochs x 2 minibatches of 4 = 2 optimiser steps;" in printed
    assert "; 2 microbatches of 2 each" in printed
    assert "memory plan" in printed and "check  KL to the reference" in printed


def test_texts_that_the_model_has_no_positions_for_are_refused_before_anything_runs(run, tmp_path):
    folder, config, _ = run
    tiny_models.gpt2(320).save_pretrained(folder / "gpt2")
    tiny_models.tokenizer().save_pretrained(folder / "gpt2")
    with pytest.raises(ValueError, match="a text of 136 tokens, but this gpt2 has a table of 128 positions"):
        where = {"policy": folder / "gpt2", "reward": folder, "pairs": folder / "pairs"}
        ppo.run(replace(config, max_prompt_tokens=128), tmp_path, **where)
