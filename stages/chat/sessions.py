"""Keep the state of each open page: whether to stop, and the two answers that wait for a vote."""

import threading
from dataclasses import dataclass

from stages.chat.votes import Question, VotedAnswer


@dataclass(frozen=True)
class BlindComparison:
    """Two answers to one question, in the order in which they are shown, with their sampling settings."""

    question: Question
    answers: tuple[VotedAnswer, VotedAnswer]
    sampling: dict


@dataclass
class Session:
    """The state of one open page; question_count: the last of its questions is being answered."""

    question_count: int = 0
    stopped: bool = False
    comparison: BlindComparison | None = None


class Sessions:
    """Sessions by the id that Gradio gives each page."""

    def __init__(self):
        self._lock, self._sessions = threading.Lock(), {}

    def get(self, page: str) -> Session:
        """Return the session of a page, creating it if needed."""
        with self._lock:
            return self._sessions.setdefault(page, Session())

    def take_comparison(self, page: str) -> BlindComparison | None:
        """Return the page's comparison and clear it: a second click gets none."""
        session = self.get(page)
        with self._lock:
            comparison, session.comparison = session.comparison, None
        return comparison

    def remove(self, page: str) -> None:
        """Forget a page that was closed."""
        with self._lock:
            self._sessions.pop(page, None)
