"""What the processes of tests/distributed compute: the same calls in each, on tiny models.

    python -m tests.distributed.worker FOLDER PROCESSES [FOLDER PROCESSES ...]      see forked_ranks.py
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stages import grpo, ppo, rloo
from stages.distributed import group
from stages.finetuning.packing import PackedRow, collate_blocks, summed_lm_loss
from stages.generation.rollout import Rollout
from stages.generation.sampler import sample, sample_in_batches
from stages.modeling import lora
from stages.modeling.packed.forward import use_packed_attention
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.offline_rl.dataset import ScoredAnswer, collate_answers
from stages.offline_rl.losses import LossSettings, measure_answers, token_losses, total_loss
from stages.offline_rl.model import ILQLModel
from stages.ppo import PolicyGradientMethod
from stages.preference.logprobs import all_answer_logprobs, collate_rows
from stages.preference.loss import PreferenceLoss
from stages.preference.reference import check_start, compute_reference
from stages.recipe.sections.dpo import Dpo
from stages.recipe.sections.policy_gradient import Grpo, Rloo
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.reward import Reward
from stages.reward_modeling.dataset import Example, collate_examples
from stages.reward_modeling.loss import PairwiseLoss
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import Scoring
from stages.rewards.kl import KlController
from stages.rewards.reward_functions import RewardFunction
from stages.rewards.shaping import RewardShaper
from stages.rl.advantages import gae_advantages
from stages.rl.collect_rollouts import SamplingParams, collect_rollout
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer, UpdateSettings, update_policy
from stages.rl.trajectory import Trajectory
from stages.training.memory import retry_with_smaller_batches
from stages.training.optimizers import MuonWithAdamW
from stages.training.trainer import TrainerSettings, train
from tests.distributed.forked_ranks import run_in_ranks
from tests.helpers import tiny_models
from tests.helpers.settings import shaping, take_settings

MOST_PROCESSES = 8
OF_MOST = ("ppo", "sft", "muon")  # what so many processes train; fewer train all
PROMPTS = [[1, 40, 50, 60, 70, 80], [1, 45], [1, 90, 91, 92], [1, 33, 34, 35, 36, 37, 38, 39], [1, 7, 8]]
UPDATE = take_settings(
    UpdateSettings, Ppo(), max_sampler_ratio=None,
    epochs=2, minibatch_prompts=3, microbatch_prompts=1, clip_range=0.2, value_clip_range=0.2,
                        value_coefficient=0.1, max_gradient_norm=1.0, max_ratio=10.0, update_kl_limit=None)
TRAINING = TrainerSettings(batch=4, microbatch=1, learning_rate=2e-3, schedule="cosine", weight_decay=0.01, seed=0,
                           save_every_steps=100, epochs=2.0)


def make_policy(own_critic: bool = False) -> Policy:
    """Build a policy that has moved from its reference, whose critic is a head or a model."""
    torch.manual_seed(0)
    model = lora.add_lora(tiny_models.llama(tiny_models.tokenizer()), r=4, alpha=8, dropout=0.0, target_modules=(),
                          precision="fp32")
    policy = Policy(model, 1.0, "fp32")
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters().items():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    if own_critic:
        policy.value_shares_policy, policy.value_model = False, tiny_models.classifier(2).requires_grad_(True)
        policy.value_model.score.requires_grad_(False)
    return policy


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def check_sampling() -> dict:
    model, facts = tiny_models.llama(tiny_models.tokenizer()), {}
    options = {"stop_ids": (2, 5, 9), "precision": "fp32", "value_fn": lambda hidden: hidden.float().mean(-1)}
    for name, further in {"plain": {"max_new_tokens": 12}, "limits": {"max_new_tokens": [3, 9, 1, 7, 5]}}.items():
        rollout = sample(model, PROMPTS, temperature=1.0, generator=torch.Generator().manual_seed(3), units=3,
                         **options, **further)
        facts[name] = [rollout.responses, rollout.ended, rollout.logprobs.tolist(), rollout.entropy.tolist()]
    facts["one"] = sample(model, PROMPTS[:1], temperature=1.0, generator=torch.Generator().manual_seed(3),
                          stop_ids=(2,), max_new_tokens=6).responses  # the others have none
    options.pop("value_fn")
    facts["batches"] = sample_in_batches(model, PROMPTS, 2, seed=0, temperature=1.0, max_new_tokens=5,
                                         **options).responses
    use_packed_attention(model)
    facts["logprobs"] = [row.tolist() for row in response_logprobs(model, PROMPTS, facts["plain"][0], 1.0)]
    return facts


def check_ppo(own_critic: bool = False) -> tuple[dict, dict]:
    """Train three iterations; minibatches of three and of two rows leave processes without a unit.

    own_critic: a model, whose updates are units apart from the policy's.
    """
    policy = make_policy(own_critic)
    scorer = Scorer(tiny_models.classifier(1), "fp32")
    count = iter(range(100 * (1 + group.rank()), 10_000))  # a user's function that is another in every process
    functions = [RewardFunction("model", 1.0, "ids", scorer, part="model"),
                 RewardFunction("user", 0.01, "ids", lambda prompts, responses: [next(count) for _ in responses])]
    trainer = PolicyGradientTrainer(
        policy=policy, reward_shaper=RewardShaper(functions, None, shaping(reward_scaling="running")),
        kl_controller=KlController(0.1, 1.0, 20),
        optimizer=torch.optim.Adam(policy.trainable_parameters().values(), lr=3e-3), update_settings=UPDATE,
        sampling=SamplingParams(1.0, (2,), "until_stop", 1, 12, rollout_units=2), kl_estimator="k1", forward_prompts=2,
        estimate_advantages=partial(gae_advantages, gamma=0.98, gae_lambda=0.9, whiten_rewards=True))
    rows = [trainer.step(PROMPTS, lambda purpose, i=i: torch.Generator().manual_seed(i), critic_only=i == 0)[0]
            for i in range(3)]
    return {"rows": rows, "state": trainer.state()}, weights(policy)


def check_groups(method: PolicyGradientMethod) -> tuple[dict, dict]:
    """Train three iterations with two responses to each prompt; four processes do not have whole groups each.

    A critic, where the method has one, is a model of its own.
    """
    policy = make_policy(own_critic=method.value_model == "model")
    policy.share_prompts = True
    scorer = Scorer(tiny_models.classifier(1), "fp32", share_prompts=True)
    trained = policy.trainable_parameters().values() if method.value_model else policy.policy_parameters()
    trainer = PolicyGradientTrainer(
        policy=policy, optimizer=torch.optim.Adam(list(trained), lr=3e-3), kl_in=method.kl_in,
        reward_shaper=RewardShaper([RewardFunction("model", 1.0, "ids", scorer, part="model")], None,
                                   shaping()),
        kl_controller=KlController(0.1, 1.0, 20),
        sampling=SamplingParams(1.0, (2,), "until_stop", 1, 12, rollout_units=2),
        update_settings=replace(UPDATE, minibatch_prompts=4, loss_mean="sequence",
                                value_coefficient=0.1 if method.value_model else 0.0),
        kl_estimator="k1", forward_prompts=4, estimate_advantages=method.estimate_advantages)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    rows = [trainer.step(prompts, lambda purpose, i=i: torch.Generator().manual_seed(i))[0] for i in range(3)]
    after = collect_rollout(policy, prompts, trainer.sampling, torch.Generator().manual_seed(9), 4)
    return {"rows": rows, "state": trainer.state(), "tokens": after.responses}, weights(policy)


def check_updates() -> dict:
    """Flags that are agreed: a limit that is reached, a gradient that is not finite, memory that does not suffice."""
    facts = {}
    for name, changes, poison in (("limited", {"update_kl_limit": 1e-9}, None), ("not finite", {}, 3)):
        policy = make_policy()
        rollout = Rollout(PROMPTS, [[50, 51, 2], [60, 61, 62, 2], [70], [2], [8, 9, 2]], [True] * 5)
        shape = torch.zeros(5, 4)
        mask = torch.arange(4) < torch.tensor([[len(response)] for response in rollout.responses])
        fields = dict.fromkeys(("logprobs", "ref_logprobs", "values", "returns"), shape) | {"mask": mask.float()}
        advantages = torch.ones(5, 4) * mask
        if poison is not None:
            advantages[poison] = float("nan")
        trajectory = Trajectory(**fields | {"logprobs": -5.5 * mask}, prompts=rollout.prompts,
                                responses=rollout.responses, advantages=advantages)
        optimizer = torch.optim.SGD(policy.trainable_parameters().values(), lr=1e-3)
        settings = replace(UPDATE, max_ratio=1e9, **changes)
        statistics = update_policy(policy, optimizer, trajectory, settings, torch.Generator().manual_seed(0))
        facts[name] = [statistics["minibatches"], statistics["skipped"]]

    def call(size: int) -> int:
        if size > 2 and group.rank() == group.world_size() - 1:
            raise torch.OutOfMemoryError("out of memory, on purpose")
        return size

    flags = [group.rank() == 0, False, group.rank() == group.world_size() - 1]
    return facts | {"memory": retry_with_smaller_batches(call, 8), "flags": group.any_process_each(flags)}


def check_finetuning(out: Path, optimizer: str, dropout: float = 0.0) -> tuple[dict, dict]:
    """Train on blocks; dropout: of an adapter, whose masks are those of one process."""
    model = tiny_models.llama(tiny_models.tokenizer())
    if dropout:
        torch.manual_seed(0)
        model = lora.add_lora(model, r=4, alpha=8, dropout=dropout, target_modules=(), precision="fp32")
    use_packed_attention(model)
    return {"history": train_on_blocks(model, out, replace(TRAINING, optimizer=optimizer))}, weights(model)


def check_muon(out: Path) -> tuple[dict, dict]:
    """Train on blocks with Muon; and step with given gradients: of these steps the state is compared, too."""
    facts, tensors = check_finetuning(out, "muon")
    model = tiny_models.llama(tiny_models.tokenizer())
    optimizer = MuonWithAdamW(model, learning_rate=0.01, weight_decay=0.1)
    torch.manual_seed(0)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    states = optimizer.state_dict()["state"]
    return facts, tensors | {f"state.{number}.{name}": value for number, state in states.items()
                             for name, value in state.items()} | weights(model)


def train_on_blocks(model, out: Path, settings: TrainerSettings) -> list[dict]:
    numbers = np.random.default_rng(0)
    lengths = numbers.integers(3, 20, 22)  # the last step is ragged
    rows = [PackedRow(numbers.integers(3, 100, length), np.arange(length) > 2) for length in lengths]
    blocks = [rows[2 * i: 2 * i + 2] for i in range(11)]
    out.mkdir(parents=True, exist_ok=True)
    return train(model, blocks, collate_blocks, lambda content: summed_lm_loss(model, content, "fp32"), settings, out,
                 "test")


def check_reward(out: Path) -> tuple[dict, dict]:
    model = tiny_models.classifier(0)
    examples = [Example(("tiny", i), [3 + i, 40, 50], [[60 + i, 70, 2], [80, 90 + i, 5, 2], [9, 2]][: 2 + i % 2],
                        [(0, 1), (0, 2)][: 1 + i % 2], [1] * (1 + i % 2)) for i in range(11)]
    out.mkdir(parents=True)
    loss = take_settings(PairwiseLoss, Reward())
    history = train(model, examples, collate_examples,
                    lambda items: loss.summed_loss(model, items, Scoring(), "fp32"), TRAINING, out, "test")
    return {"history": history}, weights(model)


def check_dpo(out: Path) -> tuple[dict, dict]:
    """Compute the reference and train; the loss is that of all rows of a step, and so is the validation."""
    model = tiny_models.llama(tiny_models.tokenizer())
    use_packed_attention(model)
    examples = [Example(("tiny", i), [3 + i, 40, 50], [[60 + i, 70, 2], [80, 90 + i, 5, 2], [9, 2]][: 2 + i % 2],
                        [(0, 1), (0, 2)][: 1 + i % 2], [1] * (1 + i % 2)) for i in range(11)]
    out.mkdir(parents=True)
    rows = compute_reference(model, examples, "fp32", out / "reference.parquet", "test")
    loss = take_settings(PreferenceLoss, Dpo())
    report = check_start(model, rows, loss, "fp32")
    history = train(model, rows, collate_rows, lambda items: loss.summed_loss(model, items, "fp32"), TRAINING, out,
                    "test")
    after = all_answer_logprobs(model.eval(), examples, "fp32").tolist()
    return {"history": history, "start": report["loss"], "reference": [row.ref_logprobs for row in rows],
            "after": after}, weights(model)


def check_ilql(out: Path) -> tuple[dict, dict]:
    """Train adapter and heads; the targets are part of the weights that are compared."""
    torch.manual_seed(0)
    causal = lora.add_lora(tiny_models.llama(tiny_models.tokenizer()), r=4, alpha=8, dropout=0.0, target_modules=(),
                           precision="fp32")
    learner = ILQLModel(causal, "fp32")
    rows = [ScoredAnswer([3 + i, 40, 50], [60 + i, *range(80, 80 + i % 4), 2], i % 3 - 1.0) for i in range(11)]
    settings = LossSettings(gamma=0.9, tau=0.7, cql_scale=0.1, awac_scale=1.0, awac_beta=0.5)
    out.mkdir(parents=True)
    history = train(learner, rows, collate_answers,
                    lambda batch: total_loss(token_losses(learner(batch), settings), settings).sum(), TRAINING, out,
                    "test", after_step=lambda step: learner.heads.synchronise_targets(0.3))
    return {"history": history, "validation": measure_answers(learner, rows, settings, 2)}, learner.state_dict()


def run_checks(own: Path) -> tuple[dict, dict]:
    """Return facts and tensors by name."""
    facts, tensors = {"sampling": check_sampling(), "updates": check_updates()}, {}
    trainings = {"ppo": check_ppo,
                 "critic": partial(check_ppo, own_critic=True),
                 "ppo groups": partial(check_groups, ppo.make_method(
                     Ppo(responses_per_prompt=2, value_model="model", precision="fp32"))),
                 "rloo": partial(check_groups, rloo.make_method(Rloo(responses_per_prompt=2))),
                 "grpo": partial(check_groups, grpo.make_method(Grpo(responses_per_prompt=2))),
                 "sft": partial(check_finetuning, own / "sft", "adamw"),
                 "dropout": partial(check_finetuning, own / "dropout", "adamw", dropout=0.5),
                 "muon": partial(check_muon, own / "muon"),
                 "reward": partial(check_reward, own / "reward"),
                 "dpo": partial(check_dpo, own / "dpo"),
                 "ilql": partial(check_ilql, own / "ilql")}
    for name in OF_MOST if group.world_size() == MOST_PROCESSES else trainings:
        facts[name], trained = trainings[name]()
        tensors |= {f"{name}.{key}": tensor for key, tensor in trained.items()}
    return facts, tensors


if __name__ == "__main__":
    sys.exit(run_in_ranks(run_checks, sys.argv[1:]))
