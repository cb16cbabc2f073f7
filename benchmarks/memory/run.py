"""Measure the peak memory of merges and an evaluation of a LLaMA of random weights, 1.1 billion unless told otherwise.

    python -m benchmarks.memory.run
    python -m benchmarks.memory.run --layers 2 --width 256 --limit-gib 1

Makes the base (bf16 files), an adapter of a language model and one of a reward model, all random, in a temporary folder
of 7 GB. The stages then run as programs, in bf16: merge of each adapter, and one evaluation batch of two prompts, with
the base as SFT and the merged model as the policy. GiB are of the largest process, as the kernel counts them, and
contain the pages of mapped files. Ends with 1 if one is above --limit-gib.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common.process_cost import measured
from benchmarks.common.tables import ROOT, table
from benchmarks.memory.random_models import save_pairs

MERGE = ("--check-precision", "bf16", "--dtype", "bf16")
EVALUATE = ("--precision", "bf16", "--prompts", 2, "--batch-prompts", 2, "--batch-texts", 4, "--max-prompt-tokens", 64,
            "--max-response-tokens", 16, "--best-of", 2, "--temperatures", 1.0, "--temperature-prompts", 0,
            "--max-pairs", 4, "--bootstrap-samples", 10)


def main() -> None:
    """Make the models, run the stages and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22, help="(default: 22)")
    parser.add_argument("--width", type=int, default=2048, help="(default: 2048)")
    parser.add_argument("--limit-gib", type=float, default=6.0, help="(default: 6)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_pairs(folder)
        subprocess.run([sys.executable, "-m", "benchmarks.memory.random_models", folder, str(arguments.layers),
                        str(arguments.width)], cwd=ROOT, check=True)
        rows = run_stages(folder)
    print(table(["stage", "GiB", "CPU seconds"], [[stage, f"{gib:.2f}", f"{cpu:.0f}"] for stage, gib, cpu in rows]))
    sys.exit(int(max(gib for _, gib, _ in rows) > arguments.limit_gib))


def list_commands(folder: Path) -> dict[str, tuple]:
    """Return the stage and its options, by label."""
    base, pairs = ("--base", folder / "base"), ("--pairs", folder / "pairs")
    return {
        "merge, language model": ("merge", *base, *pairs, "--adapter", folder / "ppo", *MERGE, "--out",
                                  folder / "ppo-merged"),
        "merge, reward model": ("merge", *base, *pairs, "--adapter", folder / "reward", *MERGE, "--out",
                                folder / "reward-merged"),
        "evaluate": ("evaluate", *base, *pairs, "--posts", folder / "posts", "--sft", folder / "base", "--policy",
                     f"ppo={folder / 'ppo-merged'}", "--reward", folder / "reward-merged", *EVALUATE, "--out",
                     folder / "evaluate"),
    }


def run_stages(folder: Path) -> list[tuple[str, float, float]]:
    """Run merges and an evaluation; return the peak GiB and CPU seconds of each."""
    rows = []
    for label, (stage, *options) in list_commands(folder).items():
        cost = measured("-m", f"stages.{stage}", "--recipe", ROOT / "configs/tiny.yaml", *options)
        rows.append((label, cost.peak_mb * 1e6 / 2**30, cost.cpu))
        print(f"{label}: {rows[-1][1]:.2f} GiB, {cost.cpu:.0f} CPU seconds", flush=True)
    return rows


if __name__ == "__main__":
    main()
