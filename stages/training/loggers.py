"""Log metrics and sample answers while a model trains, under the same names everywhere.

The artifact's own files are the truth: history.jsonl, timing.jsonl (seconds and memory, which differ from run to run)
and samples.jsonl. Trackers (terminal, TensorBoard, W&B) get each row when it is written, metrics as STAGE/NAME. A
resumed run truncates its files at the checkpoint and replays them to fresh TensorBoard and W&B files: nothing is logged
twice, whatever was logged to before.
"""

from collections.abc import Sequence
from pathlib import Path

from stages.artifacts.artifact import RunContext
from stages.runtime.files import write_text
from stages.runtime.processes import is_main
from stages.runtime.progress import Progress
from stages.runtime.series import append_row, format_row, read_rows, truncate_after
from stages.runtime.stage_lines import is_stage_folder
from stages.training.trackers import TensorBoard, Terminal, Tracker, WandB

HISTORY, TIMING, SAMPLES = "history", "timing", "samples"


class TrainingLogger:
    """Write the series of one training run to the folder `out` and to its trackers.

    Args:
        step_name: what a row is numbered by, and the unit of progress: 'step' or 'iteration'.
        quiet: write nothing to the terminal.
    """

    def __init__(
        self, out: Path, stage: str, step_name: str = "step", trackers: Sequence[Tracker] = (), quiet: bool = False
    ):
        self.out, self.stage, self.step_name, self.quiet = out, stage, step_name, quiet
        self.replayed = list(trackers)
        self.trackers = self.replayed + ([] if quiet else [Terminal(stage, step_name)])

    def resume(self, last: int, history: list[dict] | None = None) -> None:
        """Truncate the series after step `last` of a checkpoint (-1: there is none), and replay them to the trackers.

        history: rows from the checkpoint that replace those of the file.
        """
        if history is not None:
            write_text(self._path(HISTORY), "".join(map(format_row, history)))
        for series in (HISTORY, TIMING, SAMPLES):
            truncate_after(self._path(series), last, self.step_name)
        for tracker in self.replayed:
            tracker.start()
        for step, series, logged in self._read_all():
            for tracker in self.replayed:
                (tracker.log_samples if series == SAMPLES else tracker.log_metrics)(step, logged)

    def log_metrics(self, step: int, metrics: dict[str, float], series: str = HISTORY) -> None:
        """Log a row of metrics: to HISTORY if they repeat bit for bit, else to TIMING."""
        append_row(self._path(series), {self.step_name: step, **metrics})
        for tracker in self.trackers:
            tracker.log_metrics(step, metrics)

    def log_samples(self, step: int, rows: list[dict]) -> None:
        """Log sample answers, each a mapping of names to texts and numbers."""
        for row in rows:
            append_row(self._path(SAMPLES), {self.step_name: step, **row})
        for tracker in self.trackers:
            tracker.log_samples(step, rows)

    def progress(self, label: str, total: int, done: int) -> Progress:
        """Create the progress display of this run."""
        return Progress(label, total, f"{self.step_name}s", done=done, quiet=self.quiet,
                        is_stage=is_stage_folder(self.out))

    def close(self) -> None:
        """Flush all trackers to disk."""
        for tracker in self.replayed:
            tracker.close()

    def __enter__(self) -> "TrainingLogger":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _path(self, series: str) -> Path:
        return self.out / f"{series}.jsonl"

    def _read_all(self) -> list[tuple[int, str, dict | list[dict]]]:
        """Read (step, series, row) from all files, ordered by step; the samples of a step are one list."""
        entries: list[tuple[int, str, dict | list[dict]]] = []
        for series in (HISTORY, TIMING):
            entries += [(row.pop(self.step_name), series, row) for row in read_rows(self._path(series))]
        samples: dict[int, list[dict]] = {}
        for row in read_rows(self._path(SAMPLES)):
            samples.setdefault(row.pop(self.step_name), []).append(row)
        entries += [(step, SAMPLES, rows) for step, rows in samples.items()]
        return sorted(entries, key=lambda entry: entry[0])


def open_logger(
    log_to: Sequence[str], out: Path, stage: str, context: RunContext | None, settings: dict,
    step_name: str = "step", part: str = "",
) -> TrainingLogger:
    """Open the logger with the trackers that `log_to` names.

    Args:
        context: where the trackers write; None (a stage called as a function): to out/logs.
        settings: of the training run, shown by trackers beside the metrics.
        part: in an artifact that holds several training runs, the folder of this one.

    Of several processes, only the first one has trackers.
    """
    log_to = log_to if is_main() else ()
    context = context or RunContext(out / "logs", stage, "by-hand")
    factories = {
        "tensorboard": lambda: TensorBoard(context.folder / "tensorboard" / context.name / part, stage),
        "wandb": lambda: WandB(context, stage, part, settings),
    }
    trackers = [factories[name]() for name in log_to if name in factories]
    return TrainingLogger(out, stage, step_name, trackers, quiet="terminal" not in log_to)
