"""Add what an evaluation measured to the card of a merged model: metadata (model-index) and a section."""

from huggingface_hub import EvalResult, ModelCard

from stages.cards.sections import MAX_LABEL_CHARACTERS, format_section
from stages.evaluation.summary import (
    BEST,
    choose_measure_of_sft,
    describe_policy,
    difference_to,
    display_name,
    format_estimate,
    judged_by,
    mean_score,
)
from stages.evaluation.tasks.wording import SFT, find_wording, start_model
from stages.render.markdown_tables import clean_name, escape_cell, format_table
from stages.reporting.headline import join_sites, policy_headline

SPLIT = "evaluation"


def render_evaluated_card(card_text: str, name: str, writer: str, metrics: dict, sites: list[str]) -> str:
    """Add what the evaluation measured to a card: the metadata `model-index`, and a section.

    Args:
        name: of the model.
        writer: which model of the evaluation it is: 'reward', 'judge', 'sft' or a policy.
        sites: that the questions are of, or the file of a user's own prompts.
    """
    is_scorer = writer in ("reward", "judge")
    rows = _reward_rows(metrics, writer) if is_scorer else _policy_rows(metrics, writer)
    if not rows:
        return card_text
    wording, is_dump = find_wording(metrics["policies"]), start_model(metrics["policies"]) == SFT
    held_out, sites = f"held-out {wording.questions} of {{}}", sites or ["Stack Exchange"]
    card = ModelCard(card_text, ignore_metadata_errors=True)
    card.data.model_name = clean_name(name)
    card.data.eval_results = [EvalResult(
        task_type="text-classification" if is_scorer else "text-generation",
        dataset_type="stack-exchange" if is_dump else "own-prompts",
        dataset_name=held_out.format(join_sites(sites)), dataset_split=SPLIT, metric_type=kind,
        metric_name=_metric_name(label, estimate), metric_value=round(estimate["mean"], 6))
        for kind, label, estimate in rows]
    headline = f"{policy_headline(metrics, writer)[1]}." if writer in metrics["comparisons"] else ""
    section = format_section(
        "Evaluation", headline, f"On {held_out.format(join_sites(sites, escape_cell))}, with 95 % intervals.",
        "" if is_dump else wording.only_reward.format(display_name(writer)),
        format_table(["number", "value"], [
            (escape_cell(label, MAX_LABEL_CHARACTERS), format_estimate(estimate)) for _, label, estimate in rows]))
    return f"{str(card).rstrip()}\n\n{section}\n"


def _reward_rows(metrics: dict, writer: str) -> list[tuple[str, str, dict]]:
    """List (type, label, estimate) of a reward model, as far as it was measured."""
    reward = metrics["reward_model"]
    accuracy = reward["accuracy"] if writer == "reward" else (metrics["judge"] or {}).get("accuracy")
    rows = [("accuracy", "pairs ranked right", accuracy)]
    if writer == "reward":
        rows += [("accuracy", f"pairs ranked right, minus “{reward['best_cheap_baseline']}”",
                  reward["above_best_cheap_baseline"])]
    return [row for row in rows if row[2]]


def _policy_rows(metrics: dict, writer: str) -> list[tuple[str, str, dict]]:
    """List (type, label, estimate) of SFT or a policy; estimates without an interval have only a mean."""
    policies, best = metrics["policies"], f"{writer}{BEST}"
    start, wording = start_model(policies), find_wording(policies)
    is_trained = writer in metrics["at_best"]
    measure = judged_by(metrics, writer) if is_trained else choose_measure_of_sft(metrics)
    at = f"at temperature {policies[start]['temperature']:g}"
    rows = [(measure, f"{measure}, {describe_policy(best, policies)}", _point(mean_score(policies[best], measure)))]
    if is_trained:
        comparison = metrics["comparisons"][writer]
        rows += [(measure, f"{measure}, {display_name(writer)} minus {wording.start}, each at its best temperature",
                  difference_to(metrics, writer, f"{start}{BEST}")),
                 ("win_rate", f"win rate against {wording.start} by the {wording.reward}, {at}",
                  comparison["win_rate"]),
                 ("kl", f"KL to {wording.start}, nats a response, {at}", comparison["kl_k1"])]
    return [*rows, ("eos_rate", f"share of answers that end, {at}", _point(policies[writer]["eos_rate"]))]


def _point(value: float) -> dict:
    return {"mean": value, "low": None, "high": None}


def _metric_name(label: str, estimate: dict) -> str:
    if estimate["low"] is None:
        return label
    return f"{label} (95 % interval {estimate['low']:.3f} to {estimate['high']:.3f})"
