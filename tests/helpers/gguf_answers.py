"""Compare a model's folder with llama.cpp on its GGUF file: tokens of texts, and greedy answers up to ties."""

from collections.abc import Sequence
from pathlib import Path

import torch

from stages.evaluation.llama_cpp import compare_with_llama_cpp
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import load_tokenizer
from stages.stackexchange.prompt import prompt_ids

MOST_PROMPT_TOKENS = 100


def count_differences(folder: Path, file: Path, texts: Sequence[str], questions: Sequence[str], answer_tokens: int,
                      model: torch.nn.Module | None = None) -> tuple[int, int]:
    """Count the texts with other tokens, and the questions with other greedy answers, in llama.cpp.

    model: that of the folder, if it is loaded.
    """
    tokenizer = load_tokenizer(folder)
    prompts = [prompt_ids(tokenizer, text)[:MOST_PROMPT_TOKENS] for text in questions]
    numbers, _ = compare_with_llama_cpp(model or load_causal(folder), tokenizer, file, texts, prompts, answer_tokens)
    print(numbers)
    return numbers["other_tokens"], numbers["other_answers"]
