"""Results of earlier evaluations of a run, used again where all that they depend on is the same."""
