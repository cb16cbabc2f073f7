"""Write a reward model as a plain sequence classifier that other trainers load by path, and check what it scores.

What each of them needs is in CARD, its README. They read a question with its answer as one text, where this project
encodes both separately: the tokenizer gets a rule that splits the text at the end of the prompt, if that gives the same
ids. EOS is part of the text, by the chat template. Shapes: B texts.
"""

import json
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from stages.modeling.compatible_files import add_rope_of_transformers_4, chat_template, save_tokenizer
from stages.modeling.load import check_whole_model
from stages.modeling.merging.merge import DTYPES
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import SCORING, load_scoring, member_folders, read_no_model, save_scoring
from stages.stackexchange.prompt import PROMPT_SUFFIX, parse_question

HEAD = "score"  # the head's name in Transformers' classifiers, and in OpenRLHF's by default
MAX_DIFFERENCE = 1e-4  # in fp32, on reference answers; sums in another order differ by 1e-6
BATCH_ROWS = 8
CARD = """---
library_name: transformers
pipeline_tag: text-classification
tags: [reward-model]
---

# A reward model as a plain sequence classifier

One output, no code of its own. The reward is the logit minus {mean:.6g} (`mean` and `reward_mean` in `config.json`):
the head has no bias that could hold this constant. It reads the last token, which must be EOS, and a question and its
answer in the words of the tokenizer's chat template. {comparison}

THIS_FOLDER below is the path of this folder, SFT that of a policy with the same chat template (`sft-merged`).

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

**TRL** (run with 1.16): `RLOOTrainer(model="SFT", reward_funcs="THIS_FOLDER", train_dataset=prompts)`, and GRPOTrainer
likewise. Prompts must be conversations, `{{"prompt": [{{"role": "user", "content": "..."}}]}}`: one that is plain text
is scored without EOS, which this model was not trained to read. TRL subtracts no mean: its rewards are these plus
{mean:.6g}, which leaves advantages the same.

**OpenRLHF** (its code was read, version 0.11.0; it was not run) subtracts `mean` and divides by `std`, which is 1 here,
with `--reward.normalize_enable`. It scores the policy's own ids, so that SFT must have this tokenizer's vocabulary:

```text
python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path SFT --reward.model_name_or_path THIS_FOLDER \\
    --reward.normalize_enable --ds.param_dtype fp32 --data.apply_chat_template --data.input_key prompt ...
```

**verl** (its code was read, version 0.10.0.dev; it was not run) lets vLLM classify the text, and subtracts no mean:

```text
reward.reward_model.enable=True reward.reward_model.model_path=THIS_FOLDER reward.reward_model.rollout.name=vllm
reward.reward_model.rollout.dtype=float32
```

- Both compute in bf16 by default, which rounds rewards.
- A response that reached the length limit without EOS is scored with EOS by TRL and verl, and without by OpenRLHF.
- A text that spells out a special token, such as the end of a sequence, is read with a space in it.
- Most trainers cut no text: a question with its answer may have {positions:,} tokens at most.
"""


def read_exportable(reward: Path) -> dict:
    """Return the content of scoring.json; ValueError if a plain classifier cannot score like this model."""
    if reason := read_no_model(reward):
        raise ValueError(f"{reward} has no model: {reason}")
    check_whole_model(reward)
    content = load_scoring(reward)
    if content["log_probability_weight"]:
        raise ValueError(f"{reward} adds {content['log_probability_weight']:g} times the answer's log-probability to "
                         f"its score, which a plain classifier cannot: train it with reward.log_probability_weight 0")
    if content["pooling"] != "last":
        raise ValueError(f"{reward} reads every token of the answer (pooling {content['pooling']!r}), which a plain "
                         f"classifier cannot: train it with reward.pooling last")
    if (members := member_folders(reward))[1:]:
        raise ValueError(f"{reward} holds {len(members)} models, and a plain classifier is one: export one of them, "
                         f"such as --reward {members[1]}")
    return content


def export_reward_model(reward: Path, out: Path, dtype: str, max_shard_bytes: int) -> dict[str, float]:
    """Write model, tokenizer and scoring.json to `out`; compare the reloaded files with the model in `reward`.

    Returns the comparison on the reference answers stored with the model: their number, `examples`; the share that one
    text encodes to the ids that this project scores, `same_ids_share`; the largest difference in reward of these,
    `max_difference`; and that of the others, if there are any, `max_difference_other`.

    Raises ValueError if it cannot be exported, or if rewards of the same ids differ in fp32.
    """
    content = read_exportable(reward)
    model, tokenizer = load_classifier(reward), load_tokenizer(reward)
    examples = [(example["prompt"], example["answer"]) for example in content["examples"]]
    texts = [[{"role": "user", "content": parse_question(tokenizer, prompt)},
              {"role": "assistant", "content": _decode_answer(tokenizer, answer)}] for prompt, answer in examples]
    ids = [prompt + answer for prompt, answer in examples]
    rewards = Scorer(model, "fp32")(*map(list, zip(*examples, strict=True)))
    _complete_config(model, tokenizer, content["mean"])
    model.to(DTYPES[dtype]).save_pretrained(out, max_shard_size=max_shard_bytes)
    add_rope_of_transformers_4(out)
    _save_joint_tokenizer(tokenizer, out, texts, ids)
    save_scoring(out, content)
    return _compare(out, texts, ids, rewards, content["mean"], exact=dtype == "fp32")


def joint_chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template with special tokens that a text spells out broken by a space: they stay text."""
    content = "message['content']"
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and token.content:
            whole, broken = (json.dumps(text) for text in (token.content, f"{token.content[:1]} {token.content[1:]}"))
            content += f" | replace({whole}, {broken})"
    return chat_template(tokenizer).replace("message['content']", f"({content})")


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[list[dict]]) -> list[list[int]]:
    """Encode conversations as other trainers do: one text each, whose special tokens the chat template has written."""
    lines = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in texts]
    return tokenizer(lines, add_special_tokens=False).input_ids if lines else []


def _complete_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mean: float) -> None:
    """Add what other trainers read: a padding id that has an embedding; the head's name, mean and std of OpenRLHF."""
    pad, rows = tokenizer.pad_token_id, model.get_input_embeddings().num_embeddings
    if pad >= rows:
        model.resize_token_embeddings(pad + 1, mean_resizing=False)
        with torch.no_grad():
            model.get_input_embeddings().weight[rows:] = 0
    model.config.pad_token_id = pad
    model.config.value_head_prefix, model.config.mean, model.config.std = HEAD, mean, 1.0


def _save_joint_tokenizer(tokenizer: PreTrainedTokenizerBase, out: Path, texts: list, ids: list) -> None:
    """Save the tokenizer; with the rule that splits a text at the end of the prompt if more examples are then the same.

    The rule splits after the prompt's last words, so that no merge crosses the boundary.
    """
    tokenizer.padding_side, tokenizer.truncation_side = "right", "left"
    tokenizer.chat_template = template = joint_chat_template(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        before, without = backend.pre_tokenizer, _count_same(encode_texts(tokenizer, texts), ids)
        split = pre_tokenizers.Split(PROMPT_SUFFIX, behavior="merged_with_previous")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, *([before] if before else [])])
        if _count_same(encode_texts(tokenizer, texts), ids) <= without and before is not None:
            backend.pre_tokenizer = before
    save_tokenizer(tokenizer, out, template)


def _decode_answer(tokenizer: PreTrainedTokenizerBase, answer: list[int]) -> str:
    """Decode an answer without the EOS at its end, which the chat template writes."""
    ids = answer[:-1] if answer[-1:] == [tokenizer.eos_token_id] else answer
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _count_same(encoded: list[list[int]], ids: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(encoded, ids, strict=True))


@torch.no_grad()
def _compare(out: Path, texts: list[list[dict]], ids: list[list[int]], rewards: torch.Tensor, mean: float, exact: bool
             ) -> dict[str, float]:
    """Score the reference answers with plain Transformers, from the files, in batches that are padded on the right."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).eval()
    encoded = encode_texts(tokenizer, texts)
    scores = torch.cat([model(**tokenizer.pad({"input_ids": encoded[start:start + BATCH_ROWS]}, return_tensors="pt",
                                              padding_side="right")).logits[:, 0]
                        for start in range(0, len(encoded), BATCH_ROWS)]) - mean
    same = torch.tensor([one == other for one, other in zip(encoded, ids, strict=True)])
    differences = (scores - rewards).abs()
    report = {"examples": len(ids), "same_ids_share": float(same.double().mean()),
              "max_difference": float(differences[same].max()) if same.any() else 0.0}
    if exact and not report["max_difference"] <= MAX_DIFFERENCE:
        raise ValueError(f"the exported files score differently, by up to {report['max_difference']:.2g} on "
                         f"{SCORING}'s reference answers, and are not published")
    return report if same.all() else report | {"max_difference_other": float(differences[~same].max())}


def render_export_card(report: dict[str, float], mean: float, positions: int) -> str:
    """Render the README; report: what export_reward_model returns.

    mean: of the reference answers' scores. positions: of the model, in tokens.
    """
    return CARD.format(mean=mean, positions=positions, comparison=describe_report(report))


def describe_report(report: dict[str, float]) -> str:
    """Say how many reference answers are encoded as in training, and how much rewards differ."""
    others = (f" The others, encoded differently as one text, differ by up to {report['max_difference_other']:.2g}."
              if "max_difference_other" in report else "")
    return (f"Of {report['examples']} reference answers {100 * report['same_ids_share']:.0f} % are encoded as in "
            f"training, with rewards that differ by {report['max_difference']:.1g} at most.{others}")
