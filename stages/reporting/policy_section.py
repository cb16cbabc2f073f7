"""Policies side by side, each at its best temperature and all at one: scores, paired differences, monitors, figures."""

from collections.abc import Iterable

from stages.evaluation.summary import (
    BEST,
    GOLD_ROWS,
    best_of_n_policies,
    capitalise,
    cheaper_policies,
    describe_policy,
    display_name,
    format_estimate,
    mean_score,
    samples_per_answer,
)
from stages.evaluation.tasks.wording import SFT, find_wording, greedy_name, start_model
from stages.render.html import Html, element, join_html, stack_interval, table
from stages.reporting.figures import Curves, FigureFolder
from stages.reporting.frontier_figure import Frontier, FrontierPoint

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


def render_policies(metrics: dict) -> Html:
    """Render every metric of every policy on the same prompts, a column a policy, with the best human answer."""
    columns = order_policies(metrics["policies"])
    columns |= {"best human": metrics["best_human_answer"]} if "best_human_answer" in metrics else {}
    scorers, start = metrics["policies"][start_model(columns)]["scores"], find_wording(columns).start
    rows = [[label.replace("SFT", start), *(stacked_cell(column.get(name)) for column in columns.values())]
            for label, name in INTERVAL_ROWS]
    rows += [[scorer, *(stacked_cell(column.get("scores", {}).get(scorer)) for column in columns.values())]
             for scorer in scorers]
    rows += [[label.replace("SFT", start), *(_format_point(column.get(name), form) for column in columns.values())]
             for label, name, form in POINT_ROWS]
    rows = [row for row in rows if set(row[1:]) != {NONE}]
    return table(["measure", *map(display_name, columns)], rows, class_="numbers wide")


def render_gold_scores(comparisons: dict, start: str) -> Html:
    """Render the gold scores of the start model, of each policy and, beside SFT, of the best human answers."""
    sides = {start: display_name(start), "policy": "policy"} | ({"human": "best human answer"} if start == SFT else {})
    rows = [[f"{display_name(policy)}: {score}", *(_format_point(gain[side]) for side in sides),
             stacked_cell(gain["difference"], signed=True)]
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


def order_policies(policies: dict) -> dict:
    """Order the policies at the sampling temperature as SFT, trained policies, base, best-of-n.

    Without SFT, base comes first. A narrow screen shows the first columns only.
    """
    start, best_of_n = start_model(policies), best_of_n_policies(policies)
    others = ("sft", "base", greedy_name(start), *best_of_n)
    trained = [name for name in policies if name not in others and not name.endswith(BEST)]
    return {name: policies[name] for name in dict.fromkeys((start, *trained, "base", *best_of_n)) if name in policies}


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


def render_at_best(figures: FigureFolder, metrics: dict) -> Html:
    """Render what each policy reaches at its best temperature, how that was chosen, and the differences."""
    selection, wording = metrics["temperature_selection"], find_wording(metrics["policies"])
    words = (f"Each policy has the temperature with the highest mean {wording.reward} on {selection['prompts']:,} "
             f"held-out {wording.questions}, none of which is among the evaluation's {metrics['prompts']:,}. All "
             f"policies answered those of the evaluation, and differences are paired by {wording.questions[:-1]}. "
             f"Best-of-n costs n samples an answer, and the {wording.reward} chooses among them. KL is not given: it "
             f"compares policies at one temperature. The lines of the figures are on the {wording.questions} that "
             f"temperatures were chosen on, best-of-n on the evaluation's.")
    if metrics["judge"]:
        words += (f" The judge is a reward model of another seed and other questions. It ranks "
                  f"{format_estimate(metrics['judge']['accuracy'])} of the held-out pairs right, and nothing was "
                  f"trained on it or chosen by it.")
    return join_html([
        element("h3", "Each at its best temperature"), element("p", words, class_="faint"),
        _render_scores(metrics), *(_render_differences(metrics, policy) for policy in metrics["at_best"]),
        figures.draw(_build_curves(metrics))])


def _render_scores(metrics: dict) -> Html:
    policies = metrics["policies"]
    names = [*_without_twins(cheaper_policies(policies), policies),
             *(f"{policy}{BEST}" for policy in metrics["at_best"])]
    gold = _gold_scores(metrics)
    intervals, further = [name for name in ("reward", "judge") if policies[names[0]][name]], _further_scores(metrics)
    rows = [[describe_policy(name, policies), samples_per_answer(name),
             *(stacked_cell(policies[name][key]) for key in intervals),
             *(stacked_cell(policies[name]["scores"][key]) for key in further),
             *(_format_point(mean_score(policies[name], key)) for key in gold),
             _format_point(policies[name]["eos_rate"]), _format_point(policies[name]["response_tokens"], ".1f")]
            for name in names]
    return table(["policy", "samples an answer", *intervals, *further, *gold, "ended by EOS", "tokens"], rows,
                 class_="numbers")


def _render_differences(metrics: dict, policy: str) -> Html:
    against, gold = metrics["at_best"][policy], _gold_scores(metrics)
    scores, further = ["reward", *(["judge"] if metrics["judge"] else [])], _further_scores(metrics)
    rows = [[describe_policy(name, metrics["policies"]), against[name]["samples_per_answer"],
             *(stacked_cell(against[name][key], signed=True) for key in scores),
             *(stacked_cell(against[name]["scores"][key], signed=True) for key in further),
             *(stacked_cell(against[name]["gold"].get(key), signed=True) for key in gold)]
            for name in _without_twins(against, metrics["policies"])]
    who = describe_policy(f"{policy}{BEST}", metrics["policies"])
    return table([f"{who}, minus", "samples an answer", *scores, *further, *gold], rows)


def _without_twins(names: Iterable[str], policies: dict) -> list[str]:
    """List each policy once: SFT's best temperature may be 0, which is greedy decoding."""
    return list({describe_policy(name, policies): name for name in names}.values())


def stacked_cell(estimate: dict | None, form: str = ".3f", signed: bool = False) -> Html | str:
    """Render a cell with the mean and, under it, the interval of an estimate; a dash for None."""
    return NONE if estimate is None else stack_interval(format_estimate(estimate, form, signed))


def _further_scores(metrics: dict) -> list[str]:
    """List the parts of a user's own reward, and the scores that training never saw."""
    return list(next(iter(next(iter(metrics["at_best"].values()), {}).values()), {}).get("scores", {}))


def _build_curves(metrics: dict) -> dict[str, Curves]:
    """Build the figures of reward and, where it is known, gold against temperature, with best-of-n as levels."""
    figures = {}
    for measure in ("reward", "gold"):
        lines = {display_name(name): [(row["temperature"], row[measure]) for row in curve]
                 for name, curve in metrics["temperature_selection"]["curves"].items()
                 if len(curve) > 1 and all(row[measure] is not None for row in curve)}
        levels = {f"best-of-{samples_per_answer(name)}, T {policy['temperature']:g}": policy[measure]["mean"]
                  for name in _largest_best_of_n(metrics["policies"])
                  if (policy := metrics["policies"][name])[measure]}
        if lines:
            what = find_wording(metrics["policies"]).reward if measure == "reward" else "gold"
            title = f"{capitalise(what)} against temperature"
            figures[f"evaluate-temperature-{measure}"] = Curves(
                title, "sampling temperature; 0: greedy", lines, None, f"mean {measure}", levels)
    return figures


def _largest_best_of_n(policies: dict) -> list[str]:
    """List the largest best-of-n at the sampling temperature, and that at SFT's best; none without best-of-n."""
    names = [name for name in cheaper_policies(policies) if samples_per_answer(name) > 1]
    largest = max(map(samples_per_answer, names), default=0)
    return [name for name in names if samples_per_answer(name) == largest]


def _gold_scores(metrics: dict) -> list[str]:
    best = metrics["policies"][f"{start_model(metrics['policies'])}{BEST}"]
    return [name for name in GOLD_ROWS if best["gold_scores"].get(name) is not None]


def _format_point(value: float | None, form: str = ".3f") -> str:
    """Format a number; a dash for None."""
    return NONE if value is None else f"{value:z{form}}"
