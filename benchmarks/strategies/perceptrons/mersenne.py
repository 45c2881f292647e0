"""Weights as Wang and Cao (2022) drew them: by mt19937_64 and uniform_real_distribution of
libstdc++."""

from __future__ import annotations

import numpy as np

_N, _M = 312, 156
_LOW, _MATRIX = np.uint64((1 << 31) - 1), np.uint64(0xB5026F5AA96619E9)
_MULTIPLIER = 6364136223846793005
_TEMPERING = (
    (29, 0x5555555555555555, False),
    (17, 0x71D67FFFEDA60000, True),
    (37, 0xFFF7EEE000000000, True),
    (43, (1 << 64) - 1, False),
)
"""Shift, mask, and True for a shift to the left."""


def draws(seed: int, n: int) -> np.ndarray:
    """The first n draws of std::mt19937_64; uint64, (n,) (Nishimura, "Tables of 64-bit Mersenne
    twisters", 2000)."""
    state = [seed & (1 << 64) - 1]
    for i in range(1, _N):
        last = state[-1] ^ state[-1] >> 62
        state.append(_MULTIPLIER * last + i & (1 << 64) - 1)
    s, found = np.array(state, np.uint64), []
    for _ in range(-(-n // _N)):
        # The second half needs the new first half; the last number, the new first one.
        s[:_M] = _twisted(s[:_M], s[1 : _M + 1], s[_M:])
        s[_M:-1] = _twisted(s[_M:-1], s[_M + 1 :], s[: _M - 1])
        s[-1:] = _twisted(s[-1:], s[:1], s[_M - 1 : _M])
        y = s.copy()
        for shift, mask, left in _TEMPERING:
            y ^= (y << np.uint64(shift) if left else y >> np.uint64(shift)) & np.uint64(mask)
        found.append(y)
    return np.concatenate([np.empty(0, np.uint64), *found])[:n]


def _twisted(this: np.ndarray, after: np.ndarray, far: np.ndarray) -> np.ndarray:
    x = (this & ~_LOW) | (after & _LOW)
    return far ^ (x >> np.uint64(1)) ^ (x & np.uint64(1)) * _MATRIX


def layer(inputs: int, outputs: int) -> list[np.ndarray]:
    """Weights (inputs, outputs), from -0.1 to 0.1, and a bias of zeros (outputs); float32.

    The seed is the number of weights, the row of the bias included: equal shapes, equal weights.
    """
    n = (inputs + 1) * outputs
    # One draw for each number: float32 has fewer bits than the generator gives.
    unit = draws(n, n).astype(np.float32) / np.float32(2**64)
    low, high = np.float32(-0.1), np.float32(0.1)
    W = (unit * (high - low) + low).reshape(inputs + 1, outputs)
    return [W[1:].copy(), np.zeros(outputs, np.float32)]
