"""The programs rloo, grpo and ppo with two responses to a prompt, on a tiny model: groups, merge, mistakes."""

import json
from dataclasses import replace

import pytest

from stages import grpo, merge, ppo, rloo
from stages.recipe.sections.models import Lora, Merge
from stages.recipe.sections.policy_gradient import Grpo, Rloo
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.rewards import RewardSource
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer
from tests.helpers import tiny_models

SMALL = {"lora": Lora(r=2, dropout=0.0), "precision": "fp32", "rewards": (RewardSource("response_tokens"),),
         "iterations": 4, "responses_per_prompt": 2, "rollout_prompts": 4, "forward_prompts": 2, "minibatch_prompts": 2,
         "microbatch_prompts": 1, "max_response_tokens": 6, "learning_rate": 1e-3, "validation_prompts": 4,
         "evaluate_every_iterations": 2, "save_every_iterations": 1, "max_kl_nats": 100.0, "log_to": ("jsonl",)}
PROGRAMS = {"rloo": (rloo, Rloo(**SMALL)), "grpo": (grpo, Grpo(**SMALL)), "ppo": (ppo, Ppo(**SMALL, epochs=1))}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    return {"policy": tiny_models.save_base(folder / "base"), "reward": folder / "none",
            "pairs": tiny_models.save_pairs(folder / "pairs", questions_per_split=16)}


@pytest.fixture(scope="module", params=PROGRAMS)
def made(request, inputs, tmp_path_factory):
    """A program's name, its artifact, its metrics, and what it gave to each minibatch step and each rollout."""
    module, config = PROGRAMS[request.param]
    out = tmp_path_factory.mktemp(request.param) / request.param
    out.mkdir()
    rollouts, step = [], PolicyGradientTrainer.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyGradientTrainer, "step", lambda self, prompts, *args, **named: rollouts.append(
            (prompts, self.update_settings, self.forward_prompts)) or step(self, prompts, *args, **named))
        metrics = module.run(config, out, **inputs)
    return request.param, out, metrics, rollouts


def rows(out) -> list[dict]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def test_responses_to_a_prompt_are_together_and_sizes_count_prompts_with_all_of_them(made):
    _, out, _, rollouts = made
    assert len(rollouts) == 4
    for prompts, settings, forward_rows in rollouts:
        assert len(prompts) == 8 and all(prompts[i] == prompts[i + 1] for i in range(0, 8, 2))
        assert len(set(map(tuple, prompts))) == 4
        assert (settings.minibatch_prompts, settings.microbatch_prompts, forward_rows) == (4, 2, 4)
    assert [row["minibatches"] for row in rows(out) if "minibatches" in row] == [2] * 4


def test_the_artifact_has_no_critic_but_ppos(made):
    name, out, metrics, _ = made
    if name == "ppo":
        assert {"value_loss", "explained_variance"} <= {key for row in rows(out) for key in row}
        return
    assert {file.name for file in out.iterdir()} >= {"adapter_model.safetensors", "startup.json", "history.jsonl"}
    assert not [file.name for file in out.rglob("*") if "value" in file.name or "checkpoint" in file.name]
    assert json.loads((out / "startup.json").read_text())["value_head_norm"] is None
    history = rows(out)
    assert not {"value_loss", "explained_variance"} & {key for row in history for key in row}
    assert {"policy_loss", "reward", "kl", "clip_fraction"} <= {key for row in history for key in row}
    assert metrics["iterations"] == 4 and name in PROGRAMS


def test_it_is_merged_like_ppo(made, inputs, tmp_path):
    _, out, _, _ = made
    merge.run(Merge(dtype="fp32"), tmp_path, base=inputs["policy"], adapter=[str(out)], pairs=inputs["pairs"])
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_reward_model_that_cannot_judge_is_refused_by_the_section_of_the_program(name, inputs, tmp_path, monkeypatch):
    module, config = PROGRAMS[name]
    numbers = {"mean": 0.46, "low": 0.44, "high": 0.48}
    weak = {"pairs": 100, "accuracy": numbers, "baselines": {}, "best_cheap_baseline": "", "above_best_cheap_baseline":
            numbers}
    monkeypatch.setattr(ppo.checked_models, "load_held_out_accuracies", lambda *_: {inputs["reward"]: weak})
    with pytest.raises(ValueError, match=rf"no better than chance.* set {name}\.require_reward to none"):
        module.run(replace(config, require_reward="chance"), tmp_path, **inputs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", PROGRAMS)
def test_mistakes_are_one_line(name, inputs, tmp_path):
    module, config = PROGRAMS[name]
    with pytest.raises(ValueError, match=rf"^[^\n]* {name} needs at least 4[^\n]*$"):
        module.run(replace(config, max_prompt_tokens=2), tmp_path, **inputs)
    with pytest.raises(ValueError, match=r"^[^\n]*minibatch_prompts[^\n]*$"):
        replace(config, minibatch_prompts=3)
