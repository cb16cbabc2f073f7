"""What one iteration does with its parts, and what a run says and writes before and while it trains."""

import json
from dataclasses import replace

import pytest
import torch

from stages import ppo
from stages.generation.sampling_params import SamplingParams
from stages.recipe.models import Lora
from stages.recipe.ppo import Ppo, RewardSource
from stages.rl.checks.memory_plan import memory_plan
from stages.rl.kl import KlController
from stages.rl.ppo_trainer import PPOTrainer
from stages.rl.rewards.shaping import ShapedRewards
from tests.helpers import tiny_models
from tests.rl.test_policy import PROMPTS, UPDATE, make_policy

PHASES = {"rollout", "score", "experience", "update"}


class Longer:
    """A reward that a policy can learn: the response's tokens."""

    def __call__(self, rollout, *, update_statistics):
        return ShapedRewards(torch.tensor([float(len(r)) for r in rollout.responses]), {}, 1.0)


def engine_of(policy, **update):
    return PPOTrainer(
        policy=policy, rewards=Longer(), controller=KlController(0.1, None, 1),
        optimizer=torch.optim.Adam(policy.trained().values(), lr=0.0), update=replace(UPDATE, **update),
        sampling=SamplingParams(1.0, (2,), "until_stop", 1, 12), keep_rollout_log_p=True,
    )


def iterate(engine, seed=0, **more):
    return engine.iterate(PROMPTS, lambda purpose: torch.Generator().manual_seed(seed), 0.01, **more)


def weights(policy):
    return {name: p.detach().clone() for name, p in policy.trained().items()}


def test_in_the_critics_warm_up_the_value_head_alone_learns():
    policy = make_policy()
    engine, before = engine_of(policy), weights(policy)
    iterate(engine, only_values=True)
    moved = {name for name, p in policy.trained().items() if not torch.equal(p, before[name])}
    assert moved == {"value_head.weight", "value_head.bias"}
    iterate(engine)
    assert {name for name, p in policy.trained().items() if not torch.equal(p, before[name])} == set(before)


def test_the_samplers_log_probabilities_and_the_re_forwarded_ones_learn_the_same():
    found = []
    for keep in (True, False):
        torch.manual_seed(0)
        engine = engine_of(make_policy())
        engine.keep_rollout_log_p = keep
        rows = [iterate(engine, seed)[0] for seed in range(3)]
        found.append((rows, torch.cat([p.flatten() for p in weights(engine.policy).values()])))
    (kept, weights_kept), (anew, weights_anew) = found
    assert torch.allclose(weights_kept, weights_anew, atol=1e-4)
    for a, b in zip(kept, anew, strict=True):
        assert a["first_ratio"] == pytest.approx(1, abs=1e-5) and a["kl"] == pytest.approx(b["kl"], abs=1e-4)
        assert a["value_loss"] == pytest.approx(b["value_loss"], rel=1e-3)


def test_each_phase_has_its_seconds_and_tokens_a_second():
    row, timing = iterate(engine_of(make_policy()))
    assert {f"{phase}_{what}" for phase in PHASES for what in ("seconds", "tokens_per_second")} <= set(timing)
    assert timing["peak_memory_mib"] > 100 and timing["tokens"] == round(row["response_tokens"] * 4)
    assert {"kl", "kl_per_token", "entropy", "reference_perplexity", "clip_fraction", "explained_variance",
            "response_tokens", "eos_rate", "skips"} <= set(row)  # CORRECTNESS P14, K5


def test_the_dry_run_moves_nothing_and_makes_microbatches_that_fit(monkeypatch):
    policy = make_policy()
    engine, before = engine_of(policy, microbatch_prompts=4), weights(policy)
    monkeypatch.setattr("stages.rl.ppo_update._microbatch_loss", too_large_above(2))
    lines = memory_plan(engine, "adam", PROMPTS, {})
    assert engine.update.microbatch_prompts == 2
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in policy.trained().items())
    assert [line.split("  ")[0] for line in lines[-3:]] == ["peak of rollout", "peak of forward", "peak of update"]


def too_large_above(most):
    from stages.rl.ppo_update import _microbatch_loss as real

    def loss(policy, seen, rows, tokens, update):
        if len(rows) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(policy, seen, rows, tokens, update)

    return loss


def test_out_of_memory_in_an_update_takes_smaller_microbatches_and_learns_the_same(monkeypatch):
    found = []
    for most in (4, 1):
        torch.manual_seed(0)
        engine = engine_of(make_policy(), microbatch_prompts=4)
        with monkeypatch.context() as patch:
            patch.setattr("stages.rl.ppo_update._microbatch_loss", too_large_above(most))
            iterate(engine)
        found.append(torch.cat([p.flatten() for p in weights(engine.policy).values()]))
    assert torch.allclose(*found, atol=1e-5) and engine.update.microbatch_prompts == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run of the stage itself, rewarded by a rule: no reward model is loaded."""
    folder = tmp_path_factory.mktemp("engine")
    tiny_models.save_base(folder / "base")
    tiny_models.save_pairs(folder / "pairs")
    (folder / "out").mkdir()
    config = Ppo(
        lora=Lora(r=4, dropout=0.0), precision="fp32", iterations=3, rollout_prompts=8, minibatch_prompts=4,
        microbatch_prompts=2, epochs=1, max_response_tokens=8, learning_rate=1e-3, validation_prompts=8,
        evaluate_every_iterations=2, rewards=(RewardSource("response_tokens"), RewardSource("repetition", weight=-2.0)),
    )
    where = {"policy": folder / "base", "reward": folder / "none", "pairs": folder / "pairs"}
    return folder, config, ppo.run(config, folder / "out", **where)


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / "out" / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_evaluates_at_the_start_and_the_end_and_logs_every_source(run):
    folder, _, metrics = run
    rows = rows_of(folder, "history")
    assert [row["iteration"] for row in rows if "validation_reward" in row] == [0, 2, 3]
    assert rows[0]["validation_kl"] == pytest.approx(0, abs=1e-5)
    for row in (row for row in rows if "reward" in row):
        whole = row["reward_response_tokens"] - 2 * row["reward_repetition"] - (1 - row["eos_rate"])
        assert row["reward"] == pytest.approx(whole, abs=1e-4)
    assert len(rows_of(folder, "samples")) == 3 * 8 and metrics["iterations"] == 3


def test_a_run_leaves_its_checks_with_their_values(run):
    checks = json.loads((run[0] / "out" / "startup.json").read_text())
    assert abs(checks["kl_nats"]) < 1e-4 and checks["keep_rollout_log_p"] and checks["smallest_gradient_norm"] > 0


def test_a_run_says_its_plan(run, capsys, tmp_path):
    folder, config, _ = run
    where = {"policy": folder / "base", "reward": folder / "none", "pairs": folder / "pairs"}
    ppo.run(replace(config, iterations=1), tmp_path, **where)
    said = capsys.readouterr().err
    assert "1 iterations x 8 prompts x 1 epochs x 2 minibatches of 4 = 2 optimiser steps; 2 microbatches of 2" in said
    assert "memory plan" in said and "check  KL to the reference" in said


def test_texts_that_the_model_has_no_positions_for_are_refused_before_anything_runs(run, tmp_path):
    folder, config, _ = run
    tiny_models.gpt2(320).save_pretrained(folder / "gpt2")
    tiny_models.tokenizer().save_pretrained(folder / "gpt2")
    with pytest.raises(ValueError, match="a text of 136 tokens, but this gpt2 has a table of 128 positions"):
        where = {"policy": folder / "gpt2", "reward": folder, "pairs": folder / "pairs"}
        ppo.run(replace(config, max_prompt_tokens=128), tmp_path, **where)
