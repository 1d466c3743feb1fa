"""Feature ids: a slot and a signature in 64 bits, and how integer and string columns become such ids.

The hash values are pinned by a golden test: tables on disk are keyed by them, so they may never change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from monolith._core import stack_fids
from monolith.errors import InvalidArgumentError
from monolith.table.arrays import Ids, id_array

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FidLayout", "fid_v1", "fid_v1_to_v2", "fid_v2", "fid_v2_to_v1", "hash_ids", "hash_strings", "to_fids"]

IdArray = TypeVar("IdArray", torch.Tensor, np.ndarray)


@dataclass(frozen=True, kw_only=True)
class FidLayout:
    """How a fid's bits divide into a slot, which identifies the feature, and a signature, which identifies the value.

    Every method takes int64 tensors or arrays of any shape and gives back the same kind. A value that does not fit raises
    `InvalidArgumentError` with the first offending index. Bits are never masked away silently.

    Example:
        >>> import torch
        >>> fids = fid_v2.make(7, torch.tensor([0, 123]))
        >>> fid_v2.slot_of(fids).tolist(), fid_v2.signature_of(fids).tolist()
        ([7, 7], [0, 123])
        >>> fid_v2.slot_of(fid_v2.switch_slot(fids, 8)).tolist()
        [8, 8]
    """

    name: str
    slot_bits: int
    """Bits of the slot, directly above the signature. Bits above those are reserved and zero."""
    signature_bits: int
    """Bits of the signature, the low ones."""

    def make(self, slot: int | IdArray, signature: IdArray) -> IdArray:
        """Return fids of `slot` (one for all, or one for each) and `signature`."""
        self._check("signature", signature, self.signature_bits)
        if isinstance(slot, int):
            if not 0 <= slot < 2**self.slot_bits:
                raise InvalidArgumentError(self._out_of_range("slot", slot, self.slot_bits))
            # A slot of v1 above 511 sets the sign bit.
            slot_bits = slot << self.signature_bits
            stamped: IdArray = signature | (slot_bits - 2**64 if slot_bits >= 2**63 else slot_bits)
            return stamped
        self._check("slot", slot, self.slot_bits)
        fids: IdArray = slot << self.signature_bits | signature
        return fids

    def slot_of(self, fids: IdArray) -> IdArray:
        """Return the slot of each fid."""
        used = self.slot_bits + self.signature_bits
        if used < 64:
            self._check("fid", fids, used)
        slots: IdArray = fids >> self.signature_bits & (2**self.slot_bits - 1)
        return slots

    def signature_of(self, fids: IdArray) -> IdArray:
        """Return the signature of each fid."""
        signatures: IdArray = fids & (2**self.signature_bits - 1)
        return signatures

    def split(self, fids: IdArray) -> tuple[IdArray, IdArray]:
        """Return slots and signatures, the inverse of `make`."""
        return self.slot_of(fids), self.signature_of(fids)

    def switch_slot(self, fids: IdArray, slot: int) -> IdArray:
        """Return the same signatures under another slot."""
        self.slot_of(fids)
        return self.make(slot, self.signature_of(fids))

    def _check(self, what: str, values: IdArray, bits: int) -> None:
        flat = id_array(values, what).reshape(-1)
        if flat.size and not (flat.min() >= 0 and flat.max() < 2**bits):
            place = int(np.flatnonzero((flat < 0) | (flat >= 2**bits))[0])
            raise InvalidArgumentError(self._out_of_range(f"{what}[{place}]", int(flat[place]), bits))

    def _out_of_range(self, what: str, value: int, bits: int) -> str:
        return f"{what}: expected 0..2**{bits} - 1 in a fid {self.name}, got {value}"


fid_v1 = FidLayout(name="v1", slot_bits=10, signature_bits=54)
"""10 bits of slot, 54 of signature."""
fid_v2 = FidLayout(name="v2", slot_bits=15, signature_bits=48)
"""One reserved bit, 15 bits of slot, 48 of signature: what tables, admission and expiry read."""


def fid_v1_to_v2(fids: IdArray) -> IdArray:
    """Convert fids v1 to v2. Lossy: it keeps the slot and the low 48 of the 54 bits of signature, so 64 signatures become one.

    Example:
        >>> import torch
        >>> fid_v1_to_v2(fid_v1.make(7, torch.tensor([5, 2**48 + 5]))).tolist() == [7 * 2**48 + 5] * 2
        True
    """
    slots, signatures = fid_v1.split(fids)
    return fid_v2.make(slots, fid_v2.signature_of(signatures))


def fid_v2_to_v1(fids: IdArray) -> IdArray:
    """Convert fids v2 to v1 without loss. A slot above 1023 does not exist in v1 and raises `InvalidArgumentError`.

    Example:
        >>> import torch
        >>> fid_v1.split(fid_v2_to_v1(fid_v2.make(7, torch.tensor([5]))))
        (tensor([7]), tensor([5]))
    """
    return fid_v1.make(*fid_v2.split(fids))


def hash_ids(ids: Ids) -> torch.Tensor:
    """Hash ids by the project's bijection of 64 bits: int64 [*] -> int64 [*]. Distinct ids stay distinct.

    Example:
        >>> hex(hash_ids([42]).item() % 2**64)
        '0xbdd732262feb6e95'
    """
    return torch.from_numpy(_mix(id_array(ids).view(np.uint64)).view(np.int64))


def hash_strings(strings: pa.Array | pa.ChunkedArray | Sequence[str | bytes]) -> torch.Tensor:
    """Hash n strings (text as UTF-8) to 64-bit ids: int64 [n].

    h = mix(length in bytes), then h = mix(h ^ word) for each 8 bytes, little endian, zero padded, where mix is `hash_ids`.
    Strings of the same length up to 8 bytes never collide. Others do with probability 2**-64 a pair: among n distinct strings
    about n² / 2**65 pairs, 0.03 for a thousand million. It resists chance, not an attacker who picks the strings.

    Example:
        >>> ids = hash_strings(["red", "green", "red"])
        >>> bool(ids[0] == ids[2]), bool(ids[0] == ids[1])
        (True, False)
    """
    import pyarrow as pa

    column = strings if isinstance(strings, pa.Array | pa.ChunkedArray) else _strings(strings)
    if isinstance(column, pa.ChunkedArray):
        return torch.cat([torch.empty(0, dtype=torch.int64), *map(hash_strings, column.chunks)])
    if column.null_count:
        raise InvalidArgumentError(
            f"strings: {column.null_count} of {len(column)} are null; drop them, or fill_null with a word of your choice"
        )
    if pa.types.is_dictionary(column.type):
        return hash_strings(column.dictionary)[torch.from_numpy(column.indices.to_numpy().astype(np.int64))]
    if not (_is_text(column.type) or _is_bytes(column.type)):
        raise InvalidArgumentError(f"strings: expected strings or bytes, got {column.type}")
    return torch.from_numpy(_hash_buffers(column.cast(pa.large_binary())))


def to_fids(ids: Ids, slot: int) -> torch.Tensor:
    """Convert any int64 ids to fids v2 of `slot`: int64, shape of `ids`.

    Three cases, per id: one with this slot in its high 16 bits already is a fid and stays as it is. One in
    [0, 2**48) becomes the signature as it is: such ids never collide. Any other is hashed to 48 bits: among n distinct
    such ids of a slot about n² / 2**49 pairs collide, 0.002 for a million, 18 for a hundred million. A feature without a
    slot, which has a table of its own, takes all 64 bits and never collides.

    Example:
        >>> fids = to_fids([5, -1, 7 * 2**48 + 5], 7)
        >>> fid_v2.slot_of(fids).tolist(), fid_v2.signature_of(fids).tolist()
        ([7, 7, 7], [5, 251622562667365, 5])
    """
    if not 0 <= slot < 2**fid_v2.slot_bits:
        raise InvalidArgumentError(f"slot: expected 0..{2**fid_v2.slot_bits - 1}, got {slot!r}")
    array = id_array(ids)
    return torch.from_numpy(stack_fids([array.reshape(-1)], [slot])).reshape(array.shape)


def _mix(x: np.ndarray) -> np.ndarray:
    """`hash_id` of the core, on uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def _hash_buffers(column: pa.LargeBinaryArray) -> np.ndarray:
    _, offsets_buffer, data = column.buffers()
    if len(column) == 0:
        return np.empty(0, dtype=np.int64)
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64)[column.offset : column.offset + len(column) + 1]
    starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
    # Seven bytes more, so that a whole word can be read at every byte.
    padded = np.zeros(int(offsets[-1] - offsets[0]) + 8, dtype=np.uint8)
    if data is not None:
        padded[:-8] = np.frombuffer(data, dtype=np.uint8)[offsets[0] : offsets[-1]]
    words = np.ndarray(shape=len(padded) - 7, dtype="<u8", buffer=padded.data, strides=(1,))
    hashes = _mix(lengths.view(np.uint64))
    alive = np.arange(len(lengths))
    for begin in range(0, int(lengths.max()), 8):
        alive = alive[lengths[alive] > begin]
        spare_bits = 8 * np.maximum(8 - (lengths[alive] - begin), 0).astype(np.uint64)
        word = words[starts[alive] + begin] << spare_bits >> spare_bits
        hashes[alive] = _mix(hashes[alive] ^ word)
    return hashes.view(np.int64)


def _strings(strings: Sequence[str | bytes]) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(strings, type=None if len(strings) else pa.large_string())
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InvalidArgumentError(f"strings: expected strings or bytes: {error}") from None


def _is_text(type_: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def _is_bytes(type_: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(type_) or pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_))
