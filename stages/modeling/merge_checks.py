"""What a merge did, in numbers: how far outputs moved, how much each matrix changed, what texts say before and after.

Shapes: B rows, T tokens, V vocabulary.
"""

import math

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer

from stages.evaluation.pair_accuracy import pair_accuracy
from stages.modeling.lora import unwrap_peft
from stages.modeling.packed.sequences import pack_responses
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.reward_modeling.dataset import Example
from stages.reward_modeling.reward_model import score_packed
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import Scoring

PROBE_ROWS, PROBE_TOKENS = 4, 48
RELOAD_TOLERANCE = 1e-4  # of the largest |output|: the same weights, computed once more


def probe_ids(vocabulary: int) -> torch.Tensor:
    """Fixed random token ids [rows, tokens]."""
    return torch.randint(0, vocabulary, (PROBE_ROWS, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def outputs(model) -> torch.Tensor:
    """Logits [B, T, V], or scores [B], of the probe's rows, fp32 on the CPU.

    Scores are read as this project reads them: a classifier's own way needs a pad id.
    """
    ids = probe_ids(model.config.vocab_size).to(model.device)
    if hasattr(model, "score"):
        texts = pack_responses(ids[:, :1].tolist(), ids[:, 1:].tolist(), model.device)
        return score_packed(model, texts, Scoring()).scores.cpu()
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().cpu()


def difference(found: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute one."""
    return float((found - other).abs().max())


@torch.no_grad()
def layer_changes(model: PeftModel) -> list[dict]:
    """Of every matrix that the adapter changes: `name`, `change_norm`, the Frobenius norm of what is to be added to it
    (alpha / r * B @ A), and `relative_change`, that over the matrix's own norm.

    Trained rows of an embedding count as well; where the output layer is tied to it, once.
    """
    found = []
    for name, module in unwrap_peft(model).named_modules():
        if isinstance(module, LoraLayer):
            change, weight = module.get_delta_weight("default"), module.get_base_layer().weight
        elif isinstance(module, TrainableTokensLayer) and module.tied_adapter is None:
            weight = module.get_base_layer().weight
            change = module.trainable_tokens_delta["default"] - weight[module.token_indices["default"]]
        else:
            continue
        norm = float(change.float().norm())
        found.append({"name": name.removesuffix(".token_adapter"), "change_norm": norm,
                      "relative_change": norm / float(weight.float().norm())})
    return found


def judged(model, texts: list[Example]) -> dict[str, float]:
    """A causal model's `perplexity` a token of the answers that win a pair, given their questions; a scorer's
    `pair_accuracy`."""
    if hasattr(model, "score"):
        return {"pair_accuracy": pair_accuracy(Scorer(model, "fp32"), texts)}
    better = [(text.prompt, text.answers[j]) for text in texts for j in sorted({j for j, _ in text.pairs})]
    log_p = torch.cat(response_logprobs(model, *map(list, zip(*better, strict=True)), 1.0, "merge"))
    return {"perplexity": math.exp(-float(log_p.double().mean()))}


def check(
    report: dict, *, max_logit_difference: float, max_perplexity_change: float, max_accuracy_change: float
) -> None:
    """ValueError where a merge did more than it may; the names are those of the recipe's section merge."""
    merging, reloading = report["merge_difference"], report["reload_difference"]
    reload_allowed = RELOAD_TOLERANCE * max(1.0, report["largest_output"])
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
