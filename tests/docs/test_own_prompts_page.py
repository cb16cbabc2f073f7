"""Check docs/own_prompts.md: the settings beside those of other libraries exist, and the function is the file's."""

import re

from stages.recipe.sections.ppo import Ppo
from tests.helpers.documentation import ROOT

PAGE = (ROOT / "docs/own_prompts.md").read_text(encoding="utf-8")
VALUES = {"running", "model", "none", "mixed", "reduce", "replace", "full", "head", "adapter", "absolute",
          "k1", "k2", "paged_adamw_8bit", "repetition", "response_tokens", "tune", "prompts", "base=", "--policy",
          "--reward", "--prompts", "samples.jsonl"}


def test_every_setting_of_ours_in_the_tables_exists():
    tables = PAGE[PAGE.index("## From TRL"):]
    rows = [line.strip("| ").split(" | ") for line in tables.splitlines() if line.startswith("| ")]
    spans = {span for row in rows for span in re.findall(r"`([^`]+)`", row[-1])}
    assert len(spans) > 40 and spans - VALUES <= set(Ppo.__dataclass_fields__)


def test_the_example_is_the_file():
    assert (ROOT / "data/demo/short_answers.py").read_text(encoding="utf-8") in PAGE
