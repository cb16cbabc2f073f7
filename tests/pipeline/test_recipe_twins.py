"""A tiny twin of every recipe for a large base: the recipe's own file with other sizes, from posts to report.

Each has the family of the recipe's base, with random weights of two layers, and all settings of the recipe but sizes:
precision, targets of the adapter, packing, checkpointing, what the stages give to each other.
"""

import json
from pathlib import Path

import pytest
import transformers as hf

from stages import base as base_stage
from stages import evaluate, judge, merge, pairs, posts, ppo, report, reward, sft
from stages.command_line.command import make
from stages.recipe.recipe import load_recipe
from tests.helpers import finished_run, tiny_models
from tests.helpers.architectures import LLAMA3_ROPE
from tests.helpers.stackexchange_dumps import document, qa_rows, write_dump

ROOT = Path(__file__).parents[2]
SCRATCH = {"demo", "sites", "tiny", "own_prompts"}  # recipes without a pretrained base
SHAPE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
BASES = {
    "stackllama": hf.LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "stackllama_8x24gb": hf.LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen3_600m_12gb": hf.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "smollm2": hf.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "smollm3_3b_24gb": hf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0], tie_word_embeddings=True),
    "llama3_8b_8x80gb": hf.LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
}
# Sizes, and no more: rank, lengths, batches, steps, how often. No reward model of so few pairs beats chance.
SIZES = {
    "sft": {"lora": {"r": 2}, "sequence_length_tokens": 64, "batch_sequences": 2, "microbatch_sequences": 1,
            "max_steps": 2, "warmup_steps": 1, "save_every_steps": 2, "evaluate_every_steps": 2,
            "validation_questions": 2},
    "reward": {"lora": {"r": 2}, "max_length_tokens": 64, "max_sampled_tokens": 4, "train_pairs": 8,
               "batch_pairs": 4, "microbatch_pairs": 2, "save_every_steps": 2, "validation_share": 0.2},
    "ppo": {"lora": {"r": 2}, "iterations": 1, "rollout_prompts": 4, "minibatch_prompts": 4, "microbatch_prompts": 2,
            "forward_prompts": 2, "epochs": 1, "max_prompt_tokens": 64, "max_response_tokens": 4,
            "validation_prompts": 2, "evaluate_every_iterations": 1, "save_every_iterations": 1,
            "require_reward": "none"},
    "evaluate": {"max_pairs": 8, "prompts": 2, "best_of": [2], "batch_prompts": 4,
                 "max_prompt_tokens": 64, "max_response_tokens": 4, "temperatures": [1.0, 0.0],
                 "temperature_prompts": 2, "bootstrap_samples": 10},
    "report": {"side_by_side": 2},
}

# Whose judge is trained, too, as their reward model: one with adapters, and one with a fitted head.
JUDGED = ("stackllama", "smollm2")
# Of the two layers; a merge that is checked in bf16 changes a random model's perplexity of 2,400 by 1 %.
FITTED_HEAD = {"smollm2": {"layers": 1}}
MERGE = {"smollm2": {"max_perplexity_change": 0.05}}


def save_base(config, folder: Path) -> Path:
    tokenizer = tiny_models.tokenizer()
    hf.set_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return write_dump(tmp_path_factory.mktemp("twins"), document(*(qa_rows(number) for number in range(1, 240, 3))))


def test_every_recipe_for_a_pretrained_base_has_a_twin():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == SCRATCH | BASES.keys()


@pytest.mark.parametrize("name", BASES)
def test_a_twin_runs_from_posts_to_report(dump, tmp_path, monkeypatch, name):
    finished_run.draw_dots(monkeypatch)
    recipe = load_recipe(ROOT / f"configs/{name}.yaml", SIZES | {
        "reward": SIZES["reward"] | FITTED_HEAD.get(name, {}), "merge": MERGE.get(name, {}), "dump": [dump],
        "base": {"model": str(save_base(BASES[name], tmp_path / "hub"))}})

    def run(stage, section: str, out: str, **inputs) -> Path:
        make(stage.run, getattr(recipe, section), tmp_path / out, inputs)
        return tmp_path / out

    def merged(start: Path, adapter: Path) -> Path:
        return run(merge, "merge", f"{adapter.name}-merged", base=start, adapter=[str(adapter)], pairs=data)

    questions = run(posts, "posts", "posts", dump=list(recipe.dump))
    data = run(pairs, "pairs", "pairs", posts=questions)
    start = run(base_stage, "base", "base", pairs=data)
    tuned = run(sft, "sft", "sft", base=start, pairs=data)
    tuned_model = merged(start, tuned)
    scorer = run(reward, "reward", "reward", base=tuned_model, pairs=data)
    scorer_model = merged(tuned_model, scorer)
    second = run(judge, "reward", "judge", base=tuned_model, pairs=data) if name in JUDGED else None
    second_model = second and merged(tuned_model, second)
    policy = run(ppo, "ppo", "ppo", policy=tuned_model, reward=scorer_model, pairs=data)
    policy_model = merged(tuned_model, policy)
    results = run(evaluate, "evaluate", "evaluate", posts=questions, pairs=data, base=start, sft=tuned_model,
                  policy={"ppo": policy_model}, reward=scorer_model, judge=second_model)
    page = run(report, "report", "report", posts=questions, pairs=data, base=start, sft=tuned, reward=scorer,
               judge=second, policy={"ppo": policy}, evaluate=results,
               merged=[str(folder) for folder in (tuned_model, scorer_model, policy_model, second_model) if folder])
    assert "Reward hacking" in (page / "report.html").read_text()
    adapters = [(tuned, recipe.sft), (policy, recipe.ppo), *([] if name in FITTED_HEAD else [(scorer, recipe.reward)])]
    for folder, section in adapters:
        adapted = set(json.loads((folder / "adapter_config.json").read_text())["target_modules"])
        assert adapted == {*section.lora.target_modules} or not section.lora.target_modules
    family = json.loads((policy_model / "config.json").read_text())
    assert {name: family[name] for name in ("model_type", "num_hidden_layers")} == {
        "model_type": BASES[name].model_type, "num_hidden_layers": 2}
