"""Before the first iteration: the worst-case shapes once, so that memory runs out now or not at all."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from stages.generation.rollout import Rollout
from stages.generation.sampler import sample
from stages.modeling.packed.token_logprobs import chunk_tokens
from stages.reward_modeling.ensemble import Ensemble
from stages.reward_modeling.scorer import Scorer
from stages.rl.ppo_trainer import PPOTrainer
from stages.rl.ppo_update import backward_with_oom_retry
from stages.rl.rewards.classifier import PublishedScorer
from stages.rl.rewards.sources import RewardFunction
from stages.rl.trajectory import build_trajectory
from stages.training import memory, optimizers


def memory_plan(
    engine: PPOTrainer, optimizer_name: str, longest: list[list[int]], scorers: Mapping[str, object]
) -> list[str]:
    """Lines of the memory plan; every phase has run once on the longest prompts with responses of full length.

    No weight moves. Microbatches that do not fit are made smaller, for the run that follows as well.
    """
    policy, response = engine.policy, engine.sampling.max_response_tokens
    rollout = Rollout(longest, [[0] * response for _ in longest], [True] * len(longest))
    full = [prompt + [0] * (response - 1) for prompt in longest]

    made = []

    def forward():
        engine.rewards(rollout, update_statistics=False)
        made.append(build_trajectory(policy, rollout, torch.zeros(len(longest)), 0.0, engine.update))

    def update():
        rows = torch.arange(engine.update.minibatch_prompts)
        _, size = backward_with_oom_retry(policy, engine.optimizer, made[0], rows, engine.update)
        engine.update = replace(engine.update, microbatch_prompts=size)

    with optimizers.without_steps(engine.optimizer):
        costs = memory.dry_run({
            "rollout": lambda: sample(policy.model, full, max_new_tokens=1, temperature=1.0, stop_ids=(),
                                      generator=torch.Generator(), precision=policy.precision),
            "forward": forward,
            "update": update,
        })
    engine.optimizer.zero_grad(set_to_none=True)
    base = policy.causal
    head, dtype = base.get_output_embeddings(), next(base.parameters()).dtype
    trained = list(policy.trained().values())
    models = {key: model for name, scorer in scorers.items() for key, model in _models_of(name, scorer).items()}
    rows = memory.plan(
        policy,
        models,
        optimizer=optimizer_name,
        optimizer_bytes=optimizers.state_bytes(optimizer_name, trained),
        in_backward=isinstance(engine.optimizer, optimizers.InBackward),
        costs=costs,
        largest={
            "keys and values": memory.kv_cache_bytes(base.config, len(full), max(map(len, full)) + 1, dtype),
            "logits at once": 4 * chunk_tokens(head, policy.model.device) * head.out_features,
        },
    )
    return ["memory plan, at the longest prompts", *memory.table(rows)]


def classifiers(sources: Sequence[RewardFunction], tokenizer) -> dict[str, tuple]:
    """Name to (tokenizer, model) of the sources that are sequence classifiers."""
    return {name: (getattr(source.score, "tokenizer", tokenizer), model)
            for source in sources for name, model in _models_of(source.name, source.score).items()}


def _models_of(name: str, scorer: object) -> dict:
    """Name to model, of every model in a source's scorer; none in one that is a function."""
    if isinstance(scorer, Ensemble):
        return {f"{name} {number}": member.model for number, member in enumerate(scorer.scorers)}
    return {name: scorer.model} if isinstance(scorer, Scorer | PublishedScorer) else {}
