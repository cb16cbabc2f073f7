"""TODO docstring."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PAD = "<pad>"


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
def resize_token_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Give every token id its row in the embeddings and the output layer; the pad's alone may lie outside.

    Returns the ids of the new rows, none where all were there. Each is the mean of the old rows: an unheard-of token
    then changes no softmax by much (Hewitt 2021), and with nothing drawn an adapter finds again the rows it was
    trained beside. Tied weights stay tied.
    """
    old = model.get_input_embeddings().num_embeddings
    beyond = _tokens_without_row(tokenizer, old)
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
    beyond = _tokens_without_row(tokenizer, model.get_input_embeddings().num_embeddings)
    if beyond:
        raise ValueError(f"the tokenizer has {len(beyond)} tokens that the base has no vector for, "
                         f"{beyond[min(beyond)]!r} the first, and an adapter would not make one: set "
                         f"sft.train_new_tokens, or take them out")


def _tokens_without_row(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[int, str]:
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


def shared_tokenizer(*folders):
    """The one tokenizer of several models; ValueError when they differ: ids of one would mean nothing to another."""
    first = load_tokenizer(folders[0])
    for folder in folders[1:]:
        if not same_tokenizer(folder, first):
            raise ValueError(f"{folder} has another tokenizer than {folders[0]}: they cannot be compared")
    return first


def same_tokenizer(folder: Path, tokenizer) -> bool:
    """Whether the model in `folder` knows the same ids by the same names."""
    return load_tokenizer(folder).get_vocab() == tokenizer.get_vocab()
