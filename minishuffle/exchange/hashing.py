"""The stable 64-bit hash of one canonical key; ``columnhash`` has the same for whole Arrow arrays.

It is the same number on every machine and in every run. An integer is hashed by the finaliser of
splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014); what
is not an integer is first made a 64-bit word that a tag of its kind tells apart; strings and bytes go
through the finaliser eight little-endian bytes at a time, those over 64 bytes are digested by BLAKE2b.
"""

from __future__ import annotations

import math
import struct
from datetime import date, datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Final

from minishuffle.errors import UsageError

__all__ = ["KEY_TYPES", "decimal_form", "hash_form"]

KEY_TYPES: Final = "bool, int, float, Decimal, str, bytes, datetime, date, None, or a tuple of these"

MASK: Final = (1 << 64) - 1
FIRST: Final = 0xBF58_476D_1CE4_E5B9
SECOND: Final = 0x94D0_49BB_1331_11EB

UNSIGNED: Final = 0x9E37_79B9_7F4A_7C15
FLOAT: Final = 0xD1B5_4A32_D192_ED03
DECIMAL: Final = 0xABC9_8388_FB8F_AC03
TIMESTAMP: Final = 0x8CB9_2BA7_2F3D_8DD7
DATE: Final = 0xAEF1_7502_108E_F2D9
TEXT: Final = 0xF135_7AEA_2E62_A9C5
BINARY: Final = 0xC2B2_AE3D_27D4_EB4F
TUPLE: Final = 0xA0B4_28DB_3C60_3A5D
"""Odd words whose bits look random: each kind of value hashes in a domain of its own."""
NULL: Final = 0xE703_7ED1_A0B4_28DB

WORDS_BYTES_MAX: Final = 64
"""Longer strings are digested by BLAKE2b."""
NAN_BITS: Final = 0x7FF8_0000_0000_0000
_EPOCH: Final = datetime(1970, 1, 1)
_EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()
_MICROSECOND: Final = timedelta(microseconds=1)


def mix(word: int) -> int:
    """The finaliser of splitmix64, a permutation of the 64-bit words."""
    word = ((word ^ (word >> 30)) * FIRST) & MASK
    word = ((word ^ (word >> 27)) * SECOND) & MASK
    return word ^ (word >> 31)


def hash_int(value: int) -> int:
    """The hash of an integer of any size."""
    if -(1 << 63) <= value < 1 << 63:
        return mix(value & MASK)
    if 0 < value <= MASK:
        return mix(value ^ UNSIGNED)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return digest(data, b"int")


def _hash_bytes(data: bytes, tag: int) -> int:
    if len(data) > WORDS_BYTES_MAX:
        return digest(data, b"str" if tag == TEXT else b"bytes")
    value = mix(tag ^ len(data))
    for at in range(0, len(data), 8):
        value = mix(value ^ int.from_bytes(data[at : at + 8], "little"))
    return value


def digest(data: bytes, kind: bytes) -> int:
    """The hash of what is too long for words."""
    return int.from_bytes(blake2b(data, digest_size=8, person=kind).digest(), "little")


def _hash_decimal(value: Decimal) -> int:
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    coefficient = int("".join(map(str, digits)))
    while coefficient % 10 == 0:
        coefficient, exponent = coefficient // 10, exponent + 1
    return mix(hash_int(-coefficient if sign else coefficient) ^ mix((exponent & MASK) ^ DECIMAL))


def hash_form(form: Any) -> int:
    """The hash of a key in its canonical form: see ``keys.canonical``."""
    match form:
        case int():
            return hash_int(form)
        case str():
            return _hash_bytes(form.encode(errors="surrogatepass"), TEXT)
        case bytes():
            return _hash_bytes(form, BINARY)
        case None:
            return NULL
        case tuple():
            value = mix(TUPLE + len(form) & MASK)
            for part in form:
                value = mix(value ^ hash_form(part))
            return value
        case float():
            bits = NAN_BITS if math.isnan(form) else struct.unpack("<Q", struct.pack("<d", form))[0]
            return mix(bits ^ FLOAT)
        case datetime():
            since = form.replace(tzinfo=None) - _EPOCH - (form.utcoffset() or timedelta())
            return mix((since // _MICROSECOND * 1000 & MASK) ^ TIMESTAMP)
        case date():
            return mix((form.toordinal() - _EPOCH_ORDINAL & MASK) ^ DATE)
        case Decimal():
            return _hash_decimal(form)
    raise AssertionError(f"{type(form).__name__} is no canonical form")


_DECIMAL_DIGITS_MAX: Final = 4300
"""An integer of more digits is too costly to make of a Decimal."""


def decimal_form(value: Decimal | None) -> int | float | Decimal | None:
    """The canonical form of a Decimal: an equal integer or float if there is one.

    Raises:
        UsageError: an integer of more than 4,300 digits.
    """
    if value is None:
        return None
    if not value.is_finite():
        return math.nan if value.is_nan() else float(value)
    if value.adjusted() > _DECIMAL_DIGITS_MAX:
        raise UsageError(
            f"a Decimal key has more than {_DECIMAL_DIGITS_MAX} digits before the point: key by str(value)"
        )
    if value == value.to_integral_value():
        return int(value)
    near = float(value)
    return near if near == value else value
