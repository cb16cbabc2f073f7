"""Estimate how much text a run has, from a finished pairs artifact or from the size of the dump."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

MEAN_LENGTH_SHARE = 0.5  # of the limit of a text whose length is not known; an assumption
CHARACTERS_PER_TOKEN = 4  # of English and code in a large vocabulary; an assumption
SAMPLE_ROWS = 2000  # questions are shuffled, so the first rows are a random sample
DUMP_BYTES_PER_TOKEN = 8  # of Posts.xml, for each token of pairs: half of it is other columns; an assumption
COMPRESSION = {".7z": 6, ".gz": 5, ".zst": 5, ".parquet": 2}  # of a file's text, roughly
READ_BYTES, ARCHIVE_BYTES = 64 << 20, 8 << 20  # of Posts.xml, and of an archive, that are read within seconds
ATTRIBUTE = re.compile(rb' (Id|PostTypeId|ParentId|AcceptedAnswerId|Score|Body)="([^"]*)"')
MARKUP = re.compile(rb"&lt;.*?&gt;|&[#\w]+;")


class DataSize(NamedTuple):
    """How much text a run has; None: not known.

    finetune_tokens: of that split. reward_pairs, evaluation_pairs, rl_questions: numbers, of those splits.
    question_lengths, answer_lengths: tokens of each text of a sample. shared_pair_tokens: of a pair, with every text of
    the split once, as batches by question have it.
    """

    finetune_tokens: int | None = None
    reward_pairs: int | None = None
    rl_questions: int | None = None
    evaluation_pairs: int | None = None
    question_lengths: tuple[float, ...] = ()
    answer_lengths: tuple[float, ...] = ()
    shared_pair_tokens: float | None = None

    def pair_tokens(self, max_length_tokens: int, batching: str) -> float:
        """Return the mean tokens that are computed of a pair, whose two texts have a limit."""
        if not self.answer_lengths:
            return 2 * max_length_tokens * MEAN_LENGTH_SHARE
        separate = 2 * (fmean(self.question_lengths) + fmean(self.answer_lengths))
        return min(2 * max_length_tokens, self.shared_pair_tokens if batching == "question" else separate)

    def sample_tokens(self, max_prompt_tokens: int, max_response_tokens: int) -> tuple[float, float]:
        """Return the mean tokens of a prompt and of its response.

        Responses are as long as the answers of the data, each cut off at the limit. Longer prompts are left out.
        """
        if not self.answer_lengths:
            return max_prompt_tokens * MEAN_LENGTH_SHARE, max_response_tokens * MEAN_LENGTH_SHARE
        prompts = [length for length in self.question_lengths if length <= max_prompt_tokens] or [max_prompt_tokens]
        return fmean(prompts), fmean([min(length, max_response_tokens) for length in self.answer_lengths])

    def describe_lengths(self) -> str:
        """Say what the lengths of texts rest on."""
        if not self.answer_lengths:
            return f"texts of {MEAN_LENGTH_SHARE:.0%} of their limits"
        return (f"questions of {fmean(self.question_lengths):.0f} and answers of {fmean(self.answer_lengths):.0f} "
                f"tokens in the data, cut off at their limits")


def measure_pairs(pairs: Path, max_answer_tokens: int | None) -> DataSize:
    """Count the rows of a pairs artifact, and estimate what they hold from the first of each split.

    max_answer_tokens: fine-tuning leaves out longer answers; None: none.
    """
    from stages.stackexchange.pairs.table import count_pairs, question_key, read_pairs  # slow to import

    def read(split: str, *columns: str) -> list[dict]:
        return list(islice(read_pairs(pairs, split, [*columns]), SAMPLE_ROWS))

    limit, tuned = _limit_characters(max_answer_tokens), read("finetune", "question", "response_j")
    characters = sum(len(row["question"]) + len(row["response_j"]) for row in tuned if len(row["response_j"]) <= limit)
    keys = [question_key(row) for row in read("rl", "site", "qid")]
    rows = read("reward", "site", "qid", "question", "response_j", "response_k", "answer_j", "answer_k")
    questions = {question_key(row): len(row["question"]) for row in rows}
    answers = {(row["site"], row[f"answer_{side}"]): len(row[f"response_{side}"]) for row in rows for side in "jk"}
    return DataSize(
        round(count_pairs(pairs, "finetune") * characters / CHARACTERS_PER_TOKEN / max(len(tuned), 1)),
        count_pairs(pairs, "reward"), round(count_pairs(pairs, "rl") * len(set(keys)) / max(len(keys), 1)),
        count_pairs(pairs, "evaluation"), *_count_tokens(questions.values(), answers.values(), len(rows)))


def measure_dump(files: Sequence[str], shares: Any, max_answer_tokens: int | None) -> DataSize:
    """Estimate what pairs a dump will have: from the posts of small ones, or from the sizes of the files.

    shares: the section pairs of the recipe. max_answer_tokens: as in measure_pairs. Nothing is known without a file.
    """
    paths = [path for path in map(Path, files) if path.is_file()]
    parts = shares.finetune_share, shares.reward_share, shares.rl_share, shares.evaluation_share
    finetune, reward, rl, evaluation = (part / sum(parts) for part in parts)
    try:
        posts = [_read_posts(path) for path in paths if "votes" not in path.name.lower()]
    except Exception:  # py7zr raises many kinds; the run says what is wrong with the dump
        posts = []
    if not posts:
        text_bytes = sum(path.stat().st_size * COMPRESSION.get(path.suffix.lower(), 1) for path in paths)
        return DataSize(round(text_bytes * finetune / DUMP_BYTES_PER_TOKEN) or None)
    limit, counts, questions, answers, characters = _limit_characters(max_answer_tokens), [], [], [], 0.0
    for question, own in chain.from_iterable(map(_group_posts, posts)):
        better = [max(two)[1] for two in combinations(own, 2) if abs(two[0][0] - two[1][0]) >= shares.min_score_gap]
        if better:
            counts.append(min(len(better), shares.max_pairs_per_question))
            questions.append(question)
            answers += [length for _, length in own]
            characters += counts[-1] * sum(question + length for length in better if length <= limit) / len(better)
    if not counts:
        return DataSize()
    pairs = sum(counts)
    return DataSize(round(finetune * characters / CHARACTERS_PER_TOKEN), round(pairs * reward), round(len(counts) * rl),
                    round(pairs * evaluation), *_count_tokens(questions, answers, pairs))


def _limit_characters(max_answer_tokens: int | None) -> float:
    return (max_answer_tokens or math.inf) * CHARACTERS_PER_TOKEN


def _count_tokens(questions: Iterable[int], answers: Iterable[int], pairs: int
                  ) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Return the tokens of texts that have so many characters, and their sum by pair."""
    lengths = [tuple(length / CHARACTERS_PER_TOKEN for length in texts) for texts in (questions, answers)]
    return *lengths, sum(map(sum, lengths)) / max(pairs, 1)


def _read_posts(path: Path) -> bytes:
    """Return Posts.xml of a small file of a dump; ValueError for another one."""
    if path.suffix.lower() == ".xml" and path.stat().st_size <= READ_BYTES:
        return path.read_bytes()
    if path.suffix.lower() != ".7z" or path.stat().st_size > ARCHIVE_BYTES:
        raise ValueError(f"{path} is not read within seconds")
    from py7zr.io import BytesIOFactory

    from stages.stackexchange.dump.archives import find_table, open_7z  # slow, too

    with open_7z(path) as archive:
        posts, memory = find_table(archive, path, "Posts"), BytesIOFactory(READ_BYTES)
        if posts.uncompressed > READ_BYTES:
            raise ValueError(f"{path} is not read within seconds")
        archive.extract(targets=[posts.filename], factory=memory)
        return memory.get(posts.filename).read()


def _group_posts(text: bytes) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield the characters of each question that has two answers, and score and characters of its answers."""
    from stages.stackexchange.questions.table import answer_score  # slow: it imports pyarrow

    questions, answers = {}, {}
    for row in text.splitlines():
        post = dict(ATTRIBUTE.findall(row))
        length = len(MARKUP.sub(b"", post.get(b"Body", b"")))
        if post.get(b"PostTypeId") == b"1":
            questions[post.get(b"Id")] = (length, post.get(b"AcceptedAnswerId"))
        elif post.get(b"PostTypeId") == b"2":
            answers.setdefault(post.get(b"ParentId"), []).append((post.get(b"Id"), int(post.get(b"Score", 0)), length))
    for key, (length, accepted) in questions.items():
        own = [(answer_score(votes, answer == accepted), size) for answer, votes, size in answers.get(key, ())]
        if len(own) > 1:
            yield length, own
