"""TODO docstring."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.checks import LogTo, Precision, check_divides, check_log_to, check_patience, log_to_setting
from stages.recipe.models import Lora
from stages.recipe.schema import setting

LEXICAL_ADVICE = "word counts are a baseline of evaluate and a reward source, ppo.rewards: [{source: lexical}]"

@dataclass(frozen=True)
class Reward:
    """Pairwise reward model: loss -log sigmoid(r_j - r_k)."""

    REMOVED_KEYS = dict.fromkeys(("lexical_buckets", "lexical_penalty"), LEXICAL_ADVICE)

    start_from: Literal["sft", "base"] = setting("sft", "the model that the adapter and the head go on [paper]")
    lora: Lora = setting(Lora(r=8, alpha=32, dropout=0.1), "the adapter [script]")
    precision: Precision = setting("bf16", "of the frozen base while it trains [script]")
    batching: Literal["pair", "question"] = setting(
        "pair", "'pair' [script]; 'question': each answer forwarded once, all its pairs in one step [InstructGPT 3.5]")
    pooling: Literal["last", "mean", "sum"] = setting(
        "last", "where the head reads: at the last token [script]; 'mean', 'sum': at all of the answer's, averaged, or "
        "summed in hundreds, a token that comes again for less [ours]")
    log_probability_weight: float = setting(
        0.0, "times an answer's mean log-probability a token, added to the head's score; 0: the head alone [script]")
    margin_per_score: float = setting(0.0, "gap asked of the rewards for each step of the scores' gap [Llama 2; script: 0]")
    label_smoothing: float = setting(0.0, "share of pairs held to be the wrong way round, under 0.5 [cDPO; script: 0]")
    centring_weight: float = setting(0.0, "times (r_j + r_k)^2, in the loss [Eisenstein et al. 2023; script: 0]")
    language_model_weight: float = setting(
        0.0, "times the mean nats a token of the better answer, in the loss [Askell et al. 2021; script: 0]")
    members: int = setting(1, "models trained separately, with seed, seed + 1 and so on; ppo.reward_combine combines their scores [script]")
    max_length_tokens: int = setting(512, "longer texts are dropped and counted [script]")
    train_pairs: int = setting(100_000, "at most, from the reward split [script]")
    batch_pairs: int = setting(32, "pairs (or questions) an optimiser step [script: 4 on each of 8 processes]")
    microbatch_pairs: int = setting(4, "pairs (or questions) a forward pass [script]")
    epochs: float = setting(1.0, "passes over the pairs [script]")
    learning_rate: float = setting(2e-5, "peak step size, linear to 0 [script]")
    weight_decay: float = setting(0.001, "of AdamW [script]")
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass [script: off by default]")
    validation_share: float = setting(0.05, "of the reward split's questions, held out to pick the best checkpoint [ours]")
    save_every_steps: int = setting(500, "steps between checkpoints and evaluations [script]")
    patience_evaluations: int | None = setting(None, "stop after so many without a better one; null: never [script]")
    log_to: LogTo = log_to_setting()
    seed: int = setting(0, "of the head, order and dropout [script]")

    def __post_init__(self):
        check_log_to(self.log_to)
        check_divides(self.microbatch_pairs, self.batch_pairs, "microbatch_pairs", "batch_pairs")
        check_patience(self.patience_evaluations)
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be from 0 to below 0.5, not {self.label_smoothing}")
        if self.members < 1:
            raise ValueError(f"members must be 1 or more, not {self.members}")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share must be from 0 to below 1, not {self.validation_share}")
