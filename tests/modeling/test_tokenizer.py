"""Tokens without a row in the embedding are refused, the pad apart."""

import pytest

from stages.modeling.load import load_causal
from stages.modeling.tokenizer import check_vocabulary, load_tokenizer
from tests.helpers import architectures


def test_the_pad_alone_needs_no_row_and_other_tokens_do(tmp_path):
    base = architectures.save(architectures.FAMILIES["llama"], tmp_path)
    tokenizer, model = load_tokenizer(base), load_causal(base)
    assert tokenizer.pad_token_id == architectures.VOCABULARY
    check_vocabulary(tokenizer, model)
    tokenizer.add_tokens(["<code>", "</code>"])
    with pytest.raises(ValueError, match=r"2 tokens without an embedding in the base, the first is '<code>', .*"
                                         r"resize_token_embeddings, or remove the tokens"):
        check_vocabulary(tokenizer, model)
    model.resize_token_embeddings(128)
    check_vocabulary(tokenizer, model)
