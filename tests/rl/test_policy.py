"""Policy and reference: same function, same positions, any padding (CORRECTNESS A2, A7, G2, G6, P1, P5, P6)."""

from dataclasses import replace

import pytest
import torch

from stages.generation.rollout import Rollout
from stages.generation.sampler import sample
from stages.modeling import lora
from stages.recipe.sections.ppo import Ppo
from stages.rl import policy_gradient_trainer
from stages.rl.policy import POLICY, VALUE, Policy
from stages.rl.policy_gradient_trainer import (
    STATISTICS,
    MinibatchSize,
    UpdateSettings,
    policy_gradient_loss,
    update_policy,
)
from tests.helpers import tiny_models
from tests.helpers.settings import take_settings
from tests.helpers.trajectories import build_trajectory

PROMPTS = [[1, 40, 50, 60, 70, 80], [1, 45], [1, 90, 91, 92], [1, 33, 34, 35, 36, 37, 38, 39]]
UPDATE = take_settings(
    UpdateSettings, Ppo(), max_sampler_ratio=None,
    epochs=2,
    minibatch_prompts=4,
    microbatch_prompts=2,
    clip_range=0.2,
    value_clip_range=0.2,
    value_coefficient=0.1,
    max_gradient_norm=1.0,
    max_ratio=10.0,
    update_kl_limit=None,
)


def make_policy(family="llama", temperature=1.0):
    tok = tiny_models.tokenizer()
    model = tiny_models.llama(tok) if family == "llama" else tiny_models.gpt2(len(tok))
    torch.manual_seed(0)
    model = lora.add_lora(model, r=4, alpha=8, dropout=0.3, target_modules=(), precision="fp32")
    return Policy(model, temperature, "fp32")


def sample_rollout(policy, temperature=1.0):
    return sample(
        policy.model,
        PROMPTS,
        max_new_tokens=12,
        temperature=temperature,
        stop_ids=(2,),
        generator=torch.Generator().manual_seed(0),
    )


def perturb(policy):
    """The policy after some learning: B is no longer 0."""
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters().items():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return policy


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_are_those_of_the_unpadded_model(family, temperature):
    policy = perturb(make_policy(family, temperature))
    rollout = sample_rollout(policy, temperature)
    with torch.no_grad():
        scored = policy(rollout.prompts, rollout.responses)
        for row, (prompt, response) in enumerate(zip(rollout.prompts, rollout.responses, strict=True)):
            logits = (
                policy.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double() / temperature
            )
            expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
            assert torch.allclose(scored.logprobs[row, : len(response)].double(), expected, atol=1e-5)
            assert scored.mask[row].tolist() == [1.0] * len(response) + [0.0] * (scored.mask.shape[1] - len(response))


def test_a_fresh_adapter_is_the_reference_to_the_last_bit_and_a_moved_one_is_not():
    policy = make_policy()
    rollout = sample_rollout(policy)
    fresh = build_trajectory(policy, rollout, torch.zeros(4), 0.1)
    assert torch.equal(fresh.logprobs, fresh.ref_logprobs) and fresh.sequence_kl() == 0.0
    assert abs(build_trajectory(perturb(policy), rollout, torch.zeros(4), 0.1).sequence_kl()) > 1e-3


def test_the_value_head_starts_at_zero_and_reads_the_state_before_the_token():
    policy = make_policy()
    rollout = sample_rollout(policy)
    with torch.no_grad():
        assert (policy(rollout.prompts, rollout.responses).values == 0).all()
        policy.value_head.weight.fill_(0.1)
        values = policy(rollout.prompts, rollout.responses).values
        prompt, response = rollout.prompts[0], rollout.responses[0]
        hidden = policy.model.get_base_model().model(torch.tensor([prompt + response])).last_hidden_state[0]
        assert float(values[0, 0]) == pytest.approx(float(0.1 * hidden[len(prompt) - 1].sum()), abs=1e-5)


def test_ratio_is_one_in_every_minibatch_when_nothing_is_learnt():
    policy = perturb(make_policy())
    trajectory = build_trajectory(policy, sample_rollout(policy), torch.tensor([1.0, -1.0, 0.5, 2.0]), 0.1)
    still = torch.optim.SGD(policy.trainable_parameters().values(), lr=0.0)
    statistics = update_policy(policy, still, trajectory, UPDATE, torch.Generator().manual_seed(0))
    assert statistics["ratio"] == pytest.approx(1.0, abs=1e-5) and abs(statistics["update_kl"]) < 1e-9
    assert statistics["clip_fraction"] == 0 and statistics["minibatches"] == 2


def gradients_of(policy, parameters=None):
    """The gradients that there are, of the parameters; None: of all."""
    return {name: p.grad for name, p in policy.trainable_parameters().items()
            if p.grad is not None and (parameters is None or p in parameters)}


def test_policy_and_critic_apart_have_the_gradients_and_statistics_of_both_together():
    policy = perturb(make_policy())
    assert policy.separate_roles() == [(POLICY, VALUE)]  # a head's gradient reaches the policy
    policy.value_shares_policy, policy.value_model = False, tiny_models.classifier(1).requires_grad_(True)
    assert policy.separate_roles() == [(POLICY,), (VALUE,)]
    trajectory = build_trajectory(policy, sample_rollout(policy), torch.tensor([1.0, -1.0, 0.5, 2.0]), 0.1)
    size, results = MinibatchSize(trajectory.mask.sum(), 4), []
    for parts in ([(POLICY, VALUE)], policy.separate_roles()):
        policy.zero_grad()
        sums = []
        for roles in parts:
            loss, statistics = policy_gradient_loss(policy, trajectory, torch.arange(4), size, UPDATE, 0.0, roles)
            own, others = set(policy.parameters_of(roles)), gradients_of(policy)
            loss.backward()
            assert gradients_of(policy, own).keys() | others.keys() == gradients_of(policy).keys()
            sums.append(statistics)
        gradients = {name: gradient.clone() for name, gradient in gradients_of(policy).items()}
        results.append((gradients, sum(sums)))
    (together, expected), (apart, actual) = results
    assert together.keys() == apart.keys() and len(together) > len(policy.policy_parameters())
    assert all(torch.equal(together[name], apart[name]) for name in together) and torch.allclose(expected, actual)
    assert float(expected[STATISTICS.index("value_loss")]) > 0


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_gradient_does_not_depend_on_the_microbatch(microbatch):
    policy = perturb(make_policy())
    trajectory = build_trajectory(policy, sample_rollout(policy), torch.tensor([1.0, -1.0, 0.5, 2.0]), 0.1)
    size = MinibatchSize(trajectory.mask.sum(), 4)

    def gradient(rows_at_once):
        policy.zero_grad()
        for rows in torch.arange(4).split(rows_at_once):
            policy_gradient_loss(policy, trajectory, rows, size, UPDATE)[0].backward()
        return torch.cat([p.grad.flatten() for p in policy.trainable_parameters().values()])

    whole = gradient(4)
    assert (gradient(microbatch) - whole).abs().max() <= 5e-6 * whole.abs().max() and float(whole.norm()) > 1e-4


def test_every_response_is_used_once_an_epoch_in_a_fresh_order(monkeypatch):
    policy = make_policy()
    trajectory = build_trajectory(policy, sample_rollout(policy), torch.zeros(4), 0.1)
    used = []

    def record(policy, trajectory, rows, *rest):
        used.append(rows.tolist())
        return policy_gradient_loss(policy, trajectory, rows, *rest)

    monkeypatch.setattr(policy_gradient_trainer, "policy_gradient_loss", record)
    still = torch.optim.SGD(policy.trainable_parameters().values(), lr=0.0)
    update_policy(policy, still, trajectory, UPDATE, torch.Generator().manual_seed(1))
    flat = [row for rows in used for row in rows]
    assert sorted(flat[:4]) == sorted(flat[4:]) == [0, 1, 2, 3] and flat[:4] != flat[4:]


def test_a_minibatch_that_ran_away_is_skipped_and_counted():
    policy = make_policy()
    trajectory = build_trajectory(policy, sample_rollout(policy), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.1)
    trajectory = replace(trajectory, logprobs=trajectory.logprobs - 5.0)  # the tokens are now e^5 times likelier
    before = {name: p.clone() for name, p in policy.trainable_parameters().items()}
    optimizer = torch.optim.SGD(policy.trainable_parameters().values(), lr=1.0)
    statistics = update_policy(policy, optimizer, trajectory, UPDATE, torch.Generator())
    assert statistics["skipped"] == 2
    assert all(torch.equal(p, before[name]) for name, p in policy.trainable_parameters().items())


def test_an_update_that_moved_far_enough_stops():
    policy = make_policy()
    trajectory = build_trajectory(policy, sample_rollout(policy), torch.tensor([3.0, -3.0, 3.0, -3.0]), 0.0)
    eager = replace(UPDATE, epochs=50, update_kl_limit=1e-3)
    optimizer = torch.optim.Adam(policy.trainable_parameters().values(), lr=0.05)
    statistics = update_policy(policy, optimizer, trajectory, eager, torch.Generator())
    assert statistics["update_stopped_early"] == 1.0 and statistics["minibatches"] < 50


def test_only_the_adapter_and_the_value_head_learn():
    policy = make_policy()
    base = {name: p.clone() for name, p in policy.named_parameters() if not p.requires_grad}
    trajectory = build_trajectory(policy, sample_rollout(policy), torch.tensor([3.0, -3.0, 3.0, -3.0]), 0.0)
    optimizer = torch.optim.Adam(policy.trainable_parameters().values(), lr=0.01)
    update_policy(policy, optimizer, trajectory, UPDATE, torch.Generator())
    assert all("lora_" in name or name.startswith("value_head") for name in policy.trainable_parameters())
    assert base and all(torch.equal(p, base[name]) for name, p in policy.named_parameters() if name in base)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_finds_the_best_arm_of_a_rigged_bandit(seed):
    """The first token decides: 1 for the third most likely one, 0 for all others. The optimum is known: 1."""
    policy, prompt = make_policy(), [1, 40, 50]
    with torch.no_grad():
        # The tiny model's normalised last state bounds its logits at width x std = 6.4, and p at 0.8: widen that.
        policy.model.get_input_embeddings().weight.mul_(2)
        best = int(policy.model(torch.tensor([prompt])).logits[0, -1].topk(3).indices[2])

    @torch.no_grad()
    def probability() -> float:
        return float(torch.softmax(policy.model(torch.tensor([prompt])).logits[0, -1], -1)[best])

    optimizer = torch.optim.Adam(policy.trainable_parameters().values(), lr=0.01)
    settings = replace(UPDATE, epochs=4, minibatch_prompts=64, microbatch_prompts=64)
    assert probability() < 0.5
    for step in range(40):
        if step % 5 == 0 and probability() > 0.97:
            break
        generator = torch.Generator().manual_seed(1000 * seed + step)
        one = {"max_new_tokens": 1, "temperature": 1.0, "stop_ids": (), "generator": generator}
        rollout = sample(policy.model, [prompt] * 64, **one)
        scores = torch.tensor([float(response[0] == best) for response in rollout.responses])
        update_policy(policy, optimizer, build_trajectory(policy, rollout, scores, 0.0), settings, generator)
    assert probability() > 0.95


def test_rollouts_hold_the_ids_that_are_scored():
    rollout = Rollout([[1, 5]], [[7, 2]], [True])
    scored = make_policy()(rollout.prompts, rollout.responses)
    assert scored.mask.tolist() == [[1.0, 1.0]]


def test_a_prompt_that_comes_twice_is_computed_twice_unless_prompts_are_shared():
    """Rollouts of one response per prompt repeat one by chance, where the prompts begin anew."""
    policy, tokens = make_policy(), []
    hook = policy.causal_model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True)
    rows = [[5] * 40] * 2, [[50, 2], [60, 61, 2]]
    with torch.no_grad():
        apart = policy(*rows).logprobs
        policy.share_prompts = True
        shared = policy(*rows).logprobs
    hook.remove()
    torch.testing.assert_close(shared, apart, atol=1e-5, rtol=1e-5)
    assert tokens[0] >= 2 * 40 > tokens[1]
