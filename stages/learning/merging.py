"""An adapter merged into its base, or a model that learnt whole: in fp32, reloaded from disk and compared.

Merging into int8 or nf4 weights rounds the change to the quantised grid, and a save can silently break tied weights or
lose a head: what counts is what a fresh load from disk computes.
"""

from pathlib import Path

import torch
from peft import PeftConfig, PeftModel

from stages.learning import models
from stages.learning.ragged import response_tokens
from stages.learning.reward_model import Scoring, keep_scoring, read
from stages.learning.roles import is_adapter, saved_head

PROBE_ROWS, PROBE_TOKENS = 4, 48
RELOAD_TOLERANCE = 1e-4  # of the largest |output|: the same weights, computed once more
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def merge(base: Path, adapter: Path, out: Path, dtype: str, max_difference: float) -> dict[str, float]:
    """Write the merged model to `out`; ValueError, and nothing worth publishing, if it does not compute the same.

    adapter: an adapter of `base`, or a whole model that learnt from it and has nothing to merge. Returns the largest
    absolute differences of the outputs on fixed random ids: adapter on against merged (fp32), merged against merged and
    rounded to the saved type, and that against the model reloaded from disk.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not is_adapter(adapter):
        model, tokenizer = models.load_causal(adapter), models.load_tokenizer(adapter)
        whole = outputs(model, probe_ids(model.config.vocab_size))
        return _saved(model, tokenizer, out, dtype, whole, max_difference)
    scorer = PeftConfig.from_pretrained(adapter).task_type == "SEQ_CLS"
    model = models.load_scorer(base, new_head=True) if scorer else models.load_causal(base)
    head = saved_head(adapter) if scorer else None
    model = PeftModel.from_pretrained(model, adapter)
    ids = probe_ids(model.config.vocab_size)
    adapter_on = outputs(model, ids)
    model = model.merge_and_unload(safe_merge=True)
    if scorer and not torch.equal(head.float(), model.score.weight.detach().float().cpu()):
        raise ValueError(f"the score head of {adapter} is not the one in the merged model: nothing is published")
    tokenizer = models.load_tokenizer(adapter)
    if scorer:
        # Only an id that the embedding has: most families could not be loaded with another one.
        pad = tokenizer.pad_token_id
        model.config.pad_token_id = pad if pad < model.get_input_embeddings().num_embeddings else None
        keep_scoring(adapter, out, model.config)
    return _saved(model, tokenizer, out, dtype, adapter_on, max_difference)


def probe_ids(vocabulary: int) -> torch.Tensor:
    """Fixed random token ids [rows, tokens]."""
    return torch.randint(0, vocabulary, (PROBE_ROWS, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def outputs(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits (or the score, read as this project reads it: a classifier's own way needs a pad id) of every row."""
    ids = ids.to(model.device)
    keep_mask = torch.ones_like(ids)
    if hasattr(model, "score"):
        rows = ids.tolist()
        texts = response_tokens([row[:1] for row in rows], [row[1:] for row in rows], model.device)
        return read(model, texts, Scoring()).scores.cpu()
    return model(input_ids=ids, attention_mask=keep_mask).logits.float().cpu()


def _saved(model, tokenizer, out: Path, dtype: str, before: torch.Tensor, max_difference: float) -> dict[str, float]:
    """Save a model in this type, and compare: with its outputs `before` the merge, and with a fresh load."""
    ids = probe_ids(model.config.vocab_size)
    merged = outputs(model, ids)
    _cast(model, DTYPES[dtype])
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _cast(model, torch.float32)
    rounded = outputs(model, ids)
    load = models.load_scorer if hasattr(model, "score") else models.load_causal
    return _compared(before, merged, rounded, outputs(load(out), ids), max_difference)


def _cast(model, dtype: torch.dtype) -> None:
    """Parameters only: `model.to` would round the rotary frequencies as well, which no loader does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _compared(adapter_on, merged, rounded, reloaded, max_difference: float) -> dict[str, float]:
    merging = float((adapter_on - merged).abs().max())
    reloading = float((rounded - reloaded).abs().max())
    allowed = RELOAD_TOLERANCE * max(1.0, float(merged.abs().max()))
    if not merging <= max_difference:
        raise ValueError(
            f"the merged model differs from base and adapter by {merging:.2g} in a logit (allowed: "
            f"merge.max_logit_difference {max_difference:.2g}): nothing is published"
        )
    if not reloading <= allowed:
        raise ValueError(
            f"the model reloaded from disk differs from the one saved by {reloading:.2g} in a logit "
            f"(allowed: {allowed:.2g}): nothing is published"
        )
    return {
        "merge_difference": merging,
        "rounding_difference": float((merged - rounded).abs().max()),
        "reload_difference": reloading,
        "largest_output": float(merged.abs().max()),
    }
