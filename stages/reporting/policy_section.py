"""Policies side by side: the table of all metrics, gold scores, monitors, and reward against KL."""

from stages.evaluation.summary import best_of_n_policies, display_name, format_estimate, order_policies
from stages.evaluation.tasks.wording import SFT, find_wording, start_model
from stages.render.html import Html, stack_interval, table
from stages.reporting.frontier_figure import Frontier, FrontierPoint
from stages.reporting.healthy_bands import BANDS, mark_number

# SFT stands for the model that the policies are compared with.
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
OUR_LABELS = {row[0] for row in (*INTERVAL_ROWS, *POINT_ROWS)}


def render_policies(metrics: dict) -> Html:
    """Render every metric of every policy on the same prompts, a column a policy, with the best human answer."""
    columns = order_policies(metrics["policies"])
    columns |= {"best human": metrics["best_human_answer"]} if "best_human_answer" in metrics else {}
    scorers, start = metrics["policies"][start_model(columns)]["scores"], find_wording(columns).start
    rows = [[label, *(_interval_cell(column.get(name)) for column in columns.values())]
            for label, name in INTERVAL_ROWS]
    rows += [[scorer, *(_interval_cell(column.get("scores", {}).get(scorer)) for column in columns.values())]
             for scorer in scorers]
    rows += [[label, *(_banded_cell(policy, column.get(name), form, name) for policy, column in columns.items())]
             for label, name, form in POINT_ROWS]
    rows = [[row[0].replace("SFT", start) if row[0] in OUR_LABELS else row[0], *row[1:]] for row in rows
            if set(row[1:]) != {NONE}]
    return table(["measure", *map(display_name, columns)], rows, class_="numbers wide")


def render_gold_scores(comparisons: dict, start: str) -> Html:
    """Render the gold scores of the start model, of each policy and, beside SFT, of the best human answers."""
    sides = {start: display_name(start), "policy": "policy"} | ({"human": "best human answer"} if start == SFT else {})
    rows = [[f"{display_name(policy)}: {score}",
             *(format_point(gain[side], ".3f") for side in sides),
             stack_interval(format_estimate(gain["difference"], signed=True))]
            for policy, comparison in comparisons.items() for score, gain in (comparison["gold"] or {}).items()]
    return table(["policy: score", *sides.values(), f"policy minus {display_name(start)}, paired"], rows)


def render_monitors(hacking: dict, policy: str, start: str) -> Html:
    """Render the monitors of a policy, and which of them moved for the worse beyond their thresholds."""
    rows = [[row["label"], f"{row[start]:z{row['form']}}", f"{row['policy']:z{row['form']}}",
             stack_interval(format_estimate(row["change"], row["form"], signed=True)),
             f"{row['worse']} by {row['threshold']:{row['form']}}", "moved" if row["moved"] else "no"]
            for row in hacking["monitors"]]
    return table(
        ["monitor", display_name(start), display_name(policy), "change, 95 % interval", "worse if it", "moved"], rows)


def build_frontier(policies: dict) -> Frontier:
    """Build the figure of mean reward against KL to the start model, in nats a response."""
    start, name_start = start_model(policies), find_wording(policies).start
    line = {name_start: (0.0, policies[start]["reward"])} | {
        display_name(name): (policy["kl_formula"], policy["reward"])
        for name, policy in best_of_n_policies(policies).items()}
    family = f"best-of-n of {name_start}"
    points = {family: [FrontierPoint({"mean": kl, "low": None, "high": None}, reward, name)
                       for name, (kl, reward) in line.items()]}
    points |= {display_name(name): [FrontierPoint(policy["kl_k1"], policy["reward"])]
               for name, policy in order_policies(policies).items()
               if name != start and not name.startswith("best_of_")}
    return Frontier(f"Reward against KL to {name_start}", f"KL to {name_start}, nats a response", "mean reward", points,
                    {family: [(kl, reward["mean"]) for kl, reward in line.values()]})


def _interval_cell(estimate: dict | None) -> Html | str:
    return NONE if estimate is None else stack_interval(format_estimate(estimate))


def format_point(value: float | None, form: str = ".3f") -> str:
    """Format a number; a dash for None."""
    return NONE if value is None else f"{value:z{form}}"


def _banded_cell(policy: str, value: float | None, form: str, name: str) -> str:
    """Render a number, marked where it lies outside its healthy band; the base model has not learnt to answer."""
    text = format_point(value, form)
    return mark_number(text, name, value) if name in BANDS and policy != "base" else text
