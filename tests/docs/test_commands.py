"""Check every command of README and docs: run it where that is cheap; else parse it with the program's own parser.

A block of commands that are not run here says what they need: <!-- needs: ... --> on the line before it.
"""

import argparse
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from snakemake.cli import get_argument_parser, parse_config

from stages import plan as plan_program
from stages.recipe.algorithms import ALGORITHMS, EVALUATE, REPORT, SEEDS
from stages.recipe.schema import SettingsError
from stages.recipe.sections.data import Pairs
from stages.runs import snakemake_words
from stages.runs.run_folder import resolve_recipe
from tests.helpers.base_files import write_base
from tests.helpers.documentation import ROOT, Command, read_blocks, read_code_spans, read_commands

COMMANDS = read_commands()
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = (ROOT / "constraints-extras.txt").read_text(encoding="utf-8")
SNAKEMAKE = [command for command in COMMANDS if command.words[0] == "snakemake"]
PYTHON = [command for command in COMMANDS if command.words[0] == "python"]
TORCHRUN = [command for command in COMMANDS if command.words[0] == "torchrun"]
OTHERS = [command for command in COMMANDS if command.words[0] not in ("snakemake", "python", "torchrun")]
PLANNED = [command for command in SNAKEMAKE if not command.needs]
RULES_OF_ALGORITHMS = {name for algorithm in ALGORITHMS.values()
                       for name in (algorithm.name, *map(algorithm.rule_name, (EVALUATE, REPORT, SEEDS)))}
MISTAKES = "docs/troubleshooting.md"  # its commands are wrong: tests/docs/test_troubleshooting.py


class Parsed(BaseException):
    """Raised instead of running: the program's parser took the command line."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the project by links, with nothing made yet; the example dumps stand for anybody's."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "beer.stackexchange.com.7z").touch()
    for name in ("folder-with-Posts.xml", "dump"):
        (folder / name).mkdir()
        (folder / name / "Posts.xml").touch()
    (folder / "mine").mkdir()
    for name, function in (("rules", "polite"), ("truth", "score")):  # functions of the reader's that the pages name
        (folder / f"mine/{name}.py").write_text(f"def {function}(questions, responses): ...\n")
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with results/demo and results/demo-nf4: small artifacts, with models that load."""
    from stages import pairs
    from stages.reporting.curves import COLUMNS, format_csv, list_points
    from stages.runtime.series import read_history
    from tests.helpers import finished_run, stackexchange_dumps, tiny_models
    folder = tmp_path_factory.mktemp("finished")
    run = folder / "results/demo"
    run.mkdir(parents=True)
    finished_run.artifacts(run)
    tiny_models.save_base(run / "base")
    shutil.copytree(run / "base", run / "ppo-merged")
    (run / "report").mkdir()
    (run / "report/curves.csv").write_text(format_csv(COLUMNS, list_points({"ppo": read_history(run / "ppo")})))
    for name in ("posts", "pairs"):
        shutil.rmtree(run / name)
    stackexchange_dumps.posts_from_rows(run, *(stackexchange_dumps.qa_rows(number) for number in range(1, 300, 3)))
    (run / "pairs").mkdir()
    pairs.run(Pairs(), run / "pairs", posts=run / "posts")
    shutil.copytree(run / "ppo", folder / "results/demo-nf4/ppo")
    return folder


def local(words) -> list[str]:
    return [word.replace("/path/to/", "") for word in words]


def config_of(words) -> dict:
    """Read --config as Snakemake does."""
    values = list(words)[list(words).index("--config") + 1:] if "--config" in words else []
    return parse_config(values[:next((i for i, word in enumerate(values) if word.startswith("--")), len(values))])


def take_plan_options(words: list[str], config: dict) -> bool:
    """Tell whether the command is `snakemake plan`; then its program parses its options, and they leave `config`."""
    if plans := snakemake_words.plans_only(words):
        plan_program.build_parser().parse_args(["--recipe", "demo", *snakemake_words.take_options(config)])
    return plans


def test_blocks_name_their_language():
    """So that no command hides from these tests in a block of another name."""
    odd = {(block.page, block.language) for block in read_blocks() if block.language not in ("bash", "python", "text")}
    assert not odd


@pytest.fixture(scope="module")
def dry_runs(checkout, snakemake_forks) -> dict[Command, tuple[int, str]]:
    runs = {command: snakemake_forks.run([*local(command.words[1:]), "-n", "--quiet"], checkout) for command in PLANNED}
    return {command: (run.code, run.text) for command, run in runs.items()}


@pytest.mark.parametrize("command", PLANNED, ids=str)
def test_snakemake_plans(command, dry_runs):
    code, text = dry_runs[command]
    assert code == 0, text


@pytest.mark.parametrize("command", [c for c in SNAKEMAKE if c.needs], ids=str)
def test_snakemake_with_needs_is_well_formed(command, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    if not Path("results/demo/sft-merged").exists():  # which a command may start from
        write_base(Path("results/demo/sft-merged"))
    words = local(command.words[1:])
    given = get_argument_parser().parse_args(words)
    config = config_of(words)
    resolve_recipe(config, plans=take_plan_options(words, config))
    assert all((ROOT / profile / "config.yaml").exists() for profile in given.profile or ())
    targets = {word for word in words if re.fullmatch(r"[a-z_]+", word) and words[words.index(word) - 1] != "--cores"}
    rules = "".join(path.read_text() for path in [ROOT / "Snakefile", *(ROOT / "workflow/rules").glob("*.smk")])
    assert targets <= RULES_OF_ALGORITHMS | set(re.findall(r"^ *rule (\w+):", rules, re.MULTILINE))


@pytest.mark.parametrize("command", [*PYTHON, *TORCHRUN], ids=str)
def test_program_takes_its_command_line(command, request, tmp_path, monkeypatch, capsys):
    """The program's own parser reads it: flags, choices, types, what is required. --help runs to its end."""
    if command.needs is None and "--help" not in command.words:
        run(command, request.getfixturevalue("finished"))
        return
    model = tmp_path / "results/demo/base/config.json"
    model.parent.mkdir(parents=True)
    model.touch()
    monkeypatch.chdir(tmp_path)
    words = command.words[1:]
    if command in TORCHRUN:
        words = words[words.index("-m"):]
    if parse(local(words), monkeypatch) == "help":
        assert "usage:" in capsys.readouterr().out


def parse(words: list[str], monkeypatch) -> str:
    """Parse a command line as its program does: 'parsed', or 'help' after --help; AssertionError with what is wrong."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, args=None, namespace=None):
        parse_args(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.syspath_prepend(str(ROOT))
    name, arguments = (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    try:
        if words[0] == "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(ROOT / name), run_name="__main__")
    except Parsed:
        return "parsed"
    except SystemExit as end:
        assert end.code in (0, None), f"{shlex.join(words)} is refused"
        return "help"
    raise AssertionError(f"{shlex.join(words)} parses nothing")


def run(command: Command, folder: Path) -> None:
    """Run it on the small finished run."""
    if command.words[1:3] == ("-m", "docs.recipe_page"):
        return  # tests/docs/test_pages.py compares what it writes
    readers = [("-m", "stages.inspect"), ("-m", "stages.compare")]
    assert command.words[1:3] in readers, f"{command}: say what it needs, with <!-- needs: ... -->"
    done = subprocess.run([sys.executable, *command.words[1:]], cwd=folder, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_other_commands_exist(command):
    program, *arguments = command.words
    if program == "make":
        check_make(arguments)
        assert command.needs or arguments == ["docs"], "say what it needs"  # test_pages.py builds the site
    elif program == "source":
        assert arguments == [".venv/bin/activate"] and "-m venv .venv" in MAKEFILE
    elif program in ("tensorboard", "wandb"):
        assert command.needs and f"\n{program}==" in EXTRAS
    elif program == "profiles/slurm/one_node.sh":
        assert command.needs and arguments[0] in ("start", "stop")
    else:
        known = ("pip", "chromium", "apt-get", "export", "tmux", "nohup", "systemd-run")
        assert command.needs and program in known, "a program that these tests do not know"


def check_make(words: list[str]) -> None:
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert re.search(rf"^{name} \?=" if is_variable else rf"^{name}:", MAKEFILE, re.MULTILINE), word


SPANS = [(page, span) for page, span in read_code_spans()
         if page != MISTAKES and re.match(r"(make|snakemake|python -m) \S|(add )?--config |[a-z]+=\{", span)]


@pytest.mark.parametrize(("page", "span"), SPANS, ids=[f"{page}: {span}" for page, span in SPANS])
def test_commands_in_the_text_are_well_formed(page, span, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    words = shlex.split(span if not re.match(r"[a-z]+=\{", span) else f"--config {shlex.quote(span)}")
    if words[0] == "make":
        check_make(words[1:])
    elif words[0] == "python":
        assert (ROOT / (words[2].replace(".", "/") + ".py")).exists()
        if words[3:]:
            parse(words[1:], monkeypatch)
    else:
        config = {name: value for name, value in config_of(words).items() if name != "dump"}
        plans = take_plan_options(words, config)
        try:
            resolve_recipe(config | {"dump": "data/demo/demo.stackexchange.com.7z"}, plans=plans)
        except SettingsError as error:
            raise AssertionError(f"{page}: {span}: {error}") from None


def test_python_blocks_run(finished, monkeypatch):
    blocks = [block for block in read_blocks() if block.language == "python"]
    assert blocks
    monkeypatch.chdir(finished)
    monkeypatch.setenv("HF_HOME", str(finished / "cache"))
    save_adapter(finished / "results/demo/base", finished / "results/demo/sft")
    names: dict = {}
    for block in blocks:
        exec(compile(block.text, block.page, "exec"), names)
    assert {"pairs", "splits", "posts", "model", "adapter"} <= names.keys()
    assert set(names["splits"]) == {"finetune", "reward", "rl", "evaluation"}
    assert (finished / "reward.svg").stat().st_size > 1000


def save_adapter(base: Path, out: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(out)
