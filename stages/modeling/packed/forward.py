"""Forward passes of a model's backbone on packed batches; batches by length, packed or padded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from stages.distributed import sharding
from stages.distributed.units import own_units
from stages.modeling.families import backbone
from stages.modeling.packed import attention
from stages.modeling.packed.sequences import PackedBatch, pack, round_up_tokens
from stages.runtime.progress import Progress

FORWARD_TOKENS = 8192  # in one forward pass, unless one text has more: bounds its memory
PACKING_ROWS = (20, 12)  # tokens: a few first ids, often special ones, round to any result in a deep model in bf16
PACKING_LIMIT = 0.2  # relative difference (2-norm) of two computations of one text, as in trainable.py for int8


def pad_batch(
    rows: list[list[int]], side: str = "right", device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad token ids to (input_ids, attention_mask), both [rows, longest] int64; the filler is id 0, masked."""
    ids = [torch.tensor(row) for row in rows]
    masks = [torch.ones_like(row) for row in ids]
    return tuple(pad_sequence(each, batch_first=True, padding_side=side).to(device) for each in (ids, masks))


def chunk_by_length(
    lengths: Sequence[int], max_rows: int | None = None, max_tokens: int | None = None
) -> Iterator[list[int]]:
    """Yield indices, sorted by length, in chunks of at most `max_rows` and at most `max_tokens` together, or of one.

    The chunks depend on the lengths only.
    """
    chunk, tokens = [], 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if chunk and (len(chunk) == max_rows or (max_tokens and tokens + lengths[index] > max_tokens)):
            yield chunk
            chunk, tokens = [], 0
        chunk.append(index)
        tokens += lengths[index]
    if chunk:
        yield chunk


def own_chunks(
    lengths: Sequence[int], max_rows: int | None = None, max_tokens: int | None = None, label: str | None = None
) -> Iterator[list[int]]:
    """Yield this process's chunks of `chunk_by_length`, for a forward pass each, without gradients.

    Exhaust it: then this process takes part in the passes of the others. label: name of the progress line, in tokens;
    None shows none.
    """
    own = own_units(chunk_by_length(lengths, max_rows, max_tokens))
    progress = Progress(label, sum(lengths[i] for chunk in own for i in chunk), "tokens") if label else None
    for chunk in own:
        yield chunk
        if progress:
            progress.advance(sum(lengths[i] for i in chunk))
    if progress:
        progress.finish()
    sharding.join_other_passes()


def packed_hidden_states(model: PreTrainedModel, batch: PackedBatch, positions: torch.Tensor, **cache) -> torch.Tensor:
    """Compute the last hidden states of a packed batch at `positions` [M]: [M, width].

    cache: arguments of Transformers' forward, such as past_key_values.
    """
    inner = use_packed_attention(model)
    with mlp_at_positions(inner, positions, batch.input_ids.shape[1]):
        states = inner(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=attention.NO_MASK, batch=batch,
            **({"use_cache": False} | cache),
        ).last_hidden_state[0]
    return states.index_select(0, positions)


def use_packed_attention(model: PreTrainedModel, cpu_kernels: bool = False) -> PreTrainedModel:
    """Return the model's backbone, set to an attention that respects row boundaries; others would ignore them.

    cpu_kernels: switch to the CPU kernels. A model that uses them already goes on using them.
    """
    inner = backbone(model)
    name = attention.PACKED_CPU_KERNELS if cpu_kernels or uses_cpu_kernels(model) else attention.PACKED
    if inner.config._attn_implementation != name:
        attention.register()
        inner.set_attn_implementation(name)
        if inner.config._attn_implementation != name:  # Transformers only warns
            raise ValueError(f"the attention of this {model.config.model_type} model cannot be replaced: load it with "
                             f"stages.modeling.load")
    return inner


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """Raise ValueError if a row's hidden states depend on the row beside it in a packed batch.

    So it is in families with layers other than attention that look back, and where the attention is not ours.
    """
    ids = torch.randint(model.config.vocab_size, (sum(PACKING_ROWS),), generator=torch.Generator().manual_seed(0))
    rows = [row.tolist() for row in ids.split(PACKING_ROWS)]
    batch = pack(rows, model.device)
    states = packed_hidden_states(model, batch, batch.starts + batch.lengths - 1).float()
    for row, state in zip(rows, states, strict=True):
        ids = torch.tensor([row], device=model.device)
        alone = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state[0, -1].float()
        if not (state - alone).norm() <= PACKING_LIMIT * alone.norm():
            raise ValueError(f"{model.config.model_type} models cannot be packed: a text would depend on its neighbour "
                             f"in the batch; choose a base of another family")


def uses_cpu_kernels(model: PreTrainedModel) -> bool:
    """Check whether this model instance computes with the CPU kernels; its attention implementation records it."""
    return backbone(model).config._attn_implementation == attention.PACKED_CPU_KERNELS


@contextmanager
def mlp_at_positions(backbone: nn.Module, positions: torch.Tensor, tokens: int) -> Iterator[None]:
    """Make forward passes over `tokens` tokens [1, N, D] correct at `positions` [M] only, for as long as this is open.

    The MLP works token by token, and its output at other positions is never read. Where half of the tokens are prompts,
    this saves 5 % of a PPO iteration's CPU time and 8 % of a reward step's (a LLaMA of 4 layers, width 128).

    All positions are computed in a family whose layers have no `mlp` (OPT) and in layers that are recomputed
    (policy.recomputed_layers, Transformers): hooks would be gone at recomputation.
    """
    layers = [layer for layer in backbone.modules() if hasattr(layer, "mlp")]
    if not layers or "forward" in vars(layers[-1]) or getattr(layers[-1], "gradient_checkpointing", False):
        yield
        return
    mlp = layers[-1].mlp
    computed = _fill_to_round_size(positions, tokens)

    def select(mlp: nn.Module, inputs: tuple) -> tuple:
        return (inputs[0].index_select(1, computed), *inputs[1:])

    def scatter(mlp: nn.Module, inputs: tuple, out: torch.Tensor) -> torch.Tensor:
        return out.new_zeros(1, tokens, out.shape[2]).index_copy(1, computed, out)

    hooks = [mlp.register_forward_pre_hook(select), mlp.register_forward_hook(scatter)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fill_to_round_size(positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """Add positions up to a round size, in order, so that few different sizes occur (sequences.round_up_tokens)."""
    computed = torch.zeros(tokens, dtype=torch.bool, device=positions.device).index_fill_(0, positions, True)
    count = int(computed.sum())
    computed[(~computed).nonzero().squeeze(-1)[: round_up_tokens(count) - count]] = True
    return computed.nonzero().squeeze(-1)
