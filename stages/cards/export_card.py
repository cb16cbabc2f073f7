"""Write the README of an exported reward model: how to use it in each trainer, and what was compared."""

TEXT = """---
library_name: transformers
pipeline_tag: text-classification
tags: [reward-model]
---

# A reward model as a plain sequence classifier

One output, no code of its own. The reward is the logit minus {mean:.6g} (`mean` and `reward_mean` in `config.json`):
the head has no bias that could hold this constant. It reads the last token, which must be EOS, and a question and its
answer in the words of the tokenizer's chat template. {comparison}

THIS_FOLDER below is the path of this folder, SFT that of a policy with the same chat template (`sft-merged`).

## Transformers

```python
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model, tokenizer = (kind.from_pretrained("THIS_FOLDER") for kind in (AutoModelForSequenceClassification, AutoTokenizer))
chat = [{{"role": "user", "content": "How do I stop the server?"}},
        {{"role": "assistant", "content": "Use the stop command."}}]
text = tokenizer.apply_chat_template(chat, tokenize=False)
inputs = tokenizer([text], add_special_tokens=False, padding=True, return_tensors="pt")
print(model(**inputs).logits[:, 0] - model.config.mean)
```

## TRL (run with 1.16: RLOOTrainer; GRPOTrainer loads and calls reward models in the same way)

```python
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer

prompts = Dataset.from_dict({{"prompt": [[{{"role": "user", "content": "How do I stop the server?"}}]]}})
RLOOTrainer(model="SFT", reward_funcs="THIS_FOLDER", train_dataset=prompts, args=RLOOConfig("rloo")).train()
```

Prompts must be conversations, as here. Of a prompt that is plain text TRL scores prompt and completion without EOS,
which this model was not trained to read. TRL subtracts no mean: its rewards are these plus {mean:.6g}, which leaves
advantages the same.

## OpenRLHF (its code was read, version 0.11.0; it was not run)

```text
python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path SFT --reward.model_name_or_path THIS_FOLDER \\
    --reward.normalize_enable --ds.param_dtype fp32 --data.apply_chat_template --data.input_key prompt ...
```

It scores the policy's own ids, so that SFT must have this tokenizer's vocabulary. With `--reward.normalize_enable` it
subtracts `mean` and divides by `std`, which is 1 here. `value_head_prefix` names the head. Its parameters are bf16 by
default, which rounds rewards.

## verl (its code was read, version 0.10.0.dev; it was not run)

```text
reward.reward_model.enable=True reward.reward_model.model_path=THIS_FOLDER reward.reward_model.rollout.name=vllm
reward.reward_model.rollout.dtype=float32
```

It applies this chat template to the prompt's messages and the answer, and lets vLLM classify the text without an
activation. It subtracts no mean. The default dtype is bfloat16, which rounds rewards.

## What differs from the project that trained it

- A response that reached the length limit without EOS is scored with EOS by TRL and verl, and without by OpenRLHF.
- A text that spells out a special token, such as the end of a sequence, is read with a space in it.
- Most trainers cut no text: a question with its answer may have {positions:,} tokens at most.
"""


def render_export_card(report: dict[str, float], mean: float, positions: int) -> str:
    """Render the README; report: what reward_checks.export.export_reward_model returns.

    mean: of the reference answers' scores. positions: of the model, in tokens.
    """
    return TEXT.format(mean=mean, positions=positions, comparison=_describe(report))


def _describe(report: dict[str, float]) -> str:
    words = (f"Of {report['examples']} reference answers {100 * report['same_ids_share']:.0f} % are encoded as in "
             f"training, with rewards that differ by {report['max_difference']:.1g} at most.")
    if "max_difference_other" not in report:
        return words
    return f"{words} The others, encoded differently as one text, differ by up to {report['max_difference_other']:.2g}."
