"""Parse a command line; answer a mistake in one line, with the nearest option."""

import argparse
import re
import sys
from typing import NoReturn

from stages.recipe.schema import suggest

ALIKE = 0.75  # of 1: with their hyphens, short options are nearly all alike


class OptionParser(argparse.ArgumentParser):
    """A parser that takes --learning_rate for --learning-rate; a mistake is one line, with the nearest option.

    From then on a stdout of ASCII or the like escapes what its encoding lacks, as stderr does.
    """

    def parse_known_args(self, args=None, namespace=None):
        if not sys.stdout.encoding.lower().startswith("utf"):
            sys.stdout.reconfigure(errors="backslashreplace")
        words = [_hyphenate(word) for word in (sys.argv[1:] if args is None else args)]
        for option in (word.partition("=")[0] for word in words if re.match("--[^=]", word)):
            if option not in self._option_string_actions:  # said before a required option is missed
                known = [option for option in self._option_string_actions if option.startswith("--")]
                self.error(f"there is no option {option}{suggest(option, known, else_all=False, alike=ALIKE)}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.rpartition('.')[2]}: error: {message} (--help lists the options)\n")


def _hyphenate(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"{option.replace('_', '-')}{equals}{value}" if word.startswith("--") else word
