"""Bands in which a number is healthy, those of docs/metrics.md, and the numbers of a run that lie outside theirs.

To add a band: a line in BANDS, and the same words in the column `healthy` of docs/metrics.md.
"""

from dataclasses import dataclass
from typing import Literal

from stages.evaluation.summary import display_name
from stages.evaluation.tasks.wording import start_model
from stages.render.html import Html, element, join_html, table

END_SHARE = 0.1  # of the rows of a history: the last ones


@dataclass(frozen=True)
class Band:
    """A number is healthy above `low` and below `high`, the ends not included; None: without an end.

    words: what it means to be outside, and what to do. over: the mean of the last rows of a history, the mean of all,
    or their sum.
    """

    name: str
    low: float | None
    high: float | None
    words: str
    over: Literal["end", "mean", "sum"] = "end"

    def contains(self, value: float) -> bool:
        """Check whether a value is healthy; NaN is not."""
        return (self.low is None or value > self.low) and (self.high is None or value < self.high) and value == value

    def format(self) -> str:
        """Format as 'above 0, below 0.2'."""
        ends = [f"{side} {end:g}" for side, end in (("above", self.low), ("below", self.high)) if end is not None]
        return ", ".join(ends)

    def summarise(self, rows: list[dict]) -> float | None:
        """Compute the number from the rows of a history; None if it was not logged."""
        values = [row[self.name] for row in rows if row.get(self.name) is not None]
        if not values:
            return None
        if self.over == "end":
            values = values[-max(1, round(END_SHARE * len(values))):]
        return float(sum(values)) if self.over == "sum" else sum(values) / len(values)


MISSING_EOS = "Answers are cut off: raise max_response_tokens or missing_eos_penalty, or train SFT for longer."
COLLAPSE = "The answers became the same: raise kl_coefficient, lower learning_rate."
BANDS = {band.name: band for band in (
    Band("validation_eos_rate", 0.95, None, MISSING_EOS),
    Band("eos_rate", 0.95, None, MISSING_EOS),
    Band("validation_accuracy_low", 0.5, None, "The reward model was not shown to beat chance: train it on more pairs "
         "or on another base."),
    Band("validation_above_baseline_low", 0, None, "The reward model was not shown to beat the best cheap baseline: "
         "train it on more pairs or on another base."),
    Band("validation_loss", None, 0.69, "Worse than no opinion at all, which is 0.69: the reward model is too sure. "
         "Lower learning_rate or epochs, or set label_smoothing."),
    *(Band(f"validation_sampled_accuracy_at_{temperature}", 0.5, None, "The reward model prefers samples to human "
           "answers: raise reward.sampled_questions") for temperature in (0, 1)),
    Band("validation_calibration_error", None, 0.1, "The reward model's confidence is not its accuracy. If it is too "
         "sure (accuracy below confidence), lower epochs, learning_rate or margin_per_score, or raise label_smoothing; "
         "if it is too cautious, lower label_smoothing or weight_decay, or raise margin_per_score."),
    Band("reward_std", 0, None, "All answers of a rollout have the same reward: there is nothing to learn from."),
    Band("kl_per_token", None, 0.1, "The policy is far from SFT: raise kl_coefficient or set kl_target_nats."),
    Band("explained_variance", 0.3, None, "The critic explains little of the returns: use critic_warmup_iterations, "
         "value_model adapter or a larger value_coefficient."),
    Band("clip_fraction", 0, 0.2, "At 0 the clip touches nothing and a larger learning_rate or more epochs may help; "
         "above the band the updates are too large: lower them.", "mean"),
    Band("update_stopped_early", None, 0.5, "Most updates ended at update_kl_limit: lower learning_rate or epochs.",
         "mean"),
    Band("skipped", None, 1, "Minibatches were skipped, for their ratio or a gradient that is not finite: lower "
         "learning_rate.", "sum"),
    Band("distinct_responses", 0.9, None, COLLAPSE),
    Band("validation_distinct_responses", 0.9, None, COLLAPSE),
)}


@dataclass(frozen=True)
class Measured:
    """A number that has a band, and where it was measured."""

    where: str
    band: Band
    value: float

    @property
    def is_outside(self) -> bool:
        """Check whether the number lies outside its band."""
        return not self.band.contains(self.value)


def measure_training(where: str, metrics: dict, history: list[dict]) -> list[Measured]:
    """List the numbers of an artifact: of its manifest, which are those of the best state, or else of its history.

    With one minibatch a rollout every ratio is 1: that none is clipped then says nothing.
    """
    if {row["minibatches"] for row in history if "minibatches" in row} == {1}:
        history = [{name: value for name, value in row.items() if name != "clip_fraction"} for row in history]
    values = {band: metrics.get(band.name, band.summarise(history)) for band in BANDS.values()}
    return [Measured(where, band, value) for band, value in values.items() if isinstance(value, int | float)]


def measure_evaluation(metrics: dict) -> list[Measured]:
    """List the numbers of the evaluation: of the reward model, SFT and the trained policies."""
    reward, numbers = metrics.get("reward_model", {}), []
    if reward.get("accuracy"):
        numbers += [("Reward model", "validation_accuracy_low", reward["accuracy"]["low"]),
                    ("Reward model", "validation_calibration_error", reward["calibration"]["expected_error"])]
    if reward.get("above_best_cheap_baseline"):
        numbers.append(("Reward model", "validation_above_baseline_low", reward["above_best_cheap_baseline"]["low"]))
    numbers += [(display_name(policy), name, metrics["policies"][policy][name])
                for policy in (start_model(metrics["policies"]), *metrics["comparisons"])
                for name in ("eos_rate", "distinct_responses")]
    return [Measured(f"{where}, evaluation", BANDS[name], value) for where, name, value in numbers if value is not None]


def render_outside(measured: list[Measured], start: str = "SFT") -> Html:
    """Render the numbers outside their bands with what to do, or one sentence if there are none.

    start: what people call the model that policies start from.
    """
    outside = [number for number in measured if number.is_outside]
    if not outside:
        return element("p", f"None: all {len(measured)} numbers that have a healthy band lie in it.")
    rows = [[join_html([element("code", number.band.name), ", ", number.where]), f"{number.value:.3g}",
             number.band.format(), number.band.words.replace("SFT", start)] for number in outside]
    words = (f"{len(outside)} of {len(measured)} numbers that have a healthy band. Those of training are means of the "
             f"last rows of the history or, where the manifest has them, of the state that was kept; those that end in "
             f"_low are the lower ends of 95 % intervals.")
    return join_html([element("p", words, class_="faint"),
                      table(["number", "value", "healthy", "what to do"], rows, numeric=False)])
