"""Settings of DPO."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.ranges import (
    BATCH,
    COUNT,
    COUNT_OR_NONE,
    DECAY,
    EPOCHS,
    LEARNING_RATE,
    SEED,
    SHARE_BELOW_ALL,
    TOKENS,
    Range,
)
from stages.recipe.schema import setting
from stages.recipe.sections.models import Lora
from stages.recipe.sections.shared import Precision, ShardedTraining, check_training


@dataclass(frozen=True)
class Dpo(ShardedTraining):
    """Direct preference optimisation (Rafailov et al. 2023) on the pairs of the reward split.

    [script] here is TRL's examples/research_projects/stack_llama_2/scripts/dpo_llama2.py.
    """

    loss: Literal["sigmoid", "ipo"] = setting(
        "sigmoid", "'sigmoid', -log sigmoid(beta x difference of the log-ratios) [script]; 'ipo', (difference of the "
        "mean log-ratios per token - 1 / (2 beta))^2 [Azar et al. 2023]")
    beta: float = setting(
        0.1, "strength of the tie to SFT; for ipo, the paper's tau [script]", within=Range(0, 1000, above=True))
    label_smoothing: float = setting(
        0.0, "assumed share of pairs with the wrong order, below 0.5; for the sigmoid loss [cDPO; script: 0]",
        within=Range(0, 0.5, below=True))
    lora: Lora = setting(Lora(r=8, alpha=16, dropout=0.0), "the adapter [script; its trainer turns dropout off]")
    tune: Literal["lora", "full"] = setting("lora", "what is trained: an adapter, or all weights [script]")
    precision: Precision = setting("nf4", "precision of the frozen base model in training [script]")
    batching: Literal["pair", "question"] = setting(
        "pair", "as in reward: a step takes 'pair's of answers [script] or 'question's, each answer forwarded once")
    max_length_tokens: int = setting(
        512, "drop and count longer texts [ours: as in reward; script: 1024]", within=TOKENS)
    train_pairs: int = setting(100_000, "maximum pairs from the reward split [ours: as in reward]", within=COUNT)
    batch_pairs: int = setting(16, "pairs (or questions) per optimizer step [script]", within=BATCH)
    microbatch_pairs: int = setting(4, "pairs (or questions) per forward pass [script]", within=BATCH)
    max_steps: int | None = setting(
        None, "optimizer steps; null: as many as epochs needs [ours: the pairs that reward sees; script: 1000]",
        within=COUNT)
    epochs: float = setting(1.0, "passes over the pairs, if max_steps is null [ours]", within=EPOCHS)
    learning_rate: float = setting(5e-4, "peak learning rate, cosine decay to 0 [script]", within=LEARNING_RATE)
    warmup_steps: int = setting(100, "steps with a linear warmup of the learning rate [script]", within=COUNT_OR_NONE)
    weight_decay: float = setting(0.05, "weight decay of AdamW [script]", within=DECAY)
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass [script: true]")
    validation_share: float = setting(
        0.05, "share of the reward split's questions held out to select the best checkpoint, the same ones as in "
        "reward [ours]", within=SHARE_BELOW_ALL)
    save_every_steps: int = setting(100, "steps between checkpoints and evaluations [script]", within=COUNT)
    patience_evaluations: int | None = setting(
        None, "stop after this many evaluations without a lower validation loss; null: never [script]", within=COUNT)
    seed: int = setting(0, "seed of the initial adapter, the data order and dropout [script]", within=SEED)

    def __post_init__(self):
        check_training(self)
        if self.label_smoothing and self.loss == "ipo":
            raise ValueError("label_smoothing is for the sigmoid loss, and ipo has none: set it to 0")
