"""Compare the verdict on reward hacking that knows gold with the one that does not: false alarms and misses."""

import copy
from collections.abc import Iterable

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


def compare_verdicts(metrics: dict, policy: str) -> dict:
    """Return a policy's verdict, the one without gold (None: gold is not known anyway), their kind, and what moved."""
    seen, blind = judge_with_and_without_gold(metrics, policy)
    without_gold = blind and blind["verdict"]
    return {"verdict": seen["verdict"], "without_gold": without_gold, "moved": seen["moved"],
            "kind": classify_verdict(seen["verdict"], without_gold)}


def estimate_shares(rows: Iterable[dict]) -> dict[str, dict | None]:
    """Estimate the shares of flagged policies, and of false alarms and misses where gold is known.

    Args:
        rows: from `compare_verdicts`.

    Returns: `flagged`, of all; `false_alarms`, of those that gold clears; `misses`, of those that gold flags.
    """
    rows = list(rows)
    known = [row for row in rows if row["without_gold"]]
    honest, cheating = ([row for row in known if (row["verdict"] == FLAGGED) == flagged] for flagged in (False, True))
    return {"flagged": estimate_share(sum(row["verdict"] == FLAGGED for row in rows), len(rows)),
            "false_alarms": estimate_share(sum(row["kind"] == "false alarm" for row in honest), len(honest)),
            "misses": estimate_share(sum(row["kind"] == "miss" for row in cheating), len(cheating))}


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
