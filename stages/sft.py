"""SFT: teach the base model to answer, on packed question-answer text, through a LoRA adapter.

    python -m stages.sft --recipe configs/demo.yaml --base results/demo/base \\
        --pairs results/demo/pairs --out results/demo/sft

As published: every row of the finetune split gives one document, the question with its better answer, so that an answer
that wins more pairs is seen more often. Every answer is closed by a labelled EOS.
"""

import math
from pathlib import Path

import torch

from stages.learning import families, models
from stages.learning.language_modelling import answer_log_probabilities, collate_blocks, packed
from stages.learning.rollout import sample
from stages.learning.training import Training, remove_checkpoints, train
from stages.learning.weights import save_adapter
from stages.plumbing.artifact import write_json
from stages.recipe import Sft
from stages.text.tables import questions_of, rows_of
from stages.text.template import answer_ids, pair_ids, prompt_ids

WATCHED_QUESTIONS = 64  # held-out questions that the evaluations while training use; nothing is chosen by them
SAMPLE_TOKENS = 96


def run(config: Sft, out: Path, *, base: Path, pairs: Path) -> dict[str, float]:
    """Fill `out` with a PEFT adapter, the tokenizer, history.jsonl and samples.json."""
    tokenizer = models.load_tokenizer(base)
    documents = _documents(pairs, tokenizer, config.seed)
    blocks = packed(documents, config.sequence_length_tokens, config.packing)
    torch.manual_seed(config.seed)
    model = models.load_causal(base, config.precision)
    models.check_special_tokens(tokenizer, model.config)
    families.check_length(model.config, config.sequence_length_tokens)
    model = models.add_lora(model, precision=config.precision, **vars(config.lora))
    watched = _Watched(model, tokenizer, pairs, config)
    history = train(
        model,
        blocks,
        collate_blocks,
        Training.like(
            config, batch=config.batch_sequences, microbatch=config.microbatch_sequences, schedule="cosine"
        ),
        out,
        "sft",
        evaluate=watched.measure,
        evaluate_every_steps=config.evaluate_every_steps,
    )
    save_adapter(model, tokenizer, out)
    write_json(out / "samples.json", watched.samples())
    remove_checkpoints(out)
    tokens = sum(map(len, documents))
    return {"documents": len(documents), "tokens": tokens, "blocks": len(blocks), **_last_evaluation(history)}


def _documents(pairs: Path, tokenizer, seed: int) -> list[list[int]]:
    documents = [
        pair_ids(tokenizer, row["question"], row["response_j"])
        for row in rows_of(pairs, "finetune", ["question", "response_j"])
    ]
    if not documents:
        raise ValueError(f"{pairs} has no pairs in its finetune split: nothing to train on")
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    return [documents[i] for i in order]


class _Watched:
    """Perplexity of the best human answer, and how sampled answers end, on some held-out questions."""

    def __init__(self, model, tokenizer, pairs: Path, config: Sft):
        self.model, self.tokenizer, self.config = model, tokenizer, config
        limit = config.sequence_length_tokens
        self.rows = [
            row
            for row in questions_of(pairs, "evaluation")
            if len(pair_ids(tokenizer, row["question"], row["response_j"])) <= limit
        ][:WATCHED_QUESTIONS]
        self.prompts = [prompt_ids(tokenizer, row["question"]) for row in self.rows]

    def measure(self) -> dict[str, float]:
        if not self.rows:
            return {}
        nats, tokens = 0.0, 0
        for prompt, row in zip(self.prompts, self.rows, strict=True):
            ids, mask = models.batched(
                [prompt + answer_ids(self.tokenizer, row["response_j"])], where=self.model.device
            )
            scores = answer_log_probabilities(self.model, ids, mask, [len(prompt)])[0]
            nats, tokens = nats - float(scores.sum()), tokens + len(scores)
        return {"perplexity": math.exp(nats / tokens), "eos_rate": sum(self._rollout().ended) / len(self.rows)}

    def samples(self) -> list[dict]:
        if not self.rows:
            return []
        rollout = self._rollout()
        return [
            {
                "question": row["question"],
                "answer": answer,
                "ended": ended,
                "best_human_answer": row["response_j"],
                "source": row["metadata"][0],
            }
            for row, answer, ended in zip(self.rows, rollout.texts(self.tokenizer), rollout.ended, strict=True)
        ]

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


def _last_evaluation(history: list[dict]) -> dict[str, float]:
    found = [row for row in history if "perplexity" in row]
    return {key: value for key, value in found[-1].items() if key != "step"} if found else {}


if __name__ == "__main__":
    from stages.plumbing.command import main

    main(run)
