"""Order questions by a hash of seed, site and question id.

The first N questions are therefore a random sample, a part is a range of hashes whatever the number of parts, and all
parts are about equal in size.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

KEY_COUNT = 1 << 64
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def hash_ids(site: str, purpose: str, ids: np.ndarray) -> np.ndarray:
    """Hash int64 ids to uint64 keys; a bijection for each site and purpose, so two ids never share a key.

    The finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    salt = int.from_bytes(hashlib.blake2b(f"{purpose}\n{site}".encode(), digest_size=8).digest(), "big")
    mixed = ids.astype(np.uint64) + np.uint64(salt)  # modulo 2^64
    for shift, factor in MIXERS:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def question_keys(site: str, seed: int, ids: np.ndarray) -> np.ndarray:
    """Compute the keys of one site's questions: their order in the artifact."""
    return hash_ids(site, f"{seed} question", ids)


def question_keys_by_site(sites: Sequence[str], seed: int, ids: np.ndarray) -> np.ndarray:
    """Compute `question_keys` of ids whose sites differ; `sites` and `ids` have equal lengths."""
    names, keys = np.asarray(sites, dtype=object), np.empty(len(ids), dtype=np.uint64)
    for site in set(sites):
        rows = names == site
        keys[rows] = question_keys(site, seed, ids[rows])
    return keys


def post_keys(site: str, seed: int, ids: np.ndarray) -> np.ndarray:
    """Compute the keys of one site's posts, which bring equal ids and their votes into the same part."""
    return hash_ids(site, f"{seed} post", ids)


def first_key(part: int, parts: int) -> int:
    """Return the first key of a part; parts are key ranges of equal length."""
    return KEY_COUNT * part // parts
