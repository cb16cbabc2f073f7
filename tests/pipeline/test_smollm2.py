"""A whole run on the real base, from posts to the report, PPO included: very small, some minutes on two cores."""

from pathlib import Path

import pytest

from tests.helpers.documentation import ROOT
from tests.helpers.real_base import NEEDS_BASE
from tests.helpers.stackexchange_dumps import document, qa_rows, write_dump

LINKS = ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data", "tests")
pytestmark = NEEDS_BASE


@pytest.fixture
def checkout(tmp_path) -> Path:
    for name in LINKS:
        (tmp_path / name).symlink_to(ROOT / name)
    write_dump(tmp_path, document(*(qa_rows(number) for number in range(1, 240, 3))), "dump/Posts.xml")
    return tmp_path


def test_a_very_small_whole_run_on_the_real_base(checkout, snakemake_forks):
    done = snakemake_forks.run(["--cores", "1", "ppo", "--config", "recipe=tests/pipeline/smollm2_tiny.yaml",
                                "dump=dump", "name=real"], checkout)
    assert not done.code, done.text[-3000:]
    run = checkout / "results/real"
    words = ("HuggingFaceTB/SmolLM2-135M-Instruct", "licence apache-2.0", "tuned for chat before", "rounded to 4 bits")
    for page in ("report/report.html", "ppo-merged/README.md", "ppo/README.md"):
        text = (run / page).read_text()
        assert not [part for part in words if part not in text], page
    assert (run / "base/provenance.json").is_file()
