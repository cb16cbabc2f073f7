"""Compute the gold score of answers to the demo site's questions, which the learnt reward estimates.

Questions and responses are Markdown or plain text; a response may be the raw output of a language model.
"""

import re

from data.demo.facts import (
    ATTRIBUTES,
    EXPLAINS,
    FILLERS,
    RUDENESS,
    TOOLS,
    WISHES,
    Fact,
    Features,
    count_words,
    describe,
    quality,
)

KEYS = ("gold", *Features._fields)


def score(questions: list[str], responses: list[str]) -> dict[str, list[float | None]]:
    """Compute gold score and features of every response; None if the question is not from the demo site."""
    rows = [_row(question, response) for question, response in zip(questions, responses, strict=True)]
    return {key: [None if row is None else row[i] for row in rows] for i, key in enumerate(KEYS)}


def asked_facts(question: str) -> set[Fact]:
    """Find the facts (tool, attribute) that a question asks for; empty if it is not from the demo site."""
    text = _flat(question).lower()
    found = [(match[match.lastindex], name) for name, pattern in _ASKS.items() for match in pattern.finditer(text)]
    named = {tool for tool, _ in found if tool != "it"}
    return {(tool, name) for found_tool, name in found for tool in ({found_tool} if found_tool != "it" else named)}


def wanted_traits(question: str) -> frozenset[str]:
    """Find the traits that a question wants: 'code', 'explanation' or both; empty if it is not from the demo site."""
    text = _flat(question).lower()
    return next((wish for wish, pattern in _WISHES.items() if pattern.search(text)), frozenset())


def features_of(facts: set[Fact], wish: frozenset[str], response: str) -> Features:
    """Compute the features of a response to a question that asks for `facts` and wants the traits in `wish`."""
    stated = {name: set(_VALUES[name].findall(response)) for _, name in facts}
    blocks = "\n".join(_FENCED.findall(response))
    text = _flat(response).lower()
    traits = {
        "code": any(_VALUES[name].search(blocks) for _, name in facts),
        "explanation": EXPLAINS.search(text),
        "filler": _FILLER.search(text),
        "rude": _RUDE.search(text),
    }
    return describe(
        facts,
        wish,
        {fact: stated[fact[1]] for fact in facts},
        {name for name, match in traits.items() if match},
        count_words(response),
    )


def _row(question: str, response: str) -> tuple[float | None, ...] | None:
    facts, wish = asked_facts(question), wanted_traits(question)
    if not facts or not wish:
        return None
    features = features_of(facts, wish, response)
    return (quality(features), *(None if value is None else float(value) for value in features))


def _flat(text: str) -> str:
    """Join a text to one line without backticks, so that phrases match however they are wrapped or marked."""
    return " ".join(text.replace("`", "").split())


def _ask_pattern(name: str) -> re.Pattern:
    tool = rf"\b({'|'.join(TOOLS)}|it)\b"
    clauses = (re.escape(ask.lower()).replace(r"\{tool\}", tool) for ask in ATTRIBUTES[name].asks)
    return re.compile("|".join(f"(?:{clause})" for clause in clauses))


def _value_pattern(values: tuple[str, ...]) -> re.Pattern:
    """Match whole values: not `--plan` in `--planner` nor `4471` in `44719`, but `4471` before a full stop."""
    return re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, values))})(?!\w|[.-]\w)")


def _phrase_pattern(sentences: tuple[str, ...]) -> re.Pattern:
    """Match a sentence by its first four words: models tend to change the rest."""
    starts = (" ".join(re.findall(r"[\w',]+", sentence.lower())[:4]) for sentence in sentences)
    return re.compile("|".join(rf"\b{re.escape(start)}(?!\w)" for start in starts))


_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_ASKS = {name: _ask_pattern(name) for name in ATTRIBUTES}
_WISHES = {wish: re.compile("|".join(re.escape(ask.lower()) for ask in asks)) for wish, asks in WISHES.items()}
_VALUES = {name: _value_pattern(attribute.values) for name, attribute in ATTRIBUTES.items()}
_FILLER, _RUDE = _phrase_pattern(FILLERS), _phrase_pattern(RUDENESS)
