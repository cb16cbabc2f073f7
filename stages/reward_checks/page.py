"""Render the page about one reward model."""

from stages.render.html import Html, element, join_html, table
from stages.reporting.document import render_page
from stages.reporting.figures import FigureFolder
from stages.reporting.headline import Verdict
from stages.reporting.sections import estimate_cells, render_reward_model
from stages.reward_checks.diagnosis import HEADLINES

KINDS = {None: "better", "unknown": "unknown"}  # of the verdict's box by fault; any other fault is "worse"


def render_reward_page(metrics: dict, figures: FigureFolder) -> str:
    """Render the whole page."""
    fault = metrics["fault"]
    verdict = Verdict(KINDS.get(fault, "worse"), HEADLINES[fault], metrics["verdict"])
    gold = {"Best of n and gold": _render_gold(metrics["gold_curve"])} if metrics["gold_curve"] else {}
    policy = {"Policy": _render_policy(metrics["policy"])} if metrics["policy"] else {}
    return render_page(f"Reward model {metrics['reward']}", [verdict], Html(""), {
        "Held-out pairs": render_reward_model(figures, metrics["reward_model"]),
        "Noise of the votes": _render_ceiling(metrics),
        "Layout": _render_layout(metrics["layout"]), **gold, **policy})


def _render_ceiling(metrics: dict) -> Html:
    words = ("The best accuracy that the votes allow, if readers vote independently, each answer at its own rate "
             "(Poisson counts, Jeffreys' prior). Votes that follow earlier votes allow less.")
    reached = metrics["reward_model"]["by_score_gap"]
    rows = [["all pairs", *estimate_cells(metrics["noise_ceiling"]["all"])]]
    for name, ceiling in metrics["noise_ceiling"]["by_score_gap"].items():
        rows += [[f"score gap {name}", *estimate_cells(ceiling)],
                 [f"score gap {name}: the reward model", *estimate_cells(reached[name])]]
    return join_html([element("p", words, class_="faint"),
                      table(["pairs", "share ranked right", "95 % interval", "pairs"], rows)])


def _render_layout(layout: dict) -> Html:
    words = ("The same words in another layout. The shift is that of the changed answers' scores, in standard "
             "deviations of all scores; the accuracy is that of pairs with a changed answer.")
    rows = [[name, f"{100 * measured['changed_share']:.1f} %", *estimate_cells(measured["rank_correlation"])[:2],
             *estimate_cells(measured["shift_stds"], signed=True)[:2],
             *estimate_cells(measured["accuracy_change"], signed=True)[:2]] for name, measured in layout.items()]
    head = ["layout", "answers changed", "rank correlation", "95 % interval", "shift", "95 % interval",
            "change of accuracy", "95 % interval"]
    return join_html([element("p", words, class_="faint"), table(head, rows)])


def _render_gold(curve: list[dict]) -> Html:
    words = ("Among n samples of SFT to each held-out question, at the sampling temperature, the reward model chooses "
             "one. Where gold itself chooses, the answer is the best that n samples have.")
    rows = [[str(point["n"]), f"{point['kl']:.2f}", *estimate_cells(point["reward"])[:2],
             *estimate_cells(point["gold"])[:2], *estimate_cells(point["best_gold"])[:2]] for point in curve]
    head = ["n", "KL, nats", "learnt reward", "95 % interval", "gold", "95 % interval", "gold, chosen by gold",
            "95 % interval"]
    return join_html([element("p", words, class_="faint"), table(head, rows)])


def _render_policy(policy: dict) -> Html:
    rows = [["KL to SFT, nats a response (k1)", *estimate_cells(policy["kl_k1"])],
            ["KL to SFT, nats a response (k3)", *estimate_cells(policy["kl_k3"])],
            ["learnt reward minus SFT's", *estimate_cells(policy["reward_difference"], signed=True)],
            ["gold minus SFT's", *estimate_cells(policy["gold_difference"], signed=True)]]
    return table(["of the policy's answers", "mean", "95 % interval", "questions"], rows)
