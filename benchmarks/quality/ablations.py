"""Change one setting of PPO at a time on several finished runs, and tabulate what each change costs over the seeds.

    snakemake --cores all ppo
    snakemake --cores all ppo --config seed=1 name=demo-seed-1
    python -m benchmarks.quality.ablations results/demo results/demo-seed-1 --out results/ablations

Each policy is trained from the models of its run, and answers the same held-out questions at temperature 1 and
greedily. The change of gold is paired by question with the run's own policy. Finished stages and answers are
not repeated.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import yaml

from benchmarks.quality.hacking import stage
from data.demo import gold
from stages.evaluation.heldout_prompts import EvaluationPrompts
from stages.evaluation.policy_answers import sample_answers
from stages.evaluation.statistics import bootstrap_mean
from stages.modeling import torch_setup
from stages.modeling.load import load_causal
from stages.modeling.pretrained import load_adapter
from stages.modeling.tokenizer import load_tokenizer
from stages.render.markdown_tables import format_table
from stages.runtime.series import read_history

CHANGES = {
    "as the demo": {},
    "epochs: 1": {"epochs": 1},
    "minibatch_prompts: 32": {"minibatch_prompts": 32},
    "value_model: head": {"value_model": "head", "critic_learning_rate": None, "value_coefficient": 0.1},
    "learning_rate_decay: false": {"learning_rate_decay": False},
    "one lambda: 0.95": {"gae_lambda": 0.95, "critic_gae_lambda": None},
    "responses_per_prompt: 1": {"responses_per_prompt": 1, "rollout_prompts": 256, "forward_prompts": 64,
                                "minibatch_prompts": 32, "microbatch_prompts": 16},
    "kl_coefficient: 0.03": {"kl_coefficient": 0.03},
    "learning_rate: 3e-4": {"learning_rate": 3e-4},
    "reward_clip: 1": {"reward_clip": 1.0},
    "clip_range: 0.2": {"clip_range": 0.2},
}
QUESTIONS = 300
TEMPERATURES = (1.0, 0.0)
SCORES = ("gold", "contested_correct", "complete", "unwanted")
LAST_ITERATIONS = 10


def train(run: Path, folder: Path, change: dict) -> Path:
    """Train PPO from the models of `run` with `change` in its recipe; return the adapter (no change: its own)."""
    if not change:
        return run / "ppo"
    folder.mkdir(parents=True, exist_ok=True)
    recipe = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    recipe["ppo"] |= change
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return stage("ppo", folder, "ppo", policy=run / "sft-merged", reward=run / "reward-merged", pairs=run / "pairs")


def answer(run: Path, adapter: Path, out: Path) -> dict:
    """Score the policy's answers to held-out questions: {temperature: {score: value by question}}, also in `out`."""
    if out.exists():
        return json.loads(out.read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(run / "sft-merged")
    settings = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))["evaluate"]
    limits = {name: settings[name] for name in ("max_prompt_tokens", "max_response_tokens")}
    sft = load_causal(run / "sft-merged", cpu_kernels="auto")
    model = load_adapter(sft, adapter).merge_and_unload()
    held_out = EvaluationPrompts(run / "pairs", "evaluation", tokenizer, prompts=QUESTIONS, selection_prompts=0,
                                 longest=model.config.max_position_embeddings, seed=0, **limits)
    scores = {}
    for temperature in TEMPERATURES:
        answers = sample_answers(model, tokenizer, held_out.prompts, batch_prompts=settings["batch_prompts"], seed=0,
                                 max_new_tokens=settings["max_response_tokens"], temperature=temperature,
                                 label=f"{out.stem} at temperature {temperature:g}")
        values = gold.score(held_out.questions, answers.texts)
        scores[f"{temperature:g}"] = {name: values[name] for name in SCORES}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(scores), encoding="utf-8")
    return scores


def compare(policies: list[dict], own: list[dict], adapters: list[Path]) -> dict:
    """Average one change over the seeds, with the paired change of greedy gold from the runs' own policies."""
    difference = np.concatenate([column(changed, "0", "gold") - column(demo, "0", "gold")
                                 for changed, demo in zip(policies, own, strict=True)])
    interval = bootstrap_mean(difference, np.arange(len(difference)), samples=2000, seed=0)
    histories = [[row for row in read_history(adapter) if "policy_loss" in row] for adapter in adapters]
    final = [np.mean([row["explained_variance"] for row in rows[-LAST_ITERATIONS:]]) for rows in histories]
    return {
        "gold, temperature 1, by seed": [float(column(scores, "1", "gold").mean()) for scores in policies],
        "gold, greedy, by seed": [float(column(scores, "0", "gold").mean()) for scores in policies],
        "change": interval,
        **{name: float(np.mean([np.nanmean(column(scores, "0", name)) for scores in policies]))
           for name in SCORES if name != "gold"},
        "KL": float(np.mean([last_validation(adapter, "validation_kl") for adapter in adapters])),
        "explained": float(np.mean(final)),
        "iterations": [len(rows) for rows in histories],
    }


def column(scores: dict, temperature: str, name: str) -> np.ndarray:
    """Read one score by question; NaN where a question has none."""
    return np.array(scores[temperature][name], float)


def last_validation(adapter: Path, name: str) -> float:
    """Read a validation metric of the last evaluation."""
    return [row[name] for row in read_history(adapter) if name in row][-1]


def format_rows(results: dict[str, dict]) -> str:
    """Format one Markdown row a change."""
    def by_seed(values: list[float]) -> str:
        return " / ".join(f"{value:.2f}" for value in values)

    return format_table(
        ["change", "gold at temperature 1, by seed", "gold, greedy, by seed", "greedy, change from the demo",
         "facts with a mistake right", "all wanted traits", "unwanted", "KL, nats", "critic explains", "iterations"],
        [(name, by_seed(row["gold, temperature 1, by seed"]), by_seed(row["gold, greedy, by seed"]),
          "" if name == "as the demo" else
          f"{row['change']['mean']:+.2f} [{row['change']['low']:+.2f}, {row['change']['high']:+.2f}]",
          f"{row['contested_correct']:.2f}", f"{row['complete']:.2f}", f"{row['unwanted']:.2f}", f"{row['KL']:.1f}",
          f"{row['explained']:.2f}", " / ".join(map(str, row["iterations"]))) for name, row in results.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="results/NAME, one a seed")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=CHANGES, default=list(CHANGES), help="default: all")
    arguments = parser.parse_args()
    torch_setup.prepare()
    own, results = [answer(run, run / "ppo", arguments.out / run.name / "demo.json") for run in arguments.runs], {}
    for name in dict.fromkeys(["as the demo", *arguments.only]):
        folders = [arguments.out / run.name / name.replace(": ", "-") for run in arguments.runs]
        adapters = [train(run, folder, CHANGES[name]) for run, folder in zip(arguments.runs, folders, strict=True)]
        policies = [answer(run, adapter, folder.with_name(f"{folder.name}.json")) if CHANGES[name] else demo
                    for run, adapter, folder, demo in zip(arguments.runs, adapters, folders, own, strict=True)]
        results[name] = compare(policies, own, adapters)
        print(format_rows(results), flush=True)


if __name__ == "__main__":
    main()
