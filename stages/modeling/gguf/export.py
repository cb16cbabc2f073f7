"""Write a plain model folder as a GGUF file for llama.cpp and Ollama, read it back, and compare every tensor.

One tensor at a time is in memory. stages.modeling.gguf.convert is the way back.
"""

import glob
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import gguf
import numpy as np
import psutil
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from stages.model_files.loadable import check_base_files
from stages.modeling.adapters import is_reward_model
from stages.modeling.gguf.tensors import ARCHITECTURES, EXACT, Kind, WrittenTensor, compare_tensor, list_tensors
from stages.modeling.gguf.vocabulary import Vocabulary, read_vocabulary
from stages.modeling.q_heads import has_q_heads
from stages.modeling.tokenizer import check_special_tokens, load_tokenizer
from stages.render.units import format_bytes
from stages.runtime.files import atomic_path, check_free_space, sync_to_disk
from stages.stackexchange.prompt import adds_bos, chat_prompt_ids

TOKEN_BYTES = 64  # of the header, and of its merge: more than either takes
QUESTION = "{{ .Prompt }}"  # Ollama's templates are Go's, not the Jinja that the GGUF file has
# Ollama's names of what generation_config.json has.
PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "max_new_tokens": "num_predict"}


@contextmanager
def draft_gguf(folder: Path, kind: Kind, out: Path, metadata: gguf.Metadata) -> Iterator[tuple[Path, dict]]:
    """Write the model as a draft of `out`; yield the draft and the report on it, once all tensors are compared.

    Matrices are written as `kind` (of 4 bits: embedding and output layer as Q8_0), vectors in fp32. The draft gets
    its name at the end of the block, and is deleted if that fails. Raises ValueError for what cannot be exported, or
    differs.
    """
    config = read_exportable(folder)
    tokenizer = load_tokenizer(folder)
    check_special_tokens(tokenizer, config)
    vocabulary = read_vocabulary(tokenizer, config.vocab_size, folder)
    tensors = list_tensors(folder, config, kind)
    needed_bytes = sum(tensor.size_bytes for tensor in tensors) + 2 * TOKEN_BYTES * config.vocab_size
    check_free_space(f"the export of {folder}", out.parent, needed_bytes)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(out, sync=True) as draft:
        _write(draft, config, tokenizer, vocabulary, tensors, metadata, kind)
        sync_to_disk(draft)  # here, where it may take long: at the end of the block an older file of the name is gone
        yield draft, {"folder": str(folder), "type": kind.name, "bytes": draft.stat().st_size,
                      "pre_tokenizer": vocabulary.pre, "tensors": _compare(draft, tensors), "llama_cpp": None}


def remove_drafts(*files: Path) -> None:
    """Remove the drafts of these files that exports have left which were killed (`kill -9`)."""
    for draft in (draft for file in files for draft in file.parent.glob(f"{glob.escape(file.name)}.*.tmp")):
        number = draft.name.split(".")[-2]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            draft.unlink(missing_ok=True)


def read_exportable(folder: Path) -> PretrainedConfig:
    """Return the configuration of a model that can be exported; ValueError, in one line, for another."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    check_base_files(str(folder))
    if is_reward_model(folder):
        raise ValueError(f"{folder} is a reward model, which writes no text: python -m stages.export_reward exports it")
    if has_q_heads(folder):
        raise ValueError(f"{folder} has Q heads (of ilql), which llama.cpp does not compute: without them it would be "
                         f"another policy")
    config = AutoConfig.from_pretrained(folder)
    if config.model_type not in ARCHITECTURES:
        raise ValueError(f"{folder} is a {config.model_type} model; exported are LLaMA, Mistral, Qwen 2 and Qwen 3 "
                         f"({', '.join(ARCHITECTURES)}). Ollama imports safetensors folders itself: FROM {folder}, in "
                         f"a Modelfile")
    rope = config.rope_parameters
    changes = {"scaled rotary positions": rope.get("rope_type", "default") != "default",
               "partly rotated heads": rope.get("partial_rotary_factor", 1.0) != 1.0,
               "quantised weights": getattr(config, "quantization_config", None),
               "biases of attention": config.model_type != "qwen2" and getattr(config, "attention_bias", False),
               "biases of the MLP": getattr(config, "mlp_bias", False),
               f"the activation {config.hidden_act}": config.hidden_act != "silu"}
    if words := [name for name, is_there in changes.items() if is_there]:
        raise ValueError(f"{folder} has {', '.join(words)}, which the export does not write; Ollama may import the "
                         f"folder itself: FROM {folder}, in a Modelfile")
    return config


def _write(file: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary,
           tensors: list[WrittenTensor], metadata: gguf.Metadata, kind: Kind) -> None:
    with closing(gguf.GGUFWriter(file, ARCHITECTURES[config.model_type])) as writer:
        metadata.set_gguf_meta_model(writer)
        writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == Kind.F32 else 'MOSTLY'}_{kind.name}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_sizes(writer, config)
        _add_tokenizer(writer, tokenizer, vocabulary)
        for tensor in tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.size_bytes, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.encode())


def _add_sizes(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Write the sizes; the context ends where a window would slide: up to there both are the same."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(min(config.max_position_embeddings, window))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for add in (writer.add_rope_dimension_count, writer.add_key_length, writer.add_value_length):
        add(head_size)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id),
                      ("pad", writer.add_pad_token_id), ("unk", writer.add_unk_token_id)):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None and number < len(vocabulary.tokens):
            add(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _compare(file: Path, tensors: list[WrittenTensor]) -> dict[str, dict]:
    """Read the file back and compare every tensor with the folder's; return count and largest error of each type."""
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    if [tensor.name for tensor in tensors] != list(written):
        raise ValueError(f"{file} has other tensors than were written")
    largest: dict[Kind, list[float]] = {}
    for tensor in tensors:
        largest.setdefault(tensor.kind, []).append(compare_tensor(tensor, written[tensor.name].data))
    return {kind.name: {"count": len(errors), "largest_error": max(errors)} for kind, errors in largest.items()}


def describe_report(report: dict) -> dict[str, str]:
    """Describe a file, how its tensors compare with the folder's and, if it was checked, how llama.cpp answers."""
    texts = {"type": report["type"], "size": format_bytes(report["bytes"]), "pre-tokenizer": report["pre_tokenizer"]}
    if numbers := report["llama_cpp"]:
        differing, answers = numbers["other_answers"], numbers["answers"]
        texts |= {"posts with equal tokens": f"{numbers['posts']:,}",
                  "greedy answers that differ": f"{differing} of {answers} ({100 * differing / answers:.0f} %)",
                  "nats, mean and at most": f"{numbers['mean_nats']:.2g}, {numbers['most_nats']:.2g}"}
        texts |= {f"mean reward ({numbers['judge']})": f"{numbers['reward']:.3f}",
                  "the folder's": f"{numbers['reward_of_folder']:.3f}"} if numbers["judge"] else {
                      "mean reward": "none: the run has no reward model of this vocabulary"}
    return texts | {"tensors read back": ", ".join(_describe_tensors(*item) for item in report["tensors"].items())}


def _describe_tensors(kind: str, counted: dict) -> str:
    tensors, error = f"{counted['count']} in {kind}", counted["largest_error"]
    if not error:
        return f"{tensors} equal the folder's"
    if Kind[kind] in EXACT:
        return f"{tensors} equal the folder's rounded (by {error:.2g} at most)"
    return f"{tensors} differ by at most {error:.3f} of the step between values"


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
