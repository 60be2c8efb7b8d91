#!/usr/bin/env python3
"""Makes the archives in invalid/ that a reader must refuse, and lists them in manifest.json.

    make_invalid.py            rewrites invalid/ and the "invalid" list of manifest.json
    make_invalid.py --check    tells whether they are what it would write

Each vector is a legal archive in which one rule of format.md is broken and every checksum is right
again, unless the checksum is the point. Its name begins with the number of the rule.
"""

import json
import re
import struct
import sys
import zipfile
import zlib
from collections import namedtuple
from io import BytesIO
from pathlib import Path

HERE = Path(__file__).parent

# ---- A builder of archives -----------------------------------------------------------------------

NONE = 0xFFFF_FFFF
U64 = (1 << 64) - 1
NONE_LEAF, BOOL, INT, BIGINT, FLOAT, COMPLEX, STR, BYTES, DTYPE, SIZE = range(10)
DEVICE, TENSOR, OPAQUE = range(10, 13)
DICT, ORDERED_DICT, LIST, TUPLE, NAMEDTUPLE, DIVERGENT = range(32, 38)
K_INDEX, K_STR, K_INT, K_BIGINT, K_BOOL, K_FLOAT, K_NONE, K_BYTES, K_TUPLE = range(9)
UINT8, FLOAT32, COMPLEX128 = 0, 6, 10
REPLICATE, SHARD, STRIDED_SHARD = range(3)

# Layout, alignment and fields of each table. A record is a dict, in which a field left out is 0.
TABLES = {
    "heap": ("<B", 1, None),
    "dims": ("<Q", 8, None),
    "nodes": ("<BBHIQQQ", 8, "kind key_kind flags count key a b"),
    "by_key": ("<I", 4, None),
    "tensors": (
        "<IHBBIIIIQ",
        8,
        "storage dtype rank flags shape strides slice reserved byte_offset",
    ),
    "storages": (
        "<QQQIIIIBBBBI",
        8,
        "offset stored_len raw_len shard chunks crcs crc32 codec align_log2 chunk_log2 shuffle"
        " reserved",
    ),
    "chunks": ("<QII", 8, "offset stored_len codec"),
    "crcs": ("<I", 4, None),
    "slices": (
        "<IIIIIIIBBH",
        4,
        "offsets global_shape mesh coordinates ranks placements names rank mesh_rank flags",
    ),
    "placements": ("<BBHIQ", 8, "kind reserved reserved2 dim split_factor"),
    "attrs": ("<QQBBHI", 8, "name value kind reserved reserved2 reserved3"),
    "digests": ("<32s", 1, None),
    "shards": ("<QQQII32s", 8, "name file_len index_off index_crc32 writer digest"),
}
HEAD = "magic major minor data_start incompat ro_compat compat index_off index_len flags crc32"
TRAILER = (
    "index_off index_len root_off root_len index_crc32 index_codec flags prev_trailer_off file_len"
    " generation crc32 end_magic"
)

Key = namedtuple("Key", "kind content")
Leaf = namedtuple("Leaf", "kind a b count flags", defaults=(0, 0, 0, 0))
Box = namedtuple("Box", "kind items name", defaults=(b"",))


def align_up(x, alignment):
    return -(-x // alignment) * alignment


def u64(number):
    return number & U64


def bits(number):
    return struct.unpack("<Q", struct.pack("<d", number))[0]


def pack(layout, fields, values):
    return struct.pack(layout, *(values.get(field, 0) for field in fields.split()))


def key(value):
    """The key that stands for a Python value; lists of pairs make dicts of them."""
    if isinstance(value, Key):
        return value
    if value is None:
        return Key(K_NONE, 0)
    if isinstance(value, bool):
        return Key(K_BOOL, int(value))
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 63:
            return Key(K_INT, u64(value))
        return Key(K_BIGINT, bigint(value))
    if isinstance(value, float):
        return Key(K_FLOAT, bits(value))
    if isinstance(value, str):
        return Key(K_STR, value.encode())
    if isinstance(value, bytes):
        return Key(K_BYTES, value)
    return Key(K_TUPLE, packed(*value))


def bigint(value):
    length = (value if value >= 0 else ~value).bit_length() // 8 + 1
    return value.to_bytes(length, "little", signed=True)


def packed(*values):
    content = struct.pack("<I", len(values))
    for element in map(key, values):
        content += bytes([element.kind])
        if element.kind == K_TUPLE:
            content += element.content
        elif isinstance(element.content, bytes):
            content += struct.pack("<I", len(element.content)) + element.content
        elif element.kind == K_BOOL:
            content += bytes([element.content])
        elif element.kind != K_NONE:
            content += struct.pack("<Q", element.content)
    return content


class Archive:
    """The tables of an archive, filled in the order in which the format claims them, and files of
    them with everything derived: offsets, lengths and checksums, but for what is overridden."""

    def __init__(self):
        self.tables = {name: [] for name in TABLES}
        self.strings = {}  # the heap range of each string
        self.named = {}  # the children of the root, by key
        self.blob = bytearray()
        self.head = {}
        self.trailer = {}
        self.root = {}
        self.alignments = {}  # those of tables that are not as they should be
        self.gap = b"\0"  # what gaps of the index are filled with
        self.before_root = b""
        self.after_root = b""
        self.patches = []

    # Filling

    def put(self, content):
        """The heap range of a string."""
        if not content:
            return 0
        if content not in self.strings:
            self.strings[content] = len(content) << 32 | len(self.tables["heap"])
            self.tables["heap"] += content
        return self.strings[content]

    def vector(self, numbers):
        """The dims range of a vector."""
        dims, numbers = self.tables["dims"], list(numbers)
        for at in range(len(dims) - len(numbers) + 1):
            if dims[at : at + len(numbers)] == numbers:
                return at
        dims += numbers
        return len(dims) - len(numbers)

    def add(self, table, **record):
        self.tables[table].append(record)
        return self

    def tree(self, root):
        """Adds the nodes, breadth first. A str or bytes in place of a word goes to the heap."""
        waiting = [(Key(K_INDEX, 0), root)]
        by_key = [0]
        for node_key, value in waiting:
            fields = {"kind": value.kind, "key_kind": node_key.kind, "key": self.word(node_key[1])}
            if isinstance(value, Box):
                keyed = value.kind not in (LIST, TUPLE)
                first = len(waiting)
                items = [(key(k), v) for k, v in value.items] if keyed else list(value.items)
                waiting += items if keyed else [(Key(K_INDEX, 0), v) for v in items]
                children = range(first, len(waiting))
                by_key += sorted(children, key=lambda i: waiting[i][0]) if keyed else children
                fields.update(count=len(children), a=first, b=self.put(value.name))
            elif value.kind == SIZE:
                fields.update(count=len(value.a), a=self.vector(map(u64, value.a)))
            else:
                fields.update(count=value.count, flags=value.flags)
                fields.update(a=self.word(value.a), b=self.word(value.b))
            self.add("nodes", **fields)
        self.tables["by_key"] = by_key
        for (k, _), node in zip(root.items, self.tables["nodes"][1:]):
            self.named[k] = node
        return self

    def word(self, content):
        return self.put(content) if isinstance(content, bytes) else content

    def storage(self, content, **fields):
        """Adds a storage and, in a file without shards, its bytes."""
        record = {"stored_len": len(content), "raw_len": len(content), "chunks": NONE}
        record.update(align_log2=8, chunk_log2=20, crc32=zlib.crc32(content))
        record.update(crcs=len(self.tables["crcs"]), **fields)
        if "offset" not in record:
            start = align_up(4096 + len(self.blob), 1 << record["align_log2"])
            self.blob = self.blob.ljust(start - 4096, b"\0") + content
            record["offset"] = start
        self.tables["crcs"].append(record["crc32"])
        return self.add("storages", **record)

    def tensor(self, shape, dtype=UINT8, strides=None, **fields):
        record = {"dtype": dtype, "rank": len(shape), "shape": self.vector(shape)}
        record.update(strides=NONE if strides is None else self.vector(strides), slice=NONE)
        record.update(storage=NONE if 0 in shape else 0)
        return self.add("tensors", **{**record, **fields})

    def slice(self, offsets, global_shape, mesh=(), ranks=(), **known):
        """Adds a slice; `known` are its coordinates, its names and its first placement."""
        absent = dict.fromkeys(("mesh", "coordinates", "ranks", "placements", "names"), NONE)
        record = {**absent, "rank": len(offsets), "mesh_rank": len(mesh)}
        record.update(offsets=self.vector(offsets), global_shape=self.vector(global_shape))
        if mesh:
            record.update(mesh=self.vector((*mesh, *ranks)))
        if ranks:
            record.update(ranks=record["mesh"] + len(mesh))
        if "coordinates" in known:
            record.update(coordinates=self.vector(known.pop("coordinates")))
        if "names" in known:
            record.update(names=self.vector(map(self.put, known.pop("names"))))
        return self.add("slices", **{**record, **known})

    def attr(self, name, kind, value):
        return self.add("attrs", name=self.put(name), value=self.word(value), kind=kind)

    def shard(self, name, **fields):
        record = {"file_len": 12288, "index_off": 8192, "index_crc32": 0x01020304, "digest": b""}
        return self.add("shards", name=self.put(name), **{**record, **fields})

    # Breaking

    def edit(self, table, i, **fields):
        self.tables[table][i].update(fields)
        return self

    def at(self, name, **fields):
        """Edits a child of the root."""
        self.named[name].update(fields)
        return self

    def set(self, table, records):
        """Replaces the records of a table."""
        self.tables[table] = list(records)
        return self

    def override(self, part, **fields):
        """Overrides what would be derived, in `head`, `trailer` or `root`, or another attribute."""
        getattr(self, part).update(fields)
        return self

    def lay(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)
        return self

    def patch(self, at, content):
        """Overwrites bytes of the finished file, behind the back of the checksums."""
        self.patches.append((at, content))
        return self

    # Building

    def build_index(self):
        index = bytearray()
        places = {}
        for name in TABLES:
            layout, alignment, fields = TABLES[name]
            alignment = self.alignments.get(name, alignment)
            index = index.ljust(align_up(len(index), alignment), self.gap)
            places[name] = len(index), len(self.tables[name])
            for record in self.tables[name]:
                index += pack(layout, fields, record) if fields else struct.pack(layout, record)
        index = index.ljust(align_up(len(index), 4), self.gap) + self.before_root
        root_off = len(index)
        for number, name in enumerate(TABLES):
            start, count = self.root.get(name, places[name])
            index += struct.pack("<iI", start - root_off - 8 * number, count)
        return bytes(index + self.after_root), root_off

    def build(self):
        index, root_off = self.build_index()
        head = {"magic": b"\x89TSD\r\n\x1a\n", "major": 1, "data_start": 4096, "incompat": 1 << 63}
        head = pack("<8sHHIQQQQQII", HEAD, {**head, **self.head})[:60]
        head += struct.pack("<I", zlib.crc32(head))
        file = head.ljust(4096, b"\0") + self.blob
        file = file.ljust(align_up(len(file), 64), b"\0")
        trailer = {"index_off": len(file), "index_len": len(index), "index_codec": 1}
        trailer.update(root_off=root_off, root_len=len(index) - root_off)
        trailer.update(index_crc32=zlib.crc32(index), file_len=len(file) + len(index) + 64)
        trailer.update(end_magic=b"\n\x1a\n\rDST\x89")
        trailer = pack("<QQIIIHHQQII8s", TRAILER, {**trailer, **self.trailer})
        crc = zlib.crc32(trailer[:52] + trailer[56:])
        file = bytearray(file + index + trailer[:52] + struct.pack("<I", crc) + trailer[56:])
        for at, content in self.patches:
            at %= len(file)
            file[at : at + len(content)] = content
        return bytes(file)


# ---- Legal archives to start from ----------------------------------------------------------------


def keyed(*keys, kind=DICT):
    """A dict with these keys, or a dict that holds a container of another kind with them."""
    box = Box(kind, [(k, Leaf(NONE_LEAF)) for k in keys])
    return Archive().tree(box if kind == DICT else Box(DICT, [("box", box)]))


def leaves():
    """One node of each kind that needs no storage."""
    items = {
        "none": Leaf(NONE_LEAF),
        "bool": Leaf(BOOL, 1),
        "int": Leaf(INT, u64(-12)),
        "bigint": Leaf(BIGINT, bigint(1 << 64)),
        "float": Leaf(FLOAT, bits(1.5)),
        "complex": Leaf(COMPLEX, bits(0.5), bits(-0.0)),
        "str": Leaf(STR, b"text"),
        "bytes": Leaf(BYTES, b"\0\xff"),
        "dtype": Leaf(DTYPE, 15),
        "size": Leaf(SIZE, (2, 3)),
        "device": Leaf(DEVICE, b"cuda:0"),
        "opaque": Leaf(OPAQUE, b"{}", b"application/json"),
        "dict": Box(DICT, [("x", Leaf(INT, 1)), ("y", Leaf(INT, 2))]),
        "ordered_dict": Box(ORDERED_DICT, [("x", Leaf(INT, 1)), ("y", Leaf(INT, 2))]),
        "list": Box(LIST, [Leaf(INT, 1), Leaf(INT, 2)]),
        "tuple": Box(TUPLE, [Leaf(INT, 1), Leaf(INT, 2)]),
        "namedtuple": Box(NAMEDTUPLE, [("x", Leaf(INT, 1)), ("y", Leaf(INT, 2))], b"Point"),
    }
    return Archive().tree(Box(DICT, list(items.items())))


def leaf(kind, a, b=0, **fields):
    return Archive().tree(Box(DICT, [("leaf", Leaf(kind, a, b, **fields))]))


def stored(kind=STR, content=b"text" * 1025):
    """A leaf in a storage, and another leaf."""
    items = [("long", Leaf(kind, flags=1)), ("other", Leaf(STR, b"text"))]
    return Archive().tree(Box(DICT, items)).storage(content)


def runs(*lengths):
    """A dict of tensor leaves `0`, `1` …, with runs of so many records."""
    items = [(str(i), Leaf(TENSOR, sum(lengths[:i]), count=n)) for i, n in enumerate(lengths)]
    return Archive().tree(Box(DICT, items))


def one_tensor(shape, *arguments, **fields):
    """A tensor in a storage of 64 bytes, if it has elements."""
    archive = runs(1) if 0 in shape else runs(1).storage(bytes(range(64)))
    return archive.tensor(shape, *arguments, **fields)


def tensors():
    """A tensor, a transposed view of it, a tensor of another storage, and one without elements."""
    archive = runs(1, 1, 1, 1).storage(bytes(range(100))).storage(bytes(range(16)))
    archive.tensor((2, 3), FLOAT32, byte_offset=8).tensor((3, 2), FLOAT32, (1, 3), byte_offset=8)
    return archive.tensor((16,), storage=1).tensor((0, 3))


def two_slices(archive):
    """A run of two records: the halves of a tensor of 4 x 3, spread over a mesh of 2."""
    for i in range(2):
        archive.tensor((2, 3), storage=i, slice=i)
    for i in range(2):
        known = {"coordinates": (i,), "ranks": (0, 1), "names": (b"dp",), "placements": i}
        archive.slice((2 * i, 0), (4, 3), (2,), **known)
    archive.add("placements", kind=SHARD).add("placements", kind=SHARD)
    return archive


def sliced():
    return two_slices(runs(2).storage(b"first half").storage(b"secondhalf"))


def manifest():
    """The same two halves, each in a shard of its own, and an attribute."""
    archive = runs(2)
    for i in range(2):
        archive.storage(bytes(100), offset=4096, shard=i)
    two_slices(archive).attr(b"format", STR, b"pt")
    return archive.shard(b"a.tssd").shard(b"b.tssd", writer=1)


def one_slice(shape, offsets, global_shape, *arguments, **fields):
    """A tensor in a storage of 64 bytes, and its slice."""
    return one_tensor(shape, slice=0).slice(offsets, global_shape, *arguments, **fields)


def meshed(mesh=(2,), **known):
    """A tensor in a storage of 64 bytes, and its slice on a mesh."""
    return one_slice((2,), (0,), (4,), mesh, **known)


def one_mesh(mesh):
    """The same, with as many ranks as it takes, of which dims has none."""
    archive = meshed(mesh)
    start = archive.tables["slices"][0]["mesh"]
    return archive.edit("slices", 0, ranks=start + len(mesh))


def two_meshes(*meshes):
    """Two tensors without elements, of global sizes 8 and 9, each on a mesh of one dimension: its
    size and its ranks."""
    archive = runs(1, 1).tensor((0,), slice=0).tensor((0,), slice=1)
    for i, (size, ranks) in enumerate(meshes):
        archive.slice((0,), (8 + i,), (size,), ranks)
    return archive


def divergent(*writers, inside=lambda values: values):
    """A manifest with a leaf on which the writers do not agree."""
    values = Box(DIVERGENT, [(writer, Leaf(INT, i)) for i, writer in enumerate(writers)])
    return Archive().tree(Box(DICT, [("leaf", inside(values))])).shard(b"a.tssd")


def attrs(*names):
    archive = keyed("a")
    for name in names:
        archive.attr(name, INT, 1)
    return archive


def nested(levels):
    """Containers of so many levels, the root counted."""
    box = Box(LIST, [])
    for _ in range(levels - 2):
        box = Box(LIST, [box])
    return Archive().tree(Box(DICT, [("list", box)]))


def packed_nested(levels):
    return struct.pack("<IB", 1, K_TUPLE) * (levels - 1) + struct.pack("<I", 0)


def packed_key(content):
    return keyed(Key(K_TUPLE, content))


# ---- Foreign files -------------------------------------------------------------------------------


def zip_file():
    file = BytesIO()
    entry = zipfile.ZipInfo("archive/data.pkl")
    entry.create_system = 3
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(entry, bytes(4264))
    return file.getvalue()


def safetensors_file():
    head = b'{"w":{"dtype":"U8","shape":[4264],"data_offsets":[0,4264]}}'
    return struct.pack("<Q", len(head)) + head + bytes(4264)


def png_file():
    def chunk(name, content):
        crc = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", crc)

    size = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    # One grey pixel in a stored block.
    pixel = b"\x78\x01\x01\x02\x00\xfd\xff\x00\x00\x00\x02\x00\x01"
    chunks = (b"IHDR", size), (b"tEXt", b"Comment\0".ljust(4264)), (b"IDAT", pixel), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


# ---- The vectors, as (name, what is wrong, archive or bytes) -------------------------------------


def of_head_and_trailer():
    good = tensors().build()
    trailer = good[-64:]
    index_off, index_len = struct.unpack_from("<QQ", trailer)

    yield "001-empty-file", "no bytes at all", b""
    yield "001-one-byte-short", "4263 bytes, one less than any archive has", good[:4263]

    yield "002-all-zeros", "nothing but zeros", bytes(4264)
    yield "002-zip", "a zip file, as torch.save writes", zip_file()
    yield "002-safetensors", "a safetensors file", safetensors_file()
    yield "002-png", "a PNG image", png_file()
    yield "002-text-mode", "CR LF became LF on the way", good.replace(b"\r\n", b"\n")

    yield "003-bit-flipped", "a bit of `compat` flipped", tensors().patch(32, b"\x01")
    yield "004-major-2", "a file of a later major version", tensors().override("head", major=2)
    later = tensors().override("head", incompat=1 << 63 | 1 << 62)
    yield "005-incompat-bit-62", "incompat bit 62 is set", later
    early = tensors().override("head", data_start=64)
    yield "010-data-start-64", "data_start is 64", early

    flags = tensors().override("head", flags=1)
    yield "006-head-flags", "reserved flags of the head are not zero", flags
    yield "006-byte-64", "the first byte after the head", tensors().patch(64, b"\x01")
    yield "006-byte-4095", "the last byte before the blob", tensors().patch(4095, b"\x01")
    later = tensors().override("trailer", generation=1)
    yield "006-trailer-generation", "reserved generation of the trailer is not zero", later

    yield "007-truncated-by-one", "the last byte is missing", good[:-1]
    yield "007-trailing-zeros", "64 zeros at the end", good + bytes(64)
    yield "008-bit-flipped", "a bit of generation flipped", tensors().patch(-16, b"\x01")
    yield "009-trailer-twice", "the trailer again at the end", good + trailer
    yield "014-codec-2", "index codec 2", tensors().override("trailer", index_codec=2)
    large = tensors().override("trailer", index_len=(1 << 30) + 1)
    yield "012-too-large", "index_len is 2^30 + 1", large

    def index_at(start, length):
        return tensors().override("trailer", index_off=start, index_len=length)

    yield "011-unaligned", "index_off no multiple of 64", index_at(index_off - 8, index_len + 8)
    low = index_at(4032, len(good) - 64 - 4032)
    yield "011-in-head-space", "index_off below 4096", low
    wrapped = index_at((1 << 64) - 4096, len(good) + 4096 - 64)
    yield "011-overflow", "index_off + index_len + 64 is right modulo 2^64", wrapped
    yield "013-bit-flipped", "a byte of the heap changed", tensors().patch(index_off, b"!")


def of_root_and_tables():
    good = leaves()
    index, _ = good.build_index()
    length = len(index)

    def root_at(start, size):
        return leaves().override("trailer", root_off=start, root_len=size)

    yield "020-root-too-short", "a root of 100 bytes", root_at(length - 100, 100)
    yield "020-unaligned", "root_off no multiple of 4", root_at(length - 106, 106)
    short = leaves().lay(after_root=bytes(8)).override("trailer", root_len=104)
    yield "020-short-of-end", "the root ends before the index", short
    wrapped = root_at((1 << 32) - 256, length + 256)
    yield "020-overflow", "root_off + root_len is right modulo 2^32", wrapped

    # The tables of `leaves` up to its dims, and those that it leaves empty behind them.
    heap, dims = len(good.tables["heap"]), len(good.tables["dims"])
    end = align_up(align_up(heap, 8) + 8 * dims + 36 * len(good.tables["nodes"]), 8)

    yield "021-gap-not-zero", "gaps between tables are not zero", leaves().lay(gap=b"\x01")
    yield "021-root-too-late", "four zeros before the root", leaves().lay(before_root=bytes(4))
    lower = leaves().override("root", heap=(1, heap - 1))
    yield "021-first-not-at-0", "the heap begins at 1", lower
    yield "021-unaligned", "nodes follow a misaligned heap", unaligned_tables()
    # Behind one CRC the slices are at an odd multiple of 4.
    spaced = one_slice((2,), (0,), (4,)).lay(alignments={"slices": 8})
    yield "021-slices-aligned-to-8", "four zeros before the slices", spaced
    elsewhere = leaves().override("root", tensors=(0, 0))
    yield "021-empty-elsewhere", "no tensors, but elsewhere", elsewhere
    # Shards are last, so that no later table is where it should not be.
    for name, records in (("into-root", 1), ("beyond-file", NONE)):
        about = f"the last table claims {records} records that it does not have"
        yield f"021-{name}", about, leaves().override("root", shards=(end, records))
    longer = leaves().lay(after_root=bytes(64)).override("root", shards=(end, 1))
    yield "021-longer-root-in-table", "a root of 168 bytes begins in the last table", longer
    gap = leaves().lay(gap=b"\x01", after_root=bytes(8))
    yield "021-longer-root-gap", "a root of 112 bytes and gaps that are not zero", gap


def unaligned_tables():
    """An archive whose nodes follow a heap of 9 bytes at once."""
    archive = keyed("123456789")
    index, root_off = archive.build_index()
    # Heap, nodes and by_key, which stays aligned; the empty tables after it stay where they were.
    tables = (index[:9] + index[16:80] + bytes(3) + index[80:88]).ljust(root_off, b"\0")
    archive.override("root", dims=(9, 0), nodes=(9, 2), by_key=(76, 2))
    index = tables + archive.build_index()[0][root_off:]
    archive.override("trailer", index_crc32=zlib.crc32(index))
    return archive.patch(-64 - len(index), tables)


def of_heap_and_dims():
    def with_heap(heap, *ranges):
        """A dict with keys at these places of the heap."""
        archive = keyed(*"ab"[: len(ranges)]).set("heap", heap)
        for node, (start, length) in zip(archive.tables["nodes"][1:], ranges):
            node["key"] = length << 32 | start
        return archive

    prefix = with_heap(b"ab", (0, 2), (0, 1)).set("by_key", (0, 2, 1))
    beyond = 9 << 32
    dim_name = meshed(ranks=(0, 1), names=(b"dp",))
    dim_name.set("dims", [d + beyond if d >> 32 else d for d in dim_name.tables["dims"]])
    type_name = Archive().tree(Box(DICT, [("p", Box(NAMEDTUPLE, [], b"P"))]))
    for name, about, archive in (
        ("key-beyond", "a key ends a byte beyond the heap", with_heap(b"ab", (0, 3))),
        ("key-overflow", "offset and length overflow 32 bits", with_heap(b"ab", (NONE, NONE))),
        ("key-late", "a key begins after the claimed part", with_heap(b"a?b", (0, 1), (2, 1))),
        ("key-out-of-order", "the second key is first", with_heap(b"ba", (1, 1), (0, 1))),
        ("key-straddles", "a key begins in another and goes on", with_heap(b"abc", (0, 2), (1, 2))),
        ("key-prefix", "a key is the beginning of another", prefix),
        ("empty-not-0", "an empty key at offset 1", with_heap(b"a", (1, 0), (0, 1))),
        ("opaque-beyond", "an opaque", leaf(OPAQUE, b"{}", b"a/b").at("leaf", a=beyond | 4)),
        ("media-beyond", "a media tag", leaf(OPAQUE, 0, b"a/b").at("leaf", b=beyond | 4)),
        ("type-name-beyond", "the name of a namedtuple", type_name.at("p", b=beyond | 1)),
        ("dim-name-beyond", "a mesh dimension's name", dim_name),
        ("shard-name-beyond", "a shard's name", divergent(0).edit("shards", 0, name=beyond | 4)),
    ):
        yield f"030-{name}", about, archive

    scalar = one_tensor((), strides=())
    straddling = one_tensor((2, 3), UINT8, (3, 1)).set("dims", (2, 3, 1))
    # The shape of the mesh is claimed as global_shape, and the ranks are not yet.
    mesh = one_slice((0,), (0,), (2,), (2,), (4, 5)).edit("slices", 0, mesh=1, ranks=2)
    mesh.set("dims", (0, 2, 4, 5))
    for name, about, archive in (
        ("shape-none", "a shape of NONE", one_tensor((2, 3)).edit("tensors", 0, shape=NONE)),
        ("strides-straddle", "strides", straddling.edit("tensors", 0, strides=1)),
        ("empty-not-0", "no strides, at 1,", scalar.edit("tensors", 0, strides=1)),
        ("size-far-beyond", "a size at 2^32", leaf(SIZE, (2, 3)).at("leaf", a=1 << 32)),
        ("mesh-straddles", "a mesh whose shape is claimed and whose ranks are not", mesh),
        ("ranks-huge", "a mesh of 2^32 - 1 ranks in a small file", one_mesh((NONE,))),
    ):
        yield f"033-{name}", f"{about} out of range or order", archive
    for field in ("offsets", "mesh", "coordinates"):
        archive = meshed().edit("slices", 0, **{field: 4})
        yield f"033-{field}-beyond", f"the {field} of a slice out of range", archive
    beyond = meshed(ranks=(0, 1)).edit("slices", 0, names=8)
    yield "033-names-beyond", "the names of a slice out of range", beyond

    unclaimed = with_heap(b"a?", (0, 1))
    large = bigint(1 << 40000)
    twice = Archive().tree(Box(DICT, [("x", Leaf(BIGINT, large)), ("y", Leaf(BIGINT, large))]))
    yield "030-long-twice", "a heap range of 5001 bytes that two leaves name", twice
    yield "031-heap-end", "a byte at the end of the heap that nothing names", unclaimed
    unclaimed = one_tensor((2, 3)).set("dims", (2, 3, 4))
    yield "031-dims-end", "a number at the end of dims that nothing names", unclaimed

    for name, text in (
        ("stray-byte", b"\xff"),
        ("overlong-slash", b"\xe0\x80\xaf"),
        ("above-10ffff", b"\xf4\x90\x80\x80"),
        ("cut-short", b"a\xe2\x82"),
    ):
        yield f"032-{name}", f"the key {text.hex()}", keyed(Key(K_STR, text))
    bad = b"a\xff"
    for name, about, archive in (
        ("str", "a str leaf", leaf(STR, bad)),
        ("device", "a device", leaf(DEVICE, bad)),
        ("media", "a media tag", leaf(OPAQUE, b"{}", bad)),
        ("attr-value", "an attribute's str", keyed("a").attr(b"format", STR, bad)),
        ("stored", "a str in a storage", stored(STR, b"text" * 1025 + bad)),
    ):
        yield f"032-{name}", f"{about} is not UTF-8", archive


def of_nodes():
    for kind in (13, 38):
        yield f"040-kind-{kind}", f"a node of kind {kind}", leaves().at("none", kind=kind)
    yield "048-no-root", "no nodes at all", Archive()
    yield "048-list", "the root is a list", Archive().tree(Box(LIST, []))
    yield "048-key-kind", "the root has a none key", keyed("a").edit("nodes", 0, key_kind=K_NONE)
    yield "048-key", "the key of the root is 1", keyed("a").edit("nodes", 0, key=1)
    yield "042-65-levels", "65 levels of containers", nested(65)
    yield from of_children()
    yield from of_keys()
    yield from of_leaves()


def of_children():
    def pair():
        """Two lists of one int each: nodes 1 and 2, with the children 3 and 4."""
        lists = [(name, Box(LIST, [Leaf(INT, 7)])) for name in "xy"]
        return Archive().tree(Box(DICT, lists))

    for name, about, archive in (
        ("late", "children after the first unclaimed node", pair().at("y", a=5)),
        ("shared", "two lists with the same child", pair().at("y", a=3)),
        ("overflow", "children at 2^64 - 1", pair().at("y", a=U64)),
        ("beyond", "more children than nodes", pair().at("y", count=2)),
        ("orphan", "a node that no container claims", pair().at("y", count=0)),
        ("empty-at-0", "an empty list whose children begin at 0", nested(2).at("list", a=0)),
        ("by-key-short", "by_key lacks an entry", pair().set("by_key", (0, 1, 2, 3))),
        ("by-key-root", "by_key[0] is not 0", pair().set("by_key", (1, 1, 2, 3, 4))),
    ):
        yield f"041-{name}", about, archive
    cycle = keyed("a").edit("nodes", 0, count=0).edit("nodes", 1, kind=LIST, count=1, a=1)
    cycle.edit("nodes", 1, key_kind=K_INDEX, key=0).set("heap", b"")
    yield "041-cycle", "a list that is its own child, and an empty root", cycle
    yield "041-by-key-of-list", "by_key of a list is not in order", by_key_swapped("list")


def by_key_swapped(kind):
    archive = leaves()
    first = archive.named[kind]["a"]
    archive.tables["by_key"][first : first + 2] = first + 1, first
    return archive


def of_keys():
    def child(kind, **fields):
        """A container with one child, whose key is edited."""
        content = Leaf(INT, 7)
        items = [content] if kind in (LIST, TUPLE) else [("x", content)]
        archive = Archive().tree(Box(DICT, [("box", Box(kind, items))]))
        return archive.edit("nodes", 2, **fields)

    integer = {"key_kind": K_INT, "key": 1}
    nan = 0x7FF8 << 48
    long = b"k" * 4097
    for name, about, archive in (
        ("kind-9", "a key of kind 9", keyed(Key(9, 0))),
        ("index-in-dict", "a dict with an index key", keyed(Key(K_INDEX, 0))),
        ("int-in-list", "a list with an int key", child(LIST, **integer)),
        ("int-in-namedtuple", "a field named 1", child(NAMEDTUPLE, **integer).set("heap", b"box")),
        ("bool-in-divergent", "a writer that is a bool", divergent(True)),
        ("index-not-0", "the key of a tuple's child is 1", child(TUPLE, key=1)),
        ("none-not-0", "a none key of 1", keyed(Key(K_NONE, 1))),
        ("bool-2", "a bool key of 2", keyed(Key(K_BOOL, 2))),
        ("nan", "a float key that is not a number", keyed(Key(K_FLOAT, nan))),
        ("writer-too-large", "a writer of 2^32", divergent(0, 1 << 32)),
        ("tuple-65", "a tuple of 65 elements", packed_key(packed(*[Key(K_NONE, 0)] * 65))),
        ("long-str", "a str key of 4097 bytes", keyed(Key(K_STR, long))),
        ("long-bigint", "a bigint key of 4097 bytes", keyed(Key(K_BIGINT, long))),
        ("long-tuple", "a tuple key of 4097 bytes", packed_key(packed(long[9:]))),
    ):
        yield f"043-{name}", about, archive

    element = struct.pack("<I", 1)
    for name, about, content in (
        ("cut-str", "a str that ends beyond the key", packed("text")[:-1]),
        ("huge-count", "2^32 - 1 elements", struct.pack("<I", NONE) + packed(1)[4:]),
        ("trailing", "a byte after the last element", packed(1) + b"\0"),
        ("kind-0", "an index for an element", element + bytes([K_INDEX])),
        ("bool-2", "a bool of 2", element + bytes([K_BOOL, 2])),
        ("nested-9-deep", "tuples 9 deep", packed_nested(9)),
        ("nested-800-deep", "tuples 800 deep", packed_nested(800)),
        ("nan", "an element that is not a number", packed(Key(K_FLOAT, nan))),
        ("not-text", "a str that is not UTF-8", packed(Key(K_STR, b"\xff"))),
        ("short-bigint", "a bigint that is an i64", packed(Key(K_BIGINT, bytes(8)))),
    ):
        yield f"043-tuple-{name}", f"a packed tuple: {about}", packed_key(content)

    for kind in ("dict", "namedtuple"):
        yield f"044-by-key-of-{kind}", f"by_key of a {kind} out of order", by_key_swapped(kind)
    apart = keyed("a", "b").set("heap", b"aa")
    cousins = Box(DICT, [(name, Box(DICT, [("k", Leaf(INT, 7))])) for name in "xy"])
    cousins = Archive().tree(cousins).set("by_key", (0, 1, 2, 4, 3))
    for name, about, archive in (
        ("by-key-of-divergent", "writers out of order", divergent(1, 0).set("by_key", range(4))),
        ("duplicate-str", "a str key twice", keyed("a", "b", "a")),
        ("duplicate-apart", "a str key twice, at two places of the heap", apart),
        ("child-twice", "by_key names a child twice", keyed("a", "b").set("by_key", (0, 1, 1))),
        ("by-key-beyond", "by_key names node 3 of 3", keyed("a", "b").set("by_key", (0, 1, 3))),
        ("by-key-cousin", "by_key of a dict names the child of another", cousins),
        ("signed-order", "ints in the order of i64", keyed(1, -1).set("by_key", (0, 2, 1))),
        ("length-order", "the shorter str first", keyed("b", "aa").set("by_key", (0, 1, 2))),
        ("kind-order", "an int before a str", keyed("a", 1).set("by_key", (0, 2, 1))),
    ):
        yield f"044-{name}", about, archive

    for name, keys in (
        ("int-bool", (1, True)),
        ("int-float", (2, 2.0)),
        ("zero-minus-zero", (0.0, -0.0)),
        ("int-minus-zero", (0, -0.0)),
        ("i64-min", (-(1 << 63), -(2.0**63))),
        ("i64-largest", ((1 << 63) - 1024, 2.0**63 - 1024)),
        ("apart", (1, "a", None, 2.5, True)),
    ):
        yield f"045-{name}", f"the keys {keys}", keyed(*keys)


def of_leaves():
    for name, content in (
        ("empty", b""),
        ("i64-max-in-9", ((1 << 63) - 1).to_bytes(9, "little")),
        ("i64-min-in-9", (-(1 << 63)).to_bytes(9, "little", signed=True)),
        ("zero-at-end", bigint(1 << 64) + b"\0"),
        ("sign-at-end", bigint(-(1 << 64)) + b"\xff"),
    ):
        about = f"a bigint of {len(content)} bytes, {content.hex() or 'empty'}"
        yield f"046-{name}", about, leaf(BIGINT, content)
    short = Key(K_BIGINT, (7).to_bytes(8, "little"))
    yield "046-key", "a bigint key that is an i64", keyed(short)

    for kind, field in (
        ("none", "a"),
        ("bool", "b"),
        ("int", "count"),
        ("str", "b"),
        ("size", "b"),
        ("opaque", "count"),
        ("dict", "b"),
    ):
        about = f"{field} of a {kind} node is 1"
        yield f"047-{kind}-{field}", about, leaves().at(kind, **{field: 1})
    yield "047-tensor-b", "b of a tensor node is 1", one_tensor((2,)).at("0", b=1)
    yield "047-size-65", "a size of 65 entries", leaf(SIZE, (1,) * 65)
    yield "047-bool-2", "a bool of 2", leaves().at("bool", a=2)
    for code in (47, 1 << 32):
        yield f"047-dtype-{code}", f"a dtype leaf of code {code}", leaves().at("dtype", a=code)
    for kind in ("int", "dict"):
        yield f"047-flag-0-{kind}", f"flag bit 0 on a {kind} node", leaves().at(kind, flags=1)
    yield "047-flag-1", "flag bit 1", leaves().at("str", flags=2)

    long = b"text" * 1025
    yield "049-long-str", "a str of 4100 bytes in the heap", leaf(STR, long)
    yield "049-long-opaque", "an opaque of 4097 bytes in the heap", leaf(OPAQUE, long[:4097], b"a")
    yield "049-short-str", "a str of 4095 bytes in a storage", stored(STR, long[:4095])
    shared = stored().at("other", flags=1, a=0).set("heap", b"longother")
    yield "049-two-leaves", "two leaves in one storage", shared
    shared = [("long", Leaf(STR, 0, flags=1)), ("tensor", Leaf(TENSOR, 0, count=1))]
    shared = Archive().tree(Box(DICT, shared)).storage(long).tensor((4,))
    yield "049-leaf-and-tensor", "a str and a tensor in one storage", shared
    for number in (1, 1 << 32):
        archive = stored().at("other", flags=1, a=number).set("heap", b"longother")
        yield f"049-storage-{number:x}", f"a str in storage {number:#x}, one is there", archive


def of_tensors():
    def empty_tensors(*lengths):
        archive = runs(*lengths)
        for _ in range(sum(lengths)):
            archive.tensor((0,))
        return archive

    half = runs(2).storage(bytes(64)).tensor((2,), slice=0).tensor((2,)).slice((0,), (2,))
    for name, about, archive in (
        ("empty-run", "a run of 0", empty_tensors(1, 1).at("1", count=0)),
        ("shared", "two leaves with one record", empty_tensors(1, 1).at("1", a=0)),
        ("beyond", "a run that ends beyond the table", empty_tensors(1, 1).at("1", count=2)),
        ("overflow", "a run at 2^64 - 1", empty_tensors(1, 1).at("1", a=U64)),
        ("unnamed", "a record that no leaf names", empty_tensors(1).tensor((0,))),
        ("unsliced", "a run of two without slices", empty_tensors(2)),
        ("half-sliced", "a run of two, the second without slice", half),
    ):
        yield f"051-{name}", about, archive

    for code in (47, 256):
        yield f"050-dtype-{code}", f"a tensor of dtype {code}", one_tensor((2,), code)
    yield "052-rank-65", "a tensor of rank 65", one_tensor((1,) * 65)

    top = 1 << 63
    for name, about, archive in (
        ("size", "a size of 2^63 beside one of 0", one_tensor((top, 0))),
        ("stride-empty", "a stride of 2^63, no elements", one_tensor((0,), UINT8, (top,))),
        ("product-empty", "2^80 bytes but for a size of 0", one_tensor((1 << 40, 0, 1 << 40))),
        ("itemsize", "2^63 bytes in 2^61 elements", one_tensor((1 << 61,), FLOAT32, (0,))),
        ("span", "a span of 4 modulo 2^64", one_tensor((5,), FLOAT32, (1 << 62,))),
        ("offset-wraps", "an end of 1 modulo 2^64", one_tensor((2,), byte_offset=U64)),
    ):
        yield f"053-{name}", about, archive

    yield "056-flag-16", "flag 16", one_tensor((2,), flags=16)
    yield "056-reserved", "reserved is 1", one_tensor((2,), reserved=1)

    empty = tensors().edit("tensors", 3, storage=0)
    yield "054-empty-with-storage", "a tensor without elements in a storage", empty
    empty = tensors().edit("tensors", 3, byte_offset=8)
    yield "054-empty-with-offset", "a tensor without elements at byte 8", empty
    bare = runs(1).tensor((2,), storage=NONE)
    yield "054-no-storage", "a tensor with elements but no storage", bare
    for name, about, archive in (
        ("storage-beyond", "storage 1 of 1", runs(1).tensor((2,), storage=1)),
        ("shape", "one element too many", one_tensor((65,))),
        ("itemsize", "its last element is cut", one_tensor((4,), FLOAT32, byte_offset=52)),
        ("strides", "its last corner is outside", one_tensor((8, 8), UINT8, (8, 2))),
    ):
        yield f"054-{name}", about, archive
    odd = one_tensor((2,), COMPLEX128, byte_offset=8)
    yield "055-complex128", "a complex128 tensor at byte 8", odd


def of_storages():
    yield "061-align-5", "align_log2 is 5", one_tensor((2,)).edit("storages", 0, align_log2=5)
    far = manifest().edit("storages", 1, align_log2=22, offset=1 << 22)
    far.edit("shards", 1, index_off=1 << 23, file_len=1 << 24)
    yield "061-align-22", "align_log2 is 22, in a shard", far

    for name, about, fields in (
        ("zstd", "codec 1, without chunks", {"codec": 1}),
        ("chunk-log2", "chunks of 2 MiB", {"chunk_log2": 21}),
        ("shuffle", "a byte shuffle", {"shuffle": 4}),
        ("reserved", "reserved is 1", {"reserved": 1}),
        ("chunks", "a first chunk", {"chunks": 0}),
        ("raw-longer", "raw_len above stored_len", {"raw_len": 65}),
    ):
        yield f"063-{name}", about, one_tensor((2,)).edit("storages", 0, **fields)

    def first(**fields):
        return one_tensor((2,)).edit("storages", 0, **fields)

    def second(**fields):
        return tensors().edit("storages", 1, **fields)

    gap = tensors()
    gap.set("storages", gap.tables["storages"][:1]).set("crcs", gap.tables["crcs"][:1])
    gap.lay(blob=gap.blob[:100].ljust(512, b"\0")).storage(bytes(16))
    spaced = tensors()
    spaced.lay(blob=spaced.blob.ljust(align_up(len(spaced.blob), 64) + 64, b"\0"))
    for name, about, archive in (
        ("first-unaligned", "storage 0 of 8 KiB alignment begins at 4096", first(align_log2=13)),
        ("gap", "256 bytes between storages", gap),
        ("unaligned", "storage 1 follows without its alignment", second(align_log2=9)),
        ("in-index", "storage 0 ends beyond the index", first(stored_len=4096, raw_len=4096)),
        ("shard", "storage 0 is in shard 1, of none", first(shard=1)),
        ("index-late", "64 bytes between the blob and the index", spaced),
        ("hidden-blob", "a blob without storages", keyed("a").lay(blob=bytearray(64))),
    ):
        yield f"060-{name}", about, archive

    def of_shards(*places):
        archive = manifest()
        for i, (shard, offset) in enumerate(places):
            archive.edit("storages", i, shard=shard, offset=offset)
        return archive

    touching = of_shards((0, 4096), (0, 4352)).edit("storages", 0, stored_len=257, raw_len=257)
    for name, about, archive in (
        ("unsorted", "storages not sorted by shard", of_shards((1, 4096), (0, 4096))),
        ("touch", "storages that overlap by a byte", touching),
        ("unaligned", "a storage that is not aligned", of_shards((0, 4096), (1, 4097))),
        ("shard", "a storage in shard 2 of 2", of_shards((0, 4096), (2, 4096))),
        ("in-head", "a storage in the head of its shard", of_shards((0, 0), (1, 4096))),
        ("in-index", "a storage in the index of its shard", of_shards((0, 4096), (1, 8192))),
        ("overflow", "a storage at 2^64 - 256", of_shards((0, 4096), (1, (1 << 64) - 256))),
        ("blob", "a manifest with a blob", manifest().lay(blob=bytearray(64))),
    ):
        yield f"060-shards-{name}", about, archive

    crcs = tensors().tables["crcs"]
    swapped = second(crcs=0).edit("storages", 0, crcs=1).set("crcs", crcs[::-1])
    large = manifest().edit("storages", 1, stored_len=1 << 40, raw_len=1 << 40)
    large.edit("shards", 1, index_off=1 << 41, file_len=1 << 42)
    for name, about, archive in (
        ("swapped", "two storages with each other's CRCs", swapped),
        ("too-many", "a CRC that no storage claims", tensors().set("crcs", crcs + [0])),
        ("chunk-record", "a chunk record", tensors().add("chunks", stored_len=100)),
        ("tebibyte", "a storage of 1 TiB with one CRC", large),
    ):
        yield f"064-{name}", about, archive

    yield "062-unused", "a storage that nothing names", one_tensor((2,)).storage(b"hidden")
    unused = manifest().edit("tensors", 1, storage=0)
    yield "062-unused-in-shard", "a storage in a shard that nothing names", unused


def of_slices():
    for name, about, archive in (
        ("rank", "a slice of rank 2 of a tensor of rank 1", one_slice((2,), (0, 0), (4, 4))),
        ("outside", "ends one beyond the global size", one_slice((2,), (3,), (4,))),
        ("wraps", "ends at 1 modulo 2^64", one_slice((2,), (U64,), (4,))),
        ("global-size", "a global size of 2^63", one_slice((0, 2), (0, 0), (0, 1 << 63))),
        ("product-empty", "2^80 but for 0", one_slice((0, 1, 1), (0,) * 3, (0, 1 << 40, 1 << 40))),
    ):
        yield f"070-{name}", about, archive
    items = one_slice((2,), (0,), (1 << 61,)).edit("tensors", 0, dtype=FLOAT32)
    yield "070-itemsize", "2^63 bytes in 2^61 elements", items

    for field in ("mesh", "ranks", "names"):
        archive = one_slice((2,), (0,), (4,)).edit("slices", 0, **{field: 0})
        yield f"071-no-mesh-{field}", f"no mesh, but {field}", archive
    bare = one_slice((2,), (0,), (4,)).edit("slices", 0, mesh_rank=1)
    # The ranks 3 and 1 are what follows the shape in the first; `ranks` names another pair.
    apart = meshed(ranks=(3, 1), coordinates=(1,)).edit("slices", 0, ranks=0)
    for name, about, archive in (
        ("mesh-none", "mesh_rank 1, but no mesh", bare),
        ("mesh-rank-65", "a mesh of rank 65", meshed((1,) * 65)),
        ("mesh-empty", "a mesh of no devices", meshed((2, 0))),
        ("mesh-too-large", "a mesh of 2^32 devices", meshed((1 << 16, 1 << 16))),
        ("coordinate", "coordinate 2 in a mesh of 2", meshed(coordinates=(2,))),
        ("rank-too-large", "global rank 2^32", meshed(ranks=(0, 1 << 32))),
        ("rank-twice", "a global rank twice", meshed(ranks=(3, 3))),
        ("ranks-apart", "ranks that do not follow the mesh", apart),
        ("mesh-overlaps", "two meshes that overlap", two_meshes((2, (3, 1)), (1, (9,)))),
        ("mesh-inside", "a mesh inside another", two_meshes((3, (1, 7, 8)), (1, (7,)))),
        ("names-without-ranks", "names, but no ranks", meshed(names=(b"dp",))),
        ("names-twice", "two dimensions dp", meshed((1, 1), ranks=(5,), names=(b"dp", b"dp"))),
        ("names-long", "a name of 257 bytes", meshed(ranks=(5, 6), names=(b"d" * 257,))),
        ("names-surrogate", "a surrogate", meshed(ranks=(5, 6), names=(b"\xed\xa0\x80",))),
        ("flags", "flags of a slice", meshed().edit("slices", 0, flags=1)),
        ("unnamed", "a slice that no tensor names", meshed().slice((0,), (4,))),
        ("beyond", "slice 1 of 1", meshed().edit("tensors", 0, slice=1)),
    ):
        yield f"071-{name}", about, archive
    swapped = sliced().edit("tensors", 0, slice=1).edit("tensors", 1, slice=0)
    yield "071-out-of-order", "the second slice is named first", swapped

    def placed(kind=SHARD, **fields):
        return meshed(placements=0).add("placements", kind=kind, **fields)

    swapped = sliced().edit("slices", 0, placements=1).edit("slices", 1, placements=0)
    for name, about, archive in (
        ("kind-3", "a placement of kind 3", placed(3)),
        ("reserved", "a reserved byte", placed(reserved=1)),
        ("replicate-dim", "Replicate with a dim", placed(REPLICATE, dim=1)),
        ("strided-no-factor", "_StridedShard without", placed(STRIDED_SHARD)),
        ("dim", "Shard(1) of a tensor of rank 1", placed(SHARD, dim=1)),
        ("unclaimed", "a placement of no slice", placed().add("placements")),
        ("beyond", "a slice with a placement beyond", meshed(placements=0)),
        ("out-of-order", "the second placement is named first", swapped),
    ):
        yield f"073-{name}", about, archive

    yield "074-dtype", "a run of uint8 and int8", sliced().edit("tensors", 1, dtype=1)
    mixed = runs(2).storage(b"first half").storage(b"secondhalf")
    for i in range(2):
        mixed.tensor((2, 3), storage=i, slice=i)
    mixed.slice((0, 0), (4, 3)).slice((0, 0), (5, 3))
    yield "074-global-shape", "a run of two global shapes", mixed


def of_attrs_and_shards():
    for name, about, archive in (
        ("unsorted", "b before a", attrs(b"b", b"a")),
        ("twice", "a name twice", attrs(b"a", b"b", b"b")),
        ("unsigned", "bytes are compared without sign", attrs("é".encode(), b"a")),
        ("surrogate", "a name with a surrogate", attrs(b"\xed\xa0\x80")),
        ("float", "an attribute of kind float", attrs(b"a").edit("attrs", 0, kind=FLOAT)),
        ("reserved", "a reserved byte", attrs(b"a").edit("attrs", 0, reserved=1)),
    ):
        yield f"080-{name}", about, archive
    digests = tensors().set("digests", [bytes(32)])
    yield "081-too-few", "one digest of two storages", digests

    for name, file in (
        ("parent", b"../x"),
        ("backslash", b"a\\b"),
        ("hidden", b".a"),
        ("empty", b""),
        ("newline", b"a.tssd\n"),
        ("not-ascii", "é.tssd".encode()),
        ("too-long", b"a" * 256),
        ("manifest", b"manifest.tssd"),
        ("manifest-case", b"Manifest.TSSD"),
    ):
        yield f"082-name-{name}", f"a shard named {file[:20]!r}", keyed("a").shard(file)
    twice = keyed("a").shard(b"b.tssd").shard(b"B.tssd", writer=1)
    yield "082-name-twice-case", "two shards of one name but for its case", twice
    for name, about, fields in (
        ("low", "below 4096", {"index_off": 4032}),
        ("unaligned", "no multiple of 64", {"index_off": 8200}),
        ("short", "167 bytes before the end", {"index_off": 8192, "file_len": 8192 + 167}),
        ("overflow", "at 2^64 - 64", {"index_off": (1 << 64) - 64}),
    ):
        archive = keyed("a").shard(b"b.tssd", **fields)
        yield f"082-index-{name}", f"the index of a shard is {about} of its file", archive
    outside = divergent(0, 1).set("shards", []).set("heap", b"leaf")
    yield "082-divergent-outside", "a divergent node in a file without shards", outside
    inside = divergent(0, 1, inside=lambda values: Box(DIVERGENT, [(0, values)]))
    yield "082-divergent-inside", "a divergent node in another", inside
    below = divergent(0, 1, inside=lambda values: Box(DIVERGENT, [(0, Box(LIST, [values]))]))
    yield "082-divergent-below", "a divergent node in a list in another", below


def of_payload():
    yield "090-first-byte", "the first byte of a storage", tensors().patch(4096, b"\xff")
    # With one chunk its CRC is that of the storage: both are changed, so that they agree.
    wrong = tensors().edit("storages", 0, crc32=1)
    wrong.set("crcs", [1] + wrong.tables["crcs"][1:])
    yield "090-crc", "the CRCs agree, but not with the bytes", wrong
    yield "091-crc", "the CRC of a storage", tensors().edit("storages", 1, crc32=1)
    yield "091-manifest", "the CRC of a storage of a manifest", manifest().edit(
        "storages", 1, crc32=1
    )
    # Two chunks of zeros and a short one. Their CRCs are right, that of the storage is not.
    chunks = bytes(1 << 20), bytes(1 << 20), bytes(100)
    large = manifest().edit("storages", 1, stored_len=(2 << 20) + 100, raw_len=(2 << 20) + 100)
    large.edit("shards", 1, index_off=4 << 20, file_len=8 << 20)
    large.set("crcs", large.tables["crcs"][:1] + [zlib.crc32(chunk) for chunk in chunks])
    large.edit("storages", 1, crc32=zlib.crc32(b"".join(chunks)) ^ 1)
    yield "091-manifest-chunks", "the CRC of a storage of three chunks in a manifest", large

    yield "092-after-first", "the byte after storage 0", tensors().patch(4096 + 100, b"\x01")
    yield "092-before-index", "the byte before the index", tensors().patch(4352 + 63, b"\x01")
    aligned = runs(1).storage(bytes(64), align_log2=13).tensor((2,))
    yield "092-before-first", "a byte before storage 0, at 8192", aligned.patch(4096, b"\x01")


SECTIONS = (
    of_head_and_trailer,
    of_root_and_tables,
    of_heap_and_dims,
    of_nodes,
    of_tensors,
    of_storages,
    of_slices,
    of_attrs_and_shards,
    of_payload,
)
# F-022 says of itself that no file can break it alone; F-072 is a rule for writers.
NOT_IN_FILES = {"F-022", "F-072"}


# ---- Writing them --------------------------------------------------------------------------------


def error_kinds():
    """The error kind of each rule: the last name in backticks of its paragraph in format.md."""
    text = (HERE.parent / "format.md").read_text(encoding="utf-8")
    rules = re.findall(r"^- \*\*(F-\d{3})\*\* (.*?)(?=^- |^\n|\Z)", text, re.M | re.S)
    named = {rule: re.findall(r"`([A-Z][A-Za-z]+)`", body) for rule, body in reversed(rules)}
    return {rule: names[-1] for rule, names in named.items()}


def make_vectors():
    """The files, by name, and the list of them for the manifest."""
    kinds = error_kinds()
    files, listed = {}, []
    for section in SECTIONS:
        for name, about, archive in section():
            assert name not in files, name
            files[name] = archive.build() if isinstance(archive, Archive) else archive
            rule = f"F-{name[:3]}"
            listed.append({"name": name, "rule": rule, "kind": kinds[rule], "about": about})
    missing = kinds.keys() - NOT_IN_FILES - {vector["rule"] for vector in listed}
    assert not missing, f"no vector breaks {sorted(missing)}"
    return files, listed


def main(arguments):
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    files, listed = make_vectors()
    path = HERE / "manifest.json"
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"valid": []}
    wanted = {"valid": written["valid"], "invalid": listed}
    folder = HERE / "invalid"
    present = {file.stem: file.read_bytes() for file in folder.glob("*.tssd")}
    if arguments:
        names = sorted(files.keys() | present.keys())
        stale = [name for name in names if files.get(name) != present.get(name)]
        if written != wanted:
            stale.append(path.name)
        print("\n".join(f"{name} is not what make_invalid.py writes" for name in stale) or "ok")
        return 1 if stale else 0
    folder.mkdir(exist_ok=True)
    for name in present.keys() - files.keys():
        (folder / f"{name}.tssd").unlink()
    for name, content in files.items():
        (folder / f"{name}.tssd").write_bytes(content)
    text = json.dumps(wanted, indent=1, ensure_ascii=False)
    path.write_bytes(text.encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
