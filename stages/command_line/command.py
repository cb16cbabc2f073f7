"""Run a stage as a command: parse its flags, check them, build the artifact, publish it.

The command line comes from the signature of the stage's `run` (option_parser.py). A program begins with

    if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
        main(__file__)

so that `--help` and mistakes answer at once. `main` (start.py) calls `run_command`, which imports the program as a
module, and never returns.
"""

import importlib
import inspect
import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stages.artifacts import artifact
from stages.artifacts.artifact import MANIFEST, ArtifactError, RunContext, artifact_folder
from stages.artifacts.manifest import headline_metrics, list_input_sources, verify_artifacts
from stages.command_line import option_parser
from stages.command_line.failures import describe_failure, save_traceback
from stages.command_line.option_parser import CONTEXT, SETTING, Signature, build_parser, read_signature
from stages.recipe import schema
from stages.recipe.checks import check_names
from stages.recipe.recipe import load_recipe
from stages.recipe.sections.shared import count_units
from stages.runtime import processes
from stages.runtime.environment import (
    describe_environment,
    digest_code,
    fit_precision,
    let_idle_threads_sleep,
    silence_missing_kernel,
)
from stages.runtime.files import read_json_object
from stages.runtime.stage_lines import begin_stage, print_line

# Input -> stages that make it. Every other input is a model.
MADE_BY = {"posts": ("posts",), "pairs": ("pairs", "gather"), "shares": ("pairs",),
           "evaluate": ("evaluate", "evaluate_prompts")}  # its name for own prompts in older versions
PROMPTS = ("prompts", "file")  # a plain file or folder
INPUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
NO_MODELS = ("posts", "pairs", "gather", "evaluate", "evaluate_prompts", "evaluate_reward", "report", "pool_seeds")


def run_command(file: Path) -> None:
    """Run the command of the program `file`; exit with 1 and one line for a user's mistake."""
    signature = read_signature(file)
    arguments = vars(build_parser(signature, option_parser.settings_for_help(signature, sys.argv[1:])).parse_args())
    let_idle_threads_sleep()
    silence_missing_kernel()
    out = artifact_folder(arguments["out"])
    place = processes.take_place()
    try:
        parsed = _parse_arguments(signature, arguments)
        units = count_units(parsed[0])
        count = processes.count_processes(signature.stage, arguments.get("processes"), units, place)
        if processes.must_launch(count, place):
            # Here, since each process takes a second to start; they hash.
            check_input_kinds(list_input_sources(_identify(parsed[2], artifact.check_input)))
            logs = [processes.rank_log(out, rank) for rank in range(count)]
            sys.exit(processes.launch(count, sys.orig_argv[1:], signature.stage, logs))
        processes.limit_threads(signature.stage, units)
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
               "inputs": _identify(inputs),
               **{name: value for name, value in options.items() if isinstance(value, str)}}
    context = RunContext(out.parent / "logs", out.name, artifact.digest_request(request))
    fill = partial(_run, load_run, config, inputs | options, context)
    if not processes.is_main():  # it computes a share of the rows for the process that builds the artifact
        if folder := processes.share_folder(None):
            with processes.private_copy(folder, processes.place().rank) as copy:
                fill(copy)
        return
    if force:
        artifact.check_replaceable(out)
    elif artifact.is_complete(out, request):
        print_line(f"{stage}: {out} is already made")
        processes.share_folder(None)
        return
    elif artifact.restore(out, request):
        print_line(f"{stage}: {out} was made with these settings and inputs before: restored from {artifact.OLD}/")
        processes.share_folder(None)
        return
    sources = list_input_sources(request["inputs"])
    check_input_kinds(sources)
    verify_artifacts([Path(source["path"]) for source in sources.values()], out.parent / "logs", always=verify)
    with artifact.build(out, request, digest_code()) as folder:
        result = artifact.load_result(folder)
        start = time.monotonic()  # imports, of torch above all, are part of what a stage costs
        processes.remove_private_copies(folder)
        processes.share_folder(folder if result is None else None)
        if result is None:
            metrics = fill(folder)
            seconds = round(time.monotonic() - start, 2)
            result = {"metrics": metrics, "seconds": seconds} | describe_environment()
            artifact.save_result(folder, result)
        old = artifact.publish(folder, out, request | result)
    numbers = "".join(f", {name} {value:.4g}" for name, value in headline_metrics(result["metrics"]))
    print_line(f"{stage}: {out} made in {result['seconds']:.0f} s{numbers}")
    if old:
        _report_old(stage, out, old)


def _report_old(stage: str, out: Path, old: Path) -> None:
    """Say where the replaced artifact is, and delete those that are too many there."""
    print_line(f"{stage}: the finished one of other settings or inputs is now {old}; it comes back with its settings")
    for excess in artifact.list_old(out, old)[:-artifact.MAX_OLD]:
        print_line(f"{stage}: deleting {excess}: {artifact.OLD}/ holds the last {artifact.MAX_OLD} of {out.name} (give "
               f"another name= to keep all)")
        shutil.rmtree(excess, ignore_errors=True)


def _run(load_run: Callable[[], Callable], config: object, arguments: dict, context: RunContext, folder: Path) -> dict:
    """Let the stage fill `folder`; return its metrics."""
    processes.wait_for_all()  # all have their folder: from here on it changes
    run = load_run()
    takes_context = CONTEXT in inspect.signature(run).parameters
    return run(fit_precision(config), folder, **arguments, **({CONTEXT: context} if takes_context else {}))


def _parse_arguments(signature: Signature, arguments: dict) -> tuple[object, Path, dict, dict, bool, bool]:
    """Return settings, output folder, inputs, options, whether to replace an artifact, and whether to hash all."""
    settings = {name.removeprefix(SETTING): value for name, value in arguments.items()
                if name.startswith(SETTING) and value is not None}
    config = getattr(load_recipe(arguments["recipe"]), signature.section)
    config = schema.override(config, schema.nest(settings), "command line", from_text=True)
    check_names(config, signature.section, runs_here=True)
    parse = {"Path": artifact_folder, "list": list, "dict": parse_named_folders}
    inputs = {name: parse[re.match(r"\w+", hint)[0]](arguments[name]) for name, hint in signature.inputs.items()
              if arguments[name] is not None}
    options = {name: arguments[name] for name in signature.options}
    return config, artifact_folder(arguments["out"]), inputs, options, arguments["force"], arguments["verify"]


def _identify(
    source: Path | list[str] | dict, digest: Callable[[str | Path], str | None] = artifact.digest
) -> dict | list[dict]:
    """Describe an input, or several by name, by path and SHA-256. Of a list, what does not exist is taken for a hub id.
    """
    if isinstance(source, list):
        return [{"path": item, "sha256": digest(item) if Path(item).exists() else None} for item in source]
    if isinstance(source, dict):
        return {name: _identify(folder, digest) for name, folder in source.items() if folder is not None}
    return {"path": str(source), "sha256": digest(source)}


def check_input_kinds(sources: dict[str, dict]) -> None:
    """Raise ArtifactError for the first input that is an artifact of another kind. What has no manifest passes.

    Args:
        sources: {label: {path, sha256}} of list_input_sources; of several in one input, labels are NAME[0] or NAME.KEY.
    """
    for label, source in sources.items():
        name, path = label.partition("[")[0].partition(".")[0], source["path"]
        stage = (read_json_object(Path(path) / MANIFEST) or {}).get("stage")
        wanted = MADE_BY.get(name)
        if stage is not None and name in PROMPTS:
            raise ArtifactError(f"--{name}: {path} was made by {stage}: give a file of your own prompts, or the "
                                f"folder that pairs made as --pairs")
        if stage is None or name == "dump":
            continue
        if wanted and stage not in wanted:
            raise ArtifactError(f"--{name}: {path} was made by {stage}: give the folder that {wanted[0]} made")
        if not wanted and stage in NO_MODELS:
            raise ArtifactError(f"--{name}: {path} was made by {stage} and holds no model: give a model's folder")


def parse_named_folders(items: list[str]) -> dict[str, Path]:
    """Parse NAME=FOLDER items, in the order given; ValueError for a bad or a repeated name."""
    folders: dict[str, Path] = {}
    for item in items:
        name, _, folder = item.partition("=")
        if not INPUT_NAME.fullmatch(name) or not folder:
            raise ValueError(f"{item!r} is not NAME=FOLDER (a name has letters, digits, - and _)")
        if name in folders:
            raise ValueError(f"{item!r}: the name {name!r} is already taken by {folders[name]}")
        folders[name] = artifact_folder(folder)
    return folders
