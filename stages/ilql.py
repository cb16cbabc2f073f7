"""ILQL: offline reinforcement learning from scored answers, by Q and V heads on the SFT model.

    python -m stages.ilql --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --pairs results/demo/pairs --out results/demo/ilql

Nothing is sampled in training: the experience is every answer of the reward split, once, and its reward is its score,
normalised to mean 0 and standard deviation 1 over the data, at its last token. The result is an adapter (or a whole
model) and the Q heads that shift its logits when it is sampled from.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from stages.artifacts.artifact import RunContext
from stages.cards.adapter_card import write_adapter_cards
from stages.generation.sampler import sample
from stages.modeling.pretrained import save_adapter, save_model
from stages.modeling.q_heads import save_q_heads
from stages.modeling.tokenizer import prepare_tokenizer
from stages.modeling.trainable import TrainableSettings, load_trainable_causal
from stages.offline_rl.dataset import ScoredAnswer, collate_answers, measure_scale, normalise_rewards, tokenize_answers
from stages.offline_rl.losses import PREFIX, LossSettings, measure_answers, token_losses, total_loss
from stages.offline_rl.model import ILQLModel
from stages.recipe.recipe import select_settings
from stages.recipe.sections.ilql import Ilql
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import (
    best_rows,
    first_question_keys,
    question_key,
    read_first_rows,
    read_scored_answers,
)
from stages.stackexchange.prompt import prompt_ids
from stages.training.callbacks import Evaluation
from stages.training.loggers import TrainingLogger, open_logger
from stages.training.trainer import TrainerSettings, remove_checkpoints, train

SPLIT = "reward"
VALIDATION_SHARE = 0.1  # of the questions, at most
SAMPLE_TOKENS = 96  # length limit of a sampled answer


def run(config: Ilql, out: Path, *, policy: Path, pairs: Path, context: RunContext | None = None) -> dict[str, float]:
    """Fill `out` with a PEFT adapter (or the whole model), q_heads.safetensors and .json, the tokenizer, and the series
    history and samples .jsonl."""
    tokenizer = prepare_tokenizer(policy)
    held_out = first_question_keys(pairs, SPLIT, VALIDATION_SHARE, config.validation_questions)
    training, validation, (mean, std), dropped = load_answers(config, tokenizer, pairs, held_out)
    learner = load_learner(config, policy, tokenizer)
    losses = LossSettings(**select_settings(LossSettings, config))
    sizes = {"batch": config.batch_answers, "microbatch": config.microbatch_answers}
    with open_logger(config.log_to, out, "ilql", context, asdict(config)) as logger:
        questions = load_questions(config, tokenizer, pairs, held_out)
        measure = partial(validate, config, learner, tokenizer, validation, questions, losses, logger)
        history = train(
            learner, training, collate_answers,
            lambda rows: total_loss(token_losses(learner(rows), losses), losses).sum(),
            TrainerSettings.from_section(config, **sizes, schedule="cosine"), out, "ilql",
            Evaluation(measure, config.evaluate_every_steps, at_start=True) if validation else None, logger,
            lambda step: synchronise_targets(config, learner, step))
    (save_adapter if config.tune == "lora" else save_model)(learner.model, tokenizer, out)
    save_q_heads(learner.heads.sampling_heads(config.sampling_beta), out)
    write_adapter_cards(out, policy, pairs)
    remove_checkpoints(out)
    return {"answers": len(training), "tokens": sum(len(row.answer) for row in training),
            "dropped_over_length": dropped, "validation_answers": len(validation), "score_mean": mean,
            "score_std": std, **last_validation(history)}


def load_answers(
    config: Ilql, tokenizer, pairs: Path, held_out: set[tuple]
) -> tuple[list[ScoredAnswer], list[ScoredAnswer], tuple[float, float], int]:
    """Read the scored answers to train on and those to the held-out questions, mean and standard deviation of the
    scores, and how many are too long; ValueError if there is nothing to learn from."""
    texts: dict[bool, list[tuple[str, str, int]]] = {True: [], False: []}
    for row, answer, score in read_scored_answers(pairs, SPLIT):
        texts[question_key(row) in held_out].append((row["question"], answer, score))
    training, dropped = tokenize_answers(texts[False], tokenizer, config.max_length_tokens)
    validation, too_long = tokenize_answers(texts[True], tokenizer, config.max_length_tokens)
    if not training:
        raise ValueError(f"{pairs} has no answer of at most {config.max_length_tokens} tokens in its {SPLIT} split "
                         f"({dropped} are longer): raise ilql.max_length_tokens, or use more posts")
    scale = measure_scale(training)
    return normalise_rewards(training, scale), normalise_rewards(validation, scale), scale, dropped + too_long


def load_questions(config: Ilql, tokenizer, pairs: Path, held_out: set[tuple]) -> list[tuple[dict, list[int]]]:
    """Read the held-out questions that leave room for an answer: their best row of the pairs, and the prompt."""
    rows = best_rows(read_first_rows(pairs, SPLIT, held_out))
    prompts = (prompt_ids(tokenizer, row["question"]) for row in rows)
    return [(row, prompt) for row, prompt in zip(rows, prompts, strict=True) if len(prompt) < config.max_length_tokens]


def load_learner(config: Ilql, policy: Path, tokenizer) -> ILQLModel:
    """Load the SFT model as it is trained, with untrained heads, and check that these shift its logits."""
    model = load_trainable_causal(
        TrainableSettings(**select_settings(TrainableSettings, config)), policy, tokenizer,
        max_length_tokens=config.max_length_tokens, stage="ilql")
    learner = ILQLModel(model, config.precision)
    print_line(f"ilql: check  {learner.check_shift()}")
    return learner


def synchronise_targets(config: Ilql, learner: ILQLModel, step: int) -> None:
    """Move the target heads towards the Q heads at every `target_every_steps` steps."""
    if step % config.target_every_steps == 0:
        learner.heads.synchronise_targets(config.target_rate)


def validate(config: Ilql, learner: ILQLModel, tokenizer, answers: list[ScoredAnswer],
             questions: list[tuple[dict, list[int]]], losses: LossSettings, logger: TrainingLogger, step: int
             ) -> dict[str, float]:
    """Compute the metrics on held-out answers, and log a sampled answer of the shifted policy to each question."""
    metrics = measure_answers(learner, answers, losses, config.microbatch_answers)
    prompts = [prompt for _, prompt in questions]
    if not prompts:
        return metrics
    room = config.max_length_tokens - max(map(len, prompts))
    with learner.shifted(config.sampling_beta):
        rollout = sample(learner.model, prompts, temperature=1.0, stop_ids=[tokenizer.eos_token_id],
                         max_new_tokens=min(SAMPLE_TOKENS, room), precision=learner.precision,
                         generator=torch.Generator().manual_seed(config.seed))
    logger.log_samples(step, [
        {"question": row["question"], "answer": text, "ended": ended, "best_human_answer": row["response_j"],
         "source": row["metadata"][0]}
        for (row, _), text, ended in zip(questions, rollout.decode(tokenizer), rollout.ended, strict=True)])
    return metrics | {f"{PREFIX}eos_rate": sum(rollout.ended) / len(rollout.ended)}


def last_validation(history: list[dict]) -> dict[str, float]:
    """Return the validation metrics of the last state, which is the one that is saved."""
    rows = [row for row in history if f"{PREFIX}loss" in row]
    return {name: value for name, value in rows[-1].items() if name != "step"} if rows else {}
