"""The answers whose mean score becomes 0: all of a small model's, fewer of a large one's; and their progress line."""

import torch
from torch import nn

from stages import reward
from stages.reward_modeling.dataset import Example, select_reference_answers
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.reward_model import initialise_head
from stages.reward_modeling.scorer import Scorer
from tests.helpers.tiny_models import save_base


def example(number: int, answers: int = 3) -> Example:
    """A question of 10 tokens with answers of 5, the last of which wins no pair."""
    return Example((number,), [number] * 10, [[number, index] + [0] * 3 for index in range(answers)],
                   [(index, answers - 1) for index in range(answers - 1)], [1] * (answers - 1))


def test_the_first_winners_that_fit_are_taken():
    items = [example(number) for number in range(4)]
    winners = [(number, index) for number in range(4) for index in range(2)]

    def chosen(**limits):
        prompts, answers = select_reference_answers(items, **limits)
        assert [prompt[0] for prompt in prompts] == [answer[0] for answer in answers]
        return [tuple(answer[:2]) for answer in answers]

    assert chosen(count=100, max_tokens=10**9, min_count=1) == winners
    assert chosen(count=3, max_tokens=10**9, min_count=1) == winners[:3]
    assert chosen(count=100, max_tokens=45, min_count=1) == winners[:3]  # 15 tokens each
    assert chosen(count=100, max_tokens=44, min_count=1) == winners[:2]
    assert chosen(count=100, max_tokens=44, min_count=5) == winners[:5]
    assert chosen(count=4, max_tokens=44, min_count=5) == winners[:4]


def test_a_large_model_scores_fewer_answers():
    items = [example(number, answers=6) for number in range(500)]
    small, smollm2 = (nn.Linear(width, 1000, bias=False, device="meta") for width in (1_100, 134_515))
    assert len(reward.reference_answers(small, items)[0]) == 2000
    large = len(reward.reference_answers(smollm2, items)[0])
    assert large == 2000  # of 15 tokens
    long = [Example(one.question, one.prompt * 20, one.answers, one.pairs, one.score_gaps) for one in items]
    tokens = [len(prompt) + len(answer) for prompt, answer in zip(*reward.reference_answers(smollm2, long),
                                                                  strict=True)]
    assert sum(tokens) <= reward.REFERENCE_FLOP / (2 * 134_515_000) < sum(tokens) + 205 and len(tokens) > 250


def test_scoring_shows_its_progress_in_tokens(tmp_path, capsys):
    model = load_classifier(save_base(tmp_path / "base"), new_head=True)
    initialise_head(model, torch.Generator().manual_seed(0))
    scorer, texts = Scorer(model, "fp32"), ([[5, 6], [7]], [[8], [9, 10, 11]])
    silent = scorer(*texts)
    assert not capsys.readouterr().err
    assert torch.equal(scorer(*texts, "zero of the scale"), silent)
    assert "zero of the scale: 7/7 tokens (100 %)" in capsys.readouterr().err
