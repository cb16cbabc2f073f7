"""Read and write scoring.json of a reward artifact: how its model scores, where 0 is, reference scores to check by.

An artifact without a model, as there was too little to train one on, has no_model.json instead.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stages.runtime.files import write_json

SCORING = "scoring.json"
HELD_OUT = "held_out_pairs"  # its key in scoring.json
NO_MODEL = "no_model.json"
SAVED_EXAMPLES = 64  # reference answers stored with their scores


@dataclass(frozen=True)
class Scoring:
    """How a score is computed.

    pooling: 'last', the head's output at the last token; 'mean', its mean over the answer's tokens; 'sum', its sum over
    them divided by 10, so that a longer answer can score higher. In the sum a token's n-th occurrence counts
    log2(1 + 1 / n), hence n occurrences log2(1 + n): repetition gains little.
    log_probability_weight: coefficient of the answer's mean log-probability per token, in nats, in the score.
    length_weight: coefficient of the natural logarithm of the answer's number of tokens, in the score.
    """

    pooling: str = "last"
    log_probability_weight: float = 0.0
    length_weight: float = 0.0


def describe_scoring(
    scoring: Scoring, precision: str, reference: tuple[list, list], scores: Any, held_out: dict | None = None,
) -> dict:
    """Return the content of scoring.json: the mean raw score [B] of the reference answers is zero (arXiv 2403.17031).

    Args:
        scores: tensor [B].
        reference: prompts and answers as token ids. The first are stored with their scores, to check by later
            (rewards/checked_models.py).
        held_out: accuracy on held-out pairs, beside baselines; None: not measured. It stays with the merged model, so
            that PPO can refuse one that is no better than chance (evaluation/reward_model_check.py).
    """
    examples = zip(*reference, scores.tolist(), strict=True)
    return {**asdict(scoring), "precision": precision, "mean": float(scores.mean()),
            "std": float(scores.std(correction=0)), "reference_answers": len(scores), HELD_OUT: held_out,
            "examples": [{"prompt": prompt, "answer": answer, "score": score}
                         for prompt, answer, score in list(examples)[:SAVED_EXAMPLES]]}


def save_scoring(folder: Path, content: dict) -> None:
    """Write the content that `describe_scoring` returned."""
    write_json(folder / SCORING, content)


def load_scoring(folder: Path) -> dict:
    """Read scoring.json; ValueError if the folder has none, or one of a model with a lexical term."""
    try:
        content = json.loads((folder / SCORING).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {SCORING}: is it a finished reward artifact?") from None
    if content.get("lexical"):
        raise ValueError(f"{folder} was trained with a lexical term, which reward models no longer have: it would "
                         f"score differently. Train it again (stages.reward)")
    return content


def load_held_out(artifact: Path) -> dict[Path, dict | None]:
    """Read the accuracy on held-out pairs of every model of a reward artifact, by folder; None: not measured."""
    return {folder: load_scoring(folder).get(HELD_OUT) for folder in member_folders(artifact)}


def apply_scoring(adapter: Path, model) -> dict:
    """Copy the settings of scoring.json into the model's config, as reward_<name>; return the file's content."""
    content = load_scoring(adapter)
    set_scoring(model, content)
    return content


def set_scoring(model, content: dict) -> None:
    """Write the settings among the content of scoring.json into the model's config, as reward_<name>."""
    for name in ("mean", "std"):
        setattr(model.config, f"reward_{name}", content[name])
    for field in fields(Scoring):  # a file of an earlier version lacks the fields that came later
        setattr(model.config, f"reward_{field.name}", content.get(field.name, field.default))


def member_folder(artifact: Path, member: int) -> Path:
    """Name the folder of one model of a reward artifact, merged or not."""
    return artifact if member == 0 else artifact / f"member-{member}"


def member_folders(artifact: Path) -> list[Path]:
    """List the folders of all models of a reward artifact."""
    return [member_folder(artifact, member) for member in range(1 + len(list(artifact.glob("member-*"))))]


def write_no_model(folder: Path, reason: str) -> None:
    """Write no_model.json."""
    write_json(folder / NO_MODEL, {"reason": reason})


def read_no_model(folder: Path) -> str | None:
    """Return why the folder holds no model; None if it has no such file."""
    path = folder / NO_MODEL
    return json.loads(path.read_text(encoding="utf-8"))["reason"] if path.is_file() else None
