"""Reward: which of two answers do people prefer? A LoRA adapter and a score head on the SFT model.

    python -m stages.reward --recipe configs/demo.yaml --base results/demo/sft-merged \\
        --pairs results/demo/pairs --out results/demo/reward

Loss -log sigmoid(r_j - r_k). A lexical term, if there is one, is learnt first, and the head beside it. Some of the
reward split's questions are held out, and the state that ranks their pairs best is kept. At the end the scores are
shifted so that reference answers average 0. With several `members`, each is an adapter of its own, the first in the
artifact itself, others in member-1, member-2, ...
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stages.evaluation.pair_accuracy import (
    HeldOutPairs,
    accuracy_breakdown,
    draw_held_out_pairs,
    scored_pair_samples,
    validation_metrics,
)
from stages.evaluation.statistics import bootstrap_mean
from stages.modeling import families, lora, torch_setup
from stages.modeling.pretrained import save_adapter
from stages.modeling.tokenizer import load_tokenizer
from stages.recipe.recipe import select_settings
from stages.recipe.reward import Reward
from stages.reward_modeling.dataset import Example, collate_examples, examples, reference_answers
from stages.reward_modeling.lexical_fit import stacked
from stages.reward_modeling.lexical_term import Lexical, characters_of
from stages.reward_modeling.load import load_scorer
from stages.reward_modeling.loss import PairwiseLoss
from stages.reward_modeling.reward_model import check_tied, initialise_head
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import SCORING, Scoring, member_folder, save_scoring
from stages.runtime.artifact import RunContext
from stages.runtime.series import append_row, read_history, truncate_after
from stages.stackexchange.pairs.table import first_questions, first_rows, key_of, rows_of
from stages.training.callbacks import Evaluation
from stages.training.loggers import Logs, open_logs
from stages.training.trainer import TrainerSettings, last_step, remove_checkpoints, train

SPLIT = "reward"
REFERENCE_ANSWERS = 2000  # that the normalisation averages over
VALIDATION_QUESTIONS = 2000  # at most
SHOWN = 8  # validation pairs whose scores are kept at every evaluation
VALIDATION = "validation.jsonl"
INTERVALS = partial(bootstrap_mean, samples=1000, seed=0)


def run(config: Reward, out: Path, *, base: Path, pairs: Path, beside: RunContext | None = None) -> dict[str, float]:
    """Fill `out` with a PEFT adapter that holds the score head, the tokenizer, scoring.json, and history, samples and
    validation .jsonl; and a folder of the same for each further member."""
    torch_setup.prepare()
    tokenizer = load_tokenizer(base)
    data = _data(config, tokenizer, pairs)
    words = _words(config, base, tokenizer, data) if config.lexical_buckets else None
    found = []
    for member in range(config.members):
        folder = member_folder(out, member)
        folder.mkdir(exist_ok=True)
        if not (folder / SCORING).exists():  # an earlier try may have come further
            own, part = replace(config, seed=config.seed + member), folder.name if member else ""
            with open_logs(config.log_to, folder, "reward", beside, asdict(own), part=part) as logs:
                _train_member(own, folder, base, tokenizer, data, words, logs)
        remove_checkpoints(folder)
        found.append(_kept(folder))
    return {
        "pairs": sum(len(e.pairs) for e in data.training),
        "answers": sum(len(e.answers) for e in data.training),
        "dropped_over_length": data.dropped,
        "validation_pairs": len(data.validation.rows),
        **{name: float(np.mean([numbers[name] for numbers in found])) for name in found[0]},
    }


@dataclass(frozen=True)
class _Data:
    """Examples of questions to train on, pairs of the questions held out, pairs dropped as over-long."""

    training: list[Example]
    validation: HeldOutPairs
    dropped: int


def _data(config: Reward, tokenizer, pairs: Path) -> _Data:
    held = first_questions(pairs, SPLIT, config.validation_share, VALIDATION_QUESTIONS)
    training, dropped = examples(
        (row for row in rows_of(pairs, SPLIT) if key_of(row) not in held),
        tokenizer,
        max_length_tokens=config.max_length_tokens,
        by_question=config.batching == "question",
        max_pairs=config.train_pairs,
    )
    if len({example.question for example in training}) < 2:
        raise ValueError(f"{pairs} has hardly a usable pair in its {SPLIT} split ({dropped} are over "
                         f"{config.max_length_tokens} tokens): nothing to learn from")
    validation = draw_held_out_pairs(first_rows(pairs, SPLIT, held), tokenizer, max_pairs=config.train_pairs,
                                max_tokens=config.max_length_tokens, seed=config.seed)
    return _Data(training, validation, dropped)


def _words(config: Reward, base: Path, tokenizer, data: _Data) -> Lexical:
    """The lexical term, the same in every member; learnt again where a killed run goes on: minutes, for 100,000 pairs
    of long answers, and nothing that would have to be kept."""
    model = _untrained(config, base) if config.log_probability_weight else None
    return stacked(
        model, data.training, Scoring(**select_settings(Scoring, config)), config.precision,
        buckets=config.lexical_buckets, penalty=config.lexical_penalty, characters=characters_of(tokenizer),
        quiet="terminal" not in config.log_to,
    )


def _untrained(config: Reward, base: Path):
    """The base as a classifier, checked to serve what the recipe asks."""
    model = load_scorer(base, config.precision, new_head=True)
    families.check_length(model.config, config.max_length_tokens)
    for name in ("log_probability_weight", "language_model_weight"):
        check_tied(model.config, getattr(config, name), name)
    return model


def _train_member(
    config: Reward, out: Path, base: Path, tokenizer, data: _Data, words: Lexical | None, logs: Logs
) -> None:
    """One model into `out`; scoring.json is written last."""
    scoring = Scoring(**select_settings(Scoring, config))
    objective = PairwiseLoss(**select_settings(PairwiseLoss, config))
    torch.manual_seed(config.seed)
    model = _untrained(config, base)
    initialise_head(model, torch.Generator().manual_seed(config.seed), config.pooling)
    model = lora.add_lora(model, precision=config.precision, scorer=True, **vars(config.lora))
    scorer = Scorer(model, config.precision, scoring, words=words)

    def measure(step: int) -> dict[str, float]:
        scores = scorer(data.validation.prompts, data.validation.answers).numpy()
        found = accuracy_breakdown(data.validation, scores, INTERVALS)
        append_row(out / VALIDATION, {"step": step, **found})
        logs.samples(step, scored_pair_samples(data.validation, scores, SHOWN))
        return validation_metrics(data.validation, scores, found)

    truncate_after(out / VALIDATION, last_step(out), "step")
    watch = Evaluation(measure, config.save_every_steps, lambda row: row["validation_accuracy"])
    train(
        model,
        data.training,
        collate_examples,
        lambda items: objective.summed_loss(model, items, scoring, config.precision),
        TrainerSettings.like(config, batch=config.batch_pairs, microbatch=config.microbatch_pairs, schedule="linear"),
        out,
        f"reward, seed {config.seed}",
        watch if data.validation.rows else None,
        logs,
    )
    model.eval()
    save_adapter(model, tokenizer, out)
    if words is not None:
        words.save(out)
    reference = reference_answers(data.training, REFERENCE_ANSWERS)
    save_scoring(out, scoring, config.precision, reference, scorer(*reference))


def _kept(out: Path) -> dict[str, float]:
    """What was measured of the state that is kept, on the pairs held out; nothing where none were."""
    found = [row for row in read_history(out) if "validation_accuracy" in row]
    best = max(found, key=lambda row: row["validation_accuracy"], default={})
    return {name: value for name, value in best.items() if name.startswith("validation_")}


if __name__ == "__main__":
    from stages.runtime.command import main

    main(run)
