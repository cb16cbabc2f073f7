"""The first look: a real question before and after training, reward and KL along it, and whether it worked."""

from stages.evaluation.summary import (
    BEST,
    against_start,
    cheaper_policies,
    choose_measure,
    describe_policy,
    difference_at_best,
    display_name,
    format_estimate,
    judged_policies,
    mean_score,
    samples_per_answer,
    strongest_best_of_n,
)
from stages.evaluation.tasks.wording import find_wording, start_model
from stages.render.html import Html, element, join_html, stack_interval, table
from stages.reporting.answer_cards import render_answer, render_attribution, render_post
from stages.reporting.figures import Curves, FigureFolder

SHORT_CHARACTERS = 500  # of the question and of each answer, so that a reader sees all three at once
FIRST_CURVES = 2
MEASURES = {"gold": "Gold knows the truth; no training saw it.",
            "judge": "The judge is a reward model that nothing was trained on."}


def render_first_look(figures: FigureFolder, metrics: dict, samples: list[dict], curves: dict[str, Curves]) -> Html:
    """Render the three parts side by side, of the first policy; nothing without one.

    curves: of the policy's training, by file name.
    """
    policy = next(iter(judged_policies(metrics)), None)
    if policy is None:
        return join_html([])
    parts = {"A question, before and after": _render_example(samples, metrics, policy),
             "Training": figures.draw(curves) if curves else "",
             "Did it work?": _render_scores(metrics, policy)}
    return element("div", *(element("div", element("h2", heading), body) for heading, body in parts.items() if body),
                   class_="first")


def select_first_curves(metrics: dict, curves: dict[str, dict[str, Curves]]) -> dict[str, Curves]:
    """Select reward and KL of the first policy or, of a training without them, its first curves.

    curves: by artifact and file name.
    """
    policy = next(iter(judged_policies(metrics)), "")
    drawn = curves.get(policy, {})
    named = [name for name in (f"{policy}-reward", f"{policy}-kl") if name in drawn]
    return {name: drawn[name] for name in (named or list(drawn)[:FIRST_CURVES])}


def choose_example(samples: list[dict], start: str, policy: str) -> tuple[dict | None, int]:
    """Choose the short question of the median gain in reward, and count those that it was chosen among."""
    def gain(row: dict) -> float:
        return row[f"reward_{policy}{BEST}"] - row[f"reward_{start}{BEST}"]

    known = [row for row in samples
             if None not in (row[f"reward_{start}{BEST}"], row[f"reward_{policy}{BEST}"])]
    texts = ("question", f"{start}{BEST}", f"{policy}{BEST}")
    short = [row for row in known if all(len(row[name]) <= SHORT_CHARACTERS for name in texts)] or known
    return (sorted(short, key=gain)[len(short) // 2] if short else None), len(short)


def _render_example(samples: list[dict], metrics: dict, policy: str) -> Html | str:
    start, wording = start_model(metrics["policies"]), find_wording(metrics["policies"])
    row, count = choose_example(samples, start, policy)
    if row is None:
        return ""
    words = (f"The median of {count:,} short held-out {wording.questions} by gain in {wording.reward}, each model at "
             f"its best temperature.")
    return join_html([
        element("div", render_post(row["question"]), render_attribution(row), class_="card"),
        *(element("div", render_answer(row, f"{when}: {display_name(name)}", f"{name}{BEST}"), class_="card")
          for when, name in (("Before", start), ("After", policy))),
        element("p", words, class_="faint")])


def _render_scores(metrics: dict, policy: str) -> Html:
    """Render the score of what a policy must beat beside its own, with the paired differences."""
    policies, against = metrics["policies"], metrics["at_best"][policy]
    measure, wording = choose_measure(against_start(against)), find_wording(policies)
    best_of_n = strongest_best_of_n(against)
    names = {describe_policy(name, policies): name for name in cheaper_policies(against)
             if samples_per_answer(name) == 1 or name == best_of_n}
    rows = [[label, _score(policies[name], measure),
             stack_interval(format_estimate(difference_at_best(against[name], measure), ".2f", signed=True)),
             samples_per_answer(name)] for label, name in names.items()]
    tuned = f"{policy}{BEST}"
    rows.append([element("strong", describe_policy(tuned, policies)), _score(policies[tuned], measure), "–", 1])
    words = (f"{MEASURES.get(measure, '')} On {metrics['prompts']:,} held-out {wording.questions}, with 95 % "
             f"intervals; differences are paired. Samples: how many one answer costs.")
    return join_html([table(["answers of", measure, f"{display_name(policy)} minus it", "samples"], rows),
                      element("p", words.strip(), class_="faint")])


def _score(policy: dict, measure: str) -> Html:
    return stack_interval(format_estimate(policy[measure], ".2f") if policy[measure]
                          else f"{mean_score(policy, measure):z.2f}")
