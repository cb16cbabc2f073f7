"""Export a reward model as a plain classifier that TRL, OpenRLHF and verl load by path, with the same scores.

    python -m stages.export_reward --recipe configs/demo.yaml --reward results/demo/reward-merged \\
        --out results/demo/reward-export

The folder has the model with its head where each of them looks for it, a padding id with an embedding, a tokenizer
whose chat template is the prompt that the model was trained with, and a README with the lines to use it in each. The
files are loaded again by plain Transformers and compared on the reference answers before they are published. A model
that scores by more than the last token cannot be exported. Settings are those of the recipe's section merge: dtype and
max_shard_bytes.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from pathlib import Path

from stages.modeling import families, torch_setup
from stages.recipe.sections.models import Merge
from stages.reward_checks.export import describe_report, export_reward_model, render_export_card
from stages.reward_modeling.scoring_file import load_scoring
from stages.runtime.files import write_text
from stages.runtime.stage_lines import print_line


def run(config: Merge, out: Path, *, reward: Path) -> dict[str, float]:
    """Fill `out` with the classifier, its tokenizer, scoring.json and README.md; return what the comparison gave."""
    torch_setup.prepare()
    report = export_reward_model(reward, out, config.dtype, config.max_shard_bytes)
    write_text(out / "README.md", render_export_card(report, load_scoring(out)["mean"], families.max_positions(out)))
    print_line(f"export_reward: {describe_report(report)}")
    return report
