"""Name and order the tensors of the LLaMA family as llama.cpp does, round them, and compare what was written.

Rotary positions turn pairs of rows of the query and key matrices. Transformers pairs row i of a head with row i + half;
llama.cpp's `llama` pairs neighbours, and its `qwen2` and `qwen3` are as Transformers.
"""

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig

from stages.model_files.safetensors_header import read_header

Kind = gguf.GGMLQuantizationType
# Model types of Transformers, by their architecture in llama.cpp. Those that stages.modeling.gguf.convert reads.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
LARGE = ("token_embd.weight", "output.weight")  # with 4 bits, these take 8, as llama.cpp's own quantiser does
EXACT = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
STEPS = {Kind.Q8_0: 127, Kind.Q4_1: 15}  # of a block's scale
BLOCK = 32  # weights that share a scale
HALF_ULP = 2.0**-11  # relative error of rounding to fp16, in which scales are stored
HALF_SUBNORMAL = 2.0**-25  # absolute error of the same, below its smallest normal number
SLACK = 1e-5  # of a step: sums in fp32


class WrittenTensor(NamedTuple):
    """A tensor of a folder, and how it is written.

    source: its name and file in the folder. name: in GGUF. heads: whose rotary pairs become neighbours; None: the rows
    stay in order.
    """

    source: str
    file: Path
    name: str
    shape: tuple[int, ...]
    heads: int | None
    kind: Kind

    def load(self) -> torch.Tensor:
        """Read the folder's tensor, in fp32 and in the folder's order."""
        with safe_open(self.file, "pt") as weights:
            return weights.get_tensor(self.source).float()

    def encode(self) -> np.ndarray:
        """Read the folder's tensor, ordered and rounded as it is written."""
        rows = self.load()
        if self.heads:
            rows = rows.reshape(self.heads, 2, -1, *self.shape[1:]).transpose(1, 2).reshape(self.shape)
        with np.errstate(over="ignore"):  # compare_tensor refuses what fp16 cannot hold
            return gguf.quantize(np.ascontiguousarray(rows.numpy()), self.kind)

    def decode(self, data: np.ndarray) -> torch.Tensor:
        """Restore what was written: fp32, in the folder's order."""
        rows = torch.from_numpy(np.array(gguf.dequantize(data, self.kind), dtype=np.float32)).reshape(self.shape)
        if self.heads:
            rows = rows.reshape(self.heads, -1, 2, *self.shape[1:]).transpose(1, 2).reshape(self.shape)
        return rows

    @property
    def size_bytes(self) -> int:
        """Return the bytes that it takes."""
        block, size_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block * size_bytes


def list_tensors(folder: Path, config: PretrainedConfig, kind: Kind) -> list[WrittenTensor]:
    """List the tensors of a model's folder and how each is written; vectors (norms, biases) stay in fp32.

    Raises ValueError if the folder has other weights than its family's model, or rows of a length that has no blocks.
    """
    files = {name: (file, tuple(entry["shape"])) for file in sorted(folder.glob("*.safetensors"))
             for name, entry in read_header(file)[0].items()}
    with torch.device("meta"):
        expected = {name: tuple(weight.shape) for name, weight in
                    AutoModelForCausalLM.from_config(config).state_dict().items()}
    if config.tie_word_embeddings:  # the file may repeat them
        files.pop("lm_head.weight", None)
        expected.pop("lm_head.weight")
    shapes = {name: shape for name, (_, shape) in files.items()}
    if other := sorted({name for name, _ in shapes.items() ^ expected.items()}):
        raise ValueError(f"{folder} has other weights than the {config.model_type} model of its config.json, such as "
                         f"{other[0]}: one is missing, one too many, or of another shape")
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    tensors = []
    for source, shape in expected.items():
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        swapped = next((count for end, count in heads.items() if source.endswith(end)), None)
        own = Kind.F32 if len(shape) == 1 else Kind.Q8_0 if kind == Kind.Q4_1 and name in LARGE else kind
        if own in STEPS and shape[-1] % BLOCK:
            raise ValueError(f"{folder}: {source} has rows of {shape[-1]} weights, and {own.name} takes blocks of "
                             f"{BLOCK}: export it with --type f16")
        tensors.append(WrittenTensor(source, files[source][0], name, shape,
                                     swapped if architecture == "llama" else None, own))
    return tensors


def compare_tensor(tensor: WrittenTensor, data: np.ndarray) -> float:
    """Compare a tensor that was read back with the folder's; return the largest error.

    The error of F32, F16 and BF16, which must equal the folder's rounded, is absolute; that of a quantised one is in
    steps of its blocks' scales. Raises ValueError for a greater error than rounding makes.
    """
    original, written = tensor.load(), tensor.decode(data)
    errors = (written - original).abs()
    if tensor.kind in EXACT:
        is_right = torch.equal(written, original.to(EXACT[tensor.kind]).float())
    else:
        step, limit = _block_steps(original, tensor.kind)
        errors = errors.reshape(step.shape[0], BLOCK)
        is_right = bool((errors <= limit).all())
        errors = torch.where(step > 0, errors / step, 0.0)
    if not (is_right and torch.isfinite(written).all()):
        advice = "; fp16 ends at 65,504: take --type bf16" if original.abs().max() > torch.finfo(torch.half).max else ""
        raise ValueError(f"{tensor.source}, read back as {tensor.name} in {tensor.kind.name}, differs from the "
                         f"folder's by more than rounding, and nothing is published{advice}")
    return float(errors.max())


def _block_steps(original: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step of each block, and the largest error of a weight: half a step, and fp16's of the scales."""
    blocks, steps = original.reshape(-1, BLOCK), STEPS[kind]
    least, most = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    step = (most - least) / steps if kind == Kind.Q4_1 else torch.maximum(most, -least) / steps
    offset = least.abs() if kind == Kind.Q4_1 else torch.zeros_like(least)
    return step, step * (0.5 + SLACK) + (step * steps + offset) * HALF_ULP + (steps + 1) * HALF_SUBNORMAL
