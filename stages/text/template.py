"""The one prompt template, and the one way to turn question and answer into token ids.

Prompt and answer are encoded separately and joined, so that the prompt's ids are always a prefix of the whole's:
tokenised jointly, BPE could merge across the boundary, and a policy would be asked to go on from ids that
supervised fine-tuning never showed. Template of StackLLaMA (supervised_finetuning.py, prepare_sample_text).
"""

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


def adds_bos(tokenizer) -> bool:
    """Whether this tokenizer starts a text with BOS (LLaMA does, GPT-2 does not)."""
    return tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] and tokenizer.bos_token_id is not None


def _encode(tokenizer, text: str) -> list[int]:
    # A post may spell out "</s>" or "<s>": it is text, never a special token.
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
