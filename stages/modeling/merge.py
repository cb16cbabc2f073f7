"""Adapters merged into their base, or a model that learnt whole: in fp32, reloaded from disk and compared.

Merging into int8 or nf4 weights rounds the change to the quantised grid, and a save can silently break tied weights or
lose a head: what counts is what a fresh load from disk computes.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from stages.modeling.adapters import is_adapter, is_scorer, saved_head
from stages.modeling.families import backbone
from stages.modeling.load import load_causal
from stages.modeling.merge_checks import check, difference, judged, layer_changes, outputs
from stages.modeling.pretrained import load_adapter
from stages.modeling.tokenizer import load_tokenizer, resize_token_embeddings
from stages.reward_modeling.dataset import Example
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scoring_file import apply_scoring, copy_scoring
from stages.runtime.files import write_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REPORT = "merge.json"


def merge(
    base: Path,
    adapters: list[Path],
    out: Path,
    texts: list[Example],
    *,
    dtype: str,
    max_shard_bytes: int,
    **limits: float,
) -> dict:
    """Write the merged model, its tokenizer and merge.json to `out`; ValueError, and nothing worth publishing, where it
    does not compute the same.

    adapters: in the order they were trained, the first one on `base`, each further one on what came before; or one
    whole model that learnt from it and has nothing to merge. Weights are rounded once, when all are in: an adapter
    that was trained on rounded weights meets the others' unrounded ones.
    texts: what base with adapters and merged model are judged on. limits: see merge_report.check.

    Returns what merge.json holds. Differences are the largest absolute ones of outputs on fixed random ids: adapter on
    against merged (fp32), merged against merged and rounded to the saved type, and that against the model reloaded.
    """
    check_order(adapters)
    out.mkdir(parents=True, exist_ok=True)
    model, found = _resolved(base, adapters, texts) if is_adapter(adapters[0]) else _whole(adapters[0], texts)
    merged = outputs(model)
    if is_scorer(adapters[-1]):
        copy_scoring(adapters[-1], out, model)
    _save(model, load_tokenizer(adapters[-1]), out, dtype, max_shard_bytes)
    rounded = outputs(model)
    del model  # in fp32, and another is to come
    again = load_classifier(out) if is_scorer(adapters[-1]) else load_causal(out)
    _check_head(again, adapters[-1], dtype)
    report = found | {
        **{f"{name}_after": value for name, value in judged(again, texts).items()},
        "pairs": sum(len(text.pairs) for text in texts),
        "rounding_difference": difference(merged, rounded),
        "reload_difference": difference(rounded, outputs(again)),
        "largest_output": float(merged.abs().max()),
    }
    report["layers"] = report.pop("layers")  # the long part last
    write_json(out / REPORT, report)
    check(report, **limits)
    return report


def check_order(adapters: list[Path]) -> None:
    """ValueError for adapters that cannot follow each other."""
    for place, folder in enumerate(adapters):
        if not folder.is_dir():
            raise ValueError(f"there is no adapter {folder}: make it first")
        if len(adapters) > 1 and not is_adapter(folder):
            raise ValueError(f"{folder} is a whole model, with nothing to merge: give it alone, or as --base")
        if is_scorer(folder) and place < len(adapters) - 1:
            raise ValueError(f"{folder} has a score head, and {adapters[place + 1]} comes after it: give the adapters "
                             f"in the order they were trained, the reward model's last")


def _whole(folder: Path, texts: list[Example]) -> tuple[PreTrainedModel, dict]:
    model = load_causal(folder)
    return model, _found(0.0, judged(model, texts), [])


def _resolved(base: Path, adapters: list[Path], texts: list[Example]) -> tuple[PreTrainedModel, dict]:
    """The base with every adapter merged, in fp32, and the report so far."""
    model, moved, layers = None, [], []
    for adapter in adapters:
        model = _ready(model, base, adapter)
        model = load_adapter(model, adapter)
        before = judged(model, texts) if adapter == adapters[-1] else {}
        adapter_on = outputs(model)
        layers += [{"adapter": str(adapter)} | row for row in layer_changes(model)]
        model = model.merge_and_unload(safe_merge=True)
        moved.append(difference(adapter_on, outputs(model)))
    _check_head(model, adapters[-1], "fp32")
    return model, _found(max(moved), before, layers)


def _found(merge_difference: float, before: dict, layers: list[dict]) -> dict:
    return {
        "merge_difference": merge_difference,
        "largest_relative_change": max((row["relative_change"] for row in layers), default=0.0),
        **{f"{name}_before": value for name, value in before.items()},
        "layers": layers,
    }


def _ready(model: PreTrainedModel | None, base: Path, adapter: Path) -> PreTrainedModel:
    """What this adapter goes on: the base, or what the adapters before it made of that, with a row for every token."""
    tokenizer = load_tokenizer(adapter)
    if not is_scorer(adapter):
        model = load_causal(base) if model is None else model
        resize_token_embeddings(model, tokenizer)
        return model
    saved_head(adapter)  # refused before anything is loaded, where there is none
    scorer = load_classifier(base, new_head=True)
    if model is not None:
        scorer.resize_token_embeddings(model.get_input_embeddings().num_embeddings, mean_resizing=False)
        backbone(scorer).load_state_dict(backbone(model).state_dict())
    resize_token_embeddings(scorer, tokenizer)
    # Only an id that the embedding has: most families could not be loaded with another one.
    pad = tokenizer.pad_token_id
    scorer.config.pad_token_id = pad if pad < scorer.get_input_embeddings().num_embeddings else None
    apply_scoring(adapter, scorer)
    return scorer


def _check_head(model: PreTrainedModel, adapter: Path, dtype: str) -> None:
    """ValueError unless a scorer's head is the adapter's to the last bit, in this type."""
    if is_scorer(adapter):
        expected = saved_head(adapter).float().to(DTYPES[dtype]).float()
        if not torch.equal(expected, model.score.weight.detach().float().cpu()):
            raise ValueError(f"the score head of {adapter} is not the one in the merged model: nothing is published")


def _save(model: PreTrainedModel, tokenizer, out: Path, dtype: str, max_shard_bytes: int) -> None:
    """In this type; the model itself comes back to fp32, rounded."""
    _cast(model, DTYPES[dtype])
    model.save_pretrained(out, max_shard_size=max_shard_bytes)
    tokenizer.save_pretrained(out)
    _cast(model, torch.float32)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Parameters only: `model.to` would round the rotary frequencies as well, which no loader does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
