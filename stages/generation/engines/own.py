"""Sample with this project's sampler (generation/sampler.py)."""

import torch

from stages.generation.engines.protocol import SamplingRequest
from stages.generation.rollout import Rollout
from stages.generation.sampler import sample


class OwnEngine:
    """The sampler of this project. Its statistics per token are computed as the policy's are."""

    name = "own"

    def sample(self, model, request: SamplingRequest, generator: torch.Generator) -> Rollout:
        """Sample as SamplingEngine.sample; a row's tokens do not depend on the other rows."""
        return sample(model, generator=generator, **vars(request))
