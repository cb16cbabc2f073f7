"""Reward: which of two answers do people prefer? A LoRA adapter and a score head on the SFT model.

    python -m stages.reward --recipe configs/demo.yaml --base results/demo/sft-merged \\
        --pairs results/demo/pairs --out results/demo/reward

Loss -log sigmoid(r_j - r_k). Some of the reward split's questions are held out, and the state that ranks their pairs
best is kept. At the end the scores are shifted so that reference answers average 0.
"""

from pathlib import Path

import torch

from stages.learning import families, models
from stages.learning.losses import pairwise_loss
from stages.learning.preference_data import Example, accuracy, collate_examples, examples
from stages.learning.reward_model import Scorer, check_tied, initialise_head, raw_scores, save_scoring
from stages.learning.training import Training, remove_checkpoints, train
from stages.learning.weights import save_adapter
from stages.recipe import Reward
from stages.text.tables import rows_of

REFERENCE_ANSWERS = 2000  # that the normalisation averages over


def run(config: Reward, out: Path, *, base: Path, pairs: Path) -> dict[str, float]:
    """Fill `out` with a PEFT adapter that holds the score head, the tokenizer, scoring.json and history.jsonl."""
    tokenizer = models.load_tokenizer(base)
    training, validation, dropped = _examples(config, tokenizer, pairs)
    torch.manual_seed(config.seed)
    model = models.load_scorer(base, config.precision, new_head=True)
    families.check_length(model.config, config.max_length_tokens)
    check_tied(model.config, config.log_probability_weight)
    initialise_head(model, torch.Generator().manual_seed(config.seed))
    model = models.add_lora(model, precision=config.precision, scorer=True, **vars(config.lora))

    scorer = Scorer(model, config.precision, config.log_probability_weight)

    def loss(model, batch):
        better, worse = batch.pop("better"), batch.pop("worse")
        scores = raw_scores(model, **batch, log_probability_weight=config.log_probability_weight)
        return pairwise_loss(scores[better], scores[worse])

    def evaluate():
        return {"validation_accuracy": accuracy(scorer, validation)} if validation else {}

    history = train(
        model,
        training,
        collate_examples,
        Training.like(config, batch=config.batch_pairs, microbatch=config.microbatch_pairs, schedule="linear"),
        out,
        "reward",
        loss,
        evaluate,
        config.save_every_steps,
        keep_best="validation_accuracy" if validation else None,
    )
    model.eval()
    save_scoring(out, config.log_probability_weight, _reference_scores(scorer, training))
    save_adapter(model, tokenizer, out)
    remove_checkpoints(out)
    return {
        "pairs": sum(len(e.pairs) for e in training),
        "answers": sum(len(e.answers) for e in training),
        "dropped_over_length": dropped,
        "validation_pairs": sum(len(e.pairs) for e in validation),
        "validation_accuracy": max((row.get("validation_accuracy", 0.0) for row in history), default=0.0),
    }


def _examples(config: Reward, tokenizer, pairs: Path) -> tuple[list[Example], list[Example], int]:
    """Training and validation examples, divided by question, and the number of over-long pairs dropped."""
    made, dropped = examples(
        rows_of(pairs, "reward"),
        tokenizer,
        max_length_tokens=config.max_length_tokens,
        by_question=config.batching == "question",
        max_pairs=config.train_pairs,
    )
    questions = sorted({example.question for example in made})
    if len(questions) < 2:
        raise ValueError(
            f"{pairs} has {len(questions)} usable questions in its reward split "
            f"({dropped} pairs over {config.max_length_tokens} tokens): nothing to learn from"
        )
    order = torch.randperm(len(questions), generator=torch.Generator().manual_seed(config.seed)).tolist()
    held = {questions[i] for i in order[: round(config.validation_share * len(questions))]}
    return [e for e in made if e.question not in held], [e for e in made if e.question in held], dropped


def _reference_scores(scorer: Scorer, items: list[Example]) -> torch.Tensor:
    """Raw scores of reference answers: those that win a pair."""
    winners = [(item.prompt, item.answers[j]) for item in items for j in sorted({j for j, _ in item.pairs})]
    return scorer(*map(list, zip(*winners[:REFERENCE_ANSWERS], strict=True)))


if __name__ == "__main__":
    from stages.plumbing.command import main

    main(run)
