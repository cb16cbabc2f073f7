"""TODO docstring."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.schema import setting


@dataclass(frozen=True)
class Scratch:
    """The small LLaMA that is trained when base.model is 'scratch'."""

    vocabulary_tokens: int = setting(2048, "size of the byte-level BPE, special tokens included [ours]")
    hidden_size: int = setting(128, "width of the residual stream [ours]")
    intermediate_size: int = setting(384, "width of the gated MLP [ours]")
    layers: int = setting(4, "transformer blocks [ours]")
    heads: int = setting(4, "attention heads [ours]")
    max_position_tokens: int = setting(1024, "longest sequence [ours]")
    initializer_range: float = setting(0.05, "standard deviation of initial weights; 0.02 learns facts slower here [ours]")
    epochs: float = setting(2.0, "passes over the site's text [ours]")
    max_tokens: int = setting(8_000_000, "stop after this many tokens, whatever epochs says [ours]")
    learning_rate: float = setting(2e-3, "peak step size of AdamW [ours]")
    weight_decay: float = setting(0.05, "of AdamW [ours]")
    warmup_share: float = setting(0.05, "share of the steps in which the step size rises [ours]")
    sequence_length_tokens: int = setting(256, "length of a packed block [ours]")
    batch_sequences: int = setting(16, "blocks a step [ours]")
    precision: Literal["fp32", "mixed"] = setting("mixed", "'mixed': fp32 weights, bf16 matrix products [ours]")
    save_every_steps: int = setting(250, "steps between checkpoints [ours]")


@dataclass(frozen=True)
class Base:
    """The pretrained model that everything starts from."""

    model: str = setting("huggyllama/llama-7b", "hub id, local folder, or 'scratch' [paper: LLaMA 7B]")
    revision: str | None = setting(None, "commit or tag of a hub model; null is the newest [ours]")
    scratch: Scratch = setting(Scratch(), "used only when model is 'scratch'")
    seed: int = setting(42, "of initialisation and order [ours]")


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter (Hu et al. 2021)."""

    r: int = setting(16, "rank [script]")
    alpha: int = setting(32, "scale is alpha / r [script]")
    dropout: float = setting(0.05, "on the adapter's input while it trains [script]")
    target_modules: tuple[str, ...] = setting((), "names of linear layers; empty: PEFT's choice for the family [script]")


@dataclass(frozen=True)
class Merge:
    """Adapters into base weights, in fp32 on the unquantised base."""

    dtype: Literal["fp32", "bf16"] = setting("bf16", "of the saved weights [script]")
    max_shard_bytes: int = setting(5_000_000_000, "of a file of weights; a larger model has several [Transformers 4]")
    max_logit_difference: float = setting(1e-3, "largest |adapter-on minus merged| in fp32 that is published [ours]")
    max_perplexity_change: float = setting(
        0.01, "largest |after / before - 1| that is published: reloaded from disk against adapters on [ours]")
    max_accuracy_change: float = setting(0.05, "of a reward model, as much of its pair accuracy, absolute [ours]")

    def __post_init__(self):
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be 1 or more, not {self.max_shard_bytes}")
