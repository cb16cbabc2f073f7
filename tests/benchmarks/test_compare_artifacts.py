"""Two runs are compared without the seconds and the memory that they took, and with everything else."""

from pathlib import Path

import pytest

from benchmarks.quality.compare_artifacts import differences, file_digests

CURVES = "stage,step,metric,value\nppo,1,kl,0.5\nppo,1,update_seconds,{}\nppo,1,peak_memory_mib,{}\nppo,2,kl,{}\n"


def write_run(run: Path, seconds: float, kl: float) -> Path:
    figures = run / "report/figures"
    figures.mkdir(parents=True)
    (run / "report/manifest.json").touch()
    (run / "report/curves.csv").write_text(CURVES.format(seconds, seconds, kl))
    for name in ("ppo-seconds.svg", "pipeline.svg", "pipeline.png"):
        (figures / name).write_text(str(seconds))
    (figures / "ppo-kl.svg").write_text(str(kl))
    return run


@pytest.mark.parametrize(("kl", "expected"), [
    (0.25, []), (0.75, ["report/curves.csv: differs", "report/figures/ppo-kl.svg: differs"])])
def test_only_measurements_are_left_out(kl, expected, tmp_path):
    runs = write_run(tmp_path / "a", 1.5, 0.25), write_run(tmp_path / "b", 2.5, kl)
    assert differences(*map(file_digests, runs)) == expected
