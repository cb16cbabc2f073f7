"""Sample with an engine outside of this project: its seed, the rows of each process, and the rollout it makes.

Shapes: B rows, R tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from stages.distributed import group
from stages.generation.engines.protocol import SamplingRequest
from stages.generation.rollout import Rollout


class SampledResponse(NamedTuple):
    """A response, with the stop id that ended it, if one did, and the engine's log-probability of each token."""

    token_ids: list[int]
    logprobs: list[float]


def sample_own_rows(
    draw: Callable[[SamplingRequest, int], Sequence[SampledResponse]], request: SamplingRequest,
    generator: torch.Generator, device: torch.device,
) -> Rollout:
    """Sample this process's rows by `draw(request, seed)`; return the rollout of the rows of all processes.

    The seed is drawn from `generator`, which is the same in all processes, and counted up by process: with another
    number of processes the responses are others.
    """
    seed = int(torch.randint(2**31 - 1, (1,), generator=generator)) + group.rank()
    own = group.own_rows(len(request.prompts))
    part = draw(request.select(own), seed) if own else []
    responses = group.gather_in_order([response.token_ids for response in part])
    logprobs = group.gather_in_order([response.logprobs for response in part])
    ended = [response[-1] in request.stop_ids for response in responses]
    padded = pad_sequence(list(map(torch.tensor, logprobs)), batch_first=True)
    return Rollout(request.prompts, responses, ended, sampler_logprobs=padded.to(device))
