"""ILQL on a tiny decision problem with a known optimum: its shifted policy beats behaviour cloning."""

import itertools
from dataclasses import replace

import pytest
import torch

from stages.modeling.packed.forward import use_packed_attention
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.offline_rl.dataset import ScoredAnswer, collate_answers, measure_scale, normalise_rewards
from stages.offline_rl.losses import LossSettings, token_losses, total_loss
from stages.offline_rl.model import ILQLModel
from stages.training.trainer import TrainerSettings, train
from tests.helpers import tiny_models

PROMPT, FIRST, SECOND, EOS = [1, 40], (50, 51, 52), (60, 61, 62), 2
# Reward of (first, second): the best first action is the one with the worst mean, so that V must be an expectile.
REWARDS = {(50, 60): 1.0, (50, 61): 1.0, (50, 62): 1.0, (51, 60): 0.0, (51, 61): 0.0, (51, 62): 1.8,
           (52, 60): 0.5, (52, 61): 0.5, (52, 62): 0.5}
LOSS = LossSettings(gamma=1.0, tau=0.9, cql_scale=0.01, awac_scale=1.0, awac_beta=0.0)
TRAINING = TrainerSettings(batch=9, microbatch=9, learning_rate=1e-2, schedule="cosine", weight_decay=0.0, seed=0,
                           save_every_steps=1000, max_steps=100)


def expected_reward(model) -> float:
    """Return the exact mean reward of the answers [first, second, EOS], given that an answer has this form."""
    answers = [[*pair, EOS] for pair in itertools.product(FIRST, SECOND)]
    logprobs = response_logprobs(model, [PROMPT] * len(answers), answers, 1.0)
    shares = torch.stack([row.sum() for row in logprobs]).softmax(0)
    return sum(float(share) * REWARDS[tuple(answer[:2])] for share, answer in zip(shares, answers, strict=True))


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    return learn(tmp_path_factory.mktemp("learnt"))


def learn(out, settings: LossSettings = LOSS) -> ILQLModel:
    """Train on uniformly random behaviour: each step has every answer once."""
    rows = [ScoredAnswer(PROMPT, [*pair, EOS], reward) for pair, reward in REWARDS.items()]
    rows = normalise_rewards(rows, measure_scale(rows))
    torch.manual_seed(0)
    causal = tiny_models.llama(tiny_models.tokenizer(), width=16).requires_grad_(True)
    use_packed_attention(causal)
    learner = ILQLModel(causal, "fp32")
    train(learner, rows, collate_answers,
          lambda batch: total_loss(token_losses(learner(batch), settings), settings).sum(), TRAINING, out, "test",
          after_step=lambda step: learner.heads.synchronise_targets(0.1))
    return learner.eval()


def test_the_shifted_policy_beats_behaviour_cloning_and_nears_the_optimum(learnt):
    learner = learnt
    cloned = expected_reward(learner.causal_model)
    mean = sum(REWARDS.values()) / len(REWARDS)
    assert abs(cloned - mean) < 0.15, "behaviour cloning imitates the data"
    rewards = {}
    for beta in (0.0, 1.0, 4.0, 16.0):
        with learner.shifted(beta):
            rewards[beta] = expected_reward(learner.causal_model)
    assert rewards[0.0] == cloned and sorted(rewards.values()) == list(rewards.values())
    assert rewards[1.0] > mean + 0.2 and rewards[16.0] > 0.9 * max(REWARDS.values())
    assert expected_reward(learner.causal_model) == cloned, "outside of the context, the model is itself again"


def test_an_expectile_of_one_half_prefers_the_action_with_the_better_mean(learnt, tmp_path):
    """With the mean in V's place, the risky action, whose mean is worst, is not worth its best outcome."""
    q = {}
    for tau, learner in ((0.9, learnt), (0.5, learn(tmp_path, replace(LOSS, tau=0.5)))):
        with torch.no_grad():
            tokens = learner([ScoredAnswer(PROMPT, [first, 62, EOS], 0.0) for first in FIRST])
        q[tau] = dict(zip(FIRST, tokens.target_q_values.amin(0)[::3].tolist(), strict=True))
    assert q[0.5][50] > q[0.5][51] and q[0.9][51] > q[0.9][50]
