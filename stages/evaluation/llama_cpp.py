"""Compare a GGUF file in llama.cpp with the folder it was made of: tokens of posts, probabilities, greedy answers.

llama.cpp (PyPI xllamacpp) loads the file, behind its server on this machine.
"""

import importlib.util
import json
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stages.evaluation.heldout_prompts import EvaluationPrompts
from stages.evaluation.policy_answers import AnswerScorer, sample_answers
from stages.modeling.families import max_positions
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import load_tokenizer, same_tokenizer
from stages.reward_modeling.scoring_file import read_no_model
from stages.runtime.progress import track
from stages.stackexchange.pairs.table import SPLITS, read_pairs

CONTEXT_TOKENS = 1024
ERRORS = 1  # the level of llama.cpp's log
POSTS, QUESTIONS, ANSWER_TOKENS = 1000, 50, 64
MAX_PROMPT_TOKENS = CONTEXT_TOKENS // 2
TIE_NATS = 0.02  # tokens that are so near are a tie: sums in another order choose either
LIKELIEST = 10  # tokens whose probabilities are compared after each prompt
JUDGES = ("judge-merged", "reward-merged")  # of a run, the better one first


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


def compare_with_llama_cpp(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: Path, posts: Sequence[str],
                           prompts: Sequence[list[int]], answer_tokens: int = ANSWER_TOKENS
                           ) -> tuple[dict[str, float], list[list[int]]]:
    """Count the posts with other tokens and the prompts with other greedy answers, ties apart, in llama.cpp.

    The differences in nats, their mean and the largest, are those of the log-probabilities of the LIKELIEST tokens
    after each prompt.

    Returns: the numbers by name, and llama.cpp's answers, as ids.
    """
    answers, differs, nats = [], [], []
    with load_llama_cpp(file) as llama_cpp:
        other_tokens = sum(tokenizer(text).input_ids != llama_cpp.tokenize(text) for text in posts)
        for prompt in track(prompts, "export_gguf: llama.cpp", len(prompts), "answers"):
            answers.append(llama_cpp.continue_greedily(prompt, answer_tokens))
            logprobs = _answer_logprobs(model, prompt, answers[-1])
            differs.append(not _is_greedy(model.config, logprobs, answers[-1], answer_tokens))
            nats.append(_compare_logprobs(logprobs[0], llama_cpp, prompt))
    nats = torch.stack(nats)
    return {"posts": len(posts), "other_tokens": other_tokens, "answers": len(answers), "other_answers": sum(differs),
            "mean_nats": float(nats.mean()), "most_nats": float(nats.max())}, answers


@torch.no_grad()
def _answer_logprobs(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Compute the log-probabilities [T, V] of every token at each place of an answer of T tokens."""
    ids = torch.tensor([prompt + answer], device=model.device)
    logits = model(input_ids=ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
    return torch.log_softmax(logits.double().cpu(), -1)


def _compare_logprobs(logprobs: torch.Tensor, llama_cpp: LlamaCpp, prompt: list[int]) -> torch.Tensor:
    """Return the differences [LIKELIEST], in nats, of the likeliest first tokens' log-probabilities [V]."""
    theirs = llama_cpp.next_logprobs(prompt, LIKELIEST)
    return (logprobs[list(theirs)] - torch.tensor(list(theirs.values()), dtype=torch.double)).abs()


def _is_greedy(config, logprobs: torch.Tensor, answer: list[int], answer_tokens: int) -> bool:
    """Check that each token of an answer is the likeliest, up to ties, and that a short one ends with EOS or pad.

    llama.cpp takes <|endoftext|> for an end, too, which is the pad of SmolLM2.
    """
    chosen = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
    is_whole = len(answer) == answer_tokens or answer[-1] in (config.eos_token_id, config.pad_token_id)
    return is_whole and bool((logprobs.amax(1) - chosen <= TIE_NATS).all())


def check_export(folder: Path, file: Path, run: Path, is_exact: bool) -> dict:
    """Compare on posts and held-out questions of a run, and score the answers by its judge; return the numbers.

    Args:
        is_exact: whether the file must give the folder's answers. Its tokens must always be the folder's.

    Raises ValueError, in one line, where they differ.
    """
    model, tokenizer = load_causal(folder), load_tokenizer(folder)
    rows = chain.from_iterable(read_pairs(run / "pairs", split, ["question", "response_j"]) for split in SPLITS[::-1])
    posts = list(islice(dict.fromkeys(chain.from_iterable(row.values() for row in rows)), POSTS))
    questions = EvaluationPrompts(
        run / "pairs", SPLITS[-1], tokenizer, prompts=QUESTIONS, selection_prompts=0, seed=0,
        max_prompt_tokens=MAX_PROMPT_TOKENS, max_response_tokens=ANSWER_TOKENS, longest=max_positions(folder))
    numbers, answers = compare_with_llama_cpp(model, tokenizer, file, posts, questions.prompts)
    if numbers["other_tokens"] or (is_exact and numbers["other_answers"]):
        raise ValueError(f"llama.cpp gives other tokens for {numbers['other_tokens']} of {len(posts)} posts, and other "
                         f"answers to {numbers['other_answers']} of {len(answers)} questions, than {folder}: "
                         f"nothing is published")
    return numbers | _score(model, tokenizer, run, questions.prompts, answers)


def _score(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, run: Path, prompts: list[list[int]],
           answers: list[list[int]]) -> dict:
    """Score llama.cpp's answers, and the folder's greedy ones, by the run's judge or else by its reward model."""
    judge = next((run / name for name in JUDGES if (run / name).is_dir() and not read_no_model(run / name)), None)
    if judge is None or not same_tokenizer(judge, tokenizer):
        return {"judge": None}
    own = sample_answers(model, tokenizer, prompts, batch_prompts=QUESTIONS, max_new_tokens=ANSWER_TOKENS,
                         temperature=0.0, seed=0, label="export_gguf: the folder's answers").responses
    scores = AnswerScorer(precision="fp32", batch_texts=QUESTIONS).score(
        judge, {"llama.cpp": (prompts, answers), "folder": (prompts, own)})
    return {"judge": judge.name, "reward": float(scores["llama.cpp"].mean()),
            "reward_of_folder": float(scores["folder"].mean())}
