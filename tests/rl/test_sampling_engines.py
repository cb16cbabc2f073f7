"""PPO and GRPO with another sampling engine: old log-probabilities are the policy's, and the engine is checked."""

import json
from dataclasses import replace

import pytest
import torch

from stages import grpo, ppo
from stages.generation.engines.build import build_engine
from stages.generation.engines.continuous_batching import ContinuousBatchingEngine
from stages.generation.sampling_params import SamplingParams
from stages.recipe import lookups
from stages.recipe.schema import SettingsError
from stages.recipe.sections.grpo import Grpo
from stages.recipe.sections.models import Lora
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.rewards import RewardSource
from stages.rl import train
from stages.rl.checks.sampler_agreement import LIMITS_NATS, check_sampler, difference_limit, sampler_difference
from stages.rl.collect_rollouts import collect_rollout
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer
from stages.rl.trajectory import fill_policy_scores, score_rollout
from tests.helpers import tiny_models
from tests.rl.test_policy import PROMPTS, make_policy, perturb

ENGINE = "transformers"
SAMPLING = SamplingParams(0.8, (2,), "until_stop", 1, 12)
SMALL = {"lora": Lora(r=2, dropout=0.0), "precision": "fp32", "rewards": (RewardSource("response_tokens"),),
         "iterations": 2, "rollout_prompts": 4, "minibatch_prompts": 2, "microbatch_prompts": 2,
         "max_response_tokens": 6, "learning_rate": 1e-3, "validation_prompts": 4, "evaluate_every_iterations": 2,
         "save_every_iterations": 1, "max_kl_nats": 100.0, "log_to": ("jsonl",), "sampling_engine": ENGINE}


class StaleEngine(ContinuousBatchingEngine):
    """An engine that samples with one id's output weights moved, after some rollouts."""

    def __init__(self, moved: float, after_rollouts: int = 0):
        self.moved, self.remaining = moved, after_rollouts

    def sample(self, model, request, generator):
        moved, self.remaining = 0.0 if self.remaining else self.moved, max(0, self.remaining - 1)
        weight = model.get_output_embeddings().weight
        with torch.no_grad():
            before = weight.clone()
            weight[40] += moved
            rollout = super().sample(model, request, generator)
            weight.copy_(before)
        return rollout


@pytest.fixture(scope="module")
def policy():
    return perturb(make_policy(temperature=0.8))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    return {"policy": tiny_models.save_base(folder / "base"), "reward": folder / "none",
            "pairs": tiny_models.save_pairs(folder / "pairs", questions_per_split=16)}


def collect(policy, engine=None, **changes):
    return collect_rollout(policy, PROMPTS, replace(SAMPLING, **changes), torch.Generator().manual_seed(0), 2,
                           engine=engine)


def rows(out) -> list[dict]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def test_the_statistics_of_an_engines_rollout_are_the_policys(policy):
    own = collect(policy)
    filled = fill_policy_scores(policy, replace(own, logprobs=None, values=None, entropy=None), 2)
    for name in ("logprobs", "values", "entropy"):
        assert torch.allclose(getattr(filled, name), getattr(own, name), atol=2e-5), name
        assert getattr(own, name).abs().sum() > 0 or name == "values"


@pytest.mark.parametrize("kind", ["until_stop", "fixed", "sampled"])
def test_old_log_probabilities_are_the_policys_whatever_the_engine_reports(policy, kind):
    rollout = collect(policy, StaleEngine(0.5), response_length=kind, stop_ids=(2, 46, 100))
    assert max(map(len, rollout.responses)) == rollout.sampler_logprobs.shape[1] == rollout.logprobs.shape[1]
    scores = score_rollout(policy, rollout, 2)
    again = score_rollout(policy, replace(rollout, logprobs=None, sampler_logprobs=None), 2)
    assert torch.equal(scores.logprobs, again.logprobs) and torch.equal(scores.values, again.values)
    assert sampler_difference(rollout)["sampler_logprob_difference"] > 0.01


def test_the_check_at_start_up_passes_rounding_and_stops_one_moved_weight(policy):
    lines = []
    rollout = collect(policy, build_engine(ENGINE, 64))
    check_sampler(ENGINE, rollout, "fp32", difference_limit(None, "fp32"), lines.append)
    assert len(lines) == 1 and lines[0].startswith("check  sampling engine transformers ") and lines[0].endswith(" ok")
    assert sampler_difference(rollout)["sampler_logprob_difference_max"] < 2e-5
    with pytest.raises(ValueError, match=r"^the log-probabilities of sampling_engine transformers differ from the "
                                         r"policy's by [\d.e-]+ nats a token in the mean and [\d.]+ at most; 0.001 in "
                                         r"the mean is the limit in fp32: [^\n]* set sampling_engine to own$"):
        check_sampler(ENGINE, collect(policy, StaleEngine(0.1)), "fp32", LIMITS_NATS["fp32"], lines.append)
    broken = replace(rollout, sampler_logprobs=rollout.sampler_logprobs * float("nan"))
    with pytest.raises(ValueError, match="nan nats"):
        check_sampler(ENGINE, broken, "bf16", 9.0, lines.append)
    check_sampler("own", collect(policy), "fp32", 0.0, lines.append)
    assert len(lines) == 1 and sampler_difference(collect(policy)) == {}


def test_a_resumed_run_with_continuous_batching_equals_the_uninterrupted_one(inputs, tmp_path, monkeypatch):
    config, step, calls = Ppo(**SMALL), PolicyGradientTrainer.step, []
    (tmp_path / "whole").mkdir()
    ppo.run(config, tmp_path / "whole", **inputs)
    (tmp_path / "resumed").mkdir()

    def interrupted(self, *args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return step(self, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PolicyGradientTrainer, "step", interrupted)
        ppo.run(config, tmp_path / "resumed", **inputs)
    torch.rand(3)
    ppo.run(config, tmp_path / "resumed", **inputs)
    for name in ("adapter_model.safetensors", "value_head.safetensors", "history.jsonl", "samples.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes(), name
    trained = [row for row in rows(tmp_path / "whole") if "sampler_logprob_difference" in row]
    assert len(trained) == 2
    assert all(0 < row["sampler_logprob_difference"] <= row["sampler_logprob_difference_max"] < 1e-4 for row in trained)
    assert all(row["first_ratio"] == pytest.approx(1, abs=1e-5) and row["entropy"] > 1 for row in trained)
    assert json.loads((tmp_path / "whole/startup.json").read_text())["kl_nats"] == pytest.approx(0, abs=1e-4)


def test_an_engine_that_goes_stale_stops_the_run(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "build_engine", lambda *_: StaleEngine(1.0, after_rollouts=2))  # start-up is the first
    small = SMALL | {"responses_per_prompt": 2, "rollout_prompts": 2, "forward_prompts": 2, "minibatch_prompts": 1,
                     "microbatch_prompts": 1, "iterations": 4}
    metrics = grpo.run(Grpo(**small), tmp_path, **inputs)
    assert metrics["stopped_early"] and metrics["iterations"] == 2
    assert "grpo: stopped: the sampling engine's log-probabilities differ from the policy's" in capsys.readouterr().err


def test_what_an_engine_cannot_do_is_refused_before_any_model_is_loaded(inputs, tmp_path):
    for changes, words in (({"top_k": 5}, "does not report the token ids that top_k"),
                           ({"top_k": 5, "top_p": 0.5}, "does not report the token ids that top_k"),
                           ({"sharding": "fsdp"}, "needs whole weights")):
        with pytest.raises(ValueError, match=rf"^sampling_engine transformers {words}[^\n]*$"):
            Ppo(**SMALL | changes)
    with pytest.raises(ValueError, match=r"^sampling_engine vllm is given the policy's merged weights, and nf4 "):
        Ppo(**SMALL | {"sampling_engine": "vllm", "precision": "nf4"})
    with pytest.raises(SettingsError, match=r"^ppo: sampling_engine asks for vllm, which is not installed: pip "):
        lookups.check_names(Ppo(**SMALL | {"sampling_engine": "vllm"}), "ppo", runs_here=True)
    with pytest.raises(ValueError, match=r"^sampling_engine vllm: vLLM cannot be imported [^\n]*$"):
        ppo.run(Ppo(**SMALL | {"sampling_engine": "vllm"}), tmp_path, **inputs)
