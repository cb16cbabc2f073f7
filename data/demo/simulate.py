"""Simulate the demo site: draw questions, answers, votes and acceptances from one random generator."""

import math
import re
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random

from data.demo.facts import (
    ATTRIBUTES,
    CLOSINGS,
    DOINGS,
    EXPLANATIONS,
    FACT_PAIRS,
    FILLERS,
    HEDGES,
    JOINS,
    OPENINGS,
    PLACES,
    POPULAR_MISTAKES,
    REMARKS,
    RUDENESS,
    TRUTH,
    WISHES,
    Fact,
    Features,
    count_words,
    describe,
    quality,
)

TWO_FACT_SHARE = 0.1
TRAIT_SHARES = {"code": 0.25, "explanation": 0.25, "filler": 0.3, "rude": 0.15}
WISH_SHARES = dict(zip(WISHES, (0.4, 0.4, 0.2), strict=True))
USERS = 400
SKILL = (8.0, 1.0)  # beta distribution of a user's probability of stating a fact right, mean 0.89
CONTESTED_RIGHT, CONTESTED_MISTAKEN = 0.15, 0.8  # of a user of mean skill, where a fact has a popular mistake
NEUTRAL_QUALITY = 1.5  # half of the voters like an answer of this quality
UP_RATE, DOWN_RATE = 0.12, 0.02  # votes per view
EXPOSURE_SPREAD = 0.1  # log-normal; early answers are seen more often than late ones


@dataclass
class Answer:
    """An answer with its features and votes."""

    html: str
    stated: dict[Fact, str]  # values; two are joined by " or "
    features: Features
    user: int
    score: int  # net votes
    accepted: bool = False


@dataclass
class Question:
    """A question with the facts it asks for, the traits it wants, and its answers."""

    facts: tuple[Fact, ...]
    wish: frozenset[str]  # traits that the answer should have
    title: str
    html: str
    views: int
    user: int
    answers: list[Answer]


def simulate(count: int, seed: int) -> list[Question]:
    """Simulate the site. Each two-fact combination occurs at most once, so a held-out one is not in training."""
    rng = Random(seed)
    pairs = rng.sample(FACT_PAIRS, min(round(TWO_FACT_SHARE * count), len(FACT_PAIRS)))
    # Cycling through the facts uses each equally often.
    singles = [(fact,) for fact in islice(cycle(TRUTH), count - len(pairs))]
    asked = singles + [tuple(rng.sample(pair, 2)) for pair in pairs]
    rng.shuffle(asked)
    skills = [rng.betavariate(*SKILL) for _ in range(USERS)]
    return [_question(rng, facts, skills) for facts in asked]


def _question(rng: Random, facts: tuple[Fact, ...], skills: list[float]) -> Question:
    wish = rng.choices(list(WISH_SHARES), list(WISH_SHARES.values()))[0]
    title, html = _asking(rng, facts, wish)
    views = 20 + int(rng.lognormvariate(5.5, 1.0))
    count = rng.choices((3, 4, 5, 6), (2, 3, 3, 2))[0]
    user, *authors = rng.sample(range(USERS), count + 1)
    answers = [_answer(rng, facts, wish, skills[author], author, views) for author in authors]
    if rng.random() < 0.6:
        max(answers, key=lambda answer: quality(answer.features) + rng.gauss(0, 0.5)).accepted = True
    return Question(facts, wish, title, html, views, user, answers)


def _asking(rng: Random, facts: tuple[Fact, ...], wish: frozenset[str]) -> tuple[str, str]:
    """Draw title and HTML body, which ask for the same facts and traits in different words."""
    title = f"{_clauses(rng, facts)} {rng.choice(WISHES[wish])}"
    doing = rng.choice(DOINGS).format(tool=facts[0][0])
    closing = rng.choice(CLOSINGS) if len(facts) == 1 else ""  # two facts make a long question already
    sentences = [f"{doing} {rng.choice(PLACES)}.", _clauses(rng, facts), rng.choice(WISHES[wish]), closing]
    body = " ".join(filter(None, sentences))
    if rng.random() < 0.3:
        body = re.sub(rf"\b({facts[-1][0]})\b", r"<code>\1</code>", body)
    return title, f"<p>{body}</p>\n"


def _clauses(rng: Random, facts: tuple[Fact, ...]) -> str:
    """Ask for the facts in one question; a second one about the same tool may call it "it"."""
    tools = [tool for tool, _ in facts]
    if len(set(tools)) < len(tools) and rng.random() < 0.5:
        tools[1] = "it"
    clauses = [
        rng.choice(ATTRIBUTES[name].asks).format(tool=tool) for tool, (_, name) in zip(tools, facts, strict=True)
    ]
    text = f"{clauses[0]}?" if len(clauses) == 1 else rng.choice(JOINS).format(first=clauses[0], second=clauses[1])
    return re.sub(r"(^|\? )(\w)", lambda match: match[1] + match[2].upper(), text)


def _answer(rng: Random, facts: tuple[Fact, ...], wish: frozenset[str], skill: float, user: int, views: int) -> Answer:
    stated = _stated(rng, facts, skill)
    traits = {name for name, share in TRAIT_SHARES.items() if rng.random() < share}
    traits -= set() if stated else {"code", "explanation"}  # both need a stated value
    off_topic = facts[0] not in stated
    html = _body(rng, stated, traits, off_topic)
    features = describe(
        set(facts),
        wish,
        {fact: set(stated.get(fact, ())) for fact in facts},
        traits - ({"code"} if off_topic else set()),  # its code block is about something else
        count_words(re.sub(r"<[^>]+>", "", html)),
    )
    values = {fact: " or ".join(values) for fact, values in stated.items()}
    return Answer(html, values, features, user, _votes(rng, quality(features), views))


def _stated(rng: Random, facts: tuple[Fact, ...], skill: float) -> dict[Fact, list[str]]:
    """Draw the values that an answer states for each of its facts: one, or two if it hedges."""
    kind = rng.choices(("plain", "hedging", "off-topic", "empty"), (91, 4, 4, 1))[0]
    if kind == "empty":
        return {}
    if kind == "off-topic":
        asked = {name for _, name in facts}
        fact = rng.choice([fact for fact in TRUTH if fact[1] not in asked])
        return {fact: [TRUTH[fact]]}
    if kind == "hedging":
        return {fact: rng.sample([TRUTH[fact], _wrong(rng, fact)], 2) for fact in facts}
    return {fact: [_value(rng, fact, skill)] for fact in facts}


def _value(rng: Random, fact: Fact, skill: float) -> str:
    """Draw the value that a user believes: right, the popular mistake if the fact has one, or another wrong one."""
    right, mistaken = skill, 0.0
    if fact in POPULAR_MISTAKES:
        right, mistaken = CONTESTED_RIGHT * skill * sum(SKILL) / SKILL[0], CONTESTED_MISTAKEN
    drawn = rng.random()
    if drawn < right:
        return TRUTH[fact]
    return POPULAR_MISTAKES[fact] if drawn < right + mistaken else _wrong(rng, fact)


def _wrong(rng: Random, fact: Fact) -> str:
    """Draw a value that is right for another tool: only knowledge of the tool reveals that it is wrong."""
    taken = (TRUTH[fact], POPULAR_MISTAKES.get(fact))
    return rng.choice([value for value in ATTRIBUTES[fact[1]].values if value not in taken])


def _body(rng: Random, stated: dict[Fact, list[str]], traits: set[str], off_topic: bool) -> str:
    """Build the HTML: opening, statements and explanations, code block, filler; rudeness at a random position."""
    sentences = [rng.choice(OPENINGS)]
    sentences += [_statement(rng, fact, values, len(stated) > 1 or off_topic) for fact, values in stated.items()]
    if not stated:
        sentences.append(rng.choice(REMARKS))
    if "explanation" in traits:
        explained = rng.sample(list(stated), rng.randint(1, len(stated)))
        sentences += [_explanation(rng, name) for _, name in explained]
    closing = rng.sample(FILLERS, rng.randint(1, 3 if len(stated) == 1 else 2)) if "filler" in traits else []
    if "rude" in traits:
        part = rng.choice((sentences, closing))
        part.insert(rng.choice((0, len(part))), rng.choice(RUDENESS))
    blocks = [_paragraph(sentences)]
    if "code" in traits:
        blocks.append(f"<pre><code>{''.join(_example(rng, fact, stated[fact][0]) for fact in stated)}</code></pre>\n")
    if closing:
        blocks.append(_paragraph(closing))
    return "\n".join(blocks)


def _paragraph(sentences: list[str]) -> str:
    return f"<p>{' '.join(filter(None, sentences))}</p>\n"


def _statement(rng: Random, fact: Fact, values: list[str], name_tool: bool) -> str:
    """State right and wrong values in the same words, so that the wording reveals nothing."""
    tool, name = fact
    attribute = ATTRIBUTES[name]
    marked = [f"<code>{value}</code>" for value in values]
    if len(marked) > 1:
        return rng.choice(HEDGES).format(noun=attribute.noun, value=marked[0], other=marked[1])
    templates = attribute.statements if name_tool else attribute.statements + attribute.short_statements
    return rng.choice(templates).format(tool=tool, value=marked[0])


def _explanation(rng: Random, name: str) -> str:
    return rng.choice(EXPLANATIONS).format(reason=rng.choice(ATTRIBUTES[name].reasons))


def _example(rng: Random, fact: Fact, value: str) -> str:
    tool, name = fact
    return rng.choice(ATTRIBUTES[name].examples).format(tool=tool, value=value) + "\n"


def _votes(rng: Random, worth: float, views: int) -> int:
    """Draw up minus down votes. Few views lead to a vote; quality decides which."""
    liking = 1 / (1 + math.exp(NEUTRAL_QUALITY - worth))
    exposure = views * rng.lognormvariate(0, EXPOSURE_SPREAD)
    return _poisson_like(rng, UP_RATE * exposure * liking) - _poisson_like(rng, DOWN_RATE * exposure * (1 - liking))


def _poisson_like(rng: Random, mean: float) -> int:
    """Draw a count with the mean and variance of a Poisson variable, from one normal draw."""
    return max(0, round(rng.gauss(mean, math.sqrt(mean))))
