"""Evaluate: compare the reward model with cheap baselines, and policies with SFT, on held-out questions.

    python -m stages.evaluate --recipe configs/demo.yaml --posts results/demo/posts --pairs results/demo/pairs \\
        --base results/demo/base --sft results/demo/sft-merged --policy ppo=results/demo/ppo-merged \\
        --reward results/demo/reward-merged --out results/demo/evaluate

Give --policy NAME=FOLDER once for each policy, and none for SFT and its best-of-n alone. A policy ppo-length is the
control of ppo, a PPO that is paid for length alone: then ppo's gain at equal length is measured, too. --judge FOLDER is
another merged reward model that scores all answers and is used to choose nothing. Writes metrics.json (every number,
and the short table), samples.parquet (each question with its answers), per_question.parquet (the scores of each policy,
best-of-n among them) and per_pair.parquet. Rewards are the reward model's own: an answer that did not end pays no
penalty here. Models run in the recipe's precision, one at a time. Samples, log-probabilities and rewards of earlier
evaluations of the run are used again (cached_results), so that an added policy costs its own work. Every interval is at
95 %, from a bootstrap over questions.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from stages.artifacts.artifact import RunContext
from stages.evaluation import at_best, gold_score, policy_answers, summary
from stages.evaluation.answer_sampler import AnswerSampler
from stages.evaluation.cached_results.tensors import CachedResults
from stages.evaluation.heldout_prompts import EvaluationPrompts
from stages.evaluation.length_control.words import list_length_numbers, list_length_rows
from stages.evaluation.output_tables import check_output_space, write_pairs, write_question_scores, write_samples
from stages.evaluation.pair_accuracy import (
    HeldOutPairs,
    draw_held_out_pairs,
    evaluate_pairs,
    score_fitted_baselines,
)
from stages.evaluation.policy_answers import Answers, repeat_each
from stages.evaluation.policy_comparison import PolicyComparison
from stages.evaluation.reward_hacking import detect_reward_hacking
from stages.evaluation.statistics import bootstrap_mean, bootstrap_statistic
from stages.generation.text_metrics import has_code
from stages.modeling import families, torch_setup
from stages.modeling.tokenizer import load_shared_tokenizer, same_tokenizer
from stages.recipe.sections.evaluate import Evaluate
from stages.recipe.sections.rewards import RewardSource
from stages.reward_modeling.no_model import read_no_model
from stages.rewards.sources import RewardFunction, load_reward_functions
from stages.runtime.files import write_json
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import question_key, read_pairs, sample_rows
from stages.stackexchange.questions.table import read_tags

SPLIT, BASELINE_SPLIT = "evaluation", "reward"


def run(config: Evaluate, out: Path, *, posts: Path, pairs: Path, base: Path, sft: Path,
        policy: dict[str, Path] | None = None, reward: Path, judge: Path | None = None,
        context: RunContext | None = None) -> dict[str, float]:
    """Fill `out` with metrics.json and its tables; return the headline metrics.

    base, sft, policy, reward, judge: plain model folders, merged. context: None uses no results of earlier evaluations.
    ValueError when no held-out question is short enough.
    """
    torch_setup.prepare()
    policy = policy or {}
    summary.check_policy_names(policy)
    judge = _select_judge(judge, reward)
    gold_scorer, scorers = _load_scorers(config, pairs)
    models = (sft, *policy.values(), reward, *([judge] if judge else []))
    tokenizer, longest = load_shared_tokenizer(*models), families.max_positions(*models)
    held_out, prompts = _draw_questions(config, pairs, tokenizer, longest)
    check_output_space(out, prompts, len(policy), config.max_response_tokens, len(held_out.rows))
    cache = CachedResults()
    if context and config.cache:
        cache = CachedResults.of_run(context.folder.parent, config.cpu_kernels)
    sampler = _make_sampler(config, tokenizer, prompts, cache)
    answer_scorer = policy_answers.AnswerScorer(
        precision=config.precision, batch_texts=config.batch_texts, cpu_kernels=config.cpu_kernels,
        apart=list(policy)[1:], cache=cache)
    folders = policy | _base_if_comparable(base, tokenizer) | {"sft": sft}
    answers, swept, logprobs = sampler.sample_policies(folders, held_out)
    selection = at_best.measure_policies(swept, prompts, partial(answer_scorer.score, reward), gold_scorer, "sft")
    temperatures = at_best.choose_temperatures(selection, ("sft", *policy), config.temperatures, config.temperature)
    answers |= sampler.sample_at_best({"sft": sft} | policy, answers, temperatures)
    pair_rewards, rewards = _score(partial(answer_scorer.score, reward), held_out, prompts, answers)
    pair_judge, judged = (_score(partial(answer_scorer.score, judge), held_out, prompts, answers) if judge
                          else (None, {}))
    used = at_best.list_temperatures(answers, temperatures, config.temperature, "sft")
    comparison = PolicyComparison(prompts, answers, rewards, gold_score.score_policies(gold_scorer, prompts, answers),
                                  policy_answers.score_by_functions(scorers, prompts.questions, answers), judged, used)
    pair_scores = {"reward": pair_rewards, "judge": pair_judge, "log_probability": logprobs,
                   "gold": gold_score.score_main_gold(gold_scorer, held_out.texts) if gold_scorer else None}
    estimate_mean, estimate = (partial(kind, samples=config.bootstrap_samples, seed=config.seed)
                               for kind in (bootstrap_mean, bootstrap_statistic))
    metrics = {
        "reward_model": evaluate_pairs(
            held_out, pair_rewards, _fit_baselines(config, pairs, held_out), logprobs, pair_scores["gold"],
            read_tags(posts, {question_key(row) for row in held_out.rows}), estimate_mean),
        "judge": {"accuracy": estimate_mean(held_out.score_wins(pair_judge), held_out.groups)} if judge else None,
        "temperature_selection": {"prompts": len(prompts.selection_prompts), "curves": selection},
        **comparison.compare(config.best_of, estimate), **_prompt_metrics(prompts, rewards, estimate_mean)}
    metrics["hacking"] = {name: detect_reward_hacking(metrics, name) for name in policy}
    metrics["table"] = summary.short_table(metrics) + list_length_rows(metrics)
    _write(config, out, metrics, prompts, comparison, held_out, pair_scores)
    cache.finish()
    return summary.headline_metrics(metrics) | list_length_numbers(metrics)


def _write(config: Evaluate, out: Path, metrics: dict, prompts: EvaluationPrompts, comparison: PolicyComparison,
           held_out: HeldOutPairs, pair_scores: dict[str, np.ndarray | None]) -> None:
    """Write metrics.json and the tables; pair_scores: of the held-out texts [M]."""
    gold_known = summary.knows_gold(metrics)
    if config.gold and not gold_known:
        print_line(f"evaluate: the gold scorer {config.gold} knows none of these questions")
    write_json(out / "metrics.json", metrics)
    write_samples(out / "samples.parquet", prompts.rows, comparison.texts(), comparison.score_columns(gold_known))
    write_question_scores(out / "per_question.parquet", prompts.rows, comparison.score_questions(config.best_of))
    write_pairs(out / "per_pair.parquet", held_out.rows, held_out.better, held_out.worse, pair_scores)


def _select_judge(judge: Path | None, reward: Path) -> Path | None:
    """Return the judge, or None if there is no model in its folder; ValueError if it is the reward model."""
    if judge is None:
        return None
    if reason := read_no_model(judge):
        print_line(f"evaluate: there is no judge: {reason}")
        return None
    if judge.resolve() == reward.resolve():
        raise ValueError(f"--judge {judge} is the reward model itself: a judge must be another one")
    return judge


def _prompt_metrics(prompts: EvaluationPrompts, rewards: dict[str, np.ndarray], estimate_mean: Callable) -> dict:
    return {"prompts": len(prompts.rows), "prompts_over_length": prompts.over_length, "best_human_answer": {
        "reward": estimate_mean(rewards["human"], np.arange(len(prompts.rows))),
        "code_share": sum(map(has_code, prompts.best_answers)) / len(prompts.best_answers)}}


def _draw_questions(config: Evaluate, pairs: Path, tokenizer, longest: int) -> tuple[HeldOutPairs, EvaluationPrompts]:
    """Draw the held-out pairs for the reward models, and the held-out prompts for the policies."""
    held_out = draw_held_out_pairs(read_pairs(pairs, SPLIT), tokenizer, max_pairs=config.max_pairs, max_tokens=longest,
                                   seed=config.seed)
    return held_out, EvaluationPrompts(
        pairs, SPLIT, tokenizer, prompts=config.prompts, selection_prompts=config.temperature_prompts,
        max_prompt_tokens=config.max_prompt_tokens, max_response_tokens=config.max_response_tokens, longest=longest,
        seed=config.seed)


def _make_sampler(config: Evaluate, tokenizer, prompts: EvaluationPrompts, cache: CachedResults
                  ) -> AnswerSampler:
    return AnswerSampler(
        tokenizer, prompts, batch_prompts=config.batch_prompts, max_new_tokens=config.max_response_tokens,
        temperature=config.temperature, temperatures=config.temperatures, best_of=max(config.best_of, default=0),
        seed=config.seed, cpu_kernels=config.cpu_kernels, precision=config.precision, cache=cache)


def _load_scorers(config: Evaluate, pairs: Path) -> tuple[Callable | None, list[RewardFunction]]:
    """Load the gold scorer, if there is one, and the further scorers."""
    scorers = [scorer for name in config.scorers
               for scorer in load_reward_functions(**vars(RewardSource(name)), precision=config.precision,
                                                   pairs=pairs)]
    return gold_score.load_gold_scorer(config.gold) if config.gold else None, scorers


def _base_if_comparable(base: Path, tokenizer) -> dict[str, Path]:
    if same_tokenizer(base, tokenizer):
        return {"base": base}
    print_line(f"evaluate: {base} has another tokenizer than SFT and is left out")
    return {}


def _score(score: Callable, held_out: HeldOutPairs, prompts: EvaluationPrompts, answers: dict[str, Answers]
           ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Score the held-out texts [M], and the answers of each policy and of 'human'."""
    responses = {name: sampled.responses for name, sampled in answers.items()} | {"human": prompts.best_answer_ids}
    scores = score({"": (held_out.prompts, held_out.answers)} | {
        name: (repeat_each(prompts.prompts, len(rows)), rows) for name, rows in responses.items()})
    return scores.pop(""), scores


def _fit_baselines(config: Evaluate, pairs: Path, held_out: HeldOutPairs) -> dict[str, np.ndarray]:
    """Score every held-out text [M] with each logistic regression, fitted on pairs of the reward model's split."""
    rows = sample_rows(read_pairs(pairs, BASELINE_SPLIT), config.surface_pairs, config.seed)
    return score_fitted_baselines(held_out, rows)
