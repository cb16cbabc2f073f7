"""Convert a GGUF file once into a plain folder: safetensors, tokenizer, generation config, provenance.

Transformers reads the file and dequantises every tensor; memory is that of the whole model in its dtype. What it
leaves wrong is put right here: how the tokenizer splits texts, BOS, and a pad token that is EOS.
"""

import json
import os
from contextlib import redirect_stderr
from pathlib import Path

import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from stages.model_files.gguf_header import GgufHeader, read_gguf_header
from stages.model_files.provenance import Provenance, write_provenance
from stages.modeling.compatible_files import add_rope_of_transformers_4, save_chat_template
from stages.modeling.gguf.vocabulary import repair_splits
from stages.runtime.files import check_free_space, hash_file

COARSE_BITS = 5  # weights of so few bits are coarser by far than bf16's rounding


def convert_gguf(file: Path, out: Path, name: str | None = None) -> None:
    """Fill `out` with the model of a GGUF file.

    Weights of at most COARSE_BITS bits, and those in bf16, are written in bf16, others in fp32.

    Args:
        name: of the model, for its provenance; None: what the file says.

    Raises ValueError, in one line, for a file that cannot be converted rightly.
    """
    header = read_gguf_header(file)
    is_coarse = header.weight_bits <= COARSE_BITS or header.file_type == "BF16"
    dtype = torch.bfloat16 if is_coarse else torch.float32
    check_free_space(f"the model of {file}", out, header.parameters * dtype.itemsize)
    model = _load_model(file, header, dtype)
    tokenizer = _load_tokenizer(file, header, model.config.vocab_size)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    add_rope_of_transformers_4(out)
    save_chat_template(tokenizer, out, tokenizer.chat_template)
    write_provenance(out, Provenance(
        name=name or header.values.get("general.name") or file.stem, license=header.values.get("general.license"),
        file=file.name, sha256=hash_file(file), is_chat_tuned=tokenizer.chat_template is not None,
        file_type=header.file_type, weight_bits=header.weight_bits))


def _load_model(file: Path, header: GgufHeader, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model, dequantised; ValueError if the file has other weights than the family's model.

    Without GgufConfig, the model stays marked as quantised, and refuses to be saved and trained.
    """
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # its bar cannot be turned off
            model, info = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype,
                output_loading_info=True)
    except Exception as error:  # of a file from elsewhere anything may be wrong
        words = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"Transformers cannot read the model in {file}: {words[:200]}; give another file of this "
                         f"model, as Q8_0, or its folder with safetensors weights") from error
    parameters = model.num_parameters()
    if info["missing_keys"] or parameters != header.parameters:
        raise ValueError(f"{file} holds {header.parameters:,} weights, of which a {model.config.model_type} model of "
                         f"{parameters:,} was to be made: some would be random or left out (scaled rotary positions, "
                         f"experts); give the model's folder with safetensors weights")
    return model


def _load_tokenizer(file: Path, header: GgufHeader, rows: int) -> Tokenizer:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    _drop_further_tokens(tokenizer, rows)
    split = repair_splits(tokenizer, header.pre_tokenizer)
    if header.values.get("tokenizer.ggml.add_bos_token", split.adds_bos):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)])
    ends = (tokenizer.eos_token_id, tokenizer.bos_token_id)
    if tokenizer.pad_token_id in (None, *ends) and tokenizer.unk_token_id not in (None, *ends):
        # Training ignores the pad: a model whose EOS is ignored never learns to end. SmolLM2's unknown token is id 0.
        tokenizer.pad_token = tokenizer.unk_token
    return tokenizer


def _drop_further_tokens(tokenizer: Tokenizer, rows: int) -> None:
    """Drop tokens without a row in the embedding: Transformers adds <|endoftext|> to a vocabulary that lacks it."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < rows]
    tokenizer._tokenizer = FastTokenizer.from_str(json.dumps(state))
