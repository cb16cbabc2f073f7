"""Evaluate on prompts: compare policies trained on your own prompts with their base, on prompts that were held out.

    python -m stages.evaluate_prompts --recipe own_prompts --base results/base --policy ppo=results/own/ppo-merged \\
        --file data/demo/prompts.jsonl --out results/own/evaluate

Give --policy NAME=FOLDER, a merged model, once for each policy; all must have been trained on the same prompts and
reward. The reward, the form of the prompts and which of them are held out come from the manifest of the training.
Writes metrics.json (every number, and the short table), samples.parquet (each prompt with its answers) and
per_question.parquet (the scores of each policy, best-of-n among them). The reward is the weighted sum of the functions
that training optimised, without penalties and KL: it cannot say whether answers are better than these functions know.
`gold` and `scorers` of the recipe's section evaluate are scores that training never saw. Intervals are at 95 %, by a
bootstrap over prompts.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from functools import partial
from pathlib import Path

import numpy as np

from stages.artifacts.artifact import RunContext
from stages.evaluation import at_best, gold_score, policy_answers, summary
from stages.evaluation.answer_sampler import AnswerSampler
from stages.evaluation.cached_results.tensors import CachedResults
from stages.evaluation.heldout_prompts import OwnEvaluationPrompts
from stages.evaluation.output_tables import check_output_space, write_question_scores, write_samples
from stages.evaluation.own_prompts.reward import TrainedReward
from stages.evaluation.own_prompts.trained_policies import PolicyTraining, read_training
from stages.evaluation.own_prompts.wording import BASE
from stages.evaluation.policy_answers import Answers, repeat_each
from stages.evaluation.policy_comparison import PolicyComparison
from stages.evaluation.reward_hacking import detect_reward_hacking
from stages.evaluation.statistics import bootstrap_statistic
from stages.modeling import families, torch_setup
from stages.modeling.tokenizer import load_shared_tokenizer
from stages.recipe.sections.evaluate import Evaluate
from stages.recipe.sections.rewards import RewardSource
from stages.rewards.sources import RewardFunction, load_reward_functions
from stages.runtime.files import write_json
from stages.runtime.stage_lines import print_line


def run(config: Evaluate, out: Path, *, base: Path, policy: dict[str, Path], file: Path,
        context: RunContext | None = None) -> dict[str, float]:
    """Fill `out` with metrics.json and its tables; return the headline metrics.

    base, policy: plain model folders, merged. context: None uses no results of earlier evaluations. ValueError when no
    held-out prompt is short enough, or when a policy was trained on something else.
    """
    summary.check_policy_names(policy)
    training = read_training(policy, base, file)
    torch_setup.prepare()
    tokenizer = load_shared_tokenizer(base, *policy.values())
    scorers = _load_scorers(config, training)
    gold_scorer = gold_score.load_gold_scorer(config.gold) if config.gold else None
    drawn = _draw_prompts(config, file, tokenizer, training, families.max_positions(base, *policy.values()))
    check_output_space(out, drawn, len(policy), config.max_response_tokens, pairs=0)
    reward = TrainedReward(training, tokenizer, precision=config.precision, batch_texts=config.batch_texts,
                           cpu_kernels=config.cpu_kernels)
    cache = CachedResults()
    if context and config.cache:
        cache = CachedResults.of_run(context.folder.parent, config.cpu_kernels)
    sampler = AnswerSampler(
        tokenizer, drawn, batch_prompts=config.batch_prompts, max_new_tokens=config.max_response_tokens,
        temperature=config.temperature, temperatures=config.temperatures, best_of=max(config.best_of, default=0),
        seed=config.seed, cpu_kernels=config.cpu_kernels, precision=config.precision, cache=cache,
        start=BASE, stop_ids=training.stop_ids)
    answers, swept, _ = sampler.sample_policies(policy | {BASE: base})
    selection = at_best.measure_policies(swept, drawn, reward.score, gold_scorer, BASE)
    temperatures = at_best.choose_temperatures(selection, (BASE, *policy), config.temperatures, config.temperature)
    answers |= sampler.sample_at_best({BASE: base} | policy, answers, temperatures)
    rewards, scores = _score(reward, scorers, drawn, answers)
    comparison = PolicyComparison(
        drawn, answers, rewards, gold_score.score_policies(gold_scorer, drawn, answers), scores,
        temperatures=at_best.list_temperatures(answers, temperatures, config.temperature, BASE), start=BASE)
    metrics = {
        "reward_functions": reward.weights, "unseen_scores": [scorer.name for scorer in scorers], "judge": None,
        "prompts": len(drawn.rows), "prompts_over_length": drawn.over_length, "held_out_prompts": drawn.held_out,
        "file_prompts": drawn.file_prompts,
        "temperature_selection": {"prompts": len(drawn.selection_prompts), "curves": selection},
        **comparison.compare(config.best_of, partial(
            bootstrap_statistic, samples=config.bootstrap_samples, seed=config.seed))}
    metrics["hacking"] = {name: detect_reward_hacking(metrics, name) for name in policy}
    metrics["table"] = summary.short_table(metrics)
    _write(config, out, metrics, comparison)
    cache.finish()
    return summary.headline_metrics(metrics)


def _write(config: Evaluate, out: Path, metrics: dict, comparison: PolicyComparison) -> None:
    gold_known = summary.knows_gold(metrics)
    if config.gold and not gold_known:
        print_line(f"evaluate_prompts: the gold scorer {config.gold} knows none of these prompts")
    rows = comparison.prompts.rows
    write_json(out / "metrics.json", metrics)
    write_samples(out / "samples.parquet", rows, comparison.texts(), comparison.score_columns(gold_known))
    write_question_scores(out / "per_question.parquet", rows, comparison.score_questions(config.best_of))


def _load_scorers(config: Evaluate, training: PolicyTraining) -> list[RewardFunction]:
    """Load the scores that training never saw; ValueError for one that it did."""
    trained_on = {entry["source"] for entry in training.rewards}
    if seen := next((name for name in config.scorers if name in trained_on), None):
        raise ValueError(f"evaluate.scorers names {seen!r}, which the policy was trained on and which is measured "
                         f"anyway: leave it out, or name a score that training never saw")
    return [scorer for name in config.scorers for scorer in load_reward_functions(
        **vars(RewardSource(name)), precision=config.precision, pairs=None)]


def _draw_prompts(config: Evaluate, file: Path, tokenizer, training: PolicyTraining, longest: int
                  ) -> OwnEvaluationPrompts:
    """Draw the prompts of the evaluation, and those that temperatures are chosen on, from those that were held out."""
    return OwnEvaluationPrompts(
        file, tokenizer, column=training.prompt_column, template=training.prompt_template,
        held_out=training.evaluation_prompts, training_seed=training.seed, prompts=config.prompts,
        selection_prompts=config.temperature_prompts, max_prompt_tokens=config.max_prompt_tokens,
        max_response_tokens=config.max_response_tokens, longest=longest, seed=config.seed)


def _score(reward: TrainedReward, scorers: list[RewardFunction], drawn: OwnEvaluationPrompts,
           answers: dict[str, Answers]) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Compute the rewards, and the scores of the reward's parts and of the scorers, by policy."""
    texts = {name: (repeat_each(drawn.prompts, len(sampled.responses)), sampled.responses)
             for name, sampled in answers.items()}
    parts, others = reward.score_parts(texts), policy_answers.score_by_functions(scorers, drawn.questions, answers)
    return reward.score(texts), {name: parts[name] | others[name] for name in answers}
