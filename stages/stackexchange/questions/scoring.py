"""Votes to the score that ranks a question's answers."""


def answer_score(votes: int, accepted: bool) -> int:
    """round(log2(1 + votes)), plus 1 if the asker accepted the answer; -1 if votes are negative.

    votes: net votes of the post (the dump's `Score`: up minus down). A negative count gives -1 even to an accepted
    answer: the published wording does not settle it (Askell et al. 2021, "A General Language Assistant"; StackLLaMA's
    card), and more readers found such an answer wrong than right.

    In integers, so that every machine agrees: log2(1+v) rounds to k when (1+v)^2 lies in [2^(2k-1), 2^(2k+1)), which
    is when the bit length of (1+v)^2 halves to k. It is never exactly k + 1/2, so no rounding mode can matter.
    """
    if votes < 0:
        return -1
    return ((1 + votes) ** 2).bit_length() // 2 + int(accepted)
