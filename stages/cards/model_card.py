"""Model card of a merged model: README.md, so that the folder can be uploaded to the Hugging Face Hub as it is.

Everything comes from manifests and metrics; what they do not contain is left out.
"""

from dataclasses import dataclass

from huggingface_hub import ModelCardData

from stages.artifacts.lineage import Origin
from stages.artifacts.manifest import flatten_tree
from stages.cards.sections import (
    format_section,
    join_blocks,
    licence_section,
    limits_section,
    origin_metadata,
    settings_table,
    sites_table,
)
from stages.evaluation.summary import display_name
from stages.recipe.algorithms import ALGORITHMS
from stages.render.markdown_tables import clean_name, escape_cell, format_table
from stages.stackexchange.prompt import prompt_text

DESCRIPTIONS = {
    "sft": "A language model, fine-tuned on questions with the answers that people preferred.",
    "reward": "A reward model: one number for an answer to a question, the higher the better. It learnt from pairs of "
              "answers which of the two people preferred.",
    "judge": "A reward model that judges answers which PPO optimised for another one. It was trained with that one's "
             "settings, but one member, another seed (1000 was added) and other questions.",
}
SCORERS = ("reward", "judge")
POLICY = "A language model, fine-tuned on questions with their preferred answers, then {}."
OWN_PROMPTS = ("A language model, trained by {} on prompts of its maker's own, towards what the maker's reward scores "
               "high, kept near the model it started from by a KL penalty.")
OWN_LIMITS = ["The reward is not the truth: the run's report compares the model with the one it started from, each at "
              "its best sampling temperature, by the reward that it was trained on. Read its answers, too."]
LIMITS = [
    "It learnt from votes: what readers liked is not always true. Like its sources, it can be wrong, out of date or "
    "hostile.",
    "It knows one form of prompt, the one above, and no conversation.",
]
SCORE_LIMITS = [
    "Scores compare answers to one question; between questions, and far from what it has read, they mean little.",
    "A policy trained against it will find what it likes beyond the truth: length, code, repetition.",
]
MAX_CLAUSE_CHARACTERS = 1000
REWARD_SHORTFALL = "Do not take it for a judge: {}."
POLICY_SHORTFALL = "Nobody is known to have judged its answers: {}."
POLICY_LIMITS = [
    "The reward is not the truth: the run's report says whether the policy exploits it.",
    "It may be no better than the fine-tuned model at a lower sampling temperature: the run's report compares both, "
    "each at its best, and best-of-n.",
]
LOAD_CAUSAL = """from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained("THIS_FOLDER") for kind in (AutoModelForCausalLM, AutoTokenizer))
"""
CAUSAL_USE = LOAD_CAUSAL + """prompt = tokenizer({prompt!r}, return_tensors="pt")
answer = model.generate(**prompt)
print(tokenizer.decode(answer[0, prompt.input_ids.shape[1]:], skip_special_tokens=True))"""
CHAT_USE = LOAD_CAUSAL + """messages = [{"role": "user", "content": "How do I stop the server?"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False, return_dict=True,
                                       return_tensors="pt")
answer = model.generate(**prompt)
print(tokenizer.decode(answer[0, prompt.input_ids.shape[1]:], skip_special_tokens=True))"""
SCORE_USE = """import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model, tokenizer = (kind.from_pretrained("THIS_FOLDER") for kind in (AutoModelForSequenceClassification, AutoTokenizer))
prompt = tokenizer({prompt!r}).input_ids
answer = tokenizer("Use the stop command.", add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
print(float(model(torch.tensor([prompt + answer])).logits) - model.config.reward_mean)"""
OPTIONS_USE = """from pathlib import Path

from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.load import load_reward_models
from stages.stackexchange.prompt import answer_ids, prompt_ids

scorer, tokenizer = load_reward_models(Path("THIS_FOLDER"), "fp32")[0], load_tokenizer("THIS_FOLDER")
print(scorer([prompt_ids(tokenizer, "How do I stop the server?")], [answer_ids(tokenizer, "Use the stop command.")]))"""
SCORE_WORDS = ("The reward is the logit minus `config.reward_mean`, the mean score of reference answers. Prompt and "
               "answer are encoded separately, and EOS closes the answer:")
CAUSAL_WORDS = ("`generate` samples as the run did: `generation_config.json` has its temperature, filters and maximum "
                "length. The tokenizer's chat template is this prompt.")
SHIFTED_USE = """import torch

from stages.generation.sampler import sample
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import load_tokenizer
from stages.stackexchange.prompt import prompt_ids

model, tokenizer = load_causal("THIS_FOLDER"), load_tokenizer("THIS_FOLDER")
rollout = sample(model, [prompt_ids(tokenizer, "How do I stop the server?")], temperature=1.0, max_new_tokens=128,
                 stop_ids=[tokenizer.eos_token_id], generator=torch.Generator().manual_seed(0))
print(rollout.decode(tokenizer)[0])"""
SHIFTED_WORDS = ("The policy that was measured is the model with its Q heads: logits plus beta times the smaller Q. "
                 "`load_causal`, of the project that made it, loads both, with beta from `q_heads.json`. "
                 "`from_pretrained` loads the model without them, and `generate` then samples from another policy:")
OPTIONS_WORDS = ("This model reads more than the state at the last token (`scoring.json`): its rewards need the code "
                 "of the project that made it:")


@dataclass(frozen=True)
class MergedModel:
    """Facts about a merged model.

    stage: sft, reward, judge or a policy's. config, metrics: of that stage's manifest. merge: the merge's report.
    shortfall: what a reward model, or the one that a policy was trained against, was not
    shown to beat on held-out pairs, as a clause; '' for nothing. own_prompts: a policy's, trained on them and no pairs.
    """

    stage: str
    config: dict
    metrics: dict
    merge: dict
    origin: Origin
    shortfall: str = ""
    own_prompts: bool = False


def render_model_card(model: MergedModel) -> str:
    """Render README.md of the folder."""
    base, pairs = model.origin.base, model.origin.pairs
    does = "scores answers" if model.stage in SCORERS else "answers questions"
    stage_limits = {"sft": [], **dict.fromkeys(SCORERS, SCORE_LIMITS)}.get(model.stage, POLICY_LIMITS)
    if model.shortfall:
        words = REWARD_SHORTFALL if model.stage in SCORERS else POLICY_SHORTFALL
        stage_limits = [words.format(escape_cell(model.shortfall, MAX_CLAUSE_CHARACTERS)), *stage_limits]
    return join_blocks(
        _front_matter(model),
        f"# A model that {does}: {model.stage}",
        _describe(model),
        format_section("How to use it", *_usage(model)),
        format_section("Base", _base(model.origin)),
        format_section("Data", sites_table(pairs, "questions", "pairs")),
        format_section("Recipe", settings_table(flatten_tree(model.config, lists=False))),
        format_section("Measured in training", _numbers(model.metrics),
                       "Measured when its adapter was merged into the base:" if model.merge else "",
                       _numbers(model.merge)),
        licence_section(pairs, "" if base == "scratch" else "The base model's own licence holds as well.")
        if pairs else "",
        limits_section(*(OWN_LIMITS if model.own_prompts else [*LIMITS, *stage_limits]))) + "\n"


def _describe(model: MergedModel) -> str:
    if model.own_prompts:
        return OWN_PROMPTS.format(display_name(model.stage))
    if model.stage in DESCRIPTIONS:
        return DESCRIPTIONS[model.stage]
    algorithm = ALGORITHMS.get(model.stage)
    return POLICY.format(algorithm.method if algorithm else f"by {display_name(model.stage)}")


def _front_matter(model: MergedModel) -> str:
    base = model.origin.base
    name = model.origin.provenance.name if model.origin.provenance else base
    known = origin_metadata(model.origin) | ({} if base in (None, "scratch") else {"base_model": clean_name(name)})
    sources = [] if model.own_prompts else ["stack-exchange", "human-feedback"]
    data = ModelCardData(
        library_name="transformers", tags=[*sources, "rlhf", model.stage],
        pipeline_tag="text-classification" if model.stage in SCORERS else "text-generation", **known)
    return f"---\n{data.to_yaml()}\n---"


def _usage(model: MergedModel) -> tuple[str, str]:
    """Explain the use in words and in code."""
    has_plain_head = (model.config.get("pooling"), model.config.get("log_probability_weight")) == ("last", 0)
    words, code = (CAUSAL_WORDS, CAUSAL_USE) if model.stage not in SCORERS else (
        (SCORE_WORDS, SCORE_USE) if has_plain_head else (OPTIONS_WORDS, OPTIONS_USE))
    if model.stage == "ilql":
        words, code = SHIFTED_WORDS, SHIFTED_USE
    prompt = prompt_text("How do I stop the server?")
    if model.config.get("prompt_template") == "none":
        prompt, words = "A prompt in the form it was trained on", CAUSAL_WORDS.rpartition(" The tokenizer's")[0]
    if model.config.get("prompt_template") == "chat":
        code = CHAT_USE
    code = code.replace("{prompt!r}", repr(prompt))
    return words, f"```python\n{code}\n```"


def _base(origin: Origin) -> str:
    if origin.base == "scratch":
        return "A small LLaMA, trained from scratch on the same sites."
    if origin.provenance:
        return f"{escape_cell(origin.describe_base(), MAX_CLAUSE_CHARACTERS)}."
    return f"`{escape_cell(origin.base)}`" if origin.base else ""


def _numbers(metrics: dict) -> str:
    return format_table(["number", "value"], [
        (escape_cell(name), f"{value:.5g}") for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)])
