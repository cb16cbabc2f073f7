"""TODO docstring."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.checks import (
    LogTo,
    Precision,
    check_divides,
    check_full_precision,
    check_log_to,
    check_patience,
    log_to_setting,
)
from stages.recipe.models import Lora
from stages.recipe.schema import setting


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning on the better answers of the finetune split."""

    lora: Lora = setting(Lora(), "the adapter")
    tune: Literal["lora", "full"] = setting("lora", "what learns: an adapter, or every weight [script]")
    train_new_tokens: bool = setting(
        False, "give tokens that the tokenizer has and the base has not a vector, and train those vectors [ours]")
    precision: Precision = setting("int8", "of the base while it trains [script]")
    packing: Literal["wrapped", "bfd"] = setting(
        "wrapped", "'wrapped': concatenate and cut [script]; 'bfd': no attention across documents")
    loss_on: Literal["all", "answer"] = setting("all", "'answer': question and template have no label [script: all]")
    sequence_length_tokens: int = setting(1024, "length of a packed block [script]")
    batch_sequences: int = setting(32, "blocks an optimiser step [run: 4 on each of 8 processes]")
    microbatch_sequences: int = setting(4, "blocks a forward pass [script]")
    max_steps: int | None = setting(5000, "optimiser steps; null: epochs decides [run]")
    epochs: float = setting(1.0, "passes over the packed blocks, when max_steps is null [ours]")
    learning_rate: float = setting(1e-5, "peak step size, cosine to 0 [run; the script's default is 1e-4]")
    warmup_steps: int = setting(100, "steps in which the step size rises [script]")
    weight_decay: float = setting(0.05, "of AdamW [script]")
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass [script: off by default]")
    save_every_steps: int = setting(1000, "steps between checkpoints [script]")
    validation_questions: int = setting(
        64, "of the finetune split, held out to watch perplexity, ends and samples; at most a tenth [ours]")
    evaluate_every_steps: int = setting(1000, "steps between evaluations [script]")
    patience_evaluations: int | None = setting(
        None, "stop after so many without a lower perplexity, and keep the best; null: the last is kept [script]")
    log_to: LogTo = log_to_setting()
    seed: int = setting(0, "of initialisation, order and dropout [script]")

    def __post_init__(self):
        check_log_to(self.log_to)
        check_divides(self.microbatch_sequences, self.batch_sequences, "microbatch_sequences", "batch_sequences")
        check_full_precision(self.tune, self.precision)
        check_patience(self.patience_evaluations)
