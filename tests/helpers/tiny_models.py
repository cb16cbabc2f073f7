"""Tiny models and tables, made in the test: nothing is downloaded."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForSequenceClassification

from stages.modeling.merging import merge as modeling_merge
from stages.modeling.packed.forward import use_packed_attention
from stages.modeling.tiny_llama import build_small_llama, train_tokenizer
from stages.recipe.sections.models import Merge
from stages.reward_modeling.dataset import Example
from stages.reward_modeling.load import select_target

# What merged models are evaluated on: ids that every tiny model has.
EXAMPLES = [
    Example(("tiny", i), [3 + i, 40, 50], [[60 + i, 70, 2], [80, 90 + i, 5, 2]], [(i % 2, 1 - i % 2)]) for i in range(8)
]
WORDS = ("use the flag port file with tool run open read write list make stop start cache clear copy").split()  # noqa: SIM905


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def tokenizer():
    rng = random.Random(0)
    return train_tokenizer([f"Question: {sentence(rng, 12)}\n\nAnswer: " for _ in range(200)], 320)


def llama(tok, seed: int = 0, width: int = 32):
    torch.manual_seed(seed)
    return build_small_llama(
        tok, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, initializer_range=0.2,
    ).eval()


def classifier(seed: int):
    """Build a sequence classifier of one output, with packed attention."""
    config = llama(tokenizer()).config
    config.num_labels = 1
    torch.manual_seed(seed)
    model = LlamaForSequenceClassification(config).eval()
    use_packed_attention(model)
    return model


def gpt2(vocabulary: int):
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2
        )
    ).eval()


def save_base(folder: Path, seed: int = 0, width: int = 32) -> Path:
    tok = tokenizer()
    llama(tok, seed, width).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


def merge(base: Path, adapters: list[Path], out: Path, **changes) -> dict:
    """A merge by the recipe's defaults, but in fp32; gives its report."""
    settings = vars(Merge(**({"dtype": "fp32"} | changes)))
    target = select_target(adapters[-1], EXAMPLES, settings.pop("cpu_kernels"), settings.pop("check_precision"))
    return modeling_merge.merge(base, adapters, out, target, **settings)


def save_pairs(folder: Path, questions_per_split: int = 40) -> Path:
    """A pairs artifact whose better answers are those that say 'flag'."""
    rng, qid = random.Random(1), 0
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("finetune", "reward", "rl", "evaluation"):
        rows = []
        for _ in range(questions_per_split):
            qid += 1
            question = sentence(rng, 8)
            for other in range(rng.randint(1, 3)):
                rows.append(
                    {
                        "qid": qid,
                        "site": "tiny",
                        "question": question,
                        "response_j": f"use the flag {qid}",
                        "response_k": f"{sentence(rng, 5)} {other}",
                        "score_j": 3,
                        "score_k": other,
                        "date": "2026-01-01",
                        "metadata": ["", "https://tiny", ""],
                        "authors": ["", "", ""],
                    }
                )
        (folder / split).mkdir(exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), folder / split / "part-00000.parquet")
    return folder
