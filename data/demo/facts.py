"""Define the demo site's facts, phrases and the quality of an answer; used by the generator and by `gold.py`."""

import re
from itertools import combinations, product
from typing import NamedTuple


def _pool(words: str, form: str = "{}") -> tuple[str, ...]:
    return tuple(form.format(word) for word in words.split())


TOOLS = _pool("harbor finch maple pixel cobalt otter lantern quartz falcon saffron breeze nimbus")


class Attribute(NamedTuple):
    """An attribute of the tools; the i-th value is right for the i-th tool only."""

    noun: str
    values: tuple[str, ...]
    asks: tuple[str, ...]  # question clauses; {tool} is a tool or "it"
    statements: tuple[str, ...]  # sentences that name the tool
    short_statements: tuple[str, ...]  # sentences that leave the tool to the question
    reasons: tuple[str, ...]  # follow an explanation's marker
    examples: tuple[str, ...]  # lines of a code block


ATTRIBUTES = {
    "dry-run": Attribute(
        "dry run flag",
        _pool("simulate preview rehearse pretend plan noop trial mock sketch ghost draft peek", "--{}"),
        (
            "which flag makes a dry run in {tool}",
            "how do I do a dry run with {tool}",
            "what is the dry run flag of {tool}",
            "which option lets {tool} show its steps without doing them",
            "how can I see what {tool} would do before anything is changed",
        ),
        ("In {tool}, the dry run flag is {value}.", "Call {tool} with {value} for a dry run."),
        ("Use the {value} flag.", "Pass {value} to get a dry run.", "The dry run flag is {value}."),
        (
            "the steps are only printed and nothing is written",
            "the flag stops the work before the first write",
            "every step is checked but none of them is done",
        ),
        ("{tool} run {value}", "{tool} deploy {value} site", "{tool} copy {value} old new"),
    ),
    "port": Attribute(
        "default port",
        _pool("4471 5120 6033 7208 8144 9017 3309 2756 5894 6621 7745 8932"),
        (
            "which port does {tool} listen on",
            "what is the default port of {tool}",
            "which port do I have to open for {tool}",
            "on which port can I reach {tool}",
            "what port number does {tool} use",
        ),
        ("In {tool}, the default port is {value}.", "By default {tool} listens on {value}."),
        ("It listens on port {value}.", "The default port is {value}.", "You have to open {value}."),
        (
            "the server binds that port when it starts",
            "the number is fixed when the program is built",
            "the client and the server both expect this number",
        ),
        ("curl localhost:{value}", "{tool} connect localhost:{value}", "open http://localhost:{value}"),
    ),
    "settings": Attribute(
        "settings file",
        _pool("amber birch cedar delta ember fjord grove hazel iris juniper kelp lotus", "{}.conf"),
        (
            "which file holds the settings of {tool}",
            "where does {tool} keep its settings",
            "what is the settings file of {tool}",
            "which file do I edit to change the settings of {tool}",
            "from which file does {tool} read its settings",
        ),
        ("In {tool}, the settings file is {value}.", "The settings of {tool} are in {value}."),
        ("Edit the file {value}.", "The settings are in {value}.", "It reads them from {value}."),
        (
            "the file is read once when the program starts",
            "the program looks for this name in your home folder",
            "the last line of the file wins over the first",
        ),
        ("cat {value}", "nano {value}", "{tool} check {value}"),
    ),
    "cache": Attribute(
        "cache command",
        _pool("purge sweep rinse wipe flush scrub prune drain cleanse reset tidy shed"),
        (
            "which command clears the cache of {tool}",
            "how do I clear the cache in {tool}",
            "what is the cache command of {tool}",
            "how can I empty the cache that {tool} keeps",
            "which command makes {tool} forget its cache",
        ),
        ("In {tool}, the cache command is {value}.", "The {value} command clears the cache of {tool}."),
        ("Run the {value} command.", "The cache command is {value}.", "You clear it with {value}."),
        (
            "the command removes the old files from the cache folder",
            "the index is built again at the next start",
            "old entries stay on the disk until you remove them",
        ),
        ("{tool} {value}", "{tool} {value} all", "{tool} {value} cache"),
    ),
}

Fact = tuple[str, str]  # (tool, attribute)
TRUTH: dict[Fact, str] = {
    (tool, name): value
    for name, attribute in ATTRIBUTES.items()
    for tool, value in zip(TOOLS, attribute.values, strict=True)
}
# Every third fact has a wrong value that most authors repeat. The value is right for another tool.
POPULAR_MISTAKES: dict[Fact, str] = {
    (tool, name): ATTRIBUTES[name].values[(TOOLS.index(tool) + 5) % len(TOOLS)]
    for number, (tool, name) in enumerate(TRUTH)
    if number % 3 == 0
}
FACT_PAIRS: tuple[tuple[Fact, Fact], ...] = tuple(
    ((tool_a, a), (tool_b, b)) for a, b in combinations(ATTRIBUTES, 2) for tool_a, tool_b in product(TOOLS, TOOLS)
)

DOINGS = (
    "I am setting up {tool}",
    "I have just installed {tool}",
    "I want to use {tool}",
    "We are moving our work to {tool}",
    "I am learning {tool}",
    "My team runs {tool}",
    "I was told to try {tool}",
    "I am writing a script around {tool}",
)
PLACES = (
    "on a small server",
    "on my laptop",
    "at work",
    "for a school project",
    "inside a container",
    "on a new machine",
    "for a nightly job",
    "on an old desktop",
)
CLOSINGS = (
    "The manual does not say.",
    "I could not find it in the help text.",
    "I have searched for an hour.",
    "I am new to this.",
    "Any help is welcome.",
    "",
)
# The traits that a question wants of its answer, and the sentences that ask for them.
WISHES: dict[frozenset[str], tuple[str, ...]] = {
    frozenset({"code"}): (
        "Which command do I type?",
        "What do I type in the shell?",
        "Please show the command.",
        "An example to copy would help.",
    ),
    frozenset({"explanation"}): (
        "Why is it so?",
        "What is the reason?",
        "Please explain why.",
        "I want to understand why.",
    ),
    frozenset({"code", "explanation"}): (
        "Which command do I type, and why?",
        "What do I type, and for what reason?",
        "Please show the command and explain why.",
        "An example would help, and the reason for it.",
    ),
}
JOINS = ("{first}, and {second}?", "{first}? Also, {second}?", "{first}? And {second}?")

OPENINGS = ("Sure.", "I use this every day.", "This one is easy.", "From the manual:", "I just checked it.", "", "", "")
EXPLANATIONS = (
    "That is because {reason}.",
    "The reason is that {reason}.",
    "It works this way since {reason}.",
    "Behind the scenes, {reason}.",
)
EXPLAINS = re.compile(r"\b(?:because|the reason is that|since|behind the scenes,)(?: [\w'-]+){4}")
HEDGES = ("The {noun} is {value} or {other}.", "For the {noun}, try {value} or maybe {other}.")
FILLERS = (
    "Hope this helps, and good luck with it.",
    "Great question, many people ask it.",
    "I had the same question some time ago.",
    "Let me know how it goes for you.",
    "Thanks for asking this here.",
    "There are many ways to look at it.",
    "As always, it is what it is.",
    "Have a nice day, all of you.",
)
RUDENESS = (
    "Only a lazy person asks this.",
    "Read the manual before you waste our time.",
    "This is a stupid question.",
    "Are you really that clueless?",
    "Learn to search, this is embarrassing.",
)
REMARKS = ("I gave up on it and use paper now.", "You should buy a new machine first.", "I like the logo a lot.")


class Features(NamedTuple):
    """Features of an answer, given its question."""

    correct: float  # share of the asked facts stated right, 0..1
    contested_correct: float | None  # the same over asked facts with a popular mistake; None if there is none
    mistaken: float  # share of the asked facts stated as the popular mistake, 0..1
    wanted: float  # share of the wanted traits (code, explanation) that the answer has, 0..1
    complete: bool  # it has all wanted traits
    unwanted: int  # number of its traits that the question does not want
    code: bool  # a code block uses a value of an asked attribute
    explanation: bool
    filler: bool
    rude: bool
    off_topic: bool  # no value of any asked attribute is stated
    words: int


def describe(
    facts: set[Fact], wish: frozenset[str], stated: dict[Fact, set[str]], traits: set[str], words: int
) -> Features:
    """Compute the features of an answer.

    Args:
        facts: the facts that the question asks for.
        wish: the traits that the question wants, 'code' or 'explanation' or both.
        stated: values that the answer states for each asked fact. A second value makes the answer a guess.
        traits: traits of the answer: 'code', 'explanation', 'filler', 'rude'.
    """
    right = {fact: stated[fact] == {TRUTH[fact]} for fact in facts}
    contested = [right[fact] for fact in facts if fact in POPULAR_MISTAKES]
    given = traits & {"code", "explanation"}
    return Features(
        correct=sum(right.values()) / len(facts),
        contested_correct=sum(contested) / len(contested) if contested else None,
        mistaken=sum(stated[fact] == {POPULAR_MISTAKES.get(fact)} for fact in facts) / len(facts),
        wanted=len(given & wish) / len(wish),
        complete=given >= wish,
        unwanted=len(given - wish),
        code="code" in traits,
        explanation="explanation" in traits,
        filler="filler" in traits,
        rude="rude" in traits,
        off_topic=not any(stated.values()),
        words=words,
    )


def quality(features: Features) -> float:
    """Compute the quality of an answer, at most 6. Votes follow it with noise, and it is the gold score.

    Each trait counts once, however often it is repeated, and each word beyond 70 costs 0.02,
    so rambling does not pay.
    """
    return (
        3.0 * features.correct
        + 3.0 * features.wanted
        - 2.0 * features.unwanted
        - 0.6 * features.filler
        - 1.0 * features.rude
        - 1.0 * features.off_topic
        - 0.02 * max(0, features.words - 70)
    )


def count_words(text: str) -> int:
    """Count the words of a text without its markup: Markdown, or HTML whose tags were removed."""
    return len(re.findall(r"[A-Za-z0-9][\w.'-]*", text))
