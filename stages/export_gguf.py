"""Export a merged model as a GGUF file, the format of llama.cpp and Ollama, with a Modelfile beside it.

    snakemake --cores all gguf                                                              # results/NAME/gguf/ppo.gguf
    python -m stages.export_gguf results/demo/ppo-merged --type q8_0 --out results/demo/gguf/ppo.q8_0.gguf
    python -m stages.export_gguf results/demo/ppo-merged --out results/demo/gguf/ppo.gguf --check results/demo

Exported are LLaMA, Mistral, Qwen 2 and Qwen 3 with a byte-level BPE vocabulary, the pipeline's own included, that is
split as one of llama.cpp's. The file is read back, every tensor is compared with the folder's, and only then does it
get its name: it is whole, or not there. FILE.json beside it says how they compare. --check loads the file by llama.cpp
(make extras), too: its tokens must be the folder's on 1,000 posts of a run, and f32's and f16's greedy answers to 50
held-out questions, ties apart; the run's judge, or else its reward model, scores the answers. Not a stage: it makes no
artifact.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from stages.artifacts.artifact import artifact_folder
from stages.command_line.option_parser import OptionParser
from stages.command_line.tool import run_tool
from stages.runtime import stopping
from stages.runtime.environment import let_idle_threads_sleep, silence_missing_kernel

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_1")
EXACT = ("f32", "f16")  # answers in these are the folder's
SUFFIX = ".gguf"


def export(folder: Path, type_name: str, out: Path, run: Path | None) -> list[str]:
    """Write the GGUF file; return how it compares, in lines. run: whose posts llama.cpp is checked on."""
    if out.suffix != SUFFIX or out.is_dir():
        raise ValueError(f"--out {out}: give the name of a file that ends in {SUFFIX}")
    let_idle_threads_sleep()
    silence_missing_kernel()
    from stages.modeling import torch_setup
    torch_setup.prepare()
    from stages.evaluation.llama_cpp.check import check_export
    from stages.evaluation.llama_cpp.client import check_installed
    from stages.modeling.gguf.export import Kind, describe_report, export_gguf
    check = None
    if run:
        check_installed()
        check = partial(check_export, folder, run=run, is_exact=type_name in EXACT)
    return describe_report(export_gguf(folder, Kind[type_name.upper()], out, find_facts(folder), check), out)


def find_facts(folder: Path):
    """Return the name, licence and base of a model: those of its provenance, or of the artifacts that it is from."""
    from stages.artifacts.artifact import MANIFEST, read_manifest
    from stages.artifacts.lineage import find_input
    from stages.artifacts.origin import find_origin
    from stages.cards.sections import origin_metadata
    from stages.model_files.provenance import read_provenance
    from stages.modeling.gguf.export import ModelFacts
    if own := read_provenance(folder):
        return ModelFacts(own.name, own.license)
    inputs = read_manifest(folder).get("inputs", {}) if (folder / MANIFEST).is_file() else {}
    origin = find_origin(folder, find_input(folder, inputs["pairs"]["path"]) if "pairs" in inputs else None)
    card = origin_metadata(origin)
    names = origin.provenance.license if origin.provenance else card.get("license_name") or card.get("license")
    path = folder.resolve()
    return ModelFacts(f"{path.parent.name} {path.name}", " and ".join(names) if isinstance(names, list) else names,
                      origin.provenance.name if origin.provenance else origin.base)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = OptionParser(prog="python -m stages.export_gguf", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a merged model, such as results/demo/ppo-merged")
    parser.add_argument("--type", choices=TYPES, default="f16", help="of the matrices (default: f16)")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.gguf", help="the file to write")
    parser.add_argument("--check", type=Path, metavar="RUN", help="a run on whose posts to compare with llama.cpp")
    return parser


def main(words: list[str] | None = None) -> int:
    """Export the model; return 1, with one line on stderr, for errors that the user can mend."""
    arguments = build_parser().parse_args(words)
    folder = artifact_folder(arguments.folder)
    return run_tool("export_gguf", arguments.out, lambda: print(*(
        f"export_gguf: {line}" for line in export(folder, arguments.type, arguments.out, arguments.check)), sep="\n"))


if __name__ == "__main__":
    stopping.install()
    sys.exit(main())
