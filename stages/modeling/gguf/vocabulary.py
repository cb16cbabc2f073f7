"""Read a byte-level BPE vocabulary as GGUF has it, refuse one that llama.cpp would split or merge otherwise, and split
texts as llama.cpp does.

llama.cpp has no general tokenizer: `tokenizer.ggml.pre` names one of its own ways to split a text before the merges. A
name is given only to the tokenizer whose way that is.
"""

import json
from pathlib import Path
from typing import NamedTuple

from gguf import TokenType
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from stages.model_files.gguf_header import PRE_TOKENIZERS
from stages.stackexchange.prompt import adds_bos

COMPOSES = {"type": "NFC"}  # accents, of Qwen's tokenizers; llama.cpp leaves it out
INSTEAD = "Ollama can import the folder itself: FROM the folder, in a Modelfile"
LETTERS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{numbers}"
           r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


class Vocabulary(NamedTuple):
    """Tokens with their types and merges, as GGUF has them; pre: the name of the split. adds_bos: at a text's start."""

    pre: str
    tokens: list[str]
    types: list[TokenType]
    merges: list[str]
    adds_bos: bool


def read_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, folder: Path) -> Vocabulary:
    """Read the vocabulary of a model whose embedding has so many rows; ValueError if llama.cpp has no such tokenizer.

    A pad token without a row is left out; a row without a token gets an unused one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {"model": {"type": "slow"}}
    pre = _name_split(state, folder)
    tokens, types = [f"[PAD{row}]" for row in range(rows)], [TokenType.UNUSED] * rows
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        if number < rows:
            tokens[number], types[number] = token, TokenType.NORMAL
        elif number != tokenizer.pad_token_id:
            raise ValueError(f"{folder}: the token {token!r} has the id {number}, and the embedding {rows} rows")
    for token in (entry for entry in state["added_tokens"] if entry["id"] < rows):
        if any(token[option] for option in ("lstrip", "rstrip", "single_word")):
            raise ValueError(f"{folder}: its token {token['content']!r} takes the white space beside it, which "
                             f"llama.cpp does not; {INSTEAD}")
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    begins = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    if tokenizer("a").input_ids != begins + tokenizer("a", add_special_tokens=False).input_ids:
        raise ValueError(f"{folder}: its tokenizer adds other tokens to a text than BOS at the start; {INSTEAD}")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]]
    return Vocabulary(pre, tokens, types, merges, bool(begins))


def _name_split(state: dict, folder: Path) -> str:
    """Return llama.cpp's name of the way in which a tokenizer splits texts; state: as in tokenizer.json."""
    model = state["model"]
    if model["type"] != "BPE" or model["byte_fallback"] or not (steps := _list_steps(state["pre_tokenizer"])):
        raise ValueError(f"{folder}: exported are byte-level BPE vocabularies, and it has another; {INSTEAD}")
    for name in PRE_TOKENIZERS:
        split = build_split(name)
        own_steps = _list_steps(json.loads(split.pre_tokenizer.__getstate__()))
        if (own_steps, split.takes_whole_words) == (steps, model["ignore_merges"]):
            _check_nothing_else(state, name, folder)
            return name
    raise ValueError(f"{folder}: its tokenizer splits texts in none of the ways that are tested with llama.cpp "
                     f"({', '.join(PRE_TOKENIZERS)}), and there its tokens would differ in silence; {INSTEAD}")


def _check_nothing_else(state: dict, name: str, folder: Path) -> None:
    """Raise ValueError if the tokenizer changes texts beside splitting and merging them."""
    model = state["model"]
    normalizers = (None, COMPOSES) if name == "qwen2" else (None,)
    changes = [option for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model[option]]
    if not set(ByteLevel.alphabet()) <= model["vocab"].keys() and model["unk_token"]:
        changes.append("unk_token")  # without one, llama.cpp too leaves out the bytes that have no token
    if state["normalizer"] not in normalizers or changes:
        words = ", ".join(changes or ["normalizer"])
        raise ValueError(f"{folder}: its tokenizer has a {words}, which llama.cpp's {name!r} has not; {INSTEAD}")


def _list_steps(state: dict | None) -> list[dict]:
    """List the steps of a pre-tokenizer without what changes no token; none if it does not end in bytes."""
    steps = state["pretokenizers"] if state and state["type"] == "Sequence" else [state] if state else []
    steps = [{name: value for name, value in step.items() if name != "trim_offsets"} for step in steps]
    return steps if steps and steps[-1]["type"] == "ByteLevel" else []


class VocabularySplit(NamedTuple):
    """How a vocabulary splits texts.

    takes_whole_words: whether a word that is a token is one, whatever the merges would give. adds_bos: whether a text
    begins with BOS, if the file does not say.
    """

    pre_tokenizer: PreTokenizer
    takes_whole_words: bool = False
    adds_bos: bool = False


def build_split(name: str) -> VocabularySplit:
    """Build the split of `tokenizer.ggml.pre`; KeyError for one that is not tested (model_files.gguf_header).

    Transformers has some of them, and takes GPT-2's for any other without a word: then "\\n\\n1." of SmolLM, whose
    digits are split off first, is cut at another place than in the model's training. So all are set here, from one
    table. llama.cpp's names and expressions: src/llama-vocab.cpp. tests/modeling/test_gguf.py compares the tokens.
    """
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
