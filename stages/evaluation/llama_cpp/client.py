"""Load a GGUF file by llama.cpp (PyPI xllamacpp), behind its server on this machine."""

import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CONTEXT_TOKENS = 1024
ERRORS = 1  # the level of llama.cpp's log


class LlamaCpp:
    """A model that llama.cpp has loaded."""

    def __init__(self, address: str):
        self._address = address

    def tokenize(self, text: str) -> list[int]:
        """Encode a text, with BOS if the model wants one."""
        return self._post("/tokenize", {"content": text, "add_special": True})["tokens"]

    def next_logprobs(self, ids: list[int], most: int) -> dict[int, float]:
        """Return the log-probabilities of the `most` likeliest next tokens by id, in nats.

        A bias makes the sampled one a letter: a token that ends the text, or is part of a letter, has no reply. The
        log-probabilities are those without it.
        """
        letter = self.tokenize("a")[-1]
        reply = self._post("/completion", {"prompt": ids, "n_predict": 1, "n_probs": most, "temperature": 0.0,
                                           "cache_prompt": False, "logit_bias": [[letter, 1000.0]]})
        return {row["id"]: row["logprob"] for row in reply["completion_probabilities"][0]["top_logprobs"]}

    def continue_greedily(self, ids: list[int], most: int) -> list[int]:
        """Return the likeliest token after a prompt, and so on: at most `most`, or up to one that ends a text."""
        return self._post("/completion", {"prompt": ids, "n_predict": most, "temperature": 0.0, "cache_prompt": False,
                                          "return_tokens": True})["tokens"]

    def _post(self, path: str, value: dict) -> dict:
        request = urllib.request.Request(self._address + path, json.dumps(value).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
            return json.loads(reply.read())


def check_installed() -> None:
    """Raise ValueError, in one line, if llama.cpp is not installed."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise ValueError("llama.cpp (the package xllamacpp) is not installed: make extras")


@contextmanager
def load_llama_cpp(file: Path) -> Iterator[LlamaCpp]:
    """Load a GGUF file, on as many threads as torch has; keys and values of its cache are fp32."""
    import xllamacpp
    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = CONTEXT_TOKENS, 1, False, ERRORS
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(settings)
    try:
        yield LlamaCpp(server.listening_address)
    finally:
        del server
