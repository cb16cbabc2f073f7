"""Policies side by side: the table of all metrics, gold scores, monitors, and reward against KL."""

from stages.evaluation.summary import best_of_n_policies, display_name, format_estimate, order_policies
from stages.render.html import Html, element, join_html, table
from stages.reporting.figures import Frontier
from stages.reporting.healthy_bands import BANDS, mark_number

INTERVAL_ROWS = (("mean reward", "reward"), ("reward, minus SFT's (paired)", "reward_difference"),
                 ("win rate against SFT", "win_rate"), ("KL to SFT (k1), nats a response", "kl_k1"),
                 ("KL to SFT (k3), nats a response", "kl_k3"), ("gold", "gold"))
POINT_ROWS = (
    ("KL to SFT, log n - (n-1)/n", "kl_formula", ".3f"), ("entropy, nats a token", "entropy", ".3f"),
    ("perplexity under SFT", "perplexity_under_sft", ".3f"), ("mean length, tokens", "response_tokens", ".1f"),
    ("ended by EOS", "eos_rate", ".3f"), ("distinct-1", "distinct_1", ".3f"), ("distinct-2", "distinct_2", ".3f"),
    ("distinct-3", "distinct_3", ".3f"), ("distinct responses", "distinct_responses", ".3f"),
    ("repetition, share of repeated 4-grams", "repetition", ".4f"), ("with a code block", "code_share", ".3f"),
    ("code fences a response", "code_fences", ".3f"),
    ("correlation of reward with length", "reward_length_correlation", ".3f"))
NONE = "–"


def render_policies(metrics: dict) -> Html:
    """Render every metric of every policy on the same prompts, a column a policy, with the best human answer."""
    columns = order_policies(metrics["policies"]) | {"best human": metrics["best_human_answer"]}
    scorers = metrics["policies"]["sft"]["scores"]
    rows = [[label, *(_interval_cell(column.get(name)) for column in columns.values())]
            for label, name in INTERVAL_ROWS]
    rows += [[scorer, *(_interval_cell(column.get("scores", {}).get(scorer)) for column in columns.values())]
             for scorer in scorers]
    rows += [[label, *(_banded_cell(policy, column.get(name), form, name) for policy, column in columns.items())]
             for label, name, form in POINT_ROWS]
    rows = [row for row in rows if set(row[1:]) != {NONE}]
    return table(["measure", *map(display_name, columns)], rows, class_="numbers wide")


def render_gold_scores(comparisons: dict) -> Html:
    """Render the gold scores of SFT, of each policy and of the best human answers."""
    rows = [[f"{display_name(policy)}: {score}",
             *(format_point(gain[side], ".3f") for side in ("sft", "policy", "human")),
             format_estimate(gain["difference"], signed=True)]
            for policy, comparison in comparisons.items() for score, gain in (comparison["gold"] or {}).items()]
    return table(["policy: score", "SFT", "policy", "best human answer", "policy minus SFT, paired"], rows)


def render_monitors(hacking: dict, policy: str) -> Html:
    """Render the monitors of a policy, and which of them moved for the worse beyond their thresholds."""
    rows = [[row["label"], f"{row['sft']:z{row['form']}}", f"{row['policy']:z{row['form']}}",
             format_estimate(row["change"], row["form"], signed=True),
             f"{row['worse']} by {row['threshold']:{row['form']}}", "moved" if row["moved"] else "no"]
            for row in hacking["monitors"]]
    return table(["monitor", "SFT", display_name(policy), "change, 95 % interval", "worse if it", "moved"],
                 rows)


def build_frontier(policies: dict) -> Frontier:
    """Build the figure of mean reward against KL to SFT, in nats a response."""
    line = {"SFT": (0.0, policies["sft"]["reward"])} | {
        display_name(name): (policy["kl_formula"], policy["reward"])
        for name, policy in best_of_n_policies(policies).items()}
    others = {display_name(name): (policy["kl_k1"]["mean"], policy["reward"])
              for name, policy in order_policies(policies).items()
              if name != "sft" and not name.startswith("best_of_")}
    return Frontier("Reward against KL to SFT", "KL to SFT, nats a response", "mean reward", line, others)


def _interval_cell(estimate: dict | None) -> str:
    """Render the mean with its interval below it: columns must be narrow."""
    if estimate is None:
        return NONE
    mean, _, interval = format_estimate(estimate).partition(" ")
    return join_html([mean, " ", element("small", interval)])


def format_point(value: float | None, form: str = ".3f") -> str:
    """Format a number; a dash for None."""
    return NONE if value is None else f"{value:z{form}}"


def _banded_cell(policy: str, value: float | None, form: str, name: str) -> str:
    """Render a number, marked where it lies outside its healthy band; the base model has not learnt to answer."""
    text = format_point(value, form)
    return mark_number(text, name, value) if name in BANDS and policy != "base" else text
