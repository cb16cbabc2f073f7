"""GGUF files of two layers, written by PyPI's gguf as llama.cpp's converter does."""

import json
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stages.modeling.gguf.vocabulary import build_split

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
# Qwen 3's heads are of 128 in every size: Transformers does not read theirs from GGUF.
CONFIGS = {"llama": (hf.LlamaConfig, {"head_dim": 16}), "qwen2": (hf.Qwen2Config, {}),
           "qwen3": (hf.Qwen3Config, {"head_dim": 128})}
UNREADABLE = gguf.GGMLQuantizationType.Q8_1  # by the package gguf
BLOCK = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # unknown, BOS, EOS, as SmolLM2's
CONTROL, NORMAL = 3, 1  # token types of GGUF

# What pre-tokenizers differ in: digits, line ends, contractions, accents.
TEXTS = [f"Step {n}:\n\n{n}. Boil {n * 37} ml (x={n}0), don't stop;  \t it's   {n}\r\n\n\n  in {2000 + n}!?  "
         f"naïve – 日本 🙂" for n in range(60)]
ODD = ["\n\n1. Boil", "    42", "in 2024", "x=10", "a  b\n \n c", "  ", "I'LL we're It'S", "1234567", "...\n\n\nEnd  ",
       "", "über\tdie\r\nBrücke", "$$x^2$$ `code`", "日本語 ２３", "a\u00a0b", "e\u0301", "don’t"]


def train_vocabulary(texts: Iterable[str], split: str, tokens: int = 512) -> tuple[list[str], list[str]]:
    """Train a byte-level BPE whose texts are split as `split` does; return its tokens and its merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = build_split(split).pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=tokens, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    vocabulary = json.loads(tokenizer.to_str())["model"]
    return (sorted(vocabulary["vocab"], key=vocabulary["vocab"].get),
            [" ".join(pair) if isinstance(pair, list) else pair for pair in vocabulary["merges"]])


def write_gguf(file: Path, texts: Iterable[str], *, architecture: str = "llama", split: str = "smollm",
               tied: bool = True, quantised: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_1,
               pad: int = 2, further_tensors: dict[str, np.ndarray] | None = None, **values) -> hf.PreTrainedModel:
    """Write a file of two layers with random weights; return the model before its weights were quantised.

    Args:
        values: further keys, or others than those that are written; dots as double underscores.
    """
    tokens, merges = train_vocabulary(texts, split)
    torch.manual_seed(0)
    config, more = CONFIGS[architecture]
    model = hf.AutoModelForCausalLM.from_config(config(
        **SHAPE, **more, vocab_size=len(tokens), tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
        pad_token_id=pad))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms, which are all alike at first
            parameter.data += 0.3 * torch.randn_like(parameter)
    writer = gguf.GGUFWriter(file, architecture)
    keys = {"general.name": "Two Layers", "general.license": "apache-2.0", "tokenizer.ggml.pre": split,
            "tokenizer.chat_template": "{{ messages[0]['content'] }}"}
    for name, value in (keys | {name.replace("__", "."): value for name, value in values.items()}).items():
        if value is not None:
            {str: writer.add_string, bool: writer.add_bool}[type(value)](name, value)
    _add_sizes(writer, model.config)
    _add_vocabulary(writer, tokens, merges, pad)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight" or not tied:
            _add_tensor(writer, name, weight.numpy(), model.config, quantised)
    for name, weight in (further_tensors or {}).items():
        writer.add_tensor(name, weight)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return model


def _add_sizes(writer: gguf.GGUFWriter, config: hf.PretrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    for add in (writer.add_rope_dimension_count, writer.add_key_length, writer.add_value_length):
        add(_head_size(config))
    writer.add_vocab_size(config.vocab_size)


def _head_size(config: hf.PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_vocabulary(writer: gguf.GGUFWriter, tokens: list[str], merges: list[str], pad: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in SPECIAL else NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(pad)


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: np.ndarray, config: hf.PretrainedConfig,
                quantised: gguf.GGMLQuantizationType) -> None:
    """Write a tensor under llama.cpp's name; of LLaMA, queries and keys with their rotary pairs interleaved."""
    stem, kind = name.rsplit(".", 1)
    parts = stem.split(".")
    if parts[:2] == ["model", "layers"]:
        stem = f"blk.{parts[2]}.{BLOCK['.'.join(parts[3:])]}"
    else:
        stem = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem]
    if config.model_type == "llama" and stem.endswith(("attn_q", "attn_k")):
        weight = weight.reshape(-1, 2, _head_size(config) // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    if weight.ndim == 1:
        writer.add_tensor(f"{stem}.{kind}", weight.astype(np.float32))
        return
    data = (np.zeros(gguf.quant_shape_to_byte_shape(weight.shape, quantised), np.uint8) if quantised == UNREADABLE
            else gguf.quantize(np.ascontiguousarray(weight), quantised))
    writer.add_tensor(f"{stem}.{kind}", data, raw_dtype=quantised)
