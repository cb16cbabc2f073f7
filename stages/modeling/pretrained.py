"""Model folders: copy a pretrained one without pickled weights; save and load adapters."""

import json
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import constants, snapshot_download
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from stages.distributed.sharding import gather_state
from stages.model_files.gguf_header import is_gguf
from stages.model_files.loadable import ADAPTER_CONFIG, check_base_files
from stages.modeling.compatible_files import save_tokenizer, write_model
from stages.modeling.families import check_text_only
from stages.modeling.finite_weights import DIVERGED, check_finite
from stages.modeling.gguf.convert import convert_gguf
from stages.modeling.tokenizer import check_special_tokens, load_tokenizer
from stages.runtime.files import check_free_space, is_on_device, link_or_copy, read_json_object, used_bytes, write_json
from stages.runtime.processes import is_main

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # of the model's own names, in an adapter's file
FILE_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def copy_pretrained(model: str, revision: str | None, out: Path) -> dict[str, float]:
    """Copy a local folder or hub model into `out` unchanged, as hard links if possible; return its size in bytes.

    A GGUF file is converted. Raises ValueError if the model is none of these, has no safetensors weights, is an
    adapter, links to files elsewhere, cannot be loaded, or its tokenizer and configuration disagree.
    """
    if is_gguf(model):
        convert_gguf(Path(model), out)
    else:
        _copy_folder(model, revision, out)
    check_loadable(model, out)
    check_special_tokens(load_tokenizer(out), AutoConfig.from_pretrained(out))
    return {"bytes": sum(f.stat().st_size for f in out.glob("*.safetensors"))}


def _copy_folder(model: str, revision: str | None, out: Path) -> None:
    source = Path(model) if Path(model).is_dir() else _download(model, revision)
    check_base_files(str(source))
    files = [f for pattern in FILE_PATTERNS for f in sorted(source.glob(pattern))]
    _check_links(source, files)
    copied_bytes = used_bytes(*(file for file in files if not is_on_device(file, out)))  # the others are linked
    check_free_space(f"the copy of {model}", out, copied_bytes)
    for file in files:
        link_or_copy(file.resolve(), out / file.name)


def _check_links(source: Path, files: list[Path]) -> None:
    """Raise ValueError if a file is a link out of the model's folder; in the hub's cache, links to its blobs are."""
    folder = source.resolve()
    allowed = (folder, folder.parent.parent / "blobs") if folder.parent.name == "snapshots" else (folder,)
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(root) for root in allowed):
            raise ValueError(f"{file} is a link to {target}, outside of the model's folder: copy the file there")


def check_causal(folder: Path) -> None:
    """Raise ValueError for a folder with another kind of model, which may load as a causal one all the same: BERT does.
    """
    names = (read_json_object(folder / "config.json") or {}).get("architectures") or []
    if names and not set(names) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise ValueError(f"{folder} holds a {names[0]}, which is no causal language model: give one that continues "
                         f"texts, as LlamaForCausalLM")
    check_loadable(str(folder), folder)


def check_loadable(model: str, folder: Path) -> None:
    """Raise ValueError if Transformers cannot load the folder, or if a weight is missing, odd in shape or not finite.

    Memory holds one tensor at a time: the base may be larger than it, and be quantised by the stages.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        check_text_only(config)
        if getattr(config, "quantization_config", None):
            return  # its weights are packed, and only its own library can load them
        _, info = AutoModelForCausalLM.from_pretrained(
            folder, device_map={"": "meta"}, use_safetensors=True, output_loading_info=True)
    except Exception as error:  # of a model from elsewhere anything may be wrong
        words = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{model} cannot be loaded as a causal language model: {words[:300]}") from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{model} lacks the weights {', '.join(missing[:3])}: they would be random")
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            check_finite(((name, tensors.get_tensor(name)) for name in tensors.keys()),  # noqa: SIM118
                         f"{model} is damaged, or its training diverged")


def save_adapter(model, tokenizer, out: Path, changed: dict[str, torch.Tensor] | None = None) -> None:
    """Save the adapter 'default' with its tokenizer; every process writes the same bytes.

    changed: parameters of whole modules, by name, that take the place of the base's. They are the adapter's
    `modules_to_save`, which PEFT loads and merges.

    Of several processes, which all have the same weights, only the first one saves; likewise below.
    """
    save_adapters(model, out, ["default"])
    if changed and is_main():
        _add_modules(out, changed)
    save_tokenizer(tokenizer, out)


def _add_modules(adapter: Path, changed: dict[str, torch.Tensor]) -> None:
    tensors = {f"{PEFT_PREFIX}{name}": tensor.cpu().contiguous() for name, tensor in changed.items()}
    save_file(load_file(adapter / ADAPTER_WEIGHTS) | tensors, adapter / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    modules = sorted({name.rpartition(".")[0] for name in changed})
    write_json(adapter / ADAPTER_CONFIG, config | {"modules_to_save": modules})


def save_model(model, tokenizer, out: Path, changed: dict[str, torch.Tensor] | None = None) -> None:
    """Save a whole model with its tokenizer; ValueError if a weight is not finite.

    changed: parameters, by name, that are saved in place of the model's.
    """
    state = gather_state(model)
    check_finite(model.named_parameters() if state is None else state.items(), DIVERGED)
    if changed:
        state = (model.state_dict() if state is None else state) | changed
    if is_main():
        write_model(model, tokenizer, out, state_dict=state)


def save_adapters(model, out: Path, names: list[str]) -> None:
    """Save some adapters of a PEFT model: 'default' into `out`, others into out/<name>.

    Raises ValueError if a weight of theirs is not finite.
    """
    for name in names:
        check_finite(get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False).items(), DIVERGED)
    if not is_main():
        return
    # PEFT may add the whole embedding, of gigabytes.
    model.save_pretrained(out, selected_adapters=names, save_embedding_layers=False)
    for name in names:
        file = (out if name == "default" else out / name) / ADAPTER_CONFIG
        config = json.loads(file.read_text(encoding="utf-8"))
        # PEFT stores these as sets, whose order differs between processes.
        write_json(file, {key: sorted(value) if isinstance(value, list) else value for key, value in config.items()})


def load_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Load an adapter onto the model that it was trained on, in eval mode.

    Raises ValueError if a tensor is missing, unexpected or of another shape; PEFT would only warn.
    """
    saved, config = load_file(folder / ADAPTER_WEIGHTS), PeftConfig.from_pretrained(folder)
    check_finite(saved.items(), f"{folder} is damaged, or its training diverged")
    config.base_model_name_or_path = None  # the folder may have been renamed, or be an intermediate merge
    try:
        model = get_peft_model(model, config)
    except (ValueError, IndexError) as error:  # no such layer; no such row of the embedding
        raise ValueError(f"{_mismatch(folder, model)}: {str(error).split('. ')[0]}") from error
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    for name in sorted(expected.keys() | saved.keys()):
        own, needed = (list(tensors[name].shape) if name in tensors else None for tensors in (saved, expected))
        if own != needed:
            raise ValueError(f"{_mismatch(folder, model)}: {name} is {own or 'missing'} in the adapter, "
                             f"{needed or 'missing'} in the model; give the base that it was trained on")
    set_peft_model_state_dict(model, saved)
    return model.eval()


def _mismatch(folder: Path, model) -> str:
    return f"the adapter {folder} does not fit this {model.config.model_type} model"


def _download(model: str, revision: str | None) -> Path:
    """Download a hub model into the hub's cache; what is there already is not downloaded again."""
    download = partial(snapshot_download, model, revision=revision, allow_patterns=list(FILE_PATTERNS))
    try:
        files = download(dry_run=True)
    except Exception:  # no network, for one: the download itself then takes what is cached, or says why not
        files = []
    missing_bytes = sum(file.file_size or 0 for file in files if file.will_download)
    check_free_space(f"the download of {model}", Path(constants.HF_HUB_CACHE), missing_bytes)
    try:
        return Path(download())
    except Exception as error:  # the hub client raises many types
        raise ValueError(
            f"{model!r} is neither 'scratch' nor a local folder, and cannot be downloaded from the hub; check its "
            f"name and the network, or give a folder: {str(error).splitlines()[0]}"
        ) from error
