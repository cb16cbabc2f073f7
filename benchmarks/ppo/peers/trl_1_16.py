"""Time TRL 1.16's RLOOTrainer or GRPOTrainer, which are in the project's own environment.

A minibatch is a device batch, and each has an optimiser step. TRL's EOS is suppressed by min_new_tokens, so that every
response has its full length; its reward model reads the decoded text, whose token ids are the same.
"""

import tempfile
import warnings

from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from transformers import TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from benchmarks.ppo import workload

PACKAGES = ("trl", "transformers", "peft", "torch", "accelerate", "datasets")
KINDS = {"rloo": (RLOOTrainer, RLOOConfig), "grpo": (GRPOTrainer, GRPOConfig)}


class Steps(TrainerCallback):
    """End the clock's step after the optimiser steps of a rollout."""

    def __init__(self, clock: workload.Clock, every: int):
        self.clock, self.every = clock, every

    def on_train_begin(self, *args, **kwargs):
        self.clock.start_step()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            self.clock.end_step()


def settings(shape: workload.Shape, responses: int, steps: int, folder: str) -> dict:
    """Return the settings that both trainers have."""
    minibatches = shape.batch // shape.minibatch
    return {
        "output_dir": folder, "per_device_train_batch_size": shape.minibatch, "gradient_accumulation_steps": 1,
        "steps_per_generation": minibatches, "num_iterations": shape.epochs, "num_generations": responses,
        "max_completion_length": shape.response, "generation_kwargs": {"min_new_tokens": shape.response},
        "max_steps": (1 + steps) * minibatches * shape.epochs, "learning_rate": workload.LEARNING_RATE, "beta":
        workload.KL_COEFFICIENT, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "shuffle_dataset":
        False, "save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True,
        "dataloader_pin_memory": False, "seed": 0}


def main() -> None:
    """Time the steps of one of TRL's trainers, and write the seconds of each to the file in --out."""
    arguments = workload.parse_worker_arguments(__doc__, method=(str, "rloo"), responses=(int, 4))
    shape, clock, tokenizer = arguments.shape, workload.Clock(), workload.word_tokenizer(arguments.shape)
    kind, config = KINDS[arguments.method]
    prompts = [prompt for step in workload.prompts(shape, 1 + arguments.steps)
               for prompt in step[:shape.batch // arguments.responses]]
    every = shape.epochs * shape.batch // shape.minibatch
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            workload.language_model(shape), workload.reward_model(shape),
            args=config(**settings(shape, arguments.responses, arguments.steps, folder)),
            train_dataset=Dataset.from_list([{"prompt": " ".join(f"w{i}" for i in prompt)} for prompt in prompts]),
            processing_class=tokenizer, reward_processing_classes=tokenizer, callbacks=[Steps(clock, every)],
            peft_config=LoraConfig(task_type="CAUSAL_LM", **workload.LORA))
        generate = trainer._generate_single_turn

        def checked(*args, **named):
            answers = generate(*args, **named)
            ids = answers[0] if isinstance(answers, tuple) else answers
            assert all(len(answer) == shape.response for answer in ids)
            return answers

        trainer._generate_single_turn = clock.wrap(checked, lambda _: "generate")
        trainer._calculate_rewards = clock.wrap(trainer._calculate_rewards, lambda _: "reward")
        trainer.train()
    workload.write_results(arguments.out, clock, PACKAGES)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    disable_progress_bars()
    workload.set_threads()
    main()
