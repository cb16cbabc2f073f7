"""Time TRL's experimental PPO, last released in 1.12.0, with a LoRA value model, in its own environment.

`train()` is one method: its phases are timed by wrapping the functions that it calls; no line of TRL is changed.
The value model is a second network; LoRA and a trained head on it come nearest to a value head on the policy.
"""

import tempfile
import warnings

import torch
import trl.experimental.ppo.ppo_trainer as published
from datasets import Dataset
from peft import LoraConfig, inject_adapter_in_model
from transformers import TrainerCallback, logging
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.ppo import workload

PACKAGES = ("trl", "transformers", "peft", "torch", "accelerate", "datasets")


class Steps(TrainerCallback):
    """End the clock's step where a training step ends."""

    def __init__(self, clock: workload.Clock):
        self.clock = clock

    def on_train_begin(self, *args, **kwargs):
        self.clock.start_step()

    def on_step_end(self, *args, **kwargs):
        self.clock.end_step()


def value_model(shape: workload.Shape):
    model = workload.reward_model(shape, seed=2).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(**workload.LORA), model)
    model.score.weight.requires_grad_(True)
    return model


def wrap(clock: workload.Clock, reward) -> None:
    """Time generation and the forward passes of a rollout as phases; the rest of a step is the update."""
    def forward(_):
        return None if torch.is_grad_enabled() else "old and reference"

    phases = {"batch_generation": lambda _: "generate", "forward": forward,
              "get_reward": lambda args: "reward" if args[0] is reward else "value"}
    for name, phase in phases.items():
        setattr(published, name, clock.wrap(getattr(published, name), phase))


def settings(shape: workload.Shape, steps: int, folder: str) -> PPOConfig:
    """Configure one device batch for the whole batch, so that each minibatch has an optimiser step.

    With the minibatch as device batch and accumulation, Accelerate would step the optimiser once per batch.
    """
    return PPOConfig(
        output_dir=folder, per_device_train_batch_size=shape.batch, gradient_accumulation_steps=1,
        num_mini_batches=shape.batch // shape.minibatch, num_ppo_epochs=shape.epochs, response_length=shape.response,
        total_episodes=shape.batch * (1 + steps), temperature=1.0, learning_rate=workload.LEARNING_RATE, bf16=False,
        use_cpu=True, gradient_checkpointing=False, local_rollout_forward_batch_size=shape.batch,
        num_sample_generations=0, report_to=[], save_strategy="no", logging_strategy="no", missing_eos_penalty=None,
        stop_token=None, kl_coef=workload.KL_COEFFICIENT, disable_tqdm=True, seed=0)


def main() -> None:
    arguments = workload.parse_worker_arguments(__doc__)
    shape, clock, tokenizer = arguments.shape, workload.Clock(), workload.word_tokenizer(arguments.shape)
    tokenizer.padding_side = "left"
    policy, reward, value = workload.language_model(shape), workload.reward_model(shape), value_model(shape)
    policy.generation_config.eos_token_id = None
    wrap(clock, reward)
    rows = [prompt for step in workload.prompts(shape, 1 + arguments.steps) for prompt in step]
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(settings(shape, arguments.steps, folder), tokenizer, policy, None, reward,
                             Dataset.from_dict({"input_ids": rows}), value, callbacks=[Steps(clock)],
                             peft_config=LoraConfig(task_type="CAUSAL_LM", **workload.LORA))
        trainer.train()
    for step in [*clock.steps]:
        step["phases"]["optimise"] = step["phases"].pop("other")
    workload.write_results(arguments.out, clock, PACKAGES)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    workload.set_threads()
    main()
