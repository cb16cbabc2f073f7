"""Evaluate: the reward model beside cheap baselines; base, SFT, best-of-n and PPO; on held-out questions only.

    python -m stages.evaluate --recipe configs/demo.yaml --posts results/demo/posts --pairs results/demo/pairs \\
        --base results/demo/base --sft results/demo/sft-merged --ppo results/demo/ppo-merged \\
        --reward results/demo/reward-merged --out results/demo/evaluate

Writes metrics.json (every number, and the short table), samples.parquet (each question with its answers) and
per_pair.parquet. Rewards are the reward model's own: an answer that did not end pays no penalty here. All models run in
fp32, one at a time; every interval is at 95 %, from a bootstrap by question.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from stages.evaluation import gold_score, policy_answers, summary
from stages.evaluation.heldout_prompts import EvaluationPrompts
from stages.evaluation.output_tables import write_pairs, write_samples
from stages.evaluation.pair_accuracy import (
    BAG_OF_WORDS,
    SURFACE,
    HeldOutPairs,
    draw_held_out_pairs,
    evaluate_pairs,
)
from stages.evaluation.policy_answers import Answers
from stages.evaluation.policy_comparison import SAMPLES, PolicyComparison, repeat_each
from stages.evaluation.reward_hacking import detect_reward_hacking
from stages.evaluation.statistics import bootstrap_mean, bootstrap_statistic
from stages.evaluation.surface_baseline import fit_surface_baseline
from stages.generation.text_metrics import has_code
from stages.modeling import families, torch_setup
from stages.modeling.load import load_causal
from stages.modeling.packed import token_logprobs
from stages.modeling.tokenizer import same_tokenizer, shared_tokenizer
from stages.recipe.evaluate import Evaluate
from stages.recipe.ppo import RewardSource
from stages.reward_modeling.lexical_scorer import fit_lexical_scorer
from stages.rl.rewards.sources import RewardFunction, load_reward_function
from stages.runtime.files import write_json
from stages.stackexchange.pairs.table import drawn_rows, key_of, rows_of
from stages.stackexchange.questions.table import tags_of

SPLIT, TRAINED_ON = "evaluation", "reward"


def run(config: Evaluate, out: Path, *, posts: Path, pairs: Path, base: Path, sft: Path, ppo: Path, reward: Path
        ) -> dict[str, float]:
    """Fill `out` with metrics.json, samples.parquet and per_pair.parquet; returns the headline numbers.

    base, sft, ppo, reward: plain model folders, merged. Raises ValueError when no held-out question can be asked.
    """
    torch_setup.prepare()
    if config.temperature <= 0:
        raise ValueError("evaluate.temperature must be above 0: a KL is measured on samples")
    truth = gold_score.load_gold_scorer(config.gold) if config.gold else None
    scorers = [_scorer(name) for name in config.scorers]
    tokenizer, longest = shared_tokenizer(sft, ppo, reward), families.max_positions(sft, ppo, reward)
    held = draw_held_out_pairs(rows_of(pairs, SPLIT), tokenizer, max_pairs=config.max_pairs, max_tokens=longest,
                          seed=config.seed)
    asked = EvaluationPrompts(pairs, SPLIT, tokenizer, prompts=config.prompts, max_prompt_tokens=config.max_prompt_tokens,
                  max_response_tokens=config.max_response_tokens, longest=longest, seed=config.seed)
    answers, likelihood = _answers(config, tokenizer, {"ppo": ppo, "base": base, "sft": sft}, asked.prompts, held)
    held_rewards, rewards = _rewards(reward, held, asked, answers)
    panel = PolicyComparison(asked, answers, rewards, _gold(truth, asked, answers), _scores(scorers, asked, answers))
    pair_gold = _pair_gold(truth, held)
    means, estimated = (partial(kind, samples=config.bootstrap_samples, seed=config.seed)
                        for kind in (bootstrap_mean, bootstrap_statistic))
    metrics = {
        "reward_model": evaluate_pairs(held, held_rewards, _fit_baselines(config, pairs, held), likelihood, pair_gold,
                               tags_of(posts, {key_of(row) for row in held.rows}), means),
        "prompts": len(asked.rows), "prompts_over_length": asked.over_length,
        **panel.compared(config.best_of, estimated),
        "best_human_answer": {"reward": means(rewards["human"], np.arange(len(asked.rows))),
                              "code_share": sum(map(has_code, asked.human)) / len(asked.human)},
        "gold": panel.gold_gain(means)}
    if truth and not metrics["gold"]:
        print(f"evaluate: the gold scorer {config.gold} knows none of these questions", flush=True)
    metrics["hacking"] = detect_reward_hacking(metrics)
    metrics["table"] = summary.short_table(metrics)
    write_json(out / "metrics.json", metrics)
    write_samples(out / "samples.parquet", asked.rows, panel.texts(), _numbers(panel, metrics["gold"] is not None))
    write_pairs(out / "per_pair.parquet", held.rows, held.better, held.worse,
                {"reward": held_rewards, "log_probability": likelihood, "gold": pair_gold})
    return summary.headline_metrics(metrics)


def _scorer(name: str) -> RewardFunction:
    template = RewardSource().template
    return load_reward_function(source=name, weight=1.0, reads="text", template=template, reward_model=None, precision="fp32")


def _answers(config: Evaluate, tokenizer, folders: dict[str, Path], prompts: list[list[int]], held: HeldOutPairs
             ) -> tuple[dict[str, Answers], np.ndarray]:
    """Every policy's answers, with their log-probabilities; SFT's mean log-probability of every held-out text.

    folders: SFT's last: it scores what the others wrote.
    """
    ask = partial(policy_answers.sample_answers, tokenizer=tokenizer, batch_prompts=config.batch_prompts,
                  max_new_tokens=config.max_response_tokens, temperature=config.temperature)
    answers = {}
    for name, folder in folders.items():
        if name == "base" and not same_tokenizer(folder, tokenizer):
            print(f"evaluate: {folder} has another tokenizer than SFT: it is not among the policies", flush=True)
            continue
        model = None  # one at a time in memory
        model = load_causal(folder)
        found = ask(model, prompts=prompts, seed=config.seed, label=f"evaluate: {name} answers")
        answers[name] = replace(found, log_p=_log_p(model, prompts, found, config.temperature, name))
    if config.best_of:  # other random numbers than those of SFT's own answers, which it is held against
        most = max(config.best_of)
        answers[SAMPLES] = ask(model, prompts=repeat_each(prompts, most * len(prompts)), seed=config.seed + 1,
                               label=f"evaluate: {most} of SFT")
    for name, found in answers.items():
        under_sft = found.log_p if name == "sft" else _log_p(model, prompts, found, config.temperature, "sft")
        answers[name] = replace(found, log_ref=under_sft)
    likelihood = token_logprobs.response_logprobs(model, held.prompts, held.answers, 1.0, "evaluate: SFT on pairs")
    return answers, np.array([float(row.mean()) for row in likelihood])


def _log_p(model, prompts: list[list[int]], found: Answers, temperature: float, name: str) -> list:
    prompts = repeat_each(prompts, len(found.responses))
    return token_logprobs.response_logprobs(model, prompts, found.responses, temperature, f"evaluate: KL, {name}")


def _rewards(reward: Path, held: HeldOutPairs, asked: EvaluationPrompts, answers: dict[str, Answers]
             ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rewards of the held-out texts; those of the policies' and the best human answers, by writer."""
    responses = {name: found.responses for name, found in answers.items()} | {"human": asked.human_answers}
    prompts = [repeat_each(asked.prompts, len(rows)) for rows in responses.values()]
    first, *others = policy_answers.score_answers(reward, [held.prompts, *prompts], [held.answers, *responses.values()])
    return first, dict(zip(responses, others, strict=True))


def _fit_baselines(config: Evaluate, pairs: Path, held: HeldOutPairs) -> dict[str, np.ndarray]:
    """Score every held-out text with each logistic regression, fitted on pairs of the reward model's split."""
    rows = drawn_rows(rows_of(pairs, TRAINED_ON), config.surface_pairs, config.seed)
    baselines = {SURFACE: fit_surface_baseline(rows), BAG_OF_WORDS: fit_lexical_scorer(rows)}
    return {name: baseline(answer for _, answer in held.texts) for name, baseline in baselines.items()}


def _pair_gold(truth: Callable | None, held: HeldOutPairs) -> np.ndarray | None:
    if truth is None:
        return None
    return np.array(gold_score.score_gold(truth, [q for q, _ in held.texts], [a for _, a in held.texts])[gold_score.MAIN_KEY])


def _gold(truth: Callable | None, asked: EvaluationPrompts, answers: dict[str, Answers]) -> dict[str, dict[str, list[float]]]:
    """Every gold number of the policies' and the best human answers, by writer; none without a gold scorer."""
    texts = {name: found.texts for name, found in answers.items()} | {"human": asked.human}
    return {name: gold_score.score_gold(truth, repeat_each(asked.questions, len(responses)), responses)
            for name, responses in texts.items()} if truth else {}


def _scores(scorers: list[RewardFunction], asked: EvaluationPrompts, answers: dict[str, Answers]) -> dict[str, dict[str, np.ndarray]]:
    """Any other scorers' numbers of the policies' answers."""
    return {name: {scorer.name: _scored(scorer, repeat_each(asked.questions, len(found.texts)), found)
                   for scorer in scorers} for name, found in answers.items()}


def _scored(scorer: RewardFunction, questions: list[str], found: Answers) -> np.ndarray:
    responses = found.texts if scorer.reads == "text" else found.responses
    return scorer(questions, responses).double().numpy()


def _numbers(panel: PolicyComparison, with_gold: bool) -> dict[str, np.ndarray]:
    """Columns of samples.parquet: rewards, gold numbers and other scores, as NAME_WRITER."""
    found = {f"reward_{name}": panel.rewards[name] for name in panel.texts()}
    for name in panel.texts():
        for key, values in (panel.gold[name] if with_gold else {}).items():
            found[f"{key}_{name}"] = np.array(values, float)
        found |= {f"{key}_{name}": values for key, values in panel.scores.get(name, {}).items()}
    return found


if __name__ == "__main__":
    from stages.runtime.command import main

    main(run)
