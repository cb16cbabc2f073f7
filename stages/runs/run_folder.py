"""Turn `snakemake --config ...` into a checked recipe and a folder of its own in results/.

The folder is named after the recipe; a dump given on the command line adds its own name and a short hash of its path,
so that two dumps never share a folder. `results/<name>/recipe.yaml` is the resolved recipe that every stage reads.
"""

import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import yaml

from stages.artifacts import artifact
from stages.artifacts.staleness import LOCK
from stages.model_files.loadable import check_base_files
from stages.recipe import algorithms
from stages.recipe.checks import SCRATCH, check_names
from stages.recipe.recipe import (
    DEFAULT_RECIPE,
    PRETRAINED_RECIPE,
    REAL_SITES_RECIPE,
    SHARED,
    Recipe,
    load_recipe,
    read_mapping,
)
from stages.recipe.schema import SettingsError, flatten, suggest, to_dict
from stages.runs.dump_paths import check_are_dumps, dump_label, list_sources, normalize_sources, resolve_prompts
from stages.runs.placement import SEEDS, SeededRuns, parse_seeds
from stages.runtime.files import write_text

RESULTS = Path("results")
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,149}")
PLACE_KEYS = ("shares", "processes", "nodes")  # change how and where the work is done, not the result
CONFIG_KEYS = ("recipe", SEEDS, *PLACE_KEYS, *SHARED, *(field.name for field in fields(Recipe)))
FRONTIER_PAGE = "frontier.html"
# What a run without a named recipe says first; docs/results.md has the measurements.
FETCH = "A real base is one command away, and this dump then takes it: make smollm2 (93 MB, once)."
SCRATCH_BASE = (
    "What to expect: the base model is trained from scratch on this dump alone. Its answers have the site's style, "
    "not its knowledge.",
    "What it costs: 26 minutes of CPU time on one core for a site of 1,000 questions (measured on beer). "
    "More text takes longer, up to base.scratch.max_tokens.",
    "Any other pretrained model is an option: --config 'base={model: FOLDER-OR-HUB-ID}', "
    "for example HuggingFaceTB/SmolLM2-135M.",
)
PRETRAINED_BASE = (
    "Its learning rates suit models below a billion parameters: for a larger one, see configs/stackllama.yaml.",
)
_open_locks = []  # lock files of this process; the kernel releases the locks when it ends, however it ends


def resolve_recipe(config: dict, config_files: Sequence[Path] = (), runs_here: bool = True, plans: bool = False
                   ) -> Recipe:
    """Build one checked recipe from --config: recipe, dump, name, keys of SHARED, sections of the recipe.

    Args:
        config: the values of --config alone. Snakemake's own `config` also has those of the files, but not which file.
        config_files: of --configfile, which means the same as recipe=FILE.
        runs_here: whether this machine does the work, so that it needs what settings name, as a GPU.
        plans: whether the run is only planned: it needs no dump then, and no GPU.
    """
    for key, value in config.items():
        if key not in CONFIG_KEYS:
            raise SettingsError(f"--config: unknown key {key!r}{suggest_setting(key, value)}")
    if config.get("dump", "given") in (None, "", []):
        raise SettingsError("--config: dump= is empty: give dump=FOLDER-OR-ARCHIVE, or leave it out for the recipe's")
    values = _expand_base(config)
    for key in (*PLACE_KEYS, SEEDS):
        values.pop(key, None)
    dump, name = values.pop("dump", None), values.pop("name", None)
    named = _named_recipes(values, config_files)
    path = named[0] if named else _choose_default_recipe(dump, _named_model(values))
    recipe = load_recipe(path, values)
    for field in fields(recipe):
        check_names(getattr(recipe, field.name), field.name, runs_here=runs_here and not plans)
    if runs_here and not plans:
        _check_base(recipe)
    if recipe.prompts is not None:
        recipe = resolve_prompts(recipe, dump)
        dump = (recipe.prompts,) if "prompts" in values else None  # it names the run
    dumps = normalize_sources(recipe.dump if dump is None else dump)
    if not dumps and recipe.prompts is None and not plans:
        raise SettingsError(f"{path} names no dump: give one with --config dump=FOLDER-OR-ARCHIVE")
    if recipe.prompts is None:
        check_are_dumps(dumps)
    if name is None:
        name = recipe.name if dump is None else f"{recipe.name}-{dump_label(dumps)}"
    recipe = replace(recipe, name=check_name(str(name)), dump=() if recipe.prompts else dumps)
    if not plans:
        _check_folders(recipe.name)
        _check_same_dump(recipe)
    return recipe


def _choose_default_recipe(dump: str | Sequence[str] | None, model: str | None) -> str:
    """Return the recipe of a run that names none. The settings of the bundled site suit no other dump.

    Args:
        model: base.model, if the command line names one; None: the real base of PRETRAINED_RECIPE if it is there.
    """
    if dump is None or _absolute_paths(dump) == _absolute_paths(load_recipe(DEFAULT_RECIPE).dump):
        return DEFAULT_RECIPE
    is_pretrained = model != SCRATCH if model else Path(load_recipe(PRETRAINED_RECIPE).base.model).is_dir()
    return PRETRAINED_RECIPE if is_pretrained else REAL_SITES_RECIPE


def _named_model(values: dict) -> str | None:
    """Return base.model of --config's values, None if they name none."""
    base = values.get("base")
    return base.get("model") if isinstance(base, dict) else base


def introduce_default_recipe(config: dict, config_files: Sequence[Path], recipe: Recipe) -> str:
    """Say which recipe was chosen for a dump without one, what it costs and what to expect; empty if one was named.

    The first line is the command that fetches a real base, if the base is trained from scratch for want of one.
    """
    if "recipe" in config or config_files or "dump" not in config:
        return ""
    is_scratch = recipe.base.model == SCRATCH
    path = _choose_default_recipe(config["dump"], recipe.base.model)
    if path == DEFAULT_RECIPE:
        return ""
    fetch = [FETCH] if is_scratch and _named_model(config) is None else []
    words = f"No recipe is named: {path} is taken, for small real sites, with the base {recipe.base.model}."
    return "\n  ".join([*fetch, words, *(SCRATCH_BASE if is_scratch else PRETRAINED_BASE)])


def resolve_seeds(recipe: Recipe, config: dict, config_files: Sequence[Path] = (), runs_here: bool = True,
                  plans: bool = False) -> SeededRuns:
    """Build the recipe of each seed of --config, beneath the folder of the run; arguments as of resolve_recipe."""
    recipes = {}
    for seed in parse_seeds(config):
        seeded = resolve_recipe(config | {"seed": seed, "name": recipe.name}, config_files, runs_here, plans)
        # The questions are those of the run.
        recipes[seed] = replace(seeded, name=f"{recipe.name}-seed-{seed}", dump=recipe.dump, posts=recipe.posts)
    return SeededRuns(f"{RESULTS}/{recipe.name}", recipes)


def suggest_setting(key: str, value: object) -> str:
    """Return the end of an error message: how to give a value of a section, or else the most similar key."""
    name = key.replace("-", "_")
    sections = {field.name: {name for name, _, _ in flatten(getattr(Recipe(), field.name))}
                for field in fields(Recipe) if is_dataclass(getattr(Recipe(), field.name))}
    forms = [f"'{section}={{{setting}: {value}}}'" for section, settings in sections.items()
             for setting in sorted(settings) if name in (setting, f"{section}_{setting}")]
    return f": give it as {' or '.join(forms)}" if forms else suggest(key, CONFIG_KEYS)


def check_name(name: str) -> str:
    """Return the name of a run; SettingsError if it cannot be the name of a folder."""
    if not SAFE_NAME.fullmatch(name):
        raise SettingsError(f"name {name!r} cannot name a folder: it takes letters, digits and . _ + -, "
                            f"a letter or digit first, 150 at most")
    return name


def start_run(recipe: Recipe, forced: Sequence[str] = (), seeded: Mapping[Path, Recipe] | None = None) -> None:
    """Lock the run's folder until this process ends, write the resolved recipe into it, and prepare its artifacts.

    Args:
        forced: outputs of the jobs of --forcerun, --force and --forceall.
        seeded: of several seeds, the recipe of each by its folder.
    """
    folder = RESULTS / recipe.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "w")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _open_locks.append(lock)
        for run, resolved in {folder: recipe, **(seeded or {})}.items():
            write_recipe(run / "recipe.yaml", resolved)
        for manifest in (path for path in map(Path, forced) if path.name == artifact.MANIFEST):
            artifact.force(manifest.parent)
    except BlockingIOError:
        raise SettingsError(f"another snakemake is at work in {folder}") from None
    except OSError as error:
        raise SettingsError(f"{error.filename or folder} cannot be written ({error.strerror}): make {RESULTS}/ "
                            f"writable, or a link to a folder that is") from None


def write_recipe(path: Path, recipe: Recipe) -> Path:
    """Write a resolved recipe, unless the file already says the same; return its path."""
    text = yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True, width=120)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def format_summary(recipe: Recipe) -> str:
    """Return the short table of a report, or the path of a frontier's page, if that is the newest artifact.

    Otherwise say where the results are.
    """
    folder = RESULTS / recipe.name
    manifests = [*folder.glob("*/manifest.json"), *folder.glob("frontier/*/manifest.json")]
    newest = max(manifests, key=lambda manifest: manifest.stat().st_mtime_ns, default=None)
    report = folder if newest is None else newest.parent
    if (page := report / FRONTIER_PAGE).exists():
        return f"Frontier: {page}"
    metrics = report / "metrics.json"
    if report.name not in {algorithm.folder(stage) for algorithm in algorithms.ALGORITHMS.values()
                           for stage in (algorithms.REPORT, algorithms.SEEDS)} or not metrics.exists():
        return f"Results are in {folder}/"
    rows = json.loads(metrics.read_text(encoding="utf-8")).get("table", [])
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join(["", *lines, "", f"Report: {report / 'report.html'}"])


def _expand_base(values: dict) -> dict:
    """Return --config's values with base=MODEL, which means base={model: MODEL}, written out."""
    base = values.get("base")
    return values | ({"base": {"model": base}} if isinstance(base, str) and "=" not in base else {})


def _absolute_paths(dump: str | Sequence[str]) -> set[str]:
    return {os.path.abspath(source) for source in list_sources(dump)}


def _named_recipes(values: dict, config_files: Sequence[Path]) -> list:
    """Take the recipe, at most one, out of --config's values; a --configfile is one, too."""
    files = [os.path.relpath(file) for file in config_files]
    if "recipe" in values:
        files.append(values.pop("recipe"))
    if len(files) > 1:
        raise SettingsError(f"a run has one recipe, and --configfile FILE means --config recipe=FILE: "
                            f"give one of {', '.join(map(str, files))}")
    return files


def _check_base(recipe: Recipe) -> None:
    """Raise SettingsError for a base that the stage `base` could not load; SCRATCH and hub ids are no folders."""
    if recipe.base.model == SCRATCH:
        return
    try:
        check_base_files(recipe.base.model)
    except (ValueError, OSError) as error:
        raise SettingsError(f"base: model: {error}") from None


def _check_folders(name: str) -> None:
    for folder in (RESULTS, RESULTS / name):
        if os.path.lexists(folder) and not folder.is_dir():
            raise SettingsError(f"{folder} is no folder, and this run writes into it: move it away, or give another "
                                f"--config name=...")


def _check_same_dump(recipe: Recipe) -> None:
    path = RESULTS / recipe.name / "recipe.yaml"
    if not os.path.exists(path):
        return
    try:
        recorded = read_mapping(path)
        dumps, prompts = recorded.get("dump"), recorded.get("prompts")
        if not isinstance(dumps, list):
            raise SettingsError(f"{path} names no dump")
    except SettingsError as error:
        raise SettingsError(f"{error}. It only records what {path.parent} was made with: move it away, "
                            f"and it is written again") from None
    if (tuple(dumps), prompts) != (recipe.dump, recipe.prompts):
        other = f"other prompts ({prompts})" if prompts else f"another dump ({', '.join(map(str, dumps))})"
        raise SettingsError(f"{path.parent} holds a run on {other}: "
                            f"give --config name=..., or move that folder away")
