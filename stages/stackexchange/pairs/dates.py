"""Read when posts were written, and tell which of two answers was written later."""

import math
from datetime import UTC, datetime


def parse_seconds(date: str | None) -> float:
    """Parse an ISO 8601 date to seconds since 1970, UTC where it names no zone; NaN if it is none."""
    try:
        written = datetime.fromisoformat(date or "")
    except ValueError:
        return math.nan
    return (written if written.tzinfo else written.replace(tzinfo=UTC)).timestamp()


def better_is_later(row: dict) -> bool:
    """Check whether the better answer of a row of the pairs table was written later; False where a date is unknown."""
    return parse_seconds(row.get("date_j")) > parse_seconds(row.get("date_k"))
