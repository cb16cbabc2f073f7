"""Format durations and sizes for people."""


def format_duration(seconds: float) -> str:
    """Format seconds: '5.7 s', '3 min 40 s', '2 h 05 min'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def format_bytes(count: float) -> str:
    """Format bytes in binary units, as torch does: '512 bytes', '1.5 KiB', '13.5 GiB'."""
    if count < 1024:
        return f"{count:,.0f} bytes"
    units = ["TiB", "GiB", "MiB", "KiB"]
    while count >= 1024 and units:
        count, unit = count / 1024, units.pop()
    return f"{count:,.1f} {unit}"
