"""Division by a run-time parameter as a product with its inverse: exact for every position and every divisor."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.scripts import interpreted

SCRIPT = Path(__file__).with_name("interpreted_quotient.py")
MOST = 2**31 - 1


def test_quotients_at_the_edges_and_at_random():
    rng = random.Random(0)
    divisors = [1, 2, 3, 5, 7, 127, 128, 65535, 65536, 65537, 2**30, 2**30 + 1, MOST - 1, MOST]
    pairs = [(a, n) for n in divisors for a in (0, 1, n - 1, n, n + 1, 2 * n - 1, MOST - 1, MOST) if a <= MOST]
    while len(pairs) < 2048:  # a power of two
        n = max(1, int(2 ** rng.uniform(0, 31)) - 1)
        pairs.append((min(MOST, n * rng.randrange(MOST // n + 1) + rng.choice((-1, 0, 1)) % n), n))
    a, n = zip(*pairs)
    ((quotients, remainders),) = interpreted(SCRIPT, given=json.dumps([a, n]))
    assert quotients == [x // y for x, y in pairs]
    assert remainders == [x % y for x, y in pairs]
