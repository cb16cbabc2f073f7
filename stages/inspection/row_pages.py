"""Format questions of a posts or pairs artifact with their answers, for a terminal. All texts are foreign."""

import textwrap

from stages.render.terminal import WIDTH, escape_controls, shorten

TEXT_CHARACTERS = 4000  # of one text
INDENT = "    "


def format_questions(rows: list[dict]) -> list[str]:
    """Format records of posts: the question as in the dump, answers from the highest score on."""
    lines = []
    for row in rows:
        head = [f"question {row['question_id']}", row["site"], ", ".join(row["tags"] or []), row["date"]]
        lines += [*_format_head(head), *_format_head([row["url"]]), *_format_text(row["title"] or ""), "",
                  *_format_text(row["question"])]
        for answer in sorted(row["answers"], key=lambda answer: -answer["score"]):
            lines += ["", *_format_head([f"  answer {answer['id']}: score {answer['score']}",
                                         "accepted" if answer["accepted"] else "", f"by {answer['author']}"]),
                      *_format_text(answer["text"])]
        lines.append("")
    return lines[:-1]


def format_pairs(rows: list[dict]) -> list[str]:
    """Format questions of pairs: the question in Markdown, its answers numbered, and the pairs as 'better > worse'."""
    lines = []
    for row in rows:
        lines += [*_format_head([f"question {row['qid']}", row["site"], f"split {row['split']}", row["date"]]),
                  *_format_head([row["url"]]), *_format_text(row["question"])]
        for number, answer in enumerate(row["answers"], 1):
            lines += ["", *_format_head([f"  [{number}] score {answer['score']}", f"answer {answer['id']}",
                                         f"by {answer['author']}"]), *_format_text(answer["text"])]
        pairs = ", ".join(f"[{better + 1}] > [{worse + 1}]" for better, worse in row["pairs"])
        lines += ["", *textwrap.wrap(f"  pairs, better > worse: {pairs}", WIDTH, subsequent_indent=INDENT), ""]
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
