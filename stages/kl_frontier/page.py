"""Render the page of the frontier: verdict in words, figures, fits, the table at equal KL, and costs."""

import numpy as np

from stages.evaluation.summary import capitalise, format_estimate
from stages.kl_frontier.fits import FORMS, evaluate_fit
from stages.kl_frontier.wording import MEASURES, describe_headline, describe_paragraphs, list_curves
from stages.pooling.page import FALSE_ALARMS, render_shares
from stages.render.html import Html, element, join_html, sortable_text, stack_interval, table
from stages.render.units import format_duration
from stages.reporting.document import render_page
from stages.reporting.figures import FigureFolder
from stages.reporting.frontier_figure import Frontier, FrontierPoint
from stages.reporting.headline import Verdict
from stages.reporting.policy_section import NONE, stacked_cell

SQRT_KL = "square root of the KL to SFT, in nats a response"
ORIGIN = {"mean": 0.0, "low": None, "high": None}
CURVE_POINTS = 200
FAR = 2  # times the largest distance of the points: a peak beyond is no estimate
SOURCE = ("Gao, Schulman, Hilton 2022, “Scaling laws for reward model overoptimization”, arXiv 2210.10760: with d the "
          "square root of the KL to SFT, best-of-n R(d) = d (a − b d), reinforcement learning R(d) = d (a − b log d).")


def render_frontier(metrics: dict, figures: FigureFolder) -> str:
    """Render the whole page from the metrics of the analysis, `families` and `costs` among them."""
    verdict = Verdict("run", describe_headline(metrics), describe_paragraphs(metrics))
    return render_page("Ways to align, at equal KL to SFT", [verdict], _points(metrics), {
        "Score against KL": _curves(metrics, figures),
        "Fits and over-optimisation": _fits(metrics),
        "At equal KL": _equal_kl(metrics),
        "Reward hacking": _hacking(metrics)})


def _points(metrics: dict) -> Html:
    """Render every policy with its KL, its gains over SFT and what it costs."""
    measures, costs = list(metrics["sft"]), metrics["costs"]
    head = ["policy", "KL to SFT, nats a response", *(f"{MEASURES[name]}, minus SFT's" for name in measures),
            "time of training", "samples an answer"]
    rows = [[policy["label"], _kl_cell(policy),
             *(stacked_cell(policy["gains"][name], signed=True) for name in measures),
             _seconds(costs["policies"].get(name)), f"{policy['samples_per_answer']}"]
            for name, policy in metrics["policies"].items()]
    sft = ", ".join(f"{MEASURES[name]} {value:.3f}" for name, value in metrics["sft"].items())
    shared = ", ".join(f"{name} {format_duration(cost['mean'])}" for name, cost in costs["shared"].items())
    words = (f"SFT itself: {sft}. Intervals are at 95 %, paired by question. The KL of best-of-n is an upper bound. "
             f"Times are means over the seeds, without what came before{f' ({shared})' if shared else ''}: all need "
             f"SFT; all but DPO and ILQL need the reward model.")
    return join_html([table(head, rows, class_="numbers"), element("p", words, class_="faint")])


def _curves(metrics: dict, figures: FigureFolder) -> Html:
    drawn = {f"frontier-{measure}": _figure(metrics, measure) for measure in metrics["sft"]}
    words = ("Each point is one policy as it was published, at temperature "
             f"{metrics['temperature']:g}; lines through points are the fits below, where there are three points or "
             "more. Beside a point stands its n or its beta. Bars are 95 % intervals.")
    if optimum := metrics["optimum"]:
        words += (f" The dashed line is the highest learnt reward that any policy can have at that KL, estimated from "
                  f"{optimum['samples']} samples of SFT a question. It is a lower bound, too low where the KL comes "
                  f"near log {optimum['samples']}: policies there, best-of-n among them, may lie above it.")
    return join_html([element("p", words, class_="faint"), figures.draw(drawn)])


def _figure(metrics: dict, measure: str) -> Frontier:
    families, points, lines = metrics["families"], {}, {}
    for policy in metrics["policies"].values():
        gain = policy["gains"][measure]
        if gain and policy["sqrt_kl"] is not None:
            ends = {end: None if policy["kl"][end] is None else max(policy["kl"][end], 0.0) ** 0.5
                    for end in ("low", "high")}
            points.setdefault(families[policy["family"]], []).append(
                FrontierPoint({"mean": policy["sqrt_kl"]} | ends, gain, policy["mark"]))
    points["SFT"] = [FrontierPoint(ORIGIN, ORIGIN, "SFT")]
    for family, by_measure in metrics["fits"].items():
        if fit := by_measure[measure]:
            distances = np.linspace(0, fit["largest_sqrt_kl"], CURVE_POINTS)[1:]
            gains = evaluate_fit(fit["form"], fit["a"], fit["b"], distances)
            lines[families[family]] = [(0.0, 0.0), *zip(distances, gains, strict=True)]
    if metrics["optimum"] and measure == "reward":
        lines["optimum"] = [(max(kl, 0.0) ** 0.5, gain) for kl, gain in metrics["optimum"]["curve"]]
    name = MEASURES[measure]
    return Frontier(f"{capitalise(name)} against KL", SQRT_KL, f"{name}, minus SFT's", points, lines)


def _fits(metrics: dict) -> Html:
    rows = [_fit_row(f"{metrics['families'][family]}: {MEASURES[measure]}", fit)
            for measure in metrics["sft"] for family, by_measure in metrics["fits"].items()
            if (fit := by_measure[measure])]
    missing = [metrics["families"][family] for family, by_measure in metrics["fits"].items()
               if not any(by_measure.values())]
    words = (f"{SOURCE} Least squares through the points of a family; both forms pass through SFT at d = 0 by "
             f"themselves. Intervals below are by question, with distances as measured. The over-optimisation point is "
             f"the peak of the fit: beyond it, more KL costs score.")
    none = f"No fit, for fewer than three points: {', '.join(missing)}." if missing else ""
    head = ["family: score", "form", "points", "a", "b", "peak at KL, nats", "score there, minus SFT's",
            "within the points?"]
    return join_html([element("p", words, class_="faint"), table(head, rows, class_="numbers wide"),
                      element("p", none, class_="faint") if none else ""])


def _fit_row(label: str, fit: dict) -> list:
    peak = fit["peak_sqrt_kl"]
    numbers = [label, FORMS[fit["form"]], f"{fit['points']}", *(_parameter(fit, name) for name in ("a", "b"))]
    if peak is None:
        return [*numbers, "none", NONE, "no: the fit does not bend down"]
    if peak["mean"] > FAR * fit["largest_sqrt_kl"]:
        return [*numbers, NONE, NONE, f"no: far beyond a KL of {fit['largest_sqrt_kl'] ** 2:.1f}"]
    squared = {end: None if peak[end] is None else peak[end] ** 2 for end in ("mean", "low", "high")}
    certain = fit["peak_exists"]["low"] in (None, 1.0)
    words = "yes" if peak["mean"] <= fit["largest_sqrt_kl"] else "no: extrapolated"
    return [*numbers, stacked_cell(squared, ".2f"), stacked_cell(fit["peak_gain"], signed=True),
            words if certain else f"{words}; in some resamples there is no peak"]


def _equal_kl(metrics: dict) -> Html:
    """Render each trained policy beside the other families' curves at its own KL; empty outside their range."""
    measure, rows = metrics["measure"], {}
    curves = list_curves(metrics)
    for row in metrics["equal_kl"]:
        rows.setdefault(row["policy"], {})[row["against"]] = row[measure]
    ordered = sorted(rows, key=lambda name: metrics["policies"][name]["kl"]["mean"])
    body = [[metrics["policies"][name]["label"], f"{metrics['policies'][name]['kl']['mean']:.2f}",
             stacked_cell(metrics["policies"][name]["gains"][measure], signed=True),
             *(stacked_cell(rows[name][curve][key], signed=True) if curve in rows[name] else ""
               for curve in curves for key in ("interpolated", "difference"))] for name in ordered]
    names = [metrics["families"][curve] for curve in curves]
    head = ["policy", "its KL, nats", f"its {MEASURES[measure]}, minus SFT's",
            *(text for name in names for text in (f"{name} at that KL", f"policy minus {name}"))]
    words = ("Each policy is compared at its own KL, not at equal steps. Another method's value there is interpolated, "
             "linearly in the square root of the KL, between that method's own policies and SFT. A cell is empty where "
             "the KL lies outside that method's range, for a method of one policy, and within one method. Differences "
             "are paired by question. The KL of best-of-n is an upper bound: where samples repeat, best-of-n is better "
             "at equal KL than shown.")
    return join_html([element("p", words, class_="faint"),
                      table(head, body, class_="numbers wide") if body else element("p", "No such comparison.")])


def _hacking(metrics: dict) -> Html:
    """Render the verdict on each trained policy in each seed, with the verdict that monitors alone would give."""
    hacking = metrics["hacking"]
    rows = [[metrics["policies"][name]["label"], *map(_verdict, by_seed.values())]
            for name, by_seed in hacking["verdicts"].items()]
    if not rows:
        return element("p", "No trained policy was evaluated.")
    words = ("The verdict of each seed's evaluation. Verdicts of one seed share its reward model, so the intervals "
             "below are rather too narrow.")
    if hacking["false_alarms"] or hacking["misses"]:  # None where gold is not known
        words = f"{words} Small: the verdict without gold, where it is another. {FALSE_ALARMS}"
    return join_html([element("p", words, class_="faint"),
                      table(["policy", *(f"seed {seed}" for seed in metrics["seeds"])], rows, numeric=False),
                      render_shares(hacking)])


def _verdict(row: dict) -> Html | str:
    if row["without_gold"] in (None, row["verdict"]):
        return row["verdict"]
    return join_html([row["verdict"], " ", element("small", f"without gold: {row['without_gold']}")])


def _seconds(cost: dict | None) -> str:
    return sortable_text(format_duration(cost["mean"]), cost["mean"]) if cost else NONE


def _kl_cell(policy: dict) -> Html | str:
    kl = policy["kl"]
    return f"≤ {kl['mean']:.2f}" if policy["kl_is_bound"] else stacked_cell(kl, ".2f")


def _parameter(fit: dict, name: str) -> Html:
    _, _, interval = format_estimate(fit[f"{name}_by_question"]).partition(" ")
    return stack_interval(f"{fit[name]:z.3f} {interval}")
