"""The README.md of a merged model: a Hugging Face model card, so that the folder can be uploaded as it is.

Everything comes from manifests and metrics; what these do not hold is left out.
"""

from dataclasses import dataclass

import yaml

from stages.render.card_sections import (
    format_section,
    hub_license,
    join_blocks,
    licence_section,
    limits_section,
    settings_table,
    sites_table,
)
from stages.render.markdown_tables import clean_name, escape_cell, format_table
from stages.runtime.manifest import flatten_tree
from stages.stackexchange.prompt import prompt_text

WHAT = {
    "sft": ("answers questions", "A language model, fine-tuned on questions with the answers that people preferred."),
    "reward": ("scores answers", "A reward model: one number for an answer to a question, the higher the better. It "
               "learnt from pairs of answers which of the two people preferred."),
    "ppo": ("answers questions", "A language model, fine-tuned on questions with their preferred answers, then by PPO "
            "towards what a reward model scores high, held near the fine-tuned model by a KL penalty."),
}
LIMITS = [
    "It learnt from votes: what readers liked, which is not always what is true. It can be wrong, out of date or "
    "hostile, as its sources can.",
    "It knows one form of prompt, the one above, and no conversation.",
]
OF_SCORES = [
    "Scores compare answers to one question; between questions, and far from what it has read, they mean little.",
    "What it likes beyond the truth (length, code, repetition) a policy trained against it will find.",
]
OF_PPO = ["Its reward model is not the truth: see the run's report for whether it was cheated."]
CAUSAL_USE = """from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained("THIS_FOLDER") for kind in (AutoModelForCausalLM, AutoTokenizer))
prompt = tokenizer({prompt!r}, return_tensors="pt")
answer = model.generate(**prompt, max_new_tokens=128, do_sample=True)
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
SCORE_WORDS = ("The reward is the logit minus `config.reward_mean`, the mean score of reference answers. Prompt and answer "
               "are encoded separately, and EOS closes the answer:")
OPTIONS_WORDS = ("This model reads more than the state at the last token (`scoring.json`): its rewards need the code of "
                 "the project that made it:")


@dataclass(frozen=True)
class MergedModel:
    """What is known of a merged model. stage: sft, reward or ppo; config, metrics: of that stage's manifest; base: hub
    id or folder of the pretrained model, 'scratch' for one of the pipeline's own, None when unknown; merge: its report;
    pairs: metrics of the pairs it learnt from."""

    stage: str
    config: dict
    metrics: dict
    base: str | None
    merge: dict
    pairs: dict


def render_model_card(made: MergedModel) -> str:
    """README.md of the folder."""
    does, words = WHAT[made.stage]
    title = f"A model that {does}: {made.stage}"
    return join_blocks(
        _front_matter(made),
        f"# {title}",
        words,
        format_section("How to use it", *_usage(made)),
        format_section("Base", _base(made.base)),
        format_section("Data", sites_table(made.pairs, "questions", "pairs")),
        format_section("Recipe", settings_table(flatten_tree(made.config, lists=False))),
        format_section("Measured while it was made", _numbers(made.metrics),
                "Merging its adapter into the base:" if made.merge else "", _numbers(made.merge)),
        licence_section(made.pairs, "" if made.base == "scratch" else "The base model's own licence holds as well.")
        if made.pairs else "",
        limits_section(*LIMITS, *(OF_SCORES if made.stage == "reward" else OF_PPO if made.stage == "ppo" else []))) + "\n"


def _front_matter(made: MergedModel) -> str:
    values = {"library_name": "transformers",
              "pipeline_tag": "text-classification" if made.stage == "reward" else "text-generation"}
    if made.base == "scratch":  # another base's licence is not known here
        values |= hub_license(made.pairs.get("licenses", {}))
    elif made.base is not None:
        values["base_model"] = clean_name(made.base)
    values["tags"] = ["stack-exchange", "human-feedback", "rlhf", made.stage]
    return f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)}---"


def _usage(made: MergedModel) -> tuple[str, str]:
    """Explain the use in words and in code."""
    has_plain_head = (made.config.get("pooling"), made.config.get("log_probability_weight")) == ("last", 0)
    words, code = ("", CAUSAL_USE) if made.stage != "reward" else (
        (SCORE_WORDS, SCORE_USE) if has_plain_head else (OPTIONS_WORDS, OPTIONS_USE))
    code = code.replace("{prompt!r}", repr(prompt_text("How do I stop the server?")))
    return words, f"```python\n{code}\n```"


def _base(base: str | None) -> str:
    if base is None:
        return ""
    return "A small LLaMA, trained from nothing on the same sites." if base == "scratch" else f"`{escape_cell(base)}`"


def _numbers(metrics: dict) -> str:
    return format_table(["number", "value"], [(escape_cell(name), f"{value:.5g}") for name, value in metrics.items()
                                       if isinstance(value, int | float) and not isinstance(value, bool)])
