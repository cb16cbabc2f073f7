"""Free space: asked for before anything is trained and before each checkpoint, from what will be written."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stages import gather, pairs, report
from stages.finetuning.token_store import BATCH_DOCUMENTS, write_documents
from stages.modeling import pretrained
from stages.modeling.merging import merge
from stages.recipe.sections.data import Pairs
from stages.recipe.sections.evaluate import Report
from stages.training import checkpoint
from stages.training.callbacks import Evaluation
from stages.training.checkpoint_plan import checkpoint_interval, count_saves
from stages.training.trainer import TrainerSettings, train
from tests.helpers import finished_run
from tests.helpers.stackexchange_dumps import document, make_posts, qa_rows, write_dump

SETTINGS = TrainerSettings(batch=1, microbatch=1, learning_rate=0.1, schedule="constant", weight_decay=0.0, seed=0,
                           save_every_steps=2, max_steps=6)
WEIGHTS = 4 * (64 + 8)  # bytes of the model
NEEDED = 3 * (2 * WEIGHTS + 2 * WEIGHTS) + 2 * WEIGHTS  # three checkpoints with best weights and AdamW's state, result


@pytest.fixture
def free(monkeypatch):
    """Say how many bytes are free."""
    def say(count: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=count))
    return say


def train_toy(out: Path, at_step=lambda step: None) -> torch.Tensor:
    torch.manual_seed(0)
    model, steps = torch.nn.Linear(8, 8), iter(range(1, 99))

    def loss(items):
        at_step(next(steps))
        return model(torch.tensor([items] * 8)).square().sum()

    train(model, [1.0, 2.0] * 3, lambda items: {"content": items[0], "items": 1}, loss, SETTINGS, out, "toy",
          Evaluation(lambda step: {"quality": step}, 2, lambda row: row["quality"]))
    return model.weight.detach()


def test_without_room_nothing_is_trained(tmp_path, free):
    free(NEEDED - 1)
    with pytest.raises(ValueError, match=rf"needs {NEEDED / 1024:.1f} KiB of disk space under {tmp_path}, where .* are "
                                         "free: make room") as refused:
        train_toy(tmp_path, lambda step: pytest.fail("it trains"))
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())
    free(NEEDED)
    train_toy(tmp_path)


def test_a_disk_that_fills_stops_before_a_checkpoint_and_the_result_is_the_same(tmp_path, free):
    whole = train_toy(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"the next checkpoint: needs .* of disk space under"):
        train_toy(tmp_path / "cut", lambda step: free(NEEDED if step < 4 else 3 * WEIGHTS - 1))
    checkpoints = tmp_path / "cut" / "checkpoints"
    assert [folder.name for folder in checkpoints.iterdir()] == ["checkpoint-2"]
    size = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    free(max(0, NEEDED - size))  # what is there needs no room
    steps = []
    again = train_toy(tmp_path / "cut", lambda step: steps.append(step) or free(NEEDED))
    assert torch.equal(again, whole) and len(steps) == 4


def test_a_checkpoint_of_ppo_is_not_begun_without_room(tmp_path, free):
    def save(number):
        checkpoint.save_checkpoint(tmp_path, {"weight": torch.zeros(256)}, {}, number=number, keep=2)

    free(1024)
    save(1)
    free(1023)
    with pytest.raises(ValueError, match=r"the next checkpoint: needs 1\.0 KiB of disk space .* 1,023 bytes are free"):
        save(2)
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoint-000001"]


@pytest.mark.parametrize(("items", "batch", "epochs", "max_steps", "saves"), [
    (10, 1, 1.0, None, 5), (10, 4, 1.0, None, 2), (10, 1, 1.0, 3, 2), (10, 10, 0.1, None, 1)])
def test_the_number_of_checkpoints(items, batch, epochs, max_steps, saves):
    assert count_saves(items, batch, epochs, max_steps, every_steps=2) == saves


def test_a_checkpoint_by_time_may_follow_every_step():
    assert [checkpoint_interval(250, minutes) for minutes in (None, 30.0)] == [250, 1]


@pytest.mark.parametrize(("dtype", "size_bytes"), [("fp32", 4 * 72), ("bf16", 2 * 72)])
def test_merged_weights_need_room(tmp_path, free, dtype, size_bytes):
    free(size_bytes - 1)
    with pytest.raises(ValueError, match=f"the merged weights: needs {size_bytes} bytes of disk space under"):
        merge._check_space(torch.nn.Linear(8, 8), tmp_path, dtype)


def test_a_copied_base_needs_room_where_it_cannot_be_linked(tmp_path, free, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "base" / "model.safetensors").write_bytes(bytes(500))
    monkeypatch.setattr(pretrained, "check_base_files", lambda folder: None)
    monkeypatch.setattr(pretrained, "is_on_device", lambda file, folder: False)
    free(499)
    with pytest.raises(ValueError, match=r"the copy of .*base: needs 500 bytes of disk space"):
        pretrained.copy_pretrained(str(tmp_path / "base"), None, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_pairs_need_twice_the_posts(tmp_path, free):
    make_posts(tmp_path / "posts", write_dump(tmp_path, document(*(qa_rows(n) for n in range(1, 300, 3)))))
    (tmp_path / "pairs").mkdir()
    needed = 2 * sum(file.stat().st_size for file in (tmp_path / "posts").glob("*.parquet"))
    free(needed - 1)
    with pytest.raises(ValueError, match=r"pairs: needs .* of disk space under .*/pairs"):
        pairs.run(Pairs(), tmp_path / "pairs", posts=tmp_path / "posts")
    free(needed)
    pairs.run(Pairs(), tmp_path / "pairs", posts=tmp_path / "posts")


def test_a_download_needs_room_for_what_the_cache_lacks(tmp_path, free, monkeypatch):
    def download(model, revision, allow_patterns, dry_run=False):
        downloaded.append(dry_run)
        return [SimpleNamespace(file_size=size, will_download=size < 900) for size in (300, 200, 1000, None)
                if size] if dry_run else tmp_path

    downloaded: list[bool] = []
    monkeypatch.setattr(pretrained, "snapshot_download", download)
    free(499)
    with pytest.raises(ValueError, match=r"the download of owner/name: needs 500 bytes of disk space under .*hub"):
        pretrained.copy_pretrained("owner/name", None, tmp_path / "out")
    assert downloaded == [True] and not (tmp_path / "out").exists()
    free(500)
    assert pretrained._download("owner/name", None) == tmp_path and downloaded == [True, True, False]


@pytest.mark.parametrize(("max_tokens", "batches"), [(None, 4), (2 * 5 * BATCH_DOCUMENTS, 2)])
def test_token_ids_of_all_documents_need_room_before_the_first_is_written(tmp_path, free, max_tokens, batches):
    def write():
        documents = (([1] * 2, [2] * 3) for _ in range(4 * BATCH_DOCUMENTS))
        return write_documents(tmp_path / "d.arrow", documents, max_tokens, 4 * BATCH_DOCUMENTS)

    needed = batches * BATCH_DOCUMENTS * 4 * (5 + 1 + 1)  # ids, where each list ends, tokens of each prompt
    free(needed - 1)
    with pytest.raises(ValueError, match=r"the token ids of the documents: needs .* KiB of disk space under"):
        write()
    assert not list(tmp_path.iterdir())
    free(needed)
    assert len(write()) == batches * BATCH_DOCUMENTS
    free(0)
    write()  # as written before: needs no room


def test_shares_need_room_where_they_cannot_be_linked(tmp_path, free, monkeypatch):
    (tmp_path / "share" / "finetune").mkdir(parents=True)
    (tmp_path / "share" / "finetune" / "part-00000.parquet").write_bytes(bytes(500))
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(gather, "_check_shares", lambda *_: None)
    monkeypatch.setattr(gather, "read_manifest", lambda _: {"metrics": {}})
    monkeypatch.setattr(gather, "is_on_device", lambda file, folder: False)
    free(499)
    with pytest.raises(ValueError, match=r"the copy of the shares: needs 500 bytes of disk space under .*out"):
        gather.run(Pairs(), tmp_path / "out", shares=[str(tmp_path / "share")])
    assert not list((tmp_path / "out").iterdir())


def test_a_report_needs_room_for_its_figures(tmp_path, free):
    folders = finished_run.artifacts(tmp_path)
    free(8 << 20)
    with pytest.raises(ValueError, match=r"the report: needs .* MiB of disk space under .*out"):
        report.run(Report(), tmp_path / "out", **folders)
    assert not (tmp_path / "out").exists()
