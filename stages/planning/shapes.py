"""Read the shape of a base model from its configuration, without torch: its matrices, parameters and bytes."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from stages.model_files.gguf_header import is_gguf, read_gguf_header

BUNDLED = Path(__file__).parents[2] / "configs/shapes"
NF4_BLOCK = 64  # weights that share a scale
QUANTISED = ("int8", "nf4")
ATTENTION_INPUTS, MLP_INPUTS = ("query", "key", "value", "fused"), ("gate", "up")


class Family(NamedTuple):
    """What the layers of a family have; the defaults are LLaMA's.

    matrices: name and role of each. biased: names of those with a bias, beside attention_bias and mlp_bias of the
    configuration. norms, final_norms: vectors of the width in a layer, and after the last one. query_key_norm:
    parameters, for each head ("head"), or as wide as all heads ("width"). positions: rows of learnt positions beside
    the configuration's, None: not learnt. tied: without a word of the configuration. targets: PEFT's, of an adapter.
    """

    matrices: str = "q_proj:query k_proj:key v_proj:value o_proj:out gate_proj:gate up_proj:up down_proj:down"
    biased: str = ""
    norms: int = 2
    final_norms: int = 1
    query_key_norm: str = ""
    positions: int | None = None
    tied: bool = False
    biased_output: bool = False
    targets: tuple[str, ...] = ("q_proj", "v_proj")


PHI = "q_proj:query k_proj:key v_proj:value dense:out fc1:up fc2:down"
GPT2 = "c_attn:fused c_proj:out c_fc:up c_proj:down"
GPTJ = "q_proj:query k_proj:key v_proj:value out_proj:out fc_in:up fc_out:down"
NEOX = "query_key_value:fused dense:out dense_h_to_4h:up dense_4h_to_h:down"
OPT = "q_proj:query k_proj:key v_proj:value out_proj:out fc1:up fc2:down"
# By model_type; a family that is not here is planned as LLaMA.
FAMILIES = {
    "qwen2": Family(biased="q_proj k_proj v_proj"),
    "qwen3": Family(query_key_norm="head"),
    "gemma2": Family(norms=4, tied=True),
    "gemma3_text": Family(norms=4, query_key_norm="head", tied=True),
    "olmo2": Family(query_key_norm="width"),
    "cohere": Family(norms=1, tied=True),
    "phi": Family(PHI, "q_proj k_proj v_proj dense fc1 fc2", 2, 2, biased_output=True,
                  targets=("q_proj", "v_proj", "fc1", "fc2")),
    "gptj": Family(GPTJ, "fc_in fc_out", 2, 2, biased_output=True),
    "gpt2": Family(GPT2, "c_attn c_proj c_fc", 4, 2, positions=0, tied=True, targets=("c_attn",)),
    "gpt_neox": Family(NEOX, "query_key_value dense dense_h_to_4h dense_4h_to_h", 4, 2, targets=("query_key_value",)),
    "opt": Family(OPT, "q_proj k_proj v_proj out_proj fc1 fc2", 4, 2, positions=2, tied=True),
}


class Matrix(NamedTuple):
    """A weight matrix of every layer: its name and role, and its sizes."""

    name: str
    role: str
    outputs: int
    inputs: int

    @property
    def count(self) -> int:
        """Return the number of weights."""
        return self.outputs * self.inputs


class Shape(NamedTuple):
    """The sizes of a base model.

    attention_width: of all queries of a token. layer_vectors, other_weights: numbers of parameters in a layer beside
    its matrices, and beside layers and embeddings. output_weights: of an output layer of its own.
    """

    layers: int
    width: int
    mlp_width: int
    heads: int
    attention_width: int
    kv_width: int
    vocabulary: int
    matrices: tuple[Matrix, ...]
    layer_vectors: int
    embedding_weights: int
    output_weights: int
    other_weights: int
    query_key_norm_width: int
    targets: tuple[str, ...]

    @property
    def layer_weights(self) -> int:
        """Return the number of weights in the matrices of a layer."""
        return sum(matrix.count for matrix in self.matrices)

    def count_parameters(self, scorer: bool = False) -> int:
        """Return the number of parameters; scorer: of a classifier with one output, in place of the output layer."""
        head = self.width if scorer else self.output_weights
        return (self.layers * (self.layer_weights + self.layer_vectors) + self.embedding_weights + self.other_weights
                + head)

    def cut(self, layers: int | None) -> "Shape":
        """Return the shape of the first layers; None: of all. ValueError if there are fewer."""
        if layers is not None and layers > self.layers:
            raise ValueError(f"the first {layers} layers are wanted of a model that has {self.layers}")
        return self._replace(layers=layers or self.layers)

    def adapted(self, targets: tuple[str, ...]) -> list[Matrix]:
        """List the matrices of a layer that an adapter changes; no targets: the family's own."""
        return [matrix for matrix in self.matrices if matrix.name in (targets or self.targets)]

    def count_adapter(self, rank: int, targets: tuple[str, ...]) -> int:
        """Return the number of an adapter's parameters."""
        return self.layers * rank * sum(matrix.outputs + matrix.inputs for matrix in self.adapted(targets))

    def stored_bytes(self, precision: str, scorer: bool = False, adapted: bool = False) -> int:
        """Return the bytes of the weights as a precision stores them.

        adapted: for an adapter on quantised weights, PEFT keeps all others in fp32.
        """
        count = self.count_parameters(scorer)
        if precision not in QUANTISED:
            return count * (2 if precision == "bf16" else 4)
        quantised = self.layers * self.layer_weights
        scales = self.layers * sum(matrix.outputs for matrix in self.matrices)
        stored = quantised + 4 * scales if precision == "int8" else quantised // 2 + 4 * (quantised // NF4_BLOCK)
        return stored + (count - quantised) * (4 if adapted else 2)


def find_shape(model: str, revision: str | None, scratch: Any) -> Shape:
    """Return the shape of a folder, a GGUF file, a bundled shape, a hub model or 'scratch'.

    Raises ValueError, in one line, if there is none.
    """
    if model == "scratch":
        return read_shape({
            "hidden_size": scratch.hidden_size, "intermediate_size": scratch.intermediate_size,
            "num_hidden_layers": scratch.layers, "num_attention_heads": scratch.heads,
            "vocab_size": scratch.vocabulary_tokens, "tie_word_embeddings": True})
    folder, bundled = Path(model), BUNDLED / f"{model.replace('/', '--')}.json"
    if is_gguf(model):
        from transformers import AutoConfig

        read_gguf_header(folder)
        return read_shape(AutoConfig.from_pretrained(folder.parent, gguf_file=folder.name).to_dict())
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"base.model: {folder} has no config.json: give the folder of a model")
    file = folder / "config.json" if folder.is_dir() else bundled if bundled.is_file() else _download(model, revision)
    try:
        return read_shape(json.loads(file.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"base.model: {file} is no configuration of a causal language model ({error!r})") from None


def read_shape(config: dict[str, Any]) -> Shape:
    """Return the shape that a model's config.json describes; KeyError without the name of a size."""
    family = FAMILIES.get(config.get("model_type"), Family())

    def read(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None) or config[names[0]]

    width, heads = read("hidden_size", "n_embd"), read("num_attention_heads", "n_head")
    vocabulary, layers = config["vocab_size"], read("num_hidden_layers", "n_layer")
    head_width = config.get("head_dim") or width // heads
    mlp = config.get("intermediate_size") or config.get("ffn_dim") or config.get("n_inner") or 4 * width
    kv_heads = config.get("num_key_value_heads") or heads
    attention, kv = heads * head_width, kv_heads * head_width
    sizes = {"query": (attention, width), "key": (kv, width), "value": (kv, width), "fused": (3 * width, width),
             "out": (width, attention), "gate": (mlp, width), "up": (mlp, width), "down": (width, mlp)}
    matrices = tuple(Matrix(*word.split(":"), *sizes[word.split(":")[1]]) for word in family.matrices.split())
    biased = family.biased.split()
    if family.matrices == Family().matrices:
        biased += [name for name in ("q_proj", "k_proj", "v_proj", "o_proj") if config.get("attention_bias")]
        biased += [name for name in ("gate_proj", "up_proj", "down_proj") if config.get("mlp_bias")]
    vectors = family.norms * width + sum(matrix.outputs for matrix in matrices if matrix.name in biased)
    vectors += {"head": 2 * head_width, "width": attention + kv}.get(family.query_key_norm, 0)
    vectors += 4 * head_width * bool(config.get("qk_layernorm"))
    embedding_width = config.get("word_embed_proj_dim") or width
    others = family.final_norms * width * config.get("do_layer_norm_before", True)
    others += 2 * embedding_width * width * (embedding_width != width)
    if family.positions is not None:
        others += (read("n_positions", "max_position_embeddings") + family.positions) * width
    tied = config.get("tie_word_embeddings", family.tied)
    output = 0 if tied else vocabulary * embedding_width
    return Shape(layers, width, mlp, heads, attention, kv, vocabulary, matrices, vectors, vocabulary * embedding_width,
                 output + vocabulary * family.biased_output, others,
                 (attention + kv) * bool(family.query_key_norm), family.targets)


def _download(model: str, revision: str | None) -> Path:
    """Download config.json alone."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"base.model: no config.json of {model} ({type(error).__name__}: {reason}): give a local "
                         f"folder, as --config base='{{model: FOLDER}}', or connect to the hub") from None
