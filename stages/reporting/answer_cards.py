"""Answers side by side: a question with those of SFT, of PPO and of a person, as rows that sort and filter."""

from stages.render.html import Html, element, link, pre_text, sortable_text, table

WRITERS = (("SFT", "sft"), ("PPO", "ppo"), ("Best human", "human"))


def side_by_side(samples: list[dict]) -> Html:
    """A row a question, laid out as a card: answers with their rewards and, where known, gold scores."""
    kinds = [kind for kind in ("reward", "gold") if any(f"{kind}_ppo" in row for row in samples)]
    head = ["question", *(f"{label}: {kinds[0]}" for label, _ in WRITERS), *(f"{kind}, PPO − SFT" for kind in kinds)]
    rows = [[element("div", _asked(row), pre_text(row["question"])),
             *(_answer(row, label, name) for label, name in WRITERS), *(_gain(row, kind) for kind in kinds)]
            for row in samples]
    return table(head, rows, class_="cards")


def _asked(row: dict) -> Html:
    asker, answerer = [*row["authors"], "", ""][:2]
    parts = [link(f"{row['site']}, question {row['qid']}", row["url"])]
    parts += [", asked by ", element("bdi", asker)] if asker else []
    parts += [", best answer by ", element("bdi", answerer)] if answerer else []
    return element("p", *parts, ". CC BY-SA.", class_="faint")


def _answer(row: dict, label: str, name: str) -> Html:
    numbers = [("reward", row[f"reward_{name}"]), ("gold", row.get(f"gold_{name}"))]
    said = ", ".join(f"{word} {value:.2f}" for word, value in numbers if value is not None)
    return element("div", element("b", label), _number(said, numbers[0][1]), pre_text(row[name]))


def _gain(row: dict, kind: str) -> Html:
    before, after = row.get(f"{kind}_sft"), row.get(f"{kind}_ppo")
    gain = None if before is None or after is None else after - before
    said = "" if gain is None else f"{kind}, PPO − SFT: {gain:+z.2f}"
    return element("span", _number(said, gain), class_="faint")


def _number(said: str, value: float | None) -> Html:
    """Words that are sorted by a number, and by nothing where there is none."""
    return element("span", said) if value is None else sortable_text(said, value)
