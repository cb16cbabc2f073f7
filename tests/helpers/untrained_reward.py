"""A merged reward artifact with random weights, and reference answers with their scores."""

from pathlib import Path

import torch

from stages.modeling.compatible_files import write_model
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.reward_model import initialise_head
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import Scoring, describe_scoring, save_scoring, set_scoring
from stages.stackexchange.prompt import answer_ids, prompt_ids

TEXTS = [("which flag?", "use the flag port"), ("How do I stop it?", "`make stop`\n\nor:\n\n```\nmake stop\n```"),
         ("é 漢字 😀", "  two spaces, then words\n"), ("clear cache", ""), ("write with tool", "run run run file")]


def save_untrained_reward(base: Path, tokenizer, out: Path, scoring: Scoring = Scoring(), **changes) -> Path:
    """Save `base` with a random head as a merged reward artifact; changes: of scoring.json's content."""
    model = load_classifier(base, new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0))
    reference = tuple(map(list, zip(*((prompt_ids(tokenizer, question), answer_ids(tokenizer, answer))
                                      for question, answer in TEXTS), strict=True)))
    scores = Scorer(model, "fp32", scoring)(*reference)
    content = describe_scoring(scoring, "fp32", reference, scores) | changes
    set_scoring(model, content)
    write_model(model, tokenizer, out)
    save_scoring(out, content)
    return out
