"""Run a step of PPO, RLOO or GRPO on the benchmark's workload: PolicyGradientTrainer.step, as the programs call it."""

import tempfile
from functools import partial
from pathlib import Path

import torch
from transformers import logging

from benchmarks.ppo import workload
from stages import grpo, ppo, rloo
from stages.modeling import torch_setup
from stages.ppo import parameter_groups, update_settings
from stages.recipe.recipe import select_settings
from stages.recipe.sections.policy_gradient import Grpo, Rloo
from stages.recipe.sections.ppo import Ppo
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scorer import Scorer
from stages.rewards.kl import KlController
from stages.rewards.reward_functions import RewardFunction
from stages.rewards.shaping import RewardShaper, ShapingSettings
from stages.rl.collect_rollouts import SamplingParams
from stages.rl.inputs import load_policy
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer

PACKAGES = ("torch", "transformers", "peft")
METHODS = {"ppo_head": (ppo, partial(Ppo, value_model="head")), "ppo_model": (ppo, partial(Ppo, value_model="model")),
           "rloo": (rloo, Rloo), "grpo": (grpo, Grpo)}


def build(shape: workload.Shape, method: str, responses: int) -> PolicyGradientTrainer:
    """Build the trainer of a method; `responses` to a prompt, for the methods that have several."""
    program, section = METHODS[method]
    grouped = {"responses_per_prompt": responses} if program is not ppo else {}
    per_prompt = grouped.get("responses_per_prompt", 1)
    config = section(precision="fp32", epochs=shape.epochs, rollout_prompts=shape.batch // per_prompt,
                     minibatch_prompts=shape.minibatch // per_prompt, microbatch_prompts=shape.minibatch // per_prompt,
                     update_kl_limit=None, kl_coefficient=workload.KL_COEFFICIENT, missing_eos_penalty=0.0,
                     learning_rate=workload.LEARNING_RATE, **grouped)
    algorithm, lora = program.make_method(config), workload.LORA
    with tempfile.TemporaryDirectory() as folder:
        workload.language_model(shape).save_pretrained(f"{folder}/lm")
        workload.reward_model(shape).save_pretrained(f"{folder}/rm")
        torch.manual_seed(0)
        policy = load_policy(
            Path(folder, "lm"), Path(folder, "rm"), tune="lora", value_model=algorithm.value_model, precision="fp32",
            temperature=1.0, cpu_kernels="auto", share_prompts=per_prompt > 1,
            lora={"r": lora["r"], "alpha": lora["lora_alpha"], "dropout": 0.0,
                  "target_modules": tuple(lora["target_modules"])})
        scorer = Scorer(load_classifier(f"{folder}/rm", "fp32", cpu_kernels="auto"), "fp32",
                        share_prompts=policy.share_prompts)
    optimizer = torch.optim.Adam([
        part if isinstance(part, dict) else {"params": [part]} for part in parameter_groups(config, algorithm, policy)],
        lr=workload.LEARNING_RATE)
    return PolicyGradientTrainer(
        policy=policy, optimizer=optimizer, estimate_advantages=algorithm.estimate_advantages, kl_in=algorithm.kl_in,
        reward_shaper=RewardShaper([RewardFunction("model", 1.0, "ids", scorer, part="model")], None,
                                   ShapingSettings(**select_settings(ShapingSettings, config))),
        kl_controller=KlController(workload.KL_COEFFICIENT, None, 10_000),
        sampling=SamplingParams(1.0, (workload.NO_EOS,), "until_stop", 1, shape.response),
        update_settings=update_settings(config), kl_estimator=algorithm.kl_estimator,
        forward_prompts=shape.minibatch, reuse_rollout_logprobs=True)


def take_step(
    trainer: PolicyGradientTrainer, prompts: list[list[int]], shape: workload.Shape, generator: torch.Generator
) -> None:
    """Take a step with `shape.batch` responses to the first of the prompts; assert that it did the whole work."""
    count = trainer.update_settings.responses_per_prompt
    rows = [prompt for prompt in prompts[:shape.batch // count] for _ in range(count)]
    row, timing = trainer.step(rows, lambda purpose: generator)
    assert timing["tokens"] == shape.batch * shape.response
    assert row["minibatches"] == shape.epochs * shape.batch // shape.minibatch


def main() -> None:
    """Time the steps of one method, and write the seconds of each to the file in --out."""
    arguments = workload.parse_worker_arguments(__doc__, method=(str, "rloo"), responses=(int, 4))
    shape, generator = arguments.shape, torch.Generator().manual_seed(0)
    trainer = build(shape, arguments.method, arguments.responses)
    steps, clock = workload.prompts(shape, 1 + arguments.steps), workload.Clock()
    clock.start_step()
    for prompts in steps:
        take_step(trainer, prompts, shape, generator)
        clock.end_step()
    workload.write_results(arguments.out, clock, PACKAGES)


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    workload.set_threads()
    torch_setup.prepare()
    main()
