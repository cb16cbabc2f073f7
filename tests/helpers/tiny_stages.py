"""Run each stage in this process on tiny inputs, in about a second, with some settings changed."""

from pathlib import Path

from stages import base, best_of_n, dpo, evaluate, expert_iteration, ilql, merge, pairs, posts, ppo, reward, sft
from stages.recipe.schema import nest, override
from stages.recipe.sections.data import Pairs, Posts
from stages.recipe.sections.dpo import Dpo
from stages.recipe.sections.evaluate import Evaluate
from stages.recipe.sections.ilql import Ilql
from stages.recipe.sections.models import Base, Lora, Merge, Scratch
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.rejection_sampling import BestOfN, ExpertIteration
from stages.recipe.sections.reward import Reward
from stages.recipe.sections.rewards import RewardSource
from stages.recipe.sections.sft import Sft
from tests.helpers import tiny_models
from tests.helpers.stackexchange_dumps import document, qa_rows, write_dump

LORA = Lora(r=2, alpha=4, dropout=0.0)
COMMON = {"precision": "fp32", "log_to": ("jsonl",)}
SAMPLING = {"max_prompt_tokens": 64, "max_response_tokens": 4, "require_reward": "none", "missing_eos_penalty": 0.0,
            "rewards": (RewardSource("tests.helpers.token_rewards:low_ids", reads="ids"),), **COMMON}
RUNS = {"posts": posts.run, "pairs": pairs.run, "base": base.run, "sft": sft.run, "reward": reward.run,
        "merge": merge.run, "ppo": ppo.run, "dpo": dpo.run, "best_of_n": best_of_n.run,
        "expert_iteration": expert_iteration.run, "ilql": ilql.run, "evaluate": evaluate.run}
TINY = {
    "posts": Posts(), "pairs": Pairs(),
    "base": Base(model="scratch", scratch=Scratch(
        vocabulary_tokens=300, hidden_size=8, intermediate_size=8, layers=1, heads=2, max_tokens=256, precision="fp32",
        sequence_length_tokens=64, batch_sequences=2, save_every_steps=2)),
    "sft": Sft(lora=LORA, packing="bfd", sequence_length_tokens=64, batch_sequences=4, microbatch_sequences=4,
               max_steps=2, warmup_steps=1, save_every_steps=1, evaluate_every_steps=1, validation_questions=2,
               learning_rate=1e-3, **COMMON),
    "reward": Reward(lora=LORA, train_pairs=8, batch_pairs=4, microbatch_pairs=4, epochs=1.0, save_every_steps=1,
                     validation_share=0.2, max_length_tokens=64, batching="question", **COMMON),
    "merge": Merge(dtype="fp32"),
    "ppo": Ppo(lora=LORA, iterations=2, rollout_prompts=4, minibatch_prompts=4, microbatch_prompts=4, epochs=1,
               max_prompt_tokens=64, max_response_tokens=4, min_response_tokens=1, validation_prompts=2,
               evaluate_every_iterations=1, save_every_iterations=1, require_reward="none", optimizer="adamw",
               rewards=(RewardSource("response_tokens"),), **COMMON),
    "dpo": Dpo(lora=LORA, train_pairs=8, batch_pairs=4, microbatch_pairs=4, epochs=1.0, save_every_steps=1,
               warmup_steps=1, validation_share=0.2, max_length_tokens=64, **COMMON),
    "ilql": Ilql(lora=LORA, batch_answers=4, microbatch_answers=2, max_steps=2, warmup_steps=1, save_every_steps=1,
                 evaluate_every_steps=1, validation_questions=2, max_length_tokens=64, learning_rate=1e-3, **COMMON),
    "best_of_n": BestOfN(n=4, save_every_prompts=5, bootstrap_samples=10, **SAMPLING),
    "expert_iteration": ExpertIteration(
        lora=LORA, n=4, rounds=1, save_every_prompts=5, sequence_length_tokens=64, batch_sequences=2,
        microbatch_sequences=2, save_every_steps=1, validation_prompts=3, learning_rate=0.05, **SAMPLING),
    "evaluate": Evaluate(max_pairs=8, prompts=2, best_of=(2,), batch_prompts=4, max_prompt_tokens=64,
                         max_response_tokens=4, temperatures=(1.0, 0.0), temperature_prompts=2, bootstrap_samples=10),
}


def save_inputs(folder: Path) -> dict[str, dict]:
    """Make what every stage reads in `folder`, and return the inputs of each stage."""
    dump = write_dump(folder, document(*(qa_rows(number) for number in range(1, 60, 3))))
    paths = {name: folder / name for name in ("posts", "base", "other", "pairs", "sft", "reward", "reward-merged")}
    for name in ("posts", "sft", "reward", "reward-merged"):
        paths[name].mkdir()
    posts.run(TINY["posts"], paths["posts"], dump=[dump])
    for seed, name in enumerate(("base", "other")):
        tiny_models.save_base(paths[name], seed, width=8)
    tiny_models.save_pairs(paths["pairs"], questions_per_split=12)
    on_base = {"base": paths["base"], "pairs": paths["pairs"]}
    on_policy = {"policy": paths["base"], "reward": paths["reward-merged"], "pairs": paths["pairs"]}
    sft.run(TINY["sft"], paths["sft"], **on_base)
    reward.run(TINY["reward"], paths["reward"], **on_base)
    merge.run(TINY["merge"], paths["reward-merged"], adapter=[str(paths["reward"])], **on_base)
    return {
        "posts": {"dump": [dump]}, "pairs": {"posts": paths["posts"]}, "base": {"pairs": paths["pairs"]},
        "sft": on_base, "reward": on_base, "merge": on_base | {"adapter": [str(paths["reward"])]},
        **dict.fromkeys(("ppo", "best_of_n", "expert_iteration"), on_policy),
        "dpo": {"policy": paths["base"], "pairs": paths["pairs"]},
        "ilql": {"policy": paths["base"], "pairs": paths["pairs"]},
        "evaluate": {"posts": paths["posts"], "pairs": paths["pairs"], "base": paths["base"], "sft": paths["base"],
                     "policy": {"ppo": paths["other"]}, "reward": paths["reward-merged"]}}


def save_policy_inputs(folder: Path) -> dict[str, Path]:
    """Make a model and pairs, and return the inputs of a stage that samples from it; there is no reward model."""
    return {"policy": tiny_models.save_base(folder / "policy", width=8), "reward": folder / "reward",
            "pairs": tiny_models.save_pairs(folder / "pairs", questions_per_split=12)}


def run_stage(stage: str, settings: dict[str, object], out: Path, inputs: dict[str, dict]) -> dict:
    """Run one stage with these settings, by dotted names, instead of the tiny ones; return its metrics."""
    out.mkdir(parents=True, exist_ok=True)
    return RUNS[stage](override(TINY[stage], nest(settings), stage), out, **inputs[stage])
