"""Base: provide the pretrained model that everything starts from; 'scratch' trains a small LLaMA on the site itself.

    python -m stages.base --recipe configs/demo.yaml --pairs results/demo/pairs --out results/demo/base

A hub id or a local folder is used unchanged. 'scratch' trains on the questions and answers of all splits but
evaluation. A document is one question with one answer: with all answers in one document, the model learns to copy
earlier answers. Attention stays within a document ('bfd' packing): a small model learns which tool a question names far
sooner without other questions in its context (48 facts, 0.8 M tokens: 0.64 of greedy answers right instead of 0.07).
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from pathlib import Path

import numpy as np
import torch

from stages.finetuning.packing import PackedBlocks, collate_blocks, summed_lm_loss
from stages.finetuning.token_store import write_documents
from stages.modeling import torch_setup
from stages.modeling.load import resolve_cpu_kernels
from stages.modeling.packed.forward import use_packed_attention
from stages.modeling.pretrained import copy_pretrained, save_model
from stages.modeling.tiny_llama import build_small_llama, train_tokenizer
from stages.recipe.sections.models import Base
from stages.stackexchange.pairs.counts import check_split_sizes
from stages.stackexchange.pairs.table import read_answers
from stages.stackexchange.prompt import encode_examples, prompt_text
from stages.training.trainer import TrainerSettings, remove_checkpoints, train

DOCUMENTS = "documents.arrow"
INITIALIZER_RANGE = 0.05  # standard deviation of the initial weights; with 0.02, facts are learnt more slowly here
WARMUP_SHARE = 0.05  # of the steps
TRAINED_ON = ("finetune", "reward", "rl")


def run(config: Base, out: Path, *, pairs: Path | None = None) -> dict[str, float]:
    """Fill `out` with a plain Hugging Face model folder and its tokenizer.

    pairs: None for a pretrained model that is trained on other prompts.

    Raises ValueError if a later stage would have too few questions: this is the last moment before hours of training.
    """
    if pairs is not None:
        check_split_sizes(pairs)
    elif config.model == "scratch":
        raise ValueError("model 'scratch' is trained on pairs: give --pairs FOLDER, or set model to a folder or hub id")
    torch_setup.prepare()
    if config.model != "scratch":
        return copy_pretrained(config.model, config.revision, out)
    return train_from_scratch(config, out, pairs)


def train_from_scratch(config: Base, out: Path, pairs: Path) -> dict[str, float]:
    """Train a tokenizer and a small LLaMA into `out`; return the metrics."""
    scratch = config.scratch
    texts = [(question, answer) for split in TRAINED_ON for question, answer in read_answers(pairs, split)]
    tokenizer = train_tokenizer((prompt_text(q) + a for q, a in texts), scratch.vocabulary_tokens)
    documents = write_documents(out / DOCUMENTS, encode_examples(tokenizer, texts), None, len(texts))
    order = np.random.default_rng(config.seed).permutation(len(documents))
    blocks = PackedBlocks(documents, order, scratch.sequence_length_tokens, "bfd", answers_only=False)
    torch.manual_seed(config.seed)
    model = build_small_llama(
        tokenizer, hidden_size=scratch.hidden_size, intermediate_size=scratch.intermediate_size,
        num_hidden_layers=scratch.layers, num_attention_heads=scratch.heads,
        max_position_embeddings=scratch.max_position_tokens, initializer_range=INITIALIZER_RANGE)
    use_packed_attention(model, resolve_cpu_kernels(config.cpu_kernels))
    step_tokens = scratch.batch_sequences * scratch.sequence_length_tokens
    steps = min(scratch.epochs * len(blocks) / scratch.batch_sequences, scratch.max_tokens / step_tokens)
    steps = max(1, round(steps))
    settings = TrainerSettings.from_section(
        scratch, batch=scratch.batch_sequences, microbatch=scratch.microbatch_sequences, schedule="cosine",
        max_steps=steps, warmup_steps=round(WARMUP_SHARE * steps), seed=config.seed,
        save_every_minutes=config.save_every_minutes)
    history = train(model, blocks, collate_blocks, lambda rows: summed_lm_loss(model, rows, scratch.precision),
                    settings, out, "base")
    save_model(model, tokenizer, out)
    remove_checkpoints(out)
    (out / DOCUMENTS).unlink()
    return {
        "documents": len(documents),
        "tokens": int(documents.lengths.sum()),
        "parameters": model.num_parameters(),
        "steps": steps,
        "loss": [row["loss"] for row in history if "loss" in row][-1],
    }
