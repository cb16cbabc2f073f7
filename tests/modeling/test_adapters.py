"""Roles on one base: policy, reference, values, reward (CORRECTNESS A2, P6, P9, P11, S5, failures 12, 21, 22, 33)."""

import itertools
import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.artifacts import artifact
from stages.generation.sampler import sample
from stages.modeling import lora, tokenizer
from stages.modeling.adapters import adapter_parameters
from stages.modeling.load import load_causal
from stages.ppo import make_method, parameter_groups
from stages.recipe.sections.ppo import Ppo
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import Scoring, describe_scoring, save_scoring
from stages.rl.checks.memory_plan import distinct_bytes, iter_tensors
from stages.rl.inputs import load_policy, load_scorers
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import UpdateSettings, update_policy
from stages.rl.trajectory import score_rollout
from stages.runtime import files
from tests.helpers import architectures, tiny_models
from tests.helpers.settings import take_settings
from tests.helpers.trajectories import build_trajectory

PROMPTS = [[1, 40, 50, 60, 70, 80], [1, 45], [1, 90, 91, 92], [1, 33, 34, 35, 36, 37, 38, 39]]
ANSWERS = [[41, 42, 2], [43], [44, 45, 46, 47, 48, 2], [49, 2]]
UPDATE = take_settings(
    UpdateSettings, Ppo(), max_sampler_ratio=None, value_clip_range=None,
    epochs=2, minibatch_prompts=4, microbatch_prompts=2, clip_range=0.2, value_coefficient=0.1,
                        max_gradient_norm=1.0, max_ratio=1e9, update_kl_limit=None)
LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": ()}
HOW = {"tune": "lora", "value_model": "head", "lora": LORA, "precision": "fp32", "temperature": 0.7}


def save_reward(base, out, weight=0.0):
    """A reward adapter that has learnt something, on every layer that policies adapt and more."""
    architectures.adapted(base, scorer=True).save_pretrained(out)
    tokenizer.load_tokenizer(base).save_pretrained(out)
    scores = torch.tensor([0.5, 2.0, 0.1])
    content = describe_scoring(Scoring("last", weight), "fp32", (PROMPTS[:3], ANSWERS[:3]), scores)
    save_scoring(out, content)
    return out


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.save_base(tmp_path_factory.mktemp("roles") / "base", width=128)  # nf4 packs blocks of 64


@pytest.fixture(scope="module")
def reward(base, tmp_path_factory):
    return save_reward(base, tmp_path_factory.mktemp("roles") / "reward")


@pytest.fixture(scope="module")
def merged(base, reward, tmp_path_factory):
    folder = tmp_path_factory.mktemp("roles") / "reward-merged"
    tiny_models.merge(base, [reward], folder)
    return folder


def load(base, reward, **changes) -> Policy:
    torch.manual_seed(0)
    return load_policy(base, reward, **HOW | changes)


def moved(policy: Policy) -> Policy:
    architectures.noisy(policy.trainable_parameters().values(), 0.02)
    return policy


def learn(policy: Policy) -> None:
    """Two epochs on a rollout, like an iteration."""
    with policy.merge_adapter() as model:
        rollout = sample(model, PROMPTS, max_new_tokens=8, temperature=0.7, stop_ids=(2,), precision=policy.precision,
                         generator=torch.Generator().manual_seed(0), value_fn=policy.values_from_hidden)
    seen = build_trajectory(policy, policy.fill_values(rollout, 4), torch.tensor([2.0, -1.0, 0.5, -2.0]), 0.1)
    optimizer = torch.optim.Adam(policy.trainable_parameters().values(), lr=0.01)
    update_policy(policy, optimizer, seen, UPDATE, torch.Generator().manual_seed(0))


def log_p_of(model, temperature=0.7) -> list[torch.Tensor]:
    """Log-probabilities of the ANSWERS, row by row, unpadded, in float64 after the logits."""
    actual = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double() / temperature
        actual.append(torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None]).squeeze(-1))
    return actual


def same(actual: torch.Tensor, rows: list[torch.Tensor], atol=1e-5) -> bool:
    return all(torch.allclose(x[: len(row)].double(), row, atol=atol) for x, row in zip(actual, rows, strict=True))


# Reward

@pytest.mark.parametrize("family", architectures.FAMILIES)
def test_a_reward_adapter_on_the_policys_base_scores_as_the_merged_model(family, tmp_path):
    base = architectures.save(architectures.FAMILIES[family], tmp_path / "base")
    config = load_causal(base).config
    weight = 2.0 if config.tie_word_embeddings and family != "opt-350m" else 0.0
    reward = save_reward(base, tmp_path / "reward", weight)
    tiny_models.merge(base, [reward], tmp_path / "merged")
    expected = Scorer(load_classifier(tmp_path / "merged"), "fp32")
    policy = moved(load(base, reward, lora=LORA | {"target_modules": architectures.lora_targets(config)}))
    before = policy(PROMPTS, ANSWERS).logprobs
    (scorer,) = load_scorers(reward, policy, base)
    scores = scorer(PROMPTS, ANSWERS)
    assert torch.allclose(scores, expected(PROMPTS, ANSWERS), atol=1e-4) and float(scores.std()) > 0.01
    assert (scorer.std, scorer.mean, scorer.scoring.log_probability_weight) == (expected.std, expected.mean, weight)
    assert torch.equal(policy(PROMPTS, ANSWERS).logprobs, before)


def test_a_merged_reward_model_is_a_model_of_its_own(base, merged):
    policy = load(base, merged)
    (scorer,) = load_scorers(merged, policy, base)
    assert type(scorer) is Scorer and not {p.data_ptr() for p in scorer.model.parameters()} & {
        p.data_ptr() for p in policy.parameters()}


def test_what_cannot_be_a_role_is_refused_in_one_line(base, reward, merged, tmp_path):
    other = tiny_models.save_base(tmp_path / "other", seed=1, width=128)
    with pytest.raises(ValueError, match=r"was trained on .*, and not on"):
        load_scorers(reward, load(other, reward), other)
    with pytest.raises(ValueError, match=r"was trained on .*, and not on"):
        load(other, reward, value_model="adapter")
    with pytest.raises(ValueError, match="is a whole model: give the artifact of stages"):
        load(base, merged, value_model="adapter")
    load(base, reward).save(tmp_path / "no-head", tokenizer.load_tokenizer(base))
    with pytest.raises(ValueError, match="holds no score head"):
        load_scorers(tmp_path / "no-head", load(base, reward), base)


def test_the_manifest_says_on_what_an_adapter_was_trained(base, reward, tmp_path):
    """As the stages leave it: the base has moved since, and a same-named one lies where it was."""
    adapter = shutil.copytree(reward, tmp_path / "reward")
    renamed = shutil.copytree(base, tmp_path / "renamed")
    inputs = {"base": {"path": "results/run/sft-merged", "sha256": artifact.digest(renamed)}}
    files.write_json(adapter / "manifest.json", {"stage": "reward", "inputs": inputs})
    assert load_scorers(adapter, load(renamed, adapter), renamed)
    other = tiny_models.save_base(tmp_path / "other", seed=1, width=128)
    with pytest.raises(ValueError, match="was trained on results/run/sft-merged"):
        load_scorers(adapter, load(other, adapter), other)


# Memory

@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "nf4"])
def test_the_base_is_in_memory_once_whatever_stands_on_it(base, reward, precision):
    plain = lora.add_lora(load_causal(base, precision), precision=precision, **LORA)
    alone = distinct_bytes(t for t in iter_tensors(plain) if not t.requires_grad)
    policy = load(base, reward, precision=precision, value_model="adapter")
    (scorer,) = load_scorers(reward, policy, base)
    scorer(PROMPTS, ANSWERS), policy(PROMPTS, ANSWERS), policy.ref_logprobs(PROMPTS, ANSWERS)
    every = {(t.data_ptr(), t.nbytes) for module in (policy, scorer.model) for t in iter_tensors(module)}
    reward_adapter = adapter_parameters(policy.base, scorer.model.role).values()
    roles = [*policy.trainable_parameters().values(), *reward_adapter, scorer.model.score.weight]
    assert sum(size for _, size in every) == pytest.approx(alone + distinct_bytes(roles), rel=0.02)  # int8 adds scales


# Values

@pytest.mark.parametrize("value_model", ["adapter", "model"])
def test_values_start_as_the_reward_in_its_own_units(base, reward, merged, value_model):
    scorer = Scorer(load_classifier(merged), "fp32")
    assert abs(scorer.mean) > 0.01  # else its absence would not show
    policy = load(base, merged if value_model == "model" else reward, value_model=value_model)

    def final_values():
        values = policy(PROMPTS, [[*answer, 7] for answer in ANSWERS]).values  # read before the 7, at the last token
        return torch.stack([row[len(answer)] for row, answer in zip(values, ANSWERS, strict=True)])

    scores = scorer(PROMPTS, ANSWERS)
    assert torch.allclose(final_values(), scores, atol=1e-4)
    policy.rescale_values(0.5, -3.0)
    assert torch.allclose(final_values(), 0.5 * scores - 3.0, atol=1e-4)
    assert torch.allclose(policy(PROMPTS, ANSWERS).logprobs, policy.ref_logprobs(PROMPTS, ANSWERS), atol=1e-6)


def test_a_head_that_starts_at_zero_has_no_units(base):
    policy = load(base, None)
    policy.rescale_values(0.5, -3.0)
    assert not any(p.any() for p in policy.value_head.parameters())


def test_a_value_adapter_and_the_policy_learn_apart_and_a_head_teaches_the_policy(base, reward):
    for value_model, apart in (("adapter", True), ("head", False)):
        policy = moved(load(base, reward, value_model=value_model))
        own = adapter_parameters(policy.base, "default")
        policy(PROMPTS, ANSWERS).values.sum().backward()
        touched = {name for name, p in policy.trainable_parameters().items() if p.grad is not None and p.grad.any()}
        assert {"value_head.weight", "value_head.bias"} < touched
        assert all((p.grad is None) == apart for p in own.values())
        policy.zero_grad()
        policy(PROMPTS, ANSWERS).logprobs.sum().backward()
        assert {name for name, p in policy.trainable_parameters().items() if p.grad is not None} == {
            name for name in policy.trainable_parameters() if ".default." in name}


def test_warming_up_the_critic_moves_its_adapter_and_head_alone(base, reward):
    policy = load(base, reward, value_model="adapter")
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    trained = list(policy.trainable_parameters())
    with policy.critic_only():
        learn(policy)
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in trained if ".value." in name or name.startswith("value_head")}
    assert list(policy.trainable_parameters()) == trained


def test_values_that_sampling_cannot_know_are_forwarded_once(base, reward):
    policy = moved(load(base, reward, value_model="adapter"))
    rollout = sample(policy.model, PROMPTS, max_new_tokens=8, temperature=0.7, stop_ids=(2,),
                     generator=torch.Generator().manual_seed(0), value_fn=policy.values_from_hidden)
    assert not policy.value_shares_policy and not rollout.values.any()
    reused = score_rollout(policy, policy.fill_values(rollout, 2), 4, reuse_rollout_logprobs=True)
    forwarded = score_rollout(policy, rollout, 4)
    assert torch.allclose(reused.values, forwarded.values, atol=1e-5) and forwarded.values.std() > 0.01
    assert torch.allclose(reused.logprobs, forwarded.logprobs, atol=1e-4)
    head = load(base, reward)
    assert head.value_shares_policy and head.fill_values(rollout, 2) is rollout


def test_the_values_of_several_responses_to_a_prompt_compute_it_once(base, reward):
    policy, tokens = moved(load(base, reward, value_model="adapter")), []
    policy.share_prompts = True
    rollout = sample(policy.model, [[5] * 40] * 4, max_new_tokens=8, temperature=0.7, stop_ids=(2,),
                     generator=torch.Generator().manual_seed(0), value_fn=policy.values_from_hidden)
    hook = policy.causal_model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True)
    filled = policy.fill_values(rollout, 4)
    hook.remove()
    assert len(tokens) == 1 and tokens[0] < 3 * 40
    assert torch.equal(filled.values, score_rollout(policy, rollout, 4).values) and filled.values.std() > 0.01


# A separate value model

def test_a_value_model_learns_apart(base, merged):
    policy = load(base, merged, value_model="model")
    policy(PROMPTS, ANSWERS).values.sum().backward()
    touched = {id(p) for p in policy.parameters() if p.grad is not None and p.grad.any()}
    assert touched and touched <= {id(p) for p in policy.critic_parameters()}
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    with policy.critic_only():
        learn(policy)
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert {name.split(".")[0] for name in changed} == {"value_model", "value_head"}
    assert not any(name.endswith("score.weight") for name in changed)
    learn(policy)
    assert any(".default." in name and not torch.equal(p, before[name]) for name, p in policy.named_parameters())


def test_a_value_model_is_saved_beside_the_policy(base, merged, tmp_path):
    policy = moved(load(base, merged, value_model="model"))
    policy.save(tmp_path, tokenizer.load_tokenizer(base))
    saved = load_classifier(tmp_path / "value")
    assert all(torch.equal(p, saved.get_parameter(name)) for name, p in policy.value_model.named_parameters())


def test_a_value_model_needs_a_whole_reward_model(base, reward):
    with pytest.raises(ValueError, match="is an adapter: give the merged reward model"):
        load(base, reward, value_model="model")


def test_the_critic_has_a_learning_rate_of_its_own(base, merged):
    policy = load(base, merged, value_model="model")
    config = Ppo(precision="fp32", tune="lora", value_model="model", learning_rate=1e-3, critic_learning_rate=5e-4)
    own, critic = parameter_groups(config, make_method(config), policy)
    assert {id(p) for p in critic["params"]} == {id(p) for p in policy.critic_parameters()}
    assert len(own["params"]) + len(critic["params"]) == len(policy.trainable_parameters())
    assert critic["lr"] == 5e-4 and "lr" not in own
    policy = load(base, merged)
    config = Ppo(precision="fp32")
    assert len(parameter_groups(config, make_method(config), policy)) == len(policy.trainable_parameters())


# All roles together

@pytest.mark.parametrize("tune", ["lora", "full"])
def test_a_role_computes_the_same_whatever_was_on_before_it(base, reward, tune):
    policy = moved(load(base, reward, tune=tune, value_model="adapter"))
    (scorer,) = load_scorers(reward, policy, base)
    with torch.no_grad():
        architectures.noisy(adapter_parameters(policy.base, "value").values(), 0.05)  # no longer the reward's
    calls = {
        "policy": lambda: torch.cat(policy(PROMPTS, ANSWERS)[:2]),
        "reference": lambda: policy.ref_logprobs(PROMPTS, ANSWERS),
        "reward": lambda: scorer(PROMPTS, ANSWERS),
        "model": lambda: torch.cat(log_p_of(policy.model)),
    }
    required = [name for name, p in policy.named_parameters() if p.requires_grad]
    with torch.no_grad():
        alone = {name: call() for name, call in calls.items()}
        for order in itertools.permutations(calls):
            assert all(torch.equal(calls[name](), alone[name]) for name in order)
    assert [name for name, p in policy.named_parameters() if p.requires_grad] == required
    assert list(policy.trainable_parameters()) == required


@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16", "int8", "nf4"])
def test_updates_move_policy_and_values_and_nothing_else(base, reward, precision):
    policy = load(base, reward, precision=precision, value_model="adapter")
    (scorer,) = load_scorers(reward, policy, base)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    reference, scores = policy.ref_logprobs(PROMPTS, ANSWERS), scorer(PROMPTS, ANSWERS)
    learn(policy)
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(policy.trainable_parameters())
    assert {".default." in n or ".value." in n or n.startswith("value_head") for n in changed} == {True}
    assert torch.equal(policy.ref_logprobs(PROMPTS, ANSWERS), reference)
    assert torch.equal(scorer(PROMPTS, ANSWERS), scores)


@pytest.mark.parametrize(("tune", "value_model"), itertools.product(["lora", "full"], ["head", "adapter"]))
def test_after_training_the_reference_is_still_the_sft_model(base, reward, tune, value_model):
    policy = load(base, reward, tune=tune, value_model=value_model)
    learn(policy)
    with torch.no_grad():
        sft = log_p_of(AutoModelForCausalLM.from_pretrained(base).eval())
        assert same(policy.ref_logprobs(PROMPTS, ANSWERS), sft)
        actual = policy(PROMPTS, ANSWERS).logprobs
        assert not same(actual, sft, atol=1e-2) and same(actual, log_p_of(policy.model))


# The final temperature

@pytest.mark.parametrize("tune", ["lora", "full"])
@torch.no_grad()
def test_a_final_temperature_divides_the_policys_logits_alone_and_goes_through_merge(base, reward, tmp_path, tune):
    policy = moved(load(base, reward, tune=tune))
    before, reference = policy(PROMPTS, ANSWERS), policy.ref_logprobs(PROMPTS, ANSWERS)
    policy.final_temperature = 0.6
    after = policy(PROMPTS, ANSWERS)
    assert torch.equal(policy.ref_logprobs(PROMPTS, ANSWERS), reference)
    assert torch.equal(after.values, before.values)
    assert not torch.allclose(after.logprobs, before.logprobs, atol=0.05)
    policy.save(tmp_path / "ppo", tokenizer.load_tokenizer(base))
    assert torch.equal(policy(PROMPTS, ANSWERS).logprobs, after.logprobs)
    actual = tiny_models.merge(base, [tmp_path / "ppo"], tmp_path / "merged")
    assert actual["merge_difference"] < 1e-4
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")  # sampled at 0.7, as the policy was in training
    assert same(after.logprobs, log_p_of(merged))
    if tune == "lora":
        assert same(after.logprobs, log_p_of(PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), tmp_path / "ppo")))
    head = load_file(tmp_path / "ppo/value_head.safetensors")
    prompt = torch.tensor([PROMPTS[0]])
    values = merged.model(prompt).last_hidden_state[0, -1].float() @ head["weight"].T + head["bias"]
    assert torch.allclose(values, before.values[0, 0], atol=1e-4) and values.abs() > 0.01


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_final_temperature_is_merged_in_bf16_too(base, reward, tmp_path, dtype):
    policy = moved(load(base, reward, precision="bf16"))
    policy.final_temperature = 0.6
    policy.save(tmp_path / "ppo", tokenizer.load_tokenizer(base))
    tiny_models.merge(base, [tmp_path / "ppo"], tmp_path / "merged", dtype=dtype, check_precision="bf16")
    plain, divided = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.norm.weight
                      for folder in (base, tmp_path / "merged"))
    assert torch.allclose(divided, plain / 0.6, rtol=0.01)


# The whole model

def test_full_tuning_learns_what_autograd_says_of_a_plain_model(base, reward):
    policy = load(base, reward, tune="full")
    scored = policy(PROMPTS, ANSWERS)
    ((scored.logprobs * scored.mask).sum() / scored.mask.sum()).backward()
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    torch.cat(log_p_of(plain)).mean().backward()
    expected = {f"model.{name}": p.grad for name, p in plain.named_parameters()}
    actual = {name: p.grad for name, p in policy.trainable_parameters().items() if not name.startswith("value_head")}
    assert actual.keys() == expected.keys() and plain.config.tie_word_embeddings  # the tied matrix once
    assert all(torch.allclose(actual[name], grad, atol=2e-5 * float(grad.abs().max()))
               for name, grad in expected.items())
    assert all(p.grad is None for p in policy.frozen_copy.parameters())


@pytest.mark.parametrize("value_model", ["head", "adapter"])
def test_a_whole_model_is_saved_and_goes_through_merge(base, reward, tmp_path, value_model):
    policy = moved(load(base, reward, tune="full", value_model=value_model))
    with policy.merge_adapter() as model:
        assert model is policy.model
    policy.save(tmp_path / "ppo", tokenizer.load_tokenizer(base))
    assert (tmp_path / "ppo/value").is_dir() == (value_model == "adapter")
    actual = tiny_models.merge(base, [tmp_path / "ppo"], tmp_path / "merged", max_logit_difference=1e-6)
    assert actual["merge_difference"] == 0 and actual["reload_difference"] < 1e-5
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert same(policy(PROMPTS, ANSWERS).logprobs, log_p_of(merged))
    actual = tiny_models.merge(base, [tmp_path / "ppo"], tmp_path / "rounded", dtype="bf16", max_logit_difference=1e-6)
    assert actual["rounding_difference"] > 0 == actual["merge_difference"]
    assert tokenizer.load_tokenizer(tmp_path / "rounded").pad_token_id == 0


def test_an_adapter_is_saved_alone_in_the_root_and_the_value_functions_beside_it(base, reward, tmp_path):
    policy = moved(load(base, reward, value_model="adapter"))
    load_scorers(reward, policy, base)
    policy.save(tmp_path, tokenizer.load_tokenizer(base))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["value"]
    assert load_file(tmp_path / "adapter_model.safetensors").keys() == {
        name.replace(".default", "").removeprefix("model.")
        for name in policy.trainable_parameters() if ".default." in name}
    with torch.no_grad():
        again = PeftModel.from_pretrained(load_causal(base), tmp_path).eval()
        assert same(policy(PROMPTS, ANSWERS).logprobs, log_p_of(again))
    value = load_file(tmp_path / "value/adapter_model.safetensors")
    assert all(torch.equal(p, value[name.replace(".value.", ".")])
               for name, p in adapter_parameters(policy.base, "value").items())
    targets = json.loads((tmp_path / "value/adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)
    assert torch.equal(load_file(tmp_path / "value_head.safetensors")["weight"], policy.value_head.weight)


def test_a_value_head_that_diverged_is_not_published(base, reward, tmp_path):
    policy = load(base, reward)
    with torch.no_grad():
        policy.value_head.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"diverged, and nothing is published: .*: value_head\.bias has"):
        policy.save(tmp_path / "out", tokenizer.load_tokenizer(base))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_a_quantised_model_cannot_learn_whole(precision):
    with pytest.raises(ValueError, match="tune 'full' needs trainable weights"):
        Ppo(tune="full", precision=precision)
    assert Ppo(tune="full", precision="bf16")


# Recomputed and compiled layers

def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    scored = policy(PROMPTS, ANSWERS)
    policy.ref_logprobs(PROMPTS, ANSWERS)  # another role is on last, before the backward pass
    ((scored.values - scored.logprobs) * scored.mask).sum().backward()
    return {name: p.grad.clone() for name, p in policy.trainable_parameters().items()}


@pytest.mark.parametrize(("family", "tune", "value_model"), [
    ("llama tied", "lora", "head"), ("llama tied", "lora", "adapter"), ("llama tied", "full", "adapter"),
    ("gpt2", "lora", "adapter"), ("gpt2", "full", "head"), ("opt", "lora", "adapter"), ("opt", "full", "head"),
    ("pythia", "lora", "adapter"),
])
def test_checkpointing_changes_no_gradient_and_leaves_no_trace(family, tune, value_model, tmp_path):
    base = architectures.save(architectures.FAMILIES[family], tmp_path / "base")
    reward = save_reward(base, tmp_path / "reward")
    changes = {"tune": tune, "value_model": value_model}
    expected = gradients(moved(load(base, reward, **changes)))
    policy = moved(load(base, reward, gradient_checkpointing=True, **changes))
    calls = []
    layer = next(m for m in policy.causal_model.modules() if isinstance(m, GradientCheckpointingLayer))
    inner = next(m for m in layer.modules() if not list(m.children()))
    inner.register_forward_hook(lambda *_: calls.append(1))
    actual = gradients(policy)
    assert actual.keys() == expected.keys()
    for name in expected:  # layers that are recomputed do not narrow their last block, and round otherwise
        assert (actual[name] - expected[name]).norm() <= 1e-5 * expected[name].norm().clamp(min=1e-6), name
    # Twice where it is learnt from, once for the reference; a frozen copy has layers of its own.
    assert len(calls) == {("lora", "head"): 3, ("lora", "adapter"): 5}.get((tune, value_model), 2)
    assert not policy.model.training and not any("forward" in m.__dict__ for m in policy.modules())


def test_sampling_is_never_checkpointed(base, reward, monkeypatch):
    policy = load(base, reward, gradient_checkpointing=True)
    monkeypatch.setattr("stages.rl.policy.checkpoint", None)
    learn_free = sample(policy.model, PROMPTS, max_new_tokens=4, temperature=1.0, stop_ids=(),
                        generator=torch.Generator().manual_seed(0), value_fn=policy.values_from_hidden)
    score_rollout(policy, learn_free, 4)
