"""Load reward models from folders."""

from functools import partial
from pathlib import Path

from transformers import AutoModelForSequenceClassification, PreTrainedModel

from stages.modeling.load import load_pretrained
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import SCORING, load_scoring, member_folders


def load_classifier(
    folder: Path | str, precision: str = "fp32", new_head: bool = False, cpu_kernels: str = "off",
    layers: int | None = None
) -> PreTrainedModel:
    """Load a sequence classifier with one output, in eval mode; ValueError if a weight, such as the head, is missing.

    new_head: `folder` is a causal model, and its head is still to be initialised (reward_model.initialise_head).
    layers: load only the first ones; None: all.
    """
    if not new_head and (Path(folder) / SCORING).is_file():
        load_scoring(Path(folder))
    return load_pretrained(
        AutoModelForSequenceClassification,
        folder,
        precision,
        cpu_kernels,
        layers=layers,
        num_labels=1,
        optional_weights=("score.weight",) if new_head else (),
    )


def load_reward_models(
    reward: Path, precision: str, batch_rows: int = 64, cpu_kernels: str = "off", share_prompts: bool = False
) -> list[Scorer]:
    """Load every model of a merged reward artifact; share_prompts: see Scorer."""
    load = partial(load_classifier, precision=precision, cpu_kernels=cpu_kernels)
    return [Scorer(load(folder), precision, batch_rows=batch_rows, share_prompts=share_prompts)
            for folder in member_folders(reward)]
