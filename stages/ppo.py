"""Train the SFT model with PPO against the reward model, with a KL penalty to the SFT model.

    python -m stages.ppo --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --reward results/demo/reward-merged --pairs results/demo/pairs --out results/demo/ppo

The algorithm is in rl/ppo_trainer.py, its outer loop in rl/training_loop.py. The artifact is the policy with the best
score on held-out prompts. A resumed run equals the uninterrupted one bit for bit.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from stages.evaluation.reward_model_check import report_shortfalls
from stages.generation.sampling_params import SamplingParams
from stages.modeling import families, torch_setup
from stages.modeling.load import check_whole_model
from stages.modeling.plain_load import check_trained_model, plain_outputs
from stages.modeling.tokenizer import load_shared_tokenizer, load_tokenizer
from stages.recipe.recipe import select_settings
from stages.recipe.sections.ppo import Ppo
from stages.reporting.card_metadata import complete_adapter_cards
from stages.reward_modeling.scorer import Scorer
from stages.rewards import checked_models
from stages.rewards.kl import KlController
from stages.rewards.shaping import RewardShaper, ShapingSettings
from stages.rewards.sources import RewardFunction, load_reward_functions
from stages.rl.advantages import gae_advantages
from stages.rl.checks.memory_plan import classifier_models, longest_rollout, plan_memory
from stages.rl.checks.startup import StartupReport, run_checks
from stages.rl.collect_rollouts import collect_rollout
from stages.rl.early_stopping import StopRules
from stages.rl.load import load_policy, load_scorers
from stages.rl.policy import Policy
from stages.rl.ppo_trainer import PPOTrainer, UpdateSettings
from stages.rl.training_loop import LoopSettings, TrainingLoop
from stages.runs.origin import find_origin
from stages.runtime.artifact import RunContext
from stages.runtime.files import write_json
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import read_best_rows
from stages.stackexchange.prompt import prompt_ids
from stages.training import checkpoint, optimizers
from stages.training.disk_plan import check_training_space
from stages.training.loggers import open_logger

STARTUP = "startup.json"


def run(config: Ppo, out: Path, *, policy: Path, reward: Path, pairs: Path, context: RunContext | None = None
        ) -> dict[str, float | str]:
    """Train the policy and fill `out` with it (a PEFT adapter or a whole model), value_head.safetensors, the tokenizer,
    startup.json, and the series history, timing and samples .jsonl; return the metrics of the manifest.

    reward: the merged reward model, or its adapter, which then shares the policy's base.
    """
    check_whole_model(policy)
    shortfalls = check_reward_models(config, reward)
    torch_setup.prepare()
    with open_logger(config.log_to, out, "ppo", context, asdict(config), step_name="iteration") as logger:
        tokenizer = load_tokenizer(policy)
        prompts, validation_prompts, too_long = load_prompts(config, tokenizer, pairs)
        trainer, reward_functions = build_trainer(config, tokenizer, policy, reward, pairs)
        check_training_space(
            out, trainer.policy.trainable_parameters().values(), optimizer=config.optimizer,
            saves=config.iterations // config.save_every_iterations, keep_checkpoints=config.keep_checkpoints,
            keeps_best=True, checkpoints=out)
        loop = TrainingLoop(
            trainer, LoopSettings(**select_settings(LoopSettings, config)),
            StopRules(**select_settings(StopRules, config)), prompts=prompts, validation_prompts=validation_prompts,
            tokenizer=tokenizer, logger=logger, out=out, say=_say)
        if not loop.resume():
            report = check_startup(config, loop, tokenizer, reward_functions)
            write_json(out / STARTUP, asdict(report))
        loop.train()
    trainer.policy.save(out, tokenizer)
    complete_adapter_cards(out, find_origin(policy, pairs))
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


def check_reward_models(config: Ppo, reward: Path) -> list[str]:
    """Describe what the reward models do not beat on their held-out pairs; ValueError if it is what is required."""
    measured = checked_models.load_held_out_accuracies([entry.source for entry in config.rewards], reward)
    return report_shortfalls(measured, config.require_reward, _say)


def load_prompts(config: Ppo, tokenizer, pairs: Path) -> tuple[list[list[int]], list[list[int]], int]:
    """Load the questions of the rl split, each once, as training and validation prompts; count the too long ones."""
    prompts = [prompt_ids(tokenizer, row["question"]) for row in read_best_rows(pairs, "rl")]
    fitting = [prompt for prompt in prompts if len(prompt) <= config.max_prompt_tokens]
    too_long = len(prompts) - len(fitting)
    validation = min(config.validation_prompts, len(fitting) // 4)  # a small site trains on most of its prompts
    if not validation:
        raise ValueError(f"{pairs} has {len(fitting)} prompts of at most {config.max_prompt_tokens} tokens in its rl "
                         f"split ({too_long} are longer): ppo needs at least 4")
    order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(config.seed)).tolist()
    shuffled = [fitting[i] for i in order]
    return shuffled[validation:], shuffled[:validation], too_long


def build_trainer(
    config: Ppo, tokenizer, policy: Path, reward: Path, pairs: Path
) -> tuple[PPOTrainer, list[RewardFunction]]:
    """Load the models and build the trainer; raise ValueError if a model has too few positions for the texts."""
    plain = plain_outputs(policy, config.precision)
    torch.manual_seed(config.seed)
    learner = load_policy(
        policy, reward, tune=config.tune, value_model=config.value_model, lora=asdict(config.lora),
        precision=config.precision, temperature=config.temperature,
        gradient_checkpointing=config.gradient_checkpointing, compiled=config.compile,
        cpu_kernels=config.cpu_kernels)
    if config.sharding == "fsdp":
        learner.shard()
    _say(f"check  {check_trained_model(learner.model, plain)}")
    families.check_length(learner.causal_model.config, config.max_prompt_tokens + config.max_response_tokens)
    reward_functions = [
        function for entry in config.rewards for function in load_reward_functions(
            **asdict(entry), precision=config.precision, pairs=pairs,
            load_models=partial(load_checked_models, config, reward, learner, policy))]
    stop_ids = (tokenizer.eos_token_id,) if config.stop_ids is None else config.stop_ids
    return PPOTrainer(
        policy=learner,
        reward_shaper=RewardShaper(
            reward_functions, tokenizer, ShapingSettings(**select_settings(ShapingSettings, config))),
        optimizer=optimizers.build_optimizer(
            config.optimizer, parameter_groups(config, learner), learning_rate=config.learning_rate,
            epsilon=config.adam_epsilon, weight_decay=config.weight_decay),
        kl_controller=KlController(config.kl_coefficient, config.kl_target_nats, config.kl_horizon_responses),
        sampling=replace(SamplingParams(**select_settings(SamplingParams, config)), stop_ids=stop_ids),
        estimate_advantages=partial(
            gae_advantages, gamma=config.gamma, gae_lambda=config.gae_lambda, variance=config.advantage_variance,
            whiten_rewards=config.whiten_rewards),
        update_settings=UpdateSettings(**select_settings(UpdateSettings, config)),
        kl_estimator=config.kl_estimator,
        forward_prompts=config.forward_prompts,
    ), reward_functions


def parameter_groups(config: Ppo, policy: Policy) -> list:
    """Return the trained parameters for the optimizer; those of a separate critic are a group of their own."""
    if config.value_model == "head" and config.critic_learning_rate is None:
        return list(policy.trainable_parameters().values())
    ratio = 1.0 if config.critic_learning_rate is None else config.critic_learning_rate / config.learning_rate
    return [{"params": policy.policy_parameters()},
            {"params": policy.critic_parameters(), "learning_rate_ratio": ratio}]


def load_checked_models(config: Ppo, reward: Path, policy: Policy, policy_folder: Path, source: str) -> list[Scorer]:
    """Load the reward models of a source, and check that they score as they did in training."""
    artifact = checked_models.reward_artifact(source, reward)
    load_shared_tokenizer(policy_folder, artifact)
    return checked_models.check_scorers(
        load_scorers(artifact, policy, policy_folder, config.forward_prompts, config.cpu_kernels), artifact,
        longest_tokens=config.max_prompt_tokens + config.max_response_tokens, sharded=config.sharding == "fsdp",
        min_correlation=config.min_reward_correlation, say=_say)


def check_startup(config: Ppo, loop: TrainingLoop, tokenizer, reward_functions: list[RewardFunction]) -> StartupReport:
    """Before the first update, print the plan and the memory it needs, and check that the parts fit together."""
    c, trainer, prompts = config, loop.trainer, loop.prompts
    minibatches = c.rollout_prompts // c.minibatch_prompts
    _say(
        f"{len(prompts)} prompts; {c.iterations} iterations x {c.rollout_prompts} prompts x {c.epochs} epochs"
        f" x {minibatches} minibatches of {c.minibatch_prompts} = {c.iterations * c.epochs * minibatches} optimiser"
        f" steps; {c.minibatch_prompts // c.microbatch_prompts} microbatches of {c.microbatch_prompts} each"
    )
    longest = longest_rollout(prompts, c.rollout_prompts)
    for line in plan_memory(trainer, c.optimizer, longest, reward_functions):
        _say(line)
    rollout = collect_rollout(trainer.policy, loop.next_prompts()[: c.microbatch_prompts], trainer.sampling,
                              loop.generator("startup"), c.microbatch_prompts)
    report = run_checks(trainer.policy, rollout, tokenizer, classifier_models(reward_functions, tokenizer),
                        clip_range=c.clip_range, microbatch_prompts=c.microbatch_prompts, say=_say)
    trainer.reuse_rollout_logprobs = report.keep_rollout_log_p
    return report


def _say(text: str) -> None:
    print_line(f"ppo: {text}")
