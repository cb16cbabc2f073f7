"""A merge shard by shard writes the bytes that a merge of the whole model writes, and refuses what is not the same."""

import shutil

import pytest
import torch
import transformers as hf
from peft.tuners.lora import LoraLayer, LoraModel
from safetensors.torch import load_file, save_file

from stages.modeling.load import load_causal
from stages.modeling.merging import checks, shards
from stages.modeling.merging import merge as modeling_merge
from stages.modeling.tokenizer import load_tokenizer
from tests.helpers import tiny_models
from tests.helpers.architectures import FAMILIES, adapted, save
from tests.modeling.test_merging import save_adapter

WRITTEN = ("*.safetensors", "*.index.json", "config.json", "generation_config.json", "merge.json")


def files(folder):
    return {file.name: file.read_bytes() for pattern in WRITTEN for file in folder.glob(pattern)}


def merge_both_ways(base, adapters, folder, monkeypatch, **changes):
    """Merge shard by shard, and whole; return the files of both."""
    tiny_models.merge(base, adapters, folder / "shards", **changes)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_merge, "can_stream", lambda model, tensors: False)
        patch.setattr(modeling_merge, "write_shards", lambda *_: pytest.fail("it is not merged whole"))
        tiny_models.merge(base, adapters, folder / "whole", **changes)
    return files(folder / "shards"), files(folder / "whole")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "llama tied", "gpt2", "opt-350m", "pythia tied"])
def test_every_family_gets_the_bytes_of_a_whole_merge(family, dtype, tmp_path, monkeypatch):
    base = save(FAMILIES[family], tmp_path / "base")
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapter")
    load_tokenizer(base).save_pretrained(tmp_path / "adapter")
    actual, expected = merge_both_ways(base, [tmp_path / "adapter"], tmp_path, monkeypatch, dtype=dtype)
    assert actual.keys() == expected.keys() and actual == expected


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A base in several bf16 files; sft on it; a reward adapter with a head on their merge."""
    folder = tmp_path_factory.mktemp("chain")
    tiny_models.save_base(folder / "one")
    hf.AutoModelForCausalLM.from_pretrained(folder / "one", dtype=torch.bfloat16).save_pretrained(
        folder / "base", max_shard_size=20_000)
    load_tokenizer(folder / "one").save_pretrained(folder / "base")
    assert len(list((folder / "base").glob("*.safetensors"))) > 2
    save_adapter(folder / "base", folder / "sft")
    tiny_models.merge(folder / "base", [folder / "sft"], folder / "sft-merged")
    save_adapter(folder / "sft-merged", folder / "reward", scorer=True)
    return folder


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_adapters_and_a_head_on_a_base_of_several_files_give_the_same_bytes(chain, dtype, tmp_path, monkeypatch):
    actual, expected = merge_both_ways(chain / "base", [chain / "sft", chain / "reward"], tmp_path, monkeypatch,
                                       dtype=dtype, max_shard_bytes=20_000)
    assert len(actual) > 5 and actual == expected


def test_a_whole_model_is_written_with_the_same_bytes(chain, tmp_path, monkeypatch):
    actual, expected = merge_both_ways(chain / "base", [chain / "sft-merged"], tmp_path, monkeypatch, dtype="bf16")
    assert actual == expected


def test_checks_in_bf16_leave_the_weights_as_they_are(chain, tmp_path):
    adapters = [chain / "sft", chain / "reward"]
    for precision in ("fp32", "bf16"):
        report = tiny_models.merge(chain / "base", adapters, tmp_path / precision, check_precision=precision)
    actual, expected = ({name: tensor for file in (tmp_path / precision).glob("*.safetensors")
                         for name, tensor in load_file(file).items()} for precision in ("bf16", "fp32"))
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)
    assert report["check_precision"] == "bf16"
    assert 0 < report["merge_difference"] < report["merge_resolution"]
    assert 0 < report["reload_difference"] < report["reload_resolution"]


def test_the_resolution_is_that_of_bf16_and_leaves_the_weights_as_they_are(chain):
    """A model of bf16 weights, computed in bf16 and in fp32, differs by rounding alone, and by less than this."""
    rounded, exact = (load_causal(chain / "sft-merged", precision) for precision in ("bf16", "fp32"))
    before = {name: weight.clone() for name, weight in rounded.named_parameters()}
    for name, weight in exact.named_parameters():
        weight.data = before[name].float()
    resolution = checks.measure_bf16_resolution(rounded)
    assert all(torch.equal(weight, before[name]) for name, weight in rounded.named_parameters())
    difference = checks.max_difference(checks.probe_outputs(rounded), checks.probe_outputs(exact))
    assert 0.1 * resolution < difference < resolution
    assert checks.measure_bf16_resolution(exact) == 0.0  # nothing to move


def test_a_matrix_that_is_merged_otherwise_is_refused(chain, tmp_path, monkeypatch):
    """After the check in memory: a wrong scale in the files alone."""
    real = shards.write_shards

    def scaled(model, tensors, *more):
        for layer in (layer for adapter in tensors.adapters for layer in adapter.layers.values()):
            if isinstance(layer, LoraLayer):
                layer.get_delta_weight = lambda name, layer=layer: 2 * type(layer).get_delta_weight(layer, name)
        real(model, tensors, *more)

    monkeypatch.setattr(modeling_merge, "write_shards", scaled)
    with pytest.raises(ValueError, match=r"merged differs from base and adapter by .* nothing is published"):
        tiny_models.merge(chain / "base", [chain / "sft"], tmp_path / "merged")


def test_an_adapter_that_is_not_merged_is_refused_in_bf16(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(LoraModel, "merge_and_unload", lambda model, **_: model.unload())
    with pytest.raises(ValueError, match=r"differs from base and adapter by .*, or the resolution of bf16: "):
        tiny_models.merge(chain / "base", [chain / "sft"], tmp_path / "merged", check_precision="bf16")


def test_weights_that_are_converted_on_loading_are_not_checked_in_bf16(tmp_path):
    base = save(FAMILIES["pythia"], tmp_path / "base")
    adapted(base).save_pretrained(tmp_path / "adapter")
    load_tokenizer(base).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"set merge\.check_precision to fp32"):
        tiny_models.merge(base, [tmp_path / "adapter"], tmp_path / "merged", check_precision="bf16")


def test_a_base_whose_file_is_missing_is_refused(chain, tmp_path):
    base = shutil.copytree(chain / "base", tmp_path / "base")
    sorted(base.glob("*.safetensors"))[1].unlink()
    with pytest.raises((ValueError, OSError)):
        tiny_models.merge(base, [chain / "sft"], tmp_path / "merged")
    assert not list((tmp_path / "merged").glob("*.safetensors"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tensor_that_the_files_lost_on_the_way_is_noticed(chain, precision, tmp_path, monkeypatch):
    """Weights of another base in one file: the reloaded model differs from the one in memory."""
    real = shards.write_shards

    def damaged(model, tensors, out, size):
        real(model, tensors, out, size)
        file = sorted(out.glob("*.safetensors"))[-1]
        save_file({name: torch.zeros_like(t) for name, t in load_file(file).items()}, file, metadata={"format": "pt"})

    monkeypatch.setattr(modeling_merge, "write_shards", damaged)
    with pytest.raises(ValueError, match="reloaded from disk differs"):
        tiny_models.merge(chain / "base", [chain / "sft"], tmp_path / "merged", max_shard_bytes=20_000,
                          check_precision=precision)
