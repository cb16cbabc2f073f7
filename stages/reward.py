"""Train a pairwise reward model: a LoRA adapter and a score head on the SFT model.

    python -m stages.reward --recipe configs/demo.yaml --base results/demo/sft-merged \\
        --pairs results/demo/pairs --out results/demo/reward

The loss of a pair is -log sigmoid(r_j - r_k), answer j being the better one. Some questions of the reward split are
held out; the checkpoint that ranks their pairs best is the result. With `sampled_questions`, the base answers some of
the training questions, and its answers lose further pairs: sampled_pairs.jsonl. The zero is the mean score of reference
answers (reward = score - mean). Of several `members`, the first is in the artifact itself, others in member-1, ...
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from stages.artifacts.artifact import RunContext
from stages.cards.adapter_card import write_adapter_cards
from stages.evaluation.pair_accuracy import (
    HeldOutPairs,
    accuracy_breakdown,
    compare_with_baselines,
    draw_held_out_pairs,
    mean_logprobs,
    score_fitted_baselines,
    scored_pair_samples,
    validation_metrics,
)
from stages.evaluation.policy_answers import sample_answers
from stages.evaluation.statistics import bootstrap_mean, pair_wins
from stages.modeling import families, lora
from stages.modeling.load import load_causal
from stages.modeling.pretrained import save_adapter, save_model
from stages.modeling.tokenizer import prepare_tokenizer
from stages.modeling.trainable import PlainOutputs, check_trained_model, plain_outputs, shard_layers
from stages.recipe.recipe import select_settings
from stages.recipe.sections.reward import Reward
from stages.reward_modeling import sampled_pairs
from stages.reward_modeling.dataset import (
    Example,
    PairSplit,
    build_examples,
    collate_examples,
    pair_indices,
    select_reference_answers,
)
from stages.reward_modeling.head_fit import fit_head
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.loss import PairwiseLoss
from stages.reward_modeling.reward_model import check_tied_embeddings, initialise_head
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import (
    SCORING,
    Scoring,
    describe_scoring,
    member_folder,
    save_scoring,
    set_scoring,
)
from stages.runtime.series import append_row, read_history, read_rows, truncate_after
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import sample_rows
from stages.training.callbacks import Evaluation
from stages.training.loggers import TrainingLogger, open_logger
from stages.training.trainer import TrainerSettings, last_checkpoint_step, remove_checkpoints, train

SPLIT = "reward"
REFERENCE_ANSWERS = 2000  # whose mean score becomes 0, at most
REFERENCE_FLOP = 2e13  # of their forward passes, at most: 75,000 tokens of a model of 135 million weights
MIN_REFERENCE_ANSWERS = 250  # their mean's standard error is 0.06 standard deviations of a score
BASELINE_PAIRS = 5000  # of the training questions, that the baselines are fitted on, at most
START_LOG_PROBABILITY = "log-probability under the model before training"
LOGGED_PAIRS = 8  # validation pairs logged with their scores at every evaluation
VALIDATION = "validation.jsonl"
ESTIMATE = partial(bootstrap_mean, samples=1000, seed=0)


def run(config: Reward, out: Path, *, base: Path, pairs: Path, context: RunContext | None = None) -> dict[str, float]:
    """Fill `out` with a PEFT adapter (which holds the score head) or a whole model, the tokenizer, scoring.json, and
    the series history, samples and validation .jsonl; likewise member-1, ...

    Returns the metrics of the manifest, averaged over members.
    """
    return train_members(config, out, base, pairs, context, stage="reward", split=SPLIT)


def train_members(config: Reward, out: Path, base: Path, pairs: Path, context: RunContext | None, *, stage: str,
                  split: str) -> dict[str, float]:
    """Do the work of `run` for a stage that trains reward models on one split of the pairs."""
    tokenizer = prepare_tokenizer(base)
    data = load_data(config, tokenizer, base, pairs, split)
    if data.sampled:
        sampled_pairs.write_sampled_pairs(out / sampled_pairs.SAMPLED_PAIRS, data.sampled, tokenizer)
    plain = plain_outputs(base, config.precision, config.layers)
    metrics = []
    for member in range(config.members):
        folder = member_folder(out, member)
        folder.mkdir(exist_ok=True)
        if not (folder / SCORING).exists():  # an interrupted run may have finished some members
            settings, part = replace(config, seed=config.seed + member), folder.name if member else ""
            with open_logger(config.log_to, folder, stage, context, asdict(settings), part=part) as logs:
                train_member(settings, folder, base, plain, tokenizer, data, logs)
        remove_checkpoints(folder)
        metrics.append(best_validation(folder))
    write_adapter_cards(out, base, pairs)
    return {
        "pairs": sum(len(e.pairs) for e in data.training), "answers": sum(len(e.answers) for e in data.training),
        **({"sampled_pairs": sum(map(len, data.sampled.values()))} if data.sampled else {}),
        "dropped_over_length": data.dropped, "validation_pairs": len(data.validation.rows),
        **{name: float(np.mean([numbers[name] for numbers in metrics])) for name in metrics[0]}}


@dataclass(frozen=True)
class RewardData:
    """Training examples, pairs of the held-out questions, and the number of pairs dropped as too long.

    baselines: scores [M] of the held-out texts by the baselines that are fitted or need a model, by name.
    sampled, held_out_sampled: pairs with a sampled answer, by temperature: see sampled_pairs.py.
    """

    training: list[Example]
    validation: HeldOutPairs
    baselines: dict[str, np.ndarray]
    dropped: int
    sampled: dict[float, list[Example]]
    held_out_sampled: dict[float, list[Example]]

    def all_training(self) -> list[Example]:
        """Return the training examples, those with sampled answers last."""
        return [*self.training, *chain.from_iterable(self.sampled.values())]


def load_data(config: Reward, tokenizer, base: Path, pairs: Path, split: str) -> RewardData:
    """Tokenise one split; TooFewPairsError if fewer than two questions are left to train on."""
    parts = PairSplit(pairs, split, config.validation_share)
    training, dropped = parts.training_examples(
        tokenizer, max_length_tokens=config.max_length_tokens, max_pairs=config.train_pairs,
        by_question=config.batching == "question")
    held_out = list(parts.validation_rows())
    validation = draw_held_out_pairs(held_out, tokenizer, max_pairs=config.train_pairs,
                                     max_tokens=config.max_length_tokens, seed=config.seed)
    sampled = held_out_sampled = baselines = {}
    if validation.rows or config.sampled_questions:
        model = load_causal(base, config.precision, config.cpu_kernels)
        shard_layers(model, config.sharding)
    if validation.rows:
        baselines = score_baselines(config, model, validation, parts.training_rows())
    if config.sampled_questions:
        others, _ = build_examples(held_out, tokenizer, max_length_tokens=config.max_length_tokens, by_question=True,
                                   max_pairs=config.train_pairs)
        sample = partial(sample_pairs, config, model, tokenizer)
        sampled = sample(training, config.sampled_questions, "samples")
        held_out_sampled = sample(others, -(-config.sampled_questions // 4), "held-out samples")
    return RewardData(training, validation, baselines, dropped, sampled, held_out_sampled)


def sample_pairs(config: Reward, model, tokenizer, items: list[Example], count: int, label: str
                 ) -> dict[float, list[Example]]:
    """Sample an answer to each of `count` questions, and return an example of one pair for each, by temperature."""
    items = sampled_pairs.select_questions(items, count, config.max_length_tokens - config.max_sampled_tokens)
    pairs = {}
    for temperature in sampled_pairs.TEMPERATURES:
        answers = sample_answers(
            model, tokenizer, [item.prompt for item in items], batch_prompts=sampled_pairs.BATCH_PROMPTS,
            max_new_tokens=config.max_sampled_tokens, temperature=temperature, seed=config.seed,
            precision=config.precision, label=f"reward: {label}, temperature {temperature:g}")
        pairs[temperature] = list(map(sampled_pairs.pair_with_sample, items, answers.responses, answers.ended))
    return pairs


def score_baselines(config: Reward, model, validation: HeldOutPairs, rows: Iterable[dict]) -> dict[str, np.ndarray]:
    """Score the held-out texts [M] with each baseline that is fitted, on a sample of `rows`, or needs the base."""
    fitted = score_fitted_baselines(validation, sample_rows(rows, BASELINE_PAIRS, config.seed))
    return fitted | {START_LOG_PROBABILITY: mean_logprobs(validation, model, "reward: baselines")}


def load_untrained(config: Reward, base: Path):
    """Load the base as a classifier without a head; ValueError if it does not fit the settings."""
    model = load_classifier(base, config.precision, new_head=True, cpu_kernels=config.cpu_kernels, layers=config.layers)
    families.check_length(model.config, config.max_length_tokens)
    for name in ("log_probability_weight", "language_model_weight"):
        check_tied_embeddings(model.config, getattr(config, name), name)
    return model


def train_member(config: Reward, out: Path, base: Path, plain: PlainOutputs, tokenizer, data: RewardData,
                 logs: TrainingLogger) -> None:
    """Train one model into `out`; scoring.json is written last. plain: of the base."""
    model = load_untrained(config, base)
    torch.manual_seed(config.seed)  # after Transformers has drawn a head, on a GPU with the GPU's generator
    initialise_head(model, torch.Generator().manual_seed(config.seed), config.pooling)
    if config.tune == "lora":
        model = lora.add_lora(model, precision=config.precision, scorer=True, **vars(config.lora))
    shard_layers(model, config.sharding)
    print_line(f"{logs.stage}: check  {check_trained_model(model, plain)}")
    learn = _fit_head if config.tune == "head" else _train_by_steps
    scorer = learn(config, model, out, data, logs)
    reference = reference_answers(model, data.training)
    scores = scorer(*reference, f"{logs.stage}: zero of the scale")
    content = describe_scoring(
        scorer.scoring, config.precision, reference, scores, best_held_out(out, data.validation))
    if config.tune == "lora":
        save_adapter(model, tokenizer, out)
    else:
        set_scoring(model, content)
        save_model(model, tokenizer, out)
    save_scoring(out, content)


def _fit_head(config: Reward, model, out: Path, data: RewardData, logs: TrainingLogger) -> Scorer:
    """Fit the head on the frozen model's states, and evaluate it once, as step 1."""
    scoring = fit_head(
        model, data.all_training(), precision=config.precision, penalty=config.head_penalty,
        with_logprobs=config.layers is None and model.config.tie_word_embeddings, label=f"{logs.stage}: states")
    scorer = Scorer(model, config.precision, scoring)
    truncate_after(out / VALIDATION, 0, "step")
    logs.resume(0)
    if data.validation.rows:
        logs.log_metrics(1, _evaluate(scorer, out, data, logs, 1))
    return scorer


def _train_by_steps(config: Reward, model, out: Path, data: RewardData, logs: TrainingLogger) -> Scorer:
    """Train the head and the adapter, or all weights, by gradient steps; the best checkpoint's weights remain."""
    scoring = Scoring(**select_settings(Scoring, config))
    loss_fn = PairwiseLoss(**select_settings(PairwiseLoss, config))
    scorer = Scorer(model, config.precision, scoring)
    truncate_after(out / VALIDATION, last_checkpoint_step(out), "step")
    evaluation = Evaluation(partial(_evaluate, scorer, out, data, logs), config.save_every_steps,
                            lambda row: row["validation_accuracy"])
    settings = TrainerSettings.from_section(
        config, batch=config.batch_pairs, microbatch=config.microbatch_pairs, schedule="linear")
    train(model, data.all_training(), collate_examples,
          lambda items: loss_fn.summed_loss(model, items, scoring, config.precision), settings, out,
          f"{logs.stage}, seed {config.seed}", evaluation if data.validation.rows else None, logs)
    model.eval()
    return scorer


def _evaluate(scorer: Scorer, out: Path, data: RewardData, logs: TrainingLogger, step: int) -> dict[str, float]:
    """Rank the held-out pairs, append the breakdown to VALIDATION, and return the metrics of the history."""
    scores = scorer(data.validation.prompts, data.validation.answers, f"{logs.stage}: validation").numpy()
    breakdown = accuracy_breakdown(data.validation, scores, ESTIMATE) | compare_with_baselines(
        data.validation, scores, data.baselines, ESTIMATE)
    sampled = {f"{temperature:g}": _sampled_accuracy(scorer, items)
               for temperature, items in data.held_out_sampled.items() if items}
    append_row(out / VALIDATION, {"step": step, **breakdown, **({"sampled_pairs": sampled} if sampled else {})})
    logs.log_samples(step, scored_pair_samples(data.validation, scores, LOGGED_PAIRS))
    return validation_metrics(data.validation, scores, breakdown) | {
        f"validation_sampled_accuracy_at_{temperature}": accuracy["mean"] for temperature, accuracy in sampled.items()}


def _sampled_accuracy(scorer: Scorer, items: list[Example]) -> dict:
    """Estimate how often the human answer scores above the sampled one; each item has one pair."""
    better, worse = pair_indices(items)
    scores = scorer([item.prompt for item in items for _ in item.answers],
                    [answer for item in items for answer in item.answers]).numpy()
    return ESTIMATE(pair_wins(scores[better], scores[worse]), np.arange(len(items)))


def reference_answers(model, training: list[Example]) -> tuple[list[list[int]], list[list[int]]]:
    """Select prompts and answers whose mean score becomes 0: fewer for a large model, which takes longer to score."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    return select_reference_answers(
        training, REFERENCE_ANSWERS, max_tokens=int(REFERENCE_FLOP / (2 * weights)), min_count=MIN_REFERENCE_ANSWERS)


def best_held_out(out: Path, validation: HeldOutPairs) -> dict | None:
    """Return the accuracy of the best checkpoint on the held-out pairs, beside baselines; None if no pair is held out.

    The checkpoint was chosen by these pairs, so that its accuracy is slightly too high.
    """
    if not validation.rows:
        return None
    best = max(read_rows(out / VALIDATION), key=lambda row: row["accuracy"]["mean"])
    names = ("accuracy", "baselines", "best_cheap_baseline", "above_best_cheap_baseline", "sampled_pairs")
    return {"pairs": len(validation.rows), **{name: best[name] for name in names if name in best}}


def best_validation(out: Path) -> dict[str, float]:
    """Return the validation metrics of the best checkpoint; none if no pair is held out."""
    rows = [row for row in read_history(out) if "validation_accuracy" in row]
    best = max(rows, key=lambda row: row["validation_accuracy"], default={})
    return {name: value for name, value in best.items() if name.startswith("validation_")}
