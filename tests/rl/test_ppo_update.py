"""The update as a whole, on a tiny policy with ragged responses (CORRECTNESS K4, P1, P3-P7, P10, P11, P13)."""

from dataclasses import replace

import pytest
import torch

from stages.generation.rollout import Rollout
from stages.modeling import lora
from stages.recipe.sections.ppo import Ppo
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import draw_minibatches, update_policy
from stages.rl.trajectory import Trajectory
from tests.helpers import tiny_models
from tests.helpers.trajectories import build_trajectory
from tests.parity.golden.support import SETTINGS, golden_settings

PROMPTS = [[1, 40, 50, 60, 70, 80], [1, 45], [1, 90, 91, 92], [1, 33, 34, 35, 36, 37, 38, 39]]
RESPONSES = [[50, 51, 2], [60, 61, 62, 63, 64, 65, 66, 67, 2], [70, 71, 72, 73], [2]]
SCORES = torch.tensor([1.0, -1.0, 0.5, 2.0])


def begin(forward_prompts: int = 16) -> tuple[Policy, Trajectory]:
    """Build a policy that has moved from its reference, with LoRA dropout in its configuration, and a trajectory."""
    torch.manual_seed(0)
    model = lora.add_lora(
        tiny_models.llama(tiny_models.tokenizer()), r=4, alpha=8, dropout=0.3, target_modules=(), precision="fp32"
    )
    policy = Policy(model, 1.0, "fp32")
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters().items():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    rollout = Rollout(PROMPTS, RESPONSES, [True, True, False, True])
    return policy, build_trajectory(policy, rollout, SCORES, 0.1, forward_prompts=forward_prompts,
                                    gamma=SETTINGS["gamma"], gae_lambda=SETTINGS["lam"])


def settings(**changed):
    sizes = {"minibatch_prompts": 4, "microbatch_prompts": 4, "max_gradient_norm": None}
    return golden_settings(**(sizes | changed))


def take_step(policy: Policy, trajectory: Trajectory, learning_rate: float = 1.0, **changed) -> tuple[dict, dict]:
    """Statistics of one pass with plain gradient descent, and how far each parameter moved."""
    before = {name: p.detach().clone() for name, p in policy.trainable_parameters().items()}
    optimizer = torch.optim.SGD(policy.trainable_parameters().values(), lr=learning_rate)
    statistics = update_policy(policy, optimizer, trajectory, settings(**changed), torch.Generator().manual_seed(0))
    return statistics, {name: p.detach() - before[name] for name, p in policy.trainable_parameters().items()}


def norm(moves: dict[str, torch.Tensor], part: str = "") -> float:
    """2-norm over all parameters with `part` in their names."""
    return float(torch.cat([move.flatten() for name, move in moves.items() if part in name]).norm())


def test_dropout_is_off_in_every_pass_even_where_the_adapter_has_some():
    policy, trajectory = begin()
    assert any(isinstance(m, torch.nn.Dropout) and m.p == 0.3 for m in policy.modules())
    again = [policy(PROMPTS, RESPONSES).logprobs for _ in range(2)]
    assert torch.equal(again[0], again[1])
    statistics, _ = take_step(policy, trajectory, 0.0)
    assert statistics["first_ratio"] == pytest.approx(1.0, abs=1e-6) and statistics["clip_fraction"] == 0
    assert not any(m.training for m in policy.modules() if isinstance(m, torch.nn.Dropout))


@pytest.mark.parametrize("limit", [1e-3, 1e9, None])
def test_the_gradient_is_clipped_by_its_global_norm_and_logged_before_that(limit):
    statistics, moves = take_step(*begin(), max_gradient_norm=limit)
    free, _ = take_step(*begin())
    assert statistics["gradient_norm"] == pytest.approx(free["gradient_norm"], rel=1e-5)
    assert free["gradient_norm"] > 0.01
    expected = limit if limit == 1e-3 else free["gradient_norm"]
    assert norm(moves) == pytest.approx(expected, rel=1e-4)


def test_the_value_loss_reaches_the_adapter_in_proportion_to_its_coefficient():
    """The head sits on the policy's own states: with no advantage the adapter learns from the values alone (P11)."""
    trajectory = begin()[1]
    idle = replace(trajectory, advantages=torch.zeros_like(trajectory.advantages))
    moves = [take_step(begin()[0], idle, value_coefficient=c)[1] for c in (0.0, 0.1, 0.2)]
    assert norm(moves[0]) == 0.0
    assert norm(moves[1], "lora_") > 1e-4 and norm(moves[1], "value_head") > 1e-4
    for part in ("lora_", "value_head"):
        assert norm(moves[2], part) == pytest.approx(2 * norm(moves[1], part), rel=1e-3)
    assert Ppo().value_coefficient == 0.1 and Ppo().value_clip_range == Ppo().clip_range == 0.2


def test_the_gradient_knows_the_reference_only_through_the_advantages():
    """No estimate of the KL is differentiated (K4): another reference, same advantages, same step."""
    trajectory = begin()[1]
    other = replace(trajectory, ref_logprobs=trajectory.ref_logprobs - 3.0 * trajectory.mask)
    moves = [take_step(begin()[0], one)[1] for one in (trajectory, other)]
    assert norm(moves[0]) > 0 and all(torch.equal(moves[0][name], moves[1][name]) for name in moves[0])


@pytest.mark.parametrize("together", [1, 2, 4])
def test_rows_beside_a_row_change_neither_experience_nor_update(together):
    """Forwarded alone or padded to a longer neighbour: same numbers, same statistics, same step (P5, P13)."""
    (policy, trajectory), (_, expected) = begin(forward_prompts=together), begin(forward_prompts=4)
    for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns"):
        assert torch.allclose(getattr(trajectory, name), getattr(expected, name), atol=2e-5), name
    moved = replace(expected, logprobs=expected.logprobs + 0.1 * torch.sin(torch.arange(9.0)) * expected.mask)
    statistics, moves = take_step(policy, moved, microbatch_prompts=together)
    whole, all_at_once = take_step(begin()[0], moved, microbatch_prompts=4)
    for name in ("policy_loss", "value_loss", "ratio", "clip_fraction", "update_kl", "gradient_norm"):
        assert statistics[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
    assert norm({name: moves[name] - all_at_once[name] for name in moves}) < 1e-4 * norm(all_at_once)
    assert trajectory.sequence_kl() == pytest.approx(expected.sequence_kl(), abs=1e-4)
    assert trajectory.explained_variance() == pytest.approx(expected.explained_variance(), abs=1e-4)


def test_statistics_are_means_over_the_response_tokens_of_the_minibatch():
    """By hand from a forward pass: neither means of rows' means, nor of microbatches' (P5, P13)."""
    policy, trajectory = begin()
    moved = replace(trajectory, logprobs=trajectory.logprobs + 0.3 * torch.sin(torch.arange(9.0)) * trajectory.mask)
    tokens = [(r, t) for r, response in enumerate(RESPONSES) for t in range(len(response))]
    log_ratios = [float(trajectory.logprobs[at] - moved.logprobs[at]) for at in tokens]
    ratios = [2.718281828459045**x for x in log_ratios]
    statistics, _ = take_step(policy, moved, 0.0, microbatch_prompts=1)
    assert statistics["ratio"] == pytest.approx(sum(ratios) / len(tokens), rel=1e-5)
    k3 = [r - 1 - x for r, x in zip(ratios, log_ratios, strict=True)]
    assert statistics["update_kl"] == pytest.approx(sum(k3) / len(tokens), rel=1e-4)
    outside = sum(abs(r - 1) > settings().clip_range for r in ratios)
    assert statistics["clip_fraction"] == pytest.approx(outside / len(tokens)) and 0 < outside < len(tokens)


def test_every_response_is_forwarded_once_an_epoch_in_a_fresh_order():
    policy, trajectory = begin()
    used = []
    policy.register_forward_pre_hook(lambda module, given: used.extend(PROMPTS.index(prompt) for prompt in given[0]))
    take_step(policy, trajectory, 0.0, epochs=6, minibatch_prompts=2, microbatch_prompts=1)
    epochs = [used[i : i + 4] for i in range(0, 24, 4)]
    assert len(used) == 24 and all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3 and Ppo().epochs == 4


def test_adam_has_the_published_epsilon():
    assert (Ppo().optimizer, Ppo().adam_epsilon) == ("adam", 1e-5)


def test_responses_to_a_prompt_stay_together_in_minibatches_and_every_row_comes_once_an_epoch():
    changed = settings(epochs=2, minibatch_prompts=6, microbatch_prompts=3, responses_per_prompt=3)
    batches = [rows.tolist() for rows in draw_minibatches(12, changed, torch.Generator().manual_seed(0))]
    assert list(map(len, batches)) == [6] * 4
    for epoch in (batches[0] + batches[1], batches[2] + batches[3]):
        assert sorted(epoch) == list(range(12)) and epoch != list(range(12))
    for rows in batches:
        assert all(rows[i] % 3 == 0 and rows[i + 1:i + 3] == [rows[i] + 1, rows[i] + 2] for i in (0, 3))
