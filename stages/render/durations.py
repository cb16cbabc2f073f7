"""Spans of time for people."""


def format_duration(seconds: float) -> str:
    """'5.7 s', '3 min 40 s', '2 h 05 min'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
