"""Evaluate on held-out data: compare policies with the model they start from, and the reward model with baselines.

    python -m stages.evaluate --recipe configs/demo.yaml --posts results/demo/posts --pairs results/demo/pairs \\
        --base results/demo/base --sft results/demo/sft-merged --policy ppo=results/demo/ppo-merged \\
        --reward results/demo/reward-merged --out results/demo/evaluate
    python -m stages.evaluate --recipe own_prompts --base results/base --policy ppo=results/own/ppo-merged \\
        --file data/demo/prompts.jsonl --out results/own/evaluate

Give --policy NAME=FOLDER, a merged model, once for each policy. Writes metrics.json (every number, and the short
table), samples.parquet (each question with its answers), per_question.parquet (the scores of each policy, best-of-n
among them) and, on a dump, per_pair.parquet. Models run in the recipe's precision, one at a time. Samples,
log-probabilities and rewards of earlier evaluations of the run are used again (cached_results), so that an added policy
costs its own work. Every interval is at 95 %, from a bootstrap over questions.

On a dump, policies start from SFT; without --policy, SFT and its best-of-n alone are measured. A policy ppo-length is
the control of ppo, a PPO that is paid for length alone: then ppo's gain at equal length is measured, too. --judge
FOLDER is another merged reward model that scores all answers and is used to choose nothing. Rewards are the reward
model's own: an answer that did not end pays no penalty here.

With --file, the policies were trained on your own prompts, start from the base, and must all have been trained on the
same prompts and reward. The reward, the form of the prompts and which of them are held out come from the manifest of
the training. The reward is the weighted sum of the functions that training optimised, without penalties and KL: it
cannot say whether answers are better than these functions know. `gold` and `scorers` of the recipe's section evaluate
are scores that training never saw.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from functools import partial
from pathlib import Path

from stages.artifacts.artifact import RunContext
from stages.evaluation import summary
from stages.evaluation.answer_sampler import AnswerSampler, choose_temperatures, measure_temperatures
from stages.evaluation.attainable import measure_attainable, read_objective
from stages.evaluation.cached_results import CachedResults
from stages.evaluation.policy_answers import AnswerScorer, score_policies
from stages.evaluation.policy_comparison import PolicyComparison
from stages.evaluation.reward_hacking import detect_reward_hacking
from stages.evaluation.statistics import bootstrap_mean, bootstrap_statistic
from stages.evaluation.tasks.held_out import DumpTask, OwnPromptsTask, check_unseen, select_judge
from stages.evaluation.tasks.trained_reward import TrainedReward, read_training
from stages.evaluation.tasks.wording import find_wording
from stages.evaluation.verdict import list_length_numbers, list_length_rows
from stages.modeling import families, torch_setup
from stages.modeling.tokenizer import load_shared_tokenizer
from stages.recipe.sections.evaluate import Evaluate
from stages.recipe.sections.rewards import RewardSource
from stages.recipe.user_functions import load_function
from stages.rewards.reward_functions import RewardFunction, load_reward_functions
from stages.runtime.files import write_json
from stages.runtime.stage_lines import print_line


def run(config: Evaluate, out: Path, *, base: Path, policy: dict[str, Path] | None = None, posts: Path | None = None,
        pairs: Path | None = None, sft: Path | None = None, reward: Path | None = None, judge: Path | None = None,
        file: Path | None = None, context: RunContext | None = None) -> dict[str, float]:
    """Fill `out` with metrics.json and its tables; return the headline metrics.

    base, sft, policy, reward, judge: plain model folders, merged. file: the user's own prompts, in place of posts,
    pairs, sft and reward. context: None uses no results of earlier evaluations. ValueError when no held-out question is
    short enough.
    """
    policy = policy or {}
    summary.check_policy_names(policy)
    _check_inputs(policy, file, {"posts": posts, "pairs": pairs, "sft": sft, "reward": reward}, judge)
    cache = CachedResults()
    if context and config.cache:
        cache = CachedResults.of_run(context.folder.parent, config.cpu_kernels)
    task = (_load_own_prompts(config, policy, base, file) if file else
            _load_dump(config, policy, cache, posts=posts, pairs=pairs, base=base, sft=sft, reward=reward, judge=judge))
    gold_scorer = load_function(config.gold, "gold") if config.gold else None
    prompts, start = task.prompts, task.start
    sampler = AnswerSampler(
        task.tokenizer, prompts, batch_prompts=config.batch_prompts, max_new_tokens=config.max_response_tokens,
        temperature=config.temperature, temperatures=config.temperatures, best_of=max(config.best_of, default=0),
        seed=config.seed, cpu_kernels=config.cpu_kernels, precision=config.precision, cache=cache, start=start,
        stop_ids=task.stop_ids)
    answers, swept, pair_logprobs = sampler.sample_policies(task.folders, task.held_out)
    selection = measure_temperatures(swept, prompts, task.score, gold_scorer, start)
    temperatures = choose_temperatures(selection, (start, *policy), config.temperatures, config.temperature)
    answers |= sampler.sample_at_best({start: task.folders[start]} | policy, answers, temperatures)
    scores = task.score_answers(answers, pair_logprobs, gold_scorer)
    comparison = PolicyComparison(
        prompts, answers, scores.rewards, score_policies(gold_scorer, prompts, answers), scores.functions,
        scores.judge, start)
    bootstrap = {"samples": config.bootstrap_samples, "seed": config.seed}
    estimate_mean, estimate = (partial(kind, **bootstrap) for kind in (bootstrap_mean, bootstrap_statistic))
    objectives = {name: read_objective(folder, reward, config.temperature) for name, folder in policy.items()}
    metrics = {
        **task.measure_rewards(scores, estimate_mean),
        "temperature_selection": {"prompts": len(prompts.selection_prompts), "curves": selection},
        **comparison.compare(config.best_of, estimate),
        "attainable": measure_attainable(comparison, objectives, **bootstrap),
        "prompts": len(prompts.rows), "prompts_over_length": prompts.over_length,
        **task.describe_prompts(scores, estimate_mean)}
    metrics["hacking"] = {name: detect_reward_hacking(metrics, name) for name in policy}
    metrics["table"] = summary.short_table(metrics) + list_length_rows(metrics)
    _write(config, out, metrics, comparison)
    if task.held_out:
        task.held_out.write_scores(out / "per_pair.parquet", scores.pairs)
    cache.finish()
    return summary.headline_metrics(metrics) | list_length_numbers(metrics)


def _check_inputs(policy: dict[str, Path], file: Path | None, of_dump: dict[str, Path | None], judge: Path | None
                  ) -> None:
    """Raise ValueError, in one line, for inputs that are missing, and for those of a dump beside prompts."""
    given = [f"--{name}" for name, folder in {**of_dump, "judge": judge}.items() if folder]
    missing = [f"--{name}" for name, folder in of_dump.items() if not folder]
    if file and given:
        raise ValueError(f"--file {file} has prompts of your own: leave out {', '.join(given)}")
    if file and not policy:
        raise ValueError("--file has the prompts that a policy was trained on: give --policy NAME=FOLDER")
    if not file and missing:
        raise ValueError(f"give {', '.join(missing)}, too; of policies that were trained on prompts of your own, give "
                         f"--base, --policy and --file alone")


def _load_dump(config: Evaluate, policy: dict[str, Path], cache: CachedResults, *, posts: Path, pairs: Path, base: Path,
               sft: Path, reward: Path, judge: Path | None) -> DumpTask:
    torch_setup.prepare()
    judge = select_judge(judge, reward)
    scorers = _load_scorers(config, pairs)
    models = (sft, *policy.values(), reward, *([judge] if judge else []))
    tokenizer = load_shared_tokenizer(*models)
    answer_scorer = AnswerScorer(
        precision=config.precision, batch_texts=config.batch_texts, cpu_kernels=config.cpu_kernels,
        apart=list(policy)[1:], cache=cache)
    return DumpTask(
        posts, pairs, tokenizer, base=base, sft=sft, policies=policy, reward=reward, judge=judge, scorers=scorers,
        answer_scorer=answer_scorer, max_pairs=config.max_pairs, longest=families.max_positions(*models),
        **_prompt_sizes(config))


def _load_own_prompts(config: Evaluate, policy: dict[str, Path], base: Path, file: Path) -> OwnPromptsTask:
    training = read_training(policy, base, file)
    torch_setup.prepare()
    tokenizer = load_shared_tokenizer(base, *policy.values())
    check_unseen(config.scorers, training)
    reward = TrainedReward(training, tokenizer, precision=config.precision, batch_texts=config.batch_texts,
                           cpu_kernels=config.cpu_kernels)
    return OwnPromptsTask(
        file, tokenizer, base=base, policies=policy, training=training, reward=reward,
        scorers=_load_scorers(config, None), longest=families.max_positions(base, *policy.values()),
        **_prompt_sizes(config))


def _load_scorers(config: Evaluate, pairs: Path | None) -> list[RewardFunction]:
    return [scorer for name in config.scorers for scorer in load_reward_functions(
        **vars(RewardSource(name)), precision=config.precision, pairs=pairs)]


def _prompt_sizes(config: Evaluate) -> dict[str, int]:
    return {"prompts": config.prompts, "selection_prompts": config.temperature_prompts,
            "max_prompt_tokens": config.max_prompt_tokens, "max_response_tokens": config.max_response_tokens,
            "seed": config.seed}


def _write(config: Evaluate, out: Path, metrics: dict, comparison: PolicyComparison) -> None:
    gold_known = summary.knows_gold(metrics)
    if config.gold and not gold_known:
        questions = find_wording(metrics["policies"]).questions
        print_line(f"evaluate: the gold scorer {config.gold} knows none of these {questions}")
    write_json(out / "metrics.json", metrics)
    comparison.write_samples(out / "samples.parquet", gold_known)
    comparison.write_question_scores(out / "per_question.parquet", config.best_of)
