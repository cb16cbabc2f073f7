"""The real base that `make smollm2` fetches, and a real dump beside the project: what needs them skips, saying why."""

import pytest

from stages.fetch_smollm2 import GGUF_NAME, OUT
from tests.helpers.documentation import ROOT

BASE = ROOT / OUT
GGUF = BASE / GGUF_NAME
DUMP = ROOT.parent / "shared/stackexchange/beer.stackexchange.com.7z"
NEEDS_BASE = pytest.mark.skipif(not GGUF.is_file(), reason=f"there is no real base in {OUT}: make smollm2")
NEEDS_DUMP = pytest.mark.skipif(not DUMP.is_file(), reason=f"there is no real dump at {DUMP}")
