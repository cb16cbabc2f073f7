"""Export a merged model as a GGUF file, the format of llama.cpp and Ollama, with a Modelfile beside it.

    snakemake --cores all gguf                                                              # results/NAME/gguf/ppo.gguf
    python -m stages.export_gguf results/demo/ppo-merged --type q8_0 --out results/demo/gguf/ppo.q8_0.gguf
    python -m stages.export_gguf results/demo/ppo-merged --out results/demo/gguf/ppo.gguf --check results/demo

Exported are LLaMA, Mistral, Qwen 2 and Qwen 3 with a byte-level BPE vocabulary, the pipeline's own included, that is
split as one of llama.cpp's. The file is read back, every tensor is compared with the folder's, and only then does it
get its name: it is whole, or not there. FILE.json beside it says how they compare, and gguf.html shows it of all files
in that folder. --check loads the file by llama.cpp (make extras), too: its tokens must be the folder's on 1,000 posts
of a run, and f32's and f16's greedy answers to 50 held-out questions, ties apart; the run's judge, or else its reward
model, scores the answers. Not a stage: it makes no artifact.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from stages.artifacts.artifact import artifact_folder
from stages.artifacts.lineage import find_pretrained
from stages.command_line.option_parser import OptionParser
from stages.command_line.start import run_tool
from stages.model_files.provenance import read_provenance
from stages.runtime import stopping
from stages.runtime.environment import let_idle_threads_sleep
from stages.runtime.files import atomic_path, read_json_object, write_json, write_text

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_1")
EXACT = ("f32", "f16")  # answers in these are the folder's
SUFFIX, REPORT_SUFFIX = ".gguf", ".json"
MODELFILE, PAGE = "Modelfile", "gguf.html"
WORDS = ("A file has its name only if every tensor, read back, is the folder's, rounded. With --check RUN, llama.cpp "
         "gives the other numbers: its greedy answers (ties are no difference), nats between the log-probabilities of "
         "the likeliest first tokens, and the mean reward of its answers and of the folder's own.")


def export(folder: Path, type_name: str, out: Path, run: Path | None) -> str:
    """Write the GGUF file; return how it compares, in a line. run: whose posts llama.cpp is checked on."""
    if out.suffix != SUFFIX or out.is_dir():
        raise ValueError(f"--out {out}: give the name of a file that ends in {SUFFIX}")
    let_idle_threads_sleep()
    from stages.modeling import torch_setup
    torch_setup.prepare()
    from stages.evaluation.llama_cpp import check_export, check_installed
    from stages.modeling.gguf.export import Kind, describe_report, draft_gguf, remove_drafts, render_modelfile
    if run:
        check_installed()
    report_file, modelfile, page = out.with_suffix(REPORT_SUFFIX), out.with_name(MODELFILE), out.with_name(PAGE)
    remove_drafts(out, report_file, modelfile, page)
    metadata = read_metadata(folder)
    with draft_gguf(folder, Kind[type_name.upper()], out, metadata) as (draft, report):
        if run:
            report["llama_cpp"] = check_export(folder, draft, run, is_exact=type_name in EXACT)
        with ExitStack() as drafts:
            new_modelfile, new_report, new_page = (
                drafts.enter_context(atomic_path(file)) for file in (modelfile, report_file, page))
            write_text(new_modelfile, render_modelfile(folder, out.name, metadata.license_name or metadata.license))
            write_json(new_report, report)
            write_text(new_page, render_exports(out, report))
            # Whoever finds the file, even after a kill, finds what describes it: an older file of this name goes
            # first, then all three get their names, then the new file does.
            out.unlink(missing_ok=True)
    return f"{out}: {'; '.join(f'{name} {text}' for name, text in describe_report(report).items())}"


def read_metadata(folder: Path):
    """Read the metadata of a model from its card, and what its pretrained model's provenance adds."""
    import gguf
    import yaml
    own = read_provenance(folder)
    name = own.name if own else " ".join(folder.resolve().parts[-2:])
    try:
        metadata = gguf.Metadata.load(model_path=folder, model_name=name)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{folder}: README.md or config.json cannot be read: {error}") from error
    if pretrained := own or find_pretrained(folder)[1]:
        metadata.license = metadata.license or pretrained.license
    if isinstance(metadata.license, list):
        metadata.license = " and ".join(metadata.license)
    metadata.sampling_min_p = metadata.sampling_min_p or 0.0  # llama.cpp's own leaves out unlikely tokens
    # Of a local folder, the link that its path gives would lead nowhere.
    metadata.base_models = [model for model in metadata.base_models or () if model.get("organization")] or None
    return metadata


def render_exports(out: Path, report: dict) -> str:
    """Render the page on the GGUF files of a folder, how each compares with the model's; `report` is that of `out`."""
    from stages.modeling.gguf.export import describe_report
    from stages.render.html import element, join_html, table
    from stages.reporting.document import render_page
    others = {file: read_json_object(file.with_suffix(REPORT_SUFFIX)) for file in out.parent.glob(f"*{SUFFIX}")}
    reports = {file: other for file, other in others.items()
               if other and other.get("bytes") == file.stat().st_size}  # not that of a file before it
    reports[out] = report
    rows = {file.name: describe_report(reports[file]) for file in sorted(reports)}
    head = list(dict.fromkeys(name for row in sorted(rows.values(), key=len, reverse=True) for name in row))
    cells = [[name, *(row.get(column, "–") for column in head)] for name, row in rows.items()]
    return render_page("GGUF files for llama.cpp and Ollama", [], join_html([
        element("p", WORDS, class_="faint"), table(["file", *head], cells, class_="recipe wide")]), {})


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = OptionParser("export_gguf", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a merged model, such as results/demo/ppo-merged")
    parser.add_argument("--type", choices=TYPES, default="f16", help="of the matrices (default: f16)")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.gguf", help="the file to write")
    parser.add_argument("--check", type=Path, metavar="RUN", help="a run on whose posts to compare with llama.cpp")
    return parser


def main(words: list[str] | None = None) -> int:
    """Export the model; return 1, with one line on stderr, for errors that the user can mend."""
    arguments = build_parser().parse_args(words)
    folder = artifact_folder(arguments.folder)
    return run_tool("export_gguf", arguments.out, lambda: print("export_gguf:", export(
        folder, arguments.type, arguments.out, arguments.check)))


if __name__ == "__main__":
    stopping.install()
    sys.exit(main())
