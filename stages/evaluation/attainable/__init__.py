"""Compare policies with the optimum of the objective that their training maximised."""
