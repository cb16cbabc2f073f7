"""Prompts by a tokenizer's own chat template: the prefix property, questions as text, and every refusal."""

import pytest

from stages.stackexchange.prompt import answer_ids, encode_prompt, parse_question
from tests.helpers import tiny_models

# As ChatML (Qwen, SmolLM), with this tokenizer's special tokens; and Llama's, which names the day.
CHATML = ("{% if messages[0]['role'] != 'system' %}<s>system\nYou are helpful.</s>\n{% endif %}{% for m in messages %}"
          "<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
          "{% if add_generation_prompt %}<s>assistant\n{% endif %}")
LLAMA = ("{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}<s>Today: "
         "{{ date_string }}{% for m in messages %}<pad>{{ m['role'] }}<pad>\n\n"
         "{{ m['content'] | trim }}</s>{% endfor %}{% if add_generation_prompt %}<pad>assistant<pad>\n\n{% endif %}")
TEXTS = ["which flag?", " use it\n", "", "</s> ends it, <s>user\nand <pad>", "é 漢字", "{{ messages }} {% for %}"]


def tokenizer_with(template):
    tok = tiny_models.tokenizer()
    tok.chat_template = template
    return tok


def render(tok, messages, **more):
    return tok.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024", **more)


@pytest.mark.parametrize("template", [CHATML, LLAMA])
@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_is_the_templates_and_a_prefix_of_prompt_and_answer(template, text):
    tok = tokenizer_with(template)
    prompt = encode_prompt(tok, text, "chat")
    messages = [{"role": "user", "content": text}]
    whole = [*messages, {"role": "assistant", "content": "use the flag"}]
    if text == text.strip():
        assert tok.decode(prompt) == render(tok, messages, add_generation_prompt=True)
        assert tok.decode(prompt + answer_ids(tok, "use the flag")) == render(tok, whole).rstrip()
    assert (prompt + answer_ids(tok, "use the flag"))[: len(prompt)] == prompt
    assert parse_question(tok, prompt, "chat") == text


def test_special_tokens_of_the_template_are_special_and_those_of_a_question_are_text():
    tok = tokenizer_with(CHATML)
    plain, spelt = (encode_prompt(tok, text, "chat") for text in ("x", "x </s> <s> <pad>"))
    for token in (tok.bos_token_id, tok.eos_token_id, tok.pad_token_id):
        assert plain.count(token) == spelt.count(token)
    assert plain.count(tok.bos_token_id) == 3 and plain.count(tok.eos_token_id) == 2


def test_a_prompt_does_not_depend_on_the_day():
    tok = tokenizer_with(LLAMA)
    assert "Today: 26 Jul 2024" in tok.decode(encode_prompt(tok, "x", "chat"))


@pytest.mark.parametrize(("template", "message"), [
    (None, "the tokenizer has no chat template"),
    (CHATML.replace("</s>\n{% endfor", "<end>\n{% endfor"), r"but with '.*<end>'"),
    (CHATML.replace("m['content']", "m['content'] | lower"), "does not give the question once, as it is"),
    (CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['content'] }}"), "once, as it is"),
    ("{{ raise_exception('no users') }}", "cannot be rendered: no users"),
    (LLAMA.replace("{{ date_string }}", "{{ strftime_now('%d') }}"), "it names the day, so that prompts would change"),
    ("{% for", "cannot be rendered"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered: .*unsafe"),
])
def test_a_template_that_cannot_be_used_is_refused_in_a_line(template, message):
    with pytest.raises(ValueError, match=message) as error:
        encode_prompt(tokenizer_with(template), "x", "chat")
    assert "\n" not in str(error.value)


def test_a_prompt_of_another_form_is_not_parsed():
    tok = tokenizer_with(CHATML)
    with pytest.raises(ValueError, match="does not have the shape of the tokenizer's chat template"):
        parse_question(tok, encode_prompt(tok, "x"), "chat")
