"""Read the Markdown pages of the project: fenced blocks, code spans, commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "data").rglob("*.md"))]
GENERATED = ROOT / "docs/recipe.md"
BLOCK = re.compile(r"^(?:<!-- needs: (?P<needs>.+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
                   re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. needs: what its commands need that the tests do not have; None where the tests run them."""

    page: str
    language: str
    text: str
    needs: str | None


@dataclass(frozen=True)
class Command:
    """One command line of a block."""

    page: str
    words: tuple[str, ...]
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read_blocks() -> list[Block]:
    return [Block(page_name(path), match["language"], match["text"], match["needs"])
            for path in PAGES for match in BLOCK.finditer(path.read_text(encoding="utf-8"))]


def read_commands() -> list[Command]:
    """List the command lines of all bash blocks, each once."""
    commands = {}
    for block in read_blocks():
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := tuple(shlex.split(line, comments=True)):
                    commands.setdefault((words, block.needs), Command(block.page, words, block.needs))
    return list(commands.values())


def without_blocks(text: str) -> str:
    return BLOCK.sub("", text)


def read_code_spans() -> Iterator[tuple[str, str]]:
    """Yield (page, text) of each `code span` outside of blocks."""
    for path in PAGES:
        for span in re.findall(r"`([^`\n]+)`", without_blocks(path.read_text(encoding="utf-8"))):
            yield page_name(path), span
