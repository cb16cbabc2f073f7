"""Sample with vLLM in this process. Never run: written from the documentation of vLLM 0.30, tested with a stand-in.

It needs a CUDA GPU, on which vLLM keeps a copy of the weights beside the policy's. After every update the weights go to
vLLM through a folder (`reload_weights` with `weights_path`). vLLM states no bit-for-bit reproducibility: a resumed run
may differ.
"""

import os
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from stages.distributed import group
from stages.generation.engines.exported_weights import export_weights
from stages.generation.engines.external import SampledResponse, sample_own_rows
from stages.generation.engines.protocol import SamplingRequest
from stages.generation.rollout import Rollout

MEMORY_SHARE = 0.3  # of the card, for vLLM's weights and cache
DTYPES = {"fp32": "float32", "mixed": "float32", "bf16": "bfloat16"}


class VllmEngine:
    """vLLM's `LLM`, started with the first request. max_tokens: of the longest prompt with its response."""

    name = "vllm"

    def __init__(self, max_tokens: int):
        if group.world_size() > 1:
            raise ValueError("sampling_engine vllm samples in one process only: give --processes 1, or set "
                             "sampling_engine to own")
        self.vllm, self.max_tokens = _import_vllm(), max_tokens
        self._llm, self._folder = None, TemporaryDirectory(prefix="vllm-weights-")

    def sample(self, model, request: SamplingRequest, generator: torch.Generator) -> Rollout:
        """Sample as SamplingEngine.sample, from the weights that the model has now."""
        self._load(model, request.precision)
        return sample_own_rows(self._draw, request, generator, model.device)

    def _load(self, model, precision: str) -> None:
        """Give vLLM the model's weights, and forget the keys and values of the previous ones."""
        export_weights(model, Path(self._folder.name))
        if self._llm is None:
            self._llm = self.vllm.LLM(
                model=self._folder.name, skip_tokenizer_init=True, dtype=DTYPES[precision],
                max_model_len=self.max_tokens, gpu_memory_utilization=MEMORY_SHARE,
                logprobs_mode="processed_logprobs")  # those of the softmax at the temperature
            return
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": self._folder.name})
        self._llm.reset_prefix_cache()

    def _draw(self, request: SamplingRequest, seed: int) -> list[SampledResponse]:
        params = [
            self.vllm.SamplingParams(
                temperature=request.temperature, top_p=1.0, top_k=0, max_tokens=limit, seed=seed + row,
                stop_token_ids=list(request.stop_ids), ignore_eos=True, logprobs=0, detokenize=False)
            for row, limit in enumerate(request.max_new_tokens)]
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in request.prompts], params, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        return [SampledResponse(
            list(answer.token_ids),
            [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)])
            for answer in answers]


def _import_vllm():
    """Import vLLM, set to compute in this process; ValueError where it is not installed."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        return import_module("vllm")  # no dependency of the project: it wants an older numpy, and no test has run it
    except ImportError as error:
        raise ValueError(f"sampling_engine vllm: vLLM cannot be imported ({error}): see docs/gpu.md, or set "
                         f"sampling_engine to own") from None
