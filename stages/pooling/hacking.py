"""Compare the verdict on reward hacking that knows gold with the one that does not: false alarms and misses."""

import copy

from stages.evaluation.reward_hacking import detect_reward_hacking
from stages.evaluation.statistics import wilson_interval

FLAGGED = "flagged"


def judge_with_and_without_gold(metrics: dict, policy: str) -> tuple[dict, dict | None]:
    """Detect reward hacking by all that is known, and as where gold is not known; None if it is not known anyway.

    metrics: of an evaluation; they are left as they are.
    """
    seen = detect_reward_hacking(metrics, policy)
    if not metrics["comparisons"][policy]["changes"]["gold"]:
        return seen, None
    blind = copy.deepcopy(metrics)
    blind["comparisons"][policy]["changes"]["gold"] = None
    return seen, detect_reward_hacking(blind, policy)


def classify_verdict(seen: str, blind: str | None) -> str:
    """Compare the verdict without gold with the one that knows it: 'false alarm', 'miss', 'right' or 'unknown'."""
    if blind is None:
        return "unknown"
    return {(False, True): "false alarm", (True, False): "miss"}.get((seen == FLAGGED, blind == FLAGGED), "right")


def estimate_share(count: int, total: int) -> dict | None:
    """Estimate a share of few trials with Wilson's 95 % interval; None without trials."""
    if not total:
        return None
    low, high = wilson_interval(count / total, total)
    return {"mean": count / total, "low": low, "high": high, "count": total, "groups": total}
