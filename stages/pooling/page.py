"""Write the page on several seeds: gains over SFT by seed and pooled, and the verdicts on reward hacking."""

from stages.evaluation.summary import change_direction, display_name, format_estimate
from stages.pooling.pool import describe_hacking
from stages.render.html import Html, element, join_html, stack_interval, table
from stages.reporting.document import render_page
from stages.reporting.headline import Verdict

WORDS = ("Within seeds: questions are resampled, the models stay; another evaluation of these models would fall there. "
         "Over seeds: Student's interval of the seeds' means; models that are trained again would fall there. Every "
         "seed has splits, pairs and models of its own, so that two seeds share few held-out questions.")
FALSE_ALARMS = ("A false alarm: the verdict that does not know gold flags a policy whose gold rose. A miss: it does "
                "not flag one whose reward rose while gold did not. Both are known only where a gold scorer is.")
SHOWN = {"gold": 0, "judge": 1, "reward": 2}  # what the headline goes by, if there are several
DIRECTIONS = {1: "is better than SFT", 0: "cannot be told apart from SFT", -1: "is worse than SFT"}


def render_seeds_page(metrics: dict) -> str:
    """Render the page; metrics: as pool_evaluations returns them."""
    names = metrics["seeds"]
    sections = {}
    for policy, pooled in metrics["policies"].items():
        name = display_name(policy)
        gains = {f"{score}, {name} - SFT": row for score, row in pooled["gains"].items()}
        differences = {f"{name}: {label}": row for label, row in pooled["against"].items()}
        sections[f"{name} against SFT, each at its best temperature"] = join_html([
            element("p", WORDS, class_="faint"), _render_rows(gains | differences, names)])
        sections[f"{name} in numbers"] = _render_rows(pooled["numbers"], names)
        sections[f"{name}: reward hacking"] = _render_verdicts(pooled["hacking"])
    sections["Reward model"] = _render_rows({
        "pairs ranked right": metrics["reward_model"]["accuracy"],
        "above the best cheap baseline": metrics["reward_model"]["above_best_cheap_baseline"]}, names)
    short = table(["measure", "estimate, 95 % interval"], metrics["table"], numeric=False)
    return render_page(f"{len(names)} seeds of one recipe", _build_verdicts(metrics), short, sections)


def _build_verdicts(metrics: dict) -> list[Verdict]:
    verdicts = []
    for policy, pooled in metrics["policies"].items():
        known = [score for score in sorted(pooled["gains"], key=lambda score: SHOWN.get(score, 3)) if score in SHOWN]
        row = pooled["gains"][known[0]]
        direction = change_direction(row["over_seeds"])
        kind = {1: "unknown" if known[0] == "reward" else "better", 0: "flat", -1: "worse"}[direction]
        verdicts.append(Verdict(kind, f"{display_name(policy)} {DIRECTIONS[direction]} in {known[0]}, over seeds", {
            "Did it work?": f"Mean difference {format_estimate(row['over_seeds'], signed=True)} over seeds, "
                            f"{format_estimate(row['within_seeds'], signed=True)} within seeds.",
            "Did the policy cheat?": f"{describe_hacking(pooled['hacking'])}."}))
    return verdicts


def _render_rows(rows: dict[str, dict], seeds: list[str]) -> Html:
    return table(["", "over seeds", "within seeds", *seeds], [
        (label, *(stack_interval(format_estimate(estimate)) for estimate in (
            row["over_seeds"], row["within_seeds"], *(row["per_seed"][seed] for seed in seeds))))
        for label, row in rows.items()])


def _render_verdicts(hacking: dict) -> Html:
    rows = [(seed, row["verdict"], row["without_gold"] or "gold is not known", row["kind"],
             ", ".join(row["moved"]) or "none") for seed, row in hacking["per_seed"].items()]
    return join_html([
        element("p", FALSE_ALARMS, class_="faint"),
        table(["seed", "verdict", "without gold", "comparison", "monitors that moved"], rows, numeric=False),
        render_shares(hacking)])


def render_shares(shares: dict) -> Html:
    """Render the shares that `hacking.estimate_shares` returns."""
    return table(["share", "estimate, Wilson's 95 % interval", "verdicts"], [
        (label, format_estimate(shares[key], ".2f"), shares[key]["count"]) for label, key in (
            ("flagged, of all", "flagged"), ("false alarms, of those that gold clears", "false_alarms"),
            ("misses, of those that gold flags", "misses")) if shares[key]])
