"""Render the page that compares runs: verdicts, settings that differ, numbers side by side, curves overlaid."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from stages.evaluation.summary import format_estimate, judged_policies
from stages.render.html import Html, element, join_html, picture, stack_interval, table
from stages.render.markdown_tables import clean_name
from stages.render.units import format_duration
from stages.reporting.curves import CURVES, CurveSpec, select_lines
from stages.reporting.figures import Curves, draw_png
from stages.reporting.headline import Verdict, policy_headline
from stages.reporting.page import render_page
from stages.reporting.recipe_diff import format_setting
from stages.runtime.finished import DIGEST_CHARACTERS
from stages.runtime.manifest import flatten_tree

GROUPED = ("reward", "kl", "length", "entropy", "eos")
COMPARED_CURVES = {"base": ("loss",), "sft": ("loss", "perplexity"), "reward": ("loss", "accuracy"),
                   "judge": ("accuracy",), "ppo": ("reward", "kl", "length", "entropy", "eos", "explained"),
                   "rloo": GROUPED, "grpo": GROUPED, "dpo": ("loss", "accuracy", "margin", "logprob", "drift")}
TEMPERATURES = re.compile(r" \(T ([^)]+)\) -> (\S+) \(T ([^)]+)\)")  # in a label of the short table
LABEL_CHARACTERS = 24
MISSING = "–"
Numbers = dict[tuple[str, str], list[dict | None]]


@dataclass(frozen=True)
class ComparedRun:
    """Facts about a run.

    settings: by section, of the sections that all runs have. manifests: of the finished artifacts by name.
    evaluation: metrics.json of evaluate, None without one. histories: rows of the series by artifact.
    """

    label: str
    folder: str
    settings: dict[str, Any]
    manifests: dict[str, dict]
    evaluation: dict | None
    histories: dict[str, list[dict]]


def render_comparison(runs: list[ComparedRun], numbers: Numbers, meanings: dict[str, str], width_inches: float) -> str:
    """Render the whole page.

    Args:
        numbers: to show, by (artifact, name); an estimate for each run that has it.
        meanings: of the settings, by 'section.name'.
        width_inches: of a figure.
    """
    labels = [run.label for run in runs]
    verdicts = [Verdict(kind, f"{run.label}: {headline}", {}) for run in runs if run.evaluation
                for kind, headline in (policy_headline(run.evaluation, policy)
                                       for policy in judged_policies(run.evaluation))]
    return render_page(f"{len(runs)} runs compared: {', '.join(labels)}", verdicts, _render_short_tables(runs), {
        "Runs": _render_runs(runs),
        "Recipe": _render_settings(runs, meanings),
        "Numbers": _render_numbers([run.label for run in runs], numbers),
        "Learning curves": _render_curves(runs, width_inches),
        "Artifacts": _render_artifacts(runs)})


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


def _render_runs(runs: list[ComparedRun]) -> Html:
    rows = []
    for run in runs:
        counts = {name: run.manifests.get(stage, {}).get("metrics", {}).get(name) for stage, name in (
            ("posts", "questions"), ("pairs", "pairs"))}
        seconds = sum(manifest.get("seconds", 0) for manifest in run.manifests.values())
        sites = list(run.manifests.get("posts", {}).get("metrics", {}).get("sites", {}))
        rows.append([run.label, run.folder, ", ".join(map(clean_name, sites)) or MISSING,
                     *(MISSING if count is None else f"{count:,}" for count in counts.values()),
                     len(run.manifests), format_duration(seconds),
                     _join({str(manifest.get("device")) for manifest in run.manifests.values()}),
                     _join({str(manifest.get("commit"))[:DIGEST_CHARACTERS] for manifest in run.manifests.values()})])
    return table(["run", "folder", "sites", "questions", "pairs", "finished artifacts", "time", "device",
                  "commit"], rows, numeric=False)


def _render_settings(runs: list[ComparedRun], meanings: dict[str, str]) -> Html:
    """Render the settings that are not the same in all runs."""
    trees = [flatten_tree(run.settings, lists=False) for run in runs]
    names = dict.fromkeys(name for tree in trees for name in tree)
    differing = [name for name in names if any(name not in tree or tree[name] != trees[0].get(name) for tree in trees)]
    words = element("p", f"{len(differing)} of {len(names)} settings differ, of sections that all runs have.",
                    class_="faint")
    rows = [[name, *(format_setting(tree[name]) if name in tree else MISSING for tree in trees),
             meanings.get(name, "")] for name in differing]
    head = ["setting", *(run.label for run in runs), "meaning, unit [source of the published value, or ours]"]
    return join_html([words, table(head, rows, class_="recipe") if rows else ""])


def _render_numbers(labels: list[str], numbers: Numbers) -> Html:
    words = ("Intervals are at 95 %, by question of one run. They do not contain what another seed would change, and "
             "runs with other posts or pairs have other held-out questions: two runs differ by more than chance only "
             "if seeds of each are further apart than seeds of one. Rewards of different reward models are not "
             "comparable.")
    rows = [[f"{artifact}: {name.replace('_', ' ')}", *map(_format_number, estimates)]
            for (artifact, name), estimates in numbers.items()]
    return join_html([element("p", words, class_="faint"), table(["number", *labels], rows, class_="numbers")])


def _format_number(estimate: dict | None) -> Html | str:
    if estimate is None:
        return MISSING
    if isinstance(estimate["mean"], int):
        return f"{estimate['mean']:,}"
    return stack_interval(format_estimate(estimate, ".4g"))


def _render_curves(runs: list[ComparedRun], width_inches: float) -> Html:
    words = "On held-out questions where they are measured there. A reward is its own run's, after scaling."
    figures = [curves for artifact, stage in _trained_artifacts(runs).items() for spec in CURVES[stage]
               if spec.name in COMPARED_CURVES[stage] and (curves := _overlay(runs, artifact, spec))]
    pictures = (picture(*(draw_png(curves, width_inches, dark) for dark in (False, True)), curves.title)
                for curves in figures)
    return join_html([element("p", words, class_="faint"), element("div", *pictures, class_="figures")])


def _trained_artifacts(runs: list[ComparedRun]) -> dict[str, str]:
    return {name: manifest["stage"] for run in runs for name, manifest in run.manifests.items()
            if manifest.get("stage") in COMPARED_CURVES}


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


def _render_artifacts(runs: list[ComparedRun]) -> Html:
    """Render one digest of the files of each artifact: equal ones are the same in every byte."""
    words = element("p", "One digest of the SHA-256 of all files of each artifact: where two runs have the same, they "
                         "have the same bytes.", class_="faint")
    names = dict.fromkeys(name for run in runs for name in run.manifests)
    rows = [[name, *(element("code", _files_digest(run.manifests[name])) if name in run.manifests else MISSING
                     for run in runs)] for name in names]
    return join_html([words, table(["artifact", *(run.label for run in runs)], rows, numeric=False)])


def _files_digest(manifest: dict) -> str:
    lines = sorted(f"{name} {entry.get('sha256')}" for name, entry in manifest.get("files", {}).items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGEST_CHARACTERS]


def _join(texts: set[str]) -> str:
    return ", ".join(sorted(texts))
