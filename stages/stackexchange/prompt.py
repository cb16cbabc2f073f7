"""Format prompts and encode questions and answers; every stage uses this template and this encoding.

Prompt and answer are encoded separately and concatenated, so that the prompt's ids are always a prefix of the whole.
Encoded together, BPE could merge across the boundary, and a policy would continue from ids that supervised fine-tuning
never saw. The template is StackLLaMA's (supervised_finetuning.py, prepare_sample_text).

A tokenizer's own chat template is a program (Jinja) of whoever published the model. Transformers alone renders it, in a
sandbox, and it never sees a question: it is rendered once with a placeholder, and cut there. So what a question spells
out stays text.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Literal

QUESTION, ANSWER = "THE-QUESTION-BEGINS-AND-ENDS", "THE-ANSWER-BEGINS-AND-ENDS"
# Llama's templates name the day. A prompt must not depend on when a run is made: they get theirs, and no clock.
WITHOUT_CLOCK = {"date_string": "26 Jul 2024", "strftime_now": ""}
# How a prompt is made of a text: 'none' takes it as it is, 'chat' puts it into the tokenizer's own chat template.
Template = Literal["question", "none", "chat"]
BATCH_TEXTS = 1000
PROMPT_PREFIX, PROMPT_SUFFIX = "Question: ", "\n\nAnswer: "


def prompt_text(question: str) -> str:
    """Format the text before the answer."""
    return f"{PROMPT_PREFIX}{question}{PROMPT_SUFFIX}"


def prompt_ids(tokenizer, question: str) -> list[int]:
    """Encode the prompt, with BOS if the tokenizer adds one."""
    start = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    return start + _encode(tokenizer, prompt_text(question))


def plain_prompt_ids(tokenizer, text: str) -> list[int]:
    """Encode a user's own prompt as it is, with one BOS if the tokenizer adds one.

    Special tokens written out in it, as those of a chat template, are read as such.
    """
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return ids if not adds_bos(tokenizer) or ids[:1] == [tokenizer.bos_token_id] else [tokenizer.bos_token_id, *ids]


def chat_prompt_ids(tokenizer, text: str) -> list[int]:
    """Encode a text as the user's message in the tokenizer's own chat template, up to where the answer begins."""
    before, after = read_chat_frame(tokenizer)
    return before + _encode(tokenizer, text) + after


def encode_prompt(tokenizer, text: str, template: Template = "question") -> list[int]:
    """Encode a prompt by the recipe's prompt_template."""
    encode = {"question": prompt_ids, "none": plain_prompt_ids, "chat": chat_prompt_ids}[template]
    return encode(tokenizer, text)


def parse_question(tokenizer, prompt: list[int], template: Template = "question") -> str:
    """Decode a prompt and return its question; with template 'none', its text without the BOS at its start.

    Raises ValueError if it does not follow the template.
    """
    if template == "none":
        if adds_bos(tokenizer) and prompt[:1] == [tokenizer.bos_token_id]:
            prompt = prompt[1:]
        return tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if template == "chat":
        before, after = read_chat_frame(tokenizer)
        if prompt[: len(before)] != before or prompt[len(prompt) - len(after) :] != after:
            raise ValueError("a prompt does not have the shape of the tokenizer's chat template")
        return tokenizer.decode(prompt[len(before) : len(prompt) - len(after)], skip_special_tokens=False,
                                clean_up_tokenization_spaces=False)
    text = tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if not (text.startswith(PROMPT_PREFIX) and text.endswith(PROMPT_SUFFIX)):
        raise ValueError(f"a prompt does not have the template's shape: {text[:80]!r}")
    return text[len(PROMPT_PREFIX) : -len(PROMPT_SUFFIX)]


def answer_ids(tokenizer, answer: str) -> list[int]:
    """Encode the answer, with EOS at its end."""
    return _encode(tokenizer, answer) + [tokenizer.eos_token_id]


def encode_examples(tokenizer, texts: Iterable[tuple[str, str]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the `prompt_ids` and `answer_ids` of (question, answer) texts, encoded in batches."""
    texts = iter(texts)
    start, end = [tokenizer.bos_token_id] if adds_bos(tokenizer) else [], [tokenizer.eos_token_id]
    while batch := list(islice(texts, BATCH_TEXTS)):
        prompts = _encode(tokenizer, [prompt_text(question) for question, _ in batch])
        answers = _encode(tokenizer, [answer for _, answer in batch])
        yield from ((start + prompt, answer + end) for prompt, answer in zip(prompts, answers, strict=True))


def adds_bos(tokenizer) -> bool:
    """Return whether the tokenizer starts a text with BOS (LLaMA's does, GPT-2's does not)."""
    return tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] and tokenizer.bos_token_id is not None


def _encode(tokenizer, text: str | list[str]) -> list:
    # A post may spell out "</s>" or "<s>": it is text, never a special token.
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def read_chat_frame(tokenizer) -> tuple[list[int], list[int]]:
    """Return the token ids that the tokenizer's chat template puts before and after the question.

    Raises ValueError, in one line, if its prompts cannot be used here.
    """
    return _read_frame(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _read_frame(tokenizer, template: str) -> tuple[list[int], list[int]]:
    if tokenizer.chat_template is None:
        raise ValueError("prompt_template 'chat': the tokenizer has no chat template; set it to question or none, or "
                         "take a model that was tuned to follow instructions")
    question = {"role": "user", "content": QUESTION}
    prompt = _render(tokenizer, [question], add_generation_prompt=True)
    whole = _render(tokenizer, [question, {"role": "assistant", "content": ANSWER}])
    if prompt.count(QUESTION) != 1:
        raise ValueError("prompt_template 'chat': the tokenizer's chat template does not give the question once, as it "
                         "is; set prompt_template to question or none")
    end = whole.removeprefix(prompt).rstrip()
    if not whole.startswith(prompt) or end != ANSWER + tokenizer.eos_token:
        raise ValueError(f"prompt_template 'chat': the tokenizer's chat template does not continue its prompt with the "
                         f"answer and EOS ({tokenizer.eos_token}), but with {end[-60:]!r}: what is learnt would not be "
                         f"what the template makes of it; set prompt_template to question or none")
    before, after = (tokenizer(part, add_special_tokens=False).input_ids for part in prompt.split(QUESTION))
    return before, after


def _render(tokenizer, messages: list[dict], **options) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, enable_thinking=False, **WITHOUT_CLOCK, **options)
    except Exception as error:  # in a template from elsewhere anything may be wrong
        words = " ".join(str(error).split()) or type(error).__name__
        if "'str' object is not callable" in words and "strftime_now" in str(tokenizer.chat_template):
            words = "it names the day, so that prompts would change with it; set prompt_template to question or none"
        raise ValueError(f"prompt_template 'chat': the tokenizer's chat template cannot be rendered: {words[:200]}"
                         ) from error
