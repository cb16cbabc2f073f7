"""The reward model: one score for an answer to a prompt; how it is read off the states, and where its zero lies.

As published, a head reads the state at the last token. It may also read every token of the answer, and there are two
optional further terms: `log_probability_weight` times the answer's mean log-probability a token under the model's own
trunk (what the language model knows, which value is the likely one, is there at each token; a head at the last token
would first have to learn to carry it to the end), and one that counts words (lexical.py).
Shapes: B rows, M response tokens of all rows, D width, V vocabulary.
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from stages.learning.lexical import FILE, Lexical
from stages.modeling.load import autocast
from stages.modeling.lora import unwrap_peft
from stages.modeling.packed.forward import chunks_by_length, packed_hidden_states
from stages.modeling.packed.sequences import PackedResponses, by_row, pack_responses
from stages.modeling.packed.token_logprobs import selective_log_softmax
from stages.runtime.artifact import write_json

SCORING = "scoring.json"
EXAMPLES = 64  # reference answers that are kept with their scores
SUM_TOKENS = 100  # a sum over an answer's tokens counts in hundreds: it is then about the size of a mean


@dataclass(frozen=True)
class Scoring:
    """How a score is read.

    pooling: 'last', the head's output at the last token; 'mean', that of all the answer's tokens, averaged; 'sum',
    their sum in hundreds, so that an answer's length is in its score. There a token's n-th occurrence counts
    log2(1 + 1 / n), n occurrences together log2(1 + n): words said again add little, and a policy that repeats itself
    gains little.
    log_probability_weight: times the answer's mean log-probability a token, in nats, added to it.
    """

    pooling: str = "last"
    log_probability_weight: float = 0.0


def initialise_head(model, generator: torch.Generator, pooling: str = "last") -> None:
    """score.weight ~ Normal(0, 1/sqrt(D+1)) ("The N Implementation Details of RLHF with PPO").

    0 where it reads many tokens: a random direction's outputs add up, and drown what is learnt.
    """
    weight = model.score.weight
    scale = 1 / math.sqrt(weight.shape[1] + 1) if pooling == "last" else 0.0
    drawn = torch.randn(weight.shape, generator=generator) * scale
    with torch.no_grad():
        weight.copy_(drawn.to(weight))


class Reading(NamedTuple):
    """Of texts: raw `scores` [B] fp32, and the answers' mean log-probability `log_p` [B] a token, if it was read."""

    scores: torch.Tensor
    log_p: torch.Tensor | None


def read(model, texts: PackedResponses, scoring: Scoring, log_p: bool = False) -> Reading:
    """One forward pass. There are no pads in it: neither padding nor the other rows matter."""
    classifier = unwrap_peft(model)
    places = texts.last if scoring.pooling == "last" else texts.own
    log_p = log_p or bool(scoring.log_probability_weight)
    hidden = packed_hidden_states(classifier, texts.batch, torch.cat([places, texts.before]) if log_p else places)
    scores = _pooled(_head_scores(classifier, hidden[: len(places)]), texts, scoring.pooling)
    if not log_p:
        return Reading(scores, None)
    means = _mean_log_probabilities(classifier, hidden[len(places) :], texts)
    return Reading(scores + scoring.log_probability_weight * means, means)


def _pooled(scores: torch.Tensor, texts: PackedResponses, pooling: str) -> torch.Tensor:
    """Of the tokens read to [B]."""
    if pooling == "last":
        return scores
    if pooling == "mean":
        return by_row(scores, texts).sum(-1) / texts.mask.sum(-1)
    return by_row(scores * novelty(texts), texts).sum(-1) / SUM_TOKENS


def novelty(texts: PackedResponses) -> torch.Tensor:
    """Weight [M] of each response token: log2(1 + 1 / n) for its n-th occurrence in the response."""
    row = texts.place // texts.mask.shape[1]
    words = row * (1 + texts.chosen.max()) + texts.chosen
    ordered, order = words.sort(stable=True)
    before = torch.arange(len(words), device=words.device) - torch.searchsorted(ordered, ordered)  # in the response
    return torch.empty_like(ordered, dtype=torch.float32).index_copy(0, order, torch.log2(1 + 1 / (1 + before)))


def _mean_log_probabilities(classifier, before: torch.Tensor, texts: PackedResponses) -> torch.Tensor:
    """Mean log-probability [B] a token of the responses, from the states [M, D] before their tokens.

    The output layer is the embeddings', see `check_tied`.
    """
    vocabulary = classifier.get_input_embeddings().weight
    layer = nn.utils.skip_init(nn.Linear, *reversed(vocabulary.shape), bias=False, device="meta")
    layer.weight = vocabulary
    return by_row(selective_log_softmax(layer, before, texts.chosen, 1.0), texts).sum(-1) / texts.mask.sum(-1)


def check_tied(config, weight: float, name: str) -> None:
    """A sequence classifier carries no language-model head: its log-probabilities need one tied to the embeddings."""
    if weight and not config.tie_word_embeddings:
        raise ValueError(f"reward.{name} needs a model whose output layer is tied to its embeddings; this one's is "
                         f"not: set it to 0")


class Scorer:
    """Prompts and answers to rewards. A merged model carries its way of scoring and its normalisation in its config.

    scoring, words: given while the model trains; a merged model knows its own (see put_scoring).
    """

    def __init__(self, model, precision: str, scoring: Scoring | None = None, batch_rows: int = 64,
                 words: Lexical | None = None):
        self.model, self.precision, self.batch_rows = model, precision, batch_rows
        self.words = getattr(model, "lexical", None) if words is None else words
        known = {f.name: getattr(model.config, f"reward_{f.name}", f.default) for f in fields(Scoring)}
        self.scoring = Scoring(**known) if scoring is None else scoring
        self.mean = float(getattr(model.config, "reward_mean", 0.0))
        self.std: float | None = getattr(model.config, "reward_std", None)  # on reference answers, for those who scale

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
        """Rewards [B] fp32 on the CPU; rows are grouped by length, results in the order given."""
        assert not self.model.training, "dropout would act on the scores"
        lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        scores = torch.empty(len(prompts))
        for chunk in chunks_by_length(lengths, self.batch_rows):
            texts = pack_responses([prompts[i] for i in chunk], [answers[i] for i in chunk], self.model.device)
            with autocast(self.precision):
                scores[chunk] = read(self.model, texts, self.scoring).scores.cpu()
        return scores - self.mean if self.words is None else scores - self.mean + self.words(answers)


def save_scoring(
    folder: Path, scoring: Scoring, precision: str, reference: tuple[list, list], scores: torch.Tensor
) -> None:
    """How to score, and where 0 lies: the mean raw score of reference answers (arXiv 2403.17031).

    reference: their prompts and answers. Some are kept with their scores: whoever serves the model in another precision
    can see what that does to them.
    """
    write_json(
        folder / SCORING,
        {
            **asdict(scoring),
            "lexical": (folder / FILE).is_file(),
            "precision": precision,
            "mean": float(scores.mean()),
            "std": float(scores.std(correction=0)),
            "reference_answers": len(scores),
            "examples": [
                {"prompt": prompt, "answer": answer, "score": score}
                for prompt, answer, score in list(zip(*reference, scores.tolist(), strict=True))[:EXAMPLES]
            ],
        },
    )


def member_folder(artifact: Path, member: int) -> Path:
    """Where a reward artifact, merged or not, keeps one of its models."""
    return artifact if member == 0 else artifact / f"member-{member}"


def members_of(artifact: Path) -> list[Path]:
    """The folders of all the models in a reward artifact."""
    return [artifact, *(member_folder(artifact, n) for n in range(1, 1 + len(list(artifact.glob("member-*")))))]


def keep_scoring(adapter: Path, out: Path, model) -> None:
    """Carry this from an adapter into a merged model: as files, and in its config.json."""
    write_json(out / SCORING, put_scoring(adapter, model))
    if model.lexical is not None:
        model.lexical.save(out)


def put_scoring(adapter: Path, model) -> dict:
    """Carry this from an adapter into a model's config, and its lexical term; gives what scoring.json says."""
    try:
        found = json.loads((adapter / SCORING).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{adapter} has no {SCORING}: is it a finished reward artifact?") from None
    for name in (*(f.name for f in fields(Scoring)), "mean", "std"):
        setattr(model.config, f"reward_{name}", found[name])
    model.lexical = Lexical.load(adapter, found.get("lexical", False))
    model.config.reward_lexical = model.lexical is not None
    return found


def _head_scores(classifier, pooled: torch.Tensor) -> torch.Tensor:
    """Scores [B] fp32 of hidden states [B, D]."""
    score = getattr(classifier.score, "modules_to_save", {"default": classifier.score})["default"]
    return classifier.score(pooled.to(score.weight.dtype)).squeeze(-1).float()
