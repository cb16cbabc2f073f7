"""One dataclass a stage: its settings with defaults, ranges and checks across fields."""
