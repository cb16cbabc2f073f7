"""Weights that are not finite are neither read nor published."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stages.modeling import lora, pretrained
from stages.modeling.finite_weights import check_finite
from stages.modeling.load import load_causal
from stages.modeling.pretrained import load_adapter, save_adapter, save_model
from stages.modeling.tokenizer import load_tokenizer
from tests.helpers import tiny_models


@pytest.fixture
def base(tmp_path):
    return tiny_models.save_base(tmp_path / "base")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_value_is_enough(value, dtype):
    weight = torch.zeros(5, 7, dtype=dtype)
    check_finite([("layer", weight), ("none", torch.zeros(0)), ("bytes", torch.ones(3, dtype=torch.uint8))], "x")
    weight[3, 4] = value
    with pytest.raises(ValueError, match=r"^x: layer has values that are not finite$"):
        check_finite([("layer", weight)], "x")


def test_a_base_is_not_read(base):
    weights = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][0, 0] = float("nan")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"base is damaged, or its training diverged: {name} has values"):
        load_causal(base)


def test_a_model_that_diverged_is_not_published(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")
    with pytest.raises(ValueError, match="training diverged, and nothing is published: lower the learning rate: model"):
        save_model(model, load_tokenizer(base), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_neither_published_nor_read(base, tmp_path, monkeypatch):
    model = lora.add_lora(load_causal(base), precision="fp32", r=2, alpha=2, dropout=0.0,
                          target_modules=("q_proj",))
    checked = []
    monkeypatch.setattr(pretrained, "check_finite", lambda weights, _: checked.extend(name for name, _ in weights))
    save_adapter(model, load_tokenizer(base), tmp_path / "good")
    monkeypatch.undo()
    assert checked and all("lora" in name for name in checked)  # the base, of gigabytes, was checked when it was loaded
    weights = load_file(tmp_path / "good/adapter_model.safetensors")
    next(iter(weights.values()))[0, 0] = float("nan")
    save_file(weights, tmp_path / "good/adapter_model.safetensors")
    with pytest.raises(ValueError, match="good is damaged, or its training diverged"):
        load_adapter(load_causal(base), tmp_path / "good")
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).fill_(float("nan"))
    with pytest.raises(ValueError, match="training diverged, and nothing is published"):
        save_adapter(model, load_tokenizer(base), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
