"""Tiny random models of every family, with a tokenizer like GPT-2's and Pythia's: no pad token, and EOS has id 0,
which is also the filler of a batch.
"""

from pathlib import Path

import torch
import transformers as hf
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS
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
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 7}  # the window is shorter than the rows
GEMMA_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
GPT2 = ENDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "initializer_range": 0.2}
OPT = ENDS | SHAPE | {"ffn_dim": 48, "init_std": 0.2, "word_embed_proj_dim": 32, "pad_token_id": 1}
FAMILIES = {
    "llama": hf.LlamaConfig(**GROUPED, tie_word_embeddings=False),
    "llama tied": hf.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "mistral": hf.MistralConfig(**GROUPED, sliding_window=7),  # shorter than the rows
    "qwen2": hf.Qwen2Config(**GROUPED, tie_word_embeddings=False),
    "qwen2 tied": hf.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(**GROUPED, head_dim=16, tie_word_embeddings=True),  # heads x head_dim is not the width
    "llama 3": hf.LlamaConfig(**GROUPED, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "gemma 3": hf.Gemma3TextConfig(**GROUPED, **GEMMA, **GEMMA_LAYERS),
    "gemma 2": hf.Gemma2Config(**GROUPED, **GEMMA, **GEMMA_LAYERS, attn_logit_softcapping=0.5,
                               final_logit_softcapping=1.0),
    "olmo 2": hf.Olmo2Config(**GROUPED),
    "smollm 3": hf.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0]),
    "phi": hf.PhiConfig(**ROTARY, rope_parameters={"rope_type": "default", "rope_theta": 100.0,
                                                   "partial_rotary_factor": 0.5}, qk_layernorm=True),
    "gptj": hf.GPTJConfig(**GPT2, rotary_dim=4),
    "gpt2": hf.GPT2Config(**GPT2),
    "pythia": hf.GPTNeoXConfig(**ROTARY),
    "pythia tied": hf.GPTNeoXConfig(**ROTARY, tie_word_embeddings=True),
    "opt": hf.OPTConfig(**OPT),
    "opt-350m": hf.OPTConfig(**OPT | {"word_embed_proj_dim": 16}, do_layer_norm_before=False),
}


# Families whose reward models Transformers cannot load: policies only.
POLICIES = {
    "granite": hf.GraniteConfig(**GROUPED, logits_scaling=3.0, attention_multiplier=0.2, embedding_multiplier=2.0,
                                residual_multiplier=0.5),
    "cohere": hf.CohereConfig(**GROUPED, logit_scale=0.3),
}


def noisy(parameters, scale):
    """Parameters a little away from where they were: biases, norms and B are no longer at 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))


def save(config, folder: Path) -> Path:
    """A model of this configuration with random weights, and the tokenizer."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    noisy(model.parameters(), 0.05)
    model.save_pretrained(folder)
    words = WordLevel({"<eos>": EOS} | {f"w{i}": i for i in range(1, VOCABULARY)}, unk_token="w1")
    hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="<eos>").save_pretrained(folder)
    return folder


def lora_targets(config) -> tuple[str, ...]:
    """Return the targets to name in a recipe: none for a family that PEFT has targets for."""
    return () if config.model_type in DEFAULT_TARGETS else ("q_proj", "v_proj")


def adapted(folder, scorer=False, moved=True):
    """The base with an adapter, on queries and values where PEFT has no targets, after some learning if `moved`."""
    model = load_classifier(folder, new_head=True) if scorer else load_causal(folder)
    if scorer:
        initialise_head(model, torch.Generator().manual_seed(0))
    return add_adapter(model, scorer, moved)


def add_adapter(model, scorer=False, moved=True, precision="fp32"):
    """Add an adapter to a loaded model."""
    torch.manual_seed(1)
    model = lora.add_lora(
        model, r=4, alpha=8, dropout=0.0, target_modules=lora_targets(model.config), precision=precision,
        scorer=scorer).eval()
    if moved:
        noisy([p for p in model.parameters() if p.requires_grad], 0.1)
    return model
