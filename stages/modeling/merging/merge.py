"""Merge adapters into their base in fp32, save, reload from disk and compare.

Merging into int8 or nf4 weights would round the change to the quantised grid, and a save can silently break tied
weights or lose a head: what counts is what a model loaded from the files computes.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from stages.artifacts.artifact import MANIFEST
from stages.modeling.adapters import is_adapter, is_reward_adapter, load_score_head
from stages.modeling.compatible_files import save_tokenizer, set_generation_config, write_model
from stages.modeling.load import load_causal
from stages.modeling.merging.checks import (
    check_report,
    layer_changes,
    max_difference,
    measure_bf16_resolution,
    probe_outputs,
)
from stages.modeling.merging.shards import (
    AdapterLayers,
    MergedTensors,
    can_stream,
    release_weights,
    write_shards,
)
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.modeling.pretrained import load_adapter
from stages.modeling.q_heads import copy_q_heads, has_q_heads, shift_by_folder
from stages.modeling.tokenizer import load_tokenizer
from stages.runtime.environment import return_freed_memory
from stages.runtime.files import check_free_space, read_json_object, write_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REPORT = "merge.json"


class CausalTarget:
    """How a merge loads and evaluates a causal language model (for a reward model: reward_modeling.load).

    Args:
        examples: with `prompt` and `answers` as token ids, and `pairs` of (better, worse) indices.
    """

    def __init__(self, examples: Sequence, cpu_kernels: str = "off", precision: str = "fp32"):
        self.examples, self.cpu_kernels, self.precision = examples, cpu_kernels, precision

    def load(self, folder: Path) -> PreTrainedModel:
        """Load a whole model in the precision of the checks."""
        return load_causal(folder, precision=self.precision, cpu_kernels=self.cpu_kernels)

    def prepare(self, model: PreTrainedModel | None, base: Path, adapter: Path) -> PreTrainedModel:
        """Return the model that `adapter` goes on: `base`, or `model`, the merge so far.

        Q heads beside the adapter shift its logits, so that the merge compares the policy that is sampled.
        """
        model = self.load(base) if model is None else model
        if has_q_heads(adapter):
            shift_by_folder(model, adapter)
        return model

    def evaluate(self, model) -> dict[str, float]:
        """Compute the perplexity per token of the answers that win a pair."""
        better = [(e.prompt, e.answers[j]) for e in self.examples for j in sorted({j for j, _ in e.pairs})]
        logprobs = torch.cat(response_logprobs(model, *map(list, zip(*better, strict=True)), 1.0, "merge"))
        return {"perplexity": math.exp(-float(logprobs.double().mean()))}

    def save_settings(self, adapter: Path, out: Path, model: PreTrainedModel) -> None:
        """Carry what an adapter has besides weights into the merged folder and the model's configs: how it sampled,
        and Q heads."""
        if has_q_heads(adapter):
            copy_q_heads(adapter, out)
        manifest = read_json_object(adapter / MANIFEST) or {}
        set_generation_config(model, load_tokenizer(adapter), manifest.get("config", {}))


def merge(
    base: Path,
    adapters: list[Path],
    out: Path,
    target: CausalTarget,
    *,
    dtype: str,
    max_shard_bytes: int,
    **limits: float,
) -> dict:
    """Write the merged model, its tokenizer and merge.json to `out`, and return what merge.json holds.

    Weights are rounded to `dtype` once, when all adapters are merged: an adapter that was trained on rounded weights is
    added to unrounded ones. Differences in the report are the largest absolute ones of outputs on fixed random ids:
    adapter active and merged (fp32), merged and rounded to `dtype`, rounded and reloaded.

    Args:
        adapters: in the order of training, the first on `base`, each further one on the merge so far; or one whole
            model, trained from `base`, in which there is nothing to merge.
        limits: see checks.check_report.

    Raises ValueError if the merged model does not compute the same; it must not be published.
    """
    check_order(adapters)
    out.mkdir(parents=True, exist_ok=True)
    if is_adapter(adapters[0]):
        source = base
        model, report, layers = _merge_adapters(base, adapters, target)
    else:
        source, layers = adapters[0], []
        model = target.load(source)
        report = _report([(0.0, _measure_resolution(model, target))], target.evaluate(model), [])
    merged = probe_outputs(model)
    target.save_settings(adapters[-1], out, model)
    tokenizer, tensors = load_tokenizer(adapters[-1]), MergedTensors(source, layers, model)
    _check_space(model, out, dtype)
    rounded = _round(model, dtype)
    if can_stream(model, tensors):
        release_weights(model, DTYPES[dtype])
        return_freed_memory()
        write_shards(model, tensors, out, max_shard_bytes)
        save_tokenizer(tokenizer, out)
    elif target.precision != "fp32":
        raise ValueError(f"the weights of {source} are converted as they are loaded, and are merged in memory: set "
                         f"merge.check_precision to fp32")
    else:
        for parameter in model.parameters():  # `model.to` would round the rotary frequencies too, which no loader does
            parameter.data = parameter.data.to(DTYPES[dtype])
        write_model(model, tokenizer, out, max_shard_size=max_shard_bytes)
    del model, tensors, layers
    return_freed_memory()  # the reloaded one needs as much
    report |= _compare_reloaded(target, out, adapters[-1], dtype, merged, rounded)
    report["layers"] = report.pop("layers")  # the long part last
    write_json(out / REPORT, report)
    check_report(report, **limits)
    return report


def check_order(adapters: list[Path]) -> None:
    """Raise ValueError for adapters that cannot follow each other."""
    for number, folder in enumerate(adapters):
        if not folder.is_dir():
            raise ValueError(f"there is no adapter {folder}: make it first")
        if len(adapters) > 1 and not is_adapter(folder):
            raise ValueError(f"{folder} is a whole model, with nothing to merge: give it alone, or as --base")
        if is_reward_adapter(folder) and number < len(adapters) - 1:
            raise ValueError(f"{folder} has a score head, and {adapters[number + 1]} comes after it: give the adapters "
                             f"in the order they were trained, the reward model's last")


def _merge_adapters(base: Path, adapters: list[Path], target: CausalTarget
                    ) -> tuple[PreTrainedModel, dict, list[AdapterLayers]]:
    """Merge every adapter into the base, in fp32; return the model, the report so far and the adapters' layers."""
    model, differences, layers, before, adapter_layers = None, [], [], {}, []
    language_model = CausalTarget(target.examples, target.cpu_kernels, target.precision)
    for adapter in adapters:
        is_last = adapter == adapters[-1]
        model = (target if is_last else language_model).prepare(model, base, adapter)
        model = load_adapter(model, adapter)
        before = target.evaluate(model) if is_last else {}
        with_adapter = probe_outputs(model)
        adapter_layers.append(AdapterLayers(model, adapter))
        layers += [{"adapter": str(adapter)} | row for row in layer_changes(model)]
        model = model.merge_and_unload(safe_merge=True)
        differences.append((max_difference(with_adapter, probe_outputs(model)), _measure_resolution(model, target)))
    _check_head(model, adapters[-1], "fp32")
    return model, _report(differences, before, layers), adapter_layers


def _measure_resolution(model: PreTrainedModel, target: CausalTarget) -> float | None:
    """Measure the resolution of the outputs where the checks run in bf16; None in fp32."""
    return measure_bf16_resolution(model) if target.precision == "bf16" else None


def _report(differences: list[tuple[float, float | None]], before: dict, layers: list[dict]) -> dict:
    """Begin the report. differences: of outputs, with their resolution in bf16, by adapter; the worst one counts."""
    difference, resolution = max(differences, key=lambda pair: pair[0] / (pair[1] or 1.0))
    in_bf16 = {"check_precision": "bf16", "merge_resolution": resolution, "reload_resolution": differences[-1][1]}
    return {
        "merge_difference": difference,
        **({} if resolution is None else in_bf16),
        "largest_relative_change": max((row["relative_change"] for row in layers), default=0.0),
        **{f"{name}_before": value for name, value in before.items()},
        "layers": layers,
    }


def _compare_reloaded(target: CausalTarget, out: Path, adapter: Path, dtype: str, merged: torch.Tensor,
                      rounded: torch.Tensor) -> dict:
    """Load the merged model from its files and compare its outputs; merged, rounded: outputs before it was saved."""
    reloaded = target.load(out)
    _check_head(reloaded, adapter, dtype)
    return {
        **{f"{name}_after": value for name, value in target.evaluate(reloaded).items()},
        "pairs": sum(len(example.pairs) for example in target.examples),
        "rounding_difference": max_difference(merged, rounded),
        "reload_difference": max_difference(rounded, probe_outputs(reloaded)),
        "largest_output": float(merged.abs().max()),
    }


def _check_head(model: PreTrainedModel, adapter: Path, dtype: str) -> None:
    """Raise ValueError unless a reward model's head equals the adapter's bit for bit, in this dtype."""
    if is_reward_adapter(adapter):
        expected = load_score_head(adapter).float().to(DTYPES[dtype]).to(model.score.weight.dtype).float()
        if not torch.equal(expected, model.score.weight.detach().float().cpu()):
            raise ValueError(f"the score head of {adapter} is not the one in the merged model: nothing is published")


def _check_space(model: PreTrainedModel, out: Path, dtype: str) -> None:
    """Raise ValueError if the disk has no room for the merged weights."""
    size_bytes = sum(parameter.numel() for parameter in model.parameters()) * DTYPES[dtype].itemsize
    check_free_space("the merged weights", out, size_bytes)


def _round(model: PreTrainedModel, dtype: str) -> torch.Tensor:
    """Round the weights to this dtype, as the files have them, one at a time; return the probe's outputs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype]).to(parameter.dtype)
    return probe_outputs(model)
