"""Read from a tokenizer's own chat template what stands before and after a question.

A template is a program (Jinja) of whoever published the model. Transformers alone renders it, in a sandbox, and it
never sees a question: it is rendered once with a placeholder, and cut there. So what a question spells out stays text.
"""

from functools import lru_cache
from typing import NamedTuple

QUESTION, ANSWER = "THE-QUESTION-BEGINS-AND-ENDS", "THE-ANSWER-BEGINS-AND-ENDS"
# Llama's templates name the day. A prompt must not depend on when a run is made: they get theirs, and no clock.
WITHOUT_CLOCK = {"date_string": "26 Jul 2024", "strftime_now": ""}


class ChatFrame(NamedTuple):
    """Token ids before and after the question."""

    before: list[int]
    after: list[int]


def read_chat_frame(tokenizer) -> ChatFrame:
    """Return the frame of the tokenizer's template; ValueError, in one line, if its prompts cannot be used here."""
    return _read_frame(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _read_frame(tokenizer, template: str) -> ChatFrame:
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
    return ChatFrame(before, after)


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
