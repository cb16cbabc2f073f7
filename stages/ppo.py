"""Train the SFT model with PPO against the reward model, with a KL penalty to the SFT model.

    python -m stages.ppo --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --reward results/demo/reward-merged --pairs results/demo/pairs --out results/demo/ppo

The algorithm is in rl/policy_gradient_trainer.py, its outer loop in rl/training_loop.py. The artifact is the policy
with the best score on held-out prompts. A resumed run equals the uninterrupted one bit for bit.

`train_policy` builds the parts from the settings and trains; the programs rloo and grpo call it with another
`PolicyGradientMethod`.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from stages.artifacts.artifact import RunContext, read_manifest
from stages.cards.adapter_card import write_adapter_cards
from stages.evaluation.reward_model_check import check_reward_models
from stages.generation.prompts import draw_prompts, split_prompts
from stages.modeling import families, torch_setup
from stages.modeling.compatible_files import save_chat_template
from stages.modeling.final_norm import check_divisible
from stages.modeling.load import check_whole_model
from stages.modeling.pretrained import check_causal
from stages.modeling.tokenizer import load_shared_tokenizer, load_tokenizer
from stages.modeling.trainable import check_trained_model, plain_outputs
from stages.recipe.recipe import select_settings
from stages.recipe.sections.policy_gradient import PolicyGradient
from stages.recipe.sections.ppo import Ppo
from stages.reward_modeling.scorer import Scorer
from stages.rewards import checked_models
from stages.rewards.kl import KlController
from stages.rewards.reward_functions import RewardFunction, load_reward_functions
from stages.rewards.shaping import RewardShaper, ShapingSettings
from stages.rl.advantages import AdvantageEstimator, gae_advantages
from stages.rl.checks.memory_plan import classifier_models, longest_rollout, plan_memory
from stages.rl.checks.startup import StartupReport, run_checks
from stages.rl.collect_rollouts import SamplingParams, collect_rollout
from stages.rl.early_stopping import StopRules
from stages.rl.inputs import Inputs, check_inputs, load_policy, load_scorers
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer, UpdateSettings
from stages.rl.training_loop import LoopSettings, TrainingLoop
from stages.runtime.files import write_json
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import read_best_rows
from stages.stackexchange.prompt_file import hold_out_prompts, read_own_prompts
from stages.training import checkpoint, optimizers
from stages.training.checkpoint_plan import check_training_space, checkpoint_interval
from stages.training.loggers import open_logger

STARTUP = "startup.json"
MIN_KL_NATS = 0.1  # of a policy that moved at all
OF_OWN_PROMPTS = ("prompt_column", "prompt_template", "evaluation_prompts")


@dataclass(frozen=True)
class PolicyGradientMethod:
    """What distinguishes a policy gradient method.

    name: of its program. value_model: as in the recipe's section `ppo`; None: no critic.
    """

    name: str
    estimate_advantages: AdvantageEstimator
    value_model: Literal["head", "adapter", "model"] | None = None
    critic_learning_rate: float | None = None
    kl_in: Literal["reward", "loss"] = "reward"
    kl_estimator: str = "k1"

    def say(self, text: str) -> None:
        """Print a line of this program."""
        print_line(f"{self.name}: {text}")


def run(config: Ppo, out: Path, *, policy: Path, reward: Path | None = None, pairs: Path | None = None,
        prompts: Path | None = None, match: Path | None = None, context: RunContext | None = None
        ) -> dict[str, float | str]:
    """Train the policy and its critic and fill `out`; return the metrics of the manifest. See `train_policy`.

    reward: the merged reward model, or its adapter, which then shares the policy's base; None: the rewards name none.
    pairs: their rl split has the questions. prompts: a file or folder of your own, in place of pairs. match: a finished
    training; its policy's KL on held-out prompts takes the place of max_kl_nats.
    """
    config = config if match is None else replace(config, max_kl_nats=read_kl_limit(match))
    return train_policy(config, out, make_method(config), Inputs(policy, reward, pairs, prompts), context)


def read_kl_limit(trained: Path) -> float:
    """Return the KL of a trained policy on held-out prompts, nats per response, and at least MIN_KL_NATS."""
    kl_nats = read_manifest(trained)["metrics"].get("validation_kl")
    if kl_nats is None:
        raise ValueError(f"--match {trained} has no validation_kl in its manifest: give a finished training of PPO")
    return max(kl_nats, MIN_KL_NATS)


def make_method(config: Ppo) -> PolicyGradientMethod:
    """Return PPO with the settings of its section: GAE from a critic, the KL penalty in the reward."""
    return PolicyGradientMethod(
        "ppo",
        partial(gae_advantages, gamma=config.gamma, gae_lambda=config.gae_lambda,
                critic_gae_lambda=config.critic_gae_lambda, variance=config.advantage_variance,
                whiten_rewards=config.whiten_rewards),
        value_model=config.value_model, critic_learning_rate=config.critic_learning_rate,
        kl_estimator=config.kl_estimator)


def train_policy(
    config: PolicyGradient, out: Path, method: PolicyGradientMethod, inputs: Inputs, context: RunContext | None
) -> dict[str, float | str]:
    """Train the policy and fill `out` with it (a PEFT adapter or a whole model), the critic's files if there is one,
    the tokenizer, startup.json, final_temperatures.json, and the series history, timing and samples .jsonl; return the
    manifest's metrics.
    """
    check_whole_model(inputs.policy)
    check_given(config, method.value_model, inputs)
    measured = checked_models.load_held_out_accuracies([entry.source for entry in config.rewards], inputs.reward)
    shortfalls = check_reward_models(measured, config.require_reward, method.say, method.name)
    torch_setup.prepare()
    with open_logger(config.log_to, out, method.name, context, asdict(config), step_name="iteration") as logger:
        tokenizer = load_tokenizer(inputs.policy)
        own_template = tokenizer.chat_template
        prompts, validation_prompts, too_long = load_training_prompts(config, tokenizer, inputs, method.name)
        trainer, reward_functions = build_trainer(config, method, tokenizer, inputs)
        check_training_space(
            out, trainer.policy.trainable_parameters().values(), optimizer=config.optimizer,
            saves=config.iterations // checkpoint_interval(config.save_every_iterations, config.save_every_minutes),
            keeps_best=True, checkpoints=out)
        settings = LoopSettings(**select_settings(LoopSettings, config))
        loop = TrainingLoop(
            trainer, settings, StopRules(**select_settings(StopRules, config)), prompts=prompts,
            validation_prompts=validation_prompts, tokenizer=tokenizer, logger=logger, out=out, name=method.name)
        if not loop.resume():
            report = check_startup(config, method, loop, tokenizer, reward_functions)
            write_json(out / STARTUP, asdict(report))
        loop.train()
    trainer.policy.save(out, tokenizer)
    if config.prompt_template != "question":
        save_chat_template(tokenizer, out, own_template)
    write_adapter_cards(out, inputs.policy, inputs.pairs)
    checkpoint.delete_checkpoints(out)
    return {
        "best_iteration": loop.best["iteration"],
        "final_temperature": trainer.policy.final_temperature,
        "iterations": loop.iteration,
        "stopped_early": bool(loop.stopping.reason),
        "validation_reward": loop.best["reward"],
        "validation_kl": loop.best["kl"],
        "prompts": len(prompts),
        "prompts_over_length": too_long,
        **({"reward_model_shortfall": "; ".join(shortfalls)} if shortfalls else {}),
    }


def check_given(config: PolicyGradient, value_model: str | None, inputs: Inputs) -> None:
    """Raise ValueError, in one line, for inputs that do not fit the settings; value_model: of the method."""
    check_inputs(inputs, [entry.source for entry in config.rewards], value_model, config.prompt_template)
    if inputs.prompts is not None:
        check_causal(inputs.policy)
    elif any(getattr(config, name) != getattr(PolicyGradient, name) for name in OF_OWN_PROMPTS):
        raise ValueError(f"{', '.join(OF_OWN_PROMPTS)} are those of --prompts FILE, and have no effect with --pairs: "
                         f"leave them out")


def load_training_prompts(
    config: PolicyGradient, tokenizer, inputs: Inputs, stage: str
) -> tuple[list[list[int]], list[list[int]], int]:
    """Load the questions of the rl split, or the user's own prompts, as training and validation prompts, each once.

    Own prompts that are held out for the evaluation are neither. Returns also the number of prompts that are too long.
    """
    if inputs.prompts:
        own, held_out = hold_out_prompts(
            read_own_prompts(inputs.prompts, config.prompt_column), config.evaluation_prompts, config.seed)
        print_line(f"{stage}: {len(held_out)} of the {len(held_out) + len(own)} prompts are held out for the "
                   f"evaluation")
        rows, origin = [{"question": text} for text in own], str(inputs.prompts)
    else:
        rows, origin = read_best_rows(inputs.pairs, "rl"), f"the rl split of {inputs.pairs}"
    limit = config.max_prompt_tokens
    prompts = draw_prompts(
        rows, tokenizer, max_prompt_tokens=limit, seed=config.seed, template=config.prompt_template)
    training, validation = split_prompts(
        prompts, config.validation_prompts, max_prompt_tokens=limit, origin=origin, stage=stage)
    return training.ids, validation.ids, prompts.over_length


def build_trainer(
    config: PolicyGradient, method: PolicyGradientMethod, tokenizer, inputs: Inputs
) -> tuple[PolicyGradientTrainer, list[RewardFunction]]:
    """Load the models and build the trainer; raise ValueError if a model has too few positions for the texts."""
    plain = plain_outputs(inputs.policy, config.precision)
    torch.manual_seed(config.seed)
    policy = load_policy(
        inputs.policy, inputs.reward, tune=config.tune, value_model=method.value_model, lora=asdict(config.lora),
        precision=config.precision, temperature=config.temperature,
        gradient_checkpointing=config.gradient_checkpointing,
        cpu_kernels=config.cpu_kernels, share_prompts=config.responses_per_prompt > 1)
    if config.final_temperatures:
        check_divisible(policy.causal_model)
    if config.sharding == "fsdp":
        policy.shard()
    method.say(f"check  {check_trained_model(policy.model, plain)}")
    families.check_length(policy.causal_model.config, config.max_prompt_tokens + config.max_response_tokens)
    reward_functions = [
        function for entry in config.rewards for function in load_reward_functions(
            **asdict(entry), precision=config.precision, pairs=inputs.pairs,
            load_models=partial(load_checked_models, config, method, policy, inputs))]
    stop_ids = (tokenizer.eos_token_id,) if config.stop_ids is None else config.stop_ids
    return PolicyGradientTrainer(
        policy=policy,
        reward_shaper=RewardShaper(
            reward_functions, tokenizer, ShapingSettings(**select_settings(ShapingSettings, config))),
        optimizer=optimizers.build_optimizer(
            config.optimizer, parameter_groups(config, method, policy), learning_rate=config.learning_rate,
            epsilon=config.adam_epsilon, weight_decay=config.weight_decay),
        kl_controller=KlController(config.kl_coefficient, config.kl_target_nats, config.kl_horizon_responses),
        sampling=replace(SamplingParams(**select_settings(SamplingParams, config)), stop_ids=stop_ids),
        estimate_advantages=method.estimate_advantages,
        update_settings=update_settings(config),
        kl_estimator=method.kl_estimator,
        forward_prompts=config.forward_prompts * config.responses_per_prompt,
        kl_in=method.kl_in,
    ), reward_functions


def update_settings(config: PolicyGradient) -> UpdateSettings:
    """Take the update's settings from the section; its sizes in prompts become rows."""
    settings = UpdateSettings(**select_settings(UpdateSettings, config))
    return replace(settings, minibatch_prompts=settings.minibatch_prompts * config.responses_per_prompt,
                   microbatch_prompts=settings.microbatch_prompts * config.responses_per_prompt)


def parameter_groups(config: PolicyGradient, method: PolicyGradientMethod, policy: Policy) -> list:
    """Return the trained parameters for the optimizer; those of a separate critic are a group of their own."""
    rate = method.critic_learning_rate
    if method.value_model in (None, "head") and rate is None:
        return list(policy.trainable_parameters().values())
    return [{"params": policy.policy_parameters()},
            {"params": policy.critic_parameters(), "lr": config.learning_rate if rate is None else rate}]


def load_checked_models(
    config: PolicyGradient, method: PolicyGradientMethod, policy: Policy, inputs: Inputs, source: str
) -> list[Scorer]:
    """Load the reward models of a source, and check that they score as they did in training."""
    artifact = checked_models.reward_artifact(source, inputs.reward)
    load_shared_tokenizer(inputs.policy, artifact)
    return checked_models.check_scorers(
        load_scorers(artifact, policy, inputs.policy, config.forward_prompts, config.cpu_kernels), artifact,
        longest_tokens=config.max_prompt_tokens + config.max_response_tokens, sharded=config.sharding == "fsdp",
        min_correlation=config.min_reward_correlation, say=method.say)


def check_startup(
    config: PolicyGradient, method: PolicyGradientMethod, loop: TrainingLoop, tokenizer,
    reward_functions: list[RewardFunction],
) -> StartupReport:
    """Before the first update, print the plan and the memory it needs, and check that the parts fit together."""
    trainer, rows = loop.trainer, config.rollout_prompts * config.responses_per_prompt
    method.say(describe_plan(config, len(loop.prompts)))
    longest = longest_rollout(loop.prompts, rows)
    for line in plan_memory(trainer, config.optimizer, longest, reward_functions):
        method.say(line)
    microbatch = config.microbatch_prompts * config.responses_per_prompt
    rollout = collect_rollout(trainer.policy, loop.next_prompts()[:microbatch], trainer.sampling,
                              loop.generator("startup"), microbatch)
    report = run_checks(trainer.policy, rollout, tokenizer, classifier_models(reward_functions, tokenizer),
                        clip_range=config.clip_range, microbatch_prompts=microbatch, say=method.say)
    trainer.reuse_rollout_logprobs = report.keep_rollout_log_p
    return report


def describe_plan(config: PolicyGradient, prompts: int) -> str:
    """Describe in a line how many prompts, responses and optimizer steps the run has."""
    minibatches = config.rollout_prompts // config.minibatch_prompts
    responses = f" x {config.responses_per_prompt} responses" if config.responses_per_prompt > 1 else ""
    return (f"{prompts} prompts; {config.iterations} iterations x {config.rollout_prompts} prompts{responses} x "
            f"{config.epochs} epochs x {minibatches} minibatches of {config.minibatch_prompts} = "
            f"{config.iterations * config.epochs * minibatches} optimiser steps; "
            f"{config.minibatch_prompts // config.microbatch_prompts} microbatches of {config.microbatch_prompts} each")
