"""Format questions of a posts or pairs artifact with their answers, for a terminal. All texts are foreign."""

import textwrap

from stages.render.terminal import WIDTH, escape_controls, shorten

TEXT_CHARACTERS = 4000  # of one text
INDENT = "    "


def format_questions(rows: list[dict]) -> list[str]:
    """Format questions of posts (as in the dump) or of pairs (in Markdown, with the pairs as 'better > worse').

    Answers are numbered, from the highest score on.
    """
    lines = []
    for row in rows:
        kind = f"split {row['split']}" if "split" in row else ", ".join(row["tags"] or [])
        lines += [*_format_head([f"question {row.get('question_id', row.get('qid'))}", row["site"], kind, row["date"]]),
                  *_format_head([row["url"]])]
        lines += [line for text in (row.get("title"), row["question"]) if text for line in _format_text(text)]
        for number, answer in enumerate(sorted(row["answers"], key=lambda answer: -answer["score"]), 1):
            head = [f"  [{number}] score {answer['score']}", f"answer {answer['id']}",
                    "accepted" if answer.get("accepted") else "", f"by {answer['author']}"]
            lines += ["", *_format_head(head), *_format_text(answer["text"])]
        pairs = ", ".join(f"[{better + 1}] > [{worse + 1}]" for better, worse in row.get("pairs", []))
        if pairs:
            lines += ["", *textwrap.wrap(f"  pairs, better > worse: {pairs}", WIDTH, subsequent_indent=INDENT)]
        lines.append("")
    return lines[:-1]


def _format_head(parts: list) -> list[str]:
    return [shorten(escape_controls("; ".join(str(part) for part in parts if part)), WIDTH)]


def _format_text(text: str) -> list[str]:
    """Wrap each line of a text; its line ends are kept, all other control characters escaped."""
    cut = shorten(text.rstrip(), TEXT_CHARACTERS)
    paragraphs = (escape_controls(line.expandtabs(4).rstrip()) for line in cut.split("\n"))
    lines = [line for paragraph in paragraphs
             for line in textwrap.wrap(paragraph, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT) or [""]]
    return lines if cut == text.rstrip() else [*lines, f"{INDENT}({len(text):,} characters in all; --json shows them)"]
