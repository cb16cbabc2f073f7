"""Settings of supervised fine-tuning."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.ranges import BATCH, BLOCK, COUNT, COUNT_OR_NONE, DECAY, EPOCHS, LEARNING_RATE, SEED
from stages.recipe.schema import setting
from stages.recipe.sections.models import Lora
from stages.recipe.sections.shared import Precision, ShardedTraining, check_training


@dataclass(frozen=True)
class Sft(ShardedTraining):
    """Supervised fine-tuning on the better answers of the finetune split."""

    lora: Lora = setting(Lora(), "the adapter")
    tune: Literal["lora", "full"] = setting("lora", "what is trained: an adapter, or all weights [script]")
    precision: Precision = setting("int8", "precision of the base model in training [script]")
    packing: Literal["wrapped", "bfd"] = setting(
        "wrapped", "'wrapped': concatenate and cut [script]; 'bfd': best-fit decreasing, without attention across "
        "documents")
    loss_on: Literal["all", "answer"] = setting(
        "all", "tokens with a loss: 'all', or only those of the 'answer' [script: all]")
    max_answer_tokens: int | None = setting(
        None, "train only on answers of at most this many tokens, EOS included, so that the model learns to end its "
        "answers within the length that later stages sample; null: on all [ours]", within=COUNT,
        absent_means=None)
    sequence_length_tokens: int = setting(1024, "length of a packed block [script]", within=BLOCK)
    batch_sequences: int = setting(32, "blocks per optimizer step [run: 4 on each of 8 processes]", within=BATCH)
    microbatch_sequences: int = setting(4, "blocks per forward pass [script]", within=BATCH)
    max_steps: int | None = setting(5000, "optimizer steps; null: as many as epochs needs [run]", within=COUNT)
    epochs: float = setting(1.0, "passes over the packed blocks, if max_steps is null [ours]", within=EPOCHS)
    learning_rate: float = setting(
        1e-5, "peak learning rate, cosine decay to 0 [run; the script's default is 1e-4]", within=LEARNING_RATE)
    warmup_steps: int = setting(100, "steps with a linear warmup of the learning rate [script]", within=COUNT_OR_NONE)
    weight_decay: float = setting(0.05, "weight decay of AdamW [script]", within=DECAY)
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass [script: off by default]")
    save_every_steps: int = setting(1000, "steps between checkpoints [script]", within=COUNT)
    validation_questions: int = setting(
        64, "held-out questions of the finetune split, at most a tenth, for perplexity, EOS rate and samples [ours]",
        within=COUNT_OR_NONE)
    evaluate_every_steps: int = setting(1000, "steps between evaluations [script]", within=COUNT)
    patience_evaluations: int | None = setting(
        None, "stop after this many evaluations without a lower perplexity, and keep the best weights; null: train to "
        "the end and keep the last [script]", within=COUNT)
    seed: int = setting(0, "seed of the initial adapter, the data order and dropout [script]", within=SEED)

    def __post_init__(self):
        check_training(self)
