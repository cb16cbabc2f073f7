"""Load and evaluate a reward model in a merge (modeling.merging)."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from stages.modeling.adapters import is_reward_model, load_score_head
from stages.modeling.families import backbone
from stages.modeling.merging.merge import CausalTarget
from stages.modeling.tokenizer import load_tokenizer, resize_token_embeddings
from stages.reward_modeling.dataset import Example, pair_indices
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import apply_scoring, copy_scoring


def select_target(adapter: Path, examples: list[Example], cpu_kernels: str, precision: str) -> CausalTarget:
    """Return the target for the last artifact of a merge, a reward model or a language model."""
    return (RewardTarget if is_reward_model(adapter) else CausalTarget)(examples, cpu_kernels, precision)


class RewardTarget(CausalTarget):
    """How a merge loads and evaluates a reward model."""

    def load(self, folder: Path) -> PreTrainedModel:
        return load_classifier(folder, self.precision, cpu_kernels=self.cpu_kernels)

    def prepare(self, model: PreTrainedModel | None, base: Path, adapter: Path) -> PreTrainedModel:
        load_score_head(adapter)  # fails, without one, before anything is loaded
        scorer = load_classifier(base, self.precision, new_head=True, cpu_kernels=self.cpu_kernels)
        if model is not None:
            scorer.resize_token_embeddings(model.get_input_embeddings().num_embeddings, mean_resizing=False)
            backbone(scorer).load_state_dict(backbone(model).state_dict(), assign=True)  # no copy of the weights
        tokenizer = load_tokenizer(adapter)
        resize_token_embeddings(scorer, tokenizer)
        # Only an id that the embedding has: most families could not be loaded with another one.
        pad = tokenizer.pad_token_id
        scorer.config.pad_token_id = pad if pad < scorer.get_input_embeddings().num_embeddings else None
        apply_scoring(adapter, scorer)
        return scorer

    def evaluate(self, model) -> dict[str, float]:
        """Compute the share of pairs whose better answer scores higher; ties count one half."""
        texts = [(example.prompt, answer) for example in self.examples for answer in example.answers]
        scores = Scorer(model, self.precision)(*map(list, zip(*texts, strict=True))).double().numpy()
        better, worse = (scores[indices] for indices in pair_indices(self.examples))
        return {"pair_accuracy": float(np.mean((np.sign(better - worse) + 1) / 2))}  # NaN, and refused, if a score is

    def save_settings(self, adapter: Path, out: Path, model: PreTrainedModel) -> None:
        """Write scoring.json and the settings in the model's config."""
        copy_scoring(adapter, out, model)
