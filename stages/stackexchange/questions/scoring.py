"""Score answers by their votes."""


def answer_score(votes: int, accepted: bool) -> int:
    """Compute round(log2(1 + votes)), plus 1 if the asker accepted the answer; -1 if votes are negative.

    Source: Askell et al. 2021, "A General Language Assistant"; StackLLaMA's card. Their wording leaves open what an
    accepted answer with negative votes gets; here it is -1, because more readers found it wrong than right.

    Computed in integers, so that every machine agrees: log2(1+v) rounds to k if (1+v)^2 is in [2^(2k-1), 2^(2k+1)),
    which holds if half the bit length of (1+v)^2, rounded down, is k. log2(1+v) is never exactly k + 1/2, so the
    rounding mode does not matter.

    Args:
        votes: net votes (the dump's `Score`: up minus down), or upvotes.
    """
    if votes < 0:
        return -1
    return ((1 + votes) ** 2).bit_length() // 2 + int(accepted)
