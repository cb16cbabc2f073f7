"""Run a stage as a command: parse its flags, check them, build the artifact, publish it.

The command line comes from the signature of the stage's `run` (command_signature.py). A program begins with

    if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
        main(__file__)

so that `--help` and mistakes answer at once. `main` imports the program as a module and never returns.
"""

import argparse
import errno
import importlib
import inspect
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from stages.recipe import schema
from stages.recipe.lookups import check_names
from stages.recipe.recipe import DEFAULT_RECIPE, Recipe, load_recipe
from stages.render.units import format_bytes
from stages.runtime import artifact, finished, meeting, processes
from stages.runtime.command_signature import CONTEXT, OPTIONAL_INPUT, Signature, read_signature
from stages.runtime.environment import describe_environment, let_idle_threads_sleep
from stages.runtime.manifest import headline_metrics, list_input_sources
from stages.runtime.verification import verify_artifacts

INPUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
INPUT_FLAGS = {
    "Path": {"metavar": "FOLDER", "help": "input artifact"},
    "list[str]": {"metavar": "FOLDER", "nargs": "+", "help": "sources"},
    "dict[str, Path]": {"metavar": "NAME=FOLDER", "action": "append",
                        "help": "input artifact and its name; can be repeated"},
    OPTIONAL_INPUT: {"metavar": "FOLDER", "nargs": "?", "help": "input artifact; may be left out, or its folder"},
}
MEMORY_WORDS = r"(?i)out of memory|can't allocate memory|cannot allocate memory"
MIN_FREE_BYTES = 1 << 20  # with less, an error of a library that names no cause is that of a full disk
TEXT_CHARACTERS = 200
SETTING = "set "  # prefix of the settings among the parsed arguments


def main(file: str) -> None:
    """Run the command of the program `file` and exit: with 1 and one line for a user's mistake."""
    signature = read_signature(Path(file))
    arguments = vars(build_parser(signature).parse_args())
    let_idle_threads_sleep()
    out = artifact.artifact_folder(arguments["out"])
    place = processes.take_place()
    try:
        count = meeting.count_processes(signature.stage, arguments.get("processes", 1), place)
        if count > place.count:
            logs = [processes.rank_log(out, rank) for rank in range(count)]
            sys.exit(processes.launch(count, sys.orig_argv[1:], signature.stage, logs))
        if not processes.is_main():
            processes.log_to_file(processes.rank_log(out, place.rank))
        _make(signature.stage, lambda: importlib.import_module(signature.module).run,
              *_parse_arguments(signature, arguments))
    except KeyboardInterrupt:
        _print(f"{signature.stage}: interrupted; the same command continues from the last checkpoint")
        sys.exit(130)
    except Exception as error:
        message = describe_failure(error, out)
        meeting.report_failure(message or f"{type(error).__name__}: {error}")
        if message is None:
            raise
        _print(f"{signature.stage}: error: {message}")
        if processes.is_main():
            _save_traceback(out)
        sys.exit(1)
    sys.exit(0)


def describe_failure(error: Exception, out: Path) -> str | None:
    """Describe in one line what a user or the machine is the cause of; None for a mistake in this program."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or re.search(MEMORY_WORDS, text):
        return f"out of memory: take smaller batches or microbatches, or a machine with more ({text[:TEXT_CHARACTERS]})"
    folder = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.is_dir())
    free_bytes = shutil.disk_usage(folder).free
    is_of_safetensors = type(error).__name__ == "SafetensorError"  # by name: an import would delay every command
    storing = is_of_safetensors or isinstance(error, OSError | RuntimeError)
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or (storing and free_bytes < MIN_FREE_BYTES):
        file = getattr(error, "filename", None) or folder
        return (f"no space left on the disk of {file} (free: {format_bytes(free_bytes)}): make room, and the same "
                f"command continues from the last checkpoint")
    if is_of_safetensors:
        return f"a file of weights cannot be read or written: {text}"
    return str(error) if isinstance(error, ValueError | OSError) else None


class _Parser(argparse.ArgumentParser):
    """A parser that takes --learning_rate for --learning-rate, and answers a mistyped flag with the nearest one."""

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_hyphenate(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        super().error(message + (schema.suggest(unknown[1], flags, else_all=False) if unknown else ""))


def _hyphenate(word: str) -> str:
    flag, equals, value = word.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def build_parser(signature: Signature) -> argparse.ArgumentParser:
    """Build the parser: --recipe, one flag per input and option, --out, and one per setting of the stage's section."""
    parser = _Parser(
        prog=f"python -m stages.{signature.stage}", description=signature.description,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help=f"recipe file (default: {DEFAULT_RECIPE})")
    for name, hint in signature.inputs.items():
        parser.add_argument(f"--{name}", required=hint != OPTIONAL_INPUT, **INPUT_FLAGS[hint])
    for name, default in signature.options.items():
        parser.add_argument(f"--{name}", default=default, type=type(default), help=f"option (default: {default})")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the artifact to make")
    if signature.stage in meeting.IN_SEVERAL_PROCESSES:
        parser.add_argument("--processes", default=1, type=int, help="processes of this machine that share the rows; "
                            "changes how long it takes, not the result (default: 1)")
    parser.add_argument("--force", action="store_true", help="replace a finished artifact at --out")
    parser.add_argument("--verify", action="store_true",
                        help="hash every file of the inputs; without it, those that changed since they were verified")
    group = parser.add_argument_group(f"settings, overriding section {signature.section!r} of the recipe")
    section = getattr(Recipe(), signature.section)
    ranges = schema.list_ranges(section)
    for name, default, doc in schema.flatten(section):
        within = f"{ranges[name]}; " if name in ranges else ""
        form = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"metavar": "VALUE"}
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"{SETTING}{name}", default=None, **form,
                           help=f"{doc} ({within}published: {default})".replace("%", "%%"))
    return parser


def make(run: Callable, config: object, out: Path, inputs: dict, options: dict | None = None, force: bool = False,
         verify: bool = False) -> None:
    """Build the artifact of a stage; do nothing if `out` is already complete.

    Args:
        run: the stage's function.
        config: its section of the recipe.
        inputs, options: keyword arguments of `run`.
        force: replace a finished artifact.
        verify: hash every file of the inputs, changed or not.
    """
    _make(Path(inspect.getfile(run)).stem, lambda: run, config, out, inputs, options or {}, force, verify)


def _make(stage: str, load_run: Callable[[], Callable], config: object, out: Path, inputs: dict, options: dict,
          force: bool, verify: bool) -> None:
    request = {"stage": stage, "config": schema.result_settings(config),
               "inputs": {name: _identify(source) for name, source in inputs.items() if source is not None},
               **{name: value for name, value in options.items() if isinstance(value, str)}}
    if not processes.is_main():
        _assist(load_run, config, out, inputs, options, request)
        return
    if force:
        artifact.check_replaceable(out)
        finished.copy_manifest(out)
    elif artifact.is_complete(out, request):
        _print(f"{stage}: {out} is already made")
        meeting.share_folder(None)
        return
    elif artifact.restore(out, request):
        _print(f"{stage}: {out} was made with these settings and inputs before: restored from {finished.OLD}/")
        meeting.share_folder(None)
        return
    paths = [Path(source["path"]) for source in list_input_sources(request["inputs"]).values()]
    verify_artifacts(paths, out.parent / "logs", always=verify)
    with artifact.build(out, request) as partial:
        start = time.monotonic()  # imports, of torch above all, are part of what a stage costs
        processes.remove_private_copies(partial)
        meeting.share_folder(partial)
        metrics = _run(load_run, config, partial, out, inputs, options, request)
        seconds = round(time.monotonic() - start, 2)
        old = artifact.publish(partial, out, request | {"metrics": metrics, "seconds": seconds}
                               | describe_environment())
    numbers = "".join(f", {name} {value:.4g}" for name, value in headline_metrics(metrics))
    _print(f"{stage}: {out} made in {seconds:.0f} s{numbers}")
    if old:
        _print(f"{stage}: the finished one of other settings or inputs is now {old}; it comes back with its settings")


def _run(load_run: Callable[[], Callable], config: object, folder: Path, out: Path, inputs: dict, options: dict,
         request: dict) -> dict:
    """Let the stage fill `folder`; return its metrics."""
    meeting.wait_for_all()  # all have their folder: from here on it changes
    run = load_run()
    takes_context = CONTEXT in inspect.signature(run).parameters
    context = {CONTEXT: artifact.RunContext.for_artifact(out, request)} if takes_context else {}
    return run(config, folder, **inputs, **options, **context)


def _assist(load_run: Callable[[], Callable], config: object, out: Path, inputs: dict, options: dict, request: dict
            ) -> None:
    """Compute a share of the rows for the process that builds the artifact; nothing if it is already made."""
    if folder := meeting.share_folder(None):
        with processes.private_copy(folder, processes.place().rank) as copy:
            _run(load_run, config, copy, out, inputs, options, request)


def _parse_arguments(signature: Signature, arguments: dict) -> tuple[object, Path, dict, dict, bool, bool]:
    """Return settings, output folder, inputs, options, whether to replace an artifact, and whether to hash all."""
    settings = {name.removeprefix(SETTING): value for name, value in arguments.items()
                if name.startswith(SETTING) and value is not None}
    config = getattr(load_recipe(arguments["recipe"]), signature.section)
    config = schema.override(config, schema.nest(settings), "command line", from_text=True)
    check_names(config, signature.section, runs_here=True)
    parse = {"Path": artifact.artifact_folder, OPTIONAL_INPUT: artifact.artifact_folder, "list[str]": list,
             "dict[str, Path]": parse_named_folders}
    inputs = {name: parse[hint](arguments[name]) for name, hint in signature.inputs.items()
              if arguments[name] is not None}
    options = {name: arguments[name] for name in signature.options}
    return config, artifact.artifact_folder(arguments["out"]), inputs, options, arguments["force"], arguments["verify"]


def parse_named_folders(items: list[str]) -> dict[str, Path]:
    """Parse NAME=FOLDER items, in the order given; ValueError for a bad or a repeated name."""
    folders: dict[str, Path] = {}
    for item in items:
        name, _, folder = item.partition("=")
        if not INPUT_NAME.fullmatch(name) or not folder:
            raise ValueError(f"{item!r} is not NAME=FOLDER (a name has letters, digits, - and _)")
        if name in folders:
            raise ValueError(f"{item!r}: the name {name!r} is already taken by {folders[name]}")
        folders[name] = artifact.artifact_folder(folder)
    return folders


def _identify(source: Path | list[str] | dict[str, Path]) -> dict | list[dict]:
    """Describe an input by path and SHA-256. A source that does not exist here is taken for a hub id."""
    if isinstance(source, list):
        return [{"path": item, "sha256": artifact.digest(item) if Path(item).exists() else None} for item in source]
    if isinstance(source, dict):
        return {name: _identify(folder) for name, folder in source.items()}
    return {"path": str(source), "sha256": artifact.digest(source)}


def _save_traceback(out: Path) -> None:
    """Write the traceback into the partial folder: the terminal shows only one line."""
    partial = out.with_name(out.name + artifact.PARTIAL)
    if partial.is_dir():
        with suppress(OSError):  # a full disk
            (partial / artifact.TRACEBACK).write_text(traceback.format_exc(), encoding="utf-8")
            _print(f"details: {partial / artifact.TRACEBACK}")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
