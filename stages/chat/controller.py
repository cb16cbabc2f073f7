"""What a click does: questions to answers as HTML, votes to the folder. Knows models and votes, not the page."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.chat import views
from stages.chat.sessions import BlindComparison, Sessions
from stages.chat.streaming import BEST_OF_N, Answer, ChatModels, SamplingSettings
from stages.chat.votes import TIES, VOTES, Question, Votes, Written, models_of, vote_row
from stages.render.html import Html
from stages.render.terminal import shortened
from stages.stackexchange.pairs.table import best_rows, first_questions, first_rows, key_of

SPLIT, MOST_QUESTIONS = "evaluation", 2000
SHOW_EVERY_SECONDS = 0.1  # a page cannot draw faster, and every drawing costs tokens
FAULTS = ValueError, RuntimeError  # a question that cannot be asked; memory that is not there
CHANCE = random.SystemRandom()
TITLE_CHARACTERS = 160


@dataclass(frozen=True)
class Verdict:
    """What is shown after a vote: one line of what became of it, one for each answer; open: it may be given again."""

    notice: Html
    lines: tuple[Html, Html] = (Html(""), Html(""))
    open: bool = False


class ChatController:
    """pairs: the artifact that held-out questions are picked from. digests: of each model, what names it in a vote."""

    def __init__(self, speakers: ChatModels, pairs: Path, votes: Votes, digests: dict[str, str]):
        self.speakers, self.votes, self.digests = speakers, votes, digests
        self.sessions = Sessions()
        held = best_rows(first_rows(pairs, SPLIT, first_questions(pairs, SPLIT, 1.0, MOST_QUESTIONS)))
        self.rows = {row["question"].strip(): row for row in held}
        self.questions = list(self.rows)
        self.running = False

    def titles(self) -> list[str]:
        """Of the held-out questions, the beginning of each in one line."""
        return [shortened(" ".join(text.split()), TITLE_CHARACTERS) for text in self.questions]

    def question(self, number: int | None) -> str:
        """A held-out question by its number."""
        return "" if number is None else self.questions[number]

    def random(self) -> int | None:
        """The number of some held-out question; None where there is none."""
        return CHANCE.randrange(len(self.questions)) if self.questions else None

    def human(self, question: str) -> Html:
        """The best human answer, where one is known."""
        return views.human(self.rows.get(question.strip()))

    def begin(self, page: str) -> Html:
        """Before a question is in the queue: what the page says while it waits there."""
        self.sessions.of(page).stopped = False
        return views.waiting("Waits for its turn: another question is being answered…" if self.running else "Reading…")

    def stop(self, page: str) -> None:
        self.sessions.of(page).stopped = True

    def side_by_side(self, page: str, question: str, how: dict, names: list[str]) -> Iterator[tuple[Html, ...]]:
        """A notice and a panel for each name, again and again while they grow."""
        reference = self.speakers.reference
        try:
            for answers, stopped in self._growing(page, question, how, names):
                yield views.notice(""), *(views.answer(found, reference, stopped) for found in answers)
        except FAULTS as error:
            yield views.notice(str(error)), *[views.waiting("No answer.") for _ in names]

    def blind(self, page: str, question: str, how: dict, names: list[str]) -> Iterator[tuple[Html, Html, Html, bool]]:
        """A notice, two answers in random order once both are done, and whether they can be voted on.

        Nothing is shown before: best-of-n would be known by its way of growing.
        """
        try:
            for answers, stopped in self._growing(page, question, how, CHANCE.sample(names, len(names))):
                words = f"Both are being written: {sum(found.drawn for found in answers)} tokens so far…"
                yield views.notice(""), *[views.waiting("Stopped." if stopped else words)] * 2, False
        except FAULTS as error:
            yield views.notice(str(error)), *[views.waiting("No answer.")] * 2, False
            return
        if stopped:
            return
        same = answers[0].text.strip() == answers[1].text.strip()
        if not same:
            self._open_duel(page, question, how, answers)
        words = "Both wrote the very same: there is nothing to choose. Ask again, or something else." if same else ""
        yield views.notice(words), *(views.plain(found.text) for found in answers), not same

    def vote(self, page: str, choice: int | None) -> Verdict:
        """Keep the vote on the page's two answers: 0 or 1, the better one; None, a tie. Tells whose they were.

        A vote that cannot be kept tells nothing: it may be given again when there is room on the disk.
        """
        duel = self.sessions.take_duel(page)
        if duel is None:
            return Verdict(views.notice("There is nothing to vote on: ask a question first."))
        order = (0, 1) if choice is None else (choice, 1 - choice)
        row = vote_row(duel.question, *(duel.shown[i] for i in order), duel.how, tie=choice is None)
        kind = TIES if choice is None else VOTES
        try:
            self.votes.add(kind, row)
        except (ValueError, OSError) as error:
            self.sessions.of(page).duel = duel
            return Verdict(views.notice(f"The vote is not kept: {error}"), open=True)
        verdicts = [("tie" if choice is None else "chosen" if i == choice else "not chosen") for i in (0, 1)]
        said = views.notice(f"Kept in {self.votes.folder / kind}.")
        return Verdict(said, tuple(map(views.revealed, duel.shown, verdicts)))

    def tally(self, names: list[str], samples: int) -> Html:
        """Of these two policies as they are now: votes on other models of these names do not count."""
        one, other = (f"best of {samples}" if name == BEST_OF_N else name for name in names)
        if one == other:
            return views.notice(f"Both are {one}: votes are kept, and there is nothing to tally.")
        try:
            found = [(models_of(row), key_of(row), kind) for kind in (VOTES, TIES) for row in self.votes.rows(kind)]
        except ValueError as error:
            return views.notice(str(error))
        sides = {(one, self._digest(names[0])): 1.0, (other, self._digest(names[1])): 0.0}
        values, questions = [], set()
        for (better, worse), question, kind in found:
            if {better, worse} == set(sides):
                values.append(0.5 if kind == TIES else sides[better])
                questions.add(question)  # votes on one question are not independent
        return views.tally(one, other, values, len(questions))

    def _growing(self, page: str, question: str, how: dict, names: list[str]) -> Iterator[tuple[list[Answer], bool]]:
        """Answers now and then, at last as they remain; whether they were stopped. ValueError: not asked."""
        manner = SamplingSettings(**how, seed=CHANCE.randrange(2**31))
        prompt = self.speakers.prompt(question, manner)
        session, self.running, answers, shown = self.sessions.of(page), True, [], 0.0
        try:
            for answers in self.speakers.together(names, prompt, manner):
                if session.stopped:
                    break
                if time.monotonic() - shown >= SHOW_EVERY_SECONDS:
                    shown = time.monotonic()
                    yield answers, False
            yield answers, session.stopped
        finally:
            self.running = False

    def _open_duel(self, page: str, question: str, how: dict, answers: list[Answer]) -> None:
        shown = tuple(Written(found.speaker, self._digest(BEST_OF_N if found.rewards else found.speaker), found.text,
                              found.reward, found.ended) for found in answers)
        asked = Question(question, self.rows.get(question.strip()))
        self.sessions.of(page).duel = BlindComparison(asked, shown, how)

    def _digest(self, name: str) -> str:
        return self.digests.get(name, "")
