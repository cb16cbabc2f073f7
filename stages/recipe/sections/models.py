"""Settings of the base model, LoRA adapters and merging."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.ranges import (
    BATCH,
    BLOCK,
    BYTES,
    COEFFICIENT,
    COUNT,
    DECAY,
    EPOCHS,
    LEARNING_RATE,
    SEED,
    SHARE,
    SHARE_BELOW_ALL,
    TOKENS,
    WIDTH,
    Range,
)
from stages.recipe.schema import setting, setting_of
from stages.recipe.sections.shared import CpuKernels, Training, check_divides


@dataclass(frozen=True)
class Scratch:
    """The small LLaMA that is trained when base.model is 'scratch'."""

    vocabulary_tokens: int = setting(
        2048, "size of the byte-level BPE vocabulary, special tokens included [ours]", within=Range(259, 10**6))
    hidden_size: int = setting(128, "width of the residual stream [ours]", within=WIDTH)
    intermediate_size: int = setting(384, "width of the gated MLP [ours]", within=WIDTH)
    layers: int = setting(4, "number of transformer blocks [ours]", within=Range(1, 1000))
    heads: int = setting(4, "number of attention heads [ours]", within=WIDTH)
    max_position_tokens: int = setting(1024, "maximum sequence length [ours]", within=TOKENS)
    epochs: float = setting(2.0, "passes over the text of the site [ours]", within=EPOCHS)
    max_tokens: int = setting(8_000_000, "maximum training tokens; it overrides epochs [ours]", within=COUNT)
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "'muon': Muon for the weight matrices of the layers, AdamW for the rest [ours]")
    learning_rate: float = setting(2e-3, "peak learning rate [ours]", within=LEARNING_RATE)
    weight_decay: float = setting(0.05, "weight decay of the optimizer [ours]", within=DECAY)
    sequence_length_tokens: int = setting(256, "length of a packed block [ours]", within=BLOCK)
    batch_sequences: int = setting(16, "blocks per step [ours]", within=BATCH)
    precision: Literal["fp32", "mixed"] = setting("mixed", "'mixed': fp32 weights, bf16 matrix products [ours]")
    save_every_steps: int = setting(250, "steps between checkpoints [ours]", within=COUNT)

    def __post_init__(self):
        check_divides(self.heads, self.hidden_size, "heads", "hidden_size")
        if self.hidden_size // self.heads % 2:
            raise ValueError(f"hidden_size / heads must be even, for rotary embeddings, not "
                             f"{self.hidden_size // self.heads}")
        if self.sequence_length_tokens > self.max_position_tokens:
            raise ValueError(f"sequence_length_tokens ({self.sequence_length_tokens}) must be at most "
                             f"max_position_tokens ({self.max_position_tokens})")

    @property
    def microbatch_sequences(self) -> int:
        """Return the blocks per forward pass: half of a step, which two processes can share."""
        return self.batch_sequences if self.batch_sequences % 2 else self.batch_sequences // 2


@dataclass(frozen=True)
class Base:
    """The pretrained base model."""

    model: str = setting("huggyllama/llama-7b", "hub id, local folder, .gguf file, or 'scratch' [paper: LLaMA 7B]")
    revision: str | None = setting(None, "commit or tag of a hub model; null: the newest [ours]")
    scratch: Scratch = setting(Scratch(), "used only if model is 'scratch'")
    save_every_minutes: float | None = setting_of(Training, "save_every_minutes")
    cpu_kernels: CpuKernels = setting_of(Training, "cpu_kernels")
    seed: int = setting(42, "seed of the initial weights and of the data order [ours]", within=SEED)


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter (Hu et al. 2021)."""

    r: int = setting(16, "rank [script]", within=WIDTH)
    alpha: int = setting(32, "scale of the adapter: alpha / r [script]", within=WIDTH)
    dropout: float = setting(0.05, "dropout on the adapter's input in training [script]", within=SHARE_BELOW_ALL)
    target_modules: tuple[str, ...] = setting(
        (), "names of the linear layers with an adapter; empty: PEFT's default for the model family [script]")


@dataclass(frozen=True)
class Merge:
    """Merging of adapters into the base weights, in fp32 on the unquantised base."""

    dtype: Literal["fp32", "bf16"] = setting("bf16", "dtype of the saved weights [script]")
    max_shard_bytes: int = setting(
        5_000_000_000, "maximum size of a weights file; a larger model is split [Transformers 4]", within=BYTES)
    max_logit_difference: float = setting(
        1e-3, "do not publish if a logit in fp32 differs by more between adapter and merged weights [ours]",
        within=COEFFICIENT)
    check_precision: Literal["fp32", "bf16"] = setting(
        "fp32", "precision of the models that the checks compare; 'bf16' needs half the memory, and lets logits "
                "differ by 1.5 times what a unit in the last place of all weights changes; the merged weights are the "
                "same [ours]", affects_result=False)
    max_perplexity_change: float = setting(
        0.01, "do not publish if the perplexity of the saved model, reloaded, is off by more than this share [ours]",
        within=COEFFICIENT)
    max_accuracy_change: float = setting(
        0.05, "do not publish if the pair accuracy of a reward model changes by more, absolute [ours]", within=SHARE)
    cpu_kernels: CpuKernels = setting_of(Training, "cpu_kernels")
