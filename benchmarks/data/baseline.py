"""The usual way from a Posts.xml to preference pairs, which `benchmarks/data/run.py` measures the stages against.

    python -m benchmarks.data.baseline Posts.xml pairs.parquet

As StackLLaMA's notebook and its copies do it: the whole tree in memory, every pair of a question built before ten are
drawn, and three texts converted for each pair. The scores and the choice of pairs follow the same rule as ours.
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


def questions_of(path: str) -> list[dict]:
    """Questions with at least two answers."""
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
    """log2(1 + votes), rounded, plus 1 if accepted; -1 for negative votes."""
    votes = int(answer["Score"])
    return -1 if votes < 0 else round(math.log2(1 + votes)) + (answer["Id"] == accepted)


def pairs_of(question: dict) -> list[tuple[dict, dict]]:
    """At most ten (better, worse) answers."""
    scored = [(score(answer, question.get("AcceptedAnswerId")), answer) for answer in question["answers"]]
    pairs = [(one, other) if first > second else (other, one)
             for (first, one), (second, other) in combinations(scored, 2) if first != second]
    return random.sample(pairs, MAX_PAIRS) if len(pairs) > MAX_PAIRS else pairs


def markdown(html: str) -> str:
    text = markdownify(html, code_language_callback=lambda code: code["class"][0] if code.has_attr("class") else None)
    return re.sub(r"\n\s*\n", "\n\n", text)


def rows_of(question: dict) -> list[dict]:
    return [{
        "qid": int(question["Id"]), "question": markdown(question["Body"]), "date": question["CreationDate"],
        "metadata": [post.get("OwnerUserId", "") for post in (question, better, worse)],
        "response_j": markdown(better["Body"]), "response_k": markdown(worse["Body"]),
    } for better, worse in pairs_of(question)]


def main(posts: str, out: str) -> None:
    random.seed(0)
    rows = [row for question in questions_of(posts) for row in rows_of(question)]
    Dataset.from_list(rows).to_parquet(out)
    print(json.dumps({"pairs": len(rows), "conversions": 3 * len(rows)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
