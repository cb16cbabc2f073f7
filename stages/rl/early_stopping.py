"""End a run early by rules: KL too large, or no progress."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class StopRules:
    """Limits, named as in the recipe's section `ppo`. None disables a rule."""

    max_kl_nats: float
    patience_evaluations: int | None


@dataclass
class EarlyStopping:
    """The state of the rules. `reason`: why to stop, from the first rule that applied; None to continue."""

    rules: StopRules
    reason: str | None = None
    best_score: float | None = None
    evaluations_without_better: int = 0

    def check_evaluation(self, row: dict[str, float]) -> bool:
        """Check `kl` and `selection_score` of an evaluation; return whether this policy is the best and within the KL.

        NaN fails both.
        """
        if not self.is_within_kl(row):
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

    def is_within_kl(self, row: dict[str, float]) -> bool:
        """Check whether an evaluation's KL is at most max_kl_nats; NaN is not."""
        return row["kl"] <= self.rules.max_kl_nats

    def state(self) -> dict:
        """Return the state as JSON for a checkpoint."""
        return {name: value for name, value in vars(self).items() if name != "rules"}

    @classmethod
    def restore(cls, rules: StopRules, state: dict) -> "EarlyStopping":
        """Continue from a `state()`, also one of a version with further rules."""
        return cls(rules, **{name: value for name, value in state.items() if name in cls.__dataclass_fields__})

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason
