"""Models, losses, rollouts, rewards. Takes numbers and tensors, never a recipe."""

import logging

from datasets.utils.logging import disable_progress_bar as disable_datasets_bar
from transformers.utils.logging import disable_progress_bar as disable_transformers_bar

# A stage shows its own progress; bars that flash by for every file of weights would bury it in the log.
disable_datasets_bar()
disable_transformers_bar()
# On a CPU bitsandbytes recommends an optional kernel at every import, whether or not anything is quantised.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
