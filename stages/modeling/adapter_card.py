"""Write README.md of an adapter's folder, in place of PEFT's template: what it is, and which base it needs."""

from pathlib import Path

from huggingface_hub import ModelCardData
from peft import LoraConfig

from stages.runtime.files import write_text

USE = """from peft import PeftModel
from transformers import {auto_class}

base = {auto_class}.from_pretrained("BASE_FOLDER"{labels})
model = PeftModel.from_pretrained(base, "THIS_FOLDER")"""
# task type of PEFT: class of Transformers, argument of its from_pretrained, pipeline
TASKS = {"CAUSAL_LM": ("AutoModelForCausalLM", "", "text-generation"),
         "SEQ_CLS": ("AutoModelForSequenceClassification", ", num_labels=1", "text-classification")}


def write_adapter_card(folder: Path, config: LoraConfig) -> None:
    """Write the card of an adapter.

    The metadata name no base model: on the Hub that must be an id, and here it is a folder of the run.
    """
    auto_class, labels, pipeline = TASKS[config.task_type]
    data = ModelCardData(library_name="peft", pipeline_tag=pipeline, tags=["lora", "stack-exchange"])
    name = " ".join(str(config.base_model_name_or_path).replace("`", "").split())
    modules = ", ".join(f"`{module}`" for module in sorted(config.target_modules))
    write_text(folder / "README.md", f"""---
{data.to_yaml()}
---

# A LoRA adapter of rank {config.r}

It was trained on the model in `{name}`, relative to the folder of the project, and gives nonsense on any other.
`manifest.json`, if there is one, has that model's digest. Adapted: {modules}.

## How to use it

```python
{USE.format(auto_class=auto_class, labels=labels)}
```

`python -m stages.merge` merges it into its base and checks the result.
""")
