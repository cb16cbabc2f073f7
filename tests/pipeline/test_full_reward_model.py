"""A reward model whose weights are all trained, with Muon: resumed, merged, read by plain Transformers, and by PPO."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from stages import ppo, reward
from stages.modeling.adapters import is_adapter, is_reward_model
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.reward import Reward
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scoring_file import load_scoring
from stages.rl.policy import Policy
from stages.rl.training_loop import TrainingLoop
from tests.helpers.trained_reward import save_trained_reward

CONFIG = Reward(tune="full", optimizer="muon", precision="fp32", batch_pairs=8, microbatch_pairs=8, learning_rate=3e-3,
                validation_share=0.3, save_every_steps=2)
POLICY = Ppo(value_model="model", critic_learning_rate=1e-3, require_reward="none", precision="fp32", iterations=2,
             rollout_prompts=4, minibatch_prompts=4, microbatch_prompts=2, epochs=1, max_response_tokens=4,
             validation_prompts=2, learning_rate=1e-3)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return save_trained_reward(tmp_path_factory.mktemp("full"), CONFIG)


def test_it_is_a_whole_model_and_every_weight_has_moved(made):
    assert not is_adapter(made / "reward") and is_reward_model(made / "reward") and not is_reward_model(made / "base")
    before, after = (load_file(made / name / "model.safetensors") for name in ("base", "reward"))
    layers = [name for name in before if "layers" in name]
    assert layers and all(not torch.equal(before[name], after[name]) for name in layers)


def test_the_merged_model_scores_as_in_training_in_plain_transformers(made):
    content = load_scoring(made / "reward")
    plain = AutoModelForSequenceClassification.from_pretrained(made / "merged").eval()
    for example in content["examples"]:
        with torch.no_grad():
            logit = plain(torch.tensor([example["prompt"] + example["answer"]])).logits.item()
        assert logit == pytest.approx(example["score"], abs=1e-4)
    (scorer,) = load_reward_models(made / "merged", "fp32")
    first = content["examples"][0]
    assert float(scorer([first["prompt"]], [first["answer"]])) == pytest.approx(
        first["score"] - content["mean"], abs=1e-4)


def test_the_unmerged_folder_scores_the_same(made):
    (unmerged,), (merged,) = (load_reward_models(made / name, "fp32") for name in ("reward", "merged"))
    texts = [[1, 40, 50]], [[60, 70, 2]]
    assert float(unmerged(*texts)) == pytest.approx(float(merged(*texts)), abs=1e-6)


def test_a_killed_run_goes_on_from_its_checkpoint(made, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reward, "save_model", stop)  # after training, before anything is saved
        reward.run(CONFIG, tmp_path, base=made / "base", pairs=made / "pairs")
    for newest in sorted((tmp_path / "checkpoints").glob("checkpoint-*"), key=lambda f: int(f.name.split("-")[1]))[1:]:
        shutil.rmtree(newest)
    reward.run(CONFIG, tmp_path, base=made / "base", pairs=made / "pairs")
    ends = [load_file(folder / "model.safetensors") for folder in (made / "reward", tmp_path)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ppo_trains_a_critic_of_its_own_from_it(made, tmp_path, monkeypatch, precision):
    monkeypatch.setattr(TrainingLoop, "_load_weights", lambda *_: None)  # save the last policy, not the best
    config = replace(POLICY, precision=precision, learning_rate=1e-5, critic_learning_rate=1e-5)
    ppo.run(config, tmp_path, policy=made / "base", reward=made / "merged", pairs=made / "pairs")
    start, critic = (load_file(folder / "model.safetensors") for folder in (made / "merged", tmp_path / "value"))
    assert start.keys() == critic.keys()
    assert torch.equal(start["score.weight"], critic["score.weight"])  # value_head.safetensors has the trained one
    moved = {name: float((critic[name] - start[name]).abs().max()) for name in start if "proj" in name}
    assert all(0 < distance < 1e-4 for distance in moved.values()), moved  # bf16 would round such steps away


def test_its_critic_starts_in_the_units_of_the_reward(made, tmp_path):
    config = replace(POLICY, reward_scaling="model", reward_baseline=0.5, critic_learning_rate=1e-12)
    ppo.run(config, tmp_path, policy=made / "base", reward=made / "merged", pairs=made / "pairs")
    scoring, head = load_scoring(made / "merged"), load_file(tmp_path / "value_head.safetensors")
    start = load_file(made / "merged/model.safetensors")["score.weight"]
    assert torch.allclose(head["weight"], start / scoring["std"], atol=1e-6)
    assert float(head["bias"]) == pytest.approx(-(scoring["mean"] + 0.5) / scoring["std"], abs=1e-5)


def test_a_killed_ppo_with_a_critic_of_its_own_resumes_bit_for_bit(made, tmp_path, monkeypatch):
    config = replace(POLICY, iterations=3, save_every_iterations=1, evaluate_every_iterations=3)
    folders = {"policy": made / "base", "reward": made / "merged", "pairs": made / "pairs"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    ppo.run(config, whole, **folders)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Policy, "save", stop)  # after the last checkpoint, before anything is saved
        ppo.run(config, killed, **folders)
    shutil.rmtree(killed / "checkpoint-000003")
    ppo.run(config, killed, **folders)
    assert (killed / "history.jsonl").read_text() == (whole / "history.jsonl").read_text()
    ends = [load_file(folder / "value/model.safetensors") for folder in (whole, killed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_quantised_weights_are_refused():
    with pytest.raises(ValueError, match="is quantised"):
        replace(CONFIG, precision="nf4")
    with pytest.raises(ValueError, match="trains all weights of the critic"):
        replace(POLICY, precision="int8")
