"""The pairwise reward model: data set, loss, scoring, ensembles."""
