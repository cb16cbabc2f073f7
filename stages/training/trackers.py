"""Show logged metrics and sample answers in trackers: terminal, TensorBoard, W&B.

Questions and answers are untrusted text: control characters never reach the terminal, and TensorBoard's Markdown and
W&B's HTML show markup as text.
"""

import os
import shutil
from pathlib import Path
from typing import Protocol

from stages.artifacts.artifact import RunContext
from stages.render.html import element, join_html, pre_text
from stages.render.terminal import escape_controls, format_value
from stages.runtime.stage_lines import print_line

MAX_SAMPLES = 8  # shown per evaluation
VALIDATION_PREFIX = "validation_"
# Columns of a sample that fit into a line of the terminal.
TERMINAL_COLUMNS = ("question", "answer", "ended", "reward", "better_answer", "better_reward", "worse_answer",
                    "worse_reward")
TEXT_CHARACTERS, TAB_CHARACTERS = 60, 4
FLUSH_SECONDS = 10
PROJECT = "stackllama"


class Tracker(Protocol):
    """A destination of logs. Steps never decrease; the rows of one step have different metric names."""

    def start(self) -> None:
        """Start empty: delete what an earlier attempt at the same training run logged."""

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Log metrics by name."""

    def log_samples(self, step: int, rows: list[dict]) -> None:
        """Log sample answers, each a mapping of names to texts and numbers."""

    def close(self) -> None:
        """Flush everything to disk."""


class Terminal:
    """Print a line of validation metrics and one of the first sample answer; the progress line shows the rest."""

    def __init__(self, stage: str, step_name: str):
        self.stage, self.step_name = stage, step_name

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        validation = [f"{name.removeprefix(VALIDATION_PREFIX)} {format_value(value)}"
                      for name, value in metrics.items() if name.startswith(VALIDATION_PREFIX)]
        if validation:
            print_line(f"{self.stage}: held out at {self.step_name} {step}: {', '.join(validation)}")

    def log_samples(self, step: int, rows: list[dict]) -> None:
        for row in rows[:1]:
            columns = [f"{name}: {format_value(_first_line(value), TEXT_CHARACTERS)}"
                       for name, value in row.items() if name in TERMINAL_COLUMNS]
            print_line(f"{self.stage}: sample at {self.step_name} {step}: {'; '.join(columns)}")


class TensorBoard:
    """Write one event file in `folder`: scalars STAGE/NAME, samples as text in STAGE/samples."""

    def __init__(self, folder: Path, stage: str):
        self.folder, self.stage, self.writer = folder, stage, None

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional package

        shutil.rmtree(self.folder, ignore_errors=True)
        # purge_step=0: a TensorBoard that is open on this folder discards what it has read.
        self.writer = SummaryWriter(self.folder, purge_step=0, flush_secs=FLUSH_SECONDS)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(f"{self.stage}/{name}", value, step)

    def log_samples(self, step: int, rows: list[dict]) -> None:
        text = "\n\n---\n\n".join(map(format_markdown, rows[:MAX_SAMPLES]))
        self.writer.add_text(f"{self.stage}/samples", text, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class WandB:
    """Write a W&B run in the run's logs/wandb/: metrics STAGE/NAME, samples as HTML in STAGE/samples.

    Offline unless WANDB_MODE is set: no account, no network. W&B does not record git, code, packages, system load or
    the console. A resumed run keeps its id; a run with other settings or inputs gets another.
    """

    def __init__(self, context: RunContext, stage: str, part: str, settings: dict):
        self.context, self.stage, self.settings, self.run = context, stage, settings, None
        self.name = "-".join(filter(None, (context.name, part)))
        self.id = f"{self.name}-{context.request_digest}"

    def start(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its telemetry calls home, offline or not
        import wandb  # an optional package

        mode, folder = os.environ.get("WANDB_MODE", "offline"), self.context.folder
        for earlier in (folder / "wandb").glob(f"*run-{'?' * 8}_{'?' * 6}-{self.id}"):
            shutil.rmtree(earlier)
        folder.mkdir(parents=True, exist_ok=True)
        group = folder.resolve().parent.name
        settings = wandb.Settings(silent=mode == "offline", console="off", save_code=False, disable_git=True,
                                  x_save_requirements=False, x_disable_meta=True, x_disable_stats=True)
        try:
            self.run = wandb.init(
                mode=mode, dir=folder, project=os.environ.get("WANDB_PROJECT", PROJECT), id=self.id,
                name=f"{group} {self.name}", group=group, job_type=self.stage, config=self.settings,
                resume="allow" if mode == "online" else None, settings=settings)
        except wandb.Error as error:
            raise ValueError(f"wandb does not start: {error}") from None
        self.html = wandb.Html

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log({f"{self.stage}/{name}": value for name, value in metrics.items()}, step=step)

    def log_samples(self, step: int, rows: list[dict]) -> None:
        page = self.html(str(join_html(map(_sample_html, rows[:MAX_SAMPLES]))), inject=False)
        self.run.log({f"{self.stage}/samples": page}, step=step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


def format_markdown(row: dict) -> str:
    """Format a sample answer as Markdown, with values in code blocks, where markup has no effect."""
    return "\n\n".join(f"**{name}**\n\n{_code_block(value)}" for name, value in row.items())


def _code_block(value: object) -> str:
    lines = str(value).expandtabs(TAB_CHARACTERS).splitlines() or [""]
    return "\n".join(" " * 4 + escape_controls(text) for text in lines)


def _sample_html(row: dict):
    return join_html(element("section", element("h4", name), pre_text(str(value))) for name, value in row.items())


def _first_line(value: object) -> object:
    return value.strip().partition("\n")[0] if isinstance(value, str) else value
