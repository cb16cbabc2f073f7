"""Golden values of trl 1.16.0's DPOTrainer: its own loss, on a trainer that was never initialised.

trl 1.16.0 is in the project's own environment (README.md). Everything in float64.
"""

from collections import defaultdict
from types import SimpleNamespace

import common
import numpy as np
import torch
from trl import DPOTrainer

PAIRS, COLUMNS = 6, 9
BETAS = {"sigmoid": (0.05, 0.1, 0.7), "ipo": (0.05, 0.1, 0.7)}


def inputs(seed: int = 20261122) -> dict:
    """Log-probabilities [6, 9] of the tokens of better and worse answers under policy and reference, and lengths."""
    generator = np.random.default_rng(seed)
    arrays = {}
    for side in ("better", "worse"):
        arrays[f"{side}_tokens"] = generator.integers(1, COLUMNS + 1, PAIRS)
        mask = np.arange(COLUMNS) < arrays[f"{side}_tokens"][:, None]
        arrays[f"{side}_ref"] = generator.normal(-2.0, 0.8, (PAIRS, COLUMNS)) * mask
        arrays[side] = (arrays[f"{side}_ref"] + generator.normal(0.1, 0.7, (PAIRS, COLUMNS))) * mask
    return arrays


def trainer(loss: str, beta: float) -> DPOTrainer:
    """With the attributes that the loss reads, and nothing else."""
    made = object.__new__(DPOTrainer)
    same = lambda value: value  # noqa: E731
    made.model = SimpleNamespace(training=True)
    made.accelerator = SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)
    made.aux_loss_enabled = made.use_weighting = False
    made.precompute_ref_logps, made.ld_alpha, made.f_divergence_type = True, None, "reverse_kl"
    made.loss_types, made.loss_weights, made.beta, made.label_smoothing = [loss], [1.0], beta, 0.0
    made._metrics, made._total_train_tokens, made._tp_size = {"train": defaultdict(list)}, 0, 1
    return made


def compute(loss: str, beta: float, x: dict, pairs: slice) -> tuple[torch.Tensor, dict, torch.Tensor]:
    """The trainer's loss of some pairs, its metrics, and the loss's gradient for the tokens' log-probabilities."""
    rows = {name: torch.tensor(value)[pairs] for name, value in x.items()}
    logprobs = torch.cat([rows["better"], rows["worse"]]).requires_grad_()
    lengths = torch.cat([rows["better_tokens"], rows["worse_tokens"]])[:, None]
    columns = torch.arange(1 + COLUMNS)  # one token of the prompt comes first
    completion = ((columns >= 1) & (columns <= lengths)).long()
    zeros = torch.zeros_like(logprobs)
    outputs = SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    batch = {"input_ids": torch.ones_like(completion), "attention_mask": torch.ones_like(completion),
             "completion_mask": completion, "ref_chosen_logps": rows["better_ref"].sum(1),
             "ref_rejected_logps": rows["worse_ref"].sum(1)}
    made = trainer(loss, beta)
    value = made._compute_loss(lambda **_: outputs, batch, False)
    (gradient,) = torch.autograd.grad(value, [logprobs])
    return value.detach(), {name: value[0] for name, value in made._metrics["train"].items()}, gradient


def main() -> None:
    x, values = inputs(), {}
    for loss, betas in BETAS.items():
        for beta in betas:
            mean, metrics, gradient = compute(loss, beta, x, slice(None))
            each = torch.stack([compute(loss, beta, x, slice(i, i + 1))[0] for i in range(PAIRS)])
            values[f"{loss} {beta}"] = {
                "mean": mean, "losses": each, "gradient": gradient,
                "metrics": {name: number for name, number in metrics.items() if name.startswith(("rewards", "logps"))}}
    common.write(__file__, ("trl", "transformers", "torch", "numpy"), {"inputs": x, "values": values})


if __name__ == "__main__":
    main()
