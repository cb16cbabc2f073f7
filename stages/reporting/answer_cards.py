"""Questions with the answers to them: the first look at one before and after training, and sortable cards of many.

A card has the answers of SFT, of the policies and of a person. Of a user's own prompts: those of the base in SFT's
place, and of no person.
"""

import re
from collections.abc import Sequence

from stages.evaluation.summary import (
    BEST,
    cheaper_policies,
    describe_policy,
    difference_to,
    display_name,
    format_estimate,
    judged_by,
    judged_policies,
    mean_score,
    samples_per_answer,
    strongest_best_of_n,
)
from stages.evaluation.tasks.wording import SFT, find_wording, start_model
from stages.render.html import Html, element, fold, join_html, link, sortable_text, stack_interval, table
from stages.render.markdown_html import render_markdown
from stages.reporting.figures import Curves, FigureFolder

TITLE_CHARACTERS = 90
LICENCES = "CC BY-SA"  # of every dump; an older evaluation does not say which of them
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
    measure, wording = judged_by(metrics, policy), find_wording(policies)
    best_of_n = strongest_best_of_n(against)
    names = {describe_policy(name, policies): name for name in cheaper_policies(against)
             if samples_per_answer(name) == 1 or name == best_of_n}
    rows = [[label, _score(policies[name], measure),
             stack_interval(format_estimate(difference_to(metrics, policy, name), ".2f", signed=True)),
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


def list_writers(policies: list[str], at_best: Sequence[str] = (), start: str = SFT) -> list[tuple[str, str]]:
    """List (label, name in samples.parquet) of all whose answers are shown; start: the model that the policies started
    from.
    """
    best = [(f"{display_name(name.removesuffix(BEST))} at best", name) for name in at_best]
    human = [("Best human", "human")] if start == SFT else []
    return [*best, *((display_name(policy), policy) for policy in (start, *policies)), *human]


def render_answer_cards(samples: list[dict], policies: list[str], at_best: Sequence[str] = (), start: str = SFT,
                        opened: int = 0) -> Html:
    """Render a card a question: answers with their rewards and, where known, gold scores.

    Args:
        at_best: columns of samples.parquet with a policy's answers at its best temperature.
        opened: number of cards, from the first, that are open; a click opens another one.
    """
    writers = list_writers(policies, at_best, start)
    kinds = [kind for kind in ("reward", "gold") if any(f"{kind}_{start}" in row for row in samples)]
    gains = [(kind, policy) for policy in policies for kind in kinds]
    head = ["question", *(f"{label}: reward" for label, _ in writers),
            *(f"{kind}, {display_name(policy)} − {display_name(start)}" for kind, policy in gains)]
    rows = [[_render_card(row, writers, number < opened),
             *(_sort_key(row[f"reward_{name}"]) for _, name in writers),
             *(_sort_key(_gain(row, *gain, start)) for gain in gains)] for number, row in enumerate(samples)]
    return table(head, rows, class_="cards")


def render_answer(row: dict, label: str, name: str) -> Html:
    """Render an answer under its writer's name, reward and gold score."""
    scores = [("reward", row[f"reward_{name}"]), ("gold", row.get(f"gold_{name}"))]
    text = ", ".join(f"{kind} {value:.2f}" for kind, value in scores if value is not None)
    return element("div", element("p", element("b", label), " ", element("span", text, class_="faint")),
                   render_post(row[name]), class_="answer")


def render_post(text: str) -> Html:
    """Render the Markdown of a post or an answer, with its own direction of writing."""
    return element("div", render_markdown(text), class_="post", dir="auto")


def render_attribution(row: dict) -> Html:
    """Render where a question is from: a link, the authors of the question and of the best answer, the licences."""
    if not row["url"]:  # a user's own prompt
        return element("p", element("bdi", f"{row['site']}, prompt {row['qid']}"), class_="faint")
    parts: list[Html | str] = [link(f"{row['site']}, question {row['qid']}", row["url"])]
    profiles = row.get("author_urls") or [None, None]
    for words, author, profile in zip((", asked by ", ", best answer by "), row["authors"], profiles, strict=False):
        parts += [words, element("bdi", link(author, profile))] if author else []
    parts += [part for name in dict.fromkeys(row.get("licenses") or [LICENCES]) for part in (", ", _licence(name))]
    return element("p", *parts, ".", class_="faint")


def _licence(name: str) -> Html:
    version = re.fullmatch(r"CC BY-SA (\d\.\d)", name)
    return link(name, f"https://creativecommons.org/licenses/by-sa/{version[1]}/" if version else None)


def _render_card(row: dict, writers: list[tuple[str, str]], is_open: bool) -> Html:
    answers = [render_answer(row, *writer) for writer in writers]
    return fold(element("bdi", _title(row["question"])), render_attribution(row), render_post(row["question"]),
                element("div", *answers, class_="answers"), open_=is_open)


def _title(question: str) -> str:
    """Return the first words of a question, without marks of headings and emphasis."""
    words = re.sub(r"\s+", " ", re.sub(r"[#*`]+", "", question)).strip()
    return f"{words[:TITLE_CHARACTERS].rstrip()}…" if len(words) > TITLE_CHARACTERS else words or "(empty)"


def _gain(row: dict, kind: str, policy: str, start: str) -> float | None:
    before, after = row.get(f"{kind}_{start}"), row.get(f"{kind}_{policy}")
    return None if before is None or after is None else after - before


def _sort_key(value: float | None) -> Html:
    """Render what cards are sorted by, which is not shown: the card has it beside its answers."""
    return join_html([]) if value is None else sortable_text("", value)
