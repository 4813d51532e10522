"""TokenIds: token ids outside tensors, an immutable sequence of int32 over `bytes`. What was checked is what is sent,
and what was sent is what is recorded.

>>> ids = TokenIds([151644, 872, 198, 17])
>>> ids[1:3], ids.startswith(ids[:2]), ids == (151644, 872, 198, 17)
(TokenIds([872, 198]), True, True)"""

import contextlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Protocol, overload

from tokentrue.errors import TokenContractError

if TYPE_CHECKING:
    import numpy as np

_SIZE: Final = 4
_SIGN_BYTE: Final = 3
_SHOWN: Final = 8

if sys.byteorder != "little":
    raise ImportError("tokentrue needs a little-endian machine: ids are stored and hashed as they are in memory")


class HashState(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...
    def copy(self) -> "HashState": ...


class TokenIds(Sequence[int]):
    __slots__ = ("_hash", "view")
    view: memoryview  # a read-only buffer of int32 over bytes, for numpy and torch without a copy
    _hash: HashState | None  # SHA-256 over the ids, once requested; concatenations continue from it

    def __new__(cls, ids: Iterable[int] = ()) -> "TokenIds":
        return ids if isinstance(ids, TokenIds) else cls._of(_view_of_bytes(_pack(ids)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TokenIds are immutable: cannot set {name}")

    @classmethod
    def from_bytes(cls, data: bytes) -> "TokenIds":
        if len(data) % _SIZE:
            raise TokenContractError(f"{len(data)} bytes are not a whole number of token ids ({_SIZE} bytes each)")
        return cls._of(_view_of_bytes(data))

    @classmethod
    def concat(cls, parts: "Iterable[TokenIds]") -> "TokenIds":
        """If the SHA-256 state of the first part is known, only the others are hashed."""
        parts = [part for part in parts if len(part.view)]
        known = parts[0]._hash if parts else None
        if known is not None:
            known = known.copy()
            for part in parts[1:]:
                known.update(part.view)
        return cls._of(_view_of_bytes(b"".join([part.view for part in parts])), known)

    @classmethod
    def _of(cls, view: memoryview, known: HashState | None = None) -> "TokenIds":
        ids = object.__new__(cls)
        object.__setattr__(ids, "view", view)
        object.__setattr__(ids, "_hash", known)
        return ids

    def tobytes(self) -> bytes:
        """Little-endian int32."""
        return self.view.tobytes()

    def tolist(self) -> list[int]:
        return self.view.tolist()

    def sha256(self) -> bytes:
        known = self._hash
        if known is None:
            known = sha256(self.view)
            object.__setattr__(self, "_hash", known)
        return known.digest()

    def startswith(self, prefix: Sequence[int]) -> bool:
        return _bytes_of(self.view).startswith(TokenIds(prefix).view)

    def __len__(self) -> int:
        return len(self.view)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "TokenIds": ...
    def __getitem__(self, index: int | slice) -> "int | TokenIds":
        if not isinstance(index, slice):
            return self.view[index]
        part = self.view[index]
        return TokenIds._of(part if part.contiguous else _view_of_bytes(part.tobytes()))

    def __iter__(self) -> Iterator[int]:
        return iter(self.view)

    def __add__(self, other: Iterable[int]) -> "TokenIds":
        return TokenIds.concat((self, TokenIds(other)))

    def __radd__(self, other: Iterable[int]) -> "TokenIds":
        return TokenIds.concat((TokenIds(other), self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            # bytes compare by memcmp; two memoryviews would be compared item by item.
            return self.view is other.view or (len(self) == len(other) and self.startswith(other))
        if isinstance(other, (tuple, list)):
            return len(self) == len(other) and self.view.tolist() == list(other)  # pyright: ignore[reportUnknownArgumentType]
        return NotImplemented

    def __hash__(self) -> int:
        return hash(_bytes_of(self.view))

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.view[:_SHOWN]))
        more = f", … {len(self)} ids" if len(self) > _SHOWN else ""
        return f"TokenIds([{shown}{more}])"

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return TokenIds.from_bytes, (self.tobytes(),)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray":
        import numpy as np

        array_ = np.frombuffer(self.view, dtype=np.int32)
        if dtype is not None and np.dtype(dtype) != array_.dtype:
            return array_.astype(dtype)
        return array_.copy() if copy else array_


def _pack(ids: Iterable[int]) -> bytes:
    values: Any = ids  # of any type until `array` has read them
    if not isinstance(ids, (list, tuple, array)):
        tolist: Any = getattr(ids, "tolist", None)  # numpy arrays and tensors convert at once
        values = tolist() if tolist is not None else list(ids)
    with contextlib.suppress(TypeError, OverflowError, ValueError):
        packed = array("i", values).tobytes()
        if packed[_SIGN_BYTE::_SIZE].isascii():  # no sign bit is set: the fastest test that none is negative
            return packed
    place, value = next((i, v) for i, v in enumerate(values) if not (isinstance(v, int) and 0 <= v < 2**31))
    raise TokenContractError(f"token id {value!r} at {place} is not an integer from 0 to 2147483647")


def _view_of_bytes(data: bytes) -> memoryview:
    return memoryview(data).cast("i")


def _bytes_of(view: memoryview) -> bytes:
    """No copy if the view covers its object."""
    whole = view.obj
    return whole if isinstance(whole, bytes) and len(whole) == view.nbytes else view.tobytes()


EMPTY: Final = TokenIds()
