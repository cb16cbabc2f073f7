"""Merge: merge adapters into their base, those of sft, reward, judge and ppo alike.

    python -m stages.merge --recipe configs/demo.yaml --base results/demo/base \\
        --adapter results/demo/sft --pairs results/demo/pairs --out results/demo/sft-merged

Several adapters are merged one after the other, in the order of training: `--adapter results/demo/sft
results/demo/reward`. The result is a plain model folder for `from_pretrained`, with merge.json: the change of each
matrix, the difference of the logits, and the perplexity (of a reward model: the pair accuracy) on some pairs before and
after. The files are reloaded and compared with the base with active adapters; nothing is published above the recipe's
limits. Nothing is pushed to a hub. Of an artifact without a model (a judge with too few pairs), its no_model.json is
copied.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from itertools import groupby, islice
from pathlib import Path

from stages.artifacts.artifact import MANIFEST, artifact_folder
from stages.artifacts.lineage import find_origin
from stages.cards.model_card import MergedModel, render_model_card
from stages.evaluation.reward_model_check import describe_shortfall
from stages.modeling import torch_setup
from stages.modeling.adapters import check_base, is_adapter, is_reward_model
from stages.modeling.compatible_files import save_chat_template
from stages.modeling.families import max_positions
from stages.modeling.merging.merge import check_order, merge
from stages.modeling.q_heads import has_q_heads
from stages.modeling.tokenizer import load_tokenizer
from stages.recipe.sections.models import Merge
from stages.reward_modeling.dataset import Example, build_examples
from stages.reward_modeling.load import select_target
from stages.reward_modeling.scoring_file import (
    load_held_out,
    member_folder,
    member_folders,
    read_no_model,
    write_no_model,
)
from stages.runtime.files import read_json_object, write_text
from stages.stackexchange.pairs.table import question_key, read_pairs
from stages.stackexchange.prompt import encode_prompt
from stages.stackexchange.prompt_file import read_own_prompts

MAX_PAIRS = 64  # that a merge is evaluated on
MAX_TOKENS = 2048  # of a question and an answer, or fewer if the model has fewer positions; longer ones are skipped


def run(config: Merge, out: Path, *, base: Path, adapter: list[str], pairs: Path | None = None,
        prompts: Path | None = None) -> dict[str, float]:
    """Fill `out` with the merged model, its tokenizer and merge.json; return the report's numbers.

    pairs: a language model is evaluated on a better answer to each of the finetune split's first questions, a reward
    model on the reward split's first pairs. prompts: of a policy that was trained on them, in place of pairs: it is
    evaluated on their text.
    """
    if (pairs is None) == (prompts is None):
        raise ValueError("give the texts that the merged model is evaluated on by one of --pairs FOLDER, or --prompts "
                         "FILE for a policy that was trained on your own prompts")
    adapters = [artifact_folder(folder) for folder in adapter]
    if reason := read_no_model(adapters[-1]):
        write_no_model(out, reason)
        return {}
    torch_setup.prepare()
    check_order(adapters)
    if is_adapter(adapters[0]):
        check_base(adapters[0], base)
    examples = _load_examples(base, adapters[-1], pairs) if pairs else _load_prompts(base, adapters[-1], prompts)
    target = select_target(adapters[-1], examples, config.cpu_kernels, config.check_precision)
    report, *_ = (
        merge(
            base,
            [*adapters[:-1], last],
            member_folder(out, number),
            target,
            dtype=config.dtype,
            max_shard_bytes=config.max_shard_bytes,
            max_logit_difference=config.max_logit_difference,
            max_perplexity_change=config.max_perplexity_change,
            max_accuracy_change=config.max_accuracy_change,
        )
        for number, last in enumerate(member_folders(adapters[-1]))  # one, unless there are several reward models
    )
    if _settings(adapters[-1]).get("prompt_template", "question") != "question":
        save_chat_template(load_tokenizer(out), out, load_tokenizer(adapters[-1]).chat_template)
    numbers = {name: value for name, value in report.items() if name != "layers"}
    write_text(out / "README.md", render_model_card(_describe(adapters[-1], base, numbers, pairs)))
    return numbers


def _describe(adapter: Path, base: Path, report: dict, pairs: Path | None) -> MergedModel:
    """Collect the model card's facts from the artifacts; a folder that is no artifact has few."""
    manifest = read_json_object(adapter / MANIFEST) or {}
    unnamed = "reward" if is_reward_model(adapter) else "ilql" if has_q_heads(adapter) else "sft"
    stage = manifest.get("stage") or unnamed
    metrics = manifest.get("metrics", {})
    if is_reward_model(adapter):
        shortfall = "; ".join(filter(None, map(describe_shortfall, load_held_out(adapter).values())))
    else:
        shortfall = metrics.get("reward_model_shortfall", "")
    return MergedModel(stage, manifest.get("config", {}), metrics, report, find_origin(base, pairs), shortfall,
                       own_prompts=pairs is None)


def _load_examples(base: Path, adapter: Path, pairs: Path) -> list[Example]:
    is_reward, limit = is_reward_model(adapter), min(max_positions(base), MAX_TOKENS)
    split = "reward" if is_reward else "finetune"
    rows = read_pairs(pairs, split)
    if not is_reward:
        rows = (next(group) for _, group in groupby(rows, key=question_key))
    tokenizer = load_tokenizer(adapter)
    examples, _ = build_examples(rows, tokenizer, max_length_tokens=limit, by_question=True, max_pairs=MAX_PAIRS)
    if not examples:
        raise ValueError(f"{pairs} has no pair of at most {limit} tokens in its {split} split, to evaluate the merged "
                         f"model on")
    return examples


def _settings(adapter: Path) -> dict:
    return (read_json_object(adapter / MANIFEST) or {}).get("config", {})


def _load_prompts(base: Path, adapter: Path, prompts: Path) -> list[Example]:
    """Take the first prompts as texts to predict, each after its first token, in the form the policy was trained on."""
    if is_reward_model(adapter):
        raise ValueError(f"{adapter} is a reward model, which is evaluated on pairs: give --pairs FOLDER")
    config = _settings(adapter)
    tokenizer, limit = load_tokenizer(adapter), min(max_positions(base), MAX_TOKENS)
    encoded = (encode_prompt(tokenizer, text, config.get("prompt_template", "question"))
               for text in read_own_prompts(prompts, config.get("prompt_column")))
    fitting = list(islice((ids for ids in encoded if 2 <= len(ids) <= limit), MAX_PAIRS))
    if not fitting:
        raise ValueError(f"{prompts} has no prompt of 2 to {limit} tokens, to evaluate the merged model on")
    return [Example(("prompt", number), ids[:1], [ids[1:]], [(0, 0)]) for number, ids in enumerate(fitting)]
