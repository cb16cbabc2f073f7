"""Kernels are compiled once, loaded from nothing that others may have written, and a model does without them."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch

from stages.generation.sampler import sample
from stages.modeling.cpu_kernels import build
from stages.modeling.load import load_causal
from stages.modeling.packed import forward, token_logprobs
from stages.recipe.recipe import load_recipe, section_settings
from stages.runtime.environment import describe_environment
from tests.helpers.architectures import FAMILIES, save
from tests.helpers.kernel_inputs import gaussian, pack_lengths

pytestmark = pytest.mark.skipif(build.load_library() is None, reason=f"no kernels: {build.status()}")


@pytest.fixture
def llama(tmp_path):
    return load_causal(save(FAMILIES["llama"], tmp_path / "base"), cpu_kernels="auto")


SMALL = 'extern "C" { int one() { return 1; } long simd_width() { return 16; } }'


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a new process that finds an empty cache; what is compiled is small. A function that starts once more."""
    def start():
        monkeypatch.setattr(build, "_load", cache(build._load.__wrapped__))

    small = tmp_path / "small.cpp"
    small.write_text(SMALL)
    monkeypatch.setattr(build, "SOURCES", (small,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    start()
    return start


@pytest.mark.parametrize("how", ["no compiler", "broken sources"])
@torch.no_grad()
def test_without_kernels_a_model_computes_the_same_and_one_line_says_why(
    how, llama, fresh, monkeypatch, tmp_path, capsys
):
    batch, _ = pack_lengths([3, 40, 17])
    wanted = torch.arange(batch.num_tokens)
    if how == "no compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    build.SOURCES[0].write_text("int broken(;")
    assert build.load_library() is None and not build.supports(gaussian(1))
    assert build.status().startswith("none: ") and len(build.status().splitlines()) == 1
    assert ("no C++ compiler" if how == "no compiler" else "small.cpp:1") in build.status()
    assert capsys.readouterr().err.count(build.status().removeprefix("none: ")) == 1 and build.load_library() is None
    assert [*tmp_path.glob("cache/*/*")] == []
    actual = forward.packed_hidden_states(llama, batch, wanted)
    monkeypatch.undo()
    expected = forward.packed_hidden_states(llama, batch, wanted)
    assert build.load_library() and torch.allclose(actual, expected, atol=1e-5)


def test_what_was_compiled_is_there_for_the_next_process(fresh, monkeypatch, tmp_path):
    run, commands = subprocess.run, []

    def noted(command, **how):
        done = run(command, **how)
        commands.append((command[1], [*tmp_path.glob("cache/stackllama/*.so")]))
        return done

    monkeypatch.setattr(build.subprocess, "run", noted)
    assert build.load_library().one() == build.load_library().one() == 1
    assert [option for option, _ in commands] == ["--version", build.FLAGS[0]]
    assert commands[1][1] == []  # nobody meets half a file
    fresh()
    assert build.load_library().one() == 1 and len(commands) == 3
    build.SOURCES[0].write_text(SMALL.replace("1;", "2;"))
    fresh()
    assert build.load_library().one() == 2 and len([*tmp_path.glob("cache/stackllama/*.so")]) == 2


@pytest.mark.parametrize("harm", ["cut", "replaced", "writable", "without a digest"])
def test_a_file_that_is_not_what_was_compiled_is_compiled_anew(harm, fresh, tmp_path, capsys):
    build.load_library()
    (library,) = tmp_path.glob("cache/stackllama/*.so")
    content = library.read_bytes()
    library.unlink()  # the file that this process has mapped stays whole
    library.write_bytes({"cut": content[: len(content) // 2], "replaced": content[:-1] + b"x"}.get(harm, content))
    library.chmod(0o666 if harm == "writable" else 0o700)
    if harm == "without a digest":
        library.with_suffix(".sha256").unlink()
    fresh()
    assert build.load_library().one() == 1
    assert capsys.readouterr().err.count("compiled by") == 2 and library.stat().st_mode & 0o777 == 0o700
    assert len(library.read_bytes()) == len(content)


@pytest.mark.parametrize("harm", ["writable", "link"])
def test_nothing_is_loaded_from_a_folder_that_others_can_write_to(harm, fresh, tmp_path):
    folder = tmp_path / "cache/stackllama"
    folder.parent.mkdir()
    if harm == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert build.load_library() is None and [*folder.iterdir()] == []
    assert "what is loaded from it runs as you. Make it yours (chmod 700)" in build.status()


def test_two_processes_that_start_together_compile_once(fresh, monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"""#!/bin/sh
[ "$1" = --version ] || {{ echo compiled >> {tmp_path}/compilations; sleep 1; }}
exec {shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")} "$@"
""")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    code = (f"import pathlib; from stages.modeling.cpu_kernels import build; build.SOURCES = "
            f"(pathlib.Path({str(build.SOURCES[0])!r}),); assert build.load_library().one() == 1, build.status()")
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE,
                             text=True) for _ in range(2)]
    logs = [one.communicate()[1] for one in both]
    assert [one.returncode for one in both] == [0, 0] and len([*tmp_path.glob("cache/stackllama/*.so")]) == 1
    assert (tmp_path / "compilations").read_text() == "compiled\n"
    assert sorted(log.count("cpu_kernels: compiled by") for log in logs) == [0, 1]


def test_off_loads_no_library_and_the_manifest_says_what_was_loaded(fresh, tmp_path):
    model = load_causal(save(FAMILIES["llama"], tmp_path / "base"))
    logprobs = token_logprobs.response_logprobs(model, [[1, 2]], [[3, 4]], 1.0)
    sample(model, [[1, 2]], max_new_tokens=3, temperature=1.0, stop_ids=[0], generator=torch.Generator())
    assert logprobs[0].isfinite().all()
    assert build.status() == "off" and not (tmp_path / "cache").exists()
    assert describe_environment()["cpu_kernels"] == "off"
    build.load_library()
    assert re.match(r"(256|512)-bit vectors, .*\d", build.status())
    assert describe_environment()["cpu_kernels"] == build.status()


def test_every_section_of_a_stage_with_a_model_has_the_setting():
    recipe = load_recipe("configs/tiny.yaml", {"cpu_kernels": "off", "sft": {"cpu_kernels": "auto"}})
    chosen = {field.name: getattr(getattr(recipe, field.name), "cpu_kernels", None) for field in fields(recipe)}
    assert {name for name, value in chosen.items() if value == "off"} == {
        "base", "reward", "merge", "ppo", "dpo", "rloo", "grpo", "best_of_n", "expert_iteration", "ilql", "evaluate"}
    assert chosen["sft"] == "auto" and section_settings(recipe, "ppo")["cpu_kernels"] == "off"


def test_a_processor_with_shorter_vectors_and_zen_s_rounding_passes_the_tests_of_the_kernels(tmp_path, library_forks):
    """GCC compiles other sums for Zen 3: decoding once differed from the packed pass there, and only there."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    if not (" avx2 " in flags and " fma " in flags):
        pytest.skip("this processor has no AVX2: it does not run what is compiled for Zen 3")
    target = subprocess.run(["g++", "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=True)
    if re.search(r"-march=\s+znver3\b", target.stdout):
        pytest.skip("this processor is a Zen 3, on which those tests run anyway")
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -march=znver3\n')
    compiler.chmod(0o700)
    env = os.environ | {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    tests = library_forks.start(["pytest", "-p", "no:cacheprovider", "tests/modeling/test_cpu_kernels.py"],
                                environment=env)
    said, _ = tests.communicate()
    assert tests.returncode == 0 and re.search(r"\d\d passed", said), said[-3000:]
