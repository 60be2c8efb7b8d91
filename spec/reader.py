#!/usr/bin/env python3
"""A reader of TSSD archives, written from format.md with nothing but the standard library.

    reader.py FILE             proves the index and prints the JSON view of the archive
    reader.py --verify FILE    proves the payload as well
    reader.py --vectors DIR    decodes every valid vector in DIR, and refuses every invalid one

It follows the sections of format.md, and each check names its rule. It is meant to be read beside
the document: it is slow, and holds the whole file in memory.
"""

import json
import re
import struct
import sys
import zlib
from array import array
from collections import namedtuple
from math import prod
from pathlib import Path


class Refused(Exception):
    """The file breaks a rule of the format."""

    def __init__(self, rule, kind, message):
        super().__init__(f"{rule} {kind}: {message}")
        self.rule = rule
        self.kind = kind


def require(holds, rule, kind, message):
    if not holds:
        raise Refused(rule, kind, message)


def align_up(x, alignment):
    return -(-x // alignment) * alignment


def is_zero(data, start, end):
    return data.count(0, start, end) == end - start


# ---- 1. Overview ---------------------------------------------------------------------------------

DATA_START = 4096
NONE = 0xFFFF_FFFF
MAX_INDEX = 1 << 30
MAX_RANK = 64
MAX_LEVELS = 64
MAX_INLINE = 4096
MAX_PACKED_DEPTH = 8
DRAFT_BIT = 1 << 63
OVERFLOW = 1 << 63


# ---- 2. Head and trailer -------------------------------------------------------------------------

MAGIC = b"\x89TSD\r\n\x1a\n"
END_MAGIC = b"\n\x1a\n\rDST\x89"

HEAD = struct.Struct("<8sHHIQQQQQII")
Head = namedtuple(
    "Head",
    "magic major minor data_start incompat ro_compat compat index_off index_len flags crc32",
)
TRAILER = struct.Struct("<QQIIIHHQQII8s")
Trailer = namedtuple(
    "Trailer",
    "index_off index_len root_off root_len index_crc32 index_codec flags prev_trailer_off file_len"
    " generation crc32 end_magic",
)


def check_head(data):
    require(len(data) >= 4264, "F-001", "TooShort", f"{len(data)} bytes are no archive")
    head = Head(*HEAD.unpack_from(data))
    require(head.magic == MAGIC, "F-002", "NotTssd", "the file does not begin with the magic")
    require(head.crc32 == zlib.crc32(data[:60]), "F-003", "HeadCorrupt", "CRC of the head")
    require(head.major == 1, "F-004", "UnsupportedVersion", f"major version {head.major}")
    unknown = head.incompat & ~DRAFT_BIT
    require(not unknown, "F-005", "UnknownIncompat", f"unknown feature bits {unknown:#x}")
    require(head.data_start == DATA_START, "F-010", "DataStart", f"data_start {head.data_start}")
    reserved = head.index_off or head.index_len or head.flags
    require(not reserved, "F-006", "ReservedNotZero", "a reserved field of the head")
    require(is_zero(data, 64, DATA_START), "F-006", "ReservedNotZero", "the space after the head")


def check_trailer(data):
    start = len(data) - TRAILER.size
    t = Trailer(*TRAILER.unpack_from(data, start))
    require(t.end_magic == END_MAGIC, "F-007", "NoTrailer", "the file does not end with the magic")
    # The CRC sits between the fields and the end magic, and covers both.
    crc = zlib.crc32(t.end_magic, zlib.crc32(data[start : start + 52]))
    require(t.crc32 == crc, "F-008", "TrailerCorrupt", "CRC of the trailer")
    whole = t.file_len == len(data)
    require(whole, "F-009", "LengthMismatch", f"{len(data)} bytes, not {t.file_len}")
    reserved = t.flags or t.prev_trailer_off or t.generation
    require(not reserved, "F-006", "ReservedNotZero", "a reserved field of the trailer")
    require(t.index_codec == 1, "F-014", "IndexCodec", f"index codec {t.index_codec}")
    require(t.index_len <= MAX_INDEX, "F-012", "IndexTooLarge", f"index of {t.index_len} bytes")
    placed = t.index_off % 64 == 0 and t.index_off >= DATA_START
    placed = placed and t.index_off + t.index_len + TRAILER.size == t.file_len
    require(placed, "F-011", "IndexRange", f"index at {t.index_off}, {t.index_len} bytes long")
    crc = zlib.crc32(memoryview(data)[t.index_off : start])
    require(t.index_crc32 == crc, "F-013", "IndexCorrupt", "CRC of the index")
    return t


# ---- 3. The index: tables and root ---------------------------------------------------------------

# Name, alignment, layout and fields of the records, in the order of the root.
TABLES = (
    ("heap", 1, "<B", ""),
    ("dims", 8, "<Q", ""),
    ("nodes", 8, "<BBHIQQQ", "kind key_kind flags count key a b"),
    ("by_key", 4, "<I", ""),
    (
        "tensors", 8, "<IHBBIIIIQ",
        "storage dtype rank flags shape strides slice reserved byte_offset",
    ),
    (
        "storages", 8, "<QQQIIIIBBBBI",
        "offset stored_len raw_len shard chunks crcs crc32 codec align_log2 chunk_log2 shuffle"
        " reserved",
    ),
    ("chunks", 8, "<QII", "offset stored_len codec"),
    ("crcs", 4, "<I", ""),
    (
        "slices", 8, "<IIIIIIIBBH",
        "offsets global_shape mesh coordinates ranks placements names rank mesh_rank flags",
    ),
    ("placements", 8, "<B3sIQ", "kind reserved dim split_factor"),
    ("attrs", 8, "<QQB7s", "name value kind reserved"),
    ("digests", 1, "<32s", "digest"),
    ("shards", 8, "<QQQII32s", "name file_len index_off index_crc32 writer digest"),
)
ROOT_LEN = 8 * len(TABLES)


class Table:
    """Records of the index, unpacked one by one when they are asked for."""

    def __init__(self, data, start, count, layout, fields):
        self.data = data
        self.start = start
        self.count = count
        self.layout = struct.Struct(layout)
        self.record = namedtuple("Record", fields) if fields else int
        self.end = start + count * self.layout.size

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if not 0 <= i < self.count:
            raise IndexError(i)
        at = self.start + i * self.layout.size
        return self.record(*self.layout.unpack_from(self.data, at))

    def raw(self, first, count):
        at = self.start + first * self.layout.size
        return self.data[at : at + count * self.layout.size]


class Archive:
    """An archive: the file, its tables, and what the checks learn about them on the way."""

    def __init__(self, data, trailer):
        self.data = data
        self.index_off = trailer.index_off
        for name, table in read_tables(data, trailer):
            setattr(self, name, table)
        self.heap_claims = Claims("heap", len(self.heap), "F-030", "HeapRange")
        self.dims_claims = Claims("dims", len(self.dims), "F-033", "DimsRange")
        self.parent = array("I", bytes(4 * len(self.nodes)))
        # Who names each storage: 0 nobody, 1 tensors, 2 a leaf.
        self.named = bytearray(len(self.storages))

    def heap_bytes(self, heap_range):
        return self.heap.raw(heap_range & NONE, heap_range >> 32)

    def dims_list(self, first, count):
        return list(struct.unpack(f"<{count}Q", self.dims.raw(first, count)))

    def children(self, node):
        return range(node.a, node.a + node.count)

    def run(self, node):
        return [self.tensors[i] for i in range(node.a, node.a + node.count)]


def read_tables(data, t):
    placed = t.root_off % 4 == 0 and t.root_off + t.root_len == t.index_len
    placed = placed and t.root_len >= ROOT_LEN
    require(placed, "F-020", "RootRange", f"root at {t.root_off}, {t.root_len} bytes long")
    end = 0
    for number, (name, alignment, layout, fields) in enumerate(TABLES):
        field = t.root_off + 8 * number
        rel, count = struct.unpack_from("<iI", data, t.index_off + field)
        start = align_up(end, alignment)
        require(field + rel == start, "F-021", "TableLayout", f"{name} is not at {start}")
        table = Table(data, t.index_off + start, count, layout, fields)
        check_gap(data, t, end, start)
        end = table.end - t.index_off
        require(end <= t.root_off, "F-021", "TableLayout", f"{name} does not end before the root")
        yield name, table
    start = align_up(end, 4)
    if t.root_len == ROOT_LEN:
        check_gap(data, t, end, t.root_off)
        require(start == t.root_off, "F-021", "TableLayout", f"the root is not at {start}")
    else:
        require(start <= t.root_off, "F-021", "TableLayout", "the root is in a table")


def check_gap(data, t, start, end):
    zero = end <= t.index_len and is_zero(data, t.index_off + start, t.index_off + end)
    require(zero, "F-021", "TableLayout", f"the gap of the index at {start} is not zero")


class Claims:
    """Claimed in order: ranges cover a table from its start to its end, and may be shared."""

    def __init__(self, what, size, rule, kind):
        self.what = what
        self.size = size
        self.rule = rule
        self.kind = kind
        self.end = 0

    def claim(self, start, count):
        if count == 0:
            fits = start == 0
        else:
            end = start + count
            fits = end <= self.end or (start == self.end and end <= self.size)
            self.end = max(self.end, end)
        message = f"range {start}+{count} of {self.what} is out of bounds or out of order"
        require(fits, self.rule, self.kind, message)

    def check_complete(self, rule, kind):
        message = f"{self.what} is claimed up to {self.end} of {self.size}"
        require(self.end == self.size, rule, kind, message)


# ---- 4. Heap and dims ----------------------------------------------------------------------------


def claim_bytes(archive, heap_range):
    archive.heap_claims.claim(heap_range & NONE, heap_range >> 32)
    return archive.heap_bytes(heap_range)


def claim_text(archive, heap_range):
    text = claim_bytes(archive, heap_range)
    check_text(text)
    return text


def check_text(text):
    require(is_text(text), "F-032", "NotText", "this is not generalized UTF-8")


def is_text(text):
    try:
        text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def claim_dims(archive, first, count):
    archive.dims_claims.claim(first, count)
    return archive.dims_list(first, count)


# ---- 5. Nodes ------------------------------------------------------------------------------------

NONE_LEAF, BOOL, INT, BIGINT, FLOAT, COMPLEX, STR, BYTES, DTYPE, SIZE = range(10)
DEVICE, TENSOR, OPAQUE = range(10, 13)
DICT, ORDERED_DICT, LIST, TUPLE, NAMEDTUPLE, DIVERGENT = range(32, 38)

# The fields of each kind that the table does not give as 0.
USED = {
    NONE_LEAF: (),
    **dict.fromkeys((BOOL, INT, BIGINT, FLOAT, STR, BYTES, DTYPE, DEVICE), ("a",)),
    **dict.fromkeys((COMPLEX, OPAQUE), ("a", "b")),
    **dict.fromkeys((SIZE, TENSOR), ("count", "a")),
    **dict.fromkeys((DICT, ORDERED_DICT, LIST, TUPLE, DIVERGENT), ("count", "a")),
    NAMEDTUPLE: ("count", "a", "b"),
}
# Leaves whose content may be in a storage.
STORABLE = (STR, BYTES, OPAQUE)

K_INDEX, K_STR, K_INT, K_BIGINT, K_BOOL, K_FLOAT, K_NONE, K_BYTES, K_TUPLE = range(9)
IN_HEAP = (K_STR, K_BIGINT, K_BYTES, K_TUPLE)
ANY_KEY = range(K_STR, K_TUPLE + 1)
KEYS_OF = {
    **dict.fromkeys((DICT, ORDERED_DICT), ANY_KEY),
    **dict.fromkeys((LIST, TUPLE), (K_INDEX,)),
    NAMEDTUPLE: (K_STR,),
    DIVERGENT: (K_INT,),
}


def check_tree(archive):
    """The shape of the tree: every node but the root gets one parent, which comes before it."""
    nodes = archive.nodes
    for i, node in enumerate(nodes):
        require(node.kind in USED, "F-040", "UnknownKind", f"node {i} is of kind {node.kind}")
    require(len(nodes) > 0, "F-048", "RootKind", "there is no root")
    good = nodes[0].kind in (DICT, ORDERED_DICT) and nodes[0].key_kind == K_INDEX
    require(good, "F-048", "RootKind", f"the root is of kind {nodes[0].kind}")
    claimed = 1
    level = bytearray(len(nodes))
    for i, node in enumerate(nodes):
        # A node that no container before it has claimed could only be its own ancestor.
        require(i < claimed, "F-041", "ChildRange", f"node {i} comes before its container")
        if node.kind not in KEYS_OF:
            continue
        fits = node.a == claimed and node.count <= len(nodes) - claimed
        require(fits, "F-041", "ChildRange", f"children of node {i}, {node.count} at {node.a}")
        claimed += node.count
        # The containers seen so far are at most 64 deep, so that a level fits in a byte.
        level[i] = level[archive.parent[i]] + 1
        require(level[i] <= MAX_LEVELS, "F-042", "TooDeep", f"node {i} is at level {level[i]}")
        for child in archive.children(node):
            archive.parent[child] = i
    require(claimed == len(nodes), "F-041", "ChildRange", f"node {claimed} has no container")
    require(len(archive.by_key) == len(nodes), "F-041", "ChildRange", "the length of by_key")
    require(archive.by_key[0] == 0, "F-041", "ChildRange", "the first entry of by_key")


def check_nodes(archive):
    """Key, `a` and `b` of each node in turn: the order in which heap and dims are claimed."""
    for i, node in enumerate(archive.nodes):
        check_key(archive, i, node)
        check_value(archive, i, node)
    for i, node in enumerate(archive.nodes):
        if node.kind in (LIST, TUPLE):
            in_order = all(archive.by_key[child] == child for child in archive.children(node))
            require(in_order, "F-041", "ChildRange", f"by_key of list {i} is not in order")
        elif node.kind in KEYS_OF:
            check_key_order(archive, i, node)
            check_equal_keys(archive, i, node)


def check_key(archive, i, node):
    container = archive.nodes[archive.parent[i]]
    allowed = KEYS_OF[container.kind] if i else (K_INDEX,)
    require(node.key_kind in allowed, "F-043", "KeyKind", f"key kind {node.key_kind} of node {i}")
    content = claim_bytes(archive, node.key) if node.key_kind in IN_HEAP else node.key
    if node.key_kind == K_STR:
        check_text(content)
    elif node.key_kind == K_BIGINT:
        check_bigint(content)
    else:
        require(is_key(node.key_kind, content), "F-043", "KeyKind", f"the key of node {i}")
    if container.kind == DIVERGENT:
        require(node.key < 1 << 32, "F-043", "KeyKind", f"writer {signed(node.key)}")


def is_key(key_kind, content):
    """Whether this is a legal key, or element of a packed tuple. `content` is bytes or a u64."""
    if key_kind == K_STR:
        return is_text(content)
    if key_kind == K_BIGINT:
        return is_canonical(content)
    if key_kind == K_BOOL:
        return content <= 1
    if key_kind == K_FLOAT:
        return as_float(content) == as_float(content)
    if key_kind in (K_INDEX, K_NONE):
        return content == 0
    if key_kind == K_TUPLE:
        return unpack_tuple(content) is not None
    return True


def unpack_tuple(packed):
    """The (key kind, content) pairs of a packed tuple; None if it is not well-formed."""
    elements, end = unpack_elements(packed, 0, 1)
    return elements if end == len(packed) else None


def unpack_elements(packed, at, depth):
    """The elements of the tuple at `at` and its end; the end is None if it is not well-formed."""
    malformed = None, None
    if depth > MAX_PACKED_DEPTH or at + 4 > len(packed):
        return malformed
    (count,) = struct.unpack_from("<I", packed, at)
    at += 4
    elements = []
    for _ in range(count):
        if at >= len(packed):
            return malformed
        kind = packed[at]
        at += 1
        if kind == K_TUPLE:
            content, at = unpack_elements(packed, at, depth + 1)
            if at is None:
                return malformed
        elif kind in ANY_KEY:
            content, at = unpack_atom(packed, at, kind)
            if at > len(packed) or not is_key(kind, content):
                return malformed
        else:
            return malformed
        elements.append((kind, content))
    return elements, at


def unpack_atom(packed, at, kind):
    """The content of an element that is no tuple, and its end, beyond that of `packed` if cut."""
    if kind in IN_HEAP:
        length = int.from_bytes(packed[at : at + 4], "little")
        at += 4
        return packed[at : at + length], at + length
    size = {K_INT: 8, K_FLOAT: 8, K_BOOL: 1, K_NONE: 0}[kind]
    return int.from_bytes(packed[at : at + size], "little"), at + size


def signed(word):
    return word - (1 << 64) if word >> 63 else word


def as_float(word):
    return struct.unpack("<d", struct.pack("<Q", word))[0]


def is_canonical(bigint):
    """Nine bytes, of which the last is not a mere sign: just the integers that are not an i64."""
    sign = b"\xff" if bigint[-2:-1] >= b"\x80" else b"\x00"
    return len(bigint) > 8 and bigint[-1:] != sign


def check_bigint(bigint):
    message = f"an integer of {len(bigint)} bytes could be shorter"
    require(is_canonical(bigint), "F-046", "NonCanonicalInt", message)


def check_key_order(archive, i, node):
    previous = None
    for child in children_by_key(archive, node):
        is_child = child in archive.children(node)
        require(is_child, "F-044", "DuplicateKey", f"by_key of node {i} names node {child}")
        key_kind, key = archive.nodes[child].key_kind, archive.nodes[child].key
        current = key_kind, archive.heap_bytes(key) if key_kind in IN_HEAP else key
        increasing = previous is None or previous < current
        require(increasing, "F-044", "DuplicateKey", f"the keys of node {i} are not increasing")
        previous = current


def children_by_key(archive, node):
    return (archive.by_key[entry] for entry in archive.children(node))


def check_equal_keys(archive, i, node):
    numbers = [whole_number(archive, archive.nodes[child]) for child in archive.children(node)]
    numbers = [number for number in numbers if number is not None]
    distinct = len(set(numbers)) == len(numbers)
    require(distinct, "F-045", "KeysCollide", f"keys of node {i} are equal in Python")


def whole_number(archive, node):
    """The integer that Python takes a key to be equal to, if it is a number of another kind too."""
    if node.key_kind == K_INT:
        return signed(node.key)
    if node.key_kind == K_BOOL:
        return node.key
    if node.key_kind == K_FLOAT and as_float(node.key).is_integer():
        return int(as_float(node.key))
    # No float is beyond 2^1024; longer integers need no look, and may be very long.
    if node.key_kind == K_BIGINT and node.key >> 32 <= 129:
        return int.from_bytes(archive.heap_bytes(node.key), "little", signed=True)
    return None


def check_value(archive, i, node):
    unused = [f for f in ("count", "a", "b") if f not in USED[node.kind] and getattr(node, f)]
    require(not unused, "F-047", "LeafValue", f"{unused} of node {i} must be 0")
    flags = 1 if node.kind in STORABLE else 0
    require(node.flags & ~flags == 0, "F-047", "LeafValue", f"flags {node.flags:#x} of node {i}")
    if node.kind == BOOL:
        require(node.a <= 1, "F-047", "LeafValue", f"node {i} is the bool {node.a}")
    elif node.kind == DTYPE:
        require(node.a in DTYPES, "F-047", "LeafValue", f"node {i} is the dtype {node.a}")
    elif node.kind == BIGINT:
        check_bigint(claim_bytes(archive, node.a))
    elif node.kind == SIZE:
        claim_dims(archive, node.a, node.count)
    elif node.kind == DEVICE:
        claim_text(archive, node.a)
    elif node.kind in STORABLE:
        check_content(archive, i, node)
    if node.kind in (OPAQUE, NAMEDTUPLE):
        claim_text(archive, node.b)


def check_content(archive, i, node):
    if node.flags & 1:
        exists = node.a < len(archive.storages)
        require(exists, "F-049", "TextPlace", f"node {i} names storage {node.a}")
        long = archive.storages[node.a].raw_len > MAX_INLINE
        require(long, "F-049", "TextPlace", f"the short content of node {i} is in a storage")
        shared = archive.named[node.a]
        require(not shared, "F-049", "TextPlace", f"node {i} shares storage {node.a}")
        archive.named[node.a] = 2
    else:
        content = claim_bytes(archive, node.a)
        short = len(content) <= MAX_INLINE
        require(short, "F-049", "TextPlace", f"the long content of node {i} is in the heap")
        if node.kind == STR:
            check_text(content)


# ---- 6. Tensors and storages ---------------------------------------------------------------------

DTYPES = {
    dtype["code"]: dtype
    for dtype in json.loads(Path(__file__).with_name("dtypes.json").read_text(encoding="utf-8"))
}
TENSOR_FLAGS = ("requires_grad", "parameter", "ndarray", "scalar")


def itemsize(tensor):
    return DTYPES[tensor.dtype]["itemsize"]


def extent(tensor, shape):
    """Bytes of the elements, were there one along each dimension that has none."""
    return itemsize(tensor) * prod(size for size in shape if size)


def row_major(shape):
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(shape[i], 1)
    return strides


def strides_of(archive, tensor, shape):
    if tensor.strides == NONE:
        return row_major(shape)
    return archive.dims_list(tensor.strides, tensor.rank)


def check_runs(archive):
    claimed = 0
    for i, node in enumerate(archive.nodes):
        if node.kind != TENSOR:
            continue
        fits = node.a == claimed and 1 <= node.count <= len(archive.tensors) - claimed
        require(fits, "F-051", "TensorRun", f"run of node {i}, {node.count} at {node.a}")
        claimed += node.count
        sliced = node.count == 1 or all(tensor.slice != NONE for tensor in archive.run(node))
        require(sliced, "F-051", "TensorRun", f"a tensor of the run of node {i} has no slice")
    all_claimed = claimed == len(archive.tensors)
    require(all_claimed, "F-051", "TensorRun", f"no leaf names tensor {claimed}")


def check_tensors(archive):
    slices = Claims("slices", len(archive.slices), "F-071", "MeshMismatch")
    for i, tensor in enumerate(archive.tensors):
        check_tensor(archive, i, tensor)
        if tensor.slice != NONE:
            slices.claim(tensor.slice, 1)
            same = archive.slices[tensor.slice].rank == tensor.rank
            require(same, "F-070", "OutsideGlobal", f"the slice of tensor {i} has another rank")
    slices.check_complete("F-071", "MeshMismatch")


def check_tensor(archive, i, tensor):
    require(tensor.dtype in DTYPES, "F-050", "UnknownDtype", f"dtype {tensor.dtype} of tensor {i}")
    require(tensor.rank <= MAX_RANK, "F-052", "RankTooLarge", f"rank {tensor.rank} of tensor {i}")
    shape = claim_dims(archive, tensor.shape, tensor.rank)
    if tensor.strides != NONE:
        claim_dims(archive, tensor.strides, tensor.rank)
    strides = strides_of(archive, tensor, shape)
    if 0 in shape:
        end = 0
    else:
        last = sum((size - 1) * stride for size, stride in zip(shape, strides))
        end = tensor.byte_offset + itemsize(tensor) * (1 + last)
    largest = max(*shape, *strides, extent(tensor, shape), end)
    require(largest < OVERFLOW, "F-053", "ShapeOverflow", f"tensor {i} is too large")
    known = tensor.flags >> len(TENSOR_FLAGS) == 0 and tensor.reserved == 0
    require(known, "F-056", "TensorFlags", f"flags {tensor.flags:#x} of tensor {i}")
    if 0 in shape:
        inside = tensor.storage == NONE and tensor.byte_offset == 0
    else:
        exists = tensor.storage < len(archive.storages)
        inside = exists and end <= archive.storages[tensor.storage].raw_len
    require(inside, "F-054", "TensorRange", f"tensor {i} is not inside its storage")
    aligned = tensor.byte_offset % itemsize(tensor) == 0
    require(aligned, "F-055", "Misaligned", f"byte_offset {tensor.byte_offset} of tensor {i}")
    if tensor.storage != NONE:
        of_leaf = archive.named[tensor.storage] == 2
        require(not of_leaf, "F-049", "TextPlace", f"tensor {i} is in the storage of a leaf")
        archive.named[tensor.storage] = 1


def check_storages(archive):
    for i, storage in enumerate(archive.storages):
        good = 6 <= storage.align_log2 <= 21
        require(good, "F-061", "Alignment", f"align_log2 {storage.align_log2} of storage {i}")
        raw = (
            storage.codec == 0
            and storage.chunk_log2 == 20
            and storage.shuffle == 0
            and storage.reserved == 0
            and storage.chunks == NONE
            and storage.stored_len == storage.raw_len
        )
        require(raw, "F-063", "UnknownCodec", f"storage {i} is not raw")
        require(storage.raw_len > 0, "F-060", "StorageLayout", f"storage {i} is empty")
    if archive.shards:
        check_storages_of_shards(archive)
    else:
        check_storages_of_file(archive)
    check_crcs(archive)
    for i, named in enumerate(archive.named):
        require(named, "F-062", "UnusedStorage", f"nothing names storage {i}")


def check_storages_of_file(archive):
    end = DATA_START
    for i, storage in enumerate(archive.storages):
        start = align_up(end, 1 << storage.align_log2)
        placed = storage.offset == start and storage.shard == 0
        require(placed, "F-060", "StorageLayout", f"storage {i} is not at {start}")
        end = start + storage.stored_len
    follows = archive.index_off == align_up(end, 64)
    require(follows, "F-060", "StorageLayout", "the index does not follow the last storage")


def check_storages_of_shards(archive):
    shard, end = 0, DATA_START
    for i, storage in enumerate(archive.storages):
        known = shard <= storage.shard < len(archive.shards)
        require(known, "F-060", "StorageLayout", f"shard {storage.shard} of storage {i}")
        if storage.shard != shard:
            shard, end = storage.shard, DATA_START
        start, end = max(end, storage.offset), storage.offset + storage.stored_len
        placed = (
            storage.offset == start
            and storage.offset % (1 << storage.align_log2) == 0
            and end <= archive.shards[shard].index_off
        )
        require(placed, "F-060", "StorageLayout", f"storage {i} is misplaced in shard {shard}")
    no_blob = archive.index_off == DATA_START
    require(no_blob, "F-060", "StorageLayout", "a manifest has no blob")


def check_crcs(archive):
    claimed = 0
    for i, storage in enumerate(archive.storages):
        in_turn = storage.crcs == claimed
        require(in_turn, "F-064", "CrcTable", f"the CRCs of storage {i} are not at {claimed}")
        claimed += -(-storage.stored_len >> storage.chunk_log2)
    complete = claimed == len(archive.crcs) and not archive.chunks
    require(complete, "F-064", "CrcTable", f"the storages have {claimed} chunks, all raw")


# ---- 7. Slices, placements, attributes, digests, shards ------------------------------------------

REPLICATE, SHARD, STRIDED_SHARD = range(3)
SHARD_NAME = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


def check_slices(archive):
    placements = Claims("placements", len(archive.placements), "F-073", "UnknownPlacement")
    for i, piece in enumerate(archive.slices):
        claim_dims(archive, piece.offsets, piece.rank)
        claim_dims(archive, piece.global_shape, piece.rank)
        require(piece.flags == 0, "F-071", "MeshMismatch", f"flags {piece.flags:#x} of slice {i}")
        if piece.mesh_rank:
            check_mesh(archive, i, piece)
        else:
            fields = piece.mesh, piece.coordinates, piece.ranks, piece.placements, piece.names
            absent = all(field == NONE for field in fields)
            require(absent, "F-071", "MeshMismatch", f"slice {i} has fields of a mesh, but no mesh")
        if piece.placements != NONE:
            placements.claim(piece.placements, piece.mesh_rank)
    placements.check_complete("F-073", "UnknownPlacement")


def check_mesh(archive, i, piece):
    good = piece.mesh != NONE and piece.mesh_rank <= MAX_RANK
    require(good, "F-071", "MeshMismatch", f"mesh of slice {i}, rank {piece.mesh_rank}")
    mesh = claim_dims(archive, piece.mesh, piece.mesh_rank)
    good = 0 < prod(mesh) < 1 << 32
    require(good, "F-071", "MeshMismatch", f"mesh {mesh} of slice {i}")
    if piece.coordinates != NONE:
        coordinates = claim_dims(archive, piece.coordinates, piece.mesh_rank)
        inside = all(at < size for at, size in zip(coordinates, mesh))
        require(inside, "F-071", "MeshMismatch", f"slice {i} at {coordinates} in mesh {mesh}")
    if piece.ranks != NONE:
        ranks = claim_dims(archive, piece.ranks, prod(mesh))
        require(max(ranks) < 1 << 32, "F-071", "MeshMismatch", f"rank {max(ranks)} in slice {i}")
    if piece.names != NONE:
        for name in claim_dims(archive, piece.names, piece.mesh_rank):
            claim_text(archive, name)


def check_placements(archive):
    for i, placement in enumerate(archive.placements):
        good = (
            placement.kind in (REPLICATE, SHARD, STRIDED_SHARD)
            and not any(placement.reserved)
            and (placement.dim == 0 or placement.kind != REPLICATE)
            and (placement.split_factor > 0) == (placement.kind == STRIDED_SHARD)
        )
        require(good, "F-073", "UnknownPlacement", f"placement {i}: {placement}")


def check_sliced_tensors(archive):
    for i, tensor in enumerate(archive.tensors):
        if tensor.slice == NONE:
            continue
        piece = archive.slices[tensor.slice]
        shape = archive.dims_list(tensor.shape, tensor.rank)
        offsets = archive.dims_list(piece.offsets, piece.rank)
        global_shape = archive.dims_list(piece.global_shape, piece.rank)
        inside = all(at + n <= size for at, n, size in zip(offsets, shape, global_shape))
        inside = inside and max(*global_shape, 0, extent(tensor, global_shape)) < OVERFLOW
        require(inside, "F-070", "OutsideGlobal", f"tensor {i} in its global tensor")
        for placement in placements_of(archive, piece):
            good = placement.kind == REPLICATE or placement.dim < tensor.rank
            require(good, "F-073", "UnknownPlacement", f"tensor {i} has no dim {placement.dim}")
    for i, node in enumerate(archive.nodes):
        if node.kind == TENSOR and node.count > 1:
            whole = global_tensor(archive, archive.tensors[node.a])
            same = all(global_tensor(archive, tensor) == whole for tensor in archive.run(node))
            require(same, "F-074", "MixedRun", f"the run of node {i} is of different tensors")


def placements_of(archive, piece):
    if piece.placements == NONE:
        return []
    return [archive.placements[piece.placements + i] for i in range(piece.mesh_rank)]


def global_tensor(archive, tensor):
    piece = archive.slices[tensor.slice]
    return tensor.dtype, archive.dims_list(piece.global_shape, piece.rank)


def check_attrs(archive):
    previous = None
    for i, attr in enumerate(archive.attrs):
        good = attr.kind in (INT, STR, BYTES) and not any(attr.reserved)
        require(good, "F-080", "AttrTable", f"attr {i} is of kind {attr.kind}")
        name = claim_text(archive, attr.name)
        if attr.kind == STR:
            claim_text(archive, attr.value)
        elif attr.kind == BYTES:
            claim_bytes(archive, attr.value)
        increasing = previous is None or previous < name
        require(increasing, "F-080", "AttrTable", f"the name of attr {i} is not increasing")
        previous = name
    good = len(archive.digests) in (0, len(archive.storages))
    require(good, "F-081", "DigestTable", f"{len(archive.digests)} digests")


def check_shards(archive):
    names = {b"manifest.tssd"}
    for i, shard in enumerate(archive.shards):
        name = claim_text(archive, shard.name)
        good = SHARD_NAME.fullmatch(name) and name not in names
        require(good, "F-082", "ShardTable", f"the name of shard {i}")
        names.add(name)
        good = DATA_START <= shard.index_off < shard.file_len
        require(good, "F-082", "ShardTable", f"the index of shard {i} is at {shard.index_off}")
    for i, node in enumerate(archive.nodes):
        if node.kind == DIVERGENT:
            good = archive.shards and not inside_divergent(archive, i)
            require(good, "F-082", "ShardTable", f"divergent node {i}")


def inside_divergent(archive, i):
    while i:
        i = archive.parent[i]
        if archive.nodes[i].kind == DIVERGENT:
            return True
    return False


def open_archive(data):
    """Proves all of the file but its payload."""
    check_head(data)
    archive = Archive(data, check_trailer(data))
    check_tree(archive)
    check_nodes(archive)
    check_runs(archive)
    check_tensors(archive)
    check_storages(archive)
    check_slices(archive)
    check_placements(archive)
    check_sliced_tensors(archive)
    check_attrs(archive)
    check_shards(archive)
    # Only now has all been walked that refers to them.
    archive.heap_claims.check_complete("F-031", "HeapUnclaimed")
    archive.dims_claims.check_complete("F-031", "HeapUnclaimed")
    return archive


# ---- 8. Payload ----------------------------------------------------------------------------------


def verify(archive):
    """Proves the payload that is in this file; that of a manifest is in its shards."""
    storages = [] if archive.shards else archive.storages
    end = DATA_START
    for i, storage in enumerate(storages):
        check_padding(archive, end, storage.offset)
        end = storage.offset + storage.stored_len
        check_stored(archive, i, storage)
    check_padding(archive, end, archive.index_off)


def check_stored(archive, i, storage):
    stored = memoryview(archive.data)[storage.offset : storage.offset + storage.stored_len]
    size = 1 << storage.chunk_log2
    whole = 0
    for number, start in enumerate(range(0, len(stored), size)):
        chunk = stored[start : start + size]
        same = zlib.crc32(chunk) == archive.crcs[storage.crcs + number]
        require(same, "F-090", "ChunkCorrupt", f"chunk {number} of storage {i}")
        # The running CRC is the combination of the chunks' CRCs, all of which are right.
        whole = zlib.crc32(chunk, whole)
    require(whole == storage.crc32, "F-091", "StorageCorrupt", f"CRC of storage {i}")


def check_padding(archive, start, end):
    message = f"the padding at {start} is not zero"
    require(is_zero(archive.data, start, end), "F-092", "PaddingNotZero", message)


# ---- 9. The JSON view ----------------------------------------------------------------------------

MAX_VIEW_DATA = 65536


def view(archive):
    storage_fields = "offset stored_len raw_len align_log2 crc32"
    whole = {"tssd": 1, "attrs": [view_attr(archive, attr) for attr in archive.attrs]}
    if archive.shards:
        storage_fields += " shard"
    whole["storages"] = [pick(storage, storage_fields) for storage in archive.storages]
    if archive.shards:
        whole["shards"] = [view_shard(archive, shard) for shard in archive.shards]
    return {**whole, "root": view_node(archive, archive.nodes[0])}


def view_attr(archive, attr):
    key_kind = {INT: K_INT, STR: K_STR, BYTES: K_BYTES}[attr.kind]
    value = view_key(key_kind, key_content(archive, key_kind, attr.value))
    return [view_text(archive.heap_bytes(attr.name)), value]


def view_shard(archive, shard):
    name = archive.heap_bytes(shard.name).decode()
    return {"name": name, **pick(shard, "file_len index_off index_crc32 writer")}


def pick(record, fields):
    return {field: getattr(record, field) for field in fields.split()}


def view_str(text):
    try:
        return {"str": text.decode()}
    except UnicodeDecodeError:  # It was found to be generalized UTF-8: it holds surrogates.
        return {"str_hex": text.hex()}


def view_text(text):
    """A string that is no VALUE: bare, unless it holds surrogates."""
    value = view_str(text)
    return value.get("str", value)


def view_float(word):
    return f"{word:016x}"


def key_content(archive, key_kind, key):
    content = archive.heap_bytes(key) if key_kind in IN_HEAP else key
    return unpack_tuple(content) if key_kind == K_TUPLE else content


def view_key(key_kind, content):
    if key_kind == K_STR:
        return view_str(content)
    if key_kind == K_INT:
        return {"int": str(signed(content))}
    if key_kind == K_BIGINT:
        return {"int": str(int.from_bytes(content, "little", signed=True))}
    if key_kind == K_BOOL:
        return {"bool": content == 1}
    if key_kind == K_FLOAT:
        return {"float": view_float(content)}
    if key_kind == K_NONE:
        return {"none": None}
    if key_kind == K_BYTES:
        return {"bytes": content.hex()}
    return {"tuple": [view_key(*element) for element in content]}


# Leaves that look like the key of the same kind.
KEY_LIKE = {NONE_LEAF: K_NONE, BOOL: K_BOOL, INT: K_INT, BIGINT: K_BIGINT, FLOAT: K_FLOAT}


def view_node(archive, node):
    """A VALUE. Recursion is as deep as the containers, of which F-042 allows 64."""
    if node.kind in (LIST, TUPLE):
        return {"list": [view_node(archive, archive.nodes[i]) for i in archive.children(node)]}
    if node.kind in KEYS_OF:
        return view_keyed(archive, node)
    if node.kind in KEY_LIKE:
        key_kind = KEY_LIKE[node.kind]
        return view_key(key_kind, key_content(archive, key_kind, node.a))
    if node.kind == COMPLEX:
        return {"complex": [view_float(node.a), view_float(node.b)]}
    if node.kind == DTYPE:
        return {"dtype": DTYPES[node.a]["name"]}
    if node.kind == SIZE:
        entries = archive.dims_list(node.a, node.count)
        return {"size": [str(signed(entry)) for entry in entries]}
    if node.kind == DEVICE:
        return {"device": view_text(archive.heap_bytes(node.a))}
    if node.kind == TENSOR:
        return view_run(archive, archive.run(node))
    return view_content(archive, node)


def view_keyed(archive, node):
    children = [archive.nodes[i] for i in archive.children(node)]
    if node.kind == NAMEDTUPLE:
        fields = [
            [view_text(archive.heap_bytes(child.key)), view_node(archive, child)]
            for child in children
        ]
        name = view_text(archive.heap_bytes(node.b))
        return {"namedtuple": {"name": name, "fields": fields}}
    items = []
    for child in children:
        key = view_key(child.key_kind, key_content(archive, child.key_kind, child.key))
        items.append([key, view_node(archive, child)])
    return {"dict": items}


def view_content(archive, node):
    """A str, bytes or opaque leaf; its content is null if it lies in another file."""
    content = read_content(archive, node)
    if node.kind == STR:
        return {"str": None} if content is None else view_str(content)
    content = None if content is None else content.hex()
    if node.kind == BYTES:
        return {"bytes": content}
    return {"opaque": {"media": view_text(archive.heap_bytes(node.b)), "bytes": content}}


def read_content(archive, node):
    if node.flags & 1 == 0:
        return archive.heap_bytes(node.a)
    if archive.shards:
        return None
    storage = archive.storages[node.a]
    content = archive.data[storage.offset : storage.offset + storage.stored_len]
    if node.kind == STR:
        check_text(content)
    return content


def view_run(archive, run):
    views = [view_tensor(archive, tensor) for tensor in run]
    return {"tensor": views[0]} if run[0].slice == NONE else {"shard": views}


def view_tensor(archive, tensor):
    shape = archive.dims_list(tensor.shape, tensor.rank)
    seen = {"dtype": DTYPES[tensor.dtype]["name"], "shape": shape}
    if tensor.strides != NONE:
        seen["strides"] = archive.dims_list(tensor.strides, tensor.rank)
    if tensor.flags:
        flags = enumerate(TENSOR_FLAGS)
        seen["flags"] = [name for bit, name in flags if tensor.flags >> bit & 1]
    seen["storage"] = None if tensor.storage == NONE else tensor.storage
    seen["byte_offset"] = tensor.byte_offset
    # With strides of 0 there may be far more elements than bytes: the shape decides.
    elsewhere = archive.shards and tensor.storage != NONE
    if not elsewhere and prod(shape) * itemsize(tensor) <= MAX_VIEW_DATA:
        seen["data"] = elements(archive, tensor, shape).hex()
    if tensor.slice != NONE:
        seen["slice"] = view_slice(archive, archive.slices[tensor.slice])
    return seen


def elements(archive, tensor, shape):
    """The elements of a small tensor, laid out row-major."""
    if 0 in shape:
        return b""
    size = itemsize(tensor)
    offsets = [archive.storages[tensor.storage].offset + tensor.byte_offset]
    for count, stride in zip(shape, strides_of(archive, tensor, shape)):
        steps = [i * stride * size for i in range(count)]
        offsets = [offset + step for offset in offsets for step in steps]
    return b"".join(archive.data[offset : offset + size] for offset in offsets)


def view_slice(archive, piece):
    seen = {
        "offsets": archive.dims_list(piece.offsets, piece.rank),
        "global_shape": archive.dims_list(piece.global_shape, piece.rank),
    }
    if piece.mesh_rank:
        mesh = seen["mesh_shape"] = archive.dims_list(piece.mesh, piece.mesh_rank)
        if piece.coordinates != NONE:
            seen["coordinates"] = archive.dims_list(piece.coordinates, piece.mesh_rank)
        if piece.ranks != NONE:
            seen["ranks"] = archive.dims_list(piece.ranks, prod(mesh))
        if piece.placements != NONE:
            seen["placements"] = [view_placement(p) for p in placements_of(archive, piece)]
        if piece.names != NONE:
            names = archive.dims_list(piece.names, piece.mesh_rank)
            seen["dim_names"] = [view_text(archive.heap_bytes(name)) for name in names]
    return seen


def view_placement(placement):
    if placement.kind == REPLICATE:
        return "Replicate()"
    if placement.kind == SHARD:
        return f"Shard({placement.dim})"
    return f"_StridedShard({placement.dim}, {placement.split_factor})"


# ---- Command line --------------------------------------------------------------------------------


def decode(data, verified):
    archive = open_archive(data)
    if verified:
        verify(archive)
    return view(archive)


def check_vectors(folder):
    """Failures among the vectors in `folder`, and how many there are."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    failures = []
    for vector in manifest["valid"]:
        path = folder / "valid" / f"{vector['name']}.tssd"
        expected = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        try:
            if decode(path.read_bytes(), True) != expected:
                failures.append(f"{path}: the JSON view differs")
        except Refused as refusal:
            failures.append(f"{path}: refused {refusal}")
    for vector in manifest["invalid"]:
        path = folder / "invalid" / f"{vector['name']}.tssd"
        expected = f"{vector['rule']} {vector['kind']}"
        try:
            decode(path.read_bytes(), True)
            failures.append(f"{path}: accepted, not refused by {expected}")
        except Refused as refusal:
            if (refusal.rule, refusal.kind) != (vector["rule"], vector["kind"]):
                failures.append(f"{path}: refused {refusal}, not by {expected}")
    names = {(part, vector["name"]) for part in ("valid", "invalid") for vector in manifest[part]}
    for path in sorted(folder.glob("*/*.tssd")):
        if (path.parent.name, path.stem) not in names:
            failures.append(f"{path}: not in manifest.json")
    return failures, len(manifest["valid"]) + len(manifest["invalid"])


def main(arguments):
    sys.stdout.reconfigure(encoding="utf-8")
    # Python refuses to print integers of more than 4300 digits unless told otherwise.
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    option = arguments[0] if len(arguments) == 2 else None
    if len(arguments) not in (1, 2) or option not in (None, "--verify", "--vectors"):
        sys.exit(__doc__)
    path = Path(arguments[-1])
    if option == "--vectors":
        failures, count = check_vectors(path)
        for failure in failures:
            print(failure)
        print(f"{count - len(failures)} passed, {len(failures)} failed")
        return 1 if failures or count == 0 else 0
    try:
        print(json.dumps(decode(path.read_bytes(), bool(option)), indent=1, ensure_ascii=False))
    except Refused as refusal:
        print(f"refused {refusal}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
