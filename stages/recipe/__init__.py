"""Every setting of every stage: typed, with its meaning, unit and source. Standard library and YAML only."""
