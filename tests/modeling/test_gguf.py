"""Models from GGUF: tokens and logits of llama.cpp, what the libraries leave wrong, and one line for the rest."""

import json
import struct
import unicodedata
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages.evaluation.llama_cpp import load_llama_cpp
from stages.model_files import gguf_header
from stages.model_files.provenance import read_provenance
from stages.modeling.pretrained import copy_pretrained
from stages.modeling.tokenizer import load_tokenizer
from tests.helpers.gguf_files import ODD, TEXTS, UNREADABLE, write_gguf

Q = gguf.GGMLQuantizationType
PAIRS = [("llama", "smollm"), ("llama", "gpt-2"), ("llama", "llama-bpe"), ("qwen2", "qwen2"), ("qwen3", "qwen2")]


def convert(file: Path, out: Path) -> Path:
    out.mkdir()
    copy_pretrained(str(file), None, out)
    return out


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file as SmolLM2's, whose pad is EOS, converted; with the model it was made of."""
    folder = tmp_path_factory.mktemp("gguf")
    model = write_gguf(folder / "two.gguf", TEXTS)
    return folder / "two.gguf", convert(folder / "two.gguf", folder / "model"), model


def test_the_folder_is_plain_and_says_where_it_is_from(written):
    file, folder, _ = written
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "config.json", "generation_config.json",
                                                        "tokenizer.json", "provenance.json"}
    provenance = read_provenance(folder)
    assert (provenance.name, provenance.license, provenance.file_type) == ("Two Layers", "apache-2.0", "Q4_1")
    assert provenance.weight_bits == 4 and provenance.is_chat_tuned and provenance.file == file.name
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert load_tokenizer(folder).chat_template == "{{ messages[0]['content'] }}"


def test_two_line_ends_before_a_digit_are_one_token(written):
    """Transformers splits a SmolLM's texts as GPT-2's, in silence: then they are two."""
    assert load_tokenizer(written[1]).tokenize("\n\n1. Boil")[:2] == ["ĊĊ", "1"]


def test_pad_is_not_the_end_of_a_text(written):
    """In SmolLM2's file it is: training ignores the pad, and answers would never learn to end."""
    tokenizer, config = load_tokenizer(written[1]), AutoConfig.from_pretrained(written[1])
    generation = json.loads((written[1] / "generation_config.json").read_text())
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2) and config.pad_token_id == 0
    assert (generation["pad_token_id"], generation["eos_token_id"]) == (0, 2) and len(tokenizer) == config.vocab_size


def test_what_was_converted_can_be_saved_and_trained(written, tmp_path):
    """Without GgufConfig(dequantize=True) it stays marked as quantised, which refuses both."""
    model = AutoModelForCausalLM.from_pretrained(written[1])
    assert not getattr(model, "hf_quantizer", None)
    model.save_pretrained(tmp_path)
    model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()


@pytest.mark.parametrize(("kind", "limit"), [(Q.Q4_1, 0.12), (Q.Q8_0, 0.01), (Q.F32, 1e-6)])
def test_the_weights_are_those_that_were_written(kind, limit, tmp_path):
    model = write_gguf(tmp_path / "two.gguf", TEXTS, quantised=kind, tied=False)
    loaded = AutoModelForCausalLM.from_pretrained(convert(tmp_path / "two.gguf", tmp_path / "model"))
    assert loaded.dtype == (torch.bfloat16 if kind == Q.Q4_1 else torch.float32)
    for name, weight in model.state_dict().items():
        assert (loaded.state_dict()[name].float() - weight).norm() <= limit * weight.norm(), name


@pytest.mark.parametrize(("architecture", "split"), PAIRS)
def test_tokens_and_probabilities_are_those_of_llama_cpp(architecture, split, tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: make extras")
    file = tmp_path / "two.gguf"
    write_gguf(file, TEXTS, architecture=architecture, split=split, quantised=Q.F32)
    folder = convert(file, tmp_path / "model")
    tokenizer, model = load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder)
    with load_llama_cpp(file) as reference:
        for text in [*ODD, *TEXTS]:
            if split == "qwen2":  # these tokenizers compose accents first (NFC), which llama.cpp leaves out
                text = unicodedata.normalize("NFC", text)
            assert tokenizer(text).input_ids == reference.tokenize(text), text
        for text in TEXTS[:5]:
            ids = tokenizer(text).input_ids
            ours = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1].double(), -1)
            for token, logprob in reference.next_logprobs(ids, 20).items():
                assert abs(ours[token].item() - logprob) < 0.02


def test_bos_begins_a_text_if_the_file_says_so(tmp_path):
    for adds in (True, False):
        file = tmp_path / f"{adds}.gguf"
        write_gguf(file, TEXTS, split="llama-bpe", tokenizer__ggml__add_bos_token=adds)
        assert (load_tokenizer(convert(file, tmp_path / str(adds)))("a").input_ids[0] == 1) is adds


def refusal(file: Path, out: Path) -> str:
    out.mkdir()
    with pytest.raises(ValueError) as error:
        copy_pretrained(str(file), None, out)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400 and not list(out.iterdir())
    return str(error.value)


@pytest.mark.parametrize(("values", "says"), [
    ({"tokenizer__ggml__pre": "falcon"}, "pre-tokenizer 'falcon'"),
    ({"tokenizer__ggml__pre": None}, "pre-tokenizer None")])
def test_an_unknown_pre_tokenizer_is_refused(values, says, tmp_path):
    write_gguf(tmp_path / "two.gguf", TEXTS[:5], **values)
    assert says in refusal(tmp_path / "two.gguf", tmp_path / "out")


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(share, written, tmp_path):
    data = written[0].read_bytes()
    (tmp_path / "two.gguf").write_bytes(data[:int(share * len(data))])
    assert "is cut off or damaged" in refusal(tmp_path / "two.gguf", tmp_path / "out")


def test_other_files_are_refused(written, tmp_path):
    data = written[0].read_bytes()
    for name, content, says in (
            ("text", b"no such thing", "is no GGUF file"), ("empty", b"", "is no GGUF file"),
            ("family", data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1), "architecture 'mamba'"),
            ("kind", set_kind(data, 99), "a kind of quantisation that the package gguf does not know")):
        (tmp_path / f"{name}.gguf").write_bytes(content)
        assert says in refusal(tmp_path / f"{name}.gguf", tmp_path / name), name


def test_weights_that_the_package_cannot_read_are_refused(tmp_path):
    write_gguf(tmp_path / "two.gguf", TEXTS[:5], quantised=UNREADABLE)
    says = refusal(tmp_path / "two.gguf", tmp_path / "out")
    assert "Dequantization for Q8_1" in says and "give another file of this model, as Q8_0" in says


def set_kind(data: bytes, kind: int) -> bytes:
    """Change the kind of quantisation that the header gives for the last matrix: 4 bytes before its offset."""
    name = b"blk.1.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    return data[:at] + struct.pack("<I", kind) + data[at + 4:]


@pytest.mark.parametrize("change", ["one is missing", "one is left out"])
def test_a_file_with_other_weights_than_its_family_is_refused(change, written, tmp_path):
    """Scaled rotary positions (rope_freqs) and experts are tensors that Transformers leaves out in silence."""
    file = tmp_path / "two.gguf"
    if change == "one is missing":
        file.write_bytes(written[0].read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"))
    else:
        write_gguf(file, TEXTS, further_tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert "some would be random or left out" in refusal(file, tmp_path / "out")


def test_without_the_package_it_is_one_line(written, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert "needs the package gguf, which is not installed: pip install 'gguf" in refusal(written[0], tmp_path / "out")


def test_every_pre_tokenizer_is_compared_with_llama_cpp():
    assert {split for _, split in PAIRS} == set(gguf_header.PRE_TOKENIZERS)
    assert {architecture for architecture, _ in PAIRS} == set(gguf_header.ARCHITECTURES)
