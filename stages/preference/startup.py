"""Check, before the first step, that the untrained policy and the stored reference are the same model."""

from dataclasses import dataclass

import torch

from stages.modeling.load import autocast
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.preference.logprobs import ReferencedExample
from stages.preference.loss import PreferenceLoss

PROBE_EXAMPLES = 8
# Largest difference, mean nats a token of an answer. Rounding gives 1e-6 in fp32 and 1e-2 in bf16; another model 0.1
# and more.
LIMITS = {"fp32": 1e-3} | dict.fromkeys(("mixed", "bf16", "int8", "nf4"), 0.1)


@dataclass(frozen=True)
class StartupReport:
    """Results of the checks, under the names of startup.json.

    expected_loss: where policy and reference agree to the last bit.
    """

    examples: int
    largest_difference_nats_per_token: float
    largest_implicit_reward: float
    loss: float
    expected_loss: float

    def __str__(self) -> str:
        """Format as the line of the checks."""
        return (f"policy equals reference  {self.largest_difference_nats_per_token:.2g} nats a token, implicit rewards "
                f"at most {self.largest_implicit_reward:.2g}, loss {self.loss:.4f} (expected {self.expected_loss:.4f})"
                f"  ok")


@torch.no_grad()
def check_start(model, rows: list[ReferencedExample], loss: PreferenceLoss, precision: str) -> StartupReport:
    """Compare the policy with the reference on the first rows; ValueError if they differ by more than rounding.

    The policy is computed with one sequence an answer (`response_logprobs`), unlike the reference, whose answers share
    their question's tokens.
    """
    rows = rows[:PROBE_EXAMPLES]
    texts = [(row.example.prompt, answer) for row in rows for answer in row.example.answers]
    with autocast(precision):
        tokens = response_logprobs(model, *map(list, zip(*texts, strict=True)), 1.0)
    logprobs = torch.stack([row.sum() for row in tokens])
    ratios = logprobs - torch.tensor([ref for row in rows for ref in row.ref_logprobs])
    difference = max(float((ratio / len(row)).abs()) for ratio, row in zip(ratios, tokens, strict=True))
    if not difference <= LIMITS[precision]:
        raise ValueError(f"the policy differs from its reference before the first step, by {difference:.2g} nats a "
                         f"token (limit {LIMITS[precision]:g}): delete the unfinished artifact's folder and begin anew")
    equal = torch.tensor([ref for row in rows for ref in row.ref_logprobs])
    return StartupReport(len(rows), difference, loss.beta * float(ratios.abs().max()),
                         float(loss.losses(logprobs, rows).mean()), float(loss.losses(equal, rows).mean()))
