"""Our numbers against the values of trl 0.11.4, trl 1.12 and torchtune 0.6.1 (tests/parity/golden: scripts and files).

Where a peer differs on purpose, a comment says how, and the comparison undoes it.
"""

import pytest
import torch

from stages.generation.rollout import Rollout
from stages.generation.sampler import sample
from stages.rewards.kl import KlController, kl_k1, kl_penalised_rewards
from stages.rl import losses
from stages.rl.advantages import gae, whiten
from stages.rl.policy_gradient_trainer import update_policy
from stages.rl.trajectory import Trajectory
from tests.parity.golden.support import (
    SETTINGS,
    TRL,
    TRL_1_12,
    TUNE,
    GivenPolicy,
    bigram_policy,
    float64,
    golden_settings,
    golden_trajectory,
    rows_of,
    same,
    tensors,
    unbiased_to_biased,
)

PEERS = pytest.mark.parametrize("peer", [TRL, TUNE], ids=["trl_0_11", "torchtune_0_6"])
CLIP, VALUE_CLIP, COEFFICIENT = (SETTINGS[name] for name in ("clip", "value_clip", "value_coefficient"))


@PEERS
def test_masked_mean_and_whitening(peer):
    x, golden = tensors(peer["inputs"]), peer["masked"]
    same(losses.masked_mean(x["values"], x["mask"]), golden["mean"])
    centred = x["values"] - golden["mean"]
    same(losses.masked_mean(centred**2, x["mask"]), golden["variance_biased"])
    # They shift the filler as well; ours is 0 outside the mask.
    theirs = torch.tensor(golden["whitened"], dtype=torch.float64) * unbiased_to_biased(golden)
    computed = whiten(x["values"], x["mask"])
    same(computed, theirs, mask=x["mask"])
    assert (computed[x["mask"] == 0] == 0).all()
    # 1e-7: torchtune's tokens / (tokens - 1) is a float32.
    same(whiten(x["values"], x["mask"], variance="unbiased"), golden["whitened"], rel=1e-7, mask=x["mask"])


def test_whitening_that_keeps_the_mean_against_trl_0_11():
    x = tensors(TRL["inputs"])
    computed = whiten(x["values"], x["mask"], variance="unbiased", keep_mean=True)
    same(computed, TRL["masked"]["whitened_keeping_mean"], mask=x["mask"])


@PEERS
def test_rewards(peer):
    x, golden = tensors(peer["inputs"]), peer["rewards"]
    same(kl_k1(x["log_p"], x["log_ref"]), golden["kl"], mask=x["mask"])
    computed = kl_penalised_rewards(x["scores"], x["log_p"], x["log_ref"], x["mask"], SETTINGS["beta"])
    same(computed, golden["rewards"], mask=x["mask"])
    unscored = kl_penalised_rewards(torch.zeros(8).double(), x["log_p"], x["log_ref"], x["mask"], SETTINGS["beta"])
    same(unscored, golden["non_score"], mask=x["mask"])


@pytest.mark.parametrize("ours, theirs", [("absolute", "abs"), ("k2", "mse")])
def test_other_penalties_against_trl_0_11(ours, theirs):
    x = tensors(TRL["inputs"])
    computed = kl_penalised_rewards(x["scores"], x["log_p"], x["log_ref"], x["mask"], SETTINGS["beta"], ours)
    same(computed, TRL["penalties"][theirs], mask=x["mask"])


@PEERS
@pytest.mark.parametrize("together", [8, 3])
def test_a_trajectory(peer, together):
    """Map log-probabilities, values and rewards to advantages and returns, with the functions of the trainer."""
    x, golden = tensors(peer["inputs"]), tensors(peer["advantages"])
    policy = GivenPolicy(x["log_p"], x["values"], x["mask"], x["log_ref"])
    rollout = Rollout(**rows_of(x["mask"]), ended=[True] * 8)
    trajectory = golden_trajectory(policy, rollout, x["scores"], forward_prompts=together)
    same(trajectory.returns, golden["returns"], mask=x["mask"])
    raw = gae(tensors(peer["rewards"])["rewards"], x["values"], x["mask"], SETTINGS["gamma"], SETTINGS["lam"])
    same(raw, golden["returns"] - x["values"], mask=x["mask"])
    # torchtune's whitening adds the mean back (its shift_mean=True), so its advantages are not centred; ours are.
    theirs = golden["advantages"] - golden.get("mean", torch.tensor(0.0))
    same(trajectory.advantages, theirs * unbiased_to_biased(peer["advantages"]), mask=x["mask"])
    assert (trajectory.advantages[x["mask"] == 0] == 0).all()


def take_step(peer: dict, microbatch: int) -> tuple[GivenPolicy, dict, dict, Trajectory]:
    """Take a minibatch step on the peer's advantages; return policy with gradients, statistics, inputs, trajectory."""
    x, golden = tensors(peer["inputs"]), tensors(peer["advantages"])
    trajectory = Trajectory(
        **rows_of(x["mask"]),
        logprobs=x["log_p"],
        ref_logprobs=x["log_ref"],
        values=x["values"],
        mask=x["mask"],
        advantages=golden["advantages"],
        returns=golden["returns"],
    )
    policy = GivenPolicy(x["new_log_p"], x["new_values"], x["mask"])
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    with float64():
        computed = update_policy(
            policy, optimizer, trajectory, golden_settings(microbatch_prompts=microbatch), torch.Generator())
    return policy, computed, x, trajectory


@pytest.mark.parametrize("microbatch", [8, 3, 1])
def test_an_update_against_trl_0_11(microbatch):
    policy, computed, x, _ = take_step(TRL, microbatch)
    golden = TRL["loss"]
    ratio = torch.tensor(golden["policy/ratio"], dtype=torch.float64)
    same(computed["policy_loss"], golden["loss/policy"])
    same(computed["value_loss"], golden["loss/value"])
    same(computed["ratio"], losses.masked_mean(ratio, x["mask"]))
    same(policy.logprobs.grad, golden["policy_gradient"], mask=x["mask"])
    same(policy.values.grad, golden["value_gradient"], mask=x["mask"])  # theirs has the coefficient in it, as ours
    # Their approxkl is k2 (biased), ours k3: k3 = mean ratio - 1 + k1, and k1 is their policykl.
    same(computed["update_kl"], losses.masked_mean(ratio, x["mask"]) - 1 + golden["policy/policykl"], rel=1e-7)
    # They count tokens whose clipped loss is the larger, we count ratios outside the range, whichever loss wins.
    same(computed["clip_fraction"], losses.masked_mean(((ratio - 1).abs() > CLIP).double(), x["mask"]))
    assert golden["policy/clipfrac"] < computed["clip_fraction"]


@pytest.mark.parametrize("microbatch", [8, 3, 1])
def test_an_update_against_torchtune(microbatch):
    policy, computed, x, _ = take_step(TUNE, microbatch)
    golden = TUNE["loss"]
    same(computed["policy_loss"], golden["policy"])
    same(computed["value_loss"], golden["value"])
    same(computed["policy_loss"] + COEFFICIENT * computed["value_loss"], golden["total"])
    same(policy.logprobs.grad, golden["policy_gradient"], mask=x["mask"])
    same(policy.values.grad, golden["value_gradient"], mask=x["mask"])
    # Its mean ratio runs over the filler too, where the ratio is 1; ours over the response tokens only.
    tokens, filler = x["mask"].sum(), (1 - x["mask"]).sum()
    same((tokens * computed["ratio"] + filler) / (tokens + filler), golden["ratio"])


@PEERS
def test_where_clipping_binds(peer):
    """Their clip fractions, from our losses: the share of tokens whose loss is not the unclipped one."""
    x, golden, loss = tensors(peer["inputs"]), tensors(peer["advantages"]), peer["loss"]
    ratio, advantages = (x["new_log_p"] - x["log_p"]).exp(), golden["advantages"]
    bound = losses.policy_loss(ratio, advantages, CLIP) > -advantages * ratio
    theirs = loss["policy/clipfrac"] if peer is TRL else loss["clip_fraction"]
    same(losses.masked_mean(bound.double(), x["mask"]), theirs, rel=1e-6)  # theirs is a float32
    if peer is TRL:
        computed = losses.value_loss(x["new_values"], x["values"], golden["returns"], VALUE_CLIP)
        bound = computed > 0.5 * (x["new_values"] - golden["returns"]) ** 2
        same(losses.masked_mean(bound.double(), x["mask"]), loss["val/clipfrac"], rel=1e-6)


def test_statistics_of_a_trajectory_against_trl_0_11():
    golden, (_, _, x, trajectory) = TRL["objective"], take_step(TRL, 8)
    same(trajectory.sequence_kl(), golden["objective/kl"])
    same(kl_k1(x["log_p"], x["log_ref"]).mul(x["mask"]).sum(-1), golden["objective/kl_dist"])
    # Theirs is 1 - mean squared error / variance, where a bias counts as unexplained; ours is 1 - Var / Var.
    error = (trajectory.returns - trajectory.values)[x["mask"].bool()]
    unexplained = 1 - golden["ppo/val/var_explained"] - error.mean() ** 2 / golden["ppo/returns/var"]
    same(trajectory.explained_variance(), 1 - unexplained * len(error) / (len(error) - 1), rel=1e-6)


def test_the_controller():
    golden = TRL["controller"]
    controller, computed = KlController(golden["initial"], golden["target"], golden["horizon"]), []
    for kl in golden["kls"]:
        controller.update(kl, golden["responses"])
        computed.append(controller.kl_coefficient)
    assert computed == pytest.approx(golden["betas"], rel=1e-14)


def test_a_forward_pass_against_trl_0_11():
    """Which position predicts which token, and its value; left-padded there, end to end here."""
    golden = TRL["forward"]
    policy = bigram_policy(golden["table"], golden["value_weights"])
    scored = policy(golden["prompts"], golden["responses"])
    for row, response in enumerate(golden["responses"]):
        same(scored.logprobs[row, : len(response)], golden["log_p"][row], rel=1e-5)
        same(scored.values[row, : len(response)], golden["values"][row], rel=1e-5)


def test_the_entropy_of_a_rollout_against_trl_0_11():
    """A bigram model's entropy is that of the token before, so tokens drawn here can be looked up in their rows."""
    golden, known = TRL["forward"], {}
    for prompt, response, row in zip(golden["prompts"], golden["responses"], golden["entropy"], strict=True):
        known |= dict(zip([prompt[-1], *response[:-1]], row, strict=True))
    policy = bigram_policy(golden["table"], golden["value_weights"])
    rollout = sample(
        policy.model.get_base_model(),
        golden["prompts"],
        max_new_tokens=6,
        temperature=1.0,
        stop_ids=(1,),
        generator=torch.Generator().manual_seed(0),
        value_fn=policy.values_from_hidden,
    )
    computed = [
        (float(rollout.entropy[row, t]), known[before])
        for row, (prompt, response) in enumerate(zip(rollout.prompts, rollout.responses, strict=True))
        for t, before in enumerate([prompt[-1], *response[:-1]])
        if before in known
    ]
    assert len(computed) > 20
    same(*zip(*computed, strict=True), rel=1e-5)


def test_temperature_against_torchtune():
    golden = TUNE["forward"]
    scored = bigram_policy(golden["table"], None, SETTINGS["temperature"])(golden["prompts"], golden["responses"])
    for row, response in enumerate(golden["responses"]):
        same(scored.logprobs[row, : len(response)], golden["log_p"][row], rel=1e-5)


def load_trl_1_12(section: str) -> dict[str, torch.Tensor]:
    """Load a section of trl 1.12's values, with `mask`, and `mask_p1`: one step longer where the response leaves room.

    trl 1.x counts the step after the last token as one with a value, and puts the score there; ours is at the last
    token, and nothing follows (CORRECTNESS A1, A7). A response that fills its columns has no such step.
    """
    computed, x = tensors(TRL_1_12["experience"]), tensors(TRL_1_12[section])
    rows = x["micro_batch_inds"].long() if section == "minibatch" else slice(None)
    return x | {"mask": 1 - computed["padding_mask"][rows], "mask_p1": 1 - computed["padding_mask_p1"][rows]}


def test_a_trajectory_against_trl_1_12_with_its_extra_step():
    x = load_trl_1_12("experience")
    rows = torch.arange(len(x["scores"]))
    same(kl_k1(x["logprobs"], x["ref_logprobs"]), x["kl"])
    zero = torch.zeros_like(x["scores"])
    rewards = kl_penalised_rewards(zero, x["logprobs"], x["ref_logprobs"], x["mask"], SETTINGS["beta"])
    rewards[rows, x["actual_end"].long()] += x["scores"]
    same(rewards, x["rewards"], rel=1e-6)
    raw = gae(x["rewards"], x["values"], x["mask_p1"], SETTINGS["gamma"], SETTINGS["lam"])
    same(raw, x["unwhitened"])
    same(raw + x["values"], x["returns"])
    same(whiten(raw, x["mask"]), x["whitened"] * unbiased_to_biased(TRL_1_12["experience"]), mask=x["mask"])


def test_full_responses_against_trl_1_12_as_they_are():
    x = load_trl_1_12("experience")
    full = x["mask"].sum(-1) == x["mask"].shape[1]
    x = {name: value[full] for name, value in x.items() if value.ndim}
    assert len(x["scores"]) == 4
    policy = GivenPolicy(x["logprobs"], x["values"], x["mask"], x["ref_logprobs"])
    rollout = Rollout(**rows_of(x["mask"]), ended=[False] * len(x["scores"]))
    trajectory = golden_trajectory(policy, rollout, x["scores"])
    same(trajectory.returns, x["returns"], rel=1e-6)
    same(trajectory.advantages, whiten(x["unwhitened"], x["mask"]), rel=1e-6)


def test_an_update_against_trl_1_12():
    x = load_trl_1_12("minibatch")
    log_p, values = x["new_logprobs"].requires_grad_(), x["vpred"].requires_grad_()
    ratio = (log_p - x["mb_logprobs"]).exp()
    same(ratio, x["ratio"], mask=x["mask"])
    per_token = losses.policy_loss(ratio, x["mb_advantage"], CLIP)
    policy = losses.masked_mean(per_token, x["mask"])
    bound = per_token > -x["mb_advantage"] * ratio
    same(losses.masked_mean(bound.double(), x["mask"]), x["pg_clipfrac"], rel=1e-6)
    # Its value loss is the mean over the extra steps too.
    per_token = losses.value_loss(values, x["mb_values"], x["mb_return"], VALUE_CLIP)
    value = losses.masked_mean(per_token, x["mask_p1"])
    bound = per_token > 0.5 * (values - x["mb_return"]) ** 2
    same(losses.masked_mean(bound.double(), x["mask_p1"]), x["vf_clipfrac"], rel=1e-6)
    for computed, expected in ((policy, "pg_loss"), (value, "vf_loss"), (policy + COEFFICIENT * value, "loss")):
        same(computed, x[expected])
    gradients = torch.autograd.grad(policy + COEFFICIENT * value, [log_p, values])
    same(gradients[0], x["log_p_gradient"])
    same(gradients[1], x["vpred_gradient"])


def test_log_probabilities_against_trl_1_12():
    """Take its logits before the temperature as three bigram models, with one response token after each prompt."""
    x = load_trl_1_12("minibatch")
    logits, chosen, log_p = (x[name][x["mask"] == 1][:33] for name in ("logits", "mb_responses", "new_logprobs"))
    for rows in torch.arange(33).split(11):
        policy = bigram_policy(logits[rows].tolist(), None, SETTINGS["temperature"])
        scored = policy([[token] for token in range(11)], [[int(token)] for token in chosen[rows]])
        same(scored.logprobs[:, 0], log_p[rows], rel=1e-5)
