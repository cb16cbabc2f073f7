"""Best-of-n: sample n responses of the SFT model to each prompt, and take the one with the highest reward.

    python -m stages.best_of_n --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --reward results/demo/reward-merged --pairs results/demo/pairs --out results/demo/best_of_n

Writes samples.parquet (each question with its winner and all rewards), and history.jsonl and metrics.json with the mean
reward of best-of-n for n = 1, 2, 4, ... beside its KL to SFT, log n - (n-1)/n. metrics.json also has the highest
objective that a policy can reach at several betas, estimated from the same rewards. Nothing is trained. Responses that
were scored before a kill are not sampled again, and a resumed run equals the uninterrupted one bit for bit.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from stages.artifacts.artifact import RunContext
from stages.evaluation.reward_model_check import check_reward_models
from stages.evaluation.statistics import bootstrap_mean
from stages.generation.best_of_n import measure_optimum
from stages.generation.prompts import Prompts, draw_prompts
from stages.modeling import families
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import prepare_tokenizer
from stages.recipe.recipe import select_settings
from stages.recipe.sections.rejection_sampling import BestOfN
from stages.rejection_sampling.candidates import CandidateSettings, build_sampler, measure_best_of_n, write_samples
from stages.rewards import checked_models
from stages.rewards.shaping import ShapingSettings
from stages.runtime.files import write_json
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import read_best_rows
from stages.training.loggers import open_logger

SPLIT, PARTS, SAMPLES = "rl", "parts", "samples.parquet"
BETAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the optimum


def run(config: BestOfN, out: Path, *, policy: Path, reward: Path, pairs: Path, context: RunContext | None = None
        ) -> dict[str, float | str]:
    """Fill `out` with samples.parquet, history.jsonl and metrics.json; return the metrics of the manifest.

    policy: the model that is sampled, merged. reward: the merged reward model.
    """
    tokenizer = prepare_tokenizer(policy)
    measured = checked_models.load_held_out_accuracies([entry.source for entry in config.rewards], reward)
    shortfalls = check_reward_models(measured, config.require_reward, _say, "best_of_n")
    prompts = _select_prompts(config, pairs, tokenizer)
    longest_tokens = config.max_prompt_tokens + config.max_response_tokens
    sampler = build_sampler(
        CandidateSettings(**select_settings(CandidateSettings, config)),
        ShapingSettings(**select_settings(ShapingSettings, config)), map(asdict, config.rewards), tokenizer,
        policy=policy, reward=reward, pairs=pairs, longest_tokens=longest_tokens,
        min_correlation=config.min_reward_correlation, cpu_kernels=config.cpu_kernels, say=_say)
    sampler.check_space(out, 2 * len(prompts.ids))  # of parts, and of the table
    model = load_causal(policy, config.precision, config.cpu_kernels)
    families.check_length(model.config, longest_tokens)
    parts = sampler.sample(model, prompts.ids, out / PARTS, "best_of_n")
    write_samples(out / SAMPLES, prompts, parts, tokenizer)
    samples = pq.read_table(out / SAMPLES, columns=["rewards", "ended"])
    rewards, ended = np.array(samples["rewards"].to_pylist(), float), samples["ended"].to_pylist()
    curve = measure_best_of_n(rewards, config.bootstrap_samples, config.seed)
    estimate_mean = partial(bootstrap_mean, samples=config.bootstrap_samples, seed=config.seed)
    write_json(out / "metrics.json", {"prompts": len(prompts.ids), "best_of_n": curve, "optimum": [
        measure_optimum(rewards, beta, estimate_mean) for beta in BETAS]})
    with open_logger(config.log_to, out, "best_of_n", context, asdict(config), step_name="n") as logger:
        logger.resume(-1)
        for row in curve:
            ends = {f"reward_{end}": row["reward"][end] for end in ("low", "high") if row["reward"][end] is not None}
            logger.log_metrics(row["n"], {"kl": row["kl"], "reward": row["reward"]["mean"], **ends})
    shutil.rmtree(out / PARTS)
    return {
        "prompts": len(prompts.ids), "prompts_over_length": prompts.over_length,
        "responses": len(prompts.ids) * config.n, "reward_of_one": curve[0]["reward"]["mean"],
        "reward": curve[-1]["reward"]["mean"], "kl": curve[-1]["kl"], "eos_rate": float(np.mean(ended)),
        **({"reward_model_shortfall": "; ".join(shortfalls)} if shortfalls else {})}


def _select_prompts(config: BestOfN, pairs: Path, tokenizer) -> Prompts:
    """Select the prompts of the rl split, all or a seeded choice; ValueError if none is short enough."""
    limit = config.max_prompt_tokens
    prompts = draw_prompts(read_best_rows(pairs, SPLIT), tokenizer, max_prompt_tokens=limit, seed=config.seed)
    if not prompts.ids:
        raise ValueError(f"{pairs} has no prompt of at most {limit} tokens in its {SPLIT} split "
                         f"({prompts.over_length} are longer): raise max_prompt_tokens")
    chosen = prompts.select(range(min(config.prompts or len(prompts.ids), len(prompts.ids))))
    _say(f"{len(chosen.ids)} prompts x {config.n} responses of at most {config.max_response_tokens} tokens")
    return chosen


def _say(text: str) -> None:
    print_line(f"best_of_n: {text}")
