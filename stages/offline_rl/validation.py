"""Measure ILQL on held-out answers while it trains.

Shapes: N held-out answers.
"""

import torch

from stages.distributed import group
from stages.distributed.units import own_units, sum_in_order
from stages.modeling.packed.forward import chunk_by_length
from stages.offline_rl.dataset import ScoredAnswer
from stages.offline_rl.losses import LossSettings, token_losses, total_loss
from stages.offline_rl.model import ILQLModel

PREFIX = "validation_"


@torch.no_grad()
def measure_answers(
    model: ILQLModel, answers: list[ScoredAnswer], settings: LossSettings, forward_answers: int
) -> dict[str, float]:
    """Compute the mean losses per token, mean Q and V per token, and how the last Q of an answer agrees with its score.

    validation_score_correlation is Pearson's, of min Q_target at each answer's last token and its reward. The rows are
    shared among the processes. forward_answers: rows in one forward pass.
    """
    lengths = [len(row.prompt) + len(row.answer) for row in answers]
    sums, last_q = {}, torch.zeros(len(answers), dtype=torch.float64)
    chunks = list(chunk_by_length(lengths, forward_answers))
    for number, chunk in own_units(enumerate(chunks)):
        tokens = model([answers[i] for i in chunk])
        losses = token_losses(tokens, settings)
        target_q = tokens.target_q_values.amin(0)
        columns = torch.stack([total_loss(losses, settings), *losses.values(), target_q, tokens.values])
        sums[number] = columns.double().sum(1).cpu()
        ends = torch.tensor([len(answers[i].answer) for i in chunk]).cumsum(0) - 1
        last_q[torch.tensor(chunk)] = target_q.double().cpu()[ends]
    names = ("loss", "td", "expectile", "cql", "awac", "q", "v")
    means = sum_in_order(sums, len(chunks), len(names)) / sum(len(row.answer) for row in answers)
    rewards = torch.tensor([row.reward for row in answers], dtype=torch.float64)
    correlation = _correlation(group.sum_tensor(last_q), rewards)
    return {f"{PREFIX}{name}": value for name, value in zip(names, means.tolist(), strict=True)} | (
        {} if correlation is None else {f"{PREFIX}score_correlation": correlation})


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Return Pearson's correlation; None if one side does not vary."""
    if len(a) < 2 or not (a.std() > 0 and b.std() > 0):
        return None
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])
