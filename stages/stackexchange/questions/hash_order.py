"""The order of a run's questions: by a hash of seed, site and question id.

So that the first N questions are a sample, a part is a range of hashes whatever the number of parts, and all parts are
alike in size.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

END = 1 << 64
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def keys(site: str, purpose: str, ids: np.ndarray) -> np.ndarray:
    """uint64 for each int64 id: its place in the order of this site and purpose (a bijection, so no two ids share one).

    The finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    salt = int.from_bytes(hashlib.blake2b(f"{purpose}\n{site}".encode(), digest_size=8).digest(), "big")
    mixed = ids.astype(np.uint64) + np.uint64(salt)  # wraps around, as it should
    for shift, factor in MIXERS:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def question_keys(site: str, seed: int, ids: np.ndarray) -> np.ndarray:
    """Keys of one site's questions: their place in the run."""
    return keys(site, f"{seed} question", ids)


def question_keys_by_site(sites: Sequence[str], seed: int, ids: np.ndarray) -> np.ndarray:
    """`question_keys` where each id has a site of its own; `sites` and `ids` are of one length."""
    names, found = np.asarray(sites, dtype=object), np.empty(len(ids), dtype=np.uint64)
    for site in set(sites):
        rows = names == site
        found[rows] = question_keys(site, seed, ids[rows])
    return found


def post_keys(site: str, seed: int, ids: np.ndarray) -> np.ndarray:
    """Keys of one site's posts, which bring equal Ids and the votes for them together."""
    return keys(site, f"{seed} post", ids)


def first_key(part: int, parts: int) -> int:
    """Where a part begins: parts are ranges of keys of one length."""
    return END * part // parts
