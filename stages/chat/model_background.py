"""Read from a run what its models can know: which sites they learnt from, and what their base knew before."""

from dataclasses import dataclass, field
from pathlib import Path

from stages.runtime.artifact import MANIFEST
from stages.runtime.files import read_json_object

HELD_OUT = "evaluation"  # the split that no model has learnt from
SCRATCH = "scratch"  # a base that was trained by the pipeline, on the run's own text
# What a reader cannot guess from the name of the bundled site; tests hold the names to data/demo/facts.py.
SUBJECTS = {
    "demo.stackexchange.com": (
        "demo.stackexchange.com is an invented site about twelve invented command-line tools: harbor, finch, maple, "
        "pixel, cobalt, otter, lantern, quartz, falcon, saffron, breeze and nimbus. People ask for the dry run flag, "
        "the default port, the settings file or the cache command of one or two of them, and want a command to type or "
        "the reason why."),
}


@dataclass(frozen=True)
class ModelBackground:
    """What the models of a run learnt from.

    sites: number of questions by site, most first. held_out: number of questions among them that no model has learnt
    from. base: hub id or folder of the pretrained base, SCRATCH, or None if it is unknown. parameters: of the base.
    """

    sites: dict[str, int] = field(default_factory=dict)
    held_out: int = 0
    base: str | None = None
    parameters: int | None = None


def read_model_background(run: Path) -> ModelBackground:
    """Read the manifests of the pairs and of the base; what they do not say is left out."""
    pairs, base = _read_manifest(run / "pairs", "metrics"), run / "base"
    questions = {site: counts.get("questions", 0) for site, counts in pairs.get("sites", {}).items()}
    return ModelBackground(
        dict(sorted(questions.items(), key=lambda item: -item[1])),
        pairs.get("questions_by_split", {}).get(HELD_OUT, 0),
        _read_manifest(base, "config").get("model"), _read_manifest(base, "metrics").get("parameters"))


def _read_manifest(artifact: Path, key: str) -> dict:
    return (read_json_object(artifact / MANIFEST) or {}).get(key, {})
