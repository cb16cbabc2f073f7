"""Measure what a merge changed: differences of outputs, the change of each matrix; and check the limits.

Shapes: B rows, T tokens, V vocabulary.
"""

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer

from stages.modeling.lora import unwrap_peft
from stages.modeling.packed.forward import packed_hidden_states
from stages.modeling.packed.sequences import pack

PROBE_ROWS, PROBE_TOKENS = 4, 48
RELOAD_TOLERANCE = 1e-4  # of the largest |output|: the same weights, computed again
BF16_TOLERANCE = 0.1  # of the largest |output|: rounding of weights and activations to bf16 through all layers


def probe_ids(vocabulary: int) -> torch.Tensor:
    """Draw random token ids [rows, tokens], always the same."""
    return torch.randint(0, vocabulary, (PROBE_ROWS, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def probe_outputs(model) -> torch.Tensor:
    """Compute logits [B, T, V], or a classifier's scores [B], of the probe's rows, in fp32 on the CPU.

    A score is the head's output at the last token; the classifier's own forward would need a pad id to find it.
    """
    ids = probe_ids(model.config.vocab_size).to(model.device)
    if hasattr(model, "score"):
        classifier, batch = unwrap_peft(model), pack(ids.tolist(), model.device)
        hidden = packed_hidden_states(classifier, batch, batch.starts + batch.lengths - 1)
        return classifier.score(hidden).squeeze(-1).float().cpu()
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().cpu()


def max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    return float((a - b).abs().max())


@torch.no_grad()
def layer_changes(model: PeftModel) -> list[dict]:
    """Measure the change of every matrix that the active adapter changes.

    `change_norm` is the Frobenius norm of what will be added (alpha / r * B @ A), `relative_change` its ratio to the
    matrix's own norm. Trained rows of an embedding are included, once if the output layer is tied to it.
    """
    rows = []
    for name, module in unwrap_peft(model).named_modules():
        if isinstance(module, LoraLayer):
            change, weight = module.get_delta_weight("default"), module.get_base_layer().weight
        elif isinstance(module, TrainableTokensLayer) and module.tied_adapter is None:
            weight = module.get_base_layer().weight
            change = module.trainable_tokens_delta["default"] - weight[module.token_indices["default"]]
        else:
            continue
        norm = float(change.float().norm())
        rows.append({"name": name.removesuffix(".token_adapter"), "change_norm": norm,
                     "relative_change": norm / float(weight.float().norm())})
    return rows


def check_report(
    report: dict, *, max_logit_difference: float, max_perplexity_change: float, max_accuracy_change: float
) -> None:
    """Raise ValueError if a merge changed more than the recipe's section `merge` allows, from which the names are."""
    merging, reloading = report["merge_difference"], report["reload_difference"]
    largest = max(1.0, report["largest_output"])
    reload_allowed = RELOAD_TOLERANCE * largest
    if report.get("check_precision") == "bf16":
        reload_allowed = BF16_TOLERANCE * largest
        max_logit_difference = max(max_logit_difference, reload_allowed)
    if not merging <= max_logit_difference:
        _refuse(f"the merged model differs from base and adapter by {merging:.2g} in a logit",
                f"merge.max_logit_difference {max_logit_difference:.2g}")
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
        if not abs(after - before) <= max_accuracy_change:
            _refuse(f"pair accuracy goes from {before:.3f} to {after:.3f}",
                    f"merge.max_accuracy_change {max_accuracy_change:.2g}")


def _refuse(what: str, allowed: str) -> None:
    raise ValueError(f"{what} (allowed: {allowed}): nothing is published, merge.json in the .partial folder says more")
