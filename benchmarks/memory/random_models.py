"""Save a base of random weights, adapters on it, and a few pairs.

    python -m benchmarks.memory.random_models FOLDER 22 2048

The models are made one after the other, in bf16; no training is involved.
"""

import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.modeling import lora
from stages.modeling.load import load_causal
from stages.modeling.tiny_llama import train_tokenizer
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.reward_model import initialise_head
from stages.reward_modeling.scoring_file import Scoring, describe_scoring, save_scoring
from stages.stackexchange.pairs.table import SCHEMA, SPLITS

HEAD_WIDTH, VOCABULARY, SHARD_BYTES = 64, 32_000, 1_000_000_000
WORDS = ("flag", "port", "file", "tool", "open", "read", "write", "list", "start", "cache", "clear", "copy")


def save_pairs(folder: Path, questions: int = 16) -> None:
    """Write `pairs` with as many questions in each split, and an empty `posts`."""
    draw = random.Random(0)
    for split in SPLITS:
        rows = []
        for number in range(questions):
            texts = [" ".join(draw.choice(WORDS) for _ in range(12)) for _ in range(3)]
            rows.append({"qid": number, "site": "random", "question": f"{texts[0]}?", "response_j": texts[1],
                         "response_k": texts[2], "score_j": 2, "score_k": 1, "date": "2026-01-01",
                         "metadata": ["", "https://random", ""], "authors": ["", "", ""]})
        (folder / "pairs" / split).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), folder / "pairs" / split / "part-00000.parquet")
    (folder / "posts").mkdir()
    tags = pa.schema([("site", pa.string()), ("question_id", pa.int64()), ("tags", pa.list_(pa.string()))])
    pq.write_table(tags.empty_table(), folder / "posts/part-00000.parquet")


def save_models(folder: Path, layers: int, width: int) -> None:
    """Write `base`, `ppo` (an adapter) and `reward` (an adapter with a head)."""
    tokenizer = train_tokenizer([f"Question: {word}?\n\nAnswer: {word}" for word in WORDS], 300)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=width // HEAD_WIDTH, num_key_value_heads=max(1, width // HEAD_WIDTH // 8),
        max_position_embeddings=2048, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id))
    torch.set_default_dtype(torch.float32)
    print(f"{model.num_parameters() / 1e9:.2f} billion parameters", flush=True)
    model.save_pretrained(folder / "base", max_shard_size=SHARD_BYTES)
    tokenizer.save_pretrained(folder / "base")
    del model
    for name in ("ppo", "reward"):
        _save_adapter(folder / "base", folder / name, scorer=name == "reward")
        tokenizer.save_pretrained(folder / name)


def _save_adapter(base: Path, folder: Path, scorer: bool) -> None:
    model = load_classifier(base, "bf16", new_head=True) if scorer else load_causal(base, "bf16")
    if scorer:
        initialise_head(model, torch.Generator().manual_seed(0))
    model = lora.add_lora(model, r=16, alpha=32, dropout=0.0, target_modules=(), precision="bf16", scorer=scorer)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # as after some training; they begin at 0
            torch.nn.init.normal_(parameter, std=0.01)
    model.save_pretrained(folder)
    if scorer:
        save_scoring(folder, describe_scoring(
            Scoring("last", 0.0), "bf16", ([[5]] * 2, [[6, 7], [8, 9]]), torch.tensor([0.0, 1.0])))


if __name__ == "__main__":
    save_models(Path(sys.argv[1]), *map(int, sys.argv[2:4]))
