"""Further pairs for a reward model: a human answer beats one that the model itself samples (SPIN, arXiv 2401.01335).

A reward model that saw only human answers need not rank samples (docs/experiments/smollm2.md). The two answers of a
pair have the same number of tokens and end alike, so that neither length nor the EOS separates them.
"""

from collections.abc import Sequence
from pathlib import Path

from stages.reward_modeling.dataset import Example
from stages.runtime.files import write_text
from stages.runtime.series import format_row
from stages.stackexchange.pairs.table import space_evenly

SAMPLED_PAIRS = "sampled_pairs.jsonl"
TEMPERATURES = (0.0, 1.0)  # a head that saw only samples at 1 ranks greedy answers wrongly
BATCH_PROMPTS = 16
SCORE_GAP = 1  # of a pair: human answers differ by at least as much


def select_questions(items: Sequence[Example], count: int, max_prompt_tokens: int) -> list[Example]:
    """Select at most `count` examples of different questions, evenly spaced, with prompts of at most that many tokens.
    """
    by_question = {item.question: item for item in reversed(items) if len(item.prompt) <= max_prompt_tokens}
    return space_evenly(list(by_question.values())[::-1], count)


def pair_with_sample(item: Example, sampled: list[int], ended: bool) -> Example:
    """Return an example of one pair: the best answer of `item`, cut like the sample, beats the sample."""
    return Example(item.question, item.prompt, [cut_like(best_answer(item), sampled, ended), sampled], [(0, 1)],
                   [SCORE_GAP])


def best_answer(item: Example) -> list[int]:
    """Return the ids of the first answer that wins a pair and loses none."""
    losers = {worse for _, worse in item.pairs}
    return item.answers[next(better for better, _ in item.pairs if better not in losers)]


def cut_like(human: list[int], sampled: list[int], ended: bool) -> list[int]:
    """Cut a human answer to the number of tokens of a sampled one; a sample that ended gives the cut answer its EOS."""
    if len(human) <= len(sampled):
        return human
    return human[:len(sampled) - 1] + sampled[-1:] if ended else human[:len(sampled)]


def write_sampled_pairs(path: Path, pairs: dict[float, list[Example]], tokenizer) -> None:
    """Write a line for each pair: site, qid, temperature, and the texts of both answers."""
    rows = [{"site": item.question[0], "qid": item.question[1], "temperature": temperature,
             **dict(zip(("human", "sampled"), tokenizer.batch_decode(item.answers), strict=True))}
            for temperature, items in pairs.items() for item in items]
    write_text(path, "".join(map(format_row, rows)))
