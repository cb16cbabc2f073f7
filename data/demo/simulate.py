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
    OFF_TOPICS,
    OPENINGS,
    PLACES,
    REMARKS,
    RUDENESS,
    TRUTH,
    Fact,
    Features,
    count_words,
    quality,
)

TWO_FACT_SHARE = 0.17
STYLE_SHARES = {"code": 0.4, "explanation": 0.4, "filler": 0.3, "rude": 0.15}
USERS = 400
NEUTRAL_QUALITY = 2.0  # half of the voters like an answer of this quality
UP_RATE, DOWN_RATE = 0.12, 0.02  # votes per view
EXPOSURE_SPREAD = 0.1  # log-normal; early answers are seen more often than late ones


@dataclass
class Answer:
    """An answer with its features and votes."""

    html: str
    features: Features
    user: int
    score: int  # net votes
    accepted: bool = False


@dataclass
class Question:
    """A question with the facts it asks for, and its answers."""

    facts: tuple[Fact, ...]
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
    skills = [rng.betavariate(1.8, 1.0) for _ in range(USERS)]  # a user's probability of stating a fact right
    return [_question(rng, facts, skills) for facts in asked]


def _question(rng: Random, facts: tuple[Fact, ...], skills: list[float]) -> Question:
    title, html = _asking(rng, facts)
    views = 20 + int(rng.lognormvariate(5.5, 1.0))
    count = rng.choices((3, 4, 5, 6), (2, 3, 3, 2))[0]
    user, *authors = rng.sample(range(USERS), count + 1)
    answers = [_answer(rng, facts, skills[author], author, views) for author in authors]
    if rng.random() < 0.6:
        max(answers, key=lambda answer: quality(answer.features) + rng.gauss(0, 0.5)).accepted = True
    return Question(facts, title, html, views, user, answers)


def _asking(rng: Random, facts: tuple[Fact, ...]) -> tuple[str, str]:
    """Draw title and HTML body, which ask for the same facts in different words."""
    title = _clauses(rng, facts)
    doing = rng.choice(DOINGS).format(tool=facts[0][0])
    closing = rng.choice(CLOSINGS) if len(facts) == 1 else ""  # two facts make a long question already
    sentences = [f"{doing} {rng.choice(PLACES)}.", _clauses(rng, facts), closing]
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


def _answer(rng: Random, facts: tuple[Fact, ...], skill: float, user: int, views: int) -> Answer:
    told = _told(rng, facts, skill)
    style = {name for name, share in STYLE_SHARES.items() if rng.random() < share}
    style -= set() if told else {"code", "explanation"}  # both need a stated value
    html = _body(rng, told, style, off_topic=facts[0] not in told)
    features = Features(
        correct=sum(told.get(fact) == [TRUTH[fact]] for fact in facts) / len(facts),
        code="code" in style and facts[0] in told,
        explanation="explanation" in style,
        filler="filler" in style,
        rude="rude" in style,
        off_topic=facts[0] not in told,
        words=count_words(re.sub(r"<[^>]+>", "", html)),
    )
    return Answer(html, features, user, _votes(rng, quality(features), views))


def _told(rng: Random, facts: tuple[Fact, ...], skill: float) -> dict[Fact, list[str]]:
    """Draw the values that an answer states for each of its facts: one, or two if it hedges."""
    kind = rng.choices(("plain", "hedging", "off-topic", "empty"), (86, 4, 7, 3))[0]
    if kind == "empty":
        return {}
    if kind == "off-topic":
        asked = {name for _, name in facts}
        fact = rng.choice([fact for fact in TRUTH if fact[1] not in asked])
        return {fact: [TRUTH[fact]]}
    if kind == "hedging":
        return {fact: rng.sample([TRUTH[fact], _wrong(rng, fact)], 2) for fact in facts}
    return {fact: [TRUTH[fact] if rng.random() < skill else _wrong(rng, fact)] for fact in facts}


def _wrong(rng: Random, fact: Fact) -> str:
    """Draw a value that is right for another tool: only knowledge of the tool reveals that it is wrong."""
    return rng.choice([value for value in ATTRIBUTES[fact[1]].values if value != TRUTH[fact]])


def _body(rng: Random, told: dict[Fact, list[str]], style: set[str], off_topic: bool) -> str:
    """Build the HTML: opening, statements and explanations, code block, filler; rudeness at a random position."""
    sentences = [rng.choice(OFF_TOPICS if off_topic else OPENINGS)]
    sentences += [_statement(rng, fact, values, len(told) > 1 or off_topic) for fact, values in told.items()]
    if not told:
        sentences.append(rng.choice(REMARKS))
    if "explanation" in style:
        explained = rng.sample(list(told), rng.randint(1, len(told)))
        sentences += [_explanation(rng, name) for _, name in explained]
    closing = rng.sample(FILLERS, rng.randint(1, 3 if len(told) == 1 else 2)) if "filler" in style else []
    if "rude" in style:
        part = rng.choice((sentences, closing))
        part.insert(rng.choice((0, len(part))), rng.choice(RUDENESS))
    blocks = [_paragraph(sentences)]
    if "code" in style:
        blocks.append(f"<pre><code>{''.join(_example(rng, fact, told[fact][0]) for fact in told)}</code></pre>\n")
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
