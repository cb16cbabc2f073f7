"""Select the curves of each stage's history. To add a curve, add a line to CURVES; to add a stage, add a key."""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stages.evaluation.summary import display_name
from stages.recipe.algorithms import ALGORITHMS
from stages.reporting.figures import Curves

SHARE = (-0.03, 1.03)  # limits of the y axis


@dataclass(frozen=True)
class CurveSpec:
    """A figure: name in its file name, title, key of the x axis, {label: key} of its lines, limits of the y axis."""

    name: str
    title: str
    x: str
    lines: dict[str, str]
    limits: tuple[float, float] | None = None


LOSS = CurveSpec("loss", "training loss", "step", {"loss": "loss"})
TOKEN_LOSS = CurveSpec("loss", "training loss, nats a token", "step", {"loss": "loss"})
REWARD_MODEL = [
    LOSS,
    CurveSpec("accuracy", "accuracy on validation pairs", "step",
              {"reward model": "validation_accuracy", "longer answer": "validation_longer_answer_accuracy"}),
    CurveSpec("calibration", "expected calibration error", "step", {"validation": "validation_calibration_error"})]
POLICY_GRADIENT = [
    CurveSpec("reward", "mean reward", "iteration", {"rollouts": "reward", "validation": "validation_reward"}),
    CurveSpec("kl", "KL to SFT, nats a response", "iteration", {"rollouts": "kl", "validation": "validation_kl"}),
    CurveSpec("entropy", "entropy, nats a token", "iteration", {"entropy": "entropy"}),
    CurveSpec("length", "response length, tokens", "iteration",
              {"rollouts": "response_tokens", "validation": "validation_response_tokens"}),
    CurveSpec("eos", "share ended by EOS", "iteration",
              {"rollouts": "eos_rate", "validation": "validation_eos_rate"}, SHARE),
    CurveSpec("perplexity", "perplexity of its responses under SFT", "iteration",
              {"rollouts": "reference_perplexity"}),
    CurveSpec("clip", "clipped share of the tokens", "iteration", {"update": "clip_fraction"}),
    CurveSpec("update-kl", "KL of old to new policy, nats a token", "iteration", {"update": "update_kl"})]
CRITIC = [
    CurveSpec("value", "error of the value function", "iteration", {"value loss": "value_loss"}),
    CurveSpec("explained", "share of the returns' variance that values explain", "iteration",
              {"explained variance": "explained_variance"})]
BETA = CurveSpec("beta", "weight of the KL", "iteration", {"beta": "beta"})
SECONDS = CurveSpec(
    "seconds", "seconds by phase", "iteration",
    {"rollout": "rollout_seconds", "score": "score_seconds", "reference, values": "experience_seconds",
     "update": "update_seconds"})
CURVES = {
    "base": [TOKEN_LOSS],
    "sft": [
        TOKEN_LOSS,
        CurveSpec("perplexity", "perplexity of held-out answers", "step", {"perplexity": "validation_perplexity"}),
        CurveSpec("eos", "share of sampled answers that end", "step", {"validation": "validation_eos_rate"}, SHARE)],
    "reward": REWARD_MODEL,
    "judge": REWARD_MODEL,
    **{name: [*POLICY_GRADIENT, *(CRITIC if algorithm.has_critic else []), BETA, SECONDS]
       for name, algorithm in ALGORITHMS.items() if algorithm.is_policy_gradient},
    "dpo": [
        CurveSpec("loss", "loss of a pair", "step", {"training": "loss", "validation": "validation_preference_loss"}),
        CurveSpec("accuracy", "accuracy of implicit rewards on validation pairs", "step",
                  {"policy": "validation_implicit_accuracy"}),
        CurveSpec("margin", "implicit reward, better minus worse answer", "step",
                  {"validation": "validation_implicit_margin"}),
        CurveSpec("logprob", "log-probability of a validation answer, nats", "step",
                  {"better": "validation_better_logprob", "worse": "validation_worse_logprob"}),
        CurveSpec("drift", "distance from SFT, nats a token", "step",
                  {"drift": "validation_drift_per_token"})],
    "best_of_n": [
        CurveSpec("reward", "mean reward of the best of n", "n", {"best of n": "reward"}),
        CurveSpec("kl", "KL to SFT, nats a response", "n", {"log n - (n-1)/n": "kl"})],
    "expert_iteration": [
        CurveSpec("reward", "mean reward", "round",
                  {"samples": "reward", "winners": "winners_reward", "validation": "validation_reward"}),
        CurveSpec("kl", "KL to SFT, nats a response", "round", {"validation": "validation_kl"}),
        CurveSpec("length", "response length, tokens", "round", {"validation": "validation_response_tokens"}),
        CurveSpec("eos", "share ended by EOS", "round", {"samples": "eos_rate", "validation": "validation_eos_rate"},
                  SHARE)],
    "ilql": [
        LOSS,
        CurveSpec("validation-loss", "loss on held-out answers, a token", "step", {"validation": "validation_loss"}),
        CurveSpec("terms", "terms of the loss on held-out answers, a token", "step",
                  {"TD error of Q": "validation_td", "expectile loss of V": "validation_expectile",
                   "CQL": "validation_cql", "AWAC": "validation_awac"}),
        CurveSpec("values", "mean value of held-out tokens, standard deviations of the scores", "step",
                  {"Q (targets)": "validation_q", "V": "validation_v"}),
        CurveSpec("correlation", "correlation of an answer's last Q with its score", "step",
                  {"validation": "validation_score_correlation"}),
        CurveSpec("eos", "share of sampled answers that end", "step", {"validation": "validation_eos_rate"}, SHARE)],
}

STEPS = {spec.x for specs in CURVES.values() for spec in specs}  # what numbers the rows of a series
COLUMNS = ("stage", "step", "metric", "value")
HEADINGS = {"base": "Base", "sft": "SFT", "reward": "Reward model", "judge": "Judge"}


def build_curves(name: str, stage: str, history: list[dict], start: str = "SFT") -> dict[str, Curves]:
    """Build the figures of an artifact, by file name: those whose numbers its history has.

    Args:
        name: of the artifact, or of a policy.
        stage: the stage that made it; one without curves of its own gets its training loss.
        history: rows of its series.
        start: what people call the model that it started from.
    """
    figures = {}
    label = HEADINGS.get(name) or display_name(name)
    for spec in CURVES.get(stage, [LOSS]):
        if lines := select_lines({label: (history, key) for label, key in spec.lines.items()}, spec.x):
            title = spec.title.replace("SFT", start)
            figures[f"{name}-{spec.name}"] = Curves(f"{label}: {title}", spec.x, lines, spec.limits)
    return figures


def split_constant(figures: dict[str, Curves]) -> tuple[dict[str, Curves], list[str]]:
    """Split off the figures whose lines never move, as words: 'share ended by EOS: rollouts 1, validation 1'."""
    moving = {name: figure for name, figure in figures.items() if any(map(_moves, figure.lines.values()))}
    return moving, [f"{figure.title.partition(': ')[2]}: "
                    + ", ".join(f"{label} {points[0][1]:g}" for label, points in figure.lines.items())
                    for name, figure in figures.items() if name not in moving]


def _moves(points: list[tuple[float, float]]) -> bool:
    return len(points) < 2 or len({y for _, y in points}) > 1


def select_lines(series: dict[str, tuple[list[dict], str]], x: str) -> dict[str, list[tuple[float, float]]]:
    """Select the points of each line, by label; a line without points is left out.

    Args:
        series: by label, rows of a history and the key of the numbers.
        x: key of the x axis.
    """
    lines = {label: [(row[x], row[key]) for row in rows if x in row and row.get(key) is not None]
             for label, (rows, key) in series.items()}
    return {label: points for label, points in lines.items() if points}


def list_points(histories: dict[str, list[dict]]) -> Iterator[tuple[str, int, str, float]]:
    """List every number of the histories, by the name of the artifact, as COLUMNS; a step is also an iteration."""
    for name, rows in histories.items():
        for row in rows:
            step = next((key for key in row if key in STEPS), None)
            yield from ((name, row[step], metric, value) for metric, value in row.items()
                        if step and metric != step and isinstance(value, int | float))


def format_csv(columns: Iterable[str], rows: Iterable[tuple]) -> str:
    """Format rows as CSV, with a head."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([columns, *rows])
    return stream.getvalue()
