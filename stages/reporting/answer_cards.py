"""Answers side by side: each question with the answers of SFT, of the policies and of a person, as a sortable card.

Of a user's own prompts: with those of the base in SFT's place, and of no person.
"""

from collections.abc import Sequence

from stages.evaluation.own_prompts.wording import SFT
from stages.evaluation.summary import BEST, display_name
from stages.render.html import Html, element, link, pre_text, sortable_text, table


def list_writers(policies: list[str], at_best: Sequence[str] = (), start: str = SFT) -> list[tuple[str, str]]:
    """List (label, name in samples.parquet) of all whose answers are shown; start: the model that the policies started
    from.
    """
    best = [(f"{display_name(name.removesuffix(BEST))} at best", name) for name in at_best]
    human = [("Best human", "human")] if start == SFT else []
    return [*((display_name(policy), policy) for policy in (start, *policies)), *best, *human]


def render_answer_cards(samples: list[dict], policies: list[str], at_best: Sequence[str] = (), start: str = SFT
                        ) -> Html:
    """Render a card a question: answers with their rewards and, where known, gold scores.

    at_best: columns of samples.parquet with a policy's answers at its best temperature.
    """
    writers = list_writers(policies, at_best, start)
    kinds = [kind for kind in ("reward", "gold") if any(f"{kind}_{start}" in row for row in samples)]
    gains = [(kind, policy) for policy in policies for kind in kinds]
    head = ["question", *(f"{label}: reward" for label, _ in writers),
            *(f"{kind}, {display_name(policy)} − {display_name(start)}" for kind, policy in gains)]
    rows = [[element("div", _attribution(row), pre_text(row["question"])),
             *(_answer(row, *writer) for writer in writers), *(_gain(row, *gain, start) for gain in gains)]
            for row in samples]
    return table(head, rows, class_="cards")


def _attribution(row: dict) -> Html:
    if not row["url"]:  # a user's own prompt
        return element("p", element("bdi", f"{row['site']}, prompt {row['qid']}"), class_="faint")
    asker, answerer = [*row["authors"], "", ""][:2]
    parts = [link(f"{row['site']}, question {row['qid']}", row["url"])]
    parts += [", asked by ", element("bdi", asker)] if asker else []
    parts += [", best answer by ", element("bdi", answerer)] if answerer else []
    return element("p", *parts, ". CC BY-SA.", class_="faint")


def _answer(row: dict, label: str, name: str) -> Html:
    scores = [("reward", row[f"reward_{name}"]), ("gold", row.get(f"gold_{name}"))]
    text = ", ".join(f"{kind} {value:.2f}" for kind, value in scores if value is not None)
    return element("div", element("b", label), _sortable(text, scores[0][1]), pre_text(row[name]), class_="answer")


def _gain(row: dict, kind: str, policy: str, start: str) -> Html:
    before, after = row.get(f"{kind}_{start}"), row.get(f"{kind}_{policy}")
    gain = None if before is None or after is None else after - before
    text = "" if gain is None else f"{kind}, {display_name(policy)} − {display_name(start)}: {gain:+z.2f}"
    return element("span", _sortable(text, gain), class_="faint")


def _sortable(text: str, value: float | None) -> Html:
    """Render text that is sorted by a number; by nothing where there is none."""
    return element("span", text) if value is None else sortable_text(text, value)
