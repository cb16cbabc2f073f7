"""End a run early by rules: KL too large, no progress, too many skipped updates, entropy too low."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class StopRules:
    """Limits, named as in the recipe's section `ppo`. None disables a rule, for min_entropy_nats: 0."""

    max_kl_nats: float
    patience_evaluations: int | None
    max_skipped_in_a_row: int | None
    min_entropy_nats: float


@dataclass
class EarlyStopping:
    """The state of the rules. `reason`: why to stop, from the first rule that applied; None to continue."""

    rules: StopRules
    reason: str | None = None
    best_score: float | None = None
    evaluations_without_better: int = 0
    skipped_in_a_row: int = 0

    def check_evaluation(self, row: dict[str, float]) -> bool:
        """Check `kl` and `selection_score` of an evaluation; return whether this policy is the best and within the KL.

        NaN fails both.
        """
        if not row["kl"] <= self.rules.max_kl_nats:
            self._stop(f"the KL on held-out prompts, {row['kl']:.3g} nats a response, is above max_kl_nats "
                       f"({self.rules.max_kl_nats:g})")
            return False
        if row["selection_score"] > (-inf if self.best_score is None else self.best_score):
            self.best_score, self.evaluations_without_better = row["selection_score"], 0
            return True
        self.evaluations_without_better += 1
        if self.evaluations_without_better == self.rules.patience_evaluations:
            best = "any" if self.best_score is None else f"{self.best_score:.4g}"
            self._stop(f"no better selection_score than {best} in patience_evaluations "
                       f"({self.evaluations_without_better}) evaluations")
        return False

    def check_update(self, row: dict[str, float], skipped: Sequence[bool]) -> None:
        """Check an iteration's `entropy`, nats per token, and which of its minibatches were skipped, in order."""
        longest = 0
        for skip in skipped:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
            longest = max(longest, self.skipped_in_a_row)
        limit = self.rules.max_skipped_in_a_row
        if limit is not None and longest > limit:
            self._stop(f"{longest} minibatches in a row were skipped (ratio above max_ratio, or gradient not finite), "
                       f"more than max_skipped_in_a_row ({limit})")
        if self.rules.min_entropy_nats and not row["entropy"] >= self.rules.min_entropy_nats:
            self._stop(f"the entropy, {row['entropy']:.3g} nats a token, is below min_entropy_nats "
                       f"({self.rules.min_entropy_nats:g}): the policy has collapsed to few answers")

    def state(self) -> dict:
        """Return the state as JSON for a checkpoint; continue with `EarlyStopping(rules, **state)`."""
        return {name: value for name, value in vars(self).items() if name != "rules"}

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason
