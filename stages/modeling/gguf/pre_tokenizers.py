"""Split texts as llama.cpp does for a vocabulary: the pre-tokenizers that are tested here, by their names in GGUF.

Transformers has some of them, and takes GPT-2's for any other without a word: then "\\n\\n1." of SmolLM, whose digits
are split off first, is cut at another place than in the model's training. So all are set here, from one table.
llama.cpp's names and expressions: src/llama-vocab.cpp. tests/modeling/test_gguf.py compares the tokens.
"""

from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerFast

LETTERS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{numbers}"
           r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


class VocabularySplit(NamedTuple):
    """How a vocabulary splits texts.

    takes_whole_words: whether a word that is a token is one, whatever the merges would give. adds_bos: whether a text
    begins with BOS, if the file does not say.
    """

    pre_tokenizer: PreTokenizer
    takes_whole_words: bool = False
    adds_bos: bool = False


def build_split(name: str) -> VocabularySplit:
    """Build the split of `tokenizer.ggml.pre`; KeyError for one that is not tested (model_files.gguf_header)."""
    return {
        "gpt-2": lambda: VocabularySplit(ByteLevel(add_prefix_space=False, use_regex=True)),
        "smollm": lambda: VocabularySplit(Sequence([
            Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])),
        "llama-bpe": lambda: VocabularySplit(_split_by(LETTERS.format(numbers="{1,3}")), takes_whole_words=True,
                                             adds_bos=True),
        "qwen2": lambda: VocabularySplit(_split_by(LETTERS.format(numbers=""))),
    }[name]()


def _split_by(expression: str) -> PreTokenizer:
    return Sequence([Split(Regex(expression), behavior="isolated"),
                     ByteLevel(add_prefix_space=False, use_regex=False)])


def repair_splits(tokenizer: PreTrainedTokenizerFast, name: str) -> VocabularySplit:
    """Make a tokenizer that Transformers read from GGUF split texts as llama.cpp does; return how."""
    split = build_split(name)
    tokenizer.backend_tokenizer.pre_tokenizer = split.pre_tokenizer
    tokenizer.backend_tokenizer.model.ignore_merges = split.takes_whole_words
    return split
