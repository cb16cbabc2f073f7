"""A stage's command line, validation, manifest and resume, derived once from the signature of its `run`.

    def run(config: Sft, out: Path, *, base: Path, pairs: Path) -> dict[str, float]

`config` is a section of the recipe, `out` the folder to fill, every keyword-only argument a named input: a Path, or
`list[str]` for several sources that may also be hub ids, or `dict[str, Path]` for folders by name, given as a repeated
`--flag NAME=FOLDER`. A keyword with a default is an option: an int (`processes`)
says how the work is done and does not change what comes of it, a str (`share`) says what is asked for. `beside`, which
is no flag, says where to put what is no part of the artifact.
"""

import argparse
import importlib.metadata
import inspect
import platform
import re
import resource
import subprocess
import sys
import time
import traceback
import typing
from collections.abc import Callable
from pathlib import Path

from stages.recipe import optional_packages, schema
from stages.recipe.recipe import DEFAULT_RECIPE, Recipe, load
from stages.runtime import artifact
from stages.runtime.manifest import headline

BESIDE = "beside"
INPUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_INPUT_FLAGS = {Path: {"metavar": "FOLDER", "help": "input artifact"},
                list[str]: {"metavar": "FOLDER", "nargs": "+", "help": "sources"},
                dict[str, Path]: {"metavar": "NAME=FOLDER", "action": "append",
                                  "help": "input artifact and its name; can be repeated"}}
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "bitsandbytes", "accelerate", "snakemake",
            "markdownify", "tokenizers", "pyarrow", "lxml", "numpy")


def main(run: Callable) -> None:
    """The command of a stage: parse, check, make, publish. Exits 1 with one line for a user's mistake."""
    arguments = parser_of(run).parse_args()
    try:
        make(run, *_orders(run, vars(arguments)))
    except (ValueError, OSError) as error:
        _say(f"{stage_of(run)}: error: {error}")
        _keep_traceback(artifact.folder_of(arguments.out))
        sys.exit(1)
    except KeyboardInterrupt:
        _say(f"{stage_of(run)}: interrupted; the same command goes on from its last checkpoint")
        sys.exit(130)


def parser_of(run: Callable) -> argparse.ArgumentParser:
    """Named flags only: --recipe, one for each input, --out, and one for each value of the stage's section."""
    parser = argparse.ArgumentParser(
        prog=f"python -m stages.{stage_of(run)}", description=inspect.getdoc(inspect.getmodule(run)),
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help=f"recipe file (default: {DEFAULT_RECIPE})")
    for name, hint in inputs_of(run).items():
        parser.add_argument(f"--{name}", required=True, **_INPUT_FLAGS[hint])
    for name, default in options_of(run).items():
        parser.add_argument(f"--{name}", default=default, type=type(default), help=f"option (default: {default})")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the artifact to make")
    parser.add_argument("--force", action="store_true", help="replace a finished artifact at --out")
    group = parser.add_argument_group(f"settings, laid over the recipe's section {section_name(run)!r}")
    for name, default, doc in schema.flatten(config_class(run)()):
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"set {name}", metavar="VALUE",
                           help=f"{doc} (published: {default})".replace("%", "%%"))
    return parser


def make(run: Callable, config: object, out: Path, inputs: dict, options: dict | None = None, force: bool = False
         ) -> None:
    """Run a stage into `<out>.partial` and publish it; do nothing when `out` holds just this already."""
    stage, options = stage_of(run), options or {}
    asked = {name: value for name, value in options.items() if isinstance(value, str)}
    order = {"stage": stage, "config": schema.result_settings(config),
             "inputs": {name: _described(source) for name, source in inputs.items()}, **asked}
    if force and (out / artifact.MANIFEST).exists():
        (out / artifact.MANIFEST).unlink()
    if artifact.is_complete(out, order):
        _say(f"{stage}: {out} is already made")
        return
    start = time.monotonic()
    with artifact.build(out, order) as partial:
        beside = {BESIDE: artifact.run_context(out, order)} if BESIDE in _keywords(run) else {}
        metrics = run(config, partial, **inputs, **options, **beside)
        manifest = order | {"metrics": metrics, "seconds": round(time.monotonic() - start, 2)} | _circumstances()
        artifact.publish(partial, out, manifest)
    telling = "".join(f", {key} {value:.4g}" for key, value in headline(metrics))
    _say(f"{stage}: {out} made in {manifest['seconds']:.0f} s{telling}")


def stage_of(run: Callable) -> str:
    return Path(inspect.getfile(run)).stem


def config_class(run: Callable) -> type:
    return typing.get_type_hints(run)["config"]


def section_name(run: Callable) -> str:
    """The recipe's section of this stage's settings."""
    return next(name for name, hint in typing.get_type_hints(Recipe).items() if hint is config_class(run))


def inputs_of(run: Callable) -> dict[str, type]:
    """Named inputs and their types: the keyword-only arguments without a default."""
    hints = typing.get_type_hints(run)
    return {name: hints[name] for name, p in _keywords(run).items() if p.default is p.empty}


def options_of(run: Callable) -> dict[str, int | str]:
    """Options and their defaults: the keyword-only arguments that have one, but for `beside`."""
    return {name: p.default for name, p in _keywords(run).items() if p.default is not p.empty and name != BESIDE}


def _keywords(run: Callable) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(run).parameters.items() if p.kind is p.KEYWORD_ONLY}


def _orders(run: Callable, given: dict) -> tuple[object, Path, dict, dict, bool]:
    config = getattr(load(given["recipe"]), section_name(run))
    flat = {key.removeprefix("set "): value for key, value in given.items() if key.startswith("set ")}
    flat = {name: value for name, value in flat.items() if value is not None}
    config = schema.override(config, schema.nested(flat), "command line", from_text=True)
    optional_packages.check_logging(config, section_name(run))
    parse = {Path: artifact.folder_of, list[str]: list, dict[str, Path]: parse_named_folders}
    inputs = {name: parse[hint](given[name]) for name, hint in inputs_of(run).items()}
    options = {name: given[name] for name in options_of(run)}
    return config, artifact.folder_of(given["out"]), inputs, options, given["force"]


def parse_named_folders(items: list[str]) -> dict[str, Path]:
    """Parse NAME=FOLDER items, in the order given; ValueError for a bad or a repeated name."""
    folders: dict[str, Path] = {}
    for item in items:
        name, _, folder = item.partition("=")
        if not INPUT_NAME.fullmatch(name) or not folder:
            raise ValueError(f"{item!r} is not NAME=FOLDER (a name has letters, digits, - and _)")
        if name in folders:
            raise ValueError(f"{item!r}: the name {name!r} is already taken by {folders[name]}")
        folders[name] = artifact.folder_of(folder)
    return folders


def _described(source: Path | list[str] | dict[str, Path]) -> dict | list[dict]:
    if isinstance(source, list):
        return [_described_source(item) for item in source]
    if isinstance(source, dict):
        return {name: _described(folder) for name, folder in source.items()}
    return {"path": str(source), "sha256": artifact.digest(source)}


def _described_source(source: str) -> dict:
    """A source that is not on this disk is taken for a hub id; the stage says so if it is not one."""
    return {"path": source, "sha256": artifact.digest(source) if Path(source).exists() else None}


def _circumstances() -> dict:
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    memory = sys.modules.get("stages.training.memory")  # it resets the process's peak to measure phases
    peak = peak if memory is None else max(peak, memory.peak_bytes() // 1024)
    return {"peak_memory_mib": round(peak / 1024), "device": gpu or f"cpu ({platform.machine()})",
            "threads": torch.get_num_threads() if torch is not None else 1, "python": platform.python_version(),
            "versions": {name: version for name in PACKAGES if (version := _version(name))}, "commit": _commit()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    here = Path(__file__).parent
    try:
        return subprocess.run(["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"],
                              capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _keep_traceback(out: Path) -> None:
    """One line for the person; the whole story beside what was begun, for whoever mends it."""
    partial = out.with_name(out.name + artifact.PARTIAL)
    if partial.is_dir():
        (partial / artifact.TRACEBACK).write_text(traceback.format_exc(), encoding="utf-8")
        _say(f"details: {partial / artifact.TRACEBACK}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
