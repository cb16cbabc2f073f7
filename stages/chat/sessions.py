"""What the server remembers of each open page: whether it asked to stop, and the two answers that wait for a vote."""

import threading
from dataclasses import dataclass

from stages.chat.votes import Question, Written


@dataclass(frozen=True)
class BlindComparison:
    """Two answers to one question in the order they are shown; how: the settings that they were drawn with."""

    question: Question
    shown: tuple[Written, Written]
    how: dict


@dataclass
class Session:
    """Of one open page."""

    stopped: bool = False
    duel: BlindComparison | None = None


class Sessions:
    """By the name that Gradio gives a page."""

    def __init__(self):
        self._lock, self._known = threading.Lock(), {}

    def of(self, name: str) -> Session:
        with self._lock:
            return self._known.setdefault(name, Session())

    def take_duel(self, name: str) -> BlindComparison | None:
        """Its duel, once: a second click finds none."""
        session = self.of(name)
        with self._lock:
            duel, session.duel = session.duel, None
        return duel

    def forget(self, name: str) -> None:
        """The page was closed."""
        with self._lock:
            self._known.pop(name, None)
