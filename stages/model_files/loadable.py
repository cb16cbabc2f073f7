"""Check, before the first stage of a run, that a base can be loaded: from configuration and headers alone."""

from pathlib import Path

from stages.model_files.gguf_header import is_gguf, read_gguf_header
from stages.model_files.safetensors_header import read_header
from stages.runtime.files import read_json_object

ADAPTER_CONFIG = "adapter_config.json"  # PEFT's
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")  # one of them


def check_whole_model(folder: Path | str) -> None:
    """Raise ValueError if the folder holds an adapter.

    Transformers would load its base with it, and a new adapter would then take its place: training, with all checks
    content, would start from the base.
    """
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        merged = folder.with_name(f"{folder.name}-merged")
        advice = f"give {merged}" if merged.is_dir() else f"merge it first: python -m stages.merge --adapter {folder}"
        raise ValueError(f"{folder} is an adapter, and a whole model is needed here: {advice}")


def check_base_files(model: str) -> None:
    """Raise ValueError, in one line, for a local folder or GGUF file that the stage `base` could not load.

    A hub id is not looked at.
    """
    if is_gguf(model):
        read_gguf_header(Path(model))
    elif Path(model).is_dir():
        _check_folder(Path(model))


def _check_folder(folder: Path) -> None:
    check_whole_model(folder)
    problems: list[str] = []
    config = read_json_object(folder / "config.json", problems)
    if config is None or "model_type" not in config:
        reason = problems[0] if problems else "config.json names no model_type"
        raise ValueError(f"{folder} holds no model that Transformers can load: {reason}")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{folder} has no .safetensors weights; pickled weights are never loaded. Convert it with "
                         f"save_pretrained(..., safe_serialization=True)")
    for file in weights:
        _check_weights(file)
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): copy it there")


def _check_weights(file: Path) -> None:
    try:
        _, expected_bytes = read_header(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    size_bytes = file.stat().st_size
    if size_bytes != expected_bytes:
        raise ValueError(f"{file} is not whole: it has {size_bytes:,} of {expected_bytes:,} bytes")
