"""An artifact, a list of runs, or a difference of two artifacts, as lines of plain text for a terminal."""

from stages.render.terminal import (
    escape_controls,
    format_bytes,
    format_columns,
    format_named_texts,
    format_value,
    shorten,
    wrap_paragraph,
)
from stages.runtime.artifact import DIGEST_CHARACTERS

MOST_ROWS = 40  # of a listing inside an artifact
SIDE_CHARACTERS = 26  # of one of two values beside each other
PACKAGES = ("torch", "transformers", "peft", "pyarrow")


def format_artifact(facts: dict) -> list[str]:
    """What `stages.inspect` found in one artifact."""
    said = facts["manifest"]
    lines = [f"{facts['artifact']}: {said.get('stage', 'unknown stage')}, {facts['state']}",
             *_remarks("stale", facts["stale"]), *_remarks("problem", facts["problems"]), *_circumstances(facts)]
    changed = [(row["name"], _side(row, "a"), f"published: {_side(row, 'b')}") for row in facts["settings"]]
    blocks = {
        f"settings: {len(changed)} differ from the published ones": format_columns(changed),
        "metrics": format_columns(said.get("metrics", {}).items()),
        "ancestry": format_columns(_ancestry(facts["ancestry"])),
        "configuration": [line for found in facts["configs"] for line in _config(found)],
        "weights": [line for found in facts["weights"] for line in _weights(found)],
        "last metrics": format_columns((key, found["value"], _counter(found)) for key, found in facts["last_metrics"].items()),
        **{_table_title(table): _table(table) for table in facts["tables"]},
        "sample": _sample(facts)}
    return _page(lines, blocks)


def format_runs(runs: list[dict]) -> list[str]:
    """Runs and their stages: state, when they were last written, and what there is to say."""
    lines: list[str] = []
    for run in runs:
        stages = run["stages"]
        lines += ["", run["run"]]
        lines += format_columns((stage["name"], stage["state"], stage["last_written"], _note(stage)) for stage in stages)
    return lines[1:]


def format_difference(facts: dict) -> list[str]:
    """What `--diff` found, a block for each kind of difference; those of metrics with difference and ratio."""
    lines = [f"a: {facts['a']}", f"b: {facts['b']}", *_remarks("problem", facts["problems"])]
    blocks = {kind: format_columns([("", "a", "b"), *((row["name"], _side(row, "a"), _side(row, "b")) for row in facts[kind])])
              for kind in ("settings", "code") if facts[kind]}
    blocks["inputs"] = format_columns((row["name"], side, *_source(row.get(side))) for row in facts["inputs"] for side in "ab")
    if facts["metrics"]:
        heads = [("", "a", "b", "b - a", "b / a")]
        blocks["metrics"] = format_columns([*heads, *((row["name"], _side(row, "a"), _side(row, "b"), row.get("difference", ""),
                                             row.get("ratio", "")) for row in facts["metrics"])])
    return _page(lines, blocks) if any(blocks.values()) else [*lines, "nothing differs"]


def _page(lines: list[str], blocks: dict[str, list[str]]) -> list[str]:
    return lines + [line for title, block in blocks.items() if block for line in ("", title, *block)]


def _remarks(word: str, said: list[str]) -> list[str]:
    return [line for text in said for line in wrap_paragraph(f"  {word}: ", text)]


def _source(source: dict | None) -> tuple[str, str]:
    return ((source["sha256"] or "-")[:DIGEST_CHARACTERS], source["path"]) if source else ("", "absent")


def _side(row: dict, side: str) -> str:
    return format_value(row[side], SIDE_CHARACTERS) if side in row else "absent"


def _counter(found: dict) -> str:
    return ", ".join(f"{name} {format_value(value)}" for name, value in found.items() if name != "value")


def _circumstances(facts: dict) -> list[str]:
    said, files = facts["manifest"], facts["files"]
    versions = said.get("versions", {})
    made = [f"in {said['seconds']:,} s" if "seconds" in said else "", said.get("device"),
            f"peak {said['peak_memory_mib']:,} MiB" if "peak_memory_mib" in said else ""]
    code = [str(said.get("commit", ""))[:DIGEST_CHARACTERS], *(f"{name} {versions[name]}" for name in PACKAGES
                                                              if name in versions)]
    found = [("written", facts["last_written"]), ("made", _commas(made)), ("code", _commas(code)),
             ("files", f"{files['count']:,}, {format_bytes(files['bytes'])}")]
    return format_columns((name, text) for name, text in found if text)


def _commas(parts: list) -> str:
    return ", ".join(str(part) for part in parts if part)


def _ancestry(nodes: list[dict], depth: int = 0) -> list[tuple]:
    """Name, digest, what became of it, path: further in by one step, what it was made from."""
    lines = []
    for node in nodes:
        what = "as above" if node["repeated"] else f"BROKEN: {node['verdict']}" if node["broken"] else node["verdict"]
        lines.append(("  " * depth + node["name"], (node["sha256"] or "-")[:DIGEST_CHARACTERS], what, node["path"]))
        lines += _ancestry(node["inputs"], depth + 1)
    return lines


def _config(found: dict) -> list[str]:
    return [f"  {found['name']}", *format_columns(((key, value) for key, value in found.items() if key != "name"), indent=4)]


def _weights(found: dict) -> list[str]:
    head = f"  {found['name']}: {found['parameters']:,} parameters, {format_bytes(found['bytes'])}"
    tensors = [(f"{row['count']} x", " x ".join(map(str, row["shape"])) or "scalar", row["dtype"], row["name"])
               for row in found["tensors"][:MOST_ROWS]]
    more = len(found["tensors"]) - MOST_ROWS
    return [head, *format_columns(tensors, indent=4), *([f"    and {more} kinds more"] if more > 0 else [])]


def _table_title(table: dict) -> str:
    return (f"table {table['name']}: {table['rows']:,} rows, {format_bytes(table['bytes'])} "
            f"(files: {table['files']:,}, row groups: {table['row_groups']:,})")


def _table(table: dict) -> list[str]:
    """A line a column; bounds marked `all` are of all rows, from the metadata, the rest is of the first rows."""
    lines = [("column", "type", f"first {table['sample_rows']:,} rows (all: of all rows)", "rows 1, 2 ...")]
    for column in table["columns"]:
        head = " | ".join(format_value(row[column["name"]], 18) for row in table["head"])
        lines.append((shorten(column["name"], 16), shorten(column["type"], 12), _statistics(column), head))
    return format_columns(lines) if table["columns"] else []


def _statistics(column: dict) -> str:
    of = "" if column["of"] == "value" else f" {column['of']}"
    least, most = (format_value(column[bound]) if bound in column else "" for bound in ("least", "most"))
    parts = [f"{least} .. {most}{of}" if least != most else f"{least}{of}" if least else "",
             "(all)" if column["bounds_from"] == "all rows" else "",
             f"mean {format_value(column['mean'])}" if "mean" in column and least != most else "",
             f"{column['nulls']:,} null" if column["nulls"] else ""]
    return " ".join(filter(None, parts))


def _sample(facts: dict) -> list[str]:
    """The last answer a training kept or, of tables, the first row with the most text: texts only, as in `head`."""
    heads = [{key: value for key, value in table["head"][0].items() if isinstance(value, str)}
             for table in facts["tables"] if table["head"]]
    return format_named_texts(facts["sample"] or max(heads, key=lambda head: sum(map(len, head.values())), default={}))


def _note(stage: dict) -> str:
    said = [*stage["stale"], *stage["problems"]]
    numbers = [f"{name} {format_value(value)}" for name, value in stage["metrics"].items()]
    return "; ".join(map(escape_controls, said)) or ", ".join(numbers)
