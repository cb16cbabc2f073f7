"""Say where a pretrained model is from: `provenance.json` in its folder, written when it was converted."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from stages.runtime.files import read_json_object, write_json

PROVENANCE = "provenance.json"


@dataclass(frozen=True)
class Provenance:
    """Where a model's weights are from.

    name: hub id, or the name that its file gives. license: as its file names it. file, sha256: of the GGUF file.
    is_chat_tuned: whether it was tuned for chat before, and has a chat template. file_type: as Q4_1. weight_bits: to
    which weights were rounded in that file, scales apart.
    """

    name: str
    license: str | None
    file: str
    sha256: str
    is_chat_tuned: bool
    file_type: str
    weight_bits: int

    def describe(self) -> str:
        """Say in half a sentence what the model is: licence, chat, rounding."""
        license_words = f"licence {self.license}" if self.license else "its file names no licence"
        chat = "tuned for chat before" if self.is_chat_tuned else "without a chat template"
        rounded = "not rounded" if self.weight_bits > 16 else f"rounded to {self.weight_bits} bits"
        return f"{license_words}, {chat}, weights {rounded} ({self.file_type}, {self.file})"


def write_provenance(folder: Path, provenance: Provenance) -> None:
    """Write the file into a model's folder."""
    write_json(folder / PROVENANCE, asdict(provenance))


def read_provenance(folder: Path) -> Provenance | None:
    """Read the file of a model's folder; None if there is none, or it is not whole."""
    values = read_json_object(folder / PROVENANCE) or {}
    names = [field.name for field in fields(Provenance)]
    return Provenance(**{name: values[name] for name in names}) if values.keys() >= set(names) else None
