"""SFT: fine-tune the base model on packed question-answer text, with a LoRA adapter or in full.

    python -m stages.sft --recipe configs/demo.yaml --base results/demo/base \\
        --pairs results/demo/pairs --out results/demo/sft

As in StackLLaMA, every row of the finetune split is one document, the question with its better answer: an answer that
wins more pairs is seen more often. Every answer ends with a labelled EOS. Token ids are written to disk before training
and read through a memory map, so the text may be larger than memory.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from stages.artifacts.artifact import RunContext
from stages.cards.adapter_card import write_adapter_cards
from stages.finetuning.packing import PackedBlocks, collate_blocks, summed_lm_loss
from stages.finetuning.token_store import TokenizedDocuments, write_documents
from stages.generation.rollout import Rollout
from stages.generation.sampler import sample
from stages.modeling.load import autocast
from stages.modeling.packed import token_logprobs
from stages.modeling.pretrained import save_adapter, save_model
from stages.modeling.tokenizer import prepare_tokenizer
from stages.modeling.trainable import TrainableSettings, load_trainable_causal
from stages.recipe.recipe import select_settings
from stages.recipe.sections.sft import Sft
from stages.stackexchange.pairs.table import (
    best_rows,
    count_pairs,
    first_question_keys,
    question_key,
    read_first_rows,
    read_pairs,
)
from stages.stackexchange.prompt import encode_examples
from stages.training.callbacks import Evaluation
from stages.training.loggers import TrainingLogger, open_logger
from stages.training.trainer import TrainerSettings, remove_checkpoints, train

VALIDATION_SHARE = 0.1  # of the questions, at most
SAMPLE_TOKENS = 96  # length limit of a sampled answer
DOCUMENTS = "documents.arrow"


def run(config: Sft, out: Path, *, base: Path, pairs: Path, context: RunContext | None = None) -> dict[str, float]:
    """Fill `out` with a PEFT adapter (or the whole model), the tokenizer, history.jsonl and samples.jsonl."""
    tokenizer = prepare_tokenizer(base)
    held_out = first_question_keys(pairs, "finetune", VALIDATION_SHARE, config.validation_questions)
    documents = tokenize_documents(config, out, tokenizer, pairs, held_out)
    order = np.random.default_rng(config.seed).permutation(len(documents))
    blocks = PackedBlocks(documents, order, config.sequence_length_tokens, config.packing, config.loss_on == "answer")
    model = load_trainable_causal(
        TrainableSettings(**select_settings(TrainableSettings, config)), base, tokenizer,
        max_length_tokens=config.sequence_length_tokens, stage="sft")
    sizes = {"batch": config.batch_sequences, "microbatch": config.microbatch_sequences}
    with open_logger(config.log_to, out, "sft", context, asdict(config)) as logger:
        validation = Validation(model, tokenizer, pairs, held_out, config, logger)
        history = train(
            model, blocks, collate_blocks, lambda rows: summed_lm_loss(model, rows, config.precision),
            TrainerSettings.from_section(config, **sizes, schedule="cosine"), out, "sft",
            validation.evaluation() if validation.rows else None, logger)
    (save_adapter if config.tune == "lora" else save_model)(model, tokenizer, out)
    write_adapter_cards(out, base, pairs)
    remove_checkpoints(out)
    (out / DOCUMENTS).unlink()
    return {"documents": len(documents), "tokens": int(documents.lengths.sum()), "blocks": len(blocks),
            "validation_questions": len(validation.rows), **validation_metrics(history, config)}


def tokenize_documents(config: Sft, out: Path, tokenizer, pairs: Path, held_out: set[tuple]) -> TokenizedDocuments:
    """Tokenize the finetune split without the held-out questions, and no more rows than `max_steps` will read."""
    rows = read_pairs(pairs, "finetune", ["site", "qid", "question", "response_j"])
    texts = ((row["question"], row["response_j"]) for row in rows if question_key(row) not in held_out)
    step_tokens = config.batch_sequences * config.sequence_length_tokens
    max_tokens = None if config.max_steps is None else config.max_steps * step_tokens
    limit = config.max_answer_tokens
    examples = ((prompt, answer) for prompt, answer in encode_examples(tokenizer, texts)
                if limit is None or len(answer) <= limit)
    documents = write_documents(out / DOCUMENTS, examples, max_tokens, count_pairs(pairs, "finetune"))
    if not len(documents):
        fitting = "" if limit is None else f" with an answer of at most {limit} tokens (sft.max_answer_tokens)"
        raise ValueError(f"{pairs} has no pairs in its finetune split{fitting}: nothing to train on")
    return documents


class Validation:
    """Measure the perplexity of the best human answers to held-out questions, and sample answers to these."""

    def __init__(self, model, tokenizer, pairs: Path, held_out: set[tuple], config: Sft, logger: TrainingLogger):
        self.model, self.tokenizer, self.config, self.logger = model, tokenizer, config, logger
        rows = best_rows(read_first_rows(pairs, "finetune", held_out))
        ids = list(encode_examples(tokenizer, ((row["question"], row["response_j"]) for row in rows)))
        fitting = [i for i, texts in enumerate(ids) if sum(map(len, texts)) <= config.sequence_length_tokens]
        self.rows = [rows[i] for i in fitting]
        self.prompts, self.answers = [ids[i][0] for i in fitting], [ids[i][1] for i in fitting]

    def evaluation(self) -> Evaluation:
        """Schedule `measure`, also of the base; with patience the lowest perplexity is best, else the last state."""
        score = None if self.config.patience_evaluations is None else lambda row: -row["validation_perplexity"]
        return Evaluation(self.measure, self.config.evaluate_every_steps, score, at_start=True)

    def measure(self, step: int) -> dict[str, float]:
        """Compute the metrics, and log a sampled answer to each question."""
        with autocast(self.config.precision):
            logprobs = token_logprobs.response_logprobs(self.model, self.prompts, self.answers, 1.0)
        rollout = self._sample()
        self.logger.log_samples(step, [
            {"question": row["question"], "answer": text, "ended": ended, "best_human_answer": row["response_j"],
             "source": row["metadata"][0]}
            for row, text, ended in zip(self.rows, rollout.decode(self.tokenizer), rollout.ended, strict=True)])
        return {"validation_perplexity": math.exp(-float(torch.cat(logprobs).mean())),
                "validation_eos_rate": sum(rollout.ended) / len(self.rows)}

    def _sample(self) -> Rollout:
        return sample(
            self.model, self.prompts, temperature=1.0, stop_ids=[self.tokenizer.eos_token_id],
            max_new_tokens=min(SAMPLE_TOKENS, self.config.sequence_length_tokens - max(map(len, self.prompts))),
            generator=torch.Generator().manual_seed(self.config.seed), precision=self.config.precision)


def validation_metrics(history: list[dict], config: Sft) -> dict[str, float]:
    """Return the validation metrics of the state that is saved: the last one, or with patience the best one."""
    rows = [row for row in history if "validation_perplexity" in row]
    if not rows:
        return {}
    saved = rows[-1]
    if config.patience_evaluations is not None:
        saved = min(rows, key=lambda row: row["validation_perplexity"])
    return {key: value for key, value in saved.items() if key != "step"}
