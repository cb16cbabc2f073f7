"""Save models, tokenizers and configurations that other readers understand, too.

Transformers 5 names the tokenizer's class `TokenizersBackend`, which Transformers 4, and servers on it, do not have. It
writes the rotary embedding's settings as `rope_parameters`, where these readers look for `rope_theta` and
`rope_scaling`, and take their defaults in silence. Without sampling settings in generation_config.json, both decode
greedily up to 20 tokens, and sample from the 50 most likely tokens only.
"""

import json
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from stages.runtime.files import write_json
from stages.stackexchange.prompt import adds_bos, prompt_text

CHAT_TEMPLATE = "chat_template.jinja"
NEW_CLASS, OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"
# What a stage samples with if its settings do not say; named as in the recipe's section `ppo`.
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_response_tokens": 128, "stop_ids": None}


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, **how) -> None:
    """Save a whole model and its tokenizer; how: arguments of `save_pretrained`."""
    model.save_pretrained(out, **how)
    add_rope_of_transformers_4(out)
    save_tokenizer(tokenizer, out)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, out: Path, template: str | None = None) -> None:
    """Save a tokenizer; its chat template is the prompt that the models of this project are trained with.

    template: another chat template of this prompt.
    """
    save_chat_template(tokenizer, out, template or chat_template(tokenizer))


def save_chat_template(tokenizer: PreTrainedTokenizerBase, out: Path, template: str | None) -> None:
    """Save a tokenizer, perhaps again, with this chat template, or none.

    A policy trained on plain prompts has the base's own.
    """
    (out / CHAT_TEMPLATE).unlink(missing_ok=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(out)
    file = out / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == NEW_CLASS:
        write_json(file, config | {"tokenizer_class": OLD_CLASS})


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the Jinja template of a question and its answer, the same text as `prompt_text` gives."""
    question = prompt_text("{{ message['content'] }}").replace("\n", "{{ '\\n' }}")
    start = "{{ bos_token }}" if adds_bos(tokenizer) else ""
    return (f"{start}{{% for message in messages %}}{{% if message['role'] == 'user' %}}{question}"
            "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}")


def set_generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: dict) -> None:
    """Make `generate` sample as a stage with these settings did; other keys than those of SAMPLING are ignored.

    EOS always ends an answer, beside `stop_ids`.
    """
    sampling = SAMPLING | {name: settings[name] for name in SAMPLING if name in settings}
    ends = list(dict.fromkeys([tokenizer.eos_token_id, *(sampling["stop_ids"] or ())]))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=sampling["temperature"], top_k=sampling["top_k"], top_p=sampling["top_p"],
        max_new_tokens=sampling["max_response_tokens"], eos_token_id=ends if len(ends) > 1 else ends[0],
        bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id)


def add_rope_of_transformers_4(out: Path) -> None:
    """Repeat in config.json the rotary embedding's settings under their older names."""
    file = out / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        return  # no rotary embedding, or one for each kind of layer, which has no older name
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    older = {"rope_theta": parameters["rope_theta"],
             "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling}
    write_json(file, older | config)
