"""Save models, tokenizers and configurations that other readers understand, too.

Transformers 5 names the tokenizer's class `TokenizersBackend`, which Transformers 4, and servers on it, do not have. It
writes the rotary embedding's settings as `rope_parameters`, where these readers look for `rope_theta` and
`rope_scaling`, and take their defaults in silence.
"""

import json
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stages.runtime.files import write_json
from stages.stackexchange.prompt import adds_bos, prompt_text

NEW_CLASS, OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, **how) -> None:
    """Save a whole model and its tokenizer; how: arguments of `save_pretrained`."""
    model.save_pretrained(out, **how)
    add_rope_of_transformers_4(out)
    save_tokenizer(tokenizer, out)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Save a tokenizer; its chat template is the prompt that the models of this project are trained with."""
    tokenizer.chat_template = chat_template(tokenizer)
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
