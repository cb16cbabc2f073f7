"""Render the demo page's content as HTML: answers with their metrics, legend, notices, tally. All text is escaped."""

from math import exp

from stages.chat.streaming import Answer
from stages.chat.token_text import TextPiece
from stages.chat.votes import VotedAnswer
from stages.evaluation.statistics import wilson_interval
from stages.render.html import Html, element, join_html

FULL_COLOUR_NATS = 1.0  # log-ratio at which a piece has its full colour
# Share of the colour in the background: text stays readable at MAX, and nothing is visible below MIN.
MAX_COLOUR_PERCENT, MIN_COLOUR_PERCENT = 60, 4


def render_heading(title: str) -> Html:
    return join_html([
        element("h1", title, class_="lead"),
        element("p", "Runs on this machine alone; no question and no answer leaves it.", class_="lead")])


def render_answer(answer: Answer, reference: str, stopped: bool = False) -> Html:
    """Render one panel: the text, coloured by log-ratio, above its metrics."""
    if not answer.tokens and not answer.done:
        text = render_waiting(_waiting_message(answer, stopped))
    else:
        parts = [_render_piece(piece, reference) for piece in answer.decoder.pieces]
        if answer.done:
            parts.append(_render_end(answer))
        elif not stopped:
            parts.append(element("span", class_="caret", aria_hidden="true"))
        text = _render_text(*parts)
    return join_html([text, _render_metrics(answer, reference, stopped)])


def render_waiting(message: str) -> Html:
    """Render a panel without an answer."""
    return element("p", message, class_="waiting")


def render_blind_answer(text: str) -> Html:
    """Render the text of an answer, without anything that could reveal the policy."""
    return _render_text(text) if text.strip() else render_waiting("(an empty answer)")


def render_notice(message: str) -> Html:
    """Render a one-sentence notice; nothing for an empty message."""
    return element("p", message, class_="notice", role="status") if message else Html("")


def render_human_answer(row: dict | None) -> Html:
    """Render the best human answer in a row of the pairs table."""
    if row is None:
        return render_waiting("None is known: this is not one of the held-out questions.")
    return join_html([_render_text(row["response_j"]), element("p", f"Score {row['score_j']}", class_="by")])


def render_legend(reference: str) -> Html:
    """Explain the colours."""
    nats = f"{FULL_COLOUR_NATS:g} nat"
    return element(
        "div", element("span", f"less likely than under {reference}"),
        element("span", class_="bar", role="img", aria_label=f"from orange, {nats} less, to blue, {nats} more"),
        element("span", f"more likely than under {reference}"),
        element("span", f"Full colour from {nats} (a factor of {exp(FULL_COLOUR_NATS):.1f}) on; point at a word to "
                f"see its number.", class_="hint"),
        class_="legend")


def render_verdict(answer: VotedAnswer, verdict: str) -> Html:
    """Reveal an answer's policy after the vote."""
    reward = "" if answer.reward is None else f", reward {_format_signed(answer.reward)}"
    return element("p", element("strong", answer.policy), f"{reward}: {verdict}", class_="revealed")


def render_tally(one: str, other: str, values: list[float], questions: int) -> Html:
    """Render how often the first policy was preferred; values: 1, 0.5 for a tie, or 0 per vote."""
    if not values:
        return element("p", f"No vote yet between {one} and {other}.", class_="tally")
    share, ties = sum(values) / len(values), values.count(0.5)
    low, high = wilson_interval(share, questions)
    ties_text = f"{_format_count(ties, 'tie')}, counted half" if ties else "no ties"
    return element("p", f"{one} preferred to {other}: ", element("strong", f"{share:.2f} [{low:.2f}, {high:.2f}]"),
                   f" ({_format_count(len(values), 'vote')} on {_format_count(questions, 'question')}; "
                   f"{ties_text}; interval at 95 %).", class_="tally")


def _render_text(*parts: object) -> Html:
    return element("div", *parts, class_="answer", dir="auto")


def _render_piece(piece: TextPiece, reference: str) -> Html:
    percent = round(min(abs(piece.log_ratio) / FULL_COLOUR_NATS, 1) * MAX_COLOUR_PERCENT)
    if percent < MIN_COLOUR_PERCENT:
        return join_html([piece.text])
    return element("span", piece.text, class_="more" if piece.log_ratio > 0 else "less", style=f"--w:{percent}%",
                   title=f"{_format_signed(piece.log_ratio)} nats to {reference}")


def _render_end(answer: Answer) -> Html:
    if answer.ended:
        return element("span", "■", class_="end", title="ended by itself")
    return element("span", " … cut off", class_="end", title="it reached the longest length set")


def _waiting_message(answer: Answer, stopped: bool) -> str:
    if answer.samples == 1 or not answer.sampled_tokens:
        return "Stopped." if stopped else "Writing…"
    end = ", then stopped" if stopped else "…"
    return f"{answer.finished_samples} of {answer.samples} answers are written{end}"


def _render_metrics(answer: Answer, reference: str, stopped: bool) -> Html:
    reward = _format_signed(answer.reward) if answer.reward is not None else "–" if stopped else "…"
    rate = f"{answer.sampled_tokens / answer.seconds:,.0f}" if answer.seconds else "…"
    rows = [("reward", reward, "of the reward model; 0 is the mean of good human answers"),
            (f"KL to {reference}, nats", _format_kl(answer, reference), _explain_kl(answer)),
            ("tokens", f"{len(answer.tokens) or answer.sampled_tokens:,}", "in the answer, its end included"),
            ("tokens a second", rate, "while this panel was drawing, the others waiting")]
    boxes = [element("div", element("dt", name), element("dd", value), title=title) for name, value, title in rows]
    return join_html([element("dl", *boxes, class_="numbers"), _render_rewards(answer)])


def _render_rewards(answer: Answer) -> Html:
    if not answer.rewards:
        return Html("")
    rewards = ", ".join(map(_format_signed, answer.rewards))
    return element("p", f"Rewards of all {answer.samples}: {rewards}", class_="by")


def _format_kl(answer: Answer, reference: str) -> str:
    if answer.kl_bound is not None:
        return f"≤ {answer.kl:.2f}"
    if answer.policy == reference:
        return "0"
    return _format_signed(answer.kl) if answer.tokens else "…"


def _explain_kl(answer: Answer) -> str:
    if answer.kl_bound is not None:
        return "of best-of-n, log n - (n-1)/n at most; its tokens are SFT's own and have no colour"
    return "sum of the log-ratios of this one answer: an estimate that can be below 0"


def _format_signed(number: float) -> str:
    return f"{number:+.2f}".replace("-", "−")


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
