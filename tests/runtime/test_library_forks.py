"""The forks in which tests run stages end, print and see their request as a process of Python's own does."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROBE = """
import atexit, json, os, signal, sys
from pathlib import Path
atexit.register(print, "at exit")
print(json.dumps([__name__, sys.argv[1:], os.getcwd(), os.environ["WORD"], sys.path[0], sys.orig_argv[1:]]))
print("a line", file=sys.stderr, flush=True)
mode = sys.argv[1]
if mode == "code":
    sys.exit(3)
elif mode == "words":
    sys.exit("refused")
elif mode == "error":
    raise ValueError("a bad value")
elif mode == "waits":
    Path("begun").touch()
    signal.pause()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    return tmp_path


def describe(code: int, out: str, err: str) -> tuple[int, str, str]:
    """Of a traceback, the last line."""
    return code, out, err.splitlines()[-1] if "Traceback" in err else err


@pytest.mark.parametrize("mode", ["returns", "code", "words", "error"])
def test_a_fork_is_a_process_of_pythons_own(library_forks, folder, mode):
    words, environment = ["probe", mode, "a word"], os.environ | {"WORD": "given"}
    own = subprocess.run([sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True)
    fork = library_forks.start(words, folder, environment)
    out, err = fork.communicate(timeout=60)
    assert describe(fork.returncode, out, err) == describe(own.returncode, own.stdout, own.stderr)
    assert str(folder) in out and "at exit" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_as_it_ends_python(library_forks, folder, number):
    fork = library_forks.start(["probe", "waits"], folder, os.environ | {"WORD": "given"})
    until = time.monotonic() + 60
    while not (folder / "begun").exists():
        assert fork.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    fork.send_signal(number)
    out, err = fork.communicate(timeout=60)
    assert fork.returncode == -number
    assert ("at exit" in out and "KeyboardInterrupt" in err) == (number == signal.SIGINT)


def test_the_shim_gives_the_exit_status_and_leaves_other_programs_to_python(library_forks, folder):
    (folder / "stages").mkdir()
    (folder / "probe.py").rename(folder / "stages/probe.py")
    python = library_forks.shims / "python"
    for words, code in ((["-m", "stages.probe", "code"], 3), (["-c", "import sys; sys.exit(4)"], 4)):
        done = subprocess.run([python, *words], cwd=folder, env=os.environ | {"WORD": "given"}, capture_output=True)
        assert done.returncode == code
