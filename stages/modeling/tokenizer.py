"""Load tokenizers, and check that they fit a model."""

from pathlib import Path

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from stages.model_files.loadable import check_whole_model
from stages.modeling import torch_setup

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


def prepare_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Set up torch, and load the tokenizer of the model that a program starts from.

    Raises ValueError at once if the folder holds no whole model.
    """
    check_whole_model(folder)
    torch_setup.prepare()
    return load_tokenizer(folder)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise ValueError if the tokenizer has a token, other than the pad, without an embedding in the model."""
    rows = model.get_input_embeddings().num_embeddings
    missing = {token: name for name, token in tokenizer.get_vocab().items()
               if token >= rows and token != tokenizer.pad_token_id}
    if missing:
        raise ValueError(f"the tokenizer has {len(missing)} tokens without an embedding in the base, the first is "
                         f"{missing[min(missing)]!r}, and training adds none: add rows to the base by Transformers' "
                         f"resize_token_embeddings, or remove the tokens from the tokenizer")


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
