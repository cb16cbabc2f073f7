"""Further pairs for a reward model: a human answer beats one that the model itself samples.

A reward model that saw only human answers need not rank samples: that of docs/experiments/smollm2.md preferred 87 % of
the greedy samples to the best human answers. The two answers of a pair here have the same number of tokens and end
alike, so that neither length nor the EOS separates them (SPIN, arXiv 2401.01335, trains on such pairs without that).
"""

from collections.abc import Sequence
from pathlib import Path

from stages.generation.sampler import sample_in_batches
from stages.reward_modeling.dataset import Example
from stages.runtime.files import write_text
from stages.runtime.progress import Progress
from stages.runtime.series import format_row

SAMPLED_PAIRS = "sampled_pairs.jsonl"
TEMPERATURES = (0.0, 1.0)  # a head that saw only samples at 1 ranks greedy answers wrongly
BATCH_PROMPTS = 16
SCORE_GAP = 1  # of a pair: human answers differ by at least as much


def select_questions(items: Sequence[Example], count: int, max_prompt_tokens: int) -> list[Example]:
    """Select at most `count` examples of different questions, evenly spaced, with prompts of at most that many tokens.
    """
    by_question = {item.question: item for item in reversed(items) if len(item.prompt) <= max_prompt_tokens}
    distinct = list(by_question.values())[::-1]
    count = min(count, len(distinct))
    return [distinct[i * len(distinct) // count] for i in range(count)]


def sample_pairs(model, items: Sequence[Example], *, eos_id: int, max_new_tokens: int, precision: str, seed: int,
                 label: str) -> dict[float, list[Example]]:
    """Sample an answer to each question, and return an example with one pair for each, by temperature."""
    pairs = {}
    for temperature in TEMPERATURES:
        progress = Progress(f"{label}, temperature {temperature:g}", len(items), "answers")
        rollout = sample_in_batches(
            model, [item.prompt for item in items], BATCH_PROMPTS, seed, progress.advance, temperature=temperature,
            max_new_tokens=max_new_tokens, stop_ids=[eos_id], precision=precision)
        progress.finish()
        pairs[temperature] = [
            Example(item.question, item.prompt, [cut_like(best_answer(item), sampled, ended), sampled], [(0, 1)],
                    [SCORE_GAP])
            for item, sampled, ended in zip(items, rollout.responses, rollout.ended, strict=True)]
    return pairs


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
