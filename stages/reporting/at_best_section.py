"""Policies each at its best temperature: tables of scores and of paired differences, and score against temperature."""

from collections.abc import Iterable

from stages.evaluation.length_control.words import SCORES, describe_length, format_equal_length
from stages.evaluation.summary import (
    BEST,
    CONTROLS,
    GOLD_ROWS,
    against_start,
    capitalise,
    cheaper_policies,
    describe_policy,
    display_name,
    format_estimate,
    mean_score,
    samples_per_answer,
)
from stages.evaluation.tasks.wording import find_wording, start_model
from stages.render.html import Html, element, fold, join_html, stack_interval, table
from stages.reporting.figures import Curves, FigureFolder
from stages.reporting.policy_section import format_point


def render_at_best(figures: FigureFolder, metrics: dict) -> Html:
    """Render what each policy reaches at its best temperature, how that was chosen, and the differences."""
    selection, wording = metrics["temperature_selection"], find_wording(metrics["policies"])
    words = (f"Each policy has the temperature with the highest mean {wording.reward} on {selection['prompts']:,} "
             f"held-out {wording.questions}, none of which is among the evaluation's {metrics['prompts']:,}. All "
             f"policies answered those of the evaluation, and differences are paired by {wording.questions[:-1]}. "
             f"Best-of-n costs n samples an answer, and the {wording.reward} chooses among them. KL is not given: it "
             f"compares policies at one temperature. The lines of the figures are on the {wording.questions} that "
             f"temperatures were chosen on, best-of-n on the evaluation's.")
    return join_html([
        element("h3", "Each at its best temperature"), element("p", words, class_="faint"), _judge_words(metrics),
        _render_scores(metrics), *(_render_differences(metrics, policy) for policy in metrics["at_best"]),
        *(_render_length(metrics, policy) for policy in metrics.get("length_control", {})),
        figures.draw(_build_curves(metrics)), _render_selection(metrics)])


def _render_length(metrics: dict, policy: str) -> Html:
    """Render what a policy and its control gained between answers of equal length, and how often it is preferred."""
    length, policies = metrics["length_control"][policy], metrics["policies"]
    wording = find_wording(policies)
    name, control = display_name(policy), display_name(CONTROLS[policy])
    words = (f"{control} is the control: the same training, paid for the number of tokens alone. Bins have about "
             f"equally many answers, of {wording.start} and the policy together, and are weighted by these; a gain "
             f"that is length alone is next to nothing within them. Two answers are of about equal length if they "
             f"differ by less than 10 % of the longer; pairs with best-of-n are expected numbers.")
    scores = [score for score in SCORES if score in next(iter(length["preferred"].values()))["all"]]
    preferred = [[describe_policy(other, policies), *(_stack(length["preferred"][other]["all"][score])
                                                      for score in scores),
                  *(stack_interval(format_equal_length(length["preferred"][other], score)) for score in scores)]
                 for other in _without_twins(length["preferred"], policies)]
    bins = [[f"{low} to {high}", row["before"], row["after"], format_point(row["difference"])]
            for row in length["within_bins"][policy]["bins"] for low, high in [row["tokens"]]]
    return join_html([
        element("h3", f"What {name} learnt beside length"),
        element("p", " ".join(describe_length(metrics, policy))), element("p", words, class_="faint"),
        table([f"{name} wins against", *scores, *(f"{score}, at equal length" for score in scores)], preferred),
        table(["tokens", f"answers of {wording.start}", f"answers of {name}", f"{wording.reward}, {name} minus "
               f"{wording.start}"], bins)])


def _judge_words(metrics: dict) -> Html:
    if not metrics["judge"]:
        return join_html([])
    return element("p", f"The judge is a reward model of another seed and other questions. It ranks "
                        f"{format_estimate(metrics['judge']['accuracy'])} of the held-out pairs right, and nothing was "
                        f"trained on it or chosen by it.", class_="faint")


def _render_scores(metrics: dict) -> Html:
    policies = metrics["policies"]
    names = [*_without_twins(cheaper_policies(policies), policies),
             *(f"{policy}{BEST}" for policy in metrics["at_best"])]
    gold = _gold_scores(metrics)
    intervals, further = [name for name in ("reward", "judge") if policies[names[0]][name]], _further_scores(metrics)
    rows = [[describe_policy(name, policies), samples_per_answer(name),
             *(_stack(policies[name][key]) for key in intervals),
             *(_stack(policies[name]["scores"][key]) for key in further),
             *(format_point(mean_score(policies[name], key)) for key in gold),
             format_point(policies[name]["eos_rate"]), format_point(policies[name]["response_tokens"], ".1f")]
            for name in names]
    return table(["policy", "samples an answer", *intervals, *further, *gold, "ended by EOS", "tokens"], rows,
                 class_="numbers")


def _render_differences(metrics: dict, policy: str) -> Html:
    against, gold = metrics["at_best"][policy], _gold_scores(metrics)
    scores, further = ["reward", *(["judge"] if metrics["judge"] else [])], _further_scores(metrics)
    rows = [[describe_policy(name, metrics["policies"]), against[name]["samples_per_answer"],
             *(_stack(against[name][key], signed=True) for key in scores),
             *(_stack(against[name]["scores"][key], signed=True) for key in further),
             *(_stack(against[name]["gold"].get(key), signed=True) for key in gold)]
            for name in _without_twins(against, metrics["policies"])]
    who = describe_policy(f"{policy}{BEST}", metrics["policies"])
    return table([f"{who}, minus", "samples an answer", *scores, *further, *gold], rows)


def _without_twins(names: Iterable[str], policies: dict) -> list[str]:
    """List each policy once: SFT's best temperature may be 0, which is greedy decoding."""
    return list({describe_policy(name, policies): name for name in names}.values())


def _stack(estimate: dict | None, signed: bool = False) -> Html:
    return stack_interval(format_estimate(estimate, signed=signed))


def _further_scores(metrics: dict) -> list[str]:
    """List the parts of a user's own reward, and the scores that training never saw."""
    return list(next(iter(next(iter(metrics["at_best"].values()), {}).values()), {}).get("scores", {}))


def _render_selection(metrics: dict) -> Html:
    """Render the mean reward of each policy at each temperature, on the questions that temperatures are chosen on."""
    curves = metrics["temperature_selection"]["curves"]
    chosen = {name: metrics["policies"][f"{name}{BEST}"]["temperature"] for name in curves}
    rows = [[display_name(name), f"{row['temperature']:g}", format_point(row["reward"]), format_point(row["gold"]),
             format_point(row["eos_rate"]), "chosen" if row["temperature"] == chosen[name] else ""]
            for name, curve in curves.items() for row in curve]
    if not rows:
        question = find_wording(metrics["policies"]).questions[:-1]
        return element("p", f"No {question} was left to choose a temperature on.")
    return fold("How the temperatures were chosen", table(
        ["policy", "temperature", "mean reward", "mean gold", "ended by EOS", "highest reward"], rows))


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
    if not metrics["at_best"]:
        best = metrics["policies"][f"{start_model(metrics['policies'])}{BEST}"]
        return [name for name in GOLD_ROWS if best["gold_scores"].get(name) is not None]
    known = {name for policy in metrics["at_best"].values() for name in against_start(policy)["gold"]}
    return [name for name in GOLD_ROWS if name in known]
