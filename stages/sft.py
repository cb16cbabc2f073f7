"""SFT: teach the base model to answer, on packed question-answer text, through a LoRA adapter or whole.

    python -m stages.sft --recipe configs/demo.yaml --base results/demo/base \\
        --pairs results/demo/pairs --out results/demo/sft

As published: every row of the finetune split gives one document, the question with its better answer, so that an answer
that wins more pairs is seen more often. Every answer is closed by a labelled EOS. Token ids are written to disk before
training and read through a memory map: the text may be larger than memory.
"""

from stages.runtime.command import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from stages.finetuning.lm_loss import collate_blocks, summed_loss
from stages.finetuning.packing import Blocks
from stages.finetuning.token_store import Documents, write_documents
from stages.generation.sampler import sample
from stages.modeling import families, lora, torch_setup
from stages.modeling.load import autocast, load_causal
from stages.modeling.packed import token_logprobs
from stages.modeling.pretrained import save_adapter, save_model
from stages.modeling.tokenizer import check_special_tokens, check_vocabulary, load_tokenizer, resize_token_embeddings
from stages.recipe.sft import Sft
from stages.runtime.artifact import RunContext
from stages.stackexchange.pairs.table import best_rows, first_questions, first_rows, key_of, rows_of
from stages.stackexchange.prompt import encoded
from stages.training.callbacks import Evaluation
from stages.training.loggers import Logs, open_logs
from stages.training.trainer import TrainerSettings, remove_checkpoints, train

VALIDATION_SHARE = 0.1  # of the questions, at most
SAMPLE_TOKENS = 96  # of a sampled answer, at most
DOCUMENTS = "documents.arrow"


def run(config: Sft, out: Path, *, base: Path, pairs: Path, context: RunContext | None = None) -> dict[str, float]:
    """Fill `out` with a PEFT adapter (or the whole model), the tokenizer, history.jsonl and samples.jsonl."""
    torch_setup.prepare()
    tokenizer = load_tokenizer(base)
    held = first_questions(pairs, "finetune", VALIDATION_SHARE, config.validation_questions)
    documents = _documents(config, out, tokenizer, pairs, held)
    order = np.random.default_rng(config.seed).permutation(len(documents))
    blocks = Blocks(documents, order, config.sequence_length_tokens, config.packing, config.loss_on == "answer")
    torch.manual_seed(config.seed)
    model = _learner(config, base, tokenizer)
    sizes = {"batch": config.batch_sequences, "microbatch": config.microbatch_sequences}
    with open_logs(config.log_to, out, "sft", context, asdict(config)) as logs:
        watched = _Watched(model, tokenizer, pairs, held, config, logs)
        history = train(
            model,
            blocks,
            collate_blocks,
            lambda rows: summed_loss(model, rows, config.precision),
            TrainerSettings.like(config, **sizes, schedule="cosine"),
            out,
            "sft",
            watched.watch() if watched.rows else None,
            logs,
        )
    (save_adapter if config.tune == "lora" else save_model)(model, tokenizer, out)
    remove_checkpoints(out)
    (out / DOCUMENTS).unlink()
    return {"documents": len(documents), "tokens": int(documents.lengths.sum()), "blocks": len(blocks),
            "validation_questions": len(watched.rows), **_kept(history, config)}


def _learner(config: Sft, base: Path, tokenizer):
    """The model, with what learns requiring gradients."""
    model = load_causal(base, config.precision)
    check_special_tokens(tokenizer, model.config)
    families.check_length(model.config, config.sequence_length_tokens)
    new_tokens = resize_token_embeddings(model, tokenizer) if config.train_new_tokens else []
    check_vocabulary(tokenizer, model)
    if config.tune == "full":
        return model.requires_grad_(True)
    return lora.add_lora(model, precision=config.precision, new_tokens=new_tokens, **vars(config.lora))


def _documents(config: Sft, out: Path, tokenizer, pairs: Path, held: set[tuple]) -> Documents:
    """Token ids of the split but for the questions held out; of no more rows than `max_steps` will read."""
    rows = rows_of(pairs, "finetune", ["site", "qid", "question", "response_j"])
    texts = ((row["question"], row["response_j"]) for row in rows if key_of(row) not in held)
    step = config.batch_sequences * config.sequence_length_tokens
    most = None if config.max_steps is None else config.max_steps * step
    documents = write_documents(out / DOCUMENTS, encoded(tokenizer, texts), most)
    if not len(documents):
        raise ValueError(f"{pairs} has no pairs in its finetune split: nothing to train on")
    return documents


class _Watched:
    """Perplexity of the best human answer, and how sampled answers read and end, on questions held out."""

    def __init__(self, model, tokenizer, pairs: Path, held: set[tuple], config: Sft, logs: Logs):
        self.model, self.tokenizer, self.config, self.logs = model, tokenizer, config, logs
        rows = best_rows(first_rows(pairs, "finetune", held))
        ids = list(encoded(tokenizer, ((row["question"], row["response_j"]) for row in rows)))
        fitting = [i for i, texts in enumerate(ids) if sum(map(len, texts)) <= config.sequence_length_tokens]
        self.rows = [rows[i] for i in fitting]
        self.prompts, self.answers = [ids[i][0] for i in fitting], [ids[i][1] for i in fitting]

    def watch(self) -> Evaluation:
        best = None if self.config.patience_evaluations is None else lambda row: -row["validation_perplexity"]
        return Evaluation(self.measure, self.config.evaluate_every_steps, best)

    def measure(self, step: int) -> dict[str, float]:
        """Numbers; and to the logs, an answer to each question."""
        log_p = self._log_p()
        rollout = self._rollout()
        texts = rollout.decode(self.tokenizer)
        self.logs.samples(step, [
            {"question": row["question"], "answer": text, "ended": ended, "best_human_answer": row["response_j"],
             "source": row["metadata"][0]}
            for row, text, ended in zip(self.rows, texts, rollout.ended, strict=True)])
        return {"validation_perplexity": math.exp(-float(torch.cat(log_p).mean())),
                "validation_eos_rate": sum(rollout.ended) / len(self.rows)}

    def _log_p(self) -> list[torch.Tensor]:
        with autocast(self.config.precision):
            return token_logprobs.response_logprobs(self.model, self.prompts, self.answers, 1.0)

    def _rollout(self):
        return sample(
            self.model,
            self.prompts,
            max_new_tokens=min(SAMPLE_TOKENS, self.config.sequence_length_tokens - max(map(len, self.prompts))),
            temperature=1.0,
            stop_ids=[self.tokenizer.eos_token_id],
            generator=torch.Generator().manual_seed(self.config.seed),
            precision=self.config.precision,
        )


def _kept(history: list[dict], config: Sft) -> dict[str, float]:
    """What was measured of the state that is kept."""
    found = [row for row in history if "validation_perplexity" in row]
    if not found:
        return {}
    last = config.patience_evaluations is None
    kept = found[-1] if last else min(found, key=lambda row: row["validation_perplexity"])
    return {key: value for key, value in kept.items() if key != "step"}
