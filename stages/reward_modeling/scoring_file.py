"""TODO docstring."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from stages.reward_modeling.lexical_term import FILE, Lexical
from stages.runtime.artifact import write_json

SCORING = "scoring.json"


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


def member_folders(artifact: Path) -> list[Path]:
    """The folders of all the models in a reward artifact."""
    return [artifact, *(member_folder(artifact, n) for n in range(1, 1 + len(list(artifact.glob("member-*")))))]


def copy_scoring(adapter: Path, out: Path, model) -> None:
    """Carry this from an adapter into a merged model: as files, and in its config.json."""
    write_json(out / SCORING, apply_scoring(adapter, model))
    if model.lexical is not None:
        model.lexical.save(out)


def apply_scoring(adapter: Path, model) -> dict:
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

EXAMPLES = 64  # reference answers that are kept with their scores
