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
    "A short example would be nice.",
    "I am new to this.",
    "I need it for a script.",
    "Any help is welcome.",
    "",
)
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
OFF_TOPICS = ("Not what you asked, but note this.", "I cannot say, but I know something else.", "On another note:")
REMARKS = ("I gave up on it and use paper now.", "You should buy a new machine first.", "I like the logo a lot.")


class Features(NamedTuple):
    """Features of an answer, given its question."""

    correct: float  # share of the asked facts stated right, 0..1
    code: bool  # a code block uses a value of an asked attribute
    explanation: bool
    filler: bool
    rude: bool
    off_topic: bool  # no value of any asked attribute is stated
    words: int


def quality(features: Features) -> float:
    """Compute the quality of an answer, -3 to 4.4. Votes follow it with noise, and it is the gold score.

    Correctness outweighs all other gains together. Each style counts once, however often it is repeated, and each word
    beyond 70 costs 0.02, so rambling does not pay.
    """
    return (
        3.0 * features.correct
        + 0.7 * features.code
        + 0.7 * features.explanation
        - 0.7 * features.filler
        - 1.2 * features.rude
        - 1.0 * features.off_topic
        - 0.02 * max(0, features.words - 70)
    )


def count_words(text: str) -> int:
    """Count the words of a text without its markup: Markdown, or HTML whose tags were removed."""
    return len(re.findall(r"[A-Za-z0-9][\w.'-]*", text))
