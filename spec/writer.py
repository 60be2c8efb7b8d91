#!/usr/bin/env python3
"""A writer of TSSD archives with only the standard library: the format as a readable program.

    writer.py OUT.tssd       writes a demonstration
    writer.py --self-test    writes all vectors that it supports and compares the bytes; reads deltas back

`encode` converts a dict to the bytes of an archive. Read the code from the end: `encode` joins the four
parts, and the functions above it create them. `encode_delta` converts a dict to the differences from another
one. The numbers in parentheses are the sections of format.md.

The output of `encode` equals that of the reference writer for the same values, byte for byte. It does not
support tensors that share a storage, strides and flags of tensors, shards of tensors, namedtuples, complex
numbers, dtype leaves, dtypes that a file describes, sizes, devices, opaque leaves, attributes,
compression, digests and manifests. It rejects values of other types, because they could not be restored
exactly. A `Tagged` value has a class tag; its content is not checked against F-078. The output of `encode_delta`
means the same as that of the reference writer, but has other bytes: thresholds, the form of positions and frames are
choices of a writer. It has digests, which reader.py computes.
"""

from __future__ import annotations

import json
import random
import re
import struct
import sys
import zlib
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from math import isnan, prod
from pathlib import Path
from typing import Any, NamedTuple

import reader  # only for digests and for the self-test


class Tensor(NamedTuple):
    """A tensor: the name of its dtype, its shape, and the bytes of its elements in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Tagged(NamedTuple):
    """A dict, list, tuple or str with a class tag: the name of the class in classes.json, and its parameter."""

    name: str
    parameter: int
    plain: Any


NONE = 0xFFFF_FFFF
DATA_START = 4096
CHUNK_LOG2 = 20
CRC_PAGE_LOG2 = 12  # a page of `crcs` has 4096 bytes: 1024 entries
MAX_LEVELS = 64
MAX_INLINE = 4096  # maximum bytes of a key, of a big int, and of a str or bytes leaf in the index
I64_RANGE = range(-(1 << 63), 1 << 63)
DTYPES = {
    dtype["name"]: dtype
    for dtype in json.loads(Path(__file__).with_name("dtypes.json").read_text(encoding="utf-8"))
}
CLASSES = {
    row["name"]: row for row in json.loads(Path(__file__).with_name("classes.json").read_text(encoding="utf-8"))
}
# Kinds of nodes and of keys (5)
NONE_LEAF, BOOL, INT, BIGINT, FLOAT, STR, BYTES, TENSOR = 0, 1, 2, 3, 4, 6, 7, 11
CONTAINERS: dict[type, int] = {dict: 32, OrderedDict: 33, list: 34, tuple: 35}
KINDS = {"str": STR, "dict": 32, "list": 34, "tuple": 35}
K_INDEX, K_STR, K_INT, K_BIGINT, K_BOOL, K_FLOAT, K_NONE, K_BYTES, K_TUPLE = range(9)


def align_up(x: int, alignment: int) -> int:
    return -(-x // alignment) * alignment


def float_bits(number: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", number))[0]


def bigint(number: int) -> bytes:
    """Returns the shortest two's complement encoding, little-endian."""
    length = (number if number >= 0 else ~number).bit_length() // 8 + 1
    return number.to_bytes(length, "little", signed=True)


def text(content: str) -> bytes:
    """Encodes a str as generalized UTF-8 (4), which exists for any Python str."""
    return content.encode("utf-8", "surrogatepass")


def atom(value: Any) -> tuple[int, Any] | None:
    """Returns the node kind of a plain value, and its word or bytes. None for values of other types."""
    if value is None:
        return NONE_LEAF, 0
    if type(value) is bool:
        return BOOL, int(value)
    if type(value) is int:
        if value in I64_RANGE:
            return INT, value & (1 << 64) - 1
        content = bigint(value)
        if len(content) > MAX_INLINE:
            raise ValueError(f"an int of {len(content)} bytes is too long (F-046)")
        return BIGINT, content
    if type(value) is float:
        return FLOAT, float_bits(value)
    if type(value) is str:
        return STR, text(value)
    return (BYTES, value) if type(value) is bytes else None


# ---- Keys (5) ------------------------------------------------------------------------------------

KEY_KINDS = {NONE_LEAF: K_NONE, BOOL: K_BOOL, INT: K_INT, BIGINT: K_BIGINT, FLOAT: K_FLOAT}
KEY_KINDS |= {STR: K_STR, BYTES: K_BYTES}


def encode_key(key: Any) -> tuple[int, Any]:
    """Returns the kind of a key, and its word or bytes. These pairs sort in the order of `by_key`.

    The keys of a Python dict are distinct in Python, so F-045 needs no check here.
    """
    if type(key) is float and isnan(key):
        raise ValueError("NaN cannot be a key (F-043)")
    encoded = atom(key)
    content: Any
    if type(key) is tuple:
        kind, content = K_TUPLE, pack_tuple(key, 1)
        if count_elements(key) > 64:
            raise ValueError("a tuple of more than 64 elements cannot be a key (F-043)")
    elif encoded:
        kind, content = KEY_KINDS[encoded[0]], encoded[1]
    else:
        raise TypeError(f"a {type(key).__name__} cannot be a key")
    if isinstance(content, bytes) and len(content) > MAX_INLINE:
        raise ValueError(f"a key of {len(content)} bytes is too long (F-043)")
    return kind, content


def pack_tuple(elements: tuple, depth: int) -> bytes:
    if depth > 8:
        raise ValueError("tuples nest more than 8 deep in a key (F-043)")
    packed = struct.pack("<I", len(elements))
    for element in elements:
        if type(element) is tuple:
            packed += bytes([K_TUPLE]) + pack_tuple(element, depth + 1)
            continue
        kind, content = encode_key(element)
        packed += bytes([kind])
        if isinstance(content, bytes):
            packed += struct.pack("<I", len(content)) + content
        elif kind != K_NONE:
            packed += bytes([content]) if kind == K_BOOL else struct.pack("<Q", content)
    return packed


def count_elements(elements: tuple) -> int:
    return len(elements) + sum(count_elements(each) for each in elements if type(each) is tuple)


# ---- The blob (6) --------------------------------------------------------------------------------


@dataclass
class Blob:
    """The storages, one after the other, each at its alignment, with their records and checksums."""

    content: bytearray = field(default_factory=bytearray)
    storages: list[bytes] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)
    # Only in a delta. `digests` and `base_storages` have one entry for each storage.
    digests: list[bytes] = field(default_factory=list)
    subtrees: list[bytes] = field(default_factory=list)
    base: list[bytes] = field(default_factory=list)
    base_storages: list[int] = field(default_factory=list)

    def add(self, raw: bytes, path: tuple, tensor: Tensor | None) -> int:
        """Adds the storage of a leaf and returns its number. `tensor` is None unless the leaf is a tensor."""
        return self.place(raw, split(raw, CHUNK_LOG2))

    def place(self, raw: bytes, pieces: list[bytes], **fields: int) -> int:
        """Adds a storage that is stored as these pieces, one for each chunk."""
        stored = b"".join(pieces)
        record = {"chunks": NONE, "codec": 0, "chunk_log2": CHUNK_LOG2, "width": 0, "subtrees": NONE} | fields
        # Large storages begin at a page, so that they can be mapped.
        align_log2 = 12 if len(stored) >= 1 << 16 else 8
        offset = align_up(DATA_START + len(self.content), 1 << align_log2)
        self.content += bytes(offset - DATA_START - len(self.content)) + stored
        place = offset, len(stored), len(raw), 0, record["chunks"], len(self.crcs), zlib.crc32(raw)
        coding = record["codec"], align_log2, record["chunk_log2"], record["width"], record["subtrees"]
        self.storages.append(struct.pack("<QQQIIIIBBBBI", *place, *coding))
        self.crcs += map(zlib.crc32, pieces)
        return len(self.storages) - 1


def split(content: bytes, log2: int) -> list[bytes]:
    return [content[at : at + (1 << log2)] for at in range(0, len(content), 1 << log2)]


@dataclass
class Node:
    """A node. Its storage is already in the blob; bytes in the index are placed later."""

    kind: int
    content: int | bytes = 0
    flags: int = 0
    children: list[tuple[tuple[int, int | bytes], "Node"]] = field(default_factory=list)
    tensor: tuple[Tensor, int] | None = None
    tag: int = 0


def build_node(value: Any, blob: Blob, path: tuple = ()) -> Node:
    """Returns the node of a value. Adds its storages to the blob, in the iteration order of the dict."""
    if type(value) is Tagged:
        node = build_node(value.plain, blob, path)
        cls = CLASSES[value.name]
        if not path or node.kind != KINDS[cls["kind"]] or not 0 <= value.parameter < cls["parameters"]:
            raise ValueError(f"a tag of {value.name} that this node cannot have (F-077)")
        node.tag = value.parameter << 16 | cls["number"]
        return node
    kind = CONTAINERS.get(type(value))
    encoded = atom(value)
    if kind:
        if len(path) >= MAX_LEVELS:
            raise ValueError("containers nest more than 64 deep (F-042)")
        children = []
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            key = encode_key(name) if isinstance(value, dict) else (K_INDEX, 0)
            children.append((key, build_node(each, blob, (*path, name))))
        return Node(kind, children=children)
    if type(value) is Tensor:
        check_tensor(value)
        storage = blob.add(value.data, path, value) if value.data else NONE
        return Node(TENSOR, tensor=(value, storage))
    if not encoded:
        raise TypeError(f"a {type(value).__name__} cannot be stored")
    if encoded[0] in (STR, BYTES) and len(encoded[1]) > MAX_INLINE:
        return Node(encoded[0], blob.add(encoded[1], path, None), flags=1)
    return Node(*encoded)


def check_tensor(tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES or len(tensor.shape) > 64:
        raise ValueError("a tensor of an unknown dtype (F-050), or of a rank above 64 (F-052)")
    itemsize = DTYPES[tensor.dtype]["size"]
    if min(tensor.shape, default=0) < 0 or len(tensor.data) != itemsize * prod(tensor.shape):
        raise ValueError(f"{len(tensor.data)} bytes do not fit the shape {tensor.shape}")
    if max(*tensor.shape, itemsize * prod(size for size in tensor.shape if size), 0) >= 1 << 63:
        raise ValueError("a shape beyond 2^63 (F-053)")


# ---- The index (3 to 6) --------------------------------------------------------------------------


class Index:
    """The tables that the nodes fill. Records with equal content share one range of heap or dims."""

    def __init__(self, root: Node) -> None:
        self.heap, self.strings = bytearray(), {b"": 0}
        self.dims: list[int] = []
        self.vectors: dict[tuple[int, ...], int] = {(): 0}
        self.nodes: list[bytes] = []
        self.by_key = [0]
        self.tensors: list[tuple[Tensor, int]] = []
        queue: list[tuple[tuple[int, int | bytes], Node]] = [((K_INDEX, 0), root)]
        for key, node in queue:  # the loop extends the list: nodes are in breadth-first order
            self.add_node(key, node, first_child=len(queue))
            children = range(len(queue), len(queue) + len(node.children))
            queue += node.children
            # The keys of a list are all equal, so sorting keeps the order of its children.
            self.by_key += sorted(children, key=lambda child: queue[child][0])
        self.tensor_records = [self.tensor_record(*each) for each in self.tensors]

    def add_node(self, key: tuple[int, int | bytes], node: Node, first_child: int) -> None:
        key_word = self.word(key[1])
        count, a = len(node.children), self.word(node.content)
        if node.kind in CONTAINERS.values():
            a = first_child
        elif node.tensor:
            count, a = 1, len(self.tensors)
            self.tensors.append(node.tensor)
        fields = node.kind, key[0], node.flags, count, key_word, a, node.tag
        self.nodes.append(struct.pack("<BBHIQQQ", *fields))

    def word(self, content: int | bytes) -> int:
        """Returns a word unchanged, or the heap range of bytes: length and offset (4)."""
        if isinstance(content, int):
            return content
        if content not in self.strings:
            self.strings[content] = len(content) << 32 | len(self.heap)
            self.heap += content
        return self.strings[content]

    def vector(self, numbers: tuple[int, ...]) -> int:
        """Returns the offset of a vector in dims (4)."""
        if numbers not in self.vectors:
            self.vectors[numbers] = len(self.dims)
            self.dims += numbers
        return self.vectors[numbers]

    def tensor_record(self, tensor: Tensor, storage: int) -> bytes:
        dtype, shape = DTYPES[tensor.dtype]["number"], self.vector(tuple(tensor.shape))
        fields = storage, dtype, len(tensor.shape), 0, shape, NONE, NONE, 0, 0
        return struct.pack("<IHBBIIIIQ", *fields)

    def encode(self, blob: Blob) -> tuple[bytes, int]:
        """Returns the tables in the order of the root, followed by the root, and the offset of the root."""
        crcs = pack_numbers("I", blob.crcs)
        pages = [zlib.crc32(page) for page in split(crcs, CRC_PAGE_LOG2)]
        tables: list[tuple[int, int, bytes]] = [
            (len(self.heap), 1, bytes(self.heap)),
            (len(self.dims), 8, pack_numbers("Q", self.dims)),
            (len(self.nodes), 8, b"".join(self.nodes)),
            (len(self.by_key), 4, pack_numbers("I", self.by_key)),
            (len(self.tensors), 8, b"".join(self.tensor_records)),
            (len(blob.storages), 8, b"".join(blob.storages)),
            (len(blob.chunks), 8, b"".join(blob.chunks)),
            (len(blob.crcs), 4, crcs),
            (len(pages), 4, pack_numbers("I", pages)),
            (0, 4, b""),  # slices
            (0, 8, b""),  # placements
            (0, 8, b""),  # attrs
            (len(blob.digests), 1, b"".join(blob.digests)),
            (0, 8, b""),  # shards
            (0, 8, b""),  # others
            (0, 8, b""),  # dtypes
            (len(blob.subtrees), 1, b"".join(blob.subtrees)),
            (len(blob.base), 1, b"".join(blob.base)),
            (len(blob.base_storages), 4, pack_numbers("I", blob.base_storages)),
        ]
        index, starts = b"", []
        for _, alignment, records in tables:
            index = index.ljust(align_up(len(index), alignment), b"\0")
            starts.append(len(index))
            index += records
        index = index.ljust(align_up(len(index), 4), b"\0")
        root_off = len(index)
        for (count, _, _), start in zip(tables, starts):
            index += struct.pack("<iI", start - len(index), count)
        return index, root_off


def pack_numbers(code: str, numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


# ---- Deltas (6) ----------------------------------------------------------------------------------

DELTA, DELTA_CHUNK_LOG2 = 2, 23
RAW_CHUNK, DELTA_CHUNK = 0, 3
BLOCK = 1 << 16  # elements of a block
DENSE = 0xFFFF
PATTERN_CODES = {1: "B", 2: "H", 4: "I"}  # of `struct`, by the width of elements


class DeltaBlob(Blob):
    """The storages of a delta.

    A storage is a delta storage if it is that of a tensor, if the base has a tensor of this dtype and shape at the
    same path, and if a chunk is shorter as a delta.
    """

    def __init__(self, base: dict) -> None:
        super().__init__()
        leaves = LeafRecorder()
        file = reader.open_archive(encode_file(base, leaves))
        self.base = [reader.content_digest(file)]
        places = {number: place for place, number in enumerate(reader.storage_order(file))}
        self.sources = {
            path: (tensor, places[number]) for path, (tensor, number) in leaves.recorded.items()
        }

    def add(self, raw: bytes, path: tuple, tensor: Tensor | None) -> int:
        self.digests.append(reader.blake3(raw))
        old, base_storage = self.sources.get(path, (None, NONE))
        if tensor and old and tensor.dtype == old.dtype and tuple(tensor.shape) == tuple(old.shape):
            width = delta_width(tensor.dtype)
            pairs = zip(split(old.data, DELTA_CHUNK_LOG2), split(raw, DELTA_CHUNK_LOG2))
            chunks = [encode_delta_chunk(*pair, width) for pair in pairs]
            if any(codec == DELTA_CHUNK for codec, _ in chunks):
                return self.place_delta(raw, chunks, width, base_storage)
        self.base_storages.append(NONE)
        pieces = split(raw, CHUNK_LOG2)
        if len(pieces) == 1:
            return self.place(raw, pieces)
        first, tree = len(self.subtrees), reader.Blake3()
        for piece in pieces:
            tree.add(piece)
        self.subtrees += tree.subtrees()
        return self.place(raw, pieces, subtrees=first)

    def place_delta(self, raw: bytes, chunks: list[tuple[int, bytes]], width: int, base_storage: int) -> int:
        """Adds a delta storage, given codec and bytes of each chunk."""
        first, offset = len(self.chunks), 0
        for codec, stored in chunks:
            self.chunks.append(struct.pack("<QII", offset, len(stored), codec))
            offset += len(stored)
        self.base_storages.append(base_storage)
        coding = {"codec": DELTA, "chunk_log2": DELTA_CHUNK_LOG2, "width": width}
        return self.place(raw, [stored for _, stored in chunks], chunks=first, **coding)


class LeafRecorder(Blob):
    """A blob that records the tensor, if it is one, and the storage of each leaf by its path."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[tuple, tuple[Tensor | None, int]] = {}

    def add(self, raw: bytes, path: tuple, tensor: Tensor | None) -> int:
        number = super().add(raw, path, tensor)
        self.recorded[path] = tensor, number
        return number


def delta_width(dtype: str) -> int:
    """Returns the width of elements in a delta: that of a component of a complex dtype, at most 4."""
    size = DTYPES[dtype]["size"] // (2 if DTYPES[dtype]["class"] == "complex" else 1)
    return min(size, 4) if size in (1, 2, 4, 8) else 1


def encode_delta_chunk(base: bytes, result: bytes, width: int) -> tuple[int, bytes]:
    """Returns codec and bytes of the shortest form of a chunk that this writer knows."""
    if base == result:
        return DELTA_CHUNK, b""
    magnitudes = sorted(set(map(magnitude(width), patterns(base, width))))
    quartiles = {magnitudes[len(magnitudes) * part // 4] for part in (1, 2, 3)}
    deltas = [
        compare_chunks(base, result, width, thresholds, bitmaps).with_frames().encode()
        for thresholds in ((), sorted(quartiles - {0}))
        for bitmaps in (0, (1 << len(thresholds) + 1) - 1)
    ]
    shortest = min(deltas, key=len)
    return (DELTA_CHUNK, shortest) if len(shortest) < len(result) else (RAW_CHUNK, result)


def patterns(content: bytes, width: int) -> tuple[int, ...]:
    return struct.unpack(f"<{len(content) // width}{PATTERN_CODES[width]}", content)


def magnitude(width: int) -> Callable[[int], int]:
    """Returns the function that takes a pattern without its highest bit."""
    mask = (1 << 8 * width - 1) - 1
    return lambda pattern: pattern & mask


class Frame(bytes):
    """A column that is stored as a zstd frame."""


@dataclass
class DeltaChunk:
    """The parts of a delta chunk, in the order in which they are stored."""

    width: int
    thresholds: list[int]
    bitmaps: int
    checksums: list[int] = field(default_factory=list)
    counts: list[list[int] | None] = field(default_factory=list)  # of each block; None for a dense block
    columns: list[bytes] = field(default_factory=list)
    dense: list[bytes] = field(default_factory=list)

    def with_frames(self) -> DeltaChunk:
        """Replaces each column by its frame if that is shorter."""
        self.columns = [min(column, Frame(frame(column)), key=len) for column in self.columns]
        return self

    def encode(self) -> bytes:
        stored = bytes([len(self.thresholds) + 1, self.bitmaps])
        stored += pack_numbers(PATTERN_CODES[self.width], self.thresholds) + pack_numbers("I", self.checksums)
        for counts in self.counts:
            stored += pack_numbers("H", [DENSE] if counts is None else counts)
        lengths = [isinstance(column, Frame) << 31 | len(column) for column in self.columns]
        return stored + pack_numbers("I", lengths) + b"".join(self.columns) + b"".join(self.dense)


def compare_chunks(
    base: bytes, result: bytes, width: int, thresholds: Sequence[int] = (), bitmaps: int = 0
) -> DeltaChunk:
    """Returns the delta of a chunk, with these thresholds and forms of positions, and without frames."""
    delta = DeltaChunk(width, list(thresholds), bitmaps)
    classes = range(len(thresholds) + 1)
    positions = [b"" for _ in classes]
    differences: list[list[int]] = [[] for _ in classes]
    block_log2 = (BLOCK * width).bit_length() - 1
    for old, new in zip(split(base, block_log2), split(result, block_log2)):
        changes = compare_blocks(old, new, width, thresholds)
        forms = [encode_positions(*changes[number][:2], bitmaps >> number & 1) for number in classes]
        listed = sum(len(each) for _, _, each in changes)
        is_sparse = sum(map(len, forms)) + listed // 2 < len(new) and max(map(len, forms)) < DENSE
        delta.checksums.append(zlib.crc32(new))
        delta.counts.append(list(map(len, forms)) if is_sparse else None)
        if not is_sparse:
            delta.dense.append(new)
            continue
        for number in classes:
            positions[number] += forms[number]
            differences[number] += changes[number][2]
    values, wide, exceptions = encode_differences(differences, width)
    for each in zip(positions, values):
        delta.columns += each
    delta.columns += wide, exceptions
    return delta


def compare_blocks(
    old: bytes, new: bytes, width: int, thresholds: Sequence[int]
) -> list[tuple[int, list[int], list[int]]]:
    """Returns of each class the number of its elements, the ranks that differ, and the differences."""
    sizes = [0] * (len(thresholds) + 1)
    ranks: list[list[int]] = [[] for _ in sizes]
    differences: list[list[int]] = [[] for _ in sizes]
    without_sign, half = magnitude(width), 1 << 8 * width - 1
    for before, after in zip(patterns(old, width), patterns(new, width)):
        number = bisect(thresholds, without_sign(before))
        if before != after:
            ranks[number].append(sizes[number])
            # The difference modulo 2^(8 width), as a signed integer
            differences[number].append((after - before + half) % (2 * half) - half)
        sizes[number] += 1
    return list(zip(sizes, ranks, differences))


def encode_positions(size: int, ranks: list[int], is_bitmap: int) -> bytes:
    """Encodes the listed ranks of a class of `size` elements in one block."""
    if is_bitmap:
        bitmap = bytearray((size + 7) // 8)
        for rank in ranks:
            bitmap[rank // 8] |= 1 << rank % 8
        return bytes(bitmap)
    gaps, next_rank = bytearray(), 0
    for rank in ranks:
        skips, gap = divmod(rank - next_rank, 255)
        gaps += b"\xff" * skips + bytes([gap])
        next_rank = rank + 1
    return bytes(gaps)


def encode_differences(differences: list[list[int]], width: int) -> tuple[list[bytes], bytes, bytes]:
    """Returns the value column of each class, the wide column and the exception column."""
    values, wide, exceptions = [], bytearray(), b""
    for of_class in differences:
        codes = []
        for difference in of_class:
            zigzag = 2 * difference if difference >= 0 else -2 * difference - 1
            codes.append(min(zigzag - 1, 15))
            if codes[-1] == 15:
                wide.append(min(zigzag - 16, 255))
                if wide[-1] == 255:
                    exceptions += difference.to_bytes(width, "little", signed=True)
        codes += [0] * (len(codes) % 2)
        values.append(bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2])))
    return values, bytes(wide), exceptions


BYTE_RUN = re.compile(rb"(.)\1{7,}", re.S)
WINDOW_OF_A_MIB = 0x50


def frame(content: bytes) -> bytes:
    """Returns a zstd frame (RFC 8878) of raw blocks and of blocks that repeat one byte."""
    pieces: list[tuple[int, int, bytes]] = []  # kind, decoded size and stored bytes of each block
    end = 0
    for run in BYTE_RUN.finditer(content):
        pieces += ((0, len(piece), piece) for piece in split(content[end : run.start()], 17))
        pieces += ((1, len(piece), run[1]) for piece in split(run[0], 17))
        end = run.end()
    pieces += ((0, len(piece), piece) for piece in split(content[end:], 17))
    pieces = pieces or [(0, 0, b"")]
    # The descriptor says that the content size has four bytes.
    stored = struct.pack("<IBBI", 0xFD2FB528, 0x80, WINDOW_OF_A_MIB, len(content))
    for number, (kind, size, piece) in enumerate(pieces):
        is_last = number == len(pieces) - 1
        stored += (size << 3 | kind << 1 | is_last).to_bytes(3, "little") + piece
    return stored


# ---- The file (2) --------------------------------------------------------------------------------


def encode(state_dict: dict) -> bytes:
    """Returns the bytes of an archive of a dict. Raises TypeError or ValueError for unsupported values."""
    return encode_file(state_dict, Blob())


def encode_delta(base: dict, result: dict) -> bytes:
    """Returns the bytes of the delta from one dict to another one. Its base is any archive of `base`."""
    return encode_file(result, DeltaBlob(base))


def encode_file(state_dict: dict, blob: Blob) -> bytes:
    if type(state_dict) not in (dict, OrderedDict):
        raise TypeError("the root is a dict (F-048)")
    index, root_off = Index(build_node(state_dict, blob)).encode(blob)
    if len(index) > 1 << 30:
        raise ValueError("the index would be larger than 2^30 bytes (F-012)")
    # The magic, version 1.0, data_start, incompat with the draft bit, and zeros.
    head = struct.pack("<8sHHIQ36x", b"\x89TSD\r\n\x1a\n", 1, 0, DATA_START, 1 << 63)
    head += struct.pack("<I", zlib.crc32(head))
    index_off = align_up(DATA_START + len(blob.content), 64)
    file = head.ljust(DATA_START, b"\0") + blob.content
    file = file.ljust(index_off, b"\0") + index
    fields = index_off, len(index), root_off, len(index) - root_off, zlib.crc32(index), 1
    trailer = struct.pack("<QQIIIH10xQ4x", *fields, len(file) + 64)
    end_magic = b"\n\x1a\n\rDST\x89"
    return file + trailer + struct.pack("<I", zlib.crc32(trailer + end_magic)) + end_magic


DEMONSTRATION = {
    "model": {
        "weight": Tensor("float32", (2, 3), struct.pack("<6f", 0.5, -1, 2, 0, 1.5, 8)),
        "bias": Tensor("float32", (2,), struct.pack("<2f", 0.25, -0.25)),
    },
    "optimizer": {"state": {0: {"step": 3}}, "lr": [0.1, 0.01], "betas": (0.9, 0.999)},
    "note": "é" * 3000,
    "epoch": 7,
}

# ---- Self-test -----------------------------------------------------------------------------------


class UnsupportedFeature(Exception):
    """A vector has a feature that this writer does not support."""


def value_of(view: dict) -> Any:
    """Returns the value that a JSON view (9) stands for."""
    if "class" in view:
        plain = value_of({kind: content for kind, content in view.items() if kind != "class"})
        return Tagged(view["class"]["name"], view["class"]["parameter"], plain)
    ((kind, content),) = view.items()
    if kind in ("dict", "ordered_dict"):
        make = dict if kind == "dict" else OrderedDict
        return make((value_of(key), value_of(value)) for key, value in content)
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(value_of, content))
    if kind == "tensor" and content.keys() == {"dtype", "shape", "storage", "byte_offset", "data"}:
        return Tensor(content["dtype"], tuple(content["shape"]), bytes.fromhex(content["data"]))
    decoders: dict[str, Callable[[Any], Any]] = {
        "none": lambda _: None,
        "bool": bool,
        # `int` rejects strs of more than 4300 digits.
        "int": lambda digits: int(Decimal(digits)),
        "float": lambda digits: struct.unpack(">d", bytes.fromhex(digits))[0],
        "str": str,
        "str_hex": lambda digits: bytes.fromhex(digits).decode("utf-8", "surrogatepass"),
        "bytes": bytes.fromhex,
    }
    if kind not in decoders:
        raise UnsupportedFeature(kind)
    return decoders[kind](content)


def storage_numbers(view: Any) -> Iterable[int]:
    if isinstance(view, dict):
        yield from [view["storage"]] if view.get("storage") is not None else []
        view = list(view.values())
    for each in view if isinstance(view, list) else []:
        yield from storage_numbers(each)


def encode_view(view: dict) -> bytes:
    tensors = list(storage_numbers(view["root"]))
    is_plain = all(storage.keys() <= PLAIN for storage in view["storages"])
    has_tables = view["attrs"] or view.keys() & {"dtypes", "shards", "base"}
    if has_tables or not is_plain or len(set(tensors)) < len(tensors):
        raise UnsupportedFeature("what is beyond one plain dict")
    return encode(value_of(view["root"]))


PLAIN = {"offset", "stored_len", "raw_len", "align_log2", "crc32"}


def differs_by_choice(view: dict, file: bytes, own: bytes) -> bool:
    """Returns whether a file has another version or other alignments, which a writer may choose."""
    root_len = slice(-64 + 20, -64 + 24)
    has_usual_alignment = all(
        each["align_log2"] == (12 if each["stored_len"] >= 64 << 10 else 8)
        for each in view["storages"]
    )
    return file[:64] != own[:64] or file[root_len] != own[root_len] or not has_usual_alignment


def self_test() -> int:
    """Compares the output with the vectors, and reads the demonstration and deltas with reader.py."""
    compared, skipped, different = 0, 0, []
    for path in sorted(Path(__file__).with_name("vectors").glob("valid/*.json")):
        view = json.loads(path.read_text(encoding="utf-8"))
        try:
            encoded = encode_view(view)
        except UnsupportedFeature:
            skipped += 1
            continue
        file = path.with_suffix(".tssd").read_bytes()
        if differs_by_choice(view, file, encoded):
            skipped += 1
            continue
        if file != encoded:
            different.append(path.stem)
        compared += 1
    file = reader.open_archive(encode(DEMONSTRATION))
    reader.prove(file, "deep")
    assert value_of(reader.view(file)["root"]) == DEMONSTRATION
    test_delta_chunks()
    test_deltas()
    print(*(f"{name}: other bytes" for name in different), sep="\n", end="\n" * bool(different))
    print(f"{compared - len(different)} vectors are as written here, {len(different)} not, {skipped} left out")
    return 1 if different or not compared else 0


def test_delta_chunks() -> None:
    """Reads chunks of all widths, forms and shares of changed elements."""
    sizes = (1, 2, 7, 8, 9, 300, 1000, 1000, 1000)
    for seed in range(300):
        rng = random.Random(seed)
        width = rng.choice((1, 2, 4))
        size = rng.choice(sizes) if seed % 100 else BLOCK + 5
        base, result = random_pair(rng, size, width)
        top = (1 << 8 * width - 1) - 1
        thresholds = sorted(rng.sample(range(1, top + 1), rng.randrange(4)))
        delta = compare_chunks(base, result, width, thresholds, rng.randrange(2 << len(thresholds)))
        if rng.random() < 0.5:
            delta.with_frames()
        elif rng.random() < 0.3:
            delta.columns = [Frame(frame(column)) for column in delta.columns]
        parsed = reader.parse_delta(delta.encode(), width, len(result), f"seed {seed}")
        assert reader.apply_delta(parsed, base, f"seed {seed}") == result, f"seed {seed}"


def random_pair(rng: random.Random, size: int, width: int) -> tuple[bytes, bytes]:
    """Returns two chunks of `size` elements: random ones, or like weights, with zeros of both signs and NaNs."""
    bits = 8 * width
    top = 1 << bits - 1
    special = (0, top, top - 1, 2 * top - 1, 0x7F << bits - 8, top | 1)
    share = rng.choice((0, 0.001, 0.05, 0.5, 1))
    old, new = [], []
    for _ in range(size):
        pattern = rng.choice(special) if rng.random() < 0.1 else rng.getrandbits(bits)
        step = rng.choice((1, -1, 1, -1, rng.randrange(-200, 200), rng.getrandbits(bits)))
        old.append(pattern)
        new.append((pattern + step) % (2 * top) if rng.random() < share else pattern)
    code = PATTERN_CODES[width]
    return pack_numbers(code, old), pack_numbers(code, new)


def test_deltas() -> None:
    """Reads deltas of archives, each beside its base."""
    rng = random.Random(0)
    first_chunk = bytes(1 << DELTA_CHUNK_LOG2)
    for dtype, size, start in (
        ("uint8", 400, b""),
        ("bfloat16", 400, first_chunk),
        ("float32", BLOCK + 10, b""),
        ("float64", 200, b""),
        ("complex128", 200, b""),
    ):
        width, itemsize = delta_width(dtype), DTYPES[dtype]["size"]
        pairs = [random_pair(rng, size * itemsize // width, width) for _ in range(3)]
        pairs += (pairs[0][0], pairs[0][0]), (start + pairs[1][0], start + pairs[1][1])
        base, result = (
            {
                f"number {side}": side,
                "tensors": [Tensor(dtype, (len(pair[side]) // itemsize,), pair[side]) for pair in pairs],
                f"new in {side}": Tensor("uint8", (5,), b"alone"),
                "longer": Tensor("uint8", (5 + side,), bytes(5 + side)),
                "reshaped": Tensor("uint8", (2 + side, 3 - side), bytes(6)),
                "empty": Tensor(dtype, (0,), b""),
                "text": "é" * (2500 + side),
            }
            for side in range(2)
        )
        file = reader.open_with_base(encode_delta(base, result), encode(base))
        reader.prove(file, "base")
        assert file.base_storages[len(pairs) :] == [NONE] * 4, "only tensors as in the base are deltas"
        expected = reader.open_archive(encode(result))
        assert reader.content_digest(file) == reader.content_digest(expected), dtype
        assert reader.view(file)["root"] == reader.view(expected)["root"], dtype


def main(arguments: list[str]) -> int:
    if arguments == ["--self-test"]:
        return self_test()
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.exit(__doc__)
    Path(arguments[0]).write_bytes(encode(DEMONSTRATION))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
