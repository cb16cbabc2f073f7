"""Render the demo page's content as HTML: what the models know, answers with their numbers, tally. Text is escaped.

Also hold one answer and what is known of it. Without torch: votes are saved without it, too.

A log-ratio is log p(token) - log p_SFT(token) in nats, p being the policy that sampled the token, at the sampling
temperature (1 for greedy). Its sum over an answer is a one-sample estimate (k1) of the policy's KL to SFT.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stages.artifacts.artifact import MANIFEST
from stages.evaluation.statistics import wilson_interval
from stages.render.html import Html, element, join_html
from stages.render.markdown_html import render_markdown
from stages.runtime.files import read_json_object

HELD_OUT = "evaluation"  # the split that no model has learnt from
SCRATCH = "scratch"  # a base that was trained by the pipeline, on the run's own text
MAX_SITES = 3  # that are named in the heading
FULL_COLOUR_NATS = 1.0  # log-ratio at which a piece has its full colour
# Share of the colour in the background: text stays readable at MAX, and nothing is visible below MIN.
MAX_COLOUR_PERCENT, MIN_COLOUR_PERCENT = 60, 4
# What a reader cannot guess from the name of the bundled site; tests hold the names to data/demo/facts.py.
SUBJECTS = {
    "demo.stackexchange.com": (
        "demo.stackexchange.com is an invented site about twelve invented command-line tools: harbor, finch, maple, "
        "pixel, cobalt, otter, lantern, quartz, falcon, saffron, breeze and nimbus. People ask for the dry run flag, "
        "the default port, the settings file or the cache command of one or two of them, and want a command to type or "
        "the reason why."),
}


class TextPiece(NamedTuple):
    """The text of some tokens, and the sum of their log-ratios in nats."""

    text: str
    log_ratio: float


@dataclass
class Answer:
    """One answer while it is generated; the same object is updated after each token.

    model: digest of the model, or ''. tokens: ids, including the EOS that ended the answer, if one did; those of
    best-of-n come when all `samples` are finished. seconds: spent on sampling `sampled_tokens`, those of all samples.
    When done: pieces, rewards of all samples (best first), and kl in nats, which for best-of-n is an upper bound.
    """

    policy: str
    model: str
    samples: int = 1
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    sampled_tokens: int = 0
    seconds: float = 0.0
    finished_samples: int = 0
    ended: bool = False
    pieces: list[TextPiece] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    kl: float = 0.0

    @property
    def done(self) -> bool:
        return bool(self.rewards)


def render_heading(run: Path) -> Html:
    """Render the run's name and, from its manifests, what its models know; what these do not say is left out."""
    paragraphs = [
        _describe_sites(_read_manifest(run / "pairs").get("metrics", {})),
        _describe_base(_read_manifest(run / "base")),
        ["The page runs on this machine alone; no question and no answer leaves it. Choose one of the held-out "
         "questions, or type your own:"]]
    return join_html([element("h1", f"Talking to {run}", class_="lead"),
                      *(element("p", *words, class_="lead") for words in paragraphs)])


def render_answer(answer: Answer, reference: str, heading: str = "") -> Html:
    """Render one panel: the text above its numbers.

    The text stands there twice, of which style.css shows one: as it was written, coloured by log-ratio, and with its
    Markdown rendered.
    """
    title = element("p", heading, class_="revealed") if heading else ""
    if not answer.tokens:
        return join_html([title, render_waiting(f"{answer.finished_samples} of {answer.samples} answers are written…")])
    end = " … cut off" if answer.done and not answer.ended else ""
    words = [_render_piece(piece, reference) for piece in answer.pieces or [TextPiece(answer.text, 0.0)]]
    return join_html([title, element("div", *words, end, class_="answer words", dir="auto"),
                      render_text(answer.text, end), _render_numbers(answer, reference)])


def render_text(text: str, end: str = "") -> Html:
    """Render an untrusted text with its Markdown."""
    return element("div", render_markdown(text), end, class_="answer markdown", dir="auto")


def render_waiting(message: str) -> Html:
    """Render a panel without an answer."""
    return element("p", message, class_="waiting")


def render_human_answer(row: dict | None) -> Html:
    """Render the best human answer in a row of the pairs table."""
    if row is None:
        return render_waiting("None is known: this is not one of the held-out questions.")
    return join_html([render_text(row["response_j"]), element("p", f"Score {row['score_j']}")])


def render_tally(one: str, other: str, values: list[float], questions: int) -> Html:
    """Render how often the first policy was preferred; values: 1, 0.5 for a tie, or 0 per vote."""
    if not values:
        return element("p", f"No vote yet between {one} and {other}.")
    share, ties = sum(values) / len(values), values.count(0.5)
    low, high = wilson_interval(share, questions)
    ties_text = f"{_format_count(ties, 'tie')}, counted half" if ties else "no ties"
    return element("p", f"{one} preferred to {other}: ", element("strong", f"{share:.2f} [{low:.2f}, {high:.2f}]"),
                   f" ({_format_count(len(values), 'vote')} on {_format_count(questions, 'question')}; "
                   f"{ties_text}; interval at 95 %).")


def _read_manifest(artifact: Path) -> dict:
    return read_json_object(artifact / MANIFEST) or {}


def _describe_sites(metrics: dict) -> list[str]:
    questions = {site: counts.get("questions", 0) for site, counts in metrics.get("sites", {}).items()}
    if not questions:
        return []
    names = sorted(questions, key=lambda site: -questions[site])
    total, held_out = sum(questions.values()), metrics.get("questions_by_split", {}).get(HELD_OUT, 0)
    others = len(names) - MAX_SITES
    sites = ", ".join(names[:MAX_SITES]) + (f" and {_format_count(others, 'more site')}" if others > 0 else "")
    return [f"The models learnt from {_format_count(total - held_out, 'question')} of {sites}; "
            f"{held_out:,} more were held out, to be asked here.",
            *(f" {SUBJECTS[site]}" for site in names if site in SUBJECTS)]


def _describe_base(manifest: dict) -> list[str | Html]:
    base, parameters = manifest.get("config", {}).get("model"), manifest.get("metrics", {}).get("parameters")
    if base is None:
        return []
    size = f" of {parameters:,} parameters" if parameters else ""
    if base == SCRATCH:
        return [f"Their base is a small LLaMA{size} without pretraining. It was trained on this text alone, so ",
                element("strong", "they know nothing else"), ": a question about anything else gets nonsense."]
    return [f"Their base is {base}{size}, which was pretrained on other text, so they may know more than this."]


def _render_piece(piece: TextPiece, reference: str) -> Html:
    percent = round(min(abs(piece.log_ratio) / FULL_COLOUR_NATS, 1) * MAX_COLOUR_PERCENT)
    if percent < MIN_COLOUR_PERCENT:
        return join_html([piece.text])
    return element("span", piece.text, class_="more" if piece.log_ratio > 0 else "less", style=f"--w:{percent}%",
                   title=f"{_format_signed(piece.log_ratio)} nats to {reference}")


def _render_numbers(answer: Answer, reference: str) -> Html:
    kl = f"≤ {answer.kl:.2f}" if answer.samples > 1 else _format_signed(answer.kl)
    numbers = {"reward": _format_signed(answer.rewards[0]) if answer.done else "…",
               f"KL to {reference}, nats": kl if answer.done else "…",
               "tokens": f"{len(answer.tokens):,}",
               "tokens a second": f"{answer.sampled_tokens / answer.seconds:,.0f}" if answer.seconds else "…"}
    boxes = (element("div", element("dt", name), element("dd", value)) for name, value in numbers.items())
    rewards = f"Rewards of all {answer.samples}: {', '.join(map(_format_signed, answer.rewards))}"
    return join_html([element("dl", *boxes, class_="numbers"), element("p", rewards) if answer.samples > 1 else ""])


def _format_signed(number: float) -> str:
    return f"{number:+.2f}".replace("-", "−")


def _format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
