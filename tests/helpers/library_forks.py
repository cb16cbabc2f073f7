"""Run `python -m MODULE` in forks of a process that has imported the libraries: that takes longer than most tests.

The server imports third-party libraries alone. A fork is a process of its own, with the folder, environment, standard
streams and signals of its request; it imports this project's modules itself, runs MODULE as `__main__` and exits as
Python does. What libraries read from the environment when they are imported is the server's (`IMPORT_VARIABLES`).
"""

import atexit
import gc
import importlib
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    "torch", "transformers", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "peft", "accelerate", "bitsandbytes", "datasets", "pandas", "pyarrow.parquet", "scipy.stats", "safetensors.torch",
    "sklearn.linear_model", "matplotlib.figure")
IMPORT_VARIABLES = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
MAX_REQUEST_BYTES = 1 << 17
# Runs a stage in a fork if the libraries would be imported the same and files may grow, and everything else as Python.
# A fork ends with its shim, but is no child of the process that launched that.
SHIM = f"""#!{sys.executable} -SE
import os, resource, signal, sys
words, variables = sys.argv[1:], {IMPORT_VARIABLES!r}
if (words[0] != "-m" or not words[1].startswith(("stages.", "probes."))
        or any(os.environ.get(n) != v for n, v in variables.items())
        or resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY):
    os.execv({sys.executable!r}, [{sys.executable!r}, *words])
sys.path.insert(0, {str(ROOT)!r})
from tests.helpers.library_forks import request_fork
environment = {{name: value for name, value in os.environ.items() if name != "STAGE_LAUNCHER_PID"}}
connection, pid = request_fork(ADDRESS, words[1:], os.getcwd(), environment, (0, 1, 2))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(connection.recv(64))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Fork:
    """A fork that runs a module, with the methods of subprocess.Popen that tests use."""

    def __init__(self, address: str, words: Sequence[str], folder: Path, environment: dict[str, str]):
        self._files = TemporaryFile("w+"), TemporaryFile("w+")  # noqa: SIM115
        self.returncode: int | None = None
        with open(os.devnull) as nothing:
            streams = [file.fileno() for file in (nothing, *self._files)]
            self._connection, self.pid = request_fork(address, words, str(folder), environment, streams)

    def poll(self) -> int | None:
        """Return the exit status if the process has ended: of a signal, its negative number."""
        with suppress(TimeoutError):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit status."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(64))
            except BlockingIOError:
                raise TimeoutError from None
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what was written to stdout and stderr."""
        self.wait(timeout)
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        return texts[0], texts[1]


class LibraryForks:
    """A server that forks, and the folder `shims`, whose `python` has it run the stages; for PATH."""

    def __init__(self):
        self._folder = TemporaryDirectory(prefix="forks")
        self._address = f"{self._folder.name}/socket"
        self.shims = Path(self._folder.name) / "bin"
        self.shims.mkdir()
        (self.shims / "python").write_text(SHIM.replace("ADDRESS", repr(self._address)))
        (self.shims / "python").chmod(0o755)
        self._server = subprocess.Popen([sys.executable, "-m", __name__, self._address], cwd=ROOT,
                                        stdin=subprocess.PIPE, env=os.environ | IMPORT_VARIABLES)
        while not os.path.exists(self._address):
            assert self._server.poll() is None, "the server of forks cannot start"
            time.sleep(0.05)

    def __enter__(self) -> "LibraryForks":
        return self

    def __exit__(self, *_) -> None:
        self._server.communicate()  # the end of its input is its own
        self._folder.cleanup()

    def start(self, words: Sequence[str], folder: Path = ROOT, environment: dict[str, str] | None = None) -> Fork:
        """Start `python -m` with these words; environment: instead of this process's."""
        base = os.environ if environment is None else environment
        return Fork(self._address, list(map(str, words)), folder, dict(base) | IMPORT_VARIABLES)

    def run(self, words: Sequence[str], folder: Path = ROOT) -> subprocess.CompletedProcess:
        """Run `python -m` with these words to its end."""
        fork = self.start(words, folder)
        out, err = fork.communicate()
        return subprocess.CompletedProcess(words, fork.returncode, out, err)


def request_fork(address: str, words: Sequence[str], folder: str, environment: dict[str, str], streams: Sequence[int]
                 ) -> tuple[socket.socket, int]:
    """Have the server fork; return the connection, from which the exit status can be read, and the process's id."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps([list(words), folder, environment]).encode()], streams)
    return connection, int(connection.recv(64))


def serve(address: str) -> tuple[list[str], str, dict[str, str]] | None:
    """Fork for each request until the input ends. Returns in a fork, with its request; at the end None."""
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj is not listener:
                    _finish(selector, key)
                elif request := _fork(selector, listener.accept()[0]):
                    return request


def _fork(selector: selectors.BaseSelector, connection: socket.socket) -> tuple | None:
    """Fork for a request and watch the fork and its client; return the request in the fork."""
    content, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
    if not (pid := os.fork()):
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        for key in list(selector.get_map().values()):
            if key.data:
                key.data[1].close()
        connection.close()
        return json.loads(content)
    for stream in streams:
        os.close(stream)
    connection.send(str(pid).encode())
    watched = pid, connection, os.pidfd_open(pid)
    for item in watched[1:]:
        selector.register(item, selectors.EVENT_READ, watched)
    return None


def _finish(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Give the client the exit status; kill the process of a client that has gone."""
    pid, connection, descriptor = key.data
    if key.fileobj is connection:
        selector.unregister(connection)
        os.kill(pid, signal.SIGKILL)
        return
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.send(str(code).encode())
    selector.unregister(descriptor)
    os.close(descriptor)
    with suppress(KeyError):
        selector.unregister(connection)
    connection.close()


def _run(words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run a module in this process as `python -m` does."""
    import datasets
    import huggingface_hub
    import numpy as np

    for module in (huggingface_hub.constants, datasets.config):  # read when imported; a saved tokenizer tells of it
        module.HF_HUB_OFFLINE = environment.get("HF_HUB_OFFLINE") == "1"
    np.random.seed()  # each process has another one
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:1] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv, sys.orig_argv = words, [sys.executable, "-m", *words]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # Python ends by the signal then, once its exit handlers have run
        traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)  # of a kernel that bitsandbytes recommends
    for library in LIBRARIES:
        importlib.import_module(library)
    logging.disable(logging.NOTSET)
    # Forks share what they compile of this project.
    sys.dont_write_bytecode, sys.pycache_prefix = False, f"{Path(sys.argv[1]).parent}/bytecode"
    gc.collect()
    gc.freeze()
    if request := serve(sys.argv[1]):
        _run(*request)
