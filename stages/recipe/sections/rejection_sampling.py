"""Settings of best-of-n and of expert iteration."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.ranges import BATCH, COEFFICIENT, COUNT, EPOCHS, SEED, SIGNED, Range
from stages.recipe.schema import setting, setting_of
from stages.recipe.sections.models import Lora
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.rewards import RewardSettings
from stages.recipe.sections.sft import Sft
from stages.recipe.sections.shared import CpuKernels, LogTo, Precision, Training, check_log_to, check_training


@dataclass(frozen=True)
class BestOfN(RewardSettings):
    """Rejection sampling as a policy: of n responses of the SFT model, the one with the highest reward."""

    n: int = setting(16, "responses sampled to each prompt [Stiennon et al. 2020; ours: 16]", within=Range(1, 10**6))
    prompts: int | None = setting(None, "prompts of the rl split, a seeded choice; null: all [ours]", within=COUNT)
    temperature: float = setting_of(Ppo, "temperature")
    max_prompt_tokens: int = setting_of(Ppo, "max_prompt_tokens")
    max_response_tokens: int = setting_of(Ppo, "max_response_tokens")
    batch_prompts: int = setting(16, "prompts sampled at once, with n responses each [ours]", within=BATCH)
    save_every_prompts: int = setting(
        64, "prompts whose scored responses are stored together: what a kill costs at most [ours]", within=COUNT)
    precision: Precision = setting("bf16", "precision of policy and reward model [ours]")
    bootstrap_samples: int = setting(1000, "bootstrap samples of each 95 % interval [ours]", within=COUNT)
    cpu_kernels: CpuKernels = setting_of(Training, "cpu_kernels")
    log_to: LogTo = setting_of(Training, "log_to")
    seed: int = setting(0, "seed of prompts, sampling and intervals [ours]", within=SEED)

    def __post_init__(self):
        super().__post_init__()
        check_log_to(self.log_to)


@dataclass(frozen=True)
class ExpertIteration(RewardSettings, Training):
    """Rounds of sampling, and of fine-tuning on the sampled responses with the highest rewards."""

    rounds: int = setting(3, "rounds of sampling and fine-tuning, at most [ReST^EM: 1 to 3]", within=Range(1, 1000))
    start_from: Literal["sft", "previous"] = setting(
        "sft", "model that each round fine-tunes: 'sft', the SFT model [ReST^EM]; 'previous', that of the round before "
        "[RAFT]")
    n: int = setting_of(BestOfN, "n")
    round_prompts: int | None = setting(
        None, "prompts of each round, other ones in the next; null: all of the rl split [ReST^EM: all; RAFT: 2048]",
        within=COUNT)
    keep: Literal["best", "above", "share", "tilted"] = setting(
        "best", "responses to fine-tune on: 'best', that with the highest reward to each prompt [RAFT]; 'above', all "
        "distinct ones with a reward above keep_above [ReST^EM]; 'share', the keep_share of all distinct ones with "
        "the highest rewards [ReST]; 'tilted', keep_draws to each prompt, drawn in proportion to exp(reward / (rounds "
        "x kl_coefficient)): after all rounds, samples of the policy with the highest reward minus KL penalty [Rubin "
        "1988, arXiv 2205.11275]")
    keep_above: float | None = setting(None, "threshold if keep is 'above' [ReST^EM: 0 of 0 or 1]", within=SIGNED)
    keep_share: float | None = setting(None, "share if keep is 'share' [ReST]", within=Range(0, 1, above=True))
    keep_draws: int | None = setting(
        None, "draws to each prompt if keep is 'tilted'; a response can be drawn several times [ours]",
        within=Range(1, 10**6), absent_means=None)
    temperature: float = setting_of(Ppo, "temperature")
    max_prompt_tokens: int = setting_of(Ppo, "max_prompt_tokens")
    max_response_tokens: int = setting_of(Ppo, "max_response_tokens")
    batch_prompts: int = setting_of(BestOfN, "batch_prompts")
    save_every_prompts: int = setting_of(BestOfN, "save_every_prompts")
    lora: Lora = setting_of(Sft, "lora")
    tune: Literal["lora", "full"] = setting_of(Sft, "tune")
    precision: Precision = setting("bf16", "precision of the policy and the reward model [ours]")
    packing: Literal["wrapped", "bfd"] = setting_of(Sft, "packing", "bfd")
    loss_on: Literal["all", "answer"] = setting_of(Sft, "loss_on", "answer")
    sequence_length_tokens: int = setting_of(Sft, "sequence_length_tokens")
    batch_sequences: int = setting_of(Sft, "batch_sequences")
    microbatch_sequences: int = setting_of(Sft, "microbatch_sequences")
    epochs: float = setting(1.0, "passes over the winners in each round [ours]", within=EPOCHS)
    learning_rate: float = setting_of(Sft, "learning_rate")
    warmup_steps: int = setting_of(Sft, "warmup_steps", 0)
    weight_decay: float = setting_of(Sft, "weight_decay")
    gradient_checkpointing: bool = setting_of(Sft, "gradient_checkpointing")
    save_every_steps: int = setting_of(Sft, "save_every_steps", 100)
    validation_prompts: int = setting_of(Ppo, "validation_prompts")
    kl_coefficient: float = setting(
        0.2, "coefficient of the KL in validation_selection_score, which chooses the best round, and in the tilt if "
        "keep is 'tilted' [as ppo]",
        within=COEFFICIENT)
    patience_rounds: int | None = setting(
        1, "stop after this many rounds without a better validation_selection_score; null: never [ours]", within=COUNT)
    seed: int = setting(0, "seed of the adapter, prompts, sampling and the data order [ours]", within=SEED)

    def __post_init__(self):
        super().__post_init__()
        check_training(self)
        for name, keep in (("keep_above", "above"), ("keep_share", "share"), ("keep_draws", "tilted")):
            if (getattr(self, name) is not None) != (self.keep == keep):
                raise ValueError(f"{name} and keep {keep!r} belong together: set both or neither of them (keep is "
                                 f"{self.keep!r})")
        if self.keep == "tilted" and not self.kl_coefficient:
            raise ValueError("keep 'tilted' divides rewards by kl_coefficient, which must be above 0")
