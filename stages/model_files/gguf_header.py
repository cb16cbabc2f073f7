"""Read the header of a GGUF file by PyPI's gguf, and refuse what cannot be converted; no weight is read.

It takes some seconds for a vocabulary of 50,000 tokens.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

SUFFIX = ".gguf"
MAGIC = b"GGUF"
# Those of which tests/modeling/test_gguf.py compares a converted model with llama.cpp.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Of `tokenizer.ggml.pre`: how a text is split before the merges. Tested likewise; stages/modeling/gguf has the splits.
PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")
BYTE_LEVEL = "gpt2"  # of `tokenizer.ggml.model`
INSTALL = "pip install 'gguf>=0.19,<0.20'"


class GgufHeader(NamedTuple):
    """What the header of a GGUF file says.

    values: its keys and their values, without lists. file_type: as Q4_1, that of most weights. parameters: number of
    all weights.
    """

    values: dict[str, Any]
    file_type: str
    parameters: int

    @property
    def pre_tokenizer(self) -> str:
        """Return how a text is split before the merges, as llama.cpp names it."""
        return self.values["tokenizer.ggml.pre"]

    @property
    def weight_bits(self) -> int:
        """Return the bits of a weight, scales apart: 4 of Q4_1, 16 of BF16."""
        return int(re.search(r"\d+", self.file_type).group())


def is_gguf(model: str) -> bool:
    """Check whether a base is named as a GGUF file."""
    return model.lower().endswith(SUFFIX)


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the header of a GGUF file that can be converted.

    Raises ValueError, in one line, for another file, one that is cut off, an architecture, a kind of quantisation or a
    tokenizer that is not tested here, and without the package gguf.
    """
    with open(file, "rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{file} is no GGUF file: it does not begin with the letters GGUF")
    reader = _open_reader(file)
    values = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
    _check_architecture(file, values.get("general.architecture"))
    _check_tokenizer(file, values)
    weights = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    counts = Counter()
    for tensor in weights:
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    if not counts:
        raise ValueError(f"{file} holds no weights: download it again")
    return GgufHeader(values, max(counts, key=counts.get), sum(int(tensor.n_elements) for tensor in reader.tensors))


def _open_reader(file: Path):
    """Map the file into memory, and read its header; the package checks that every tensor lies within the file."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError(f"{file} needs the package gguf, which is not installed: {INSTALL}") from None
    try:
        return GGUFReader(file)
    except Exception as error:  # of a damaged header anything may come
        words = " ".join(str(error).split())
        if "GGMLQuantizationType" in words:
            raise ValueError(f"{file} has weights of a kind of quantisation that the package gguf does not know "
                             f"({words[:100]}): give another file of this model, as Q8_0") from error
        raise ValueError(f"{file} is cut off or damaged: download it again ({words[:100]})") from error


def _check_architecture(file: Path, name: str | None) -> None:
    if name not in ARCHITECTURES:
        raise ValueError(f"{file} holds a model of the architecture {name!r}, which is not tested from GGUF (tested: "
                         f"{', '.join(ARCHITECTURES)}): give its folder with safetensors weights")


def _check_tokenizer(file: Path, values: dict) -> None:
    kind, pre = (values.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind != BYTE_LEVEL or pre not in PRE_TOKENIZERS:
        raise ValueError(f"{file} has a tokenizer ({kind!r}, pre-tokenizer {pre!r}) that is not tested from GGUF "
                         f"(tested: {BYTE_LEVEL!r} with {', '.join(PRE_TOKENIZERS)}): converted, it might split texts "
                         f"wrongly; give the model's folder with safetensors weights")
    if "tokenizer.ggml.eos_token_id" not in values:
        raise ValueError(f"{file} names no end-of-sequence token: answers could never end")
