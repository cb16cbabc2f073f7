"""When a run should stop, and why, in words: too far from the reference, no progress, updates skipped, no entropy left.

The rules read the rows that a run writes down anyway: what stopped it stands in its history.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class StopRules:
    """As in the recipe's section ppo. None, and a least entropy of 0, is a rule that is off."""

    max_kl_nats: float
    patience_evaluations: int | None
    max_skipped_in_a_row: int | None
    min_entropy_nats: float


@dataclass
class EarlyStopping:
    """What the rules remember; `reason` is None until one of them says stop, and then the first one's."""

    rules: StopRules
    reason: str | None = None
    best_objective: float | None = None
    evaluations_without_better: int = 0
    skipped_in_a_row: int = 0

    def evaluated(self, row: dict[str, float]) -> bool:
        """Take in the `kl` and `objective` of held-out prompts; whether to keep this policy: the best, and near enough.

        What is not a number is neither.
        """
        if not row["kl"] <= self.rules.max_kl_nats:
            self._stop(f"the KL on held-out prompts, {row['kl']:.3g} nats a response, is above max_kl_nats "
                       f"({self.rules.max_kl_nats:g})")
            return False
        if row["objective"] > (-inf if self.best_objective is None else self.best_objective):
            self.best_objective, self.evaluations_without_better = row["objective"], 0
            return True
        self.evaluations_without_better += 1
        if self.evaluations_without_better == self.rules.patience_evaluations:
            best = "any" if self.best_objective is None else f"{self.best_objective:.4g}"
            self._stop(f"no better objective than {best} in patience_evaluations ({self.evaluations_without_better}) "
                       f"evaluations")
        return False

    def updated(self, row: dict[str, float], skipped: Sequence[bool]) -> None:
        """Take in an iteration's `entropy` (nats a token) and which of its minibatches were skipped, in order."""
        longest = 0
        for skip in skipped:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
            longest = max(longest, self.skipped_in_a_row)
        most = self.rules.max_skipped_in_a_row
        if most is not None and longest > most:
            self._stop(f"{longest} minibatches in a row were skipped (ratio above max_ratio, or gradient not finite), "
                       f"more than max_skipped_in_a_row ({most})")
        if self.rules.min_entropy_nats and not row["entropy"] >= self.rules.min_entropy_nats:
            self._stop(f"the entropy, {row['entropy']:.3g} nats a token, is below min_entropy_nats "
                       f"({self.rules.min_entropy_nats:g}): answers have become all alike")

    def state(self) -> dict:
        """Plain JSON for a checkpoint; `Stopper(rules, **state)` goes on from it."""
        return {name: value for name, value in vars(self).items() if name != "rules"}

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason
