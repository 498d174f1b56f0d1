"""Token arrays as bytes and back: int32 ids and float32 log-probs, little-endian, no header.

Expert numbers, which have three dimensions and two possible widths, have a header. Pure functions.
A value that does not fit the type raises instead of wrapping around, and NaN (absent) survives the
round trip.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import ArrayLike

from records.types import Experts, Ids, Logprobs

_INT32 = np.iinfo(np.int32)
_LARGEST_HALF = float(np.finfo(np.float16).max)
_EXPERTS_HEADER = struct.Struct("<BII")
"""Bytes per expert number, layers, experts per token."""


def as_ids(values: ArrayLike) -> Ids:
    """A one-dimensional int32 array [T]. Raises ValueError on other shapes, floats or overflow."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"token ids must have one dimension, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, got {array.dtype}")
    if array.min() < 0 or array.max() > _INT32.max:
        raise ValueError(f"token ids must lie in [0, {_INT32.max}]")
    return array.astype(np.int32)


def ids_to_bytes(ids: ArrayLike) -> bytes:
    """Ids [T] as 4 T bytes. Raises ValueError like `as_ids`."""
    return as_ids(ids).astype("<i4").tobytes()


def ids_from_bytes(data: bytes) -> Ids:
    """The ids [T] of 4 T bytes, writable. Raises ValueError on a partial element."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


def logprobs_to_bytes(logprobs: ArrayLike) -> bytes:
    """Log-probs [T] as 4 T bytes. Raises ValueError unless they are floats in one dimension."""
    array = np.asarray(logprobs)
    if array.ndim != 1:
        raise ValueError(f"log-probs must have one dimension, got shape {array.shape}")
    if array.size and array.dtype.kind != "f":
        raise ValueError(f"log-probs must be floats, got {array.dtype}")
    return array.astype("<f4").tobytes()


def logprobs_from_bytes(data: bytes) -> Logprobs:
    """The log-probs [T] of 4 T bytes, writable. Raises ValueError on a partial element."""
    return np.frombuffer(data, dtype="<f4").astype(np.float32)


def halves_to_bytes(values: ArrayLike) -> bytes:
    """Numbers [T] as 2 T bytes of float16: three digits. Finite ones beyond +-65504 become that.
    Raises ValueError unless they are floats in one dimension.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind != "f"):
        raise ValueError(f"expected floats in one dimension, got {array.dtype} {array.shape}")
    bounded = np.where(np.isfinite(array), np.clip(array, -_LARGEST_HALF, _LARGEST_HALF), array)
    return bounded.astype("<f2").tobytes()


def halves_from_bytes(data: bytes) -> Logprobs:
    """The numbers [T] of 2 T bytes as float32, writable. Raises ValueError on a partial element."""
    return np.frombuffer(data, dtype="<f2").astype(np.float32)


def experts_to_bytes(experts: Experts) -> bytes:
    """Expert numbers [T, layers, topk], int16 or int32, with a header of 9 bytes."""
    if experts.ndim != 3 or not experts.size or experts.dtype not in (np.int16, np.int32):
        raise ValueError(
            "routed experts must be int16 or int32 [T, layers, topk], "
            f"got {experts.dtype} {experts.shape}"
        )
    width = experts.dtype.itemsize
    header = _EXPERTS_HEADER.pack(width, *experts.shape[1:])
    return header + experts.astype(f"<i{width}").tobytes()


def experts_from_bytes(data: bytes) -> Experts:
    """The expert numbers [T, layers, topk] of such bytes. Raises ValueError on a partial row."""
    if len(data) < _EXPERTS_HEADER.size:
        raise ValueError(f"{len(data)} bytes are too few for routed experts")
    width, layers, topk = _EXPERTS_HEADER.unpack_from(data)
    flat = np.frombuffer(data, dtype=f"<i{width}", offset=_EXPERTS_HEADER.size)
    return flat.astype(np.int16 if width == 2 else np.int32).reshape(-1, layers, topk)


def checksum(*parts: ArrayLike) -> bytes:
    """8 bytes that identify the concatenation of id arrays, however it is split into parts."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(ids_to_bytes(part))
    return digest.digest()


def shared_prefix(left: Ids, right: Ids) -> int:
    """How many leading ids two arrays have in common."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def shared_ends(original: Ids, changed: Ids) -> tuple[int, int]:
    """Lengths of the common prefix and of the common suffix after it (the two never overlap)."""
    prefix = shared_prefix(original, changed)
    suffix = shared_prefix(original[prefix:][::-1], changed[prefix:][::-1])
    return prefix, suffix
