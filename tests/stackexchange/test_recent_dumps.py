"""The dumps of 2024 to 2026: posts that nobody wrote, sites that were renamed, and which archive was read."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from stages import pairs
from stages.recipe.sections.data import Pairs
from stages.stackexchange.pairs.table import read_pairs
from stages.stackexchange.questions.table import LIVE_HOSTS, site_url
from tests.helpers.stackexchange_dumps import (
    LENIENT,
    answer,
    document,
    make_posts,
    posts_from_rows,
    qa_rows,
    question,
    write_archive,
    write_dump,
)

WATERMARKS = (question(1_000_000_001, OwnerUserId=-1, CreationDate="2025-06-01T01:00:00.100")
              + answer(1_000_000_010, 1_000_000_001, 1, OwnerUserId=-1))
ANSWER_BOT = answer(50, 1, 9, OwnerUserId=-2)


def test_watermarks_and_answer_bot_are_dropped_and_counted_by_name(tmp_path):
    metrics, [record] = posts_from_rows(tmp_path, qa_rows(), WATERMARKS, ANSWER_BOT)
    assert metrics["dropped"] == {"Answer Bot posts": 1, "watermark posts": 2}
    assert [a["id"] for a in record["answers"]] == [2, 3] and metrics["rows_read"] == 6
    card = (tmp_path / "posts/README.md").read_text(encoding="utf-8")
    assert "dropped: watermark posts" in card and "dropped: Answer Bot posts" in card


def test_each_can_be_kept(tmp_path):
    config = replace(LENIENT, drop_watermarks=False, drop_answer_bot=False, min_answers=1)
    metrics, records = posts_from_rows(tmp_path / "both", qa_rows(), WATERMARKS, ANSWER_BOT, config=config)
    assert not metrics["dropped"] and [r["question_id"] for r in records] == [1, 1_000_000_001]
    assert [a["id"] for a in records[0]["answers"]] == [2, 3, 50]
    metrics, _ = posts_from_rows(tmp_path / "bot", qa_rows(), WATERMARKS, ANSWER_BOT,
                                 config=replace(config, drop_watermarks=True))
    assert metrics["dropped"] == {"watermark posts": 2}


def test_posts_of_the_community_and_without_a_user_stay(tmp_path):
    _, [record] = posts_from_rows(tmp_path, question(1, OwnerUserId=-1), answer(2, 1, OwnerUserId=""),
                                  answer(3, 1, OwnerUserId=-1))
    assert len(record["answers"]) == 2


@pytest.mark.parametrize("site, host", [
    ("beer.stackexchange.com", "alcohol.stackexchange.com"),
    ("materials.meta.stackexchange.com", "mattermodeling.meta.stackexchange.com"),
    ("coffee.stackexchange.com", "coffee.stackexchange.com")])
def test_links_lead_to_the_live_site_and_the_sites_name_stays(tmp_path, site, host):
    _, [record] = make_posts(tmp_path / "posts", write_dump(tmp_path, document(qa_rows()), f"{site}/Posts.xml"))
    assert record["site"] == site
    assert (record["url"], record["author_url"]) == (f"https://{host}/questions/1", f"https://{host}/users/7")
    (tmp_path / "pairs").mkdir()
    pairs.run(Pairs(finetune_share=0, reward_share=1, rl_share=0, evaluation_share=0), tmp_path / "pairs",
              posts=tmp_path / "posts")
    [pair] = read_pairs(tmp_path / "pairs", "reward")
    assert pair["metadata"] == [f"https://{host}/questions/1", f"https://{host}", f"https://{host}/users/7"]
    assert pair["site"] == site


def test_no_live_host_is_also_the_name_of_a_renamed_dump():
    assert not set(LIVE_HOSTS) & set(LIVE_HOSTS.values()) and site_url("a.b") == "https://a.b"


def test_the_archives_digest_stands_in_the_metrics(tmp_path):
    archive = Path(write_archive(tmp_path, document(qa_rows()), "beer.stackexchange.com.7z"))
    metrics, _ = make_posts(tmp_path / "posts", str(archive))
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert metrics["source_files"] == {"beer.stackexchange.com": {"beer.stackexchange.com.7z": sha256}}
