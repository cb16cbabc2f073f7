"""Measure what a merge changed: differences of outputs, the change of each matrix; and check the limits.

Shapes: B rows, T tokens, V vocabulary.
"""

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from stages.modeling.lora import unwrap_peft
from stages.modeling.packed.forward import packed_hidden_states
from stages.modeling.packed.sequences import pack

PROBE_ROWS, PROBE_TOKENS = 4, 48
RELOAD_TOLERANCE = 1e-4  # of the largest |output|: the same weights, computed again
BF16_TOLERANCE = 1.5  # times the resolution of the outputs in bf16 (measure_bf16_resolution)


def probe_ids(vocabulary: int) -> torch.Tensor:
    """Draw random token ids [rows, tokens], always the same."""
    return torch.randint(0, vocabulary, (PROBE_ROWS, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def probe_outputs(model, at_every_token: bool = False) -> torch.Tensor:
    """Compute logits [B, T, V], or a classifier's scores [B], of the probe's rows, in fp32 on the CPU.

    A score is the head's output at the last token; the classifier's own forward would need a pad id to find it.
    at_every_token: a classifier's scores are [B * T].
    """
    ids = probe_ids(model.config.vocab_size).to(model.device)
    if hasattr(model, "score"):
        classifier, batch = unwrap_peft(model), pack(ids.tolist(), model.device)
        last = batch.starts + batch.lengths - 1
        hidden = packed_hidden_states(classifier, batch, torch.arange(ids.numel()).to(last) if at_every_token else last)
        return classifier.score(hidden).squeeze(-1).float().cpu()
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().cpu()


@torch.no_grad()
def measure_bf16_resolution(model) -> float:
    """Return the largest change of an output when every bf16 weight moves by one unit in its last place.

    Two ways to compute the same in bf16 differ by less than half a unit in each weight and each activation, so that
    their outputs differ by less than this, whatever the depth and the scale of the model: a matrix product passes on
    relative errors of its weights and of its inputs alike, and a whole unit is 3.5 times the root mean square of a
    rounding. (Of ten families, merges differ by 0.25 to 0.66 of it.)
    """
    before = probe_outputs(model, at_every_token=True)
    _flip_last_bits(model)
    moved = probe_outputs(model, at_every_token=True)
    _flip_last_bits(model)  # which restores them
    return max_difference(before, moved)


def _flip_last_bits(model) -> None:
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data.view(torch.int16).bitwise_xor_(1)


def max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    return float((a - b).abs().max())


@torch.no_grad()
def layer_changes(model: PeftModel) -> list[dict]:
    """Measure the change of every matrix that the active adapter changes.

    `change_norm` is the Frobenius norm of what will be added (alpha / r * B @ A), `relative_change` its ratio to the
    matrix's own norm.
    """
    rows = []
    for name, module in unwrap_peft(model).named_modules():
        if isinstance(module, LoraLayer):
            norm = float(module.get_delta_weight("default").float().norm())
            weight_norm = float(module.get_base_layer().weight.float().norm())
            rows.append({"name": name, "change_norm": norm, "relative_change": norm / weight_norm})
    return rows


def check_report(
    report: dict, *, max_logit_difference: float, max_perplexity_change: float, max_accuracy_change: float
) -> None:
    """Raise ValueError if a merge changed more than the recipe's section `merge` allows, from which the names are."""
    merging, reloading = report["merge_difference"], report["reload_difference"]
    reload_allowed = RELOAD_TOLERANCE * max(1.0, report["largest_output"])
    if report.get("check_precision") == "bf16":
        max_logit_difference = max(max_logit_difference, BF16_TOLERANCE * report["merge_resolution"])
        reload_allowed = max(reload_allowed, BF16_TOLERANCE * report["reload_resolution"])
    if not merging <= max_logit_difference:
        _refuse(f"the merged model differs from base and adapter by {merging:.2g} in a logit",
                f"merge.max_logit_difference, or the resolution of bf16: {max_logit_difference:.2g}"
                if "merge_resolution" in report else f"merge.max_logit_difference {max_logit_difference:.2g}")
    if not reloading <= reload_allowed:
        _refuse(f"the model reloaded from disk differs from the one saved by {reloading:.2g} in a logit",
                f"{reload_allowed:.2g}")
    if "perplexity_before" in report:
        before, after = report["perplexity_before"], report["perplexity_after"]
        if not abs(after / before - 1) <= max_perplexity_change:
            _refuse(f"perplexity goes from {before:.5g} to {after:.5g}, relative change {after / before - 1:+.2g}",
                    f"merge.max_perplexity_change {max_perplexity_change:.2g}")
    else:
        before, after = report["pair_accuracy_before"], report["pair_accuracy_after"]
        if not round(abs(after - before), 9) <= max_accuracy_change:  # 13 of 20 pairs are 0.05 above 12, not more
            _refuse(f"pair accuracy goes from {before:.3f} to {after:.3f}",
                    f"merge.max_accuracy_change {max_accuracy_change:.2g}")


def _refuse(what: str, allowed: str) -> None:
    raise ValueError(f"{what} (allowed: {allowed}): nothing is published, merge.json in the .partial folder says more")
