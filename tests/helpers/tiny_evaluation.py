"""Inputs of an evaluation with tiny models of random weights: policies, a reward model, posts and pairs."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import LlamaForSequenceClassification

from stages.modeling.tiny_llama import build_small_llama, train_tokenizer
from stages.recipe.sections.evaluate import Evaluate

CODE = "Do this:\n\n```\nls\n```"
CONFIG = Evaluate(max_pairs=50, prompts=6, batch_prompts=4, max_prompt_tokens=60, max_response_tokens=6,
                  best_of=(2, 3), bootstrap_samples=50)


def row(qid: int, better: str, worse: str, gap: int = 1, question: str | None = None) -> dict:
    return {"site": "s", "qid": qid, "question": question or f"What is {qid}?", "response_j": better,
            "response_k": worse, "score_j": gap, "score_k": 0, "date": "",
            "metadata": [f"https://s/{qid}", "https://s", ""], "authors": ["ann", "bob", "cat"]}


PAIRS = [row(1, "a long answer", "short", 1), row(1, CODE, "a long answer", 2), row(2, "tiny", "a long answer", 5),
         row(2, CODE + " ", CODE, 3), row(3, "four", "five", 1)]


def make_tokenizer():
    return train_tokenizer([text for pair in PAIRS for text in (pair["question"], pair["response_j"])], 300)


def make_model(tokenizer, seed: int = 0):
    torch.manual_seed(seed)
    return build_small_llama(tokenizer, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                             num_attention_heads=2, max_position_embeddings=96, initializer_range=0.3)


def save_inputs(root: Path, tokenizer) -> dict:
    """Save the inputs of `evaluate.run`: three models of different weights, among them the policy ppo."""
    for seed, name in enumerate(("sft", "ppo", "base")):
        model = make_model(tokenizer, seed)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    config = model.config
    config.num_labels, config.reward_mean = 1, 0.25
    LlamaForSequenceClassification(config).save_pretrained(root / "reward")
    tokenizer.save_pretrained(root / "reward")
    rows = PAIRS + [row(number, f"answer {number}", "no", 2) for number in range(4, 12)]
    for split in ("evaluation", "reward"):
        (root / "pairs" / split).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), root / "pairs" / split / "part-00000.parquet")
    (root / "posts").mkdir()
    tagged = [{"site": "s", "question_id": number, "tags": ["even"] * (number % 2 == 0) + ["all"]}
              for number in range(1, 10)]
    pq.write_table(pa.Table.from_pylist(tagged), root / "posts/part-00000.parquet")
    return {name: root / name for name in ("base", "sft", "reward", "pairs", "posts")} | {
        "policy": {"ppo": root / "ppo"}}
