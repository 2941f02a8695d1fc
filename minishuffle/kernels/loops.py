"""The loops themselves. They are compiled by numba, ahead of use, with the types in ``machinecode.KERNELS``.

Vectors come as plain pointers, so a loop is given the number of its rows. It checks no bounds and
raises nothing: what can go wrong it returns, always as an int. Integers wrap around at 64 bits. In
these functions an unsigned word never meets a signed one, of which numba would make a float.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from llvmlite import ir
from numba import int64, njit, types, uint8, uint32, uint64
from numba.extending import intrinsic

Vector: TypeAlias = Any
"""Numbers of 64 or 32 bits, or bytes: ``KERNELS`` has the types."""
Word: TypeAlias = Any
"""Unsigned, of 64 bits."""

FIRST = uint64(0xBF58_476D_1CE4_E5B9)
SECOND = uint64(0x94D0_49BB_1331_11EB)
S3, S27, S30, S31, S32, S64 = uint64(3), uint64(27), uint64(30), uint64(31), uint64(32), uint64(64)
LENGTH_BITS = uint64(8)
GOLDEN = uint64(0x9E37_79B9_7F4A_7C15)
LOW_HALF = uint64(0xFFFF_FFFF)
ABSENT, ONE = uint32(0), uint64(1)
LOOKUPS = 128
"""Keys whose places are asked for before the first of them is needed: what they touch fits into a cache."""
SUM, MINIMUM = 0, 1


def _prefetch(context: Any, vector: Any, place: Any) -> Any:
    """Ask for what stands at that place of the vector (even beyond its end); the processor does not wait."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        to_read, to_keep, data = number(0), number(3), number(1)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, [address, to_read, to_keep, data])
        return context.get_dummy_value()

    return types.void(vector, types.int64), generate


prefetch: Any = intrinsic(_prefetch)

# --- hashing --------------------------------------------------------------------------------------


@njit(forceinline=True)
def mixed(word: Word) -> Word:
    """The finaliser of splitmix64, a permutation of the 64-bit words."""
    word = (word ^ (word >> S30)) * FIRST
    word = (word ^ (word >> S27)) * SECOND
    return word ^ (word >> S31)


@njit(forceinline=True)
def eight_bytes(data: Vector, begin: int) -> Word:
    """The little-endian word that begins there."""
    word: Word = uint64(0)
    for at in range(8):  # the compiler makes one load of it
        word |= uint64(data[begin + at]) << (uint64(at) << S3)
    return word


@njit(forceinline=True)
def word_of_bytes(data: Vector, begin: int, end: int) -> Word:
    """The little-endian word that begins there; zeros stand for bytes from ``end`` on.

    Fewer than eight are cut from the eight that end with them, which others in front of them fill up: a loop
    over them would end at another byte for each text, which no processor foresees.
    """
    if begin + 8 <= end:
        return eight_bytes(data, begin)
    if begin >= end:
        return uint64(0)
    if end >= 8:
        return eight_bytes(data, end - 8) >> (uint64(begin + 8 - end) << S3)
    word: Word = uint64(0)
    for at in range(end - begin):
        word |= uint64(data[begin + at]) << (uint64(at) << S3)
    return word


def hash_words(words: Vector, factor: int, tag: Word, hashes: Vector, rows: int) -> int:
    """The hash of each word x factor in the domain of a tag."""
    for row in range(rows):
        hashes[row] = mixed(uint64(words[row] * factor) ^ tag)
    return rows


def hash_texts(offsets: Vector, data: Vector, tag: Word, hashes: Vector, rows: int) -> int:
    """The hash of each text: eight bytes at a time, its length with the first."""
    for row in range(rows):
        begin, end = int64(offsets[row]), int64(offsets[row + 1])
        value = tag ^ uint64(end - begin)
        for at in range(begin, end, 8):
            value = mixed(value ^ word_of_bytes(data, at, end))
        hashes[row] = value
    return rows


def combine_hashes(hashes: Vector, parts: Vector, rows: int) -> int:
    """Mix the hashes of one more part of each tuple into what those before it gave."""
    for row in range(rows):
        hashes[row] = mixed(hashes[row] ^ parts[row])
    return rows


# --- partition ------------------------------------------------------------------------------------


def choose_consumers(hashes: Vector, consumers: Word, positions: Vector, rows: int) -> int:
    """The consumer of each hash: its upper half, scaled to their number."""
    for row in range(rows):
        positions[row] = int64(((hashes[row] >> S32) * consumers) >> S32)
    return rows


def arrange(positions: Vector, order: Vector, bounds: Vector, consumers: int, rows: int) -> int:
    """Row numbers by consumer, in their order. ``bounds`` (consumers + 2 zeros) gets where those of each
    begin, then twice the end."""
    if consumers == 2:  # in registers; counters in memory wait for each other
        left, right = 0, rows
        for row in range(rows):
            right -= positions[row]
        bounds[1], bounds[2], bounds[3] = right, rows, rows
        for row in range(rows):
            position = positions[row]
            order[right if position else left] = row
            left += 1 - position
            right += position
        return rows
    for row in range(rows):
        bounds[positions[row] + 2] += 1
    for consumer in range(consumers):
        bounds[consumer + 2] += bounds[consumer + 1]
    for row in range(rows):
        place = bounds[positions[row] + 1]
        order[place] = row
        bounds[positions[row] + 1] = place + 1
    return rows


# --- texts ----------------------------------------------------------------------------------------


def sum_lengths(offsets: Vector, rows: Vector, ends: Vector, count: int) -> int:
    """Offsets (one more than rows) of the texts in those rows, laid one after the other; gives the last,
    which those of 32 bits may not hold."""
    end = ends[0] = 0
    for number in range(count):
        row = rows[number]
        end += int64(offsets[row + 1]) - int64(offsets[row])
        ends[number + 1] = end
    return end


@njit(forceinline=True)
def put_eight_bytes(word: Word, data: Vector, begin: int) -> None:
    for at in range(8):  # the compiler makes one store of it
        data[begin + at] = uint8(word >> (uint64(at) << S3))


def copy_texts(
    offsets: Vector, data: Vector, size: int, rows: Vector, ends: Vector, target: Vector, count: int
) -> int:
    """The bytes of the texts in those rows, to where ``sum_lengths`` says that they end. Eight bytes go at a
    time: with a text up to seven behind it, which the next one overwrites (``target`` has room for them), and
    which ``data`` (``size`` bytes) has but at its end."""
    for number in range(count):
        begin, to, end = int64(offsets[rows[number]]), int64(ends[number]), int64(ends[number + 1])
        while to < end:
            if begin + 8 <= size:
                put_eight_bytes(eight_bytes(data, begin), target, to)
            else:
                for at in range(end - to):
                    target[to + at] = data[begin + at]
            begin, to = begin + 8, to + 8
    return count


# --- rows -----------------------------------------------------------------------------------------


def count_arrays(data: Vector, size: int) -> int:
    """How many arrays there are in msgpack values that lie one after the other, at whatever depth.
    (https://github.com/msgpack/msgpack/blob/master/spec.md has the bytes that values begin with.)"""
    found = at = 0
    while at < size:
        tag = int64(data[at])
        at += 1
        if tag < 0xC0:
            if tag >= 0xA0:  # a text of up to 31 bytes
                at += tag & 0x1F
            elif tag >= 0x90:
                found += 1
        elif tag < 0xE0:
            if tag >= 0xCC and tag <= 0xD3:  # ints of 1, 2, 4 and 8 bytes, unsigned and signed
                at += 1 << (tag & 3)
            elif tag == 0xCA or tag == 0xCB:  # floats of 4 and 8
                at += 4 << (tag & 1)
            elif tag >= 0xD4 and tag <= 0xD8:  # extensions of 1, 2, 4, 8 and 16, and their code
                at += 1 + (1 << (tag - 0xD4))
            elif tag >= 0xDC:  # arrays and maps with a length of 2 or 4 bytes
                found += tag <= 0xDD
                at += 2 << (tag & 1)
            elif tag >= 0xC4:  # bytes, extensions and texts with a length of 1, 2 or 4
                width = 1 << (tag - 0xD9 if tag >= 0xD9 else (tag - 0xC4) % 3)
                length = 0
                for place in range(at, min(at + width, size)):
                    length = (length << 8) | int64(data[place])
                at += width + length + (tag >= 0xC7 and tag <= 0xC9)
    return found


# --- tables of keys -------------------------------------------------------------------------------
#
# A hash table with open addressing and 2**bits places of 32 bits. The upper bits of a key's hash give its
# place. That holds the slot + 1 in its lower ``bits`` bits and above them, as the tag, the next bits of the
# hash: most probes that meet another key end without a look at the keys. These lie one after the other in
# ``stored``, ``width`` words each. The hash is multiplicative (Knuth, "The Art of Computer Programming",
# volume 3, 6.4): its upper bits spread numbers that follow each other so evenly that hardly two of them meet.


@njit(forceinline=True)
def hash_of_row(words: Vector, row: int, width: int) -> Word:
    value: Word = uint64(words[row * width]) * GOLDEN  # outside the loop: most keys have one word
    for at in range(1, width):
        value = (value ^ (value >> S32) ^ uint64(words[row * width + at])) * GOLDEN
    return value


@njit(forceinline=True)
def same_words(words: Vector, row: int, stored: Vector, slot: int, width: int) -> bool:
    if words[row * width] != stored[slot * width]:
        return False
    at = 1
    while at < width and words[row * width + at] == stored[slot * width + at]:
        at += 1
    return at >= width


@njit(forceinline=True)
def tag_of(value: Word, bits: Word) -> Word:
    """The bits of a hash behind those of its place, as an entry has them; what else it has: the slot + 1."""
    return (value >> S32) << bits & LOW_HALF


@njit(forceinline=True)
def slot_in(table: Vector, bits: Word, value: Word) -> int:
    """The slot at the first place for that hash; no slot at all if another key or none stands there."""
    slot: int = int64(uint64(table[value >> (S64 - bits)]) ^ tag_of(value, bits)) - 1
    return slot


@njit(forceinline=True)
def place_of(
    table: Vector, bits: Word, stored: Vector, width: int, words: Vector, row: int, value: Word
) -> Word:
    """Where the key with that hash stands, or the place that is free for it."""
    place, last = value >> (S64 - bits), (ONE << bits) - ONE
    tag = tag_of(value, bits)
    while table[place] != ABSENT:
        entry = uint64(table[place]) ^ tag
        if entry <= last and same_words(words, row, stored, int64(entry) - 1, width):
            break
        place = (place + ONE) & last
    return place


@njit(forceinline=True)
def find_keys_of_width(
    table: Vector, bits: Word, stored: Vector, width: int, words: Vector, slots: Vector, rows: int
) -> int:
    """See :func:`find_keys`, which says what is known of ``width``.

    A guess that was wrong (another key at the first place) ends all work on the keys behind it, and while the
    memory is waited for that is one key after the other. So for some keys at a time all places are asked for
    first, and all stored keys then; ``slots`` has the hashes meanwhile.
    """
    absent, last = 0, (ONE << bits) - ONE
    for begin in range(0, rows, LOOKUPS):
        end = min(begin + LOOKUPS, rows)
        for row in range(begin, end):
            value = hash_of_row(words, row, width)
            prefetch(table, int64(value >> (S64 - bits)))
            slots[row] = int64(value)
        for row in range(begin, end):
            prefetch(stored, slot_in(table, bits, uint64(slots[row])) * width)
        for row in range(begin, end):
            value = uint64(slots[row])
            slot = slot_in(table, bits, value)
            if slot < 0 or slot >= int64(last) or not same_words(words, row, stored, slot, width):
                place = place_of(table, bits, stored, width, words, row, value)
                slot = int64(uint64(table[place]) & last) - 1
                if slot < 0:
                    absent += 1
            slots[row] = slot
    return absent


def find_keys(
    table: Vector, bits: Word, stored: Vector, width: int, words: Vector, slots: Vector, rows: int
) -> int:
    """The slot of each row of words, -1 for those that have none; how many these are.

    Most keys have one word or two. Where the compiler knows the width, no loop over words is left, and the
    processor waits for the places of several keys at once.
    """
    if width == 1:
        return find_keys_of_width(table, bits, stored, 1, words, slots, rows)
    if width == 2:
        return find_keys_of_width(table, bits, stored, 2, words, slots, rows)
    return find_keys_of_width(table, bits, stored, width, words, slots, rows)


def add_keys(
    table: Vector,
    bits: Word,
    stored: Vector,
    width: int,
    words: Vector,
    slots: Vector,
    begin: int,
    rows: int,
    count: Vector,
    room: int,
) -> int:
    """The slot of each row from ``begin`` on; new keys get the next ones. Gives the row before which
    there are ``room`` keys and one more comes, or ``rows``; ``count`` (one number) has how many there are."""
    for row in range(begin, rows):
        value = hash_of_row(words, row, width)
        place = place_of(table, bits, stored, width, words, row, value)
        if table[place] == ABSENT:
            slot = count[0]
            if slot == room:
                return row
            for at in range(width):
                stored[slot * width + at] = words[row * width + at]
            table[place] = uint32(tag_of(value, bits) | uint64(slot + 1))
            count[0] = slot + 1
        slots[row] = int64(uint64(table[place]) & ((ONE << bits) - ONE)) - 1
    return rows


def fill_table(table: Vector, bits: Word, stored: Vector, width: int, rows: int) -> int:
    """Enter all stored keys, which are distinct, into an empty table."""
    for slot in range(rows):
        value = hash_of_row(stored, slot, width)
        place = value >> (S64 - bits)
        while table[place] != ABSENT:
            place = (place + ONE) & ((ONE << bits) - ONE)
        table[place] = uint32(tag_of(value, bits) | uint64(slot + 1))
    return rows


def write_texts(
    offsets: Vector, data: Vector, words: Vector, stride: int, column: int, width: int, rows: int
) -> int:
    """Texts of up to ``8 * width - 1`` bytes as ``width`` words each, from ``column`` on in rows of
    ``stride`` words: the length in the lowest byte, then the bytes, then zeros. Of a longer one the
    length and as many bytes as there is room for. Gives the greatest length."""
    longest = 0
    for row in range(rows):
        begin, end = int64(offsets[row]), int64(offsets[row + 1])
        first = row * stride + column
        low = word_of_bytes(data, begin, end)
        words[first] = int64((low << LENGTH_BITS) | (uint64(end - begin) & uint64(0xFF)))
        for number in range(1, width):
            at = begin + 8 * number - 1
            words[first + number] = int64(word_of_bytes(data, at, end))
        longest = max(longest, end - begin)
    return longest


# --- aggregation ----------------------------------------------------------------------------------


def fold_ints(
    operation: int, state: Vector, slots: Vector, values: Vector, results: Vector, wanted: int, rows: int
) -> int:
    """Add each row to the state of its slot: a sum, minimum or maximum; ``results`` gets what that is after
    each row, if it is ``wanted``. Gives the row at which a sum would leave int64, the state as it was before
    it; or ``rows``."""
    for row in range(rows):
        held, value = state[slots[row]], values[row]
        if operation == SUM:
            after = held + value
            if (held ^ after) & (value ^ after) < 0:
                return row
        elif operation == MINIMUM:
            after = value if value < held else held
        else:
            after = value if value > held else held
        state[slots[row]] = after
        if wanted:
            results[row] = after
    return rows


def fold_floats(
    operation: int, state: Vector, slots: Vector, values: Vector, results: Vector, wanted: int, rows: int
) -> int:
    """The same with floats; for minimum and maximum a NaN is no value."""
    for row in range(rows):
        held, value = state[slots[row]], values[row]
        if operation == SUM:
            after = held + value
        elif operation == MINIMUM:
            after = value if value < held or held != held else held
        else:
            after = value if value > held or held != held else held
        state[slots[row]] = after
        if wanted:
            results[row] = after
    return rows


def fold_wide(
    state: Vector, slots: Vector, values: Vector, width: int, results: Vector, wanted: int, rows: int
) -> int:
    """The sum of each row's slot after that row, if ``wanted``, of integers of 256 bits, each as four words,
    the lowest first. Values have ``width`` words."""
    for row in range(rows):
        at, begin = 4 * slots[row], width * row
        sign = values[begin + width - 1] >> 63
        carry = uint64(0)
        for place in range(4):
            value = uint64(values[begin + place]) if place < width else uint64(sign)
            total = value + carry
            carry = uint64(total < carry)
            after = uint64(state[at + place]) + total
            carry += uint64(after < total)
            state[at + place] = int64(after)
            if wanted:
                results[4 * row + place] = int64(after)
    return rows


@njit(forceinline=True)
def chain_of(slot: int, bucket: int, shift: Word) -> Any:
    """The chain in which the rows of a key's slot and a bucket of time are."""
    return int64(mixed(uint64(slot) * GOLDEN ^ uint64(bucket)) >> shift)


def link_rows(
    slots: Vector,
    times: Vector,
    width: int,
    heads: Vector,
    shift: Word,
    following: Vector,
    first: int,
    rows: int,
) -> int:
    """Chains of rows by slot and bucket (``width`` long): the last row of each chain, and the row before each
    row; -1 at the end. Those from ``first`` on are added."""
    for row in range(first, rows):
        chain = chain_of(slots[row], times[row] // width, shift)
        following[row] = heads[chain]
        heads[chain] = row
    return rows


def find_rows(
    slots: Vector,
    times: Vector,
    rows: int,
    held_slots: Vector,
    held_times: Vector,
    heads: Vector,
    shift: Word,
    following: Vector,
    width: int,
    before: int,
    after: int,
    place: Vector,
    found: Vector,
    partners: Vector,
    most: int,
) -> int:
    """The linked rows of the slot of each row (-1: none) with times at most ``before`` before and ``after``
    after its own: pairs of row and partner, at most so many. ``place`` (row, bucket, partner; -2 for the head
    of the chain) is where to go on; there are no more once its row is ``rows``. Gives the number of pairs."""
    row, look, partner, count = place[0], place[1], place[2], 0
    while row < rows:
        first, last = times[row] - before, times[row] + after
        looks = 0 if slots[row] < 0 else 1 if first // width == last // width else 2
        while look < looks:
            bucket = first // width + look
            if partner == -2:
                partner = heads[chain_of(slots[row], bucket, shift)]
            while partner >= 0:
                time = held_times[partner]
                fits = first <= time and time <= last and time // width == bucket
                if fits and held_slots[partner] == slots[row]:
                    if count == most:
                        place[0], place[1], place[2] = row, look, partner
                        return count
                    found[count], partners[count] = row, partner
                    count += 1
                partner = following[partner]
            look, partner = look + 1, -2
        row, look, partner = row + 1, 0, -2
    place[0], place[1], place[2] = row, look, partner
    return count


def match_as_of(
    times: Vector,
    slots: Vector,
    rows: int,
    other_times: Vector,
    other_slots: Vector,
    others: int,
    latest: Vector,
    tolerance: int,
    found: Vector,
) -> int:
    """For each row the last of the other rows of its slot (-1: none has it) that is not after it, and at most
    ``tolerance`` before it; or -1. Both are in order of time; ``latest`` is -1 for each slot."""
    other = 0
    for row in range(rows):
        while other < others and other_times[other] <= times[row]:
            latest[other_slots[other]] = other
            other += 1
        match = latest[slots[row]] if slots[row] >= 0 else -1
        if match >= 0 and times[row] - other_times[match] > tolerance:
            match = -1
        found[row] = match
    return other


def assign_sessions(
    times: Vector,
    slots: Vector,
    current: Vector,
    firsts: Vector,
    lasts: Vector,
    owners: Vector,
    counts: Vector,
    known: int,
    gap: int,
    size: int,
    sessions: Vector,
    rows: int,
) -> int:
    """The session of each row, in order of time: the current one of its key's slot if that is not ``gap`` ago
    and has fewer than ``size`` rows, else a new one, from the number ``known`` on. ``firsts``, ``lasts``,
    ``owners`` and ``counts`` are the times, the slot and the rows of each session; ``current`` is -1 for a
    key without one. Gives the next number."""
    for row in range(rows):
        session = current[slots[row]]
        if session < 0 or times[row] - lasts[session] >= gap or counts[session] >= size:
            session = known
            known += 1
            current[slots[row]], owners[session], firsts[session] = session, slots[row], times[row]
            counts[session] = 0
        lasts[session] = times[row]
        counts[session] += 1
        sessions[row] = session
    return known


def fold_spread(
    counts: Vector,
    means: Vector,
    squares: Vector,
    slots: Vector,
    more: Vector,
    more_means: Vector,
    more_squares: Vector,
    variances: Vector,
    rows: int,
) -> int:
    """Add numbers of values, their means and their sums of squared differences from these to each row's
    slot. ``variances`` gets that of the slot after each row, -1 for fewer than two values."""
    for row in range(rows):
        slot, held = slots[row], counts[slots[row]]
        count = held + more[row]
        if more[row] > 0:
            apart = more_means[row] - means[slot]
            share = more[row] / count
            means[slot] += apart * share
            squares[slot] += more_squares[row] + apart * apart * held * share
            counts[slot] = count
        variances[row] = squares[slot] / (count - 1) if count > 1 else -1.0
    return rows


def first_rows(slots: Vector, stamps: Vector, stamp: int, chosen: Vector, rows: int) -> int:
    """The numbers of those rows before which their slot does not come, and how many there are. ``stamps``, by
    slot, has no such stamp before and has it for all these slots then."""
    found = 0
    for row in range(rows):
        chosen[found] = row  # in any case: a branch that is taken every other time costs more
        found += stamps[slots[row]] != stamp
        stamps[slots[row]] = stamp
    return found


def count_begun(data: Vector, size: int) -> int:
    """How many lists and objects begin in JSON, or seem to in a text: no more of them are in each other."""
    begun = 0
    for at in range(size):
        begun += (data[at] | uint8(0x20)) == uint8(0x7B)  # { or [
    return begun


def deepest_nesting(data: Vector, size: int) -> int:
    """How many lists and objects of JSON are in each other at the most."""
    depth, deepest, at = 0, 0, 0
    while at < size:
        if data[at] == uint8(0x22):
            at += 1
            while at < size and data[at] != uint8(0x22):
                at += 2 if data[at] == uint8(0x5C) else 1  # a backslash
        elif (data[at] | uint8(0x20)) == uint8(0x7B):
            depth += 1
            deepest = max(deepest, depth)
        elif (data[at] | uint8(0x20)) == uint8(0x7D):
            depth -= 1
        at += 1
    return deepest
