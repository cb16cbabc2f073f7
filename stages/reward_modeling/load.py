"""TODO docstring."""

from pathlib import Path

from transformers import AutoModelForSequenceClassification, PreTrainedModel

from stages.modeling.load import load_pretrained
from stages.reward_modeling.ensemble import Ensemble, scorer_of
from stages.reward_modeling.lexical_term import Lexical
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import member_folders


def load_scorer(folder: Path | str, precision: str = "fp32", new_head: bool = False) -> PreTrainedModel:
    """A sequence classifier with one output, in eval mode.

    new_head: `folder` is a causal model, and the head is to be made (see reward_model.initialise_head). Otherwise
    every tensor must be there: a head that is missing would be random, and no score would mean anything (ValueError).
    """
    model = load_pretrained(
        AutoModelForSequenceClassification,
        folder,
        precision,
        num_labels=1,
        may_miss=("score.weight",) if new_head else (),
    )
    needed = getattr(model.config, "reward_lexical", False)
    model.lexical = None if new_head else Lexical.load(Path(folder), needed)
    return model


def load_merged_reward(
    reward: Path, precision: str, batch_rows: int = 64, spread_penalty: float = 0.0
) -> Scorer | Ensemble:
    """The scorer of a merged reward model, or of several in one artifact."""
    models = [load_scorer(member, precision) for member in member_folders(reward)]
    return scorer_of([Scorer(model, precision, batch_rows=batch_rows) for model in models], spread_penalty)
