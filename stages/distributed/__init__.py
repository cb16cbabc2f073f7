"""Share rows among the processes of a run: sums, gathering, and what happens when one is lost."""
