"""Handle the events of the demo page: stream answers as HTML, save votes. Independent of Gradio."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.chat import views
from stages.chat.sessions import BlindComparison, Sessions
from stages.chat.streaming import BEST_OF_N, Answer, ChatModels, SamplingSettings
from stages.chat.votes import TIES, VOTES, Question, VotedAnswer, Votes, parse_vote_models, vote_row
from stages.render.html import Html
from stages.render.terminal import shorten
from stages.stackexchange.pairs.table import best_rows, first_question_keys, question_key, read_first_rows

SPLIT, MAX_QUESTIONS = "evaluation", 2000
SHOW_EVERY_SECONDS = 0.1  # a page cannot draw faster, and every update costs tokens
USER_ERRORS = ValueError, RuntimeError  # an invalid question; out of memory
RANDOM = random.SystemRandom()
TITLE_CHARACTERS, EXAMPLES = 160, 4


@dataclass(frozen=True)
class VoteResult:
    """What the page shows after a vote: a notice, and a line for each answer; can_retry: the vote was not saved."""

    notice: Html
    lines: tuple[Html, Html] = (Html(""), Html(""))
    can_retry: bool = False


class ChatController:
    """Answer questions and save votes.

    Args:
        pairs: artifact with the held-out questions to choose from.
        digests: of each model by name; they identify it in votes.
    """

    def __init__(self, models: ChatModels, pairs: Path, votes: Votes, digests: dict[str, str]):
        self.models, self.votes, self.digests = models, votes, digests
        self.sessions = Sessions()
        rows = best_rows(read_first_rows(pairs, SPLIT, first_question_keys(pairs, SPLIT, 1.0, MAX_QUESTIONS)))
        self.rows = {row["question"].strip(): row for row in rows}
        self.questions = list(self.rows)
        self.busy = False

    def question_titles(self) -> list[str]:
        """Return the start of each held-out question, in one line."""
        return [shorten(" ".join(text.split()), TITLE_CHARACTERS) for text in self.questions]

    def question_text(self, index: int | None) -> str:
        """Return a held-out question."""
        return self.questions[index] if isinstance(index, int) else ""  # Gradio lets other types pass

    def random_question(self) -> int | None:
        """Return the index of a random held-out question; None if there is none."""
        return RANDOM.randrange(len(self.questions)) if self.questions else None

    def example_questions(self) -> list[int]:
        """Return the indices of the first few held-out questions, short ones before others."""
        indices = range(len(self.questions))
        return sorted(indices, key=lambda index: len(self.questions[index]) > TITLE_CHARACTERS)[:EXAMPLES]

    def best_human_answer(self, question: str) -> Html:
        """Render the best human answer, if one is known."""
        return views.render_human_answer(self.rows.get((question or "").strip()))

    def start(self, page: str) -> Html:
        """Prepare the page for a new question; render what it shows while the question waits in the queue.

        An answer that the page still waits for is stopped.
        """
        session = self.sessions.get(page)
        session.stopped, session.question_count = False, session.question_count + 1
        message = "Waits for its turn: another question is being answered…" if self.busy else "Reading…"
        return views.render_waiting(message)

    def stop(self, page: str) -> None:
        self.sessions.get(page).stopped = True

    def stream_side_by_side(
        self, page: str, question: str, sampling: dict, names: list[str]
    ) -> Iterator[tuple[Html, ...]]:
        """Yield a notice and a panel for each name, again and again while the answers grow."""
        try:
            for answers, stopped in self._stream(page, question, sampling, names):
                panels = (views.render_answer(answer, self.models.reference, stopped) for answer in answers)
                yield views.render_notice(""), *panels
        except USER_ERRORS as error:
            yield views.render_notice(str(error)), *[views.render_waiting("No answer.") for _ in names]

    def stream_blind(
        self, page: str, question: str, sampling: dict, names: list[str]
    ) -> Iterator[tuple[Html, Html, Html, bool]]:
        """Yield a notice, two answers in random order once both are done, and whether they can be voted on.

        Nothing is shown before, because best-of-n could be recognised by the way it grows.
        """
        try:
            for answers, stopped in self._stream(page, question, sampling, RANDOM.sample(names, len(names))):
                tokens = sum(answer.sampled_tokens for answer in answers)
                message = "Stopped." if stopped else f"Both are being written: {tokens} tokens so far…"
                yield views.render_notice(""), *[views.render_waiting(message)] * 2, False
        except USER_ERRORS as error:
            yield views.render_notice(str(error)), *[views.render_waiting("No answer.")] * 2, False
            return
        if stopped:
            return
        identical = answers[0].text.strip() == answers[1].text.strip()
        if not identical:
            self._open_comparison(page, question, sampling, answers)
        message = "Both wrote the very same: there is nothing to choose. Ask again, or something else."
        panels = (views.render_blind_answer(answer.text) for answer in answers)
        yield views.render_notice(message if identical else ""), *panels, not identical

    def vote(self, page: str, choice: int | None) -> VoteResult:
        """Save the vote on the page's two answers (the better one, 0 or 1; None: a tie), and reveal the policies.

        If it cannot be saved nothing is revealed, and the vote can be repeated, when the disk has room again.
        """
        comparison = self.sessions.take_comparison(page)
        if comparison is None:
            return VoteResult(views.render_notice("There is nothing to vote on: ask a question first."))
        order = (0, 1) if choice is None else (choice, 1 - choice)
        ordered = (comparison.answers[i] for i in order)
        row = vote_row(comparison.question, *ordered, comparison.sampling, tie=choice is None)
        kind = TIES if choice is None else VOTES
        try:
            self.votes.add(kind, row)
        except (ValueError, OSError) as error:
            self.sessions.get(page).comparison = comparison
            return VoteResult(views.render_notice(f"The vote is not saved: {error}"), can_retry=True)
        verdicts = [("tie" if choice is None else "chosen" if i == choice else "not chosen") for i in (0, 1)]
        notice = views.render_notice(f"Saved in {self.votes.folder / kind}.")
        return VoteResult(notice, tuple(map(views.render_verdict, comparison.answers, verdicts)))

    def tally_votes(self, names: list[str], samples: int) -> Html:
        """Tally the votes between two policies as they are now; votes on other models of these names do not count."""
        try:
            self._check_names(names)
            one, other = (f"best of {samples}" if name == BEST_OF_N else name for name in names)
            if one == other:
                raise ValueError(f"Both are {one}: votes are saved, and there is nothing to tally.")
            votes = [(parse_vote_models(row), question_key(row), kind)
                     for kind in (VOTES, TIES) for row in self.votes.rows(kind)]
        except ValueError as error:
            return views.render_notice(str(error))
        wins = {(one, self._digest(names[0])): 1.0, (other, self._digest(names[1])): 0.0}
        values, questions = [], set()
        for (better, worse), question, kind in votes:
            if {better, worse} == set(wins):
                values.append(0.5 if kind == TIES else wins[better])
                questions.add(question)  # votes on one question are not independent
        return views.render_tally(one, other, values, len(questions))

    def _stream(
        self, page: str, question: str, sampling: dict, names: list[str]
    ) -> Iterator[tuple[list[Answer], bool]]:
        """Yield the answers every SHOW_EVERY_SECONDS and at the end, and whether they were stopped."""
        self._check_names(names)
        settings = SamplingSettings(**sampling, seed=RANDOM.randrange(2**31))
        prompt = self.models.encode_prompt(question, settings)
        session, self.busy, answers, shown = self.sessions.get(page), True, [], 0.0
        number, stopped = session.question_count, False
        try:
            for answers in self.models.stream_side_by_side(names, prompt, settings):
                stopped = session.stopped or session.question_count != number
                if stopped:
                    break
                if time.monotonic() - shown >= SHOW_EVERY_SECONDS:
                    shown = time.monotonic()
                    yield answers, False
            yield answers, stopped
        finally:
            self.busy = False

    def _check_names(self, names: list[str]) -> None:
        if not all(name in self.models.names for name in names):
            raise ValueError("Choose a model for each answer.")

    def _open_comparison(self, page: str, question: str, sampling: dict, answers: list[Answer]) -> None:
        voted = tuple(
            VotedAnswer(answer.policy, self._digest(BEST_OF_N if answer.rewards else answer.policy), answer.text,
                        answer.reward, answer.ended)
            for answer in answers)
        row = self.rows.get(question.strip())
        self.sessions.get(page).comparison = BlindComparison(Question(question, row), voted, sampling)

    def _digest(self, name: str) -> str:
        return self.digests.get(name, "")
