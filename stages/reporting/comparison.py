"""Render the page that compares runs: verdicts, settings that differ, numbers side by side, curves overlaid."""

import re
from dataclasses import dataclass

from stages.evaluation.summary import judged_policies
from stages.recipe.algorithms import ALGORITHMS
from stages.render.html import Html, element, join_html, picture, stack_interval, table
from stages.render.markdown_tables import clean_name
from stages.reporting.curves import CURVES, CurveSpec, select_lines
from stages.reporting.document import render_page
from stages.reporting.figures import Curves, draw_pictures
from stages.reporting.headline import Verdict, policy_headline

COMPARED_CURVES = {"base": ("loss",), "sft": ("loss", "perplexity"), "reward": ("loss", "accuracy"),
                   "judge": ("accuracy",), **{name: algorithm.compared_curves for name, algorithm in ALGORITHMS.items()
                                              if algorithm.compared_curves}}
TEMPERATURES = re.compile(r" \(T ([^)]+)\) -> (\S+) \(T ([^)]+)\)")  # in a label of the short table
LABEL_CHARACTERS = 24
MISSING = "–"
MEANING = "meaning, unit [source of the published value, or ours]"
NOTES = {
    "Settings": "Those that differ, of the sections that all runs have.",
    "Numbers": "Intervals are at 95 %, by question of one run. They do not contain what another seed would change, and "
               "runs with other posts or pairs have other held-out questions: two runs differ by more than chance only "
               "if seeds of each are further apart than seeds of one. Rewards of different reward models are not "
               "comparable.",
    "Artifacts": "One digest of the SHA-256 of all files of each artifact: where two runs have the same, they have the "
                 "same bytes."}


@dataclass(frozen=True)
class ComparedRun:
    """What figures and verdicts are made of.

    stages: of the artifacts by name. histories: rows of the series by artifact. evaluation: metrics.json of evaluate,
    None without one.
    """

    label: str
    stages: dict[str, str]
    histories: dict[str, list[dict]]
    evaluation: dict | None


def render_comparison(runs: list[ComparedRun], tables: dict[str, list[list[str]]], meanings: dict[str, str]) -> str:
    """Render the whole page.

    Args:
        tables: by heading; the first row of each is its head.
        meanings: of the settings, by 'section.name'.
    """
    verdicts = [Verdict(kind, f"{run.label}: {headline}", {}) for run in runs if run.evaluation
                for kind, headline in (policy_headline(run.evaluation, policy)
                                       for policy in judged_policies(run.evaluation))]
    sections = {title: _render_table(title, rows, meanings) for title, rows in tables.items()}
    return render_page(
        f"{len(runs)} runs compared: {', '.join(run.label for run in runs)}", verdicts, _render_short_tables(runs),
        {**sections, "Learning curves": _render_curves(runs)})


def _render_table(title: str, rows: list[list[str]], meanings: dict[str, str]) -> Html:
    head, *body = rows
    note = element("p", NOTES[title], class_="faint") if title in NOTES else ""
    if title == "Settings":
        body = [[*row, meanings.get(row[0], "")] for row in body]
        return join_html([note, table([*head, MEANING], body, class_="recipe")])
    if title == "Numbers":
        body = [[name, *map(stack_interval, cells)] for name, *cells in body]
    return join_html([note, table(head, body, numeric=title == "Numbers")])


def _render_short_tables(runs: list[ComparedRun]) -> Html:
    """Render the short tables side by side; temperatures that were chosen move from the label to the value."""
    columns = [dict(_split_temperatures(*row) for row in (run.evaluation or {}).get("table", [])) for run in runs]
    rows = [[label, *(column.get(label, MISSING) for column in columns)]
            for label in dict.fromkeys(label for column in columns for label in column)]
    head = ["measure, on each run's held-out questions", *(run.label for run in runs)]
    return table(head, rows, numeric=False) if rows else element("p", "None of these runs has been evaluated.")


def _split_temperatures(label: str, value: str) -> tuple[str, str]:
    """Turn 'gold, SFT (T 0.5) -> PPO (T 0)', '1 -> 2' into 'gold, SFT → PPO', '1 → 2, T 0.5 → 0'."""
    match = TEMPERATURES.search(label)
    if match:
        label, value = TEMPERATURES.sub(r" -> \2", label), f"{value}, T {match[1]} -> {match[3]}"
    return label.replace("->", "→"), value.replace("->", "→")


def _render_curves(runs: list[ComparedRun]) -> Html:
    words = "On held-out questions where they are measured there. A reward is its own run's, after scaling."
    figures = [curves for artifact, stage in _trained_artifacts(runs).items() for spec in CURVES[stage]
               if spec.name in COMPARED_CURVES[stage] and (curves := _overlay(runs, artifact, spec))]
    pictures = (picture(*draw_pictures(curves)[:2], curves.title) for curves in figures)  # light, dark
    return join_html([element("p", words, class_="faint"), element("div", *pictures, class_="figures")])


def _trained_artifacts(runs: list[ComparedRun]) -> dict[str, str]:
    return {name: stage for run in runs for name, stage in run.stages.items() if stage in COMPARED_CURVES}


def _overlay(runs: list[ComparedRun], artifact: str, spec: CurveSpec) -> Curves | None:
    """Build the figure of one number with a line a run, on held-out questions where any run has it on these."""
    keys = sorted(spec.lines.values(), key=lambda key: not key.startswith("validation_"))
    for key in keys:
        if lines := select_lines({_figure_label(run.label): (run.histories.get(artifact, []), key) for run in runs},
                                 spec.x):
            return Curves(f"{artifact}: {spec.title}", spec.x, lines, spec.limits)
    return None


def _figure_label(label: str) -> str:
    """Return a label that matplotlib shows as it is: it reads `$` as mathematics and hides names that begin with _."""
    return clean_name(label, LABEL_CHARACTERS).replace("$", r"\$").lstrip("_") or "run"
