"""What is logged while a model trains: numbers and sample answers, under the same names wherever they go.

The artifact's own files come first and are the truth: history.jsonl, timing.jsonl (seconds and memory, which no two
runs share) and samples.jsonl. TensorBoard and W&B get each row of them as it is written, every number under STAGE/NAME.
A run that resumes cuts its files back to the checkpoint, and writes all that is left to fresh TensorBoard and W&B
files: nothing stands there twice, or comes after the checkpoint, whatever was logged to before.
"""

from collections.abc import Sequence
from pathlib import Path

from stages.runtime.artifact import RunContext
from stages.runtime.files import write_text
from stages.runtime.progress import Progress
from stages.runtime.series import append_row, format_row, read_rows, truncate_after
from stages.training.trackers import Sink, TensorBoard, Terminal, WandB

HISTORY, TIMING, SAMPLES = "history", "timing", "samples"


class Logs:
    """The series of one training in the folder `out`, and who else is told. count: what a row counts, the unit of
    progress: step or iteration. quiet: nothing goes to the terminal."""

    def __init__(self, out: Path, stage: str, count: str = "step", sinks: Sequence[Sink] = (), quiet: bool = False):
        self.out, self.stage, self.count, self.quiet = out, stage, count, quiet
        self.told = [*sinks] + ([] if quiet else [Terminal(stage, count)])
        self.sinks = list(sinks)

    def resume(self, last: int, history: list[dict] | None = None) -> None:
        """Cut the series after `last`, a checkpoint's count (-1: there is none), and tell the sinks what is left.

        history: the rows that a checkpoint remembers itself, instead of the file's.
        """
        if history is not None:
            write_text(self._path(HISTORY), "".join(map(format_row, history)))
        for series in (HISTORY, TIMING, SAMPLES):
            truncate_after(self._path(series), last, self.count)
        for sink in self.sinks:
            sink.begin()
        for step, series, row in self._kept():
            for sink in self.sinks:
                _tell(sink, series, step, row)

    def numbers(self, step: int, row: dict[str, float], series: str = HISTORY) -> None:
        """A row of numbers; series: HISTORY for what repeats bit for bit, TIMING for what does not."""
        append_row(self._path(series), {self.count: step, **row})
        for sink in self.told:
            sink.numbers(step, row)

    def samples(self, step: int, rows: list[dict]) -> None:
        """Sample answers, each a mapping of names to texts and numbers."""
        for row in rows:
            append_row(self._path(SAMPLES), {self.count: step, **row})
        for sink in self.told:
            sink.samples(step, rows)

    def progress(self, label: str, total: int, done: int) -> Progress:
        """The bar, or the lines, of this training."""
        return Progress(label, total, f"{self.count}s", done=done, quiet=self.quiet)

    def close(self) -> None:
        """Everything is on disk afterwards."""
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _path(self, series: str) -> Path:
        return self.out / f"{series}.jsonl"

    def _kept(self) -> list[tuple[int, str, dict | list[dict]]]:
        """What the files hold, in the order of their counts: the samples of one count together."""
        found: list[tuple[int, str, dict | list[dict]]] = []
        for series in (HISTORY, TIMING):
            found += [(row.pop(self.count), series, row) for row in read_rows(self._path(series))]
        together: dict[int, list[dict]] = {}
        for row in read_rows(self._path(SAMPLES)):
            together.setdefault(row.pop(self.count), []).append(row)
        found += [(step, SAMPLES, rows) for step, rows in together.items()]
        return sorted(found, key=lambda entry: entry[0])


def open_logs(
    log_to: Sequence[str],
    out: Path,
    stage: str,
    context: RunContext | None,
    settings: dict,
    count: str = "step",
    part: str = "",
) -> Logs:
    """The logs that `log_to` names. part: of an artifact that holds several trainings, the folder of this one.

    context: see artifact.RunContext; None (a stage called as a function): what is no file of the artifact goes to out/logs.
    settings: of the training, for those who show them beside the numbers.
    """
    context = context or RunContext(out / "logs", stage, "by-hand")
    made = {
        "tensorboard": lambda: TensorBoard(context.folder / "tensorboard" / context.name / part, stage),
        "wandb": lambda: WandB(context, stage, part, settings),
    }
    sinks = [made[name]() for name in log_to if name in made]
    return Logs(out, stage, count, sinks, quiet="terminal" not in log_to)


def _tell(sink: Sink, series: str, step: int, row) -> None:
    (sink.samples if series == SAMPLES else sink.numbers)(step, row)
