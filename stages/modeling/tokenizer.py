"""Load tokenizers, and check that they fit a model."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PAD = "<pad>"


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """Load a tokenizer with a pad token distinct from BOS and EOS; ValueError without an EOS token.

    A tokenizer without such a pad token gets an extra id. The id may exceed the embedding, which is not resized:
    batches are packed, or padded with a masked 0 (packed.forward.pad_batch).
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {folder} has no end-of-sequence token: answers could never end")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id, tokenizer.bos_token_id):
        tokenizer.add_special_tokens({"pad_token": PAD})
    return tokenizer


@torch.no_grad()
def resize_token_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Add rows to the embeddings and the output layer, so that every token id except the pad's has one.

    Each new row is the mean of the old ones: it changes the softmax little (Hewitt 2021), and without random numbers an
    adapter meets the same rows as in training. Tied weights stay tied. Returns the ids of the new rows.
    """
    old = model.get_input_embeddings().num_embeddings
    missing = _tokens_without_row(tokenizer, old)
    if not missing:
        return []
    needed = 1 + max(missing)
    model.resize_token_embeddings(needed, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for rows in (getattr(layer, "weight", None), getattr(layer, "bias", None)):
            if rows is not None:
                rows[old:] = mean_row(rows[:old]).to(rows)
    return list(range(old, needed))


def mean_row(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of an embedding's rows in fp32, the initial row of a new token."""
    return rows.float().mean(0)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise ValueError if the tokenizer has a token, other than the pad, without an embedding in the model."""
    missing = _tokens_without_row(tokenizer, model.get_input_embeddings().num_embeddings)
    if missing:
        raise ValueError(f"the tokenizer has {len(missing)} tokens without an embedding in the base, the first is "
                         f"{missing[min(missing)]!r}, and an adapter adds none: set sft.train_new_tokens, or remove "
                         f"them from the tokenizer")


def _tokens_without_row(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[int, str]:
    """Map the ids beyond an embedding of so many rows, except the pad's, to token names."""
    return {token: name for name, token in tokenizer.get_vocab().items()
            if token >= rows and token != tokenizer.pad_token_id}


def check_special_tokens(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Raise ValueError unless tokenizer and model agree on the EOS id (a known silent error of LLaMA conversions)."""
    ids = config.eos_token_id
    expected = ids if isinstance(ids, list) else [ids]
    if ids is not None and tokenizer.eos_token_id not in expected:
        raise ValueError(
            f"the tokenizer ends texts with id {tokenizer.eos_token_id}, the model's config with {ids}: "
            f"correct config.json or the tokenizer of the base"
        )


def load_shared_tokenizer(*folders):
    """Load the one tokenizer that all of these models use; ValueError if they differ."""
    first = load_tokenizer(folders[0])
    for folder in folders[1:]:
        if not same_tokenizer(folder, first):
            raise ValueError(f"{folder} has another tokenizer than {folders[0]}: they cannot be compared")
    return first


def same_tokenizer(folder: Path, tokenizer) -> bool:
    """Check whether the model in `folder` has the same vocabulary."""
    return load_tokenizer(folder).get_vocab() == tokenizer.get_vocab()
