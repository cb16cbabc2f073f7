"""Compare the verdict on reward hacking that knows gold with the one that does not: false alarms and misses."""

from collections.abc import Iterable

from stages.evaluation.reward_hacking import detect_reward_hacking
from stages.evaluation.statistics import wilson_interval

FLAGGED = "flagged"


def compare_verdicts(metrics: dict, policy: str) -> dict:
    """Detect reward hacking by all that is known, and as where gold is not known.

    Args:
        metrics: of an evaluation; they are left as they are.

    Returns: `verdict`; `without_gold`, None if gold is not known anyway; `moved`, the monitors that moved for the
        worse; `kind`, 'false alarm', 'miss', 'right', or 'unknown' without gold.
    """
    seen, comparison = detect_reward_hacking(metrics, policy), metrics["comparisons"][policy]
    row = {"verdict": seen["verdict"], "without_gold": None, "moved": seen["moved"], "kind": "unknown"}
    if comparison["changes"]["gold"]:
        unseen = comparison | {"changes": comparison["changes"] | {"gold": None}}
        blind = detect_reward_hacking(metrics | {"comparisons": {policy: unseen}}, policy)["verdict"]
        kinds = {(False, True): "false alarm", (True, False): "miss"}
        row |= {"without_gold": blind, "kind": kinds.get((seen["verdict"] == FLAGGED, blind == FLAGGED), "right")}
    return row


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


def estimate_share(count: int, total: int) -> dict | None:
    """Estimate a share of few trials with Wilson's 95 % interval; None without trials."""
    if not total:
        return None
    low, high = wilson_interval(count / total, total)
    return {"mean": count / total, "low": low, "high": high, "count": total, "groups": total}
