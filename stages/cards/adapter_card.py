"""Write README.md of an adapter's folder, in place of PEFT's template: what it is, and which base it needs."""

import json
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from stages.artifacts.lineage import find_origin
from stages.cards.sections import CARD, MAX_LABEL_CHARACTERS, format_section, origin_metadata
from stages.render.markdown_tables import escape_cell
from stages.runtime.files import write_text

CONFIG, CHECKPOINTS = "adapter_config.json", "checkpoints"

USE = """from peft import PeftModel
from transformers import {auto_class}

base = {auto_class}.from_pretrained("BASE_FOLDER"{labels})
model = PeftModel.from_pretrained(base, "THIS_FOLDER")"""
# task type of PEFT: class of Transformers, argument of its from_pretrained, pipeline
TASKS = {"CAUSAL_LM": ("AutoModelForCausalLM", "", "text-generation"),
         "SEQ_CLS": ("AutoModelForSequenceClassification", ", num_labels=1", "text-classification")}


def write_adapter_cards(folder: Path, base: Path, pairs: Path | None) -> None:
    """Write the cards of an adapter and of those in its folder (a value function, further members).

    base: the model that it was trained on. pairs: that it learnt from; None: others.
    """
    origin = find_origin(base, pairs)
    configs = [path for path in sorted(folder.rglob(CONFIG)) if CHECKPOINTS not in path.relative_to(folder).parts]
    for path in configs:
        card = ModelCard(_render_card(json.loads(path.read_text(encoding="utf-8"))))
        for name, value in origin_metadata(origin).items():
            setattr(card.data, name, value)
        words = escape_cell(origin.describe_base(), MAX_LABEL_CHARACTERS) if origin.provenance else ""
        section = format_section("Base", f"The pretrained model was {words}." if words else "")
        write_text(path.with_name(CARD), str(card) if not section else f"{str(card).rstrip()}\n\n{section}\n")


def _render_card(config: dict) -> str:
    """Render the card of an adapter from PEFT's adapter_config.json.

    The metadata name no base model: on the Hub that must be an id, and here it is a folder of the run.
    """
    auto_class, labels, pipeline = TASKS[config["task_type"]]
    data = ModelCardData(library_name="peft", pipeline_tag=pipeline, tags=["lora", "stack-exchange"])
    name = " ".join(str(config["base_model_name_or_path"]).replace("`", "").split())
    modules = ", ".join(f"`{module}`" for module in sorted(config["target_modules"]))
    return f"""---
{data.to_yaml()}
---

# A LoRA adapter of rank {config["r"]}

It was trained on the model in `{name}`, relative to the folder of the project, and gives nonsense on any other.
`manifest.json`, if there is one, has that model's digest. Adapted: {modules}.

## How to use it

```python
{USE.format(auto_class=auto_class, labels=labels)}
```

`python -m stages.merge` merges it into its base and checks the result.
"""
