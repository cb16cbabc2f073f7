"""Load models and tokenizers: one place for precision, device, special tokens and adapters.

Precisions: 'fp32'; 'mixed' (fp32 weights, bf16 matrix products by autocast); 'bf16' (bf16 weights); 'int8' and 'nf4'
(bitsandbytes). fp16 is not offered: its range loses gradients without loss scaling.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora import LoraLayer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from stages.learning import attention, last_layer
from stages.learning.families import check_targets, guard, trunk
from stages.learning.lexical import Lexical
from stages.learning.native.layers import install
from stages.learning.ragged import Ragged

QUANTISED = ("int8", "nf4")
PAD = "<pad>"


def device() -> torch.device:
    """The process's accelerator, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def load_causal(folder: Path | str, precision: str = "fp32") -> PreTrainedModel:
    """A causal language model on this process's device, in eval mode."""
    return _load(AutoModelForCausalLM, folder, precision)


def load_scorer(folder: Path | str, precision: str = "fp32", new_head: bool = False) -> PreTrainedModel:
    """A sequence classifier with one output, in eval mode.

    new_head: `folder` is a causal model, and the head is to be made (see reward_model.initialise_head). Otherwise
    every tensor must be there: a head that is missing would be random, and no score would mean anything (ValueError).
    """
    model = _load(
        AutoModelForSequenceClassification,
        folder,
        precision,
        num_labels=1,
        may_miss=("score.weight",) if new_head else (),
    )
    needed = getattr(model.config, "reward_lexical", False)
    model.lexical = None if new_head else Lexical.load(Path(folder), needed)
    return model


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer, with a pad token distinct from BOS and EOS; ValueError without an EOS.

    A tokenizer without such a pad gets an extra id. It may lie outside the embedding: batches carry 0 in its place,
    masked (see `batched`), so that nothing is resized.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {folder} has no end-of-sequence token: answers could never end")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id, tokenizer.bos_token_id):
        tokenizer.add_special_tokens({"pad_token": PAD})
    return tokenizer


@torch.no_grad()
def grow(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Give every token id its row in the embeddings and the output layer; the pad's alone may lie outside.

    Returns the ids of the new rows, none where all were there. Each is the mean of the old rows: an unheard-of token
    then changes no softmax by much (Hewitt 2021), and with nothing drawn an adapter finds again the rows it was
    trained beside. Tied weights stay tied.
    """
    old = model.get_input_embeddings().num_embeddings
    beyond = _without_row(tokenizer, old)
    if not beyond:
        return []
    needed = 1 + max(beyond)
    model.resize_token_embeddings(needed, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for rows in (getattr(layer, "weight", None), getattr(layer, "bias", None)):
            if rows is not None:
                rows[old:] = rows[:old].float().mean(0).to(rows)
    return list(range(old, needed))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """ValueError where the tokenizer has a token, the pad apart, that the model has no row for."""
    beyond = _without_row(tokenizer, model.get_input_embeddings().num_embeddings)
    if beyond:
        raise ValueError(f"the tokenizer has {len(beyond)} tokens that the base has no vector for, "
                         f"{beyond[min(beyond)]!r} the first, and an adapter would not make one: set "
                         f"sft.train_new_tokens, or take them out")


def _without_row(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[int, str]:
    """Id to name of the tokens beyond an embedding of so many rows, the pad apart."""
    return {token: name for name, token in tokenizer.get_vocab().items()
            if token >= rows and token != tokenizer.pad_token_id}


def check_special_tokens(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """ValueError unless tokenizer and model agree on what ends a text (a known silent fault of LLaMA conversions)."""
    ids = config.eos_token_id
    expected = ids if isinstance(ids, list) else [ids]
    if ids is not None and tokenizer.eos_token_id not in expected:
        raise ValueError(
            f"the tokenizer ends texts with id {tokenizer.eos_token_id}, the model's config with {ids}: "
            f"correct config.json or the tokenizer of the base"
        )


def batched(
    rows: list[list[int]], side: str = "right", where: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged token ids to (input_ids, keep_mask), both [rows, longest] int64; filler is id 0 and masked."""
    longest = max(map(len, rows))
    input_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    keep_mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        input_ids[index, place] = torch.tensor(row)
        keep_mask[index, place] = 1
    return input_ids.to(where), keep_mask.to(where)


def chunks_by_length(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Indices in groups of at most `size`, like lengths together: fewer pads. The order depends on the lengths only."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for start in range(0, len(order), size):
        yield order[start : start + size]


def positions(keep_mask: torch.Tensor) -> torch.Tensor:
    """Position ids [rows, length]: a real token's position counts the real tokens before it, whatever the padding."""
    return (keep_mask.cumsum(-1) - 1).clamp(min=0)


def last_hidden_states(model: PreTrainedModel, input_ids: torch.Tensor, keep_mask: torch.Tensor) -> torch.Tensor:
    """What the trunk under a model's head computes, [rows, length, width], for rows padded on either side."""
    states = trunk(model)(input_ids=input_ids, attention_mask=keep_mask, position_ids=positions(keep_mask))
    return states.last_hidden_state


def ragged_states(model: PreTrainedModel, batch: Ragged, wanted: torch.Tensor, **cache) -> torch.Tensor:
    """As `last_hidden_states`, for rows laid end to end, at the tokens `wanted` [M]: [M, width].

    cache: as Transformers takes it.
    """
    inner = attended(model)
    with last_layer.only_at(inner, wanted, batch.input_ids.shape[1]):
        states = inner(
            input_ids=batch.input_ids, position_ids=batch.positions, attention_mask=attention.NO_MASK, batch=batch,
            **({"use_cache": False} | cache),
        ).last_hidden_state[0]
    return states.index_select(0, wanted)


def attended(model: PreTrainedModel) -> PreTrainedModel:
    """The trunk, sure to attend as attention.py does: another implementation would pass over the rows' ends."""
    inner = trunk(model)
    if inner.config._attn_implementation != attention.NAME:
        inner.set_attn_implementation(attention.NAME)
    return inner


def plain(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model itself, under its adapters if it has any."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def adapted_layers(model: PreTrainedModel | PeftModel) -> list[LoraLayer]:
    """The layers that carry an adapter."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def autocast(precision: str):
    """The context of a forward pass in this precision."""
    return torch.autocast(device().type, dtype=torch.bfloat16) if precision == "mixed" else nullcontext()


def add_lora(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: int,
    dropout: float,
    target_modules: tuple[str, ...],
    precision: str,
    scorer: bool = False,
    new_tokens: Sequence[int] = (),
) -> PeftModel:
    """A fresh adapter on a frozen base; only it (and a scorer's head) requires gradients.

    target_modules: names of layers; none: those that PEFT knows for the family. new_tokens: ids whose rows in the
    embeddings and in the output layer learn as well.
    """
    check_targets(model, target_modules)
    if precision in QUANTISED:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS if scorer else TaskType.CAUSAL_LM,
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        bias="none",
        target_modules=list(target_modules) or None,
        modules_to_save=["score"] if scorer else None,
        trainable_token_indices={name: list(new_tokens) for name in _vocabularies(model)} if new_tokens else None,
    )
    return get_peft_model(model, config)


def _vocabularies(model: PreTrainedModel) -> list[str]:
    """Last names of the layers with a row for each token."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name.split(".")[-1] for name, module in model.named_modules() if module in layers]


def _load(kind, folder, precision: str, may_miss: tuple[str, ...] = (), **more) -> PreTrainedModel:
    where = device()
    if precision == "int8":
        more["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head", "score"])
    elif precision == "nf4":
        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=["lm_head", "score"],
        )
    dtype = torch.float32 if precision in ("fp32", "mixed") else torch.bfloat16
    model, info = kind.from_pretrained(
        folder, dtype=dtype, device_map={"": where}, use_safetensors=True, output_loading_info=True,
        attn_implementation=attention.NAME, **more
    )
    missing = set(info["missing_keys"]) - set(may_miss)
    if missing:
        raise ValueError(f"{folder} lacks the weights {', '.join(sorted(missing)[:3])}: they would be random")
    for module in model.modules():
        # bitsandbytes repacks nf4 weights at the first forward without gradients on such a CPU, and from then on no
        # gradient flows through them: an adapter would stop learning in silence after the first sample is drawn.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model.eval()
    install(model)
    guard(model)
    return model
