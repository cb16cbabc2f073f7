"""Tiny random models of every family, with a tokenizer like GPT-2's and Pythia's: no pad token, and EOS has id 0,
which is also the filler of a batch.
"""

from pathlib import Path

import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from stages.modeling import lora
from stages.modeling.load import load_causal
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.reward_model import initialise_head

VOCABULARY, POSITIONS, EOS = 120, 64, 0
ENDS = {"vocab_size": VOCABULARY, "eos_token_id": EOS, "bos_token_id": EOS}
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": POSITIONS}
ROTARY = ENDS | SHAPE | {"intermediate_size": 48, "initializer_range": 0.2, "pad_token_id": None}
GROUPED = ROTARY | {"num_key_value_heads": 2}
GPT2 = ENDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "initializer_range": 0.2}
OPT = ENDS | SHAPE | {"ffn_dim": 48, "init_std": 0.2, "word_embed_proj_dim": 32, "pad_token_id": 1}
FAMILIES = {
    "llama": hf.LlamaConfig(**GROUPED, tie_word_embeddings=False),
    "llama tied": hf.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "mistral": hf.MistralConfig(**GROUPED, sliding_window=7),  # shorter than the rows
    "qwen2": hf.Qwen2Config(**GROUPED, tie_word_embeddings=False),
    "qwen2 tied": hf.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(**GROUPED, head_dim=16, tie_word_embeddings=True),  # heads x head_dim is not the width
    "gpt2": hf.GPT2Config(**GPT2),
    "pythia": hf.GPTNeoXConfig(**ROTARY),
    "pythia tied": hf.GPTNeoXConfig(**ROTARY, tie_word_embeddings=True),
    "opt": hf.OPTConfig(**OPT),
    "opt-350m": hf.OPTConfig(**OPT | {"word_embed_proj_dim": 16}, do_layer_norm_before=False),
}


def noisy(parameters, scale):
    """Parameters a little away from where they were: biases, norms and B are no longer at 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def save(config, folder: Path) -> Path:
    """A model of this configuration with random weights, and the tokenizer."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    noisy(model.parameters(), 0.05)
    model.save_pretrained(folder)
    words = WordLevel({"<eos>": EOS} | {f"w{i}": i for i in range(1, VOCABULARY)}, unk_token="w1")
    hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="<eos>").save_pretrained(folder)
    return folder


def adapted(folder, scorer=False, moved=True):
    """The base with an adapter where the family's own targets are, after some learning if `moved`."""
    model = load_classifier(folder, new_head=True) if scorer else load_causal(folder)
    if scorer:
        initialise_head(model, torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    model = lora.add_lora(model, r=4, alpha=8, dropout=0.0, target_modules=(), precision="fp32", scorer=scorer).eval()
    if moved:
        noisy([p for p in model.parameters() if p.requires_grad], 0.1)
    return model
