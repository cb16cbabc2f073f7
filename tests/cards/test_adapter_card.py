"""The card of an adapter: valid metadata, its base by name, and code that runs."""

import re

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from stages.cards.adapter_card import write_adapter_cards
from stages.modeling import lora
from stages.modeling.load import load_causal, load_pretrained
from stages.modeling.pretrained import save_adapter
from stages.modeling.tokenizer import load_tokenizer
from tests.helpers import tiny_models


@pytest.mark.parametrize("scorer", [False, True], ids=["policy", "reward model"])
def test_its_code_loads_the_adapter_that_was_saved(scorer, tmp_path):
    base = tiny_models.save_base(tmp_path / "base")
    kind = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
    optional = {"optional_weights": ("score.weight",), "num_labels": 1} if scorer else {}
    model = load_pretrained(kind, base, "fp32", **optional) if scorer else load_causal(base)
    model = lora.add_lora(model, precision="fp32", r=2, alpha=2, dropout=0.0, target_modules=("q_proj", "v_proj"),
                          scorer=scorer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    save_adapter(model, load_tokenizer(base), tmp_path / "adapter")
    write_adapter_cards(tmp_path / "adapter", base, None)
    card = ModelCard.load(tmp_path / "adapter/README.md")
    assert card.data.library_name == "peft" and card.data.base_model is None
    assert card.data.pipeline_tag == ("text-classification" if scorer else "text-generation")
    assert f"`{base}`" in card.text and "More Information Needed" not in card.text
    code = re.search(r"```python\n(.+?)```", card.text, re.DOTALL)[1]
    scope: dict = {}
    exec(code.replace("BASE_FOLDER", str(base)).replace("THIS_FOLDER", str(tmp_path / "adapter")), scope)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        mask = torch.ones_like(ids)
        assert torch.allclose(scope["model"].eval()(input_ids=ids, attention_mask=mask).logits,
                              model.eval()(input_ids=ids, attention_mask=mask).logits, atol=1e-5)
