"""Settings of ILQL, offline reinforcement learning from scored answers."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.ranges import (
    BATCH,
    COEFFICIENT,
    COUNT,
    COUNT_OR_NONE,
    DECAY,
    EPOCHS,
    LEARNING_RATE,
    SEED,
    SHARE,
    TOKENS,
    Range,
)
from stages.recipe.schema import setting
from stages.recipe.sections.models import Lora
from stages.recipe.sections.shared import Precision, Training, check_training


@dataclass(frozen=True)
class Ilql(Training):
    """Implicit language Q-learning on the scored answers of the reward split (Snell et al. 2022; sources: [trlX])."""

    lora: Lora = setting(Lora(), "the adapter")
    tune: Literal["lora", "full"] = setting(
        "lora", "what is trained beside the heads: an adapter, or all weights [ours; trlX: all]")
    precision: Precision = setting("bf16", "precision of the base model in training; heads are fp32 [ours]")
    gamma: float = setting(0.99, "discount of the value of the next token's state [trlX]", within=SHARE)
    tau: float = setting(
        0.7, "expectile of Q that V learns: 0.5 is the mean, towards 1 the best action in the data [trlX]",
        within=Range(0, 1, above=True, below=True))
    cql_scale: float = setting(
        0.1, "coefficient of the CQL term, which lowers Q of tokens that the data does not have [trlX]",
        within=COEFFICIENT)
    awac_scale: float = setting(
        1.0, "coefficient of the AWAC term, the log-likelihood of the answers, which trains the model itself [trlX]",
        within=COEFFICIENT)
    awac_beta: float = setting(
        0.0, "weight of a token in the AWAC term: exp(awac_beta * (min Q - V)); 0: plain behaviour cloning [trlX]",
        within=Range(0, 100))
    target_rate: float = setting(
        0.001, "share of the Q heads in their targets at a synchronisation, alpha of Polyak averaging [trlX]",
        within=Range(0, 1, above=True))
    target_every_steps: int = setting(5, "steps between synchronisations of the targets [trlX]", within=COUNT)
    sampling_beta: float = setting(
        1.0, "weight of min Q - V in the logits that are sampled from; saved with the model; 0: without Q [trlX: 1, "
        "its examples 1 to 100]", within=Range(0, 10_000))
    max_length_tokens: int = setting(
        512, "maximum length of question and answer together; longer ones are dropped [ours; trlX: 64]", within=TOKENS)
    batch_answers: int = setting(128, "answers per optimizer step [trlX]", within=BATCH)
    microbatch_answers: int = setting(4, "answers per forward pass [ours]", within=BATCH)
    max_steps: int | None = setting(1000, "optimizer steps; null: as many as epochs needs [trlX]", within=COUNT)
    epochs: float = setting(1.0, "passes over the answers, if max_steps is null [ours]", within=EPOCHS)
    learning_rate: float = setting(
        5e-5, "peak learning rate, cosine decay to 0 [trlX: 5e-5, constant]", within=LEARNING_RATE)
    warmup_steps: int = setting(0, "steps with a linear warmup of the learning rate [trlX]", within=COUNT_OR_NONE)
    weight_decay: float = setting(1e-6, "weight decay of AdamW [trlX]", within=DECAY)
    save_every_steps: int = setting(1000, "steps between checkpoints [trlX]", within=COUNT)
    validation_questions: int = setting(
        64, "held-out questions of the reward split, at most a tenth, for losses and samples [ours]",
        within=COUNT_OR_NONE)
    evaluate_every_steps: int = setting(100, "steps between evaluations [trlX]", within=COUNT)
    seed: int = setting(0, "seed of the initial adapter and heads, the data order and dropout [ours]", within=SEED)

    def __post_init__(self):
        check_training(self)
