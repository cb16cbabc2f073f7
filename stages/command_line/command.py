"""Run a stage as a command: parse its flags, check them, build the artifact, publish it.

The command line comes from the signature of the stage's `run` (command_signature.py). A program begins with

    if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
        main(__file__)

so that `--help` and mistakes answer at once. `main` (start.py) calls `run_command`, which imports the program as a
module, and never returns.
"""

import argparse
import dataclasses
import importlib
import inspect
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stages.artifacts import artifact, finished
from stages.artifacts.manifest import headline_metrics, list_input_sources
from stages.artifacts.verification import verify_artifacts
from stages.command_line.command_signature import (
    CONTEXT,
    OPTIONAL_FOLDERS,
    OPTIONAL_INPUT,
    OPTIONAL_TYPES,
    Signature,
    read_signature,
)
from stages.command_line.failures import describe_failure, save_traceback
from stages.command_line.input_kinds import check_input_kinds, parse_named_folders
from stages.command_line.memory_limit import run_in_child_if_limited
from stages.command_line.option_parser import OptionParser
from stages.command_line.precision import fit_precision
from stages.recipe import schema
from stages.recipe.lookups import check_names
from stages.recipe.recipe import DEFAULT_RECIPE, Recipe, load_recipe
from stages.recipe.type_names import placeholder
from stages.recipe.work_units import count_units
from stages.runtime import processes, progress_file
from stages.runtime.environment import describe_environment, digest_code, let_idle_threads_sleep, silence_missing_kernel
from stages.runtime.stage_lines import begin_stage, print_line

INPUT_FLAGS = {
    "Path": {"metavar": "FOLDER", "help": "input artifact"},
    "list[str]": {"metavar": "FOLDER", "nargs": "+", "help": "sources"},
    "dict[str, Path]": {"metavar": "NAME=FOLDER", "action": "append",
                        "help": "input artifact and its name; can be repeated"},
    OPTIONAL_FOLDERS: {"metavar": "NAME=FOLDER", "action": "append",
                       "help": "input artifact and its name; can be repeated, or left out"},
    OPTIONAL_INPUT: {"metavar": "FOLDER", "nargs": "?", "help": "input artifact; may be left out, or its folder"},
}
SETTING = "set "  # prefix of the settings among the parsed arguments


def run_command(file: Path) -> None:
    """Run the command of the program `file`; exit with 1 and one line for a user's mistake."""
    signature = read_signature(file)
    arguments = vars(build_parser(signature, _settings_for_help(signature, sys.argv[1:])).parse_args())
    let_idle_threads_sleep()
    silence_missing_kernel()
    out = artifact.artifact_folder(arguments["out"])
    place = processes.take_place()
    try:
        parsed = _parse_arguments(signature, arguments)
        units = count_units(parsed[0])
        count = processes.count_processes(signature.stage, arguments.get("processes"), units, place)
        if count > place.count:
            logs = [processes.rank_log(out, rank) for rank in range(count)]
            sys.exit(processes.launch(count, sys.orig_argv[1:], signature.stage, logs))
        processes.limit_threads(signature.stage, units)
        if count == 1:
            run_in_child_if_limited(signature.stage)
        if processes.is_main():
            begin_stage(out)
        else:
            processes.log_to_file(processes.rank_log(out, place.rank))
        _make(signature.stage, lambda: importlib.import_module(signature.module).run, *parsed)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        message = describe_failure(processes.name_lost_process(error), out)
        processes.report_failure(message or f"{type(error).__name__}: {error}")
        if message is None:
            raise
        details = save_traceback(out) if processes.is_main() else ""
        print_line(f"{signature.stage}: error: {message}{details}")
        sys.exit(1)


def build_parser(signature: Signature, here: object | None = None) -> argparse.ArgumentParser:
    """Build the parser: --recipe, one flag per input and option, --out, and one per setting of the stage's section.

    Args:
        here: settings of the stage in the recipe that is given, for --help.
    """
    parser = OptionParser(
        prog=f"python -m stages.{signature.stage}", description=signature.description,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help=f"recipe file (default: {DEFAULT_RECIPE})")
    for name, hint in signature.inputs.items():
        parser.add_argument(f"--{name}", required=hint not in OPTIONAL_TYPES, **INPUT_FLAGS[hint])
    for name, default in signature.options.items():
        parser.add_argument(f"--{name}", default=default, type=type(default), help=f"option (default: {default})")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the artifact to make")
    if signature.stage in processes.IN_SEVERAL_PROCESSES:
        parser.add_argument("--processes", default=None, type=int, help="processes of this machine that share the "
                            "work; changes how long it takes, not the result (default: on a CPU one for each core, "
                            "if a step has so many microbatches and 2 GiB are free for each; else 1)")
    parser.add_argument("--force", action="store_true", help="replace a finished artifact at --out")
    parser.add_argument("--verify", action="store_true",
                        help="hash every file of the inputs; without it, those that changed since they were verified")
    group = parser.add_argument_group(f"settings, overriding section {signature.section!r} of the recipe")
    section = getattr(Recipe(), signature.section)
    published, own = ({name: value for name, value, _ in schema.flatten(x)} for x in (section, here or section))
    for name, field, _ in schema.list_fields(section):
        switch = {"action": argparse.BooleanOptionalAction}
        form = switch if field.type is bool else {"metavar": placeholder(field.type)}
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"{SETTING}{name}", default=None, **form,
                           help=_describe_setting(field, published[name], own[name]).replace("%", "%%"))
    return parser


def _describe_setting(field: dataclasses.Field, published: object, own: object) -> str:
    """Describe a setting for --help: its meaning, its range, its published value and the recipe's own."""
    within = f"{field.metadata['within']}; " if field.metadata["within"] else ""
    here = "" if own == published else f", in this recipe: {own}"
    return f"{field.metadata['doc']} ({within}published: {published}{here})"


def _settings_for_help(signature: Signature, words: list[str]) -> object | None:
    """Return the stage's settings in the recipe that the command line names, if it asks for help."""
    if not {"-h", "--help"} & set(words):
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--recipe", default=DEFAULT_RECIPE)
    with suppress(schema.SettingsError, argparse.ArgumentError):  # then help shows the published values alone
        return getattr(load_recipe(parser.parse_known_args(words)[0].recipe), signature.section)


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
        print_line(f"{stage}: {out} is already made")
        processes.share_folder(None)
        return
    elif artifact.restore(out, request):
        print_line(f"{stage}: {out} was made with these settings and inputs before: restored from {finished.OLD}/")
        processes.share_folder(None)
        return
    sources = list_input_sources(request["inputs"])
    check_input_kinds(sources)
    verify_artifacts([Path(source["path"]) for source in sources.values()], out.parent / "logs", always=verify)
    with artifact.build(out, request, digest_code()) as partial, progress_file.follow(out):
        result = artifact.load_result(partial)
        if result is None:
            start = time.monotonic()  # imports, of torch above all, are part of what a stage costs
            processes.remove_private_copies(partial)
            processes.share_folder(partial)
            metrics = _run(load_run, config, partial, out, inputs, options, request)
            seconds = round(time.monotonic() - start, 2)
            result = {"metrics": metrics, "seconds": seconds} | describe_environment()
            artifact.save_result(partial, result)
        else:
            processes.share_folder(None)
        old = artifact.publish(partial, out, request | result)
    numbers = "".join(f", {name} {value:.4g}" for name, value in headline_metrics(result["metrics"]))
    print_line(f"{stage}: {out} made in {result['seconds']:.0f} s{numbers}")
    if old:
        _report_old(stage, out, old)


def _report_old(stage: str, out: Path, old: Path) -> None:
    """Say where the replaced artifact is, and delete those that are too many there."""
    print_line(f"{stage}: the finished one of other settings or inputs is now {old}; it comes back with its settings")
    for excess in finished.list_excess(out, old):
        print_line(f"{stage}: deleting {excess}: {finished.OLD}/ holds the last {finished.MAX_OLD} of {out.name} (give "
               f"another name= to keep all)")
        finished.delete_old(excess)


def _run(load_run: Callable[[], Callable], config: object, folder: Path, out: Path, inputs: dict, options: dict,
         request: dict) -> dict:
    """Let the stage fill `folder`; return its metrics."""
    processes.wait_for_all()  # all have their folder: from here on it changes
    run = load_run()
    takes_context = CONTEXT in inspect.signature(run).parameters
    context = {CONTEXT: artifact.RunContext.for_artifact(out, request)} if takes_context else {}
    return run(fit_precision(config), folder, **inputs, **options, **context)


def _assist(load_run: Callable[[], Callable], config: object, out: Path, inputs: dict, options: dict, request: dict
            ) -> None:
    """Compute a share of the rows for the process that builds the artifact; nothing if it is already made."""
    if folder := processes.share_folder(None):
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
             "dict[str, Path]": parse_named_folders, OPTIONAL_FOLDERS: parse_named_folders}
    inputs = {name: parse[hint](arguments[name]) for name, hint in signature.inputs.items()
              if arguments[name] is not None}
    options = {name: arguments[name] for name in signature.options}
    return config, artifact.artifact_folder(arguments["out"]), inputs, options, arguments["force"], arguments["verify"]


def _identify(source: Path | list[str] | dict[str, Path]) -> dict | list[dict]:
    """Describe an input by path and SHA-256. A source that does not exist here is taken for a hub id."""
    if isinstance(source, list):
        return [{"path": item, "sha256": artifact.digest(item) if Path(item).exists() else None} for item in source]
    if isinstance(source, dict):
        return {name: _identify(folder) for name, folder in source.items()}
    return {"path": str(source), "sha256": artifact.digest(source)}
