"""Build the sampling engine that the recipe names."""

from stages.generation.engines.continuous_batching import ContinuousBatchingEngine
from stages.generation.engines.own import OwnEngine
from stages.generation.engines.protocol import SamplingEngine
from stages.generation.engines.vllm import VllmEngine


def build_engine(name: str, max_tokens: int) -> SamplingEngine:
    """Build an engine; ValueError if it cannot be used here. max_tokens: of the longest prompt with its response."""
    if name == "vllm":
        return VllmEngine(max_tokens)
    return ContinuousBatchingEngine() if name == "transformers" else OwnEngine()
