"""Train a policy by a policy gradient method: what the programs ppo, rloo and grpo share.

A program adds its `Algorithm`: the advantage estimator, whether there is a critic, and where the KL penalty is.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from stages.artifacts.artifact import RunContext
from stages.artifacts.origin import find_origin
from stages.evaluation.reward_model_check import check_reward_models
from stages.generation.sampling_params import SamplingParams
from stages.modeling import families, torch_setup
from stages.modeling.compatible_files import save_chat_template
from stages.modeling.load import check_whole_model
from stages.modeling.plain_load import check_trained_model, plain_outputs
from stages.modeling.tokenizer import load_shared_tokenizer, load_tokenizer
from stages.recipe.sections.policy_gradient import PolicyGradient
from stages.recipe.selection import select_settings
from stages.reporting.card_metadata import complete_adapter_cards
from stages.reward_modeling.scorer import Scorer
from stages.rewards import checked_models
from stages.rewards.kl import KlController
from stages.rewards.shaping import RewardShaper, ShapingSettings
from stages.rewards.sources import RewardFunction, load_reward_functions
from stages.rl.advantages import AdvantageEstimator
from stages.rl.checks.memory_plan import classifier_models, longest_rollout, plan_memory
from stages.rl.checks.startup import StartupReport, run_checks
from stages.rl.collect_rollouts import collect_rollout
from stages.rl.early_stopping import StopRules
from stages.rl.load import load_policy, load_scorers
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer, UpdateSettings
from stages.rl.prompts import load_prompts
from stages.rl.sources import Sources, check_sources
from stages.rl.training_loop import LoopSettings, TrainingLoop
from stages.runtime.files import write_json
from stages.runtime.stage_lines import print_line
from stages.training import checkpoint, optimizers
from stages.training.disk_plan import check_training_space, checkpoint_interval
from stages.training.loggers import open_logger

STARTUP = "startup.json"


@dataclass(frozen=True)
class Algorithm:
    """What distinguishes a policy gradient method.

    name: of its program. value_model: as in the recipe's section `ppo`; None: no critic. responses_per_prompt: rows of
    a rollout that belong to one prompt.
    """

    name: str
    estimate_advantages: AdvantageEstimator
    value_model: Literal["head", "adapter", "model"] | None = None
    critic_learning_rate: float | None = None
    kl_in: Literal["reward", "loss"] = "reward"
    kl_estimator: str = "k1"
    responses_per_prompt: int = 1

    def say(self, text: str) -> None:
        """Print a line of this program."""
        print_line(f"{self.name}: {text}")


def train_policy(
    config: PolicyGradient, out: Path, algorithm: Algorithm, sources: Sources, context: RunContext | None
) -> dict[str, float | str]:
    """Train the policy and fill `out` with it (a PEFT adapter or a whole model), the critic's files if there is one,
    the tokenizer, startup.json, and the series history, timing and samples .jsonl; return the manifest's metrics.
    """
    check_whole_model(sources.policy)
    check_sources(config, algorithm.value_model, sources)
    measured = checked_models.load_held_out_accuracies([entry.source for entry in config.rewards], sources.reward)
    shortfalls = check_reward_models(measured, config.require_reward, algorithm.say, algorithm.name)
    torch_setup.prepare()
    with open_logger(config.log_to, out, algorithm.name, context, asdict(config), step_name="iteration") as logger:
        tokenizer = load_tokenizer(sources.policy)
        own_template = tokenizer.chat_template
        prompts, validation_prompts, too_long = load_prompts(
            config, tokenizer, sources.pairs, algorithm.name, own=sources.prompts)
        trainer, reward_functions = build_trainer(config, algorithm, tokenizer, sources)
        check_training_space(
            out, trainer.policy.trainable_parameters().values(), optimizer=config.optimizer,
            saves=config.iterations // checkpoint_interval(config.save_every_iterations, config.save_every_minutes),
            keep_checkpoints=config.keep_checkpoints,
            keeps_best=True, checkpoints=out)
        settings = LoopSettings(**select_settings(LoopSettings, config))
        loop = TrainingLoop(
            trainer, settings, StopRules(**select_settings(StopRules, config)), prompts=prompts,
            validation_prompts=validation_prompts, tokenizer=tokenizer, logger=logger, out=out, name=algorithm.name)
        if not loop.resume():
            report = check_startup(config, algorithm, loop, tokenizer, reward_functions)
            write_json(out / STARTUP, asdict(report))
        loop.train()
    trainer.policy.save(out, tokenizer)
    if config.prompt_template != "question":
        save_chat_template(tokenizer, out, own_template)
    complete_adapter_cards(out, find_origin(sources.policy, sources.pairs))
    checkpoint.delete_checkpoints(out)
    return {
        "best_iteration": loop.best["iteration"],
        "iterations": loop.iteration,
        "stopped_early": bool(loop.stopping.reason),
        "validation_reward": loop.best["reward"],
        "validation_kl": loop.best["kl"],
        "prompts": len(prompts),
        "prompts_over_length": too_long,
        **({"reward_model_shortfall": "; ".join(shortfalls)} if shortfalls else {}),
    }


def build_trainer(
    config: PolicyGradient, algorithm: Algorithm, tokenizer, sources: Sources
) -> tuple[PolicyGradientTrainer, list[RewardFunction]]:
    """Load the models and build the trainer; raise ValueError if a model has too few positions for the texts."""
    plain = plain_outputs(sources.policy, config.precision)
    torch.manual_seed(config.seed)
    policy = load_policy(
        sources.policy, sources.reward, tune=config.tune, value_model=algorithm.value_model, lora=asdict(config.lora),
        precision=config.precision, temperature=config.temperature,
        gradient_checkpointing=config.gradient_checkpointing, compiled=config.compile,
        cpu_kernels=config.cpu_kernels, share_prompts=algorithm.responses_per_prompt > 1)
    if config.sharding == "fsdp":
        policy.shard()
    algorithm.say(f"check  {check_trained_model(policy.model, plain)}")
    families.check_length(policy.causal_model.config, config.max_prompt_tokens + config.max_response_tokens)
    reward_functions = [
        function for entry in config.rewards for function in load_reward_functions(
            **asdict(entry), precision=config.precision, pairs=sources.pairs,
            load_models=partial(load_checked_models, config, algorithm, policy, sources))]
    stop_ids = (tokenizer.eos_token_id,) if config.stop_ids is None else config.stop_ids
    return PolicyGradientTrainer(
        policy=policy,
        reward_shaper=RewardShaper(
            reward_functions, tokenizer, ShapingSettings(**select_settings(ShapingSettings, config))),
        optimizer=optimizers.build_optimizer(
            config.optimizer, parameter_groups(config, algorithm, policy), learning_rate=config.learning_rate,
            epsilon=config.adam_epsilon, weight_decay=config.weight_decay),
        kl_controller=KlController(config.kl_coefficient, config.kl_target_nats, config.kl_horizon_responses),
        sampling=replace(SamplingParams(**select_settings(SamplingParams, config)), stop_ids=stop_ids),
        estimate_advantages=algorithm.estimate_advantages,
        update_settings=update_settings(config, algorithm),
        kl_estimator=algorithm.kl_estimator,
        forward_prompts=config.forward_prompts * algorithm.responses_per_prompt,
        kl_in=algorithm.kl_in,
    ), reward_functions


def update_settings(config: PolicyGradient, algorithm: Algorithm) -> UpdateSettings:
    """Take the update's settings from the section; its sizes in prompts become rows."""
    settings = UpdateSettings(**select_settings(UpdateSettings, config))
    return replace(settings, minibatch_prompts=settings.minibatch_prompts * algorithm.responses_per_prompt,
                   microbatch_prompts=settings.microbatch_prompts * algorithm.responses_per_prompt)


def parameter_groups(config: PolicyGradient, algorithm: Algorithm, policy: Policy) -> list:
    """Return the trained parameters for the optimizer; those of a separate critic are a group of their own."""
    rate = algorithm.critic_learning_rate
    if algorithm.value_model in (None, "head") and rate is None:
        return list(policy.trainable_parameters().values())
    ratio = 1.0 if rate is None else rate / config.learning_rate
    return [{"params": policy.policy_parameters()},
            {"params": policy.critic_parameters(), "learning_rate_ratio": ratio}]


def load_checked_models(
    config: PolicyGradient, algorithm: Algorithm, policy: Policy, sources: Sources, source: str
) -> list[Scorer]:
    """Load the reward models of a source, and check that they score as they did in training.

    With score_length false, what their scores give for length is left out after the check.
    """
    artifact = checked_models.reward_artifact(source, sources.reward)
    load_shared_tokenizer(sources.policy, artifact)
    scorers = checked_models.check_scorers(
        load_scorers(artifact, policy, sources.policy, config.forward_prompts, config.cpu_kernels), artifact,
        longest_tokens=config.max_prompt_tokens + config.max_response_tokens, sharded=config.sharding == "fsdp",
        min_correlation=config.min_reward_correlation, say=algorithm.say)
    if not config.score_length:
        for scorer in scorers:
            scorer.scoring = replace(scorer.scoring, length_weight=0.0)
    return scorers


def check_startup(
    config: PolicyGradient, algorithm: Algorithm, loop: TrainingLoop, tokenizer,
    reward_functions: list[RewardFunction],
) -> StartupReport:
    """Before the first update, print the plan and the memory it needs, and check that the parts fit together."""
    trainer, rows = loop.trainer, config.rollout_prompts * algorithm.responses_per_prompt
    algorithm.say(describe_plan(config, algorithm, len(loop.prompts)))
    longest = longest_rollout(loop.prompts, rows)
    for line in plan_memory(trainer, config.optimizer, longest, reward_functions):
        algorithm.say(line)
    microbatch = config.microbatch_prompts * algorithm.responses_per_prompt
    rollout = collect_rollout(trainer.policy, loop.next_prompts()[:microbatch], trainer.sampling,
                              loop.generator("startup"), microbatch)
    report = run_checks(trainer.policy, rollout, tokenizer, classifier_models(reward_functions, tokenizer),
                        clip_range=config.clip_range, microbatch_prompts=microbatch, say=algorithm.say)
    trainer.reuse_rollout_logprobs = report.keep_rollout_log_p
    return report


def describe_plan(config: PolicyGradient, algorithm: Algorithm, prompts: int) -> str:
    """Describe in a line how many prompts, responses and optimizer steps the run has."""
    minibatches = config.rollout_prompts // config.minibatch_prompts
    responses = f" x {algorithm.responses_per_prompt} responses" if algorithm.responses_per_prompt > 1 else ""
    return (f"{prompts} prompts; {config.iterations} iterations x {config.rollout_prompts} prompts{responses} x "
            f"{config.epochs} epochs x {minibatches} minibatches of {config.minibatch_prompts} = "
            f"{config.iterations * config.epochs * minibatches} optimiser steps; "
            f"{config.minibatch_prompts // config.microbatch_prompts} microbatches of {config.microbatch_prompts} each")
