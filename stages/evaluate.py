"""Evaluate: the reward model beside cheap baselines, and PPO beside SFT, on held-out questions only.

    python -m stages.evaluate --recipe configs/demo.yaml --sft results/demo/sft-merged --ppo results/demo/ppo-merged \\
        --reward results/demo/reward-merged --pairs results/demo/pairs --out results/demo/evaluate

Writes metrics.json (every number, and the short table), samples.parquet (each question with its answers) and
per_pair.parquet. Rewards are the reward model's own: an answer that did not end pays no penalty here. All models run in
fp32, one at a time; every interval is at 95 %, from a bootstrap by question.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from stages.learning import comparison, models
from stages.learning.judging import HeldOutPairs, held_out_pairs, judged
from stages.learning.loading import merged_reward
from stages.learning.statistics import estimate
from stages.learning.text_measures import has_code
from stages.plumbing.artifact import write_json
from stages.plumbing.progress import track
from stages.recipe import Evaluate
from stages.text import findings, gold
from stages.text.tables import questions_of, rows_of
from stages.text.template import answer_ids, prompt_ids

SPLIT = "evaluation"
SCORED_AT_ONCE = 512


def run(config: Evaluate, out: Path, *, sft: Path, ppo: Path, reward: Path, pairs: Path) -> dict[str, float]:
    """Fill `out` with metrics.json, samples.parquet and per_pair.parquet; returns the headline numbers.

    sft, ppo, reward: merged, plain model folders. Raises ValueError when no held-out question can be asked.
    """
    if config.temperature <= 0:
        raise ValueError("evaluate.temperature must be above 0: a KL is measured on samples")
    truth = gold.load(config.gold) if config.gold else None
    tokenizer, longest = comparison.shared_tokenizer(sft, ppo, reward), comparison.longest_text(sft, ppo, reward)
    held = held_out_pairs(rows_of(pairs, SPLIT), tokenizer, max_pairs=config.max_pairs, max_tokens=longest,
                          seed=config.seed)
    asked = _Asked(config, tokenizer, pairs, longest)
    answers, log_p, log_ref, likelihood = _policies(config, tokenizer, sft, ppo, asked.prompts, held)
    rewards = _rewards(reward, [held.prompts, asked.prompts, asked.prompts, asked.prompts],
                       [held.answers, answers["sft"].responses, answers["ppo"].responses, asked.human_answers])
    by_policy = dict(zip(("sft", "ppo", "human"), rewards[1:], strict=True))
    means = partial(estimate, samples=config.bootstrap_samples, seed=config.seed)
    pair_gold, answer_gold = _gold(truth, held, asked, answers)
    metrics = {
        "reward_model": judged(held, rewards[0], likelihood, pair_gold, means),
        "prompts": len(asked.rows), "prompts_over_length": asked.over_length,
        "policies": {name: comparison.policy_numbers(answers[name], by_policy[name], means) for name in ("sft", "ppo")},
        "best_human_answer": {"reward": means(by_policy["human"], np.arange(len(asked.rows))),
                              "code_share": sum(map(has_code, asked.human)) / len(asked.human)},
        "ppo_against_sft": comparison.gain(by_policy["ppo"], by_policy["sft"], log_p, log_ref, means),
        "gold": comparison.gold_gain(**answer_gold, estimate=means) if answer_gold else None}
    if truth and not metrics["gold"]:
        print(f"evaluate: the gold scorer {config.gold} knows none of these questions", flush=True)
    metrics["table"] = findings.table(metrics)
    write_json(out / "metrics.json", metrics)
    _write_samples(out / "samples.parquet", asked, answers, by_policy, answer_gold if metrics["gold"] else None)
    _write_pairs(out / "per_pair.parquet", held,
                 {"reward": rewards[0], "log_probability": likelihood, "gold": pair_gold})
    return _headline(metrics)


class _Asked:
    """The held-out questions that are asked, each with its best human answer."""

    def __init__(self, config: Evaluate, tokenizer, pairs: Path, longest: int):
        rows = questions_of(pairs, SPLIT)
        limit = min(config.max_prompt_tokens, longest - config.max_response_tokens)
        fitting = [(row, ids) for row in rows if len(ids := prompt_ids(tokenizer, row["question"])) <= limit]
        if not fitting:
            raise ValueError(f"{pairs} has no held-out question of at most {limit} tokens ({len(rows)} are longer)")
        order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(config.seed)).tolist()
        chosen = [fitting[i] for i in sorted(order[:config.prompts])]
        self.rows, self.prompts = [row for row, _ in chosen], [ids for _, ids in chosen]
        self.over_length = len(rows) - len(fitting)
        self.questions, self.human = [row["question"] for row in self.rows], [row["response_j"] for row in self.rows]
        human = [answer_ids(tokenizer, text) for text in self.human]
        self.human_answers = [ids if len(prompt) + len(ids) <= longest else None
                              for prompt, ids in zip(self.prompts, human, strict=True)]


def _policies(config: Evaluate, tokenizer, sft: Path, ppo: Path, prompts: list[list[int]], held: HeldOutPairs):
    """Both policies' answers; log-probabilities of PPO's under both; SFT's mean one of every held-out text."""
    ask = partial(comparison.answers_of, tokenizer=tokenizer, prompts=prompts, batch_prompts=config.batch_prompts,
                  max_new_tokens=config.max_response_tokens, temperature=config.temperature, seed=config.seed)
    answers = {}
    model = models.load_causal(ppo)
    answers["ppo"] = ask(model, label="evaluate: PPO answers")
    responses = answers["ppo"].responses
    log_p = comparison.log_probabilities(model, prompts, responses, config.temperature, "evaluate: KL, PPO")
    model = None  # one at a time in memory
    model = models.load_causal(sft)
    answers["sft"] = ask(model, label="evaluate: SFT answers")
    log_ref = comparison.log_probabilities(model, prompts, responses, config.temperature, "evaluate: KL, SFT")
    likelihood = comparison.log_probabilities(model, held.prompts, held.answers, 1.0, "evaluate: SFT on pairs")
    return answers, log_p, log_ref, np.array([float(row.mean()) for row in likelihood])


def _rewards(reward: Path, prompts: list[list], answers: list[list]) -> list[np.ndarray]:
    """Rewards of prompts with answers, by list; NaN for an answer of None. Each distinct text is scored once."""
    scorer = merged_reward(reward, "fp32")
    texts = [[None if end is None else (tuple(start), tuple(end)) for start, end in zip(*both, strict=True)]
             for both in zip(prompts, answers, strict=True)]
    distinct = sorted({text for part in texts for text in part if text is not None},
                      key=lambda text: (sum(map(len, text)), text))
    known: dict = {None: float("nan")}
    starts = range(0, len(distinct), SCORED_AT_ONCE)
    for start in track(starts, "evaluate: rewards", len(starts), f"x {SCORED_AT_ONCE} texts"):
        chunk = distinct[start:start + SCORED_AT_ONCE]
        known |= zip(chunk, scorer(*zip(*chunk, strict=True)).tolist(), strict=True)
    return [np.array([known[text] for text in part]) for part in texts]


def _gold(truth: Callable | None, held: HeldOutPairs, asked: _Asked, answers: dict):
    """Gold scores of the held-out texts, and every gold number of the policies' and the best human answers."""
    if truth is None:
        return None, None
    pair_gold = gold.scores(truth, [q for q, _ in held.texts], [a for _, a in held.texts])[gold.MAIN_KEY]
    texts = {"sft": answers["sft"].texts, "ppo": answers["ppo"].texts, "human": asked.human}
    numbers = {name: gold.scores(truth, asked.questions, responses) for name, responses in texts.items()}
    return np.array(pair_gold), numbers


def _write_samples(path: Path, asked: _Asked, answers: dict, rewards: dict, golds: dict | None) -> None:
    texts = {"sft": answers["sft"].texts, "ppo": answers["ppo"].texts, "human": asked.human}
    columns = {"site": [row["site"] for row in asked.rows], "qid": [row["qid"] for row in asked.rows],
               "question": asked.questions, "url": [row["metadata"][0] for row in asked.rows],
               "authors": [row["authors"][:2] for row in asked.rows], **texts}  # of question, of best answer
    columns |= {f"reward_{name}": _nullable(rewards[name]) for name in texts}
    for name, numbers in (golds or {}).items():
        columns |= {f"{key}_{name}": _nullable(values) for key, values in numbers.items()}
    pq.write_table(pa.table(columns), path, compression="zstd")


def _write_pairs(path: Path, held: HeldOutPairs, scores: dict[str, np.ndarray | None]) -> None:
    columns = {name: [row[name] for row in held.rows] for name in ("site", "qid", "score_j", "score_k")}
    for name, values in scores.items():
        if values is not None:
            columns |= {f"{name}_j": _nullable(values[held.better]), f"{name}_k": _nullable(values[held.worse])}
    pq.write_table(pa.table(columns), path, compression="zstd")


def _nullable(values) -> pa.Array:
    return pa.array(np.asarray(values, float), pa.float64(), from_pandas=True)  # NaN, "does not apply", becomes null


def _headline(metrics: dict) -> dict[str, float]:
    """The numbers that go into the manifest and the log's last line."""
    found = {"reward_accuracy": metrics["reward_model"]["accuracy"],
             "above_best_cheap_baseline": metrics["reward_model"]["above_best_cheap_baseline"],
             "reward_difference": metrics["ppo_against_sft"]["reward_difference"],
             "win_rate": metrics["ppo_against_sft"]["win_rate"], "kl": metrics["ppo_against_sft"]["kl_k1"]}
    found |= {f"{name}_difference": numbers["difference"] for name, numbers in (metrics["gold"] or {}).items()
              if name in ("gold", "correct")}
    flat = {name: value["mean"] for name, value in found.items() if value}
    flat |= {f"{name}_{end}": value[end] for name, value in found.items() if value for end in ("low", "high")
             if value[end] is not None}
    return flat | {"eos_rate": metrics["policies"]["ppo"]["eos_rate"], "prompts": metrics["prompts"],
                   "pairs": metrics["reward_model"]["pairs"]}


if __name__ == "__main__":
    from stages.plumbing.command import main

    main(run)
