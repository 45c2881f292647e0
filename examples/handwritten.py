"""Handwritten digits for the examples, as NumPy arrays: MNIST, and the digits of scikit-learn."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from linop.errors import ArgumentError, MissingExtraError

MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
HASHES = {
    "train-images-idx3": "0b367032e93c5d0cea0925647cfdb18614af8ee15f83e6f2fc2ad904a6835971",
    "train-labels-idx1": "1787548bbe0bff1ec2ecdc0ef292b02df999e2d1a6002d27500982c652b17203",
    "t10k-images-idx3": "1a1a05eab793c14bb050b398624a11b0ffd1a2953baed553b1b9bd079e2a20be",
    "t10k-labels-idx1": "b91679a0acfe4ba0e50a2437a903084cba1f5f92592b016a25a7dfd00455798b",
}
"""SHA-256 of MNIST's files, whose names end with -ubyte.gz."""


class Images(NamedTuple):
    """Images of shape (n, height, width), float32 from 0 to 1, and their labels, int64 (n,)."""

    images: np.ndarray
    labels: np.ndarray


def digits() -> tuple[Images, Images]:
    """The 1,797 digits of scikit-learn, 8 x 8, shuffled; for training, and, the last 261, for
    testing.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError(
            "the digits are scikit-learn's: pip install 'linop-algebra[examples]'"
        ) from None

    raw = load_digits()
    order = np.random.default_rng(0).permutation(len(raw.images))
    images = (raw.images[order] / 16).astype(np.float32)
    labels = raw.target[order].astype(np.int64)
    return Images(images[:1536], labels[:1536]), Images(images[1536:], labels[1536:])


def mnist() -> tuple[Images, Images]:
    """MNIST, 28 x 28, for training and for testing: from the folder that LINOP_MNIST names, else
    downloaded, once.

    Raises:
        ArgumentError: LINOP_MNIST is set, and a file is missing there, or damaged.
    """
    files = {f"{name}-ubyte.gz": known for name, known in HASHES.items()}
    folder = os.environ.get("LINOP_MNIST")
    if folder is None:
        import pooch

        folder = pooch.os_cache("linop") / "mnist"
        for name, known in files.items():
            pooch.retrieve(MNIST + name, f"sha256:{known}", name, folder)
    arrays = [_idx(Path(folder, name), known) for name, known in files.items()]
    images = [(a / np.float32(255)).astype(np.float32) for a in arrays[::2]]
    labels = [a.astype(np.int64) for a in arrays[1::2]]
    return Images(images[0], labels[0]), Images(images[1], labels[1])


def _idx(path: Path, known: str) -> np.ndarray:
    """The array of bytes in an IDX file, whose fourth byte is the number of dimensions.

    Args:
        known: the file's SHA-256.
    """
    if not path.is_file():
        raise ArgumentError(f"MNIST: there is no file {path}; unset LINOP_MNIST to download it")
    packed = path.read_bytes()
    if (found := hashlib.sha256(packed).hexdigest()) != known:
        raise ArgumentError(
            f"MNIST: {path} is damaged: SHA-256 {known} expected, {found} found; delete it, and "
            f"get it again"
        )
    raw = gzip.decompress(packed)
    start = 4 + 4 * raw[3]
    return np.frombuffer(raw, np.uint8, offset=start).reshape(np.frombuffer(raw[4:start], ">i4"))
