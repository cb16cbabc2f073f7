"""The one prompt template, and the one way to turn question and answer into token ids.

Prompt and answer are encoded separately and joined, so that the prompt's ids are always a prefix of the whole's:
tokenised jointly, BPE could merge across the boundary, and a policy would be asked to go on from ids that
supervised fine-tuning never showed. Template of StackLLaMA (supervised_finetuning.py, prepare_sample_text).
"""

from collections.abc import Iterable, Iterator
from itertools import islice

ENCODED_AT_ONCE = 1000  # texts
BEFORE, AFTER = "Question: ", "\n\nAnswer: "


def prompt_text(question: str) -> str:
    """What stands before the answer."""
    return f"{BEFORE}{question}{AFTER}"


def prompt_ids(tokenizer, question: str) -> list[int]:
    """Token ids of the prompt, with BOS where the tokenizer uses one."""
    start = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    return start + _encode(tokenizer, prompt_text(question))


def question_of(tokenizer, prompt: list[int]) -> str:
    """The question that `prompt_ids` put into these token ids; ValueError when they are not of its making."""
    text = tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if not (text.startswith(BEFORE) and text.endswith(AFTER)):
        raise ValueError(f"a prompt does not have the template's shape: {text[:80]!r}")
    return text[len(BEFORE) : -len(AFTER)]


def answer_ids(tokenizer, answer: str) -> list[int]:
    """Token ids of the answer, closed by EOS."""
    return _encode(tokenizer, answer) + [tokenizer.eos_token_id]


def pair_ids(tokenizer, question: str, answer: str) -> list[int]:
    """Token ids of prompt and answer: BOS, prompt, answer, EOS."""
    return prompt_ids(tokenizer, question) + answer_ids(tokenizer, answer)


def encoded(tokenizer, texts: Iterable[tuple[str, str]]) -> Iterator[tuple[list[int], list[int]]]:
    """`prompt_ids` and `answer_ids` of questions with answers, many in one call of the tokenizer."""
    texts = iter(texts)
    start, end = [tokenizer.bos_token_id] if adds_bos(tokenizer) else [], [tokenizer.eos_token_id]
    while held := list(islice(texts, ENCODED_AT_ONCE)):
        prompts = _encode(tokenizer, [prompt_text(question) for question, _ in held])
        answers = _encode(tokenizer, [answer for _, answer in held])
        yield from ((start + prompt, answer + end) for prompt, answer in zip(prompts, answers, strict=True))


def adds_bos(tokenizer) -> bool:
    """Whether this tokenizer starts a text with BOS (LLaMA does, GPT-2 does not)."""
    return tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] and tokenizer.bos_token_id is not None


def _encode(tokenizer, text: str | list[str]) -> list:
    # A post may spell out "</s>" or "<s>": it is text, never a special token.
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
