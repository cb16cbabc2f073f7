"""One module directly in this folder is one stage: one function, one rule, one command."""

import os

# OpenMP reads this when torch is first imported. With the default (spinning) a busy neighbour makes a
# two-thread stage several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
