"""An adapter merged into its base: in fp32, on unquantised weights, reloaded from disk and compared.

Merging into int8 or nf4 weights rounds the change to the quantised grid, and a save can silently break tied weights or
lose a head: what counts is what a fresh load from disk computes.
"""

from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from safetensors import safe_open

from stages.learning import models
from stages.learning.reward_model import keep_normalisation

PROBE_ROWS, PROBE_TOKENS = 4, 48
CAST_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # of the largest |output|: rounding weights once to the saved type


def merge(base: Path, adapter: Path, out: Path, dtype: str, max_difference: float) -> dict[str, float]:
    """Write the merged model to `out`; ValueError, and nothing worth publishing, if it does not compute the same.

    Returns the largest absolute differences of the outputs on fixed random ids: adapter on against merged in memory
    (fp32), and against the model reloaded from disk.
    """
    scorer = PeftConfig.from_pretrained(adapter).task_type == "SEQ_CLS"
    load = models.load_scorer if scorer else models.load_causal
    model = load(base, "fp32", new_head=True) if scorer else load(base, "fp32")
    model = PeftModel.from_pretrained(model, adapter)
    if scorer:
        _check_head(model, adapter)
    ids = probe_ids(model.config.vocab_size)
    adapter_on = outputs(model, ids)
    model = model.merge_and_unload(safe_merge=True)
    merged = outputs(model, ids)
    tokenizer = models.load_tokenizer(adapter)
    if scorer:
        model.config.pad_token_id = tokenizer.pad_token_id
        keep_normalisation(adapter, out, model.config)
    model.to(torch.float32 if dtype == "fp32" else torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    reloaded = outputs(load(out, "fp32"), ids)
    return _compared(adapter_on, merged, reloaded, dtype, max_difference)


def probe_ids(vocabulary: int) -> torch.Tensor:
    """Fixed random token ids [rows, tokens]."""
    return torch.randint(0, vocabulary, (PROBE_ROWS, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def outputs(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits (or the score) of every row, fp32, on the CPU."""
    ids = ids.to(model.device)
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().cpu()


def _compared(adapter_on, merged, reloaded, dtype: str, max_difference: float) -> dict[str, float]:
    merging = float((adapter_on - merged).abs().max())
    reloading = float((merged - reloaded).abs().max())
    allowed = CAST_TOLERANCE[dtype] * max(1.0, float(merged.abs().max()))
    if not merging <= max_difference:
        raise ValueError(f"the merged model differs from base and adapter by {merging:.2g} in a logit (allowed: "
                         f"merge.max_logit_difference {max_difference:.2g}): nothing is published")
    if not reloading <= allowed:
        raise ValueError(f"the model reloaded from disk differs from the merged one by {reloading:.2g} in a logit "
                         f"(allowed for {dtype}: {allowed:.2g}): nothing is published")
    return {"merge_difference": merging, "reload_difference": reloading, "largest_output": float(merged.abs().max())}


def _check_head(model: PeftModel, adapter: Path) -> None:
    """The trained head must be the one in use: PEFT would load an adapter without it in silence."""
    with safe_open(adapter / "adapter_model.safetensors", "pt") as tensors:
        names = [name for name in tensors.keys() if name.endswith("score.weight")]  # noqa: SIM118 (not a dict)
        if len(names) != 1:
            raise ValueError(f"{adapter} holds no score head: this reward adapter cannot be used")
        saved = tensors.get_tensor(names[0])
    used = model.base_model.model.score.modules_to_save["default"].weight
    if not torch.equal(saved.float(), used.detach().float().cpu()):
        raise ValueError(f"the score head of {adapter} was not loaded")
