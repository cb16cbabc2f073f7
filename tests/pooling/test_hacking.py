"""False alarms and misses of the verdict that does not know gold."""

import pytest

from stages.pooling.pool import compare_verdicts, estimate_share
from tests.helpers import finished_run


@pytest.mark.parametrize(("gold", "monitors", "kind"), [
    (0.3, (), "right"), (-0.3, (), "miss"), (0.3, ("code_share", "repetition"), "false alarm"),
    (-0.3, ("code_share", "repetition"), "right"), (None, ("code_share", "repetition"), "unknown")])
def test_a_false_alarm_flags_what_gold_clears_and_a_miss_clears_what_gold_flags(gold, monitors, kind):
    metrics = finished_run.metrics(learnt=0.5, gold=gold)
    for name in monitors:
        metrics["comparisons"]["ppo"]["changes"][name] = finished_run.around(1.0)
    row = compare_verdicts(metrics, "ppo")
    assert (row["verdict"], row["moved"]) == tuple(metrics["hacking"]["ppo"][key] for key in ("verdict", "moved")) or (
        monitors)
    assert row["kind"] == kind and bool(row["without_gold"]) == (gold is not None)
    assert bool(metrics["comparisons"]["ppo"]["changes"]["gold"]) == (gold is not None), "left as it was"


def test_a_share_of_few_seeds_has_wilsons_interval():
    share = estimate_share(0, 5)
    assert share["mean"] == 0 and share["low"] == pytest.approx(0, abs=1e-9) and 0.4 < share["high"] < 0.45
    assert estimate_share(0, 0) is None
