"""Sample with Transformers' continuous batching: a paged key-value cache, and a new row for each that has ended.

Memory is stated, not inferred, so that it also runs on a CPU. Attention is torch's scaled_dot_product_attention with a
mask over the keys of all rows: the work of a decoding step grows with the square of the rows. Transformers would take
FlashAttention where it is installed, or download it: that is turned off.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from stages.generation.engines.external import SampledResponse, sample_own_rows
from stages.generation.engines.protocol import SamplingRequest
from stages.generation.rollout import Rollout
from stages.generation.sampler import rollout_mode
from stages.modeling.families import caps_attention
from stages.modeling.lora import unwrap_peft

PAGE_TOKENS = 16
BATCH_TOKENS = 512  # of prompts in one forward pass: the mask is this wide and as long as the cache
ATTENTION = "sdpa"
NO_STOP_ID = -1
WAIT_SECONDS = 1.0  # for a response, before looking whether the engine is still at work


class ContinuousBatchingEngine:
    """Transformers' `generate_batch`, with all requests queued before it starts: its schedule is then the same always.
    """

    name = "transformers"

    def sample(self, model, request: SamplingRequest, generator: torch.Generator) -> Rollout:
        """Sample as SamplingEngine.sample; a row's tokens depend on the other rows, as they share random numbers."""
        inner = unwrap_peft(model)
        return sample_own_rows(lambda part, seed: _draw(inner, part, seed), request, generator, inner.device)


def _draw(model: PreTrainedModel, request: SamplingRequest, seed: int) -> list[SampledResponse]:
    """Sample a response to each prompt; the model and torch's random state are afterwards as before."""
    devices = [model.device] if model.device.type == "cuda" else []
    with rollout_mode(model), _unpacked_attention(model), torch.random.fork_rng(devices):
        manager = model.init_continuous_batching(
            generation_config=_generation_config(request), continuous_batching_config=_memory(request, seed))
        for number, (prompt, limit) in enumerate(zip(request.prompts, request.max_new_tokens, strict=True)):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=limit)
        manager.start()
        try:
            return _responses(manager, len(request.prompts))
        finally:
            manager.stop(block=True)
            manager.destroy()


@contextmanager
def _unpacked_attention(model: PreTrainedModel) -> Iterator[None]:
    """Compute attention by torch's function, which the paged cache serves, and afterwards as before."""
    previous = model.config._attn_implementation
    if caps_attention(model.config):
        raise ValueError(f"sampling_engine transformers leaves out the cap on the attention scores of "
                         f"{model.config.model_type} models: set sampling_engine to own")
    model.set_attn_implementation(ATTENTION)
    try:
        if model.config._attn_implementation != ATTENTION:  # Transformers only warns
            raise ValueError(f"sampling_engine transformers cannot replace the attention of "
                             f"{model.config.model_type} models: set sampling_engine to own")
        yield
    finally:
        model.set_attn_implementation(previous)


def _generation_config(request: SamplingRequest) -> GenerationConfig:
    """State every setting that changes the distribution: Transformers' default is top-k 50."""
    return GenerationConfig(
        do_sample=True, temperature=request.temperature, top_k=0, top_p=1.0,
        eos_token_id=list(request.stop_ids) or NO_STOP_ID)


def _memory(request: SamplingRequest, seed: int) -> ContinuousBatchingConfig:
    """Size the cache for all rows at full length, so that none has to leave it."""
    rows = len(request.prompts)
    lengths = [len(prompt) + limit for prompt, limit in zip(request.prompts, request.max_new_tokens, strict=True)]
    return ContinuousBatchingConfig(
        page_size=PAGE_TOKENS, num_blocks=sum(math.ceil(length / PAGE_TOKENS) + 1 for length in lengths),
        max_batch_tokens=max(BATCH_TOKENS, rows), max_requests_per_batch=rows, max_blocks_per_request=0,
        allow_block_sharing=request.share_prefixes, use_async_batching=False, use_cuda_graph=False,
        auto_switch_to_flash=False, disable_nccl_graph_mixing=False, return_logprobs=True, seed=seed)


def _responses(manager, count: int) -> list[SampledResponse]:
    """Wait for all responses; return them in the order of their prompts."""
    outputs = {}
    while len(outputs) < count:
        output = manager.get_result(timeout=WAIT_SECONDS)
        if output is not None:
            outputs[output.request_id] = output
        if (output is None and not manager.is_running()) or (output is not None and output.error):
            reason = output.error if output is not None else "it ended early"
            raise ValueError(f"sampling_engine transformers failed: {' '.join(str(reason).split())[:300]}; set "
                             f"sampling_engine to own")
    in_order = [outputs[str(number)] for number in range(count)]
    return [SampledResponse(list(output.generated_tokens), list(output.logprobs)) for output in in_order]
