"""Models, losses, rollouts, rewards. Takes numbers and tensors, never a recipe."""

import logging
import os
import warnings

from transformers.utils.logging import disable_progress_bar as disable_transformers_bar
from transformers.utils.logging import set_verbosity_error

from stages.modeling import torch_setup

# A stage shows its own progress; bars that flash by for every file of weights would bury it in the log. So would the
# tables that list a new head as missing: models.py checks for missing weights itself, and refuses.
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # its own switch would import it: 85 MB that PPO has no use for
disable_transformers_bar()
set_verbosity_error()
# PEFT and TrainingArguments still use names that Transformers has renamed; nothing a reader of the log can do about it.
warnings.filterwarnings("ignore", message=r".*activation_checkpointing", category=FutureWarning)
# On a CPU bitsandbytes recommends an optional kernel at every import, whether or not anything is quantised.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
torch_setup.prepare()
