"""Score texts with a published reward model: a sequence classifier with one output and its own tokenizer.

A score equals that of the model's own forward pass on the text alone, whatever else is in the batch. Shapes: B rows.
"""

import re
import warnings
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from stages.distributed import group
from stages.distributed.units import own_units
from stages.modeling.load import autocast, device
from stages.modeling.packed.forward import chunk_by_length, pad_batch

PLACEHOLDER = re.compile(r"\{(question|response)\}")


class ClassifierScorer:
    """Score questions with responses as text. Repository code is never run, pickled weights are never read.

    A text longer than the model's maximum is truncated at its start, with a warning.

    Args:
        template: the model's input, over {question} and {response}. Special tokens in it are special tokens; in a
            question or a response they are text.
    """

    def __init__(self, name: Path | str, template: str, precision: str, batch_rows: int = 64):
        self.name, self.template, self.precision = name, template, precision
        self.tokenizer, self.model = _load(name, precision)
        self.special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        self.pad_id = _pad_id(self.model)
        self.batch_rows = batch_rows if self.pad_id is not None else 1
        self.max_tokens = min(
            self.tokenizer.model_max_length, getattr(self.model.config, "max_position_embeddings", None) or 2**31
        )

    @torch.no_grad()
    def __call__(self, questions: list[str], responses: list[str]) -> torch.Tensor:
        """Compute scores [B], fp32 on the CPU, in the order of the rows, which are shared among the processes."""
        rows = [self._ids(question, response) for question, response in zip(questions, responses, strict=True)]
        scores, lengths = torch.zeros(len(rows)), [len(row) for row in rows]
        for chunk in own_units(chunk_by_length(lengths, self.batch_rows)):
            ids, mask = pad_batch([rows[i] for i in chunk], device=self.model.device)
            # Many models take the last token that is not config.pad_token_id as the last one: pad with that id.
            ids = ids.masked_fill(mask == 0, self.pad_id or 0)
            with autocast(self.precision):
                scores[chunk] = self.model(input_ids=ids, attention_mask=mask).logits.squeeze(-1).float().cpu()
        return group.sum_tensor(scores)

    def _ids(self, question: str, response: str) -> list[int]:
        texts = {"question": self._as_text(question), "response": self._as_text(response)}
        text = PLACEHOLDER.sub(lambda match: texts[match[1]], self.template)  # one pass: inserted text is not searched
        ids = self.tokenizer(text).input_ids
        if len(ids) <= self.max_tokens:
            return ids
        warnings.warn(f"{self.name} reads {self.max_tokens} tokens: longer texts lose their start", stacklevel=2)
        return self.tokenizer(text, truncation=True, max_length=self.max_tokens).input_ids

    def _as_text(self, text: str) -> str:
        """Break special tokens that a text spells out, such as "</s>", by a space."""
        for token in self.special:
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text


def _load(name: Path | str, precision: str):
    """Load tokenizer and model, in eval mode, on this process's device; ValueError without exactly one trained output.

    Weights are fp32 or bf16, never quantised: which layers of an unknown model can be is not known.
    """
    dtype = torch.float32 if precision in ("fp32", "mixed") else torch.bfloat16
    try:
        outputs = AutoConfig.from_pretrained(name, trust_remote_code=False).num_labels
        if outputs != 1:
            raise ValueError(f"its head has {outputs} outputs, and must have one: a reward is one number")
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, truncation_side="left")
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name,
            dtype=dtype,
            device_map={"": device()},
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"rewards: cannot use {str(name)!r}: {' '.join(str(error).split())}") from None
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise ValueError(f"rewards: {str(name)!r} lacks the weights {missing}: its scores would be random")
    return tokenizer, model.eval()


def _pad_id(model) -> int | None:
    """Id that the model's forward pass recognises as padding; None if there is none, and rows cannot be batched."""
    pad = model.config.get_text_config().pad_token_id
    return pad if pad is not None and 0 <= pad < model.get_input_embeddings().num_embeddings else None
