"""One rule for every merge: a fresh load computes what base and adapter did (CORRECTNESS M1, failures 10, 11)."""

import pytest
import tiny
import torch
from peft.tuners.lora import LoraModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.learning import merging, models


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    model = models.add_lora(models.load_causal(base), r=4, alpha=8, dropout=0.0, target_modules=(), precision="fp32")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.2)
    folder = tmp_path_factory.mktemp("models") / "sft"
    model.save_pretrained(folder)
    models.load_tokenizer(base).save_pretrained(folder)
    return folder


def test_merged_folder_loads_plainly_and_computes_what_base_and_adapter_did(base, adapter, tmp_path):
    found = merging.merge(base, adapter, tmp_path / "merged", "fp32", 1e-3)
    assert found["merge_difference"] < 1e-3 and found["reload_difference"] < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = merging.probe_ids(plain.config.vocab_size)
    untouched = merging.outputs(models.load_causal(base), ids)
    with torch.no_grad():
        assert (plain(ids).logits - untouched).abs().max() > 0.01  # the adapter did something
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").pad_token_id == 0


def test_tied_embeddings_stay_tied(base, adapter, tmp_path):
    merging.merge(base, adapter, tmp_path / "merged", "fp32", 1e-3)
    model = models.load_causal(tmp_path / "merged")
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_a_merge_that_computes_something_else_is_refused(base, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(LoraModel, "merge_and_unload", lambda self, **more: self.unload())
    with pytest.raises(ValueError, match="nothing is published"):
        merging.merge(base, adapter, tmp_path / "merged", "fp32", 1e-3)


def test_weights_damaged_on_their_way_to_disk_are_refused(base, adapter, tmp_path, monkeypatch):
    real = models.load_causal

    def damaged(folder, precision="fp32"):
        model = real(folder, precision)
        if str(folder).endswith("merged"):
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(1.1)
        return model

    monkeypatch.setattr(merging.models, "load_causal", damaged)
    with pytest.raises(ValueError, match="reloaded from disk"):
        merging.merge(base, adapter, tmp_path / "merged", "fp32", 1e-3)


def test_bf16_is_saved_as_bf16_within_its_rounding(base, adapter, tmp_path):
    found = merging.merge(base, adapter, tmp_path / "merged", "bf16", 1e-3)
    assert 0 < found["rounding_difference"] < 0.05 * found["largest_output"] and found["reload_difference"] < 1e-5
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == torch.bfloat16
