"""A published reward model: a sequence classifier with one output, that has its own tokenizer and reads text.

It scores as its authors' own forward pass does for one text alone, whatever else is in the batch.
Shapes: B rows.
"""

import re
import warnings
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from stages.modeling.load import autocast, device
from stages.modeling.packed.forward import chunks_by_length, pad_batch

PLACE = re.compile(r"\{(question|response)\}")


class PublishedScorer:
    """Questions and responses as text to scores. Never runs code from the repository, never reads pickled weights.

    template: what the model reads, over {question} and {response}; special tokens in it are special tokens, in a
    question or a response they are text. Of a text over the model's length the start is left out, with a warning.
    """

    def __init__(self, name: Path | str, template: str, precision: str, batch_rows: int = 64):
        self.name, self.template, self.precision = name, template, precision
        self.tokenizer, self.model = _load(name, precision)
        self.special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        self.pad_id = _filler(self.model)
        self.batch_rows = batch_rows if self.pad_id is not None else 1
        self.most_tokens = min(
            self.tokenizer.model_max_length, getattr(self.model.config, "max_position_embeddings", None) or 2**31
        )

    @torch.no_grad()
    def __call__(self, questions: list[str], responses: list[str]) -> torch.Tensor:
        """Scores [B] fp32 on the CPU, in the order given."""
        rows = [self._ids(question, response) for question, response in zip(questions, responses, strict=True)]
        scores = torch.empty(len(rows))
        for chunk in chunks_by_length([len(row) for row in rows], self.batch_rows):
            ids, mask = pad_batch([rows[i] for i in chunk], where=self.model.device)
            # Many a model finds the last token as the last one that is not config.pad_token_id: fill with that.
            ids = ids.masked_fill(mask == 0, self.pad_id or 0)
            with autocast(self.precision):
                scores[chunk] = self.model(input_ids=ids, attention_mask=mask).logits.squeeze(-1).float().cpu()
        return scores

    def _ids(self, question: str, response: str) -> list[int]:
        texts = {"question": self._as_text(question), "response": self._as_text(response)}
        text = PLACE.sub(lambda place: texts[place[1]], self.template)  # once: what is put in is not searched again
        ids = self.tokenizer(text).input_ids
        if len(ids) <= self.most_tokens:
            return ids
        warnings.warn(f"{self.name} reads {self.most_tokens} tokens: longer texts lose their start", stacklevel=2)
        return self.tokenizer(text, truncation=True, max_length=self.most_tokens).input_ids

    def _as_text(self, text: str) -> str:
        """A response may spell out "</s>" or a change of speaker: a space keeps it from becoming one."""
        for token in self.special:
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text


def _load(name: Path | str, precision: str):
    """Tokenizer and model in eval mode on this process's device, in fp32 or bf16 (which layers of a stranger's model
    could be quantised is not known); ValueError in one line without exactly one, trained, output."""
    dtype = torch.float32 if precision in ("fp32", "mixed") else torch.bfloat16
    try:
        outputs = AutoConfig.from_pretrained(name, trust_remote_code=False).num_labels
        if outputs != 1:
            raise ValueError(f"it has no head with one output, but {outputs}: a reward is one number")
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


def _filler(model) -> int | None:
    """The id that this model's forward pass knows as a pad; None where there is none, and each row must be alone."""
    pad = model.config.get_text_config().pad_token_id
    return pad if pad is not None and 0 <= pad < model.get_input_embeddings().num_embeddings else None
