#!/usr/bin/env python3
"""A reader of TSSD archives, written from format.md with nothing but the standard library.

    reader.py FILE             proves the index and prints the JSON view of the archive
    reader.py --verify FILE    proves the payload as well
    reader.py --vectors DIR    decodes every valid vector in DIR, and refuses every invalid one

It follows the sections of format.md, and each check names its rule: it is meant to be read beside
the document. It is slow and holds the whole file in memory, but the work of its checks is linear
in the size of the file, whatever the file says: what many records share is looked at once.
"""

import json
import re
import struct
import sys
import zlib
from collections import namedtuple
from functools import lru_cache
from io import BytesIO
from math import prod
from operator import itemgetter
from pathlib import Path


class Refused(Exception):
    """The file breaks a rule of the format: its number, and where."""


def require(rule, holds, where):
    if not holds:
        raise Refused(rule, where)


def align_up(x, alignment):
    return -(-x // alignment) * alignment


def layout(fields):
    """Records of a fixed size, given as `code:name` of each field, in the codes of `struct`: their
    struct, and what becomes of the fields. A record of one field is that field."""
    codes, names = zip(*(field.split(":") for field in fields.split()))
    make = namedtuple("Record", names)._make if len(names) > 1 else itemgetter(0)
    return struct.Struct("<" + "".join(codes)), make


def read_records(record, data):
    fields, make = record
    return [make(each) for each in fields.iter_unpack(data)]


# ---- 2. Head and trailer -------------------------------------------------------------------------

DATA_START = 4096
DRAFT_BIT = 1 << 63
HEAD = layout(
    "8s:magic H:major H:minor I:data_start Q:incompat Q:ro_compat Q:compat Q:index_off Q:index_len"
    " I:flags I:crc32"
)
TRAILER = layout(
    "Q:index_off Q:index_len I:root_off I:root_len I:index_crc32 H:index_codec H:flags"
    " Q:prev_trailer_off Q:file_len I:generation I:crc32 8s:end_magic"
)


def check_head_and_trailer(data):
    require("F-001", len(data) >= 4264, f"{len(data)} bytes")
    (head,) = read_records(HEAD, data[:64])
    require("F-002", head.magic == b"\x89TSD\r\n\x1a\n", "head")
    require("F-003", head.crc32 == zlib.crc32(data[:60]), "head")
    require("F-004", head.major == 1, f"version {head.major}")
    require("F-005", head.incompat in (0, DRAFT_BIT), f"incompat {head.incompat:#x}")
    require("F-010", head.data_start == DATA_START, f"data_start {head.data_start}")
    require("F-006", (head.index_off, head.index_len, head.flags) == (0, 0, 0), "head")
    require("F-006", not any(data[64:DATA_START]), "space after the head")
    start = len(data) - 64
    (t,) = read_records(TRAILER, data[start:])
    require("F-007", t.end_magic == b"\n\x1a\n\rDST\x89", "trailer")
    # The CRC sits between the fields and the end magic, and covers both.
    crc = zlib.crc32(t.end_magic, zlib.crc32(data[start : start + 52]))
    require("F-008", t.crc32 == crc, "trailer")
    require("F-009", t.file_len == len(data), f"{len(data)} bytes, not {t.file_len}")
    require("F-006", (t.flags, t.prev_trailer_off, t.generation) == (0, 0, 0), "trailer")
    require("F-014", t.index_codec == 1, f"index codec {t.index_codec}")
    require("F-012", t.index_len <= 1 << 30, f"index of {t.index_len} bytes")
    aligned = t.index_off % 64 == 0 and t.index_off >= DATA_START
    fits = t.index_off + t.index_len + 64 == t.file_len
    require("F-011", aligned and fits, f"index at {t.index_off}")
    require("F-013", t.index_crc32 == zlib.crc32(data[t.index_off : start]), "index")
    return t


# ---- 3. The index: tables and root ---------------------------------------------------------------

# Name, alignment and records of each table, in the order of the root.
TABLES = """\
heap       1 B:byte
dims       8 Q:number
nodes      8 B:kind B:key_kind H:flags I:count Q:key Q:a Q:b
by_key     4 I:node
tensors    8 I:storage H:dtype B:rank B:flags I:shape I:strides I:slice I:reserved Q:byte_offset
storages   8 Q:offset Q:stored_len Q:raw_len I:shard I:chunks I:crcs I:crc32 B:codec B:align_log2 \
             B:chunk_log2 B:shuffle I:reserved
chunks     8 Q:offset I:stored_len I:codec
crcs       4 I:crc32
slices     4 I:offsets I:global_shape I:mesh I:coordinates I:ranks I:placements I:names B:rank \
             B:mesh_rank H:flags
placements 8 B:kind 3s:reserved I:dim Q:split_factor
attrs      8 Q:name Q:value B:kind 7s:reserved
digests    1 32s:digest
shards     8 Q:name Q:file_len Q:index_off I:index_crc32 I:writer 32s:digest
""".splitlines()
ROOT_LEN = 8 * len(TABLES)
NONE = 0xFFFF_FFFF


def read_tables(data, t):
    placed = t.root_off % 4 == 0 and t.root_off + t.root_len == t.index_len
    require("F-020", placed and t.root_len >= ROOT_LEN, f"root at {t.root_off}")
    index = data[t.index_off : t.index_off + t.index_len]
    end = 0
    for number, line in enumerate(TABLES):
        name, alignment, fields = line.split(maxsplit=2)
        record = layout(fields)
        field = t.root_off + 8 * number
        rel, count = struct.unpack_from("<iI", index, field)
        start = align_up(end, int(alignment))
        require("F-021", field + rel == start and not any(index[end:start]), name)
        end = start + count * record[0].size
        require("F-021", end <= t.root_off, name)
        yield name, read_records(record, index[start:end])
    # A longer root is from a later version, which may have tables of its own before it.
    if t.root_len == ROOT_LEN:
        placed = t.root_off == align_up(end, 4) and not any(index[end : t.root_off])
        require("F-021", placed, "root")


class Claims:
    """Claimed in order: ranges cover a table from its start to its end, and may be shared."""

    def __init__(self, name, table, rule):
        self.name, self.size, self.rule = name, len(table), rule
        self.end = 0

    def claim(self, start, count):
        if count == 0:
            fits = start == 0
        else:
            end = start + count
            fits = end <= self.end or (start == self.end and end <= self.size)
            self.end = max(self.end, end)
        require(self.rule, fits, f"{self.name}, range {start}+{count}")

    def check_complete(self, rule):
        require(rule, self.end == self.size, f"{self.name}, from {self.end} on")


# ---- 4. Heap and dims ----------------------------------------------------------------------------


class Archive:
    """A file with the tables of its index, and what the checks learn about them on the way."""

    def __init__(self, data, trailer):
        self.data = data
        self.index_off = trailer.index_off
        for name, records in read_tables(data, trailer):
            setattr(self, name, records)
        self.heap = bytes(self.heap)
        self.heap_end = 0
        self.strings = {0: b""}  # the contents of the heap ranges claimed so far
        self.texts = set()  # those that were found to be text, with the surrogates allowed
        self.dims_claims = Claims("dims", self.dims, "F-033")
        self.parent = [0] * len(self.nodes)
        self.named = [None] * len(self.storages)  # which table names each storage

    def claim_bytes(self, heap_range):
        start, length = heap_range & NONE, heap_range >> 32
        require("F-030", length <= MAX_INLINE or start == self.heap_end, "a long range named twice")
        if heap_range not in self.strings:
            # The ranges so far cover all that is claimed: one that began there would overlap them.
            fits = length and start == self.heap_end and start + length <= len(self.heap)
            require("F-030", fits, f"range {start}+{length}")
            self.strings[heap_range] = self.heap[start : start + length]
            self.heap_end += length
        return self.strings[heap_range]

    def claim_text(self, heap_range, rule="F-032", surrogates="surrogatepass"):
        """Claims text or, with `surrogates="strict"`, UTF-8 without them."""
        text = self.claim_bytes(heap_range)
        if (heap_range, surrogates) not in self.texts:
            require(rule, is_text(text, surrogates), f"heap range {heap_range:#x}")
            self.texts.add((heap_range, surrogates))
        return text

    def claim_dims(self, first, count):
        self.dims_claims.claim(first, count)
        return self.vector(first, count)

    def vector(self, first, count):
        return self.dims[first : first + count]

    def children(self, node):
        return range(node.a, node.a + node.count)

    def run(self, node):
        return self.tensors[node.a : node.a + node.count]

    def slice_of(self, tensor):
        return self.slices[tensor.slice]

    def placements_of(self, piece):
        first = len(self.placements) if piece.placements == NONE else piece.placements
        return self.placements[first : first + piece.mesh_rank]

    def stored(self, storage):
        return self.data[storage.offset : storage.offset + storage.stored_len]


def is_text(content, surrogates="surrogatepass"):
    try:
        content.decode("utf-8", surrogates)
    except UnicodeDecodeError:
        return False
    return True


# ---- 5. Nodes ------------------------------------------------------------------------------------

NONE_LEAF, BOOL, INT, BIGINT, FLOAT, COMPLEX, STR, BYTES, DTYPE, SIZE = range(10)
DEVICE, TENSOR, OPAQUE = range(10, 13)
DICT, ORDERED_DICT, LIST, TUPLE, NAMEDTUPLE, DIVERGENT = range(32, 38)
STORABLE = (STR, BYTES, OPAQUE)  # leaves whose content may be in a storage

# The fields of each kind that the document does not give as 0.
USED = dict.fromkeys((BOOL, INT, BIGINT, FLOAT, STR, BYTES, DTYPE, DEVICE), ("a",))
USED |= dict.fromkeys((SIZE, TENSOR, DICT, ORDERED_DICT, LIST, TUPLE, DIVERGENT), ("count", "a"))
USED |= {NONE_LEAF: (), COMPLEX: ("a", "b"), OPAQUE: ("a", "b"), NAMEDTUPLE: ("count", "a", "b")}

K_INDEX, K_STR, K_INT, K_BIGINT, K_BOOL, K_FLOAT, K_NONE, K_BYTES, K_TUPLE = range(9)
K_IN_HEAP = (K_STR, K_BIGINT, K_BYTES, K_TUPLE)
ANY_KEY = range(K_STR, K_TUPLE + 1)
KEYS_OF = {DICT: ANY_KEY, ORDERED_DICT: ANY_KEY, NAMEDTUPLE: (K_STR,), DIVERGENT: (K_INT,)}
KEYS_OF |= {LIST: (K_INDEX,), TUPLE: (K_INDEX,)}

MAX_LEVELS = 64
MAX_PACKED_DEPTH = 8
MAX_PACKED_ELEMENTS = 64
MAX_INLINE = 4096  # bytes of content in the heap, and of a key


def check_tree(file):
    """The shape of the tree: every node but the root gets one parent, which comes before it."""
    nodes = file.nodes
    for i, node in enumerate(nodes):
        require("F-040", node.kind in USED, f"node {i}, kind {node.kind}")
    require("F-048", nodes and nodes[0].kind in (DICT, ORDERED_DICT), "root")
    require("F-048", nodes[0].key_kind == K_INDEX and nodes[0].key == 0, "root")
    claimed = 1
    level = [0] * len(nodes)
    divergent = [False] * len(nodes)  # is divergent, or inside such a node
    for i, node in enumerate(nodes):
        # A node that no container before it has claimed could only be its own ancestor.
        require("F-041", i < claimed, f"node {i}")
        if node.kind not in KEYS_OF:
            continue
        fits = node.a == claimed and node.count <= len(nodes) - claimed
        require("F-041", fits, f"children of node {i}")
        claimed += node.count
        for child in file.children(node):
            file.parent[child] = i
        parent = file.parent[i]
        level[i] = level[parent] + 1
        require("F-042", level[i] <= MAX_LEVELS, f"node {i}")
        divergent[i] = divergent[parent]
        if node.kind == DIVERGENT:
            require("F-082", file.shards and not divergent[parent], f"divergent node {i}")
            divergent[i] = True
    require("F-041", claimed == len(nodes), f"node {claimed}")
    require("F-041", len(file.by_key) == len(nodes) and file.by_key[0] == 0, "by_key")


def check_nodes(file):
    """Key, `a` and `b` of each node in turn: the order in which heap and dims are claimed."""
    for i, node in enumerate(file.nodes):
        container = file.nodes[file.parent[i]].kind
        allowed = KEYS_OF[container] if i else (K_INDEX,)
        require("F-043", node.key_kind in allowed, f"key kind {node.key_kind} of node {i}")
        content = node.key
        if node.key_kind in K_IN_HEAP:
            content = file.claim_bytes(node.key)
            require("F-043", len(content) <= MAX_INLINE, f"length of the key of node {i}")
        check_key(node.key_kind, content, f"key of node {i}")
        require("F-043", container != DIVERGENT or node.key < 1 << 32, f"writer of node {i}")
        check_value(file, i, node)
    for i, node in enumerate(file.nodes):
        if node.kind in (LIST, TUPLE):
            in_order = all(file.by_key[child] == child for child in file.children(node))
            require("F-041", in_order, f"by_key of node {i}")
        elif node.kind in KEYS_OF:
            check_keys(file, i, node)


def check_key(key_kind, content, where):
    """Checks a key, or an element of a packed tuple. `content` is bytes or a u64."""
    if key_kind == K_STR:
        require("F-032", is_text(content), where)
    elif key_kind == K_BIGINT:
        require("F-046", is_canonical(content), where)
    elif key_kind == K_BOOL:
        require("F-043", content <= 1, where)
    elif key_kind == K_FLOAT:
        require("F-043", as_float(content) == as_float(content), where)  # not so a NaN
    elif key_kind in (K_INDEX, K_NONE):
        require("F-043", content == 0, where)
    elif key_kind == K_TUPLE:
        unpack_tuple(content)


def unpack_tuple(packed):
    """The (key kind, content) pairs of a packed tuple."""
    stream = BytesIO(packed)
    try:
        elements = unpack_elements(stream, 1)
    except Refused as refusal:
        # Whatever rule an element breaks, the tuple breaks this one.
        raise Refused("F-043", refusal.args[1]) from None
    require("F-043", stream.tell() == len(packed), "bytes behind a packed tuple")
    require("F-043", count_elements(elements) <= MAX_PACKED_ELEMENTS, "elements of a packed tuple")
    return elements


def count_elements(elements):
    inner = (content for kind, content in elements if kind == K_TUPLE)
    return len(elements) + sum(map(count_elements, inner))


def unpack_elements(stream, depth):
    def take(size):
        content = stream.read(size)
        require("F-043", len(content) == size, "packed tuple cut short")
        return content

    def number(size):
        return int.from_bytes(take(size), "little")

    require("F-043", depth <= MAX_PACKED_DEPTH, "nested packed tuple")
    elements = []
    for _ in range(number(4)):
        kind = number(1)
        require("F-043", kind in ANY_KEY, f"packed element of kind {kind}")
        if kind == K_TUPLE:
            content = unpack_elements(stream, depth + 1)
        else:
            word = number({K_BOOL: 1, K_NONE: 0, K_INT: 8, K_FLOAT: 8}.get(kind, 4))
            content = take(word) if kind in K_IN_HEAP else word
            check_key(kind, content, f"packed element of kind {kind}")
        elements.append((kind, content))
    return elements


def signed(word):
    return word - (1 << 64) if word >> 63 else word


def as_float(word):
    return struct.unpack("<d", struct.pack("<Q", word))[0]


def is_canonical(bigint):
    """Nine bytes, of which the last is not a mere sign: just the integers that are not an i64."""
    sign = b"\xff" if bigint[-2:-1] >= b"\x80" else b"\x00"
    return len(bigint) > 8 and bigint[-1:] != sign


def check_keys(file, i, node):
    """That the keys of a container are in order, and differ in Python."""
    children = file.children(node)
    previous = None
    for child in (file.by_key[entry] for entry in children):
        require("F-044", child in children, f"by_key of node {i}")
        key_kind, key = file.nodes[child].key_kind, file.nodes[child].key
        current = key_kind, file.strings[key] if key_kind in K_IN_HEAP else key
        require("F-044", previous is None or previous < current, f"by_key of node {i}")
        previous = current
    numbers = [as_i64(file.nodes[child]) for child in children]
    numbers = [number for number in numbers if number is not None]
    require("F-045", len(set(numbers)) == len(numbers), f"keys of node {i}")


def as_i64(node):
    """The i64 that the key equals in Python, if there is one."""
    if node.key_kind in (K_INT, K_BOOL):
        return signed(node.key)
    number = as_float(node.key) if node.key_kind == K_FLOAT else 0.5
    return int(number) if number.is_integer() and -(2.0**63) <= number < 2.0**63 else None


def check_value(file, i, node):
    where = f"node {i}"
    unused = (f for f in ("count", "a", "b") if f not in USED[node.kind])
    require("F-047", not any(getattr(node, f) for f in unused), where)
    require("F-047", node.flags & ~(node.kind in STORABLE) == 0, where)
    if node.kind == BOOL:
        require("F-047", node.a <= 1, where)
    elif node.kind == DTYPE:
        require("F-047", node.a in DTYPES, where)
    elif node.kind == BIGINT:
        require("F-046", is_canonical(file.claim_bytes(node.a)), where)
    elif node.kind == SIZE:
        require("F-047", node.count <= MAX_RANK, where)
        file.dims_claims.claim(node.a, node.count)
    elif node.kind == DEVICE:
        file.claim_text(node.a)
    elif node.flags & 1:
        require("F-049", node.a < len(file.storages), where)
        require("F-049", file.storages[node.a].raw_len > MAX_INLINE, where)
        require("F-049", file.named[node.a] is None, where)
        file.named[node.a] = "nodes"
    elif node.kind in STORABLE:
        content = file.claim_text(node.a) if node.kind == STR else file.claim_bytes(node.a)
        require("F-049", len(content) <= MAX_INLINE, where)
    if node.kind in (OPAQUE, NAMEDTUPLE):
        file.claim_text(node.b)


# ---- 6. Tensors and storages ---------------------------------------------------------------------

DTYPES = {
    dtype["code"]: dtype
    for dtype in json.loads(Path(__file__).with_name("dtypes.json").read_text(encoding="utf-8"))
}
TENSOR_FLAGS = ("requires_grad", "parameter", "ndarray", "scalar")
MAX_RANK = 64
OVERFLOW = 1 << 63
CHUNK_LOG2 = 20
CHUNK = 1 << CHUNK_LOG2


def extent(tensor, shape):
    """The product of itemsize and all sizes that are not 0."""
    return DTYPES[tensor.dtype]["itemsize"] * prod(size for size in shape if size)


def strides_of(file, tensor, shape):
    if tensor.strides != NONE:
        return file.vector(tensor.strides, tensor.rank)
    return row_major(shape)


def row_major(shape):
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(shape[i], 1)
    return strides


def check_runs(file):
    claimed = 0
    for i, node in enumerate(file.nodes):
        if node.kind == TENSOR:
            fits = node.a == claimed and 1 <= node.count <= len(file.tensors) - claimed
            require("F-051", fits, f"run of node {i}")
            claimed += node.count
            sliced = all(tensor.slice != NONE for tensor in file.run(node))
            require("F-051", sliced or node.count == 1, f"run of node {i}")
    require("F-051", claimed == len(file.tensors), f"tensor {claimed}")


def check_tensors(file):
    slices = Claims("slices", file.slices, "F-071")
    for i, tensor in enumerate(file.tensors):
        check_tensor(file, f"tensor {i}", tensor)
        if tensor.slice != NONE:
            slices.claim(tensor.slice, 1)
            require("F-070", file.slice_of(tensor).rank == tensor.rank, f"tensor {i}")
    slices.check_complete("F-071")


def check_tensor(file, where, tensor):
    require("F-050", tensor.dtype in DTYPES, where)
    require("F-052", tensor.rank <= MAX_RANK, where)
    shape = file.claim_dims(tensor.shape, tensor.rank)
    if tensor.strides != NONE:
        file.dims_claims.claim(tensor.strides, tensor.rank)
    strides = strides_of(file, tensor, shape)
    itemsize = DTYPES[tensor.dtype]["itemsize"]
    last = sum((size - 1) * stride for size, stride in zip(shape, strides))
    end = 0 if 0 in shape else tensor.byte_offset + itemsize * (1 + last)
    require("F-053", max(*shape, *strides, extent(tensor, shape), end) < OVERFLOW, where)
    require("F-056", tensor.flags >> len(TENSOR_FLAGS) == 0 and tensor.reserved == 0, where)
    if 0 in shape:
        require("F-054", tensor.storage == NONE and tensor.byte_offset == 0, where)
    else:
        require("F-054", tensor.storage < len(file.storages), where)
        require("F-054", end <= file.storages[tensor.storage].raw_len, where)
        require("F-055", tensor.byte_offset % itemsize == 0, where)
        require("F-049", file.named[tensor.storage] != "nodes", where)
        file.named[tensor.storage] = "tensors"


def check_storages(file):
    shard, end, crcs = 0, DATA_START, 0
    for i, storage in enumerate(file.storages):
        where = f"storage {i}"
        require("F-061", 6 <= storage.align_log2 <= 21, where)
        fields = storage.codec, storage.chunk_log2, storage.shuffle, storage.reserved
        require("F-063", fields == (0, CHUNK_LOG2, 0, 0) and storage.chunks == NONE, where)
        require("F-063", storage.stored_len == storage.raw_len, where)
        require("F-060", storage.raw_len > 0, where)
        require("F-062", file.named[i], where)
        require("F-060", shard <= storage.shard < max(len(file.shards), 1), where)
        if storage.shard != shard:
            shard, end = storage.shard, DATA_START
        # Storages of this file follow each other; in a shard there may be others between them.
        start = max(end, storage.offset) if file.shards else end
        require("F-060", storage.offset == align_up(start, 1 << storage.align_log2), where)
        end = storage.offset + storage.stored_len
        limit = file.shards[shard].index_off if file.shards else file.index_off
        require("F-060", end <= limit, where)
        require("F-064", storage.crcs == crcs, where)
        crcs += align_up(storage.stored_len, CHUNK) >> CHUNK_LOG2
    require("F-060", file.index_off == (DATA_START if file.shards else align_up(end, 64)), "index")
    require("F-064", crcs == len(file.crcs) and not file.chunks, f"crcs, from {crcs} on")


# ---- 7. Slices, placements, attributes, digests, shards ------------------------------------------

REPLICATE, SHARD, STRIDED_SHARD = range(3)
MAX_NAME = 256  # bytes of the name of a mesh dimension
SHARD_NAME = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


def check_slices(file):
    placements = Claims("placements", file.placements, "F-073")
    meshes = {}  # the ranks of each mesh, by its start in dims
    for i, piece in enumerate(file.slices):
        where = f"slice {i}"
        file.claim_dims(piece.offsets, piece.rank)
        file.claim_dims(piece.global_shape, piece.rank)
        require("F-071", piece.flags == 0, where)
        if piece.mesh_rank:
            check_mesh(file, where, piece, meshes)
        else:
            fields = piece.mesh, piece.coordinates, piece.ranks, piece.placements, piece.names
            require("F-071", all(field == NONE for field in fields), where)
        if piece.placements != NONE:
            placements.claim(piece.placements, piece.mesh_rank)
        for placement in file.placements_of(piece):
            good = placement.kind == REPLICATE or placement.dim < piece.rank
            require("F-073", good, where)
    placements.check_complete("F-073")
    check_ranks(file, meshes)
    for i, placement in enumerate(file.placements):
        where = f"placement {i}"
        require("F-073", placement.kind <= STRIDED_SHARD and not any(placement.reserved), where)
        require("F-073", placement.dim == 0 or placement.kind != REPLICATE, where)
        strided = placement.kind == STRIDED_SHARD
        require("F-073", (placement.split_factor > 0) == strided, where)


def check_mesh(file, where, piece, meshes):
    require("F-071", piece.mesh != NONE and piece.mesh_rank <= MAX_RANK, where)
    # The shape says how many ranks follow it in the range, so it is read before that is claimed.
    start, end = piece.mesh, piece.mesh + piece.mesh_rank
    require("F-033", end <= len(file.dims), where)
    mesh = file.dims[start:end]
    devices = prod(mesh)
    require("F-071", 0 < devices < 1 << 32, where)
    if piece.ranks == NONE:
        file.dims_claims.claim(start, piece.mesh_rank)
        require("F-071", piece.names == NONE, where)
    else:
        require("F-071", piece.ranks == end, where)
        file.dims_claims.claim(start, piece.mesh_rank + devices)
        ranks = range(end, end + devices)
        require("F-071", meshes.setdefault(start, ranks) == ranks, where)
    if piece.coordinates != NONE:
        coordinates = file.claim_dims(piece.coordinates, piece.mesh_rank)
        require("F-071", all(at < size for at, size in zip(coordinates, mesh)), where)
    if piece.names != NONE:
        ranges = file.claim_dims(piece.names, piece.mesh_rank)
        names = {file.claim_text(name, "F-071", "strict") for name in ranges}
        require("F-071", len(names) == len(ranges), where)
        require("F-071", max(map(len, names)) <= MAX_NAME, where)


def check_ranks(file, meshes):
    """That meshes are disjoint, and only then each of them, so that no rank is read twice."""
    end = 0
    for start, ranks in sorted(meshes.items()):
        require("F-071", start >= end, f"mesh at {start}")
        end = ranks.stop
    for start, ranks in meshes.items():
        numbers = file.dims[ranks.start : ranks.stop]
        require("F-071", max(numbers) < 1 << 32, f"mesh at {start}")
        require("F-071", len(set(numbers)) == len(numbers), f"mesh at {start}")


def check_sliced_tensors(file):
    """That each sliced tensor is a part of a global tensor, and each run of the same one."""
    for i, tensor in enumerate(file.tensors):
        if tensor.slice != NONE:
            offsets = file.vector(file.slice_of(tensor).offsets, tensor.rank)
            sizes = file.vector(tensor.shape, tensor.rank)
            _, whole = global_tensor(file, tensor)
            inside = all(at + n <= size for at, n, size in zip(offsets, sizes, whole))
            require("F-070", inside, f"tensor {i}")
            require("F-070", max(*whole, extent(tensor, whole), 0) < OVERFLOW, f"tensor {i}")
    for i, node in enumerate(file.nodes):
        if node.kind == TENSOR and node.count > 1:
            first, *others = (global_tensor(file, tensor) for tensor in file.run(node))
            require("F-074", all(other == first for other in others), f"run of node {i}")


def global_tensor(file, tensor):
    return tensor.dtype, file.vector(file.slice_of(tensor).global_shape, tensor.rank)


def check_attrs(file):
    previous = None
    for i, attr in enumerate(file.attrs):
        where = f"attr {i}"
        require("F-080", attr.kind in (INT, STR, BYTES) and not any(attr.reserved), where)
        name = file.claim_text(attr.name, "F-080", "strict")
        require("F-080", previous is None or previous < name, where)
        previous = name
        if attr.kind == STR:
            file.claim_text(attr.value)
        elif attr.kind == BYTES:
            file.claim_bytes(attr.value)
    require("F-081", len(file.digests) in (0, len(file.storages)), "digests")


def check_shards(file):
    # Files beside the manifest, perhaps in a file system that ignores case.
    names = {b"manifest.tssd"}
    for i, shard in enumerate(file.shards):
        where = f"shard {i}"
        name = file.claim_bytes(shard.name).lower()
        require("F-082", SHARD_NAME.fullmatch(name) and name not in names, where)
        names.add(name)
        require("F-082", shard.index_off % 64 == 0 and shard.index_off >= DATA_START, where)
        # The smallest index is a root.
        require("F-082", shard.index_off + ROOT_LEN + 64 <= shard.file_len, where)


def open_archive(data):
    """Proves all of the file but its payload."""
    file = Archive(data, check_head_and_trailer(data))
    check_tree(file)
    check_nodes(file)
    check_runs(file)
    check_tensors(file)
    check_storages(file)
    check_slices(file)
    check_sliced_tensors(file)
    check_attrs(file)
    check_shards(file)
    # Only now has all been walked that refers to them.
    require("F-031", file.heap_end == len(file.heap), f"heap, from {file.heap_end} on")
    file.dims_claims.check_complete("F-031")
    return file


# ---- 8. Payload ----------------------------------------------------------------------------------


def verify(file):
    """Proves the payload that is in this file; that of a manifest is in its shards."""
    for i, storage in enumerate(file.storages):
        require("F-091", storage.crc32 == combined_crc(file, storage), f"storage {i}")
    if file.shards:
        return
    end = DATA_START
    for i, storage in enumerate(file.storages):
        require("F-092", not any(file.data[end : storage.offset]), f"before storage {i}")
        stored = file.stored(storage)
        for number, start in enumerate(range(0, len(stored), CHUNK)):
            crc = zlib.crc32(stored[start : start + CHUNK])
            require("F-090", crc == file.crcs[storage.crcs + number], f"storage {i}")
        end = storage.offset + storage.stored_len
    require("F-092", not any(file.data[end : file.index_off]), "before the index")
    for i, node in enumerate(file.nodes):
        if node.kind == STR and node.flags & 1:
            require("F-032", is_text(file.stored(file.storages[node.a])), f"node {i}")


def combined_crc(file, storage):
    """The CRC of a storage from those of its chunks. A CRC-32 is linear, and each byte that
    follows multiplies it by x^8."""
    crc = file.crcs[storage.crcs]
    for start in range(CHUNK, storage.stored_len, CHUNK):
        size = min(CHUNK, storage.stored_len - start)
        crc = multiply(crc, power_of_x8(size)) ^ file.crcs[storage.crcs + (start >> CHUNK_LOG2)]
    return crc


@lru_cache
def power_of_x8(exponent):
    result, square = 1 << 31, 1 << 23
    while exponent:
        if exponent & 1:
            result = multiply(result, square)
        square = multiply(square, square)
        exponent >>= 1
    return result


def multiply(a, b):
    """The product of two polynomials modulo that of CRC-32; their bit 31 stands for x^0."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB8_8320 if b & 1 else 0)
    return product


# ---- 9. The JSON view ----------------------------------------------------------------------------

MAX_VIEW_DATA = 65536


def view(file):
    attrs, shards = [], []
    for attr in file.attrs:
        attrs.append([file.strings[attr.name].decode(), view_atom(attr.kind, attr.value, file)])
    for shard in file.shards:
        fields = pick(shard, "file_len index_off index_crc32 writer")
        shards.append({"name": file.strings[shard.name].decode(), **fields})
    fields = "offset stored_len raw_len align_log2 crc32" + " shard" * bool(shards)
    seen = {"tssd": 1, "attrs": attrs, "storages": [pick(s, fields) for s in file.storages]}
    if shards:
        seen["shards"] = shards
    return {**seen, "root": view_node(file, file.nodes[0])}


def pick(record, fields):
    return {field: getattr(record, field) for field in fields.split()}


def view_str(text):
    try:
        return {"str": text.decode()}
    except UnicodeDecodeError:
        return {"str_hex": text.hex()}


def view_text(text):
    """A string that is no VALUE: bare, unless it holds surrogates."""
    value = view_str(text)
    return value.get("str", value)


def view_float(word):
    return f"{word:016x}"


# The values that may be leaves, keys or elements of keys, of a u64 or of bytes.
ATOMS = {
    NONE_LEAF: lambda _: {"none": None},
    BOOL: lambda word: {"bool": word == 1},
    INT: lambda word: {"int": str(signed(word))},
    BIGINT: lambda content: {"int": str(int.from_bytes(content, "little", signed=True))},
    FLOAT: lambda word: {"float": view_float(word)},
    STR: view_str,
    BYTES: lambda content: {"bytes": content.hex()},
    TUPLE: lambda elements: {"tuple": [ATOMS[KIND_OF_KEY[k]](each) for k, each in elements]},
}
KIND_OF_KEY = (None, STR, INT, BIGINT, BOOL, FLOAT, NONE_LEAF, BYTES, TUPLE)


def view_atom(kind, word, file):
    content = file.strings[word] if kind in (STR, BIGINT, BYTES, TUPLE) else word
    return ATOMS[kind](unpack_tuple(content) if kind == TUPLE else content)


CONTAINERS = {DICT: "dict", ORDERED_DICT: "ordered_dict", LIST: "list", TUPLE: "tuple"}
CONTAINERS[DIVERGENT] = "divergent"


def view_node(file, node):
    """A VALUE. Recursion is as deep as the containers, of which F-042 allows 64 levels."""
    if node.kind in KEYS_OF:
        return view_container(file, node)
    if node.kind == OPAQUE or node.flags & 1:
        return view_content(file, node)
    if node.kind in ATOMS:
        return view_atom(node.kind, node.a, file)
    if node.kind == COMPLEX:
        return {"complex": [view_float(node.a), view_float(node.b)]}
    if node.kind == DTYPE:
        return {"dtype": DTYPES[node.a]["name"]}
    if node.kind == SIZE:
        return {"size": [str(signed(entry)) for entry in file.vector(node.a, node.count)]}
    if node.kind == DEVICE:
        return {"device": view_text(file.strings[node.a])}
    run = [view_tensor(file, tensor) for tensor in file.run(node)]
    return {"shard": run} if "slice" in run[0] else {"tensor": run[0]}


def view_container(file, node):
    items = []
    for child in (file.nodes[i] for i in file.children(node)):
        value = view_node(file, child)
        if node.kind in (LIST, TUPLE):
            items.append(value)
        elif node.kind == NAMEDTUPLE:
            items.append([view_text(file.strings[child.key]), value])
        else:
            items.append([view_atom(KIND_OF_KEY[child.key_kind], child.key, file), value])
    if node.kind == NAMEDTUPLE:
        return {"namedtuple": {"name": view_text(file.strings[node.b]), "fields": items}}
    return {CONTAINERS[node.kind]: items}


def view_content(file, node):
    """A leaf in a storage, or an opaque one; its content is null if it lies in another file."""
    if not node.flags & 1:
        content = file.strings[node.a]
    else:
        content = None if file.shards else file.stored(file.storages[node.a])
    if node.kind == STR:
        return {"str": None} if content is None else view_str(content)
    content = None if content is None else content.hex()
    if node.kind == BYTES:
        return {"bytes": content}
    return {"opaque": {"media": view_text(file.strings[node.b]), "bytes": content}}


def view_tensor(file, tensor):
    shape = file.vector(tensor.shape, tensor.rank)
    seen = {"dtype": DTYPES[tensor.dtype]["name"], "shape": shape}
    strides = strides_of(file, tensor, shape)
    if list(strides) != row_major(shape):
        seen["strides"] = strides
    if tensor.flags:
        flags = enumerate(TENSOR_FLAGS)
        seen["flags"] = [name for bit, name in flags if tensor.flags >> bit & 1]
    seen["storage"] = None if tensor.storage == NONE else tensor.storage
    seen["byte_offset"] = tensor.byte_offset
    # With strides of 0 there may be far more elements than bytes: the shape decides.
    if 0 in shape:
        seen["data"] = ""
    elif not file.shards and extent(tensor, shape) <= MAX_VIEW_DATA:
        seen["data"] = elements(file, tensor, shape).hex()
    if tensor.slice != NONE:
        seen["slice"] = view_slice(file, file.slice_of(tensor))
    return seen


def elements(file, tensor, shape):
    """The elements of a small tensor, laid out row-major."""
    itemsize = DTYPES[tensor.dtype]["itemsize"]
    offsets = [file.storages[tensor.storage].offset + tensor.byte_offset]
    for count, stride in zip(shape, strides_of(file, tensor, shape)):
        offsets = [offset + i * stride * itemsize for offset in offsets for i in range(count)]
    return b"".join(file.data[offset : offset + itemsize] for offset in offsets)


def view_slice(file, piece):
    seen = {
        "offsets": file.vector(piece.offsets, piece.rank),
        "global_shape": file.vector(piece.global_shape, piece.rank),
    }
    mesh = file.vector(piece.mesh, piece.mesh_rank)
    if mesh:
        seen["mesh_shape"] = mesh
    if piece.coordinates != NONE:
        seen["coordinates"] = file.vector(piece.coordinates, piece.mesh_rank)
    if piece.ranks != NONE:
        seen["ranks"] = file.vector(piece.ranks, prod(mesh))
    if piece.placements != NONE:
        seen["placements"] = [view_placement(p) for p in file.placements_of(piece)]
    if piece.names != NONE:
        names = file.vector(piece.names, piece.mesh_rank)
        seen["dim_names"] = [file.strings[name].decode() for name in names]
    return seen


def view_placement(p):
    seen = "Replicate()", f"Shard({p.dim})", f"_StridedShard({p.dim}, {p.split_factor})"
    return seen[p.kind]


# ---- Command line --------------------------------------------------------------------------------


def decode(data, verified):
    file = open_archive(data)
    if verified:
        verify(file)
    return view(file)


def check_vector(path, rule):
    """What is wrong with the answer to a vector, to be refused by the rule if there is one."""
    try:
        seen = decode(path.read_bytes(), True)
    except Refused as refusal:
        return None if refusal.args[0] == rule else f"refused by {refusal}, not {rule}"
    if rule:
        return f"accepted, not refused by {rule}"
    wanted = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    # Compared as text, since the order of members counts and 1 is not true.
    return None if json.dumps(seen) == json.dumps(wanted) else "the JSON view differs"


def check_vectors(folder):
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    unlisted = set(folder.glob("*/*.tssd"))
    passed, failures = 0, []
    for part in ("valid", "invalid"):
        for vector in manifest[part]:
            path = folder / part / f"{vector['name']}.tssd"
            unlisted.discard(path)
            failure = check_vector(path, vector.get("rule"))
            passed += failure is None
            failures += [f"{path}: {failure}"] * (failure is not None)
    failures += [f"{path}: not in manifest.json" for path in sorted(unlisted)]
    print(*failures, f"{passed} passed, {len(failures)} failed", sep="\n")
    return 1 if failures or not passed else 0


def main(arguments):
    sys.stdout.reconfigure(encoding="utf-8")
    # Python refuses to print integers of more than 4300 digits unless told otherwise.
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    *options, name = arguments or [None]
    if name is None or options not in ([], ["--verify"], ["--vectors"]):
        sys.exit(__doc__)
    if options == ["--vectors"]:
        return check_vectors(Path(name))
    try:
        seen = decode(Path(name).read_bytes(), bool(options))
    except Refused as refusal:
        print("refused by", ", ".join(refusal.args))
        return 1
    print(json.dumps(seen, indent=1, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
