"""A program under `ulimit -v`: one line for whatever its libraries do without memory, and it stops as any other."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 400 << 20
PROGRAM = '''"""Probe: a stage that takes more memory than it may have."""
from stages.command_line.start import main

if __name__ == "__main__":
    main(__file__)

import os
import time
from pathlib import Path
from tokenizers.normalizers import Lowercase
from stages.recipe.sections.models import Merge

def run(config: Merge, out: Path, *, base: Path, mode: str = "") -> dict[str, float]:
    if mode == "python":
        bytes(1 << 30)
    elif mode == "panic":
        bytes(220 << 20)
        raise type("PanicException", (BaseException,), {})("ThreadPoolBuildError")  # as pyo3's, which is no Exception
    elif mode == "rust":
        Lowercase().normalize_str("A" * (20 << 20))
    elif mode == "sleep":
        (base / "begun").write_text(str(os.getpid()))
        time.sleep(60)
    return {}
'''


@pytest.fixture
def start(tmp_path):
    (tmp_path / "probe.py").write_text(PROGRAM)
    (tmp_path / "base").mkdir()

    def start(mode: str) -> subprocess.Popen:
        words = ["--base", str(tmp_path / "base"), "--out", str(tmp_path / "out"), "--mode", mode]
        return subprocess.Popen(
            [sys.executable, str(tmp_path / "probe.py"), *words], cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "RUST_BACKTRACE": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)))
    return start


@pytest.mark.parametrize(("mode", "code", "line"), [
    ("python", 1, "probe: error: out of memory: take smaller batches"),
    ("rust", 1, "probe: error: out of memory, it seems: a library aborted (SIGABRT), and this process may have 400.0"),
    ("panic", 1, "probe: error: out of memory, it seems: this process may have 400.0 MiB (ulimit -v)"),
    ("none", 0, "probe: ")])
def test_without_memory_the_last_line_says_so(start, tmp_path, mode, code, line):
    process = start(mode)
    lines = process.communicate()[1].splitlines()
    assert process.returncode == code and lines[-1].startswith(line), lines
    assert not any("stack backtrace" in text or "Traceback" in text for text in lines)
    assert len(lines) <= 3, "at most two of a library, before ours"
    assert (tmp_path / "out").exists() == (mode == "none")


def wait_for_child(folder: Path) -> int:
    until = time.monotonic() + 20
    while not (folder / "begun").exists() or not (folder / "begun").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    return int((folder / "begun").read_text())


def test_signals_reach_the_program_and_it_does_not_outlive_its_parent(start, tmp_path):
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        process = start("sleep")
        child = wait_for_child(tmp_path / "base")
        assert child != process.pid
        process.send_signal(number)
        said = process.communicate()[1]
        assert process.returncode == code and ("stopped by" in said) == (number != signal.SIGKILL), said
        until = time.monotonic() + 10
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.02)
        (tmp_path / "base" / "begun").unlink()
