"""Write a Modelfile, from which `ollama create` makes a model of a GGUF file."""

from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from stages.modeling.tokenizer import load_tokenizer
from stages.stackexchange.prompt import adds_bos, chat_prompt_ids

QUESTION = "{{ .Prompt }}"  # Ollama's templates are Go's, not the Jinja that the GGUF file has
# Ollama's names of what generation_config.json has.
PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "max_new_tokens": "num_predict"}


def render_modelfile(folder: Path, file_name: str, license_name: str | None) -> str:
    """Render a Modelfile for the GGUF file beside it: the prompt, its end, and the sampling of the model's folder.

    A chat template that has no such frame is left to Ollama, which knows some by their text.
    """
    tokenizer = load_tokenizer(folder)
    lines = [f"# ollama create NAME -f Modelfile   (one question at a time)\nFROM ./{file_name}"]
    if (prompt := _render_prompt(tokenizer)) is not None:
        lines.append(f'TEMPLATE """{prompt}{{{{ .Response }}}}{tokenizer.eos_token}"""')
    has_sampling = (folder / "generation_config.json").is_file()
    sampling = GenerationConfig.from_pretrained(folder) if has_sampling else GenerationConfig()
    if sampling.do_sample:
        lines += [f"PARAMETER {name} {getattr(sampling, key)}" for key, name in PARAMETERS.items()
                  if getattr(sampling, key) is not None]
    lines.append("PARAMETER repeat_penalty 1")
    ends = sampling.eos_token_id if isinstance(sampling.eos_token_id, list) else []
    lines += [f'PARAMETER stop """{tokenizer.decode([end])}"""' for end in ends if end != tokenizer.eos_token_id]
    if license_name:
        lines.append(f'LICENSE """{license_name}"""')
    return "\n".join(lines) + "\n"


def _render_prompt(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the text of a prompt without BOS, which the file says to add; None if it cannot be told."""
    if tokenizer.chat_template is None:
        return QUESTION
    try:
        ids = chat_prompt_ids(tokenizer, QUESTION)
    except ValueError:
        return None
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.removeprefix(tokenizer.bos_token) if adds_bos(tokenizer) else text
