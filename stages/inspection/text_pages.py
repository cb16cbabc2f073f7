"""Format artifacts, lists of runs, and differences as lines of plain text for a terminal."""

from stages.render.terminal import (
    format_columns,
    format_named_texts,
    format_value,
    shorten,
    wrap_paragraph,
)
from stages.render.units import format_bytes
from stages.runtime.finished import DIGEST_CHARACTERS

MAX_TENSORS = 40  # rows of a listing
SIDE_CHARACTERS = 26  # of one of two values side by side
PACKAGES = ("torch", "transformers", "peft", "pyarrow")


def format_artifact(facts: dict) -> list[str]:
    """Format the facts of one artifact."""
    manifest = facts["manifest"]
    lines = [f"{facts['artifact']}: {manifest.get('stage', 'unknown stage')}, {facts['state']}",
             *_prefix("stale", facts["stale"]), *_prefix("problem", facts["problems"]), *_format_origin(facts)]
    settings = [(row["name"], _format_side(row, "a"), f"published: {_format_side(row, 'b')}")
                for row in facts["settings"]]
    metrics = ((key, entry["value"], _format_counter(entry)) for key, entry in facts["last_metrics"].items())
    blocks = {
        f"settings: {len(settings)} differ from the published ones": format_columns(settings),
        "metrics": format_columns(manifest.get("metrics", {}).items()),
        "ancestry": format_columns(_ancestry_rows(facts["ancestry"])),
        "configuration": [line for config in facts["configs"] for line in _format_config(config)],
        "weights": [line for weights in facts["weights"] for line in _format_weights(weights)],
        "last metrics": format_columns(metrics),
        **{_table_title(table): _format_table(table) for table in facts["tables"]},
        "sample": _format_sample(facts)}
    return _join_blocks(lines, blocks)


def format_runs(runs: list[dict]) -> list[str]:
    """Format runs and their stages: state, time of the last write, problems or headline metrics."""
    lines: list[str] = []
    for run in runs:
        heads = format_columns((stage["name"], stage["state"], stage["last_written"]) for stage in run["stages"])
        lines += ["", run["run"], *(line for head, stage in zip(heads, run["stages"], strict=True)
                                    for line in wrap_paragraph(f"{head}  ", _format_note(stage)))]
    return lines[1:]


def format_difference(facts: dict) -> list[str]:
    """Format the difference of two artifacts, one block for settings, code, inputs and metrics each."""
    lines = [f"a: {facts['a']}", f"b: {facts['b']}", *_prefix("problem", facts["problems"])]
    rows = {kind: [(row["name"], _format_side(row, "a"), _format_side(row, "b")) for row in facts[kind]]
            for kind in ("settings", "code", "metrics")}
    blocks = {kind: format_columns([("", "a", "b"), *rows[kind]]) for kind in ("settings", "code") if rows[kind]}
    blocks["inputs"] = format_columns(
        (row["name"], side, *_format_source(row.get(side))) for row in facts["inputs"] for side in "ab")
    if facts["metrics"]:
        changes = [(row.get("difference", ""), row.get("ratio", "")) for row in facts["metrics"]]
        blocks["metrics"] = format_columns([
            ("", "a", "b", "b - a", "b / a"),
            *(row + change for row, change in zip(rows["metrics"], changes, strict=True))])
    return _join_blocks(lines, blocks) if any(blocks.values()) else [*lines, "nothing differs"]


def format_run_difference(facts: dict) -> list[str]:
    """Format the difference of two runs: settings, stages by the digests of their files, numbers with intervals."""
    settings = [(row["name"], _format_side(row, "a"), _format_side(row, "b")) for row in facts["settings"]]
    stages = [(row["name"], row["state"], _format_files(row["files"])) for row in facts["stages"]]
    metrics = [(row["name"], *(_format_estimate(row.get(side)) for side in "ab"), row.get("difference", ""))
               for row in facts["metrics"]]
    titles = {"settings": [("", "a", "b")], "metrics": [("", "a", "b", "b - a")]}
    blocks = {"settings": format_columns(titles["settings"] + settings) if settings else ["  none differs"],
              "stages, by the SHA-256 of their files": format_columns(stages),
              "metrics, 95 % intervals": format_columns(titles["metrics"] + metrics) if metrics else []}
    return _join_blocks([f"a: {facts['a']}", f"b: {facts['b']}"], blocks)


def _format_files(names: list[str]) -> str:
    return f"{len(names)} files differ: {', '.join(names)}" if names else ""


def _format_estimate(estimate: dict | None) -> str:
    if estimate is None:
        return "absent"
    mean, *ends = (format_value(float(f"{value:.4g}") if isinstance(value, float) else value)
                   for value in estimate.values() if value is not None)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def _join_blocks(lines: list[str], blocks: dict[str, list[str]]) -> list[str]:
    return lines + [line for title, block in blocks.items() if block for line in ("", title, *block)]


def _prefix(word: str, texts: list[str]) -> list[str]:
    return [line for text in texts for line in wrap_paragraph(f"  {word}: ", text)]


def _format_source(source: dict | None) -> tuple[str, str]:
    return ((source["sha256"] or "-")[:DIGEST_CHARACTERS], source["path"]) if source else ("", "absent")


def _format_side(row: dict, side: str) -> str:
    return format_value(row[side], SIDE_CHARACTERS) if side in row else "absent"


def _format_counter(entry: dict) -> str:
    return ", ".join(f"{name} {format_value(value)}" for name, value in entry.items() if name != "value")


def _format_origin(facts: dict) -> list[str]:
    """When and how the artifact was made, by which code, and its size."""
    manifest, files = facts["manifest"], facts["files"]
    versions = manifest.get("versions", {})
    cost = [f"in {manifest['seconds']:,} s" if "seconds" in manifest else "", manifest.get("device"),
            f"peak {manifest['peak_memory_mib']:,} MiB" if "peak_memory_mib" in manifest else ""]
    code = [str(manifest.get("commit", ""))[:DIGEST_CHARACTERS],
            *(f"{name} {versions[name]}" for name in PACKAGES if name in versions)]
    rows = [("written", facts["last_written"]), ("made", _join_commas(cost)), ("code", _join_commas(code)),
            ("files", f"{files['count']:,}, {format_bytes(files['bytes'])}")]
    return format_columns((name, text) for name, text in rows if text)


def _join_commas(parts: list) -> str:
    return ", ".join(str(part) for part in parts if part)


def _ancestry_rows(nodes: list[dict], depth: int = 0) -> list[tuple]:
    """List rows of name, digest, verdict and path; inputs of inputs are indented."""
    rows = []
    for node in nodes:
        verdict = "as above" if node["repeated"] else "BROKEN: " * node["broken"] + node["verdict"]
        rows.append(("  " * depth + node["name"], (node["sha256"] or "-")[:DIGEST_CHARACTERS], verdict, node["path"]))
        rows += _ancestry_rows(node["inputs"], depth + 1)
    return rows


def _format_config(config: dict) -> list[str]:
    rows = ((key, value) for key, value in config.items() if key != "name")
    return [f"  {config['name']}", *format_columns(rows, indent=4)]


def _format_weights(weights: dict) -> list[str]:
    title = f"  {weights['name']}: {weights['parameters']:,} parameters, {format_bytes(weights['bytes'])}"
    tensors = [(f"{row['count']} x", " x ".join(map(str, row["shape"])) or "scalar", row["dtype"], row["name"])
               for row in weights["tensors"][:MAX_TENSORS]]
    hidden = len(weights["tensors"]) - MAX_TENSORS
    return [title, *format_columns(tensors, indent=4), *([f"    and {hidden} kinds more"] if hidden > 0 else [])]


def _table_title(table: dict) -> str:
    return (f"table {table['name']}: {table['rows']:,} rows, {format_bytes(table['bytes'])} "
            f"(files: {table['files']:,}, row groups: {table['row_groups']:,})")


def _format_table(table: dict) -> list[str]:
    """Format a line per column; bounds marked `all` are those of all rows, everything else that of the first rows."""
    lines = [("column", "type", f"first {table['sample_rows']:,} rows (all: of all rows)", "rows 1, 2 ...")]
    for column in table["columns"]:
        head = " | ".join(format_value(row[column["name"]], 18) for row in table["head"])
        lines.append((shorten(column["name"], 16), shorten(column["type"], 12), _format_statistics(column), head))
    return format_columns(lines) if table["columns"] else []


def _format_statistics(column: dict) -> str:
    unit = "" if column["of"] == "value" else f" {column['of']}"
    least, most = (format_value(column[bound]) if bound in column else "" for bound in ("least", "most"))
    parts = [f"{least} .. {most}{unit}" if least != most else f"{least}{unit}" if least else "",
             "(all)" if column["bounds_from"] == "all rows" else "",
             f"mean {format_value(column['mean'])}" if "mean" in column and least != most else "",
             f"{column['nulls']:,} null" if column["nulls"] else ""]
    return " ".join(filter(None, parts))


def _format_sample(facts: dict) -> list[str]:
    """Format the last sample answer of a training; for tables, the texts of the first row with the most text."""
    heads = [{key: value for key, value in table["head"][0].items() if isinstance(value, str)}
             for table in facts["tables"] if table["head"]]
    return format_named_texts(facts["sample"] or max(heads, key=lambda head: sum(map(len, head.values())), default={}))


def _format_note(stage: dict) -> str:
    problems = [*stage["stale"], *stage["problems"]]
    numbers = [f"{name} {format_value(value)}" for name, value in stage["metrics"].items()]
    return "; ".join(problems) or ", ".join(numbers)
