"""The command line of a stage, which comes from the signature of its `run`."""

import dataclasses
import errno
import importlib
import inspect
import json
import os
import re
import resource
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.artifacts import artifact, lineage
from stages.artifacts.manifest import read_record
from stages.command_line import command, failures
from stages.command_line.option_parser import read_signature, settings_for_help, type_name
from stages.recipe import schema
from stages.recipe.recipe import Recipe, load_recipe
from stages.recipe.sections.models import Merge
from tests.helpers.ranges import list_ranges

ROOT = Path(__file__).parents[2]
NOT_STAGES = (  # they make no artifacts
    "__init__", "stages", "inspect", "compare", "plan", "demo", "fetch_smollm2", "export_gguf")
HEAVY = r"\b(torch|transformers|peft|pyarrow|numpy)$"  # as -X importtime ends its lines
STAGES = sorted(path.stem for path in (ROOT / "stages").glob("*.py") if path.stem not in NOT_STAGES)
PROBE = '''"""Probe: what a stage receives."""
from stages.command_line.start import main

if __name__ == "__main__":
    main(__file__)

from pathlib import Path
from types import SimpleNamespace
from stages.recipe.sections.models import Merge

def run(config: Merge, out: Path, *, base: Path, dump: list[str], judge: Path | None = None
        ) -> dict[str, float]:
    if config.max_logit_difference > 1:
        raise ValueError("that is too much")
    begun = out / "begun"
    resumed = begun.exists()
    begun.write_text("")
    if config.max_logit_difference == 0.5:
        raise OSError("the disk is full")
    (out / "seen.txt").write_text(f"{config.dtype} {config.max_logit_difference} {base.name} {dump}"
                                    + (f" {judge.name}" if judge else ""))
    return {"resumed": int(resumed)}
'''


@pytest.fixture
def probe(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "weights").write_text("1")

    def call(*flags: str) -> subprocess.CompletedProcess:
        words = ["--recipe", "configs/stackllama.yaml", "--base", str(tmp_path / "base"), "--dump", "a b", "owner/it's"]
        out = ["--out", str(tmp_path / "out")]
        return subprocess.run([sys.executable, str(tmp_path / "probe.py"), *words, *out, *flags], cwd=ROOT,
                              capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    call.out = tmp_path / "out"
    return call


def test_makes_an_artifact_that_tells_where_it_comes_from(probe):
    done = probe("--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    assert (probe.out / "seen.txt").read_text() == """fp32 0.001 base ['a b', "owner/it's"]"""
    manifest = json.loads((probe.out / "manifest.json").read_text())
    assert manifest["stage"] == "probe"
    assert manifest["config"] == schema.result_settings(Merge(dtype="fp32"))
    assert len(manifest["inputs"]["base"]["sha256"]) == 64
    assert manifest["inputs"]["dump"] == [{"path": "a b", "sha256": None}, {"path": "owner/it's", "sha256": None}]
    assert {"seconds", "peak_memory_mib", "device", "versions", "commit", "files"} <= set(manifest)


def test_a_damaged_input_is_refused_in_one_line_before_anything_runs(probe, tmp_path):
    manifest = {"stage": "base", "files": {"weights": {"bytes": 1, "sha256": "0" * 64}}}
    (tmp_path / "base" / "manifest.json").write_text(json.dumps(manifest))
    done = probe()
    assert done.returncode == 1 and not probe.out.exists()
    assert done.stderr.startswith("probe: error: ") and done.stderr.count("\n") == 1
    assert "base is damaged: weights is not what was published" in done.stderr


def test_a_second_call_does_nothing_and_other_settings_ask_for_force(probe):
    probe()
    before = (probe.out / "manifest.json").stat().st_mtime_ns
    assert "already made" in probe().stderr
    refused = probe("--dtype", "fp32")
    assert refused.returncode == 1 and "--force" in refused.stderr
    assert (probe.out / "manifest.json").stat().st_mtime_ns == before
    forced = probe("--dtype", "fp32", "--force")
    assert forced.returncode == 0 and f"is now {probe.out.parent}/.old/out-" in forced.stderr
    assert (probe.out / "seen.txt").read_text().startswith("fp32")
    (probe.out / "manifest.json").unlink()  # as Snakemake does
    assert "restored from .old/" in probe().stderr and (probe.out / "seen.txt").read_text().startswith("bf16")


def test_a_forced_run_that_fails_leaves_the_finished_artifact(probe):
    probe()
    before = (probe.out / "manifest.json").read_bytes()
    assert probe("--max-logit-difference", "0.5", "--force").returncode == 1
    assert (probe.out / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(("flags", "says"), [
    (["--max-logit-difference", "2"], "probe: error: that is too much"),
    (["--max-logit-difference", "0.5"], "probe: error: the disk is full"),
    (["--max-logit-difference", "x"], "probe: error: command line: max_logit_difference must be a number, not 'x'"),
    (["--dtype", "int3"], "probe: error: command line: dtype must be one of 'fp32', 'bf16', not 'int3'"),
    (["--base", "/nowhere"], "probe: error: there is no /nowhere: make it first"),
    (["--recipe", "configs/none.yaml"], "probe: error: no recipe at configs/none.yaml; there are: "),
])
def test_a_users_mistake_is_one_line(probe, flags, says):
    failed = probe(*flags)
    assert failed.returncode == 1 and not probe.out.exists()
    (line,) = failed.stderr.splitlines()
    assert line.startswith(says) and "Traceback" not in line


def test_the_traceback_is_kept_for_whoever_mends_it(probe):
    failed = probe("--max-logit-difference", "0.5")
    saved = probe.out.with_name("out.partial") / "traceback.txt"
    assert str(saved) in failed.stderr and "the disk is full" in saved.read_text()


def test_the_same_command_goes_on_and_no_traceback_is_published(probe):
    text = (probe.out.parent / "probe.py")
    probe("--max-logit-difference", "0.5")
    text.write_text(PROBE.replace("== 0.5", "== 0.25"))  # the disk has room again
    assert probe("--max-logit-difference", "0.5").returncode == 0
    assert json.loads((probe.out / "manifest.json").read_text())["metrics"] == {"resumed": 1}
    assert not (probe.out / "traceback.txt").exists()


class SafetensorError(Exception):
    """As the class of safetensors, which has no base of its own."""


@pytest.mark.parametrize(("error", "free_bytes", "says"), [
    (OSError(errno.ENOSPC, "No space left on device", "/data/x.bin"), 0, "no space left on the disk of /data/x.bin"),
    (Exception("No space left on device (os error 28)"), 2 << 20, "no space left on the disk of "),  # of tokenizers
    # Of numpy.
    (OSError("Not enough free space to write 8 bytes after offset 0"), 2 << 20, "no space left on the disk of "),
    (RuntimeError("[enforce fail at inline_container.cc:672] unexpected pos 64"), 0, "no space left on the disk of"),
    (SafetensorError("Error while serializing: I/O error"), 4096, "make room, and the same command continues"),
    (SafetensorError("header too large"), 1 << 40, "a file of weights cannot be read or written: header too large"),
    (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"), 1 << 40, "out of memory:"),
    (MemoryError(), 1 << 40, "out of memory: take smaller batches"),
    (RuntimeError("kthvalue CUDA does not have a deterministic implementation, but you set"), 1 << 40,
     "this base needs an operation whose results do not repeat on a GPU"),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), 1 << 40, "out of memory:"),
    (RuntimeError("std::bad_alloc"), 1 << 40, "out of memory:"),
    (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 1 << 40, "out of memory:"),
    (RuntimeError("can't start new thread"), 1 << 40, "out of memory:"),
    (ValueError("two\nlines"), 1 << 40, "two\nlines"),
    (RuntimeError("a mistake in this program"), 1 << 40, None), (KeyError("x"), 0, None)])
def test_failures_of_the_machine_are_one_line(error, free_bytes, says, tmp_path, monkeypatch):
    monkeypatch.setattr(failures.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_bytes))
    message = failures.describe_failure(error, tmp_path / "none" / "out")
    assert message is None if says is None else says in message


def test_a_full_disk_stops_in_one_line_and_goes_on_when_there_is_room(probe, tmp_path):
    """A file system of its own, if this user may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        (small / "filler").write_bytes(bytes(40 << 10))
        (tmp_path / "probe.py").write_text(PROBE.replace('begun.write_text("")', 'begun.write_bytes(bytes(32 << 10))'))
        done = probe("--out", str(small / "out"))
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "no space left on the disk of" in done.stderr and not (small / "out").exists()
        (small / "filler").unlink()
        assert probe("--out", str(small / "out")).returncode == 0 and (small / "out/manifest.json").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_abbreviated_and_unknown_flags_are_refused(probe):
    assert probe("--dty", "fp32").returncode == 2
    assert probe("--nonsense", "1").returncode == 2


@pytest.mark.parametrize("name", STAGES)
def test_help_lists_every_setting_with_its_meaning(name):
    stage = read_signature(ROOT / f"stages/{name}.py")
    text = "".join(command.build_parser(stage).format_help().split())  # lines may break at any hyphen
    for flag, field, _ in schema.list_fields(getattr(Recipe(), stage.section)):
        words, kind = flag.replace("_", "-"), type_name(field.type, short=True)
        assert (f"--{words},--no-{words}" if field.type is bool else f"--{words}{kind}") in text, flag
        assert "".join(field.metadata["doc"].split()) in text, flag
    for flag, within in list_ranges(getattr(Recipe(), stage.section)).items():
        assert "".join(f"({within};".split()) in text, flag
    for flag in stage.inputs:
        assert any(f"--{flag}{value}" in text for value in ("FOLDER", "[FOLDER]", "NAME=FOLDER"))
    assert f"python -m stages.{name} --recipe" in stage.description, "the docstring shows the command"


@pytest.mark.parametrize("flag", ["--max-logit-difference", "--max_logit_difference", "--max_logit-difference"])
def test_a_flag_may_have_underscores(flag):
    parser = command.build_parser(read_signature(ROOT / "stages/merge.py"))
    words = ["--base", "a_b", "--adapter", "c_d", "--pairs", "p", "--out", "_1"]
    for given in ([flag, "0.5"], [f"{flag}=0.5"]):
        parsed = vars(parser.parse_args([*words, *given]))
        assert (parsed["set max_logit_difference"], parsed["base"], parsed["out"]) == ("0.5", "a_b", "_1")


@pytest.mark.parametrize(("flags", "value"), [
    ([], None), (["--gradient-checkpointing"], True), (["--no-gradient-checkpointing"], False)])
def test_a_switch_is_a_switch(flags, value):
    signature = read_signature(ROOT / "stages/ppo.py")
    words = ["--policy", "a", "--reward", "b", "--pairs", "c", "--out", "d"]
    recipe = ["--recipe", str(ROOT / "configs/tiny.yaml")]
    arguments = vars(command.build_parser(signature).parse_args([*words, *recipe, *flags]))
    assert arguments["set gradient_checkpointing"] is value
    config = command._parse_arguments(signature, arguments)[0]
    assert config.gradient_checkpointing is (value or False)


@pytest.mark.parametrize(("words", "says"), [
    (["--lerning_rate", "1e-5"], "there is no option --lerning-rate; did you mean '--learning-rate'?"),
    (["--liger_kernels", "auto"], "there is no option --liger-kernels: it was removed; leave it out, docs/gpu.md says"),
    (["--base", "x"], "there is no option --base (--help"),
    (["--polcy", "x"], "there is no option --polcy; did you mean '--policy'?"),
    (["--policy"], "argument --policy: expected one argument"), (["x"], "the following arguments are required: --pol"),
    ([], "the following arguments are required: --policy, --out")])
def test_a_mistake_in_the_command_line_is_one_line(words, says, capsys):
    parser = command.build_parser(read_signature(ROOT / "stages/ppo.py"))
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ppo: error: {says}") and line.endswith("(--help lists the options)")


def test_help_has_types_choices_and_the_values_of_the_recipe(monkeypatch):
    monkeypatch.chdir(ROOT)
    signature = read_signature(ROOT / "stages/ppo.py")
    for words, note in ((["--help", "--recipe", "configs/tiny.yaml"], ", in this recipe: "), (["--recipe", "x"], "")):
        here = settings_for_help(signature, words)
        text = " ".join(command.build_parser(signature, here).format_help().split())
        own = f"(from 1 to 1,000,000; published: 4{note}{load_recipe('configs/tiny.yaml').ppo.epochs if note else ''})"
        assert f"--epochs INTEGER passes over each rollout [run] {own}" in text
    for form in ("--tune {lora,full}", "--critic-learning-rate NUMBER|null", "--stop-ids INTEGER,...|null"):
        assert form in text
    assert settings_for_help(signature, ["--help", "--recipe", "nowhere"]) is None


def test_an_optional_input_is_part_of_the_request_only_where_it_is_given(probe):
    assert probe().returncode == 0
    assert "judge" not in json.loads((probe.out / "manifest.json").read_text())["inputs"]
    judge = str(probe.out.parent / "base")
    assert probe("--judge", judge, "--force").returncode == 0
    assert (probe.out / "seen.txt").read_text().endswith(" base")
    assert json.loads((probe.out / "manifest.json").read_text())["inputs"]["judge"]["path"] == judge


@pytest.mark.parametrize("name", STAGES)
def test_the_signature_in_the_source_is_that_of_the_function(name):
    stage, run = read_signature(ROOT / f"stages/{name}.py"), importlib.import_module(f"stages.{name}").run
    keywords = {name: p for name, p in inspect.signature(run).parameters.items() if p.kind is p.KEYWORD_ONLY}
    types = {"Path": Path, "list[str]": list[str], "dict[str, Path]": dict[str, Path], "Path | None": Path | None,
             "dict[str, Path] | None": dict[str, Path] | None}
    context = keywords.pop("context", None)
    assert context is None or context.default is None
    assert {name: types[hint] for name, hint in stage.inputs.items()} == {
        name: p.annotation for name, p in keywords.items() if p.default in (p.empty, None)}
    assert stage.options == {name: p.default for name, p in keywords.items() if p.default not in (p.empty, None)}
    assert typing.get_type_hints(run)["config"] is type(getattr(Recipe(), stage.section))
    assert (stage.stage, stage.module) == (name, f"stages.{name}") and stage.section == lineage.section_name(name)


@pytest.mark.parametrize("name", [*STAGES, "plan"])
@pytest.mark.parametrize("flags", [["--help"], ["--nonsense", "1"]])
def test_help_and_mistyped_flags_do_not_wait_for_the_stages_imports(name, flags):
    """0.15 s on an idle core; importing torch and transformers takes several seconds."""
    before = os.times().children_user
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", f"stages.{name}", *flags], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == (0 if flags == ["--help"] else 2)
    assert "stages.recipe" in done.stderr and not re.search(HEAVY, done.stderr, re.MULTILINE)
    assert os.times().children_user - before < 1


@pytest.mark.parametrize(("flags", "says"), [
    ({"--policy": "nowhere"}, "ppo: error: there is no nowhere: make it first"),
    ({"--epochs": "many"}, "ppo: error: command line: epochs must be a whole number, not 'many'")])
def test_wrong_values_do_not_wait_for_the_stages_imports(tmp_path, flags, says):
    given = {"--policy": ".", "--reward": ".", "--pairs": ".", "--out": str(tmp_path / "out")} | flags
    words = [word for pair in given.items() for word in pair]
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "stages.ppo", *words], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr
    assert not re.search(HEAVY, done.stderr, re.MULTILINE)


def test_every_section_belongs_to_a_stage():
    sections = {field.name for field in dataclasses.fields(Recipe)} - {"name", "dump", "prompts"}
    assert sections <= set(STAGES), f"no stage reads {sections - set(STAGES)}"


@pytest.mark.parametrize(("flags", "says"), [([], "False"), (["--more"], "False"), (["--more", "base"], "True")])
def test_an_optional_input_may_be_left_out_or_its_folder(tmp_path, flags, says):
    """A rule whose input is an empty list writes the flag alone."""
    required, optional = "base: Path, dump: list[str]", "base: Path, dump: list[str], more: Path | None = None"
    text = PROBE.replace(required, optional).replace("{base.name} {dump}", "{more is not None}")
    (tmp_path / "probe.py").write_text(text)
    (tmp_path / "base").mkdir()
    words = ["--recipe", str(ROOT / "configs/stackllama.yaml"), "--base", "base", "--dump", "d", "--out", "out", *flags]
    done = subprocess.run([sys.executable, "probe.py", *words], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/seen.txt").read_text().endswith(says)
    inputs = json.loads((tmp_path / "out/manifest.json").read_text())["inputs"]
    assert ("more" in inputs) == (says == "True")


def test_inputs_by_name_are_parsed_identified_and_listed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(f'{{"stage": "{name}", "files": {{}}}}')
    folders = command.parse_named_folders([f"ppo={tmp_path / 'a' / 'manifest.json'}", f"my-dpo_2={tmp_path / 'b'}"])
    assert folders == {"ppo": tmp_path / "a", "my-dpo_2": tmp_path / "b"}
    made = []

    def run(config, out, *, policy):
        made.append(policy)
        return {}

    command.make(run, Merge(), tmp_path / "out", {"policy": folders})
    inputs = json.loads((tmp_path / "out" / "manifest.json").read_text())["inputs"]
    assert made == [folders] and inputs["policy"]["ppo"].keys() == {"path", "sha256"}
    links = lineage.check_inputs(read_record(tmp_path / "out"))
    assert [(link["name"], link["verdict"]) for link in links] == [("policy.ppo", "same"), ("policy.my-dpo_2", "same")]


@pytest.mark.parametrize(("items", "says"), [
    (["ppo"], "'ppo' is not NAME=FOLDER"), (["=x"], "'=x' is not NAME=FOLDER"), (["ppo="], "'ppo=' is not NAME=FOLDER"),
    (["a b=x"], "'a b=x' is not NAME=FOLDER"), (["ppo=x", "ppo=y"], "the name 'ppo' is already taken by x")])
def test_a_wrong_named_input_is_one_line(items, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        command.parse_named_folders(items)


def test_code_that_changed_between_a_kill_and_its_resume_is_said(probe):
    assert probe("--max-logit-difference", "0.5").returncode == 1
    request = probe.out.with_name("out.partial") / "request.json"
    begun = json.loads(request.read_text())
    assert re.fullmatch("[0-9a-f]{12}", begun["code"])
    assert "the code has changed" not in probe("--max-logit-difference", "0.5").stderr
    request.write_text(json.dumps(begun | {"code": "0123456789ab"}))
    again = probe("--max-logit-difference", "0.5").stderr
    assert f"the code has changed since the last attempt (it was 0123456789ab, it is {begun['code']})" in again
    assert "probe: error: the disk is full" in again


def test_code_that_changed_since_makes_nothing_stale(probe):
    probe()
    request = probe.out / "request.json"
    request.write_text(json.dumps(json.loads(request.read_text()) | {"code": "0123456789ab"}))
    assert "already made" in probe().stderr


def test_a_stage_that_was_killed_while_it_was_published_is_not_run_again(tmp_path, monkeypatch):
    """The checkpoints of a training are gone by then, and hashing its weights may take minutes."""
    calls = []

    def run(config: Merge, out: Path) -> dict[str, float]:
        calls.append(out)
        (out / "weights").write_text("trained for days")
        return {"loss": 0.25}

    def kill(files):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(artifact, "hash_files", kill)
        command.make(run, Merge(), tmp_path / "out", {})
    assert not (tmp_path / "out").exists()
    command.make(run, Merge(), tmp_path / "out", {})
    manifest = read_record(tmp_path / "out").manifest
    assert len(calls) == 1 and manifest["metrics"] == {"loss": 0.25} and list(manifest["files"]) == ["weights"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".manifest.json", "manifest.json", "request.json", "weights"]


def test_any_failure_close_to_a_limit_on_memory_is_one_line(tmp_path, monkeypatch):
    error = ImportError("cannot import name 'X' from 'torch'")
    assert failures.describe_failure(error, tmp_path / "out") is None
    for limit_gib, words in ((2, "out of memory, it seems: this process may have 2.0 GiB"), (1 << 20, None)):
        limit = (limit_gib << 30, resource.RLIM_INFINITY)
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: limit)
        monkeypatch.setattr(Path, "read_text", lambda path, *_: "Name: x\nVmPeak:\t 1900000 kB\n")
        assert (failures.describe_failure(error, tmp_path / "out") or "").startswith(words or "")
        assert (failures.describe_failure(error, tmp_path / "out") is None) == (words is None)
