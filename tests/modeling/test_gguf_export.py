"""Export to GGUF: llama.cpp's tokens and answers are the folder's, the way back gives its weights, one line else."""

import json
import os
import re
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedTokenizerFast
from transformers import AutoModelForSequenceClassification as Classifier

from stages import export_gguf
from stages.model_files.gguf_header import PRE_TOKENIZERS
from stages.model_files.provenance import Provenance, write_provenance
from stages.modeling.compatible_files import save_tokenizer
from stages.modeling.gguf import export as export_module
from stages.modeling.gguf import tensors as tensors_module
from stages.modeling.gguf.convert import convert_gguf
from stages.modeling.gguf.vocabulary import build_split
from stages.modeling.tiny_llama import PAD, train_tokenizer
from stages.modeling.tokenizer import load_tokenizer
from stages.runtime.stopping import Stopped
from tests.helpers import tiny_models
from tests.helpers.gguf_answers import count_differences
from tests.helpers.gguf_files import CONFIGS, ODD, SHAPE, SPECIAL, TEXTS, train_vocabulary

OWN = "own"  # a vocabulary made by this pipeline
FAMILIES = [("llama", OWN), ("llama", "smollm"), ("llama", "llama-bpe"), ("mistral", "gpt-2"), ("qwen2", "qwen2"),
            ("qwen3", "qwen2")]
TYPES = {"f32": 0.0, "f16": 1e-3, "bf16": 1e-2, "q8_0": 0.01, "q4_1": 0.12}
ANSWER_TOKENS, PROMPTS = 12, 8


def build_tokenizer(split: str) -> PreTrainedTokenizerFast:
    if split == OWN:
        return train_tokenizer(TEXTS, 400)
    tokens, merges = train_vocabulary(TEXTS, split)
    how = build_split(split)
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)},
                                     [tuple(pair.split(" ")) for pair in merges], ignore_merges=how.takes_whole_words))
    tokenizer.pre_tokenizer, tokenizer.decoder = how.pre_tokenizer, decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if how.adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[1]} $A", special_tokens=[(SPECIAL[1], 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=SPECIAL[0], pad_token=SPECIAL[0],
                                   bos_token=SPECIAL[1], eos_token=SPECIAL[2])


def write_folder(folder: Path, architecture: str = "llama", split: str = OWN, **changes) -> Path:
    """Write a merged model of two layers with random weights, as the pipeline's stages do."""
    tokenizer = build_tokenizer(split)
    kind, more = (CONFIGS | {"mistral": (MistralConfig, {"sliding_window": 128, "head_dim": 16})})[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SHAPE | more | {
        "vocab_size": len(tokenizer), "tie_word_embeddings": architecture != "mistral", "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2} | changes))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("run") / "ppo-merged")


def export(folder: Path, out: Path, capsys, type_name: str = "f32") -> tuple[int, str, str]:
    code = export_gguf.main([str(folder), "--type", type_name, "--out", str(out)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(("architecture", "split"), FAMILIES)
def test_tokens_and_greedy_answers_are_those_of_llama_cpp(architecture, split, tmp_path, capsys):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: make extras")
    folder, file = write_folder(tmp_path / "model", architecture, split), tmp_path / "model.gguf"
    assert export(folder, file, capsys)[0] == 0
    texts = [text for text in ODD if split != "qwen2" or text != "e\u0301"]  # NFC, which llama.cpp leaves out
    assert count_differences(folder, file, [*TEXTS, *texts], TEXTS[:PROMPTS], ANSWER_TOKENS) == (0, 0)


def test_every_pre_tokenizer_is_compared_with_llama_cpp():
    assert {"gpt-2" if split == OWN else split for _, split in FAMILIES} == set(PRE_TOKENIZERS)
    assert {architecture for architecture, _ in FAMILIES} == set(tensors_module.ARCHITECTURES)


@pytest.mark.parametrize("broken", ["rotary pairs", "pre-tokenizer", "merges"])
def test_a_wrong_export_is_noticed_by_the_comparison(broken, tmp_path, capsys, monkeypatch):
    """The test above is red for each: what reads the tensors back cannot know these."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: make extras")
    folder, file = write_folder(tmp_path / "model", split="smollm"), tmp_path / "model.gguf"
    read_vocabulary, list_tensors = export_module.read_vocabulary, export_module.list_tensors
    if broken == "rotary pairs":
        monkeypatch.setattr(export_module, "list_tensors",
                            lambda *args: [tensor._replace(heads=None) for tensor in list_tensors(*args)])
    else:
        change = {"pre-tokenizer": lambda v: {"pre": "gpt-2"}, "merges": lambda v: {"merges": v.merges[::-1]}}[broken]
        monkeypatch.setattr(export_module, "read_vocabulary",
                            lambda *args: (lambda v: v._replace(**change(v)))(read_vocabulary(*args)))
    assert export(folder, file, capsys)[0] == 0
    other_tokens, other_answers = count_differences(folder, file, [*TEXTS, *ODD], TEXTS[:PROMPTS], ANSWER_TOKENS)
    assert (other_answers if broken == "rotary pairs" else other_tokens) > 0


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_way_back_gives_the_weights(architecture, type_name, tmp_path, capsys):
    folder = write_folder(tmp_path / "model", architecture, "qwen2" if architecture == "qwen2" else OWN)
    code, line, _ = export(folder, tmp_path / "model.gguf", capsys, type_name)
    assert code == 0 and "tensors read back" in line and len(line.splitlines()) == 1
    back = tmp_path / "back"
    back.mkdir()
    convert_gguf(tmp_path / "model.gguf", back)
    weights = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        assert (weights[name] - weight).norm() <= TYPES[type_name] * weight.norm(), name
    ours, theirs = load_tokenizer(folder), load_tokenizer(back)
    assert ours.chat_template == theirs.chat_template and ours.get_vocab() == theirs.get_vocab()
    assert all(ours(text).input_ids == theirs(text).input_ids for text in TEXTS)
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_the_metadata_and_the_modelfile(folder, tmp_path, capsys):
    model = tmp_path / "demo/ppo-merged"
    shutil.copytree(folder, model)
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "max_new_tokens": 64}
    (model / "generation_config.json").write_text(json.dumps(sampling | {"eos_token_id": [2, 0]}))
    (model / "README.md").write_text("---\nlicense: [cc-by-sa-3.0, cc-by-sa-4.0]\nlanguage: [en]\n"
                                     "base_model: org/base-1b\ndatasets: [org/posts]\n---\n# A model\n")
    assert export(model, tmp_path / "gguf/ppo.gguf", capsys, "q8_0")[0] == 0
    assert {path.name for path in (tmp_path / "gguf").iterdir()} == {"ppo.gguf", "ppo.json", "Modelfile", "gguf.html"}
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "gguf/ppo.gguf").fields.items()}
    expected = {"general.architecture": "llama", "general.name": "demo ppo-merged", "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eos_token_id": 2, "general.file_type": 7,
                "tokenizer.chat_template": load_tokenizer(model).chat_template,
                "general.license": "cc-by-sa-3.0 and cc-by-sa-4.0", "general.languages": ["en"],
                "general.base_model.0.repo_url": "https://huggingface.co/org/base-1b",
                "general.dataset.0.repo_url": "https://huggingface.co/org/posts", "general.sampling.top_k": 0,
                "general.sampling.min_p": 0.0}
    assert expected.items() <= fields.items()
    text = (tmp_path / "gguf/Modelfile").read_text()
    assert 'FROM ./ppo.gguf\nTEMPLATE """Question: {{ .Prompt }}\n\nAnswer: {{ .Response }}</s>"""\n' in text
    assert "PARAMETER temperature 0.7\nPARAMETER top_k 0\n" in text and "PARAMETER num_predict 64" in text
    assert f'PARAMETER stop """{PAD}"""\nLICENSE """cc-by-sa-3.0 and cc-by-sa-4.0"""' in text


def test_the_licence_is_that_of_the_pretrained_model_if_the_card_has_none(folder, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "README.md").write_text("---\nbase_model: /home/me/base\n---\n")
    write_provenance(model, Provenance("org/base", "apache-2.0", "base.gguf", "0" * 64, True, "Q4_1", 4))
    assert export(model, tmp_path / "a.gguf", capsys)[0] == 0
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert fields["general.license"].contents() == "apache-2.0" and fields["general.name"].contents() == "org/base"
    assert "general.base_model.count" not in fields  # a local folder has no address
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert export(model, tmp_path / "a.gguf", capsys)[0] == 0
    assert "PARAMETER stop" in (tmp_path / "Modelfile").read_text()  # without sampling, too


def test_a_pad_without_an_embedding_is_left_out_and_a_row_without_a_token_is_unused(tmp_path, capsys):
    folder = write_folder(tmp_path / "model", vocab_size=420)  # of 400 tokens
    assert export(folder, tmp_path / "a.gguf", capsys)[0] == 0
    tokens = gguf.GGUFReader(tmp_path / "a.gguf").fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 420 and tokens[400] == "[PAD400]"
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"pad_token": "<further>"})
    file = json.loads((folder / "config.json").read_text())
    write_folder(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    assert file["vocab_size"] == 420 and export(tmp_path / "other", tmp_path / "b.gguf", capsys)[0] == 0
    fields = gguf.GGUFReader(tmp_path / "b.gguf").fields
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 400 and "tokenizer.ggml.padding_token_id" not in fields


def change_tokenizer(folder: Path, **changes) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


REFUSED = {
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "is an adapter, and a whole model is needed"),
    "q heads": (lambda f: (f / "q_heads.json").write_text("{}"), "has Q heads (of ilql)"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no .safetensors weights"),
    "layers": (lambda f: change_config(f, num_hidden_layers=3), "has other weights than the llama model"),
    "shape": (lambda f: change_config(f, intermediate_size=64), "has other weights than the llama model"),
    "rope": (lambda f: change_config(f, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
             "has scaled rotary positions, which the export does not write"),
    "split": (lambda f: change_tokenizer(f, pre_tokenizer={
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}),
        "splits texts in none of the ways that are tested with llama.cpp"),
    "no bytes": (lambda f: change_tokenizer(f, pre_tokenizer={"type": "Whitespace"}), "exported are byte-level BPE"),
    "card": (lambda f: (f / "README.md").write_text("---\na: [\n---\n"), "README.md or config.json cannot be read"),
    "normalizer": (lambda f: change_tokenizer(f, normalizer={"type": "Lowercase"}), "has a normalizer, which"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(case, folder, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    REFUSED[case][0](model)
    check_refusal(model, tmp_path, capsys, REFUSED[case][1])


def check_refusal(model: Path, tmp_path: Path, capsys, says: str, type_name: str = "f16") -> None:
    code, line, errors = export(model, tmp_path / "gguf/a.gguf", capsys, type_name)
    assert code == 1 and not line and len(errors.splitlines()) == 1 and len(errors) < 500
    assert errors.startswith("export_gguf: error: ") and says in errors, errors
    assert not (tmp_path / "gguf").exists() or not list((tmp_path / "gguf").iterdir())


def test_other_families_and_reward_models_are_one_line(folder, tmp_path, capsys):
    tokenizer = load_tokenizer(folder)
    tiny_models.gpt2(len(tokenizer)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    check_refusal(tmp_path / "gpt2", tmp_path, capsys, "exported are LLaMA, Mistral, Qwen 2 and Qwen 3")
    Classifier.from_pretrained(folder, num_labels=1).save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    check_refusal(tmp_path / "reward", tmp_path, capsys, "is a reward model, which writes no text")
    check_refusal(tmp_path / "none", tmp_path, capsys, "there is no folder")


def test_weights_that_a_type_cannot_hold_are_one_line(tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(write_folder(tmp_path / "model"))
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 70000.0
    model.save_pretrained(tmp_path / "model")
    check_refusal(tmp_path / "model", tmp_path, capsys, "take --type bf16")
    assert export(tmp_path / "model", tmp_path / "gguf/a.gguf", capsys, "bf16")[0] == 0
    narrow = write_folder(tmp_path / "narrow", intermediate_size=40)
    check_refusal(narrow, tmp_path / "more", capsys, "takes blocks of 32: export it with --type f16", "q8_0")


@pytest.mark.parametrize("type_name", TYPES)
def test_one_wrong_weight_is_noticed(type_name, folder, tmp_path, capsys, monkeypatch):
    encode = tensors_module.WrittenTensor.encode

    def encode_one_wrong(tensor):
        data = encode(tensor)
        if tensor.name == "blk.1.ffn_up.weight":
            data.reshape(-1).view("uint8")[7] ^= 0x40
        return data

    monkeypatch.setattr(tensors_module.WrittenTensor, "encode", encode_one_wrong)
    check_refusal(folder, tmp_path, capsys, "model.layers.1.mlp.up_proj.weight, read back as blk.1.ffn_up.weight",
                  type_name)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Stopped(15)])
def test_a_full_disk_or_a_signal_leaves_nothing(error, folder, tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fail)
    code, _, errors = export(folder, tmp_path / "gguf/a.gguf", capsys)
    assert code == (143 if isinstance(error, Stopped) else 1) and len(errors.splitlines()) == 1
    assert re.search("no space left on the disk|stopped by SIGTERM", errors) and not list((tmp_path / "gguf").iterdir())


@pytest.mark.parametrize("moment", ["gguf.GGUFWriter write_kv_data_to_file", "gguf.GGUFWriter write_tensor_data",
                                    "export _compare", "export_gguf write_text", "export_gguf write_json",
                                    "os replace"])
def test_a_kill_leaves_no_file_of_its_name_and_the_next_export_clears_up(moment, folder, tmp_path, library_forks):
    words = [str(folder), "--out", str(tmp_path / "a.gguf")]
    killed = library_forks.run(["tests.modeling.killed_export", *moment.split(), *words])
    assert killed.returncode == -9, killed.stderr
    left = [path.name for path in tmp_path.iterdir()]
    assert "a.gguf" not in left and len(left) > 0
    other = tmp_path / f"a.gguf.{os.getppid()}.tmp"  # of a process that runs
    other.touch()
    assert export_gguf.main(words) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.gguf", "a.json", "Modelfile", "gguf.html", other.name}


def test_a_kill_at_any_moment_leaves_no_description_of_another_file(folder, tmp_path, capsys, monkeypatch):
    """Before each file gets or loses its name, the folder is copied: a kill leaves what is in the copy."""
    model, out = tmp_path / "model", tmp_path / "gguf/a.gguf"
    shutil.copytree(folder, model)
    copies = []

    def copy_first(change):
        def changed(*args, **kwargs):
            copies.append(tmp_path / f"copy-{len(copies)}")
            shutil.copytree(out.parent, copies[-1])
            return change(*args, **kwargs)
        return changed

    write_sampling(model, 0.7)
    assert export(model, out, capsys, "f32")[0] == 0
    write_sampling(model, 0.4)
    monkeypatch.setattr(os, "replace", copy_first(os.replace))
    monkeypatch.setattr(Path, "unlink", copy_first(Path.unlink))
    assert export(model, out, capsys, "q8_0")[0] == 0
    monkeypatch.undo()
    files = [copy / out.name for copy in (*copies, out.parent) if (copy / out.name).exists()]
    assert [read_temperature(file) for file in (files[0], files[-1])] == [0.7, 0.4]
    for file in files:
        report = json.loads(file.with_suffix(".json").read_text())
        type_name, temperature = ("F32", 0.7) if file.stat().st_size == files[0].stat().st_size else ("Q8_0", 0.4)
        assert (report["type"], report["bytes"]) == (type_name, file.stat().st_size), file
        assert read_temperature(file) == temperature, file
        assert f"<td>{type_name}</td>" in file.with_name("gguf.html").read_text(), file


def write_sampling(model: Path, temperature: float) -> None:
    (model / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": temperature}))


def read_temperature(file: Path) -> float:
    return float(re.search("PARAMETER temperature (.+)", file.with_name("Modelfile").read_text())[1])


def test_a_file_of_another_name_is_one_line(folder, tmp_path, capsys):
    code, _, errors = export(folder, tmp_path / "a.bin", capsys)
    assert code == 1 and "ends in .gguf" in errors and not list(tmp_path.iterdir())


def test_a_byte_level_step_alone_is_the_split_of_gpt_2():
    """train_tokenizer's: that of the pipeline's own vocabularies."""
    assert build_split("gpt-2").pre_tokenizer.__getstate__() == pre_tokenizers.ByteLevel(
        add_prefix_space=False).__getstate__()
