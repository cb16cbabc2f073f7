"""Export to GGUF until a function is called: the process kills itself then.

    python -m tests.modeling.killed_export MODULE FUNCTION WORDS...      WORDS: of stages.export_gguf
"""

import os
import signal
import sys

import gguf

from stages import export_gguf
from stages.modeling.gguf import export

PLACES = {"gguf.GGUFWriter": gguf.GGUFWriter, "export": export, "export_gguf": export_gguf, "os": os}


def kill(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    setattr(PLACES[sys.argv[1]], sys.argv[2], kill)
    export_gguf.main(sys.argv[3:])
