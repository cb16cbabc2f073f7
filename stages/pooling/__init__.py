"""Pool what runs of one recipe measured that differ by their seed."""
