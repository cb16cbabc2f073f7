"""Answers side by side: each question with the answers of SFT, of the policies and of a person, as a sortable card.

Of a user's own prompts: with those of the base in SFT's place, and of no person.
"""

import re
from collections.abc import Sequence

from stages.evaluation.summary import BEST, display_name
from stages.evaluation.tasks.wording import SFT
from stages.render.html import Html, element, fold, join_html, link, sortable_text, table
from stages.render.markdown_html import render_markdown

TITLE_CHARACTERS = 90
LICENCES = "CC BY-SA"  # of every dump; an older evaluation does not say which of them


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
