"""Settings of the reward model."""

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
    POSITIVE,
    SEED,
    SHARE_BELOW_ALL,
    SIGNED,
    TOKENS,
    Range,
)
from stages.recipe.schema import setting
from stages.recipe.sections.models import Lora
from stages.recipe.sections.shared import Precision, ShardedTraining, check_training


@dataclass(frozen=True)
class Reward(ShardedTraining):
    """Pairwise reward model, by default with the loss -log sigmoid(r_j - r_k)."""

    start_from: Literal["sft", "base"] = setting(
        "sft", "the model that the adapter and the head are trained on [paper]")
    lora: Lora = setting(Lora(r=8, alpha=32, dropout=0.1), "the adapter [script]")
    tune: Literal["lora", "full", "head"] = setting(
        "lora", "what is trained: an adapter with the score head; all weights [script]; 'head', the score head alone, "
        "fitted to the frozen model's mean states over the answer, its length and, where layers is null and the "
        "embeddings are tied, its log-probability [ours]")
    layers: int | None = setting(
        None, "the base's first layers, which make the reward model; null: all of them [script]", within=COUNT,
        absent_means=None)
    head_penalty: float = setting(
        1000.0, "with tune 'head': weight of the penalty on the head's squared weights, for features of unit size "
        "[ours]", within=POSITIVE, absent_means=1000.0)
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "'muon': Muon for the weight matrices of the layers, AdamW for the rest; it learns associations in "
        "fewer steps [script: AdamW]")
    precision: Precision = setting("bf16", "precision of the frozen base model in training [script]")
    batching: Literal["pair", "question"] = setting(
        "pair", "a step takes 'pair's of answers [script] or 'question's: each answer is forwarded once and all its "
        "pairs are in one step [InstructGPT 3.5]")
    pooling: Literal["last", "mean", "sum"] = setting(
        "last", "which outputs of the head give the score: 'last', that of the last token [script]; 'mean', the mean "
        "over the answer's tokens; 'sum', their sum in units of 10 tokens, with a lower weight for repeated tokens "
        "[ours]")
    log_probability_weight: float = setting(
        0.0, "coefficient of an answer's mean log-probability per token, which is added to the head's score; 0: the "
        "head alone [script]", within=SIGNED)
    loss: Literal["sigmoid", "squared"] = setting(
        "sigmoid", "'sigmoid', -log sigmoid(r_j - r_k - margin) [paper]; 'squared', (r_j - r_k - margin)^2, which "
        "learns how far apart the scores are [Pahikkala et al. 2007]", absent_means="sigmoid")
    margin_per_score: float = setting(
        0.0, "margin in the loss for each point of difference between the scores [Llama 2; script: 0]",
        within=COEFFICIENT)
    label_smoothing: float = setting(
        0.0, "assumed share of pairs with the wrong order, below 0.5; for the sigmoid loss [cDPO; script: 0]",
        within=Range(0, 0.5, below=True))
    centring_weight: float = setting(
        0.0, "coefficient of (r_j + r_k)^2 in the loss [Eisenstein et al. 2023; script: 0]", within=COEFFICIENT)
    language_model_weight: float = setting(
        0.0, "coefficient of the better answer's language-modelling loss, mean nats per token [Askell et al. 2021; "
        "script: 0]", within=COEFFICIENT)
    members: int = setting(
        1, "models trained separately, with seed, seed + 1 and so on; ppo.reward_combine combines their scores "
        "[script]", within=Range(1, 1000))
    max_length_tokens: int = setting(512, "drop and count longer texts [script]", within=TOKENS)
    train_pairs: int = setting(100_000, "maximum pairs from the reward split [script]", within=COUNT)
    sampled_questions: int = setting(
        0, "training questions that the model which training starts from answers, greedily and at temperature 1: each "
        "sample loses a pair against the best human answer, cut to its length; 0: none [cf. SPIN, Chen et al. 2024; "
        "script: 0]", within=COUNT_OR_NONE, absent_means=0)
    max_sampled_tokens: int = setting(
        128, "maximum tokens of a sampled answer [script: 128 in ppo]", within=TOKENS, absent_means=128)
    batch_pairs: int = setting(
        32, "pairs (or questions) per optimizer step [script: 4 on each of 8 processes]", within=BATCH)
    microbatch_pairs: int = setting(4, "pairs (or questions) per forward pass [script]", within=BATCH)
    epochs: float = setting(1.0, "passes over the pairs [script]", within=EPOCHS)
    learning_rate: float = setting(2e-5, "peak learning rate, linear decay to 0 [script]", within=LEARNING_RATE)
    weight_decay: float = setting(0.001, "weight decay of the optimizer [script]", within=DECAY)
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass [script: off by default]")
    validation_share: float = setting(
        0.05, "share of the reward split's questions held out to select the best checkpoint [ours]",
        within=SHARE_BELOW_ALL)
    save_every_steps: int = setting(500, "steps between checkpoints and evaluations [script]", within=COUNT)
    patience_evaluations: int | None = setting(
        None, "stop after this many evaluations without a better one; null: never [script]", within=COUNT)
    seed: int = setting(0, "seed of the head, the data order and dropout [script]", within=SEED)

    length_weight = 0.0  # no setting: of the score; tune 'head' fits it

    def __post_init__(self):
        if self.layers is not None and self.tune == "lora":
            raise ValueError("layers makes a smaller model, which is saved whole: set tune to 'head' or 'full', or "
                             "layers to null")
        if self.sampled_questions and self.max_sampled_tokens >= self.max_length_tokens:
            raise ValueError("max_sampled_tokens must be below max_length_tokens, which holds the question, too")
        if self.loss == "squared" and (self.label_smoothing or not self.margin_per_score):
            raise ValueError("loss 'squared' learns the margins, and has no label_smoothing: set margin_per_score "
                             "above 0, 1.0 for example, and label_smoothing to 0")
        if self.tune == "head":
            self._check_fitted()
        check_training(self)

    def _check_fitted(self) -> None:
        """Raise ValueError for settings that a head that is fitted, not trained, cannot have."""
        if self.members > 1:
            raise ValueError("members differ by their seeds, and a head that is fitted has none: set members to 1")
        if self.pooling != "mean" or self.log_probability_weight:
            raise ValueError("tune 'head' fits the head to mean states, and the weight of the log-probability with it: "
                             "set pooling to 'mean' and log_probability_weight to 0")
        if self.precision in ("int8", "nf4"):
            raise ValueError(f"tune 'head' saves the frozen model whole, and {self.precision} is quantised: set "
                             f"precision to bf16, mixed or fp32")
