"""Parameters of planned models, beside real ones and published numbers."""

import pytest
import transformers as hf

from stages.modeling import lora
from stages.planning import hardware, shapes
from stages.recipe.sections.models import Scratch
from tests.helpers.architectures import FAMILIES, POLICIES, lora_targets

PUBLISHED = {"huggyllama/llama-7b": 6_738_415_616, "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-3B": 3_085_938_688,
             "meta-llama/Llama-3.2-1B": 1_235_814_400, "meta-llama/Llama-3.1-8B": 8_030_261_248,
             "Qwen/Qwen3-0.6B-Base": 596_049_920, "HuggingFaceTB/SmolLM3-3B-Base": 3_075_098_624}


@pytest.mark.parametrize("family", FAMILIES | POLICIES)
def test_parameters_are_those_of_a_real_model(family):
    config = (FAMILIES | POLICIES)[family]
    real, planned = hf.AutoModelForCausalLM.from_config(config), shapes.read_shape(config.to_dict())
    assert planned.count_parameters() == sum(p.numel() for p in real.parameters())
    targets = lora_targets(config)
    real = lora.add_lora(real, r=8, alpha=16, dropout=0.0, precision="fp32", target_modules=targets)
    adapter = sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert planned.count_adapter(8, targets) == adapter > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_bundled_base_has_its_published_parameters(name, monkeypatch):
    monkeypatch.setattr(shapes, "_download", None)  # no network
    assert shapes.find_shape(name, None, None).count_parameters() == PUBLISHED[name]


def test_every_bundled_shape_is_checked():
    assert {path.stem.replace("--", "/", 1) for path in shapes.BUNDLED.glob("*.json")} == set(PUBLISHED)


def test_scratch_has_the_shape_of_the_recipe():
    shape = shapes.find_shape("scratch", None, Scratch(hidden_size=64, layers=3))
    assert (shape.width, shape.layers, shape.output_weights) == (64, 3, 0)


def test_a_folder_without_a_configuration_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json: give the folder of a model$"):
        shapes.find_shape(str(tmp_path), None, None)


@pytest.mark.parametrize(("arguments", "reason"), [
    (("TPU", None, None, None, 0.4), r"^--device TPU: unknown; choose one of H200"),
    ((None, -1.0, None, None, 0.4), r"^--device-memory-gib must be above 0, not -1$"),
    ((None, 24.0, None, 0, 0.4), r"^--devices must be above 0, not 0$"),
    ((None, 24.0, None, None, 2.0), r"^--model-flops-share must be above 0 and at most 1, not 2$")])
def test_a_card_that_cannot_be_is_one_line(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        hardware.choose_hardware(*arguments)


def test_a_memory_alone_takes_the_rates_of_a_card_of_that_size():
    assert hardware.choose_hardware(None, 24, None, None, None).card.name == "4090"
    assert hardware.choose_hardware(None, 80, 500, None, None).card[1:3] == (80, 500)
