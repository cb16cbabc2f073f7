"""Format artifacts, lists of runs, and questions with their answers as lines of plain text for a terminal. Texts of
questions and answers are foreign.
"""

import textwrap
from typing import Any

from stages.render.terminal import (
    WIDTH,
    escape_controls,
    format_columns,
    format_named_texts,
    format_value,
    shorten,
    wrap_paragraph,
)
from stages.render.units import format_bytes
from stages.runtime.files import DIGEST_CHARACTERS

PACKAGES = ("torch", "transformers", "peft", "pyarrow")
TEXT_CHARACTERS = 4000  # of one text
INDENT = "    "


def format_artifact(facts: dict) -> list[str]:
    """Format the facts of one artifact: a head, then a block of aligned columns for each kind of fact."""
    manifest, last = facts["manifest"], facts["last_metrics"]
    blocks = {
        "": _list_origin(facts),
        f"settings: {len(facts['settings'])} differ from the published ones": [
            (row["name"], row.get("a", "absent"), f"published: {format_value(row.get('b', 'absent'))}")
            for row in facts["settings"]],
        "metrics": list(manifest.get("metrics", {}).items()),
        "ancestry": _list_ancestry(facts["ancestry"]),
        **{f"{weights['name']}: {weights['parameters']:,} parameters, {format_bytes(weights['bytes'])}":
           _list_tensors(weights["tensors"]) for weights in facts["weights"]},
        "last metrics": [(key, entry["value"], _join(f"{name} {value:,}" for name, value in entry.items()
                                                     if name != "value")) for key, entry in last.items()],
        **{f"table {table['name']}: {table['rows']:,} rows in {table['files']:,} files, {format_bytes(table['bytes'])}":
           _list_columns(table) for table in facts["tables"]}}
    sample = format_named_texts(facts["sample"] or _select_texts(facts["tables"]))
    return [f"{facts['artifact']}: {manifest.get('stage', 'unknown stage')}, {facts['state']}",
            *(line for word in ("stale", "problems") for text in facts[word]
              for line in wrap_paragraph(f"  {word.removesuffix('s')}: ", text)),
            *(line for title, rows in blocks.items() if rows
              for line in (*["", title] * bool(title), *format_columns(rows))),
            *["", "sample"] * bool(sample), *sample]


def format_runs(runs: list[dict]) -> list[str]:
    """Format runs and their stages: state, time of the last write, problems or headline metrics."""
    lines: list[str] = []
    for run in runs:
        heads = format_columns((stage["name"], stage["state"], stage["last_written"]) for stage in run["stages"])
        lines += ["", run["run"], *(line for head, stage in zip(heads, run["stages"], strict=True)
                                    for line in wrap_paragraph(f"{head}  ", _format_note(stage)))]
    return lines[1:]


def _list_origin(facts: dict) -> list[tuple]:
    """List when, where and by which code the artifact was made, and its size."""
    manifest, files = facts["manifest"], facts["files"]
    versions = manifest.get("versions", {})
    cost = [f"in {manifest['seconds']:,} s" if "seconds" in manifest else "", manifest.get("device"),
            f"peak {manifest['peak_memory_mib']:,} MiB" if "peak_memory_mib" in manifest else ""]
    code = [str(manifest.get("commit", ""))[:DIGEST_CHARACTERS],
            *(f"{name} {versions[name]}" for name in PACKAGES if name in versions)]
    rows = [("written", facts["last_written"]), ("made", _join(cost)), ("code", _join(code)),
            ("files", f"{files['count']:,}, {format_bytes(files['bytes'])}")]
    return [row for row in rows if row[1]]


def _list_ancestry(nodes: list[dict], depth: int = 0) -> list[tuple]:
    """List name, digest, verdict and path of inputs; inputs of inputs are indented."""
    rows = []
    for node in nodes:
        verdict = "as above" if node["repeated"] else "BROKEN: " * node["broken"] + node["verdict"]
        rows.append(("  " * depth + node["name"], (node["sha256"] or "-")[:DIGEST_CHARACTERS], verdict, node["path"]))
        rows += _list_ancestry(node["inputs"], depth + 1)
    return rows


def _list_tensors(tensors: list[dict]) -> list[tuple]:
    return [(f"{row['count']} x", " x ".join(map(str, row["shape"])) or "scalar", row["dtype"], row["name"])
            for row in tensors]


def _list_columns(table: dict) -> list[tuple]:
    rows = []
    for column in table["columns"]:
        span = [format_value(column[name]) for name in ("least", "most") if name in column]
        mean = f"mean {format_value(column['mean'])}" if span else ""
        nulls = f"{column['nulls']:,} null" if column["nulls"] else ""
        unit = "" if column["of"] == "value" else column["of"]
        rows.append((column["name"], column["type"], _join([f"{' .. '.join(span)} {unit}".strip(), mean, nulls]),
                     " | ".join(format_value(row[column["name"]], 18) for row in table["head"])))
    return [("column", "type", f"first {table['sample_rows']:,} rows", "rows 1, 2 ..."), *rows] if rows else []


def _select_texts(tables: list[dict]) -> dict[str, str]:
    """Select the texts of the first row with the most text."""
    heads = [{key: value for key, value in table["head"][0].items() if isinstance(value, str)}
             for table in tables if table["head"]]
    return max(heads, key=lambda head: sum(map(len, head.values())), default={})


def _format_note(stage: dict) -> str:
    numbers = [f"{name} {format_value(value)}" for name, value in stage["metrics"].items()]
    return "; ".join([*stage["stale"], *stage["problems"]]) or ", ".join(numbers)


def _join(parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)


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
