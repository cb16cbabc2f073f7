"""Look up what each policy cost to train, and its learning curve: from the manifests of its training."""

from collections.abc import Iterable
from pathlib import Path

from stages.runtime.artifact import digest, read_manifest
from stages.runtime.manifest import list_input_sources
from stages.runtime.series import read_history

MERGE = "merge"


class Trainings:
    """Artifacts of trainings and of merges, by the digest that the artifacts made from them have recorded."""

    def __init__(self, folders: Iterable[Path]):
        self.folders = {digest(folder): folder for folder in folders}
        self.manifests = {sha256: read_manifest(folder) for sha256, folder in self.folders.items()}

    def find(self, sha256: str | None) -> str | None:
        """Return the digest of the training that a model comes from: of a merge, its last adapter; None: not given."""
        manifest = self.manifests.get(sha256)
        if manifest and manifest["stage"] == MERGE:
            adapters = [source["sha256"] for label, source in list_input_sources(manifest["inputs"]).items()
                        if label.startswith("adapter")]
            return self.find(adapters[-1])
        return sha256 if manifest else None

    def seconds(self, sha256: str) -> float:
        """Return the seconds that a training took."""
        return self.manifests[sha256]["seconds"]

    def path_of_kl(self, sha256: str) -> list[tuple[float, float]]:
        """List (KL, mean reward) on the training's validation prompts at each of its evaluations."""
        rows = read_history(self.folders[sha256])
        return [(row["validation_kl"], row["validation_reward"]) for row in rows
                if row.get("validation_kl") is not None and row.get("validation_reward") is not None]


def find_models(evaluation: dict) -> dict[str, str | None]:
    """Return the digest of each model of an evaluation's manifest: by policy, and 'sft', 'reward', 'judge'."""
    return {label.removeprefix("policy."): source.get("sha256")
            for label, source in list_input_sources(evaluation["inputs"]).items()}
