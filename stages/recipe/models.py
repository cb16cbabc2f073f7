"""Settings of the base model, LoRA adapters and merging."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.checks import CpuKernels, cpu_kernels_setting
from stages.recipe.schema import setting


@dataclass(frozen=True)
class Scratch:
    """The small LLaMA that is trained when base.model is 'scratch'."""

    vocabulary_tokens: int = setting(2048, "size of the byte-level BPE vocabulary, special tokens included [ours]")
    hidden_size: int = setting(128, "width of the residual stream [ours]")
    intermediate_size: int = setting(384, "width of the gated MLP [ours]")
    layers: int = setting(4, "number of transformer blocks [ours]")
    heads: int = setting(4, "number of attention heads [ours]")
    max_position_tokens: int = setting(1024, "maximum sequence length [ours]")
    initializer_range: float = setting(
        0.05, "standard deviation of the initial weights; 0.02 learns facts more slowly here [ours]")
    epochs: float = setting(2.0, "passes over the text of the site [ours]")
    max_tokens: int = setting(8_000_000, "maximum training tokens; it overrides epochs [ours]")
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "'muon': Muon for the weight matrices of the layers, AdamW for the rest [ours]")
    learning_rate: float = setting(2e-3, "peak learning rate [ours]")
    weight_decay: float = setting(0.05, "weight decay of AdamW [ours]")
    warmup_share: float = setting(0.05, "share of the steps with a linear warmup of the learning rate [ours]")
    sequence_length_tokens: int = setting(256, "length of a packed block [ours]")
    batch_sequences: int = setting(16, "blocks per step [ours]")
    precision: Literal["fp32", "mixed"] = setting("mixed", "'mixed': fp32 weights, bf16 matrix products [ours]")
    save_every_steps: int = setting(250, "steps between checkpoints [ours]")


@dataclass(frozen=True)
class Base:
    """The pretrained base model."""

    model: str = setting("huggyllama/llama-7b", "hub id, local folder, or 'scratch' [paper: LLaMA 7B]")
    revision: str | None = setting(None, "commit or tag of a hub model; null: the newest [ours]")
    scratch: Scratch = setting(Scratch(), "used only if model is 'scratch'")
    cpu_kernels: CpuKernels = cpu_kernels_setting()
    seed: int = setting(42, "seed of the initial weights and of the data order [ours]")


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter (Hu et al. 2021)."""

    r: int = setting(16, "rank [script]")
    alpha: int = setting(32, "scale of the adapter: alpha / r [script]")
    dropout: float = setting(0.05, "dropout on the adapter's input in training [script]")
    target_modules: tuple[str, ...] = setting(
        (), "names of the linear layers with an adapter; empty: PEFT's default for the model family [script]")


@dataclass(frozen=True)
class Merge:
    """Merging of adapters into the base weights, in fp32 on the unquantised base."""

    dtype: Literal["fp32", "bf16"] = setting("bf16", "dtype of the saved weights [script]")
    max_shard_bytes: int = setting(
        5_000_000_000, "maximum size of a weights file; a larger model is split [Transformers 4]")
    max_logit_difference: float = setting(
        1e-3, "do not publish if a logit in fp32 differs by more between adapter and merged weights [ours]")
    max_perplexity_change: float = setting(
        0.01, "do not publish if the perplexity of the saved model, reloaded, is off by more than this share [ours]")
    max_accuracy_change: float = setting(
        0.05, "do not publish if the pair accuracy of a reward model changes by more, absolute [ours]")
    cpu_kernels: CpuKernels = cpu_kernels_setting()

    def __post_init__(self):
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be 1 or more, not {self.max_shard_bytes}")
