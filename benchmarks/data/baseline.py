"""The usual way from a Posts.xml to preference pairs: the baseline of `benchmarks/data/run.py`.

    python -m benchmarks.data.baseline Posts.xml pairs.parquet

As in StackLLaMA's notebook and its copies, the whole tree is in memory, every pair of a question is built before ten
are drawn, and three texts are converted for each pair. Scores and pairs follow the same rule as the stages.
"""

import json
import math
import random
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from itertools import combinations

from datasets import Dataset
from markdownify import markdownify

MAX_PAIRS = 10


def read_questions(path: str) -> list[dict]:
    """Read the questions with at least two answers."""
    questions, answers = {}, defaultdict(list)
    for row in ElementTree.parse(path).getroot():
        post = dict(row.attrib)
        if post["PostTypeId"] == "1":
            questions[post["Id"]] = post
        elif post["PostTypeId"] == "2":
            answers[post["ParentId"]].append(post)
    return [question | {"answers": answers[number]} for number, question in questions.items()
            if len(answers[number]) >= 2]


def score(answer: dict, accepted: str | None) -> int:
    """Compute log2(1 + votes), rounded, plus 1 if accepted; -1 for negative votes."""
    votes = int(answer["Score"])
    return -1 if votes < 0 else round(math.log2(1 + votes)) + (answer["Id"] == accepted)


def draw_pairs(question: dict) -> list[tuple[dict, dict]]:
    """Draw at most ten pairs (better, worse) of answers."""
    scored = [(score(answer, question.get("AcceptedAnswerId")), answer) for answer in question["answers"]]
    pairs = [(first, second) if first_score > second_score else (second, first)
             for (first_score, first), (second_score, second) in combinations(scored, 2)
             if first_score != second_score]
    return random.sample(pairs, MAX_PAIRS) if len(pairs) > MAX_PAIRS else pairs


def to_markdown(html: str) -> str:
    """Convert HTML to Markdown and collapse blank lines."""
    text = markdownify(html, code_language_callback=lambda code: code["class"][0] if code.has_attr("class") else None)
    return re.sub(r"\n\s*\n", "\n\n", text)


def build_rows(question: dict) -> list[dict]:
    """Build a row per pair, converting three texts for each."""
    return [{
        "qid": int(question["Id"]), "question": to_markdown(question["Body"]), "date": question["CreationDate"],
        "metadata": [post.get("OwnerUserId", "") for post in (question, better, worse)],
        "response_j": to_markdown(better["Body"]), "response_k": to_markdown(worse["Body"]),
    } for better, worse in draw_pairs(question)]


def main(posts: str, out: str) -> None:
    """Write the pairs and print their number."""
    random.seed(0)
    rows = [row for question in read_questions(posts) for row in build_rows(question)]
    Dataset.from_list(rows).to_parquet(out)
    print(json.dumps({"pairs": len(rows), "conversions": 3 * len(rows)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
