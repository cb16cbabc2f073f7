"""Render the demo page's content as HTML: answers with their metrics, legend, notices, tally. All text is escaped."""

from math import exp

from stages.chat.model_background import SCRATCH, SUBJECTS, ModelBackground
from stages.chat.streaming import Answer
from stages.chat.token_text import TextPiece
from stages.chat.votes import VotedAnswer
from stages.evaluation.statistics import wilson_interval
from stages.render.html import Html, element, join_html
from stages.render.markdown_html import render_markdown

EMPTY = Html("")
MAX_SITES = 3  # that are named in the heading
FULL_COLOUR_NATS = 1.0  # log-ratio at which a piece has its full colour
# Share of the colour in the background: text stays readable at MAX, and nothing is visible below MIN.
MAX_COLOUR_PERCENT, MIN_COLOUR_PERCENT = 60, 4


def render_heading(title: str, facts: ModelBackground) -> Html:
    """Render the title, what the models of the run know, and where the page runs."""
    subjects = [SUBJECTS[site] for site in facts.sites if site in SUBJECTS]
    return join_html([
        element("h1", title, class_="lead"),
        element("p", " ".join([*_describe_sites(facts), *subjects]), class_="lead"),
        element("p", *_describe_base(facts), class_="lead"),
        element("p", "The page runs on this machine alone; no question and no answer leaves it. Choose one of the "
                "held-out questions, or type your own:", class_="lead")])


def render_answer(answer: Answer, reference: str, stopped: bool = False) -> Html:
    """Render one panel: the text twice, of which style.css shows one, above its metrics.

    Once as it was written, coloured by log-ratio, and once with its Markdown rendered.
    """
    if not answer.tokens and not answer.done:
        text = render_waiting(_waiting_message(answer, stopped))
    else:
        end = EMPTY
        if answer.done:
            end = _render_end(answer)
        elif not stopped:
            end = element("span", class_="caret", aria_hidden="true")
        pieces = [_render_piece(piece, reference) for piece in answer.decoder.pieces]
        text = join_html([element("div", *pieces, end, class_="answer words", dir="auto"),
                          _render_text(answer.text, end)])
    return join_html([text, _render_metrics(answer, reference, stopped)])


def render_waiting(message: str) -> Html:
    """Render a panel without an answer."""
    return element("p", message, class_="waiting")


def render_blind_answer(text: str) -> Html:
    """Render the text of an answer, without anything that could reveal the policy."""
    return _render_text(text) if text.strip() else render_waiting("(an empty answer)")


def render_notice(message: str) -> Html:
    """Render a one-sentence notice; nothing for an empty message."""
    return element("p", message, class_="notice", role="status") if message else EMPTY


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


def _describe_sites(facts: ModelBackground) -> list[str]:
    if not facts.sites:
        return []
    total = sum(facts.sites.values())
    names, others = list(facts.sites)[:MAX_SITES], len(facts.sites) - MAX_SITES
    sites = ", ".join(names) + (f" and {_format_count(others, 'more site')}" if others > 0 else "")
    return [f"The models learnt from {_format_count(total - facts.held_out, 'question')} of {sites}; "
            f"{facts.held_out:,} more were held out, to be asked here."]


def _describe_base(facts: ModelBackground) -> list[str | Html]:
    if facts.base is None:
        return []
    size = f" of {facts.parameters:,} parameters" if facts.parameters else ""
    if facts.base == SCRATCH:
        return [f"Their base is a small LLaMA{size} without pretraining. It was trained on this text alone, so ",
                element("strong", "they know nothing else"), ": a question about anything else gets nonsense."]
    return [f"Their base is {facts.base}{size}, which was pretrained on other text, so they may know more than this."]


def _render_text(text: str, end: Html = EMPTY) -> Html:
    return element("div", render_markdown(text), end, class_="answer markdown", dir="auto")


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
        return EMPTY
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
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
