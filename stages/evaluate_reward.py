"""Judge a reward model, this project's or anyone's, and say which part of a failing pipeline is at fault.

    python -m stages.evaluate_reward --recipe configs/demo.yaml --reward results/demo/reward-merged \\
        --pairs results/demo/pairs --sft results/demo/sft-merged --policy results/demo/ppo-merged \\
        --out results/demo/evaluate-reward

--reward takes a merged reward artifact, or the folder or hub id of a sequence classifier with one output, which reads
--template. Settings are those of the recipe's section evaluate; --gold FUNCTION and --sft together give the gold of
best-of-n. --base adds the likelihood under the base to the baselines. Writes metrics.json, reward.html (self-contained)
and per_pair.parquet, and prints the verdict. All models run in fp32; intervals are at 95 %, by question.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from stages.evaluation import gold_score
from stages.evaluation.heldout_prompts import EvaluationPrompts
from stages.evaluation.output_tables import write_pairs
from stages.evaluation.pair_accuracy import (
    HeldOutPairs,
    draw_held_out_pairs,
    evaluate_pairs,
    mean_logprobs,
    score_fitted_baselines,
)
from stages.evaluation.policy_answers import Answers, repeat_each, sample_answers
from stages.evaluation.statistics import bootstrap_mean, bootstrap_statistic
from stages.modeling import families, torch_setup
from stages.modeling.load import load_causal
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.modeling.tokenizer import load_shared_tokenizer
from stages.recipe.sections.evaluate import Evaluate, Report
from stages.reporting.figures import FigureFolder
from stages.reward_checks.diagnosis import diagnose
from stages.reward_checks.gold_curve import best_of_n_curve, gold_above_other_answers
from stages.reward_checks.layout import PARAPHRASES, measure_layout
from stages.reward_checks.noise_ceiling import estimate_noise_ceiling
from stages.reward_checks.page import render_reward_page
from stages.reward_checks.reward_under_test import RewardUnderTest, load_reward
from stages.rewards.kl import kl_k1, kl_k3
from stages.runtime.files import write_json, write_text
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import read_pairs, sample_rows

SPLIT, BASELINE_SPLIT = "evaluation", "reward"
BASE_LOG_PROBABILITY = "base log-probability"
PAGE = "reward.html"


def run(config: Evaluate, out: Path, *, reward: list[str], pairs: Path, sft: Path | None = None,
        base: Path | None = None, policy: Path | None = None,
        template: str = "Question: {question}\n\nAnswer: {response}") -> dict[str, float]:
    """Fill `out` with metrics.json, reward.html and per_pair.parquet; return the headline metrics.

    sft, base, policy: plain model folders, merged. template: the input of a classifier that is no artifact of ours.
    """
    torch_setup.prepare()
    _check_inputs(reward, sft, policy)
    judged = load_reward(reward[0], template, config.cpu_kernels)
    models = [folder for folder in (sft, base, policy) if folder]
    tokenizer = load_shared_tokenizer(*models) if models else judged.tokenizer
    longest = min([judged.max_tokens, *([families.max_positions(*models)] if models else [])])
    gold_scorer = gold_score.load_gold_scorer(config.gold) if config.gold else None
    held_out = draw_held_out_pairs(
        read_pairs(pairs, SPLIT), tokenizer, max_pairs=config.max_pairs, max_tokens=longest, seed=config.seed)
    if not held_out.rows:
        raise ValueError(f"{pairs} has no pair of at most {longest} tokens in its {SPLIT} split: nothing can be judged")
    scores, metrics = _measure_pairs(config, judged, held_out, pairs, {"sft": sft, "base": base}, gold_scorer)
    metrics = {"reward": reward[0], **metrics, "sft_gold_above_other_answers": None, "gold_curve": None, "policy": None}
    if sft and (gold_scorer or policy):
        prompts = EvaluationPrompts(
            pairs, SPLIT, tokenizer, prompts=config.prompts, selection_prompts=0, longest=longest, seed=config.seed,
            max_prompt_tokens=config.max_prompt_tokens, max_response_tokens=config.max_response_tokens)
        metrics |= _measure_samples(config, judged, prompts, tokenizer, sft, policy, gold_scorer)
    diagnosis = diagnose(metrics)
    metrics |= {"fault": diagnosis.fault, "verdict": diagnosis.answers}
    write_pairs(out / "per_pair.parquet", held_out.rows, held_out.better, held_out.worse, scores)
    write_json(out / "metrics.json", metrics)
    write_text(out / PAGE, render_reward_page(
        reward[0], diagnosis, metrics, FigureFolder(out / "figures", Report().figure_width_inches)))
    for words in diagnosis.answers.values():
        print_line(f"evaluate_reward: {words}")
    return _headline_metrics(metrics)


def _check_inputs(reward: list[str], sft: Path | None, policy: Path | None) -> None:
    if len(reward) != 1:
        raise ValueError(f"--reward takes one reward model, not {len(reward)}: judge one after the other")
    if policy and not sft:
        raise ValueError("--policy needs --sft, the model that its KL is measured to")


def _measure_pairs(config: Evaluate, judged: RewardUnderTest, held_out: HeldOutPairs, pairs: Path,
                   models: dict[str, Path | None], gold_scorer: Callable | None
                   ) -> tuple[dict[str, np.ndarray | None], dict]:
    """Measure the reward model on held-out pairs; return the scores of the texts [M] by scorer, and the metrics."""
    estimate_mean, estimate = (partial(kind, samples=config.bootstrap_samples, seed=config.seed)
                               for kind in (bootstrap_mean, bootstrap_statistic))
    questions, answers = zip(*held_out.texts, strict=True)
    scores = {"reward": judged.score_texts(questions, answers, "held-out pairs")}
    likelihood = {name: mean_logprobs(held_out, _load(folder, config),
                                      f"evaluate_reward: {name} on pairs") if folder else None
                  for name, folder in models.items()}
    scores |= {"log_probability": likelihood["sft"],
               "gold": gold_score.score_main_gold(gold_scorer, held_out.texts) if gold_scorer else None}
    fitted = score_fitted_baselines(
        held_out, sample_rows(read_pairs(pairs, BASELINE_SPLIT), config.surface_pairs, config.seed))
    if likelihood["base"] is not None:
        fitted[BASE_LOG_PROBABILITY] = likelihood["base"]
    return scores, {
        "reward_model": evaluate_pairs(held_out, scores["reward"], fitted, likelihood["sft"], scores["gold"], {},
                                       estimate_mean),
        "noise_ceiling": estimate_noise_ceiling(held_out, estimate_mean),
        "layout": {name: _measure_layout(judged, held_out, scores["reward"], name, estimate_mean, estimate)
                   for name in PARAPHRASES}}


def _measure_layout(judged: RewardUnderTest, held_out: HeldOutPairs, scores: np.ndarray, name: str,
                    estimate_mean: Callable, estimate: Callable) -> dict:
    """Score the answers that a paraphrase of layout changes, and compare."""
    texts = [(question, PARAPHRASES[name](answer)) for question, answer in held_out.texts]
    changed = np.array([new != old for new, old in zip(texts, held_out.texts, strict=True)])
    rescored = scores.copy()
    if changed.any():
        rescored[changed] = judged.score_texts(
            *zip(*(text for text, differs in zip(texts, changed, strict=True) if differs), strict=True), name)
    return measure_layout(held_out, scores, rescored, changed, estimate_mean, estimate)


def _measure_samples(config: Evaluate, judged: RewardUnderTest, prompts: EvaluationPrompts, tokenizer, sft: Path,
                     policy: Path | None, gold_scorer: Callable | None) -> dict:
    """Sample SFT, and the policy if there is one, one model in memory at a time; measure gold and KL."""
    sample = partial(sample_answers, tokenizer=tokenizer, batch_prompts=config.batch_prompts,
                     max_new_tokens=config.max_response_tokens)
    measured = {}
    if policy:
        model = _load(policy, config)
        moved = sample(model, prompts=prompts.prompts, temperature=config.temperature, seed=config.seed,
                       label="evaluate_reward: policy answers")
        logprobs = _logprobs(model, prompts, moved, config.temperature)
        model = None
    model = _load(sft, config)
    if policy:
        own = sample(model, prompts=prompts.prompts, temperature=config.temperature, seed=config.seed,
                     label="evaluate_reward: SFT answers")
        measured["policy"] = _measure_policy(config, judged, prompts, tokenizer, own, moved, list(zip(
            logprobs, _logprobs(model, prompts, moved, config.temperature), strict=True)), gold_scorer)
    if gold_scorer:
        measured |= _measure_gold(config, judged, prompts, tokenizer, partial(sample, model), gold_scorer)
    return measured


def _load(folder: Path, config: Evaluate):
    return load_causal(folder, cpu_kernels=config.cpu_kernels)


def _logprobs(model, prompts: EvaluationPrompts, answers: Answers, temperature: float) -> list:
    return response_logprobs(model, prompts.prompts, answers.responses, temperature, "evaluate_reward: KL")


def _measure_policy(config: Evaluate, judged: RewardUnderTest, prompts: EvaluationPrompts, tokenizer, own: Answers,
                    moved: Answers, logprobs: list[tuple], gold_scorer: Callable | None) -> dict:
    """Estimate the policy's KL to SFT, and the differences in reward and in gold (None where it is not known).

    own, moved: answers of SFT and of the policy. logprobs: of the policy's answers, under the policy and under SFT.
    """
    estimate_mean = partial(bootstrap_mean, samples=config.bootstrap_samples, seed=config.seed)
    rewards = [judged.score_sampled(prompts.questions, prompts.prompts, answers, tokenizer, "answers")
               for answers in (own, moved)]
    values = {name: np.array([float(kl(*rows).sum()) for rows in logprobs])
              for name, kl in (("kl_k1", kl_k1), ("kl_k3", kl_k3))} | {"reward_difference": rewards[1] - rewards[0]}
    if gold_scorer:
        gold = [_score_gold(gold_scorer, prompts.questions, answers.texts) for answers in (own, moved)]
        values |= {"gold": gold[1], "gold_difference": gold[1] - gold[0]}
    return {"gold": None, "gold_difference": None} | {
        name: estimate_mean(each, np.arange(len(each))) for name, each in values.items()}


def _score_gold(gold_scorer: Callable, questions: list[str], answers: list[str]) -> np.ndarray:
    return gold_score.score_main_gold(gold_scorer, list(zip(questions, answers, strict=True)))


def _measure_gold(config: Evaluate, judged: RewardUnderTest, prompts: EvaluationPrompts, tokenizer, sample: Callable,
                  gold_scorer: Callable) -> dict:
    """Measure gold of SFT's greedy answers, and of best-of-n by the reward model."""
    score = partial(_score_gold, gold_scorer)
    estimate_mean = partial(bootstrap_mean, samples=config.bootstrap_samples, seed=config.seed)
    greedy = sample(prompts=prompts.prompts, temperature=0.0, seed=config.seed, label="evaluate_reward: SFT, greedy")
    count = max(config.best_of, default=1)
    questions, repeated = (repeat_each(each, count * len(each)) for each in (prompts.questions, prompts.prompts))
    samples = sample(prompts=repeated, temperature=config.temperature, seed=config.seed + 1,
                     label=f"evaluate_reward: {count} of SFT")
    gold = score(questions, samples.texts).reshape(-1, count)
    if np.isnan(gold).any(1).all():
        print_line(f"evaluate_reward: the gold scorer {config.gold} knows none of these questions")
        return {}
    rewards = judged.score_sampled(questions, repeated, samples, tokenizer, "samples").reshape(-1, count)
    return {"gold_curve": best_of_n_curve(rewards, gold, config.best_of, estimate_mean),
            "sft_gold_above_other_answers": gold_above_other_answers(
                score, prompts.questions, greedy.texts, estimate_mean)}


def _headline_metrics(metrics: dict) -> dict[str, float]:
    """Return the numbers for the manifest and the log's last line."""
    measured, policy = metrics["reward_model"], metrics["policy"] or {}
    estimates = {"reward_accuracy": measured["accuracy"],
                 "above_best_cheap_baseline": measured["above_best_cheap_baseline"],
                 "noise_ceiling": metrics["noise_ceiling"]["all"], "kl": policy.get("kl_k1")}
    return {name: estimate["mean"] for name, estimate in estimates.items() if estimate} | {"pairs": measured["pairs"]}
