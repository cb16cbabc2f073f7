"""What the page shows, as HTML: answers with their numbers, the legend, the tally. All foreign text is escaped."""

from math import exp

from stages.chat.streaming import Answer
from stages.chat.token_text import Piece
from stages.chat.votes import Written
from stages.evaluation.statistics import wilson_interval
from stages.render.html import Html, element, join_html

FULL_NATS = 1.0  # log-ratio from which on a piece has its full colour
FULL_PERCENT, LEAST_PERCENT = 60, 4  # of that colour: text on it stays readable; what would be fainter has none


def heading(title: str) -> Html:
    """What stands first."""
    return join_html([element("h1", title, class_="lead"),
                   element("p", "Runs on this machine alone; no question and no answer leaves it.", class_="lead")])


def answer(found: Answer, reference: str, stopped: bool = False) -> Html:
    """One panel: text, coloured by log-ratio, over its numbers."""
    if not found.tokens and not found.done:
        text = element("p", _waiting(found, stopped), class_="waiting")
    else:
        caret = None if found.done or stopped else element("span", class_="caret", aria_hidden="true")
        body = [_piece(piece, reference) for piece in found.pieces.done]
        text = _text(*body, *([caret] if caret else []), *([_end(found)] if found.done else []))
    return join_html([text, _numbers(found, reference, stopped)])


def waiting(words: str) -> Html:
    """A panel in which nothing is yet."""
    return element("p", words, class_="waiting")


def plain(text: str) -> Html:
    """An answer of nobody: its text and nothing that could tell whose it is."""
    return _text(text) if text.strip() else element("p", "(an empty answer)", class_="waiting")


def notice(words: str) -> Html:
    """One sentence that a person should read; nothing for no words."""
    return element("p", words, class_="notice", role="status") if words else Html("")


def human(row: dict | None) -> Html:
    """The best human answer of a row of the pairs table."""
    if row is None:
        return waiting("None is known: this is not one of the held-out questions.")
    return join_html([_text(row["response_j"]), element("p", f"Score {row['score_j']}", class_="by")])


def legend(reference: str) -> Html:
    """What the colours mean."""
    return element(
        "div", element("span", f"less likely than under {reference}"),
        element("span", class_="bar", role="img",
                aria_label=f"from orange, {FULL_NATS:g} nat less, to blue, {FULL_NATS:g} nat more"),
        element("span", f"more likely than under {reference}"),
        element("span", f"Full colour from {FULL_NATS:g} nat (a factor of {exp(FULL_NATS):.1f}) on; point at a word to "
                f"see its number.", class_="hint"),
        class_="legend")


def revealed(written: Written, verdict: str) -> Html:
    """Whose answer it was, after the vote."""
    reward = "" if written.reward is None else f", reward {_signed(written.reward)}"
    return element("p", element("strong", written.policy), f"{reward}: {verdict}", class_="revealed")


def tally(one: str, other: str, values: list[float], questions: int) -> Html:
    """How often the first policy's answer was chosen so far. values: 1, 1/2 for a tie, or 0 for each vote."""
    if not values:
        return element("p", f"No vote yet between {one} and {other}.", class_="tally")
    share, ties = sum(values) / len(values), values.count(0.5)
    low, high = wilson_interval(share, questions)
    tied = f"{_count(ties, 'tie')}, counted half" if ties else "no ties"
    return element("p", f"{one} preferred to {other}: ", element("strong", f"{share:.2f} [{low:.2f}, {high:.2f}]"),
                   f" ({_count(len(values), 'vote')} on {_count(questions, 'question')}; "
                   f"{tied}; interval at 95 %).", class_="tally")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _text(*parts: object) -> Html:
    return element("div", *parts, class_="answer", dir="auto")


def _piece(piece: Piece, reference: str) -> Html:
    percent = round(min(abs(piece.log_ratio) / FULL_NATS, 1) * FULL_PERCENT)
    if percent < LEAST_PERCENT:
        return join_html([piece.text])
    return element("span", piece.text, class_="more" if piece.log_ratio > 0 else "less", style=f"--w:{percent}%",
                   title=f"{_signed(piece.log_ratio)} nats to {reference}")


def _end(found: Answer) -> Html:
    if found.ended:
        return element("span", "■", class_="end", title="ended by itself")
    return element("span", " … cut off", class_="end", title="it reached the longest length set")


def _waiting(found: Answer, stopped: bool) -> str:
    if found.samples == 1 or not found.drawn:
        return "Stopped." if stopped else "Writing…"
    return (f"{found.finished} of {found.samples} answers are written{', then stopped' if stopped else '…'}")


def _numbers(found: Answer, reference: str, stopped: bool) -> Html:
    reward = _signed(found.reward) if found.reward is not None else "–" if stopped else "…"
    rate = f"{found.drawn / found.seconds:,.0f}" if found.seconds else "…"
    rows = [("reward", reward, "of the reward model; 0 is the mean of good human answers"),
            (f"KL to {reference}, nats", _kl(found, reference), _about_kl(found)),
            ("tokens", f"{len(found.tokens) or found.drawn:,}", "in the answer, its end included"),
            ("tokens a second", rate, "while this panel was drawing, the others waiting")]
    boxes = [element("div", element("dt", name), element("dd", value), title=about) for name, value, about in rows]
    return join_html([element("dl", *boxes, class_="numbers"), _samples(found)])


def _samples(found: Answer) -> Html:
    if not found.rewards:
        return Html("")
    words = ", ".join(map(_signed, found.rewards))
    return element("p", f"Rewards of all {found.samples}: {words}", class_="by")


def _kl(found: Answer, reference: str) -> str:
    if found.kl_bound is not None:
        return f"≤ {found.kl:.2f}"
    if found.speaker == reference:
        return "0"
    return _signed(found.kl) if found.tokens else "…"


def _about_kl(found: Answer) -> str:
    if found.kl_bound is not None:
        return "of best-of-n, log n - (n-1)/n at most; its tokens are SFT's own and have no colour"
    return "sum of the log-ratios of this one answer: an estimate that can be below 0"


def _signed(number: float) -> str:
    return f"{number:+.2f}".replace("-", "−")
