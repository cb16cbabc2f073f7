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

from stages.evaluation.answer_sampler import AnswerSampler
from stages.evaluation.heldout_prompts import EvaluationPrompts
from stages.evaluation.pair_accuracy import (
    LOG_PROBABILITY,
    HeldOutPairs,
    draw_held_out_pairs,
    evaluate_pairs,
    mean_logprobs,
    score_fitted_baselines,
)
from stages.evaluation.policy_answers import repeat_each, score_main_gold
from stages.evaluation.statistics import bootstrap_mean, bootstrap_statistic
from stages.evaluation.summary import SAMPLES
from stages.evaluation.tasks.held_out import BASELINE_PAIRS, BASELINE_SPLIT, SPLIT
from stages.modeling import families, torch_setup
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import load_shared_tokenizer
from stages.recipe.sections.evaluate import Evaluate
from stages.recipe.user_functions import load_function
from stages.reporting.figures import FigureFolder
from stages.reward_checks.diagnosis import diagnose
from stages.reward_checks.measures import (
    PARAPHRASES,
    best_of_n_curve,
    compare_policy,
    estimate_noise_ceiling,
    measure_layout,
)
from stages.reward_checks.page import render_reward_page
from stages.reward_checks.reward_under_test import RewardUnderTest
from stages.runtime.files import write_json, write_text
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import read_pairs, sample_rows

BASE_LOG_PROBABILITY = "base log-probability"
PAGE = "reward.html"


def run(config: Evaluate, out: Path, *, reward: list[str], pairs: Path, sft: Path | None = None,
        base: Path | None = None, policy: Path | None = None,
        template: str = "Question: {question}\n\nAnswer: {response}") -> dict[str, float]:
    """Fill `out` with metrics.json, reward.html and per_pair.parquet; return the headline metrics.

    sft, base, policy: plain model folders, merged. template: the input of a classifier that is no artifact of ours.
    """
    torch_setup.prepare()
    if len(reward) != 1:
        raise ValueError(f"--reward takes one reward model, not {len(reward)}: judge one after the other")
    if policy and not sft:
        raise ValueError("--policy needs --sft, the model that its KL is measured to")
    judged = RewardUnderTest(reward[0], template, config.cpu_kernels)
    models = [folder for folder in (sft, base, policy) if folder]
    tokenizer = load_shared_tokenizer(*models) if models else judged.tokenizer
    longest = min([judged.max_tokens, *([families.max_positions(*models)] if models else [])])
    gold_scorer = load_function(config.gold, "gold") if config.gold else None
    held_out = draw_held_out_pairs(
        read_pairs(pairs, SPLIT), tokenizer, max_pairs=config.max_pairs, max_tokens=longest, seed=config.seed)
    if not held_out.rows:
        raise ValueError(f"{pairs} has no pair of at most {longest} tokens in its {SPLIT} split: nothing can be judged")
    scores, metrics = _measure_pairs(
        config, judged, held_out, pairs, {BASE_LOG_PROBABILITY: base, LOG_PROBABILITY: sft}, gold_scorer)
    metrics = {"reward": reward[0], **metrics, "gold_curve": None, "policy": None}
    if sft and (gold_scorer or policy):
        prompts = EvaluationPrompts(
            pairs, SPLIT, tokenizer, prompts=config.prompts, selection_prompts=0, longest=longest, seed=config.seed,
            max_prompt_tokens=config.max_prompt_tokens, max_response_tokens=config.max_response_tokens)
        metrics |= _measure_samples(config, judged, prompts, tokenizer, sft, policy, gold_scorer)
    metrics |= diagnose(metrics)
    held_out.write_scores(out / "per_pair.parquet", scores)
    write_json(out / "metrics.json", metrics)
    write_text(out / PAGE, render_reward_page(metrics, FigureFolder(out / "figures")))
    for words in metrics["verdict"].values():
        print_line(f"evaluate_reward: {words}")
    return _headline_metrics(metrics)


def _measure_pairs(config: Evaluate, judged: RewardUnderTest, held_out: HeldOutPairs, pairs: Path,
                   models: dict[str, Path | None], gold_scorer: Callable | None
                   ) -> tuple[dict[str, np.ndarray | None], dict]:
    """Measure the reward model on held-out pairs; return the scores of the texts [M] by scorer, and the metrics."""
    estimate_mean, estimate = (partial(kind, samples=config.bootstrap_samples, seed=config.seed)
                               for kind in (bootstrap_mean, bootstrap_statistic))
    questions, answers = zip(*held_out.texts, strict=True)
    scores = {"reward": judged.score_texts(questions, answers, "held-out pairs")}
    likelihood = {name: mean_logprobs(held_out, load_causal(folder, cpu_kernels=config.cpu_kernels),
                                      f"evaluate_reward: {name} on pairs") for name, folder in models.items() if folder}
    scores |= {"log_probability": likelihood.get(LOG_PROBABILITY),
               "gold": score_main_gold(gold_scorer, held_out.texts) if gold_scorer else None}
    rows = sample_rows(read_pairs(pairs, BASELINE_SPLIT), BASELINE_PAIRS, config.seed)
    baselines = score_fitted_baselines(held_out, rows) | likelihood
    return scores, {
        "reward_model": evaluate_pairs(held_out, scores["reward"], baselines, scores["gold"], {}, estimate_mean),
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
    count = max(config.best_of, default=1) if gold_scorer else 0
    sampler = AnswerSampler(
        tokenizer, prompts, batch_prompts=config.batch_prompts, max_new_tokens=config.max_response_tokens,
        temperature=config.temperature, temperatures=(), best_of=count, seed=config.seed,
        cpu_kernels=config.cpu_kernels)
    answers, *_ = sampler.sample_policies(({"policy": policy} if policy else {}) | {"sft": sft})
    estimate_mean = partial(bootstrap_mean, samples=config.bootstrap_samples, seed=config.seed)
    questions = {name: repeat_each(prompts.questions, len(sampled.texts)) for name, sampled in answers.items()}
    gold = {name: score_main_gold(gold_scorer, list(zip(questions[name], sampled.texts, strict=True)))
            for name, sampled in answers.items() if gold_scorer}
    rewards = {name: judged.score_sampled(
        questions[name], repeat_each(prompts.prompts, len(sampled.texts)), sampled, tokenizer, f"{name} answers")
        for name, sampled in answers.items()}
    measured = {"policy": compare_policy(answers, rewards, gold, estimate_mean)} if policy else {}
    if gold_scorer:
        sampled_rewards, sampled_gold = (scores[SAMPLES].reshape(-1, count) for scores in (rewards, gold))
        if np.isnan(sampled_gold).any(1).all():
            print_line(f"evaluate_reward: the gold scorer {config.gold} knows none of these questions")
        else:
            measured["gold_curve"] = best_of_n_curve(sampled_rewards, sampled_gold, config.best_of, estimate_mean)
    return measured


def _headline_metrics(metrics: dict) -> dict[str, float]:
    """Return the numbers for the manifest and the log's last line."""
    measured, policy = metrics["reward_model"], metrics["policy"] or {}
    estimates = {"reward_accuracy": measured["accuracy"],
                 "above_best_cheap_baseline": measured["above_best_cheap_baseline"],
                 "noise_ceiling": metrics["noise_ceiling"]["all"], "kl": policy.get("kl_k1")}
    return {name: estimate["mean"] for name, estimate in estimates.items() if estimate} | {"pairs": measured["pairs"]}
