"""Where logged numbers and sample answers go beside an artifact's own files: the terminal, TensorBoard, W&B.

Questions and answers are text of strangers: a terminal gets no control characters, TensorBoard's Markdown and W&B's
HTML show a `<script>` as the letters it is made of.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Protocol

from stages.render.html import element, join_html, pre_text
from stages.render.terminal import escape_controls, format_value
from stages.runtime.artifact import RunContext
from stages.runtime.progress import CLEAR_LINE

SHOWN = 8  # sample answers a time
HELD_OUT = "validation_"
# Of a sample answer, what a line of the terminal has room for.
TOLD = ("question", "answer", "ended", "reward", "better_answer", "better_reward", "worse_answer", "worse_reward")
TEXT_CHARACTERS, TAB_CHARACTERS = 60, 4
FLUSH_SECONDS = 10
PROJECT = "stackllama"


class Sink(Protocol):
    """One of the places. Steps never fall; several rows of one step have different names."""

    def begin(self) -> None:
        """Start with nothing: what an earlier try of the same training left goes."""

    def numbers(self, step: int, row: dict[str, float]) -> None:
        """Numbers of a step under their names."""

    def samples(self, step: int, rows: list[dict]) -> None:
        """Sample answers of a step, each a mapping of names to texts and numbers."""

    def close(self) -> None:
        """Everything is on disk afterwards."""


class Terminal:
    """A line for the held-out numbers, and one for the first sample answer; the rest is the progress line's."""

    def __init__(self, stage: str, count: str):
        self.stage, self.count = stage, count

    def numbers(self, step: int, row: dict[str, float]) -> None:
        held_out = [f"{name.removeprefix(HELD_OUT)} {format_value(value)}" for name, value in row.items()
                    if name.startswith(HELD_OUT)]
        if held_out:
            self._say(f"held out at {self.count} {step}: {', '.join(held_out)}")

    def samples(self, step: int, rows: list[dict]) -> None:
        for row in rows[:1]:
            texts = [f"{name}: {format_value(_first_line(value), TEXT_CHARACTERS)}" for name, value in row.items()
                     if name in TOLD]
            self._say(f"sample at {self.count} {step}: {'; '.join(texts)}")

    def _say(self, text: str) -> None:
        print(f"{CLEAR_LINE if sys.stderr.isatty() else ''}{self.stage}: {text}", file=sys.stderr, flush=True)


class TensorBoard:
    """One event file in `folder`: scalars STAGE/NAME, samples as text under STAGE/samples."""

    def __init__(self, folder: Path, stage: str):
        self.folder, self.stage, self.writer = folder, stage, None

    def begin(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional package

        shutil.rmtree(self.folder, ignore_errors=True)
        # A TensorBoard that is open on this folder forgets what it has read, too: from step 0 on, all is written anew.
        self.writer = SummaryWriter(self.folder, purge_step=0, flush_secs=FLUSH_SECONDS)

    def numbers(self, step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            self.writer.add_scalar(f"{self.stage}/{name}", value, step)

    def samples(self, step: int, rows: list[dict]) -> None:
        self.writer.add_text(f"{self.stage}/samples", "\n\n---\n\n".join(map(markdown, rows[:SHOWN])), step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class WandB:
    """A run in the run's logs/wandb/: numbers STAGE/NAME, samples as HTML under STAGE/samples.

    Offline unless WANDB_MODE is set: no account, no network. W&B looks at neither git, code, packages nor the machine's
    load, and takes no hold of what is printed. A resumed run has the same id, one of other settings or inputs another.
    """

    def __init__(self, context: RunContext, stage: str, part: str, settings: dict):
        self.context, self.stage, self.settings, self.run = context, stage, settings, None
        self.name = "-".join(filter(None, (context.name, part)))
        self.id = f"{self.name}-{context.request_digest}"

    def begin(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its telemetry calls home, offline or not
        import wandb  # an optional package

        mode, folder = os.environ.get("WANDB_MODE", "offline"), self.context.folder
        for earlier in (folder / "wandb").glob(f"*run-{'?' * 8}_{'?' * 6}-{self.id}"):
            shutil.rmtree(earlier)
        folder.mkdir(parents=True, exist_ok=True)
        run = folder.resolve().parent.name
        silent = wandb.Settings(silent=mode == "offline", console="off", save_code=False, disable_git=True,
                                x_save_requirements=False, x_disable_meta=True, x_disable_stats=True)
        try:
            self.run = wandb.init(
                mode=mode, dir=folder, project=os.environ.get("WANDB_PROJECT", PROJECT), id=self.id,
                name=f"{run} {self.name}", group=run, job_type=self.stage, config=self.settings,
                resume="allow" if mode == "online" else None, settings=silent)
        except wandb.Error as error:
            raise ValueError(f"wandb does not start: {error}") from None
        self.html = wandb.Html

    def numbers(self, step: int, row: dict[str, float]) -> None:
        self.run.log({f"{self.stage}/{name}": value for name, value in row.items()}, step=step)

    def samples(self, step: int, rows: list[dict]) -> None:
        page = self.html(str(join_html(map(_page, rows[:SHOWN]))), inject=False)
        self.run.log({f"{self.stage}/samples": page}, step=step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


def markdown(row: dict) -> str:
    """Names and values of a sample answer as Markdown: values in code blocks, where nothing has a meaning."""
    return "\n\n".join(f"**{name}**\n\n{_code(value)}" for name, value in row.items())


def _code(value: object) -> str:
    lines = str(value).expandtabs(TAB_CHARACTERS).splitlines() or [""]
    return "\n".join(" " * 4 + escape_controls(text) for text in lines)


def _page(row: dict):
    return join_html(element("section", element("h4", name), pre_text(str(value))) for name, value in row.items())


def _first_line(value: object) -> object:
    return value.strip().partition("\n")[0] if isinstance(value, str) else value
