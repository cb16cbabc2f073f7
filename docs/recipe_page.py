"""Write docs/recipe.md from the recipe's dataclasses: one table a section, one row a setting.

    python -m docs.recipe_page
"""

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from stages.command_line.option_parser import type_name
from stages.recipe.recipe import Recipe
from stages.recipe.schema import list_fields

PAGE = Path(__file__).with_name("recipe.md")
INTRO = """# Recipe

<!-- Written by python -m docs.recipe_page: edit stages/recipe/ and run it again. -->

Every setting of every stage. The defaults are StackLLaMA's published values where there is one. A recipe file in
`configs/` lists differences only, `--config 'sft={learning_rate: 2e-5}'` overrides single values, and each stage has
its settings as flags (`--learning-rate`, `--lora.r`). `--config seed=1`, `--config cpu_kernels=off`,
`--config save_every_minutes=10` and `--config 'log_to=[jsonl]'` set these in every section that has them.

| source | is |
| --- | --- |
| paper | the StackLLaMA blog post (Hugging Face, 2023) |
| script | TRL's examples/research_projects/stack_llama/scripts |
| run | the README of that folder |
| card | the cards of the published data sets |
| N implementation details | "The N Implementation Details of RLHF with PPO" |
| N+ | "The N+ Implementation Details of RLHF with PPO" |
| VC-PPO | Yuan et al. 2025, arXiv 2503.01491 |
| ours | a choice of this project |

A source inside a meaning belongs to the words before it. The values have a unit, unless the meaning names it or there
is none. Every number has a range, which no value of a recipe or of a command line may leave; of a list, each number has
it. A large upper end of a limit means "all" or "never".
"""
COLUMNS = ("setting", "meaning", "default", "values", "source")
UNITS = ("bytes", "characters", "epochs", "evaluations", "inches", "iterations", "nats", "pairs", "prompts",
         "questions", "responses", "samples", "sequences", "share", "steps", "tokens")
SOURCE = re.compile(r"\s*\[([^\]]+)\]")


def render_page() -> str:
    """Render the whole page; the same recipe gives the same bytes."""
    top = [(f.name, f.default, f.metadata, typing.get_type_hints(Recipe)[f.name])
           for f in fields(Recipe) if not is_dataclass(f.default)]
    parts = [INTRO, "## Beside the sections\n", render_table(top)]
    for section in fields(Recipe):
        if is_dataclass(section.default):
            kind = type(section.default)
            parts += [f"\n## {section.name}\n", f"{kind.__doc__.strip().splitlines()[0]}\n",
                      render_table(setting_rows(section.default))]
            parts += [f"\n### {section.name}: an entry of {name}\n\n{entry.__doc__.strip().splitlines()[0]}\n\n"
                      + render_table(setting_rows(entry())) for name, entry in entry_types(kind)]
    return "\n".join(parts) + "\n"


def section_names() -> list[str]:
    return [section.name for section in fields(Recipe) if is_dataclass(section.default)]


def setting_rows(settings: Any) -> list[tuple[str, Any, Mapping, Any]]:
    """List (dotted name, default, metadata, type) of every setting, with nested sections unfolded."""
    return [(name, value, field.metadata, field.type) for name, field, value in list_fields(settings)]


def entry_types(kind: type) -> list[tuple[str, type]]:
    """List (name, dataclass) of the settings that are lists of mappings."""
    hints = typing.get_type_hints(kind)
    return [(field.name, typing.get_args(hints[field.name])[0]) for field in fields(kind)
            if typing.get_origin(hints[field.name]) is tuple and is_dataclass(typing.get_args(hints[field.name])[0])]


def render_table(rows) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for name, default, metadata, hint in rows:
        meaning, source = split_source(metadata["doc"])
        values = ", ".join(filter(None, (type_name(hint), str(metadata["within"] or ""), unit_of(name))))
        lines.append((f"`{name}`", meaning, f"`{default_text(default)}`", values, source))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def split_source(doc: str) -> tuple[str, str]:
    """Split 'meaning [source]'. Sources before the end stay in the meaning, where they belong to the words before."""
    end = re.search(SOURCE.pattern + r"$", doc)
    text, source = (doc[:end.start()], end.group(1)) if end else (doc, "")
    return SOURCE.sub(r" (*\1*)", escape(text)), escape(source)


def escape(text: str) -> str:
    """Keep Markdown from reading signs in a meaning as markup; code spans stay as they are."""
    return re.sub(r"(`[^`]*`)|([*<])", lambda match: match[1] or ("&lt;" if match[2] == "<" else r"\*"), text)


def unit_of(name: str) -> str:
    words = name.rpartition(".")[2].split("_")
    return next((word for word in (words[-1], words[0], *words) if word in UNITS), "")


def default_text(value: Any) -> str:
    """Write a default in one line, as YAML would have it; of an entry its first value and those that differ."""
    if isinstance(value, float | str):
        return json.dumps(value) if "\n" in str(value) else str(value)
    plain = value
    if isinstance(value, tuple):
        plain = [first_and_changed(part) if is_dataclass(part) else part for part in value]
    return yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("...\n").strip()


def first_and_changed(entry: Any) -> dict[str, Any]:
    first, *others = fields(entry)
    names = [first.name, *(field.name for field in others if getattr(entry, field.name) != field.default)]
    return {name: getattr(entry, name) for name in names}


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
