"""Run our PPO step on the benchmark's workload, in the project's own environment: in one process, or as one of several.

`take_step` makes the same calls as PolicyGradientTrainer.step.
"""

import tempfile

import torch
from transformers import logging

from benchmarks.ppo import workload
from benchmarks.ppo.profile import profile_by_group
from stages.distributed import group
from stages.generation.sampler import sample
from stages.modeling import torch_setup
from stages.modeling.load import load_causal
from stages.modeling.lora import add_lora
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scorer import Scorer
from stages.rewards.kl import kl_penalised_rewards
from stages.rl.advantages import gae_advantages
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import UpdateSettings, update_policy
from stages.rl.trajectory import Trajectory, score_rollout
from stages.runtime import processes
from stages.training.optimizers import build_optimizer

PACKAGES = ("torch", "transformers", "peft")


def load(
    shape: workload.Shape, precision: str, cpu_kernels: str = "auto"
) -> tuple[Policy, Scorer, torch.optim.Optimizer]:
    """Load policy, reward model and optimiser with random weights, from a folder as a stage does."""
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        workload.language_model(shape).to(dtype).save_pretrained(f"{folder}/lm")
        workload.reward_model(shape).to(dtype).save_pretrained(f"{folder}/rm")
        model = load_causal(f"{folder}/lm", precision, cpu_kernels)
        scorer = Scorer(load_classifier(f"{folder}/rm", precision, cpu_kernels=cpu_kernels), precision)
    lora = workload.LORA
    torch.manual_seed(0)
    model = add_lora(model, r=lora["r"], alpha=lora["lora_alpha"], dropout=lora["lora_dropout"],
                            target_modules=tuple(lora["target_modules"]), precision=precision)
    policy = Policy(model, 1.0, precision)
    optimizer = build_optimizer("adam", policy.trainable_parameters().values(), learning_rate=workload.LEARNING_RATE,
                                epsilon=1e-5, weight_decay=0.0)
    return policy, scorer, optimizer


def take_step(policy: Policy, scorer: Scorer, optimizer, prompts: list[list[int]], shape: workload.Shape,
              clock: workload.Clock, generator: torch.Generator) -> None:
    """Take one PPO step and time each phase."""
    settings = UpdateSettings(
        epochs=shape.epochs, minibatch_prompts=shape.minibatch, microbatch_prompts=shape.minibatch, clip_range=0.2,
        value_clip_range=0.2, value_coefficient=0.1, max_gradient_norm=1.0, max_ratio=10.0, update_kl_limit=None,
        ratio_level="token", loss_mean="token", kl_importance_weight=False, responses_per_prompt=1,
        max_sampler_ratio=None)
    with clock.phase("generate"):
        rollout = generate(policy, prompts, shape.response, generator)
    assert all(len(response) == shape.response for response in rollout.responses)
    with clock.phase("reward"):
        rewards = scorer(rollout.prompts, rollout.responses)
    with clock.phase("old and reference"):
        reuse = policy.precision == "fp32"  # where a run's start-up check finds them equal
        scores = score_rollout(policy, rollout, shape.minibatch, reuse)
        token_rewards = kl_penalised_rewards(rewards.to(scores.logprobs), scores.logprobs, scores.ref_logprobs,
                                             scores.mask, workload.KL_COEFFICIENT)
        advantages, returns = gae_advantages(token_rewards, scores.values, scores.mask, gamma=1.0, gae_lambda=0.95)
        trajectory = Trajectory.from_scores(rollout, scores, advantages, returns)
    with clock.phase("optimise"):
        update_policy(policy, optimizer, trajectory, settings, generator)


def generate(policy: Policy, prompts: list[list[int]], tokens: int, generator: torch.Generator):
    with policy.merge_adapter() as model:
        return sample(model, prompts, max_new_tokens=tokens, temperature=1.0, stop_ids=[workload.NO_EOS],
                      generator=generator, precision=policy.precision, value_fn=policy.values_from_hidden)


def time_generation(clock: workload.Clock, name: str, *arguments) -> dict[str, float]:
    """Time a call of `generate` outside the steps."""
    with clock.phase(name):
        generate(*arguments)
    return {"wall": clock.wall[name], "cpu": clock.cpu[name]}


def main() -> None:
    arguments = workload.parse_worker_arguments(__doc__, precision=(str, "fp32"), profile=(int, 0))
    shape, generator = arguments.shape, torch.Generator().manual_seed(0)
    models, clock = load(shape, arguments.precision), workload.Clock()
    group.start()  # not before: in a group, Transformers saves a whole model in the first process only
    steps = workload.prompts(shape, 1 + arguments.steps)
    clock.start_step()
    for prompts in steps:
        take_step(*models, prompts, shape, clock, generator)
        clock.end_step()
    results = {"peak_mb": workload.peak_mb()}
    results["prefill"] = time_generation(clock, "prefill", models[0], steps[-1], 1, generator)
    if arguments.profile:
        results["operators"] = profile_by_group(
            lambda: take_step(*models, steps[-1], shape, workload.Clock(), generator))
    if group.rank() == 0:
        workload.write_results(arguments.out, clock, PACKAGES, **results)


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    workload.set_threads()
    torch_setup.prepare()
    processes.take_place()
    main()
    group.stop()
