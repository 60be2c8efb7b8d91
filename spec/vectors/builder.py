"""Builds archives, valid and invalid ones, for the vectors that a reader must reject.

An `Archive` has tables, which are filled in the order in which the format claims them. After an optional
change that violates a rule, `build` returns a file with correct checksums. The functions below it create
small valid archives, each with the features that some rules are about.
"""

import re
import struct
import sys
import zlib
from collections import Counter, namedtuple
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import writer  # noqa: E402
from reader import Blake3, blake3, content_digest, open_archive  # noqa: E402

NONE = 0xFFFF_FFFF
CHUNK = 1 << 20
DELTA_CHUNK = 1 << 23
CRC_PAGE = 1024  # entries of `crcs` for each entry of `crc_pages`
U64 = (1 << 64) - 1
NONE_LEAF, BOOL, INT, BIGINT, FLOAT, COMPLEX, STR, BYTES, DTYPE, SIZE = range(10)
DEVICE, TENSOR, OPAQUE, DISTRIBUTED = range(10, 14)
DICT, ORDERED_DICT, LIST, TUPLE, NAMEDTUPLE, DIVERGENT = range(32, 38)
K_INDEX, K_STR, K_INT, K_BIGINT, K_BOOL, K_FLOAT, K_NONE, K_BYTES, K_TUPLE = range(9)
# Numbers of dtypes
BOOL_DTYPE, INT8, UINT8, FLOAT32, BFLOAT16, COMPLEX128, BITS8 = 0x01, 0x10, 0x30, 0x51, 0x53, 0x72, 0x80
OTHER = 0x2000  # a number that is not in the table of dtypes
INT_CLASS, FLOAT_CLASS = 2, 4
REPLICATE, SHARD, STRIDED_SHARD = range(3)

# Layout, alignment and fields of each table. A record is a dict. A missing field is 0.
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
        "offset stored_len raw_len shard chunks crcs crc32 codec align_log2 chunk_log2 width"
        " subtrees",
    ),
    "chunks": ("<QII", 8, "offset stored_len codec"),
    "crcs": ("<I", 4, None),
    "crc_pages": ("<I", 4, None),
    "slices": (
        "<IIIIIIIBBH",
        4,
        "offsets global_shape mesh coordinates ranks placements names rank mesh_rank flags",
    ),
    "placements": ("<BBHIQ", 8, "kind reserved reserved2 dim split_factor"),
    "attrs": ("<QQBBHI", 8, "name value kind reserved reserved2 reserved3"),
    "digests": ("<32s", 1, None),
    "shards": (
        "<QQQII32sIIIIII",
        8,
        "name file_len index_off index_crc32 writer digest crcs_off crcs_len pages_crc32 others other_count"
        " reserved",
    ),
    "others": ("<QII", 8, "stored_len position crcs"),
    "dtypes": ("<QHHHBB", 8, "name number size bits values class"),
    "subtrees": ("<32s", 1, None),
    "base": ("<32s", 1, None),
    "base_storages": ("<I", 4, None),
}
ROOT_LEN = 8 * len(TABLES)
MIN_TAIL = ROOT_LEN + 64  # the smallest index, and the trailer
MIN_FILE = 4096 + MIN_TAIL
HEAD = "magic major minor data_start incompat ro_compat compat index_off index_len flags crc32"
TRAILER = (
    "index_off index_len root_off root_len index_crc32 index_codec flags prev_trailer_off file_len"
    " generation crc32 end_magic"
)

Key = namedtuple("Key", "kind content")
Leaf = namedtuple("Leaf", "kind a b count flags", defaults=(0, 0, 0, 0))
# `name` is the type name of a namedtuple, or the word `b` of another container.
Box = namedtuple("Box", "kind items name", defaults=(b"",))


def align_up(x, alignment):
    return -(-x // alignment) * alignment


def u64(number):
    return number & U64


def float_bits(number):
    return struct.unpack("<Q", struct.pack("<d", number))[0]


def chunk_subtrees(content, chunk_log2):
    """Returns the chaining values of the chunks of a storage."""
    tree = Blake3(subtree_log2=chunk_log2)
    for at in range(0, len(content), CHUNK):
        tree.add(content[at : at + CHUNK])
    return tree.subtrees() if content else []


def crc_pages(crcs):
    content = struct.pack(f"<{len(crcs)}I", *crcs)
    return [zlib.crc32(content[at : at + 4 * CRC_PAGE]) for at in range(0, len(content), 4 * CRC_PAGE)]


def pack(layout, fields, values):
    return struct.pack(layout, *(values.get(field, 0) for field in fields.split()))


def key(value):
    """Returns the key for a Python value. A tuple becomes a packed tuple."""
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
        return Key(K_FLOAT, float_bits(value))
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
    """The tables of an archive, filled in the order in which the format claims them.

    `build` derives offsets, lengths and checksums, unless they are overridden.
    """

    def __init__(self):
        self.tables = {name: [] for name in TABLES}
        self.tables["crc_pages"] = None  # derived from `crcs`, unless it is set
        self.heap_ranges = {}  # the heap range of each string
        self.named = {}  # the children of the root, by key
        self.blob = bytearray()
        self.raw_contents = []  # the raw bytes of each storage
        self.bases = []  # the base storage of each storage, or NONE
        self.head = {}
        self.trailer = {}
        self.root = {}
        self.alignments = {}  # the alignments of tables that have a wrong one
        self.gap = b"\0"  # the fill byte of gaps in the index
        self.before_root = b""
        self.after_root = b""
        self.patches = []
        self.at_stage = None  # the stage of `reader.py` that rejects the archive, if it is not `open`

    # Filling

    def heap_range(self, content):
        """Returns the heap range of a string. Adds the string if it is new."""
        if not content:
            return 0
        if content not in self.heap_ranges:
            self.heap_ranges[content] = len(content) << 32 | len(self.tables["heap"])
            self.tables["heap"] += content
        return self.heap_ranges[content]

    def vector(self, numbers):
        """Returns the offset of a vector in dims. Adds the vector if dims does not contain it."""
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
        """Adds the nodes in breadth-first order. Bytes in place of a word are added to the heap."""
        queue = [(Key(K_INDEX, 0), root)]
        by_key = [0]
        for node_key, value in queue:
            fields = {"kind": value.kind, "key_kind": node_key.kind, "key": self.to_word(node_key[1])}
            if isinstance(value, Box):
                keyed = value.kind not in (LIST, TUPLE)
                first = len(queue)
                items = [(key(k), v) for k, v in value.items] if keyed else list(value.items)
                queue += items if keyed else [(Key(K_INDEX, 0), v) for v in items]
                children = range(first, len(queue))
                by_key += sorted(children, key=lambda i: queue[i][0]) if keyed else children
                fields.update(count=len(children), a=first, b=self.to_word(value.name))
            elif value.kind == SIZE:
                fields.update(count=len(value.a), a=self.vector(map(u64, value.a)))
            else:
                fields.update(count=value.count, flags=value.flags)
                fields.update(a=self.to_word(value.a), b=self.to_word(value.b))
            self.add("nodes", **fields)
        self.tables["by_key"] = by_key
        for (k, _), node in zip(root.items, self.tables["nodes"][1:]):
            self.named[k] = node
        return self

    def to_word(self, content):
        return self.heap_range(content) if isinstance(content, bytes) else content

    def storage(self, content, **fields):
        """Adds an uncompressed storage. Adds its bytes to the blob unless `offset` is given."""
        size = 1 << fields.get("chunk_log2", 20)
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        return self.place(content, content, pieces, {"chunks": NONE, **fields})

    def compressed(self, content, width=1, given=None, raw=(), planes=(), tiers=(), **fields):
        """Adds a compressed storage. `given` has stored chunks by number.

        The chunks with the numbers in `raw` have codec 0, those in `planes` codec 2, those in `tiers` codec 4, the
        others codec 1.
        """
        record = {"chunks": len(self.tables["chunks"]), "codec": 1, "width": width, **fields}
        stored = []
        for number, start in enumerate(range(0, len(content), CHUNK)):
            codec = 0 if number in raw else 2 if number in planes else 4 if number in tiers else 1
            piece = encode_chunk(content[start : start + CHUNK], codec, width)
            piece = (given or {}).get(number, piece)
            self.add("chunks", offset=sum(map(len, stored)), stored_len=len(piece), codec=codec)
            stored.append(piece)
        return self.place(content, b"".join(stored), stored, record)

    def delta(self, content, chunks, width=2, base=0, **fields):
        """Adds a delta storage. `chunks` has codec and stored bytes of each one, `base` is its base storage."""
        record = {"chunks": len(self.tables["chunks"]), "codec": 2, "width": width, "chunk_log2": 23, **fields}
        stored = [piece for _, piece in chunks]
        for number, (codec, piece) in enumerate(chunks):
            self.add("chunks", offset=sum(map(len, stored[:number])), stored_len=len(piece), codec=codec)
        return self.place(content, b"".join(stored), stored, record, base)

    def place(self, content, stored, pieces, fields, base=NONE):
        record = {"stored_len": len(stored), "raw_len": len(content), "align_log2": 8}
        record.update(chunk_log2=20, crc32=zlib.crc32(content), crcs=len(self.tables["crcs"]), subtrees=NONE)
        record.update(fields)
        if "offset" not in record:
            start = align_up(4096 + len(self.blob), 1 << record["align_log2"])
            self.blob = self.blob.ljust(start - 4096, b"\0") + stored
            record["offset"] = start
        self.tables["crcs"] += map(zlib.crc32, pieces)
        self.raw_contents.append(content)
        self.bases.append(base)
        return self.add("storages", **record)

    def digested(self, subtrees=True):
        """Adds the digest of each storage, and the subtrees. Manifests and delta storages have no subtrees."""
        for record, content in zip(self.tables["storages"], self.raw_contents):
            has_subtrees = subtrees and record.get("codec") != 2
            entries = chunk_subtrees(content, record["chunk_log2"]) if has_subtrees else []
            if len(entries) > 1:
                record["subtrees"] = len(self.tables["subtrees"])
                self.tables["subtrees"] += entries
        return self.set("digests", map(blake3, self.raw_contents))

    def tensor(self, shape, dtype=UINT8, strides=None, **fields):
        record = {"dtype": dtype, "rank": len(shape), "shape": self.vector(shape)}
        record.update(strides=NONE if strides is None else self.vector(strides), slice=NONE)
        record.update(storage=NONE if 0 in shape else 0)
        return self.add("tensors", **{**record, **fields})

    def slice(self, offsets, global_shape, mesh=(), ranks=(), **known):
        """Adds a slice. `known` can have its coordinates, its names and its first placement."""
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
            record.update(names=self.vector(map(self.heap_range, known.pop("names"))))
        return self.add("slices", **{**record, **known})

    def attr(self, name, kind, value):
        return self.add("attrs", name=self.heap_range(name), value=self.to_word(value), kind=kind)

    def shard(self, name, **fields):
        record = {"file_len": 12288, "index_off": 8192, "index_crc32": 0x01020304, "digest": b"", "others": NONE}
        return self.add("shards", name=self.heap_range(name), **{**record, **fields})

    def dtype(self, name=b"float6_e3m2", number=OTHER, **fields):
        """Adds a Dtype record: by default that of a float of 6 bits, alone in its byte."""
        record = {"name": self.heap_range(name), "number": number, "size": 1, "bits": 6, "values": 1}
        return self.add("dtypes", **{**record, "class": FLOAT_CLASS, **fields})

    # Changes

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
        """Overrides derived fields of `head`, `trailer` or `root`, or entries of another attribute."""
        getattr(self, part).update(fields)
        return self

    def lay(self, **attributes):
        """Sets attributes of the archive."""
        for name, value in attributes.items():
            setattr(self, name, value)
        return self

    def misplace(self, table, shift=0, more=0):
        """Overrides the place of a table in the root: a later start, or more records."""
        start, count = self.places()[table]
        return self.override("root", **{table: (start + shift, count + more)})

    def based(self, digest=bytes(32)):
        """Makes the archive a delta, whose base has this content digest."""
        return self.set("base", [digest]).set("base_storages", self.bases)

    def only(self, stage):
        """Sets the stage that rejects the archive: `verify`, or `deep` verification, or `base`."""
        return self.lay(at_stage=stage)

    def patch(self, at, content):
        """Overwrites bytes of the finished file. The checksums are not updated."""
        self.patches.append((at, content))
        return self

    # Building

    def records(self, name):
        if self.tables[name] is None:
            return crc_pages(self.tables["crcs"])
        return self.tables[name]

    def places(self):
        """Returns the offset of each table in the index, and its number of records."""
        places, end = {}, 0
        for name, (layout, alignment, _) in TABLES.items():
            start = align_up(end, self.alignments.get(name, alignment))
            places[name] = start, len(self.records(name))
            end = start + len(self.records(name)) * struct.calcsize(layout)
        return places

    def build_index(self):
        index = bytearray()
        places = self.places()
        for name, (layout, _, fields) in TABLES.items():
            index = index.ljust(places[name][0], self.gap)
            for record in self.records(name):
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


# ---- Valid archives to start from ----------------------------------------------------------------


def keyed(*keys, kind=DICT):
    """A dict with these keys, or a dict with one container of another kind that has these keys."""
    box = Box(kind, [(k, Leaf(NONE_LEAF)) for k in keys])
    return Archive().tree(box if kind == DICT else Box(DICT, [("box", box)]))


def leaves():
    """One node of each kind that needs no storage."""
    items = {
        "none": Leaf(NONE_LEAF),
        "bool": Leaf(BOOL, 1),
        "int": Leaf(INT, u64(-12)),
        "bigint": Leaf(BIGINT, bigint(1 << 64)),
        "float": Leaf(FLOAT, float_bits(1.5)),
        "complex": Leaf(COMPLEX, float_bits(0.5), float_bits(-0.0)),
        "str": Leaf(STR, b"text"),
        "bytes": Leaf(BYTES, b"\0\xff"),
        "dtype": Leaf(DTYPE, BFLOAT16),
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
    """A leaf in a storage, and a leaf in the index."""
    items = [("long", Leaf(kind, flags=1)), ("other", Leaf(STR, b"text"))]
    return Archive().tree(Box(DICT, items)).storage(content)


def runs(*lengths):
    """A dict of tensor leaves `0`, `1` …, with runs of these numbers of records."""
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


def other_dtype(name=b"float6_e3m2", number=OTHER, **fields):
    """A tensor of a dtype that the file describes, in a storage of 64 bytes."""
    return one_tensor((4,), number).dtype(name, number, **fields)


def other_dtypes(*named):
    """Tensors of dtypes that the file describes. `named` has the name and the number of each."""
    archive = runs(*[1] * len(named)).storage(bytes(range(64)))
    for _, number in named:
        archive.tensor((4,), number)
    for name, number in named:
        archive.dtype(name, number)
    return archive


def add_two_slices(archive):
    """Adds a run of two records: the halves of a tensor of 4 x 3, sharded on a mesh of 2."""
    for i in range(2):
        archive.tensor((2, 3), storage=i, slice=i)
    for i in range(2):
        known = {"coordinates": (i,), "ranks": (0, 1), "names": (b"dp",), "placements": i}
        archive.slice((2 * i, 0), (4, 3), (2,), **known)
    archive.add("placements", kind=SHARD).add("placements", kind=SHARD)
    return archive


def sliced():
    return add_two_slices(runs(2).storage(b"first half").storage(b"secondhalf"))


def manifest():
    """The same two halves, each in its own shard, and an attribute."""
    archive = runs(2)
    for i in range(2):
        archive.storage(bytes(100), offset=4096, shard=i)
    add_two_slices(archive).attr(b"format", STR, b"pt")
    return archive.shard(b"a.tssd").shard(b"b.tssd", writer=1)


def one_slice(shape, offsets, global_shape, *arguments, **fields):
    """A tensor in a storage of 64 bytes, and its slice."""
    return one_tensor(shape, slice=0).slice(offsets, global_shape, *arguments, **fields)


def meshed(mesh=(2,), **known):
    """A tensor in a storage of 64 bytes, and its slice on a mesh."""
    return one_slice((2,), (0,), (4,), mesh, **known)


def one_mesh(mesh):
    """As `meshed`, but the slice claims ranks of the mesh that dims does not contain."""
    archive = meshed(mesh)
    start = archive.tables["slices"][0]["mesh"]
    return archive.edit("slices", 0, ranks=start + len(mesh))


def two_meshes(*meshes):
    """Two tensors without elements, of global sizes 8 and 9, each on a mesh of one dimension.

    A mesh is given by its size and its ranks.
    """
    archive = runs(1, 1).tensor((0,), slice=0).tensor((0,), slice=1)
    for i, (size, ranks) in enumerate(meshes):
        archive.slice((0,), (8 + i,), (size,), ranks)
    return archive


def divergent(*writers, inside=lambda values: values):
    """A manifest with a divergent leaf: each writer has another value."""
    values = Box(DIVERGENT, [(writer, Leaf(INT, i)) for i, writer in enumerate(writers)])
    return Archive().tree(Box(DICT, [("leaf", inside(values))])).shard(b"a.tssd")


def attrs(*names):
    archive = keyed("a")
    for name in names:
        archive.attr(name, INT, 1)
    return archive


def nested(levels):
    """Containers with this number of levels, including the root."""
    box = Box(LIST, [])
    for _ in range(levels - 2):
        box = Box(LIST, [box])
    return Archive().tree(Box(DICT, [("list", box)]))


def packed_nested(levels):
    return struct.pack("<IB", 1, K_TUPLE) * (levels - 1) + struct.pack("<I", 0)


def packed_key(content):
    return keyed(Key(K_TUPLE, content))


# ---- Compressed archives -------------------------------------------------------------------------

BYTE_RUN = re.compile(rb"(.)\1{7,}", re.S)
MAX_BLOCK = 1 << 17


def encode_chunk(content, codec, width):
    if codec == 0:
        return content
    if codec == 4:
        return encode_tiers(content, width)
    return encode_planes(content, width) if codec == 2 else frame(apply_shuffle(content, width))


def apply_shuffle(content, width):
    """Shuffles bytes: all first bytes of the elements of `width` bytes, then all second bytes, and so on."""
    whole = len(content) // width * width
    planes = (content[place:whole:width] for place in range(width))
    return b"".join(planes) + content[whole:]


def block(kind, size, content, last=False):
    return struct.pack("<I", size << 3 | kind << 1 | last)[:3] + content


# Cached: a regular expression over a MiB is slow, and many vectors have the same content.
@lru_cache(maxsize=16)
def blocks(content):
    """Returns the blocks of a frame: RLE blocks for runs of a byte, and raw blocks between them."""
    parts, end = [], 0
    for match in (*BYTE_RUN.finditer(content), None):
        start = match.start() if match else len(content)
        pieces = (content[at : min(at + MAX_BLOCK, start)] for at in range(end, start, MAX_BLOCK))
        parts += ((0, len(piece), piece) for piece in pieces)
        if match:
            sizes = (min(MAX_BLOCK, match.end() - at) for at in range(start, match.end(), MAX_BLOCK))
            parts += ((1, size, match[1]) for size in sizes)
            end = match.end()
    return b"".join(block(*part, last=part is parts[-1]) for part in parts)


def frame(content, body=None, size=None, **header):
    """A zstd frame with a single segment and simple blocks. Its bytes do not depend on a library."""
    size = len(content) if size is None else size
    return frame_head(size, **header) + (blocks(content) if body is None else body)


def frame_head(size, flags=0, window=None, dictionary=b""):
    """The header of a frame: magic, descriptor with `flags` added, window byte if given, and content size."""
    code = 0 if size < 256 and window is None else 1 if 256 <= size < 65792 else 2
    size_field = (
        bytes([size & 255]),
        struct.pack("<H", size - 256 & 0xFFFF),
        struct.pack("<I", size),
    )
    descriptor = code << 6 | (window is None) << 5 | flags | (0, 1, 2, 0, 3)[len(dictionary)]
    window_field = b"" if window is None else bytes([window])
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + window_field + dictionary + size_field[code]


Coded = namedtuple("Coded", "frame")


def split_planes(content, width, rotate=True):
    """Returns the byte planes of the elements of `width` bytes, and the tail."""
    whole = len(content) // width * width
    elements = content[:whole]
    if rotate and width > 1:
        # In one integer, the highest bit of each element moves to its lowest one, all other bits one up.
        number = int.from_bytes(elements, "little")
        high_bits = int.from_bytes(b"\x80".rjust(width, b"\0") * (whole // width), "little")
        number = (number & ~high_bits) << 1 | (number & high_bits) >> 8 * width - 1
        elements = number.to_bytes(whole, "little")
    return [elements[place::width] for place in range(width)], content[whole:]


def join_planes(planes, tail=b"", lengths=None):
    """A stored chunk of codec 2, of raw planes and `Coded` ones. `lengths` has other lengths by number."""
    table, stored = b"", b""
    for number, plane in enumerate(planes):
        is_raw = not isinstance(plane, Coded)
        piece = plane if is_raw else plane.frame
        table += struct.pack("<I", is_raw << 31 | (lengths or {}).get(number, len(piece)))
        stored += piece
    return table + stored + tail


def encode_planes(content, width, rotate=True):
    """A stored chunk of codec 2. Of the planes, those are coded that get shorter."""
    planes, tail = split_planes(content, width, rotate)
    frames = [Coded(frame(plane)) for plane in planes]
    shorter = [b if len(b.frame) < len(a) else a for a, b in zip(planes, frames)]
    return join_planes(shorter, tail)


TIERS_BLOCK = 1 << 15  # bytes of a block of a plane in tiers
CODE_BITS = 2, 2, 4  # bits of a code of tiers 1 to 3
SYMBOLS = 3, 3, 15  # the number of symbols of tiers 1 to 3, which is the escape too
TIER_GROUP = 32  # bytes of a group of codes


class TiersBlock:
    """A block in tiers: the counts, the codes of tiers 1 to 3, and the bytes of tier 4."""

    def __init__(self, content, symbols):
        self.tiers, start = [], 0
        for size in SYMBOLS:
            own = symbols[start : start + size]
            start += size
            codes = bytes(own.index(byte) if byte in own else size for byte in content)
            content = bytes(byte for byte, code in zip(content, codes) if code == size)
            self.tiers.append(codes)
        self.tiers.append(content)
        self.counts = list(map(len, self.tiers[1:]))

    def encode(self):
        groups = (pack_codes(codes, bits) for codes, bits in zip(self.tiers, CODE_BITS))
        return struct.pack("<3H", *self.counts) + b"".join(groups) + self.tiers[3]


def pack_codes(codes, bits):
    """Returns the groups of codes. The rest of the last group is 0."""
    size = TIER_GROUP * 8 // bits
    packed = b""
    for start in range(0, len(codes), size):
        group = codes[start : start + size]
        rows = (group[at : at + TIER_GROUP] for at in range(0, len(group), TIER_GROUP))
        # In one integer, each row of 32 codes moves up by the bits of the codes below it.
        number = sum(int.from_bytes(row, "little") << bits * place for place, row in enumerate(rows))
        packed += number.to_bytes(TIER_GROUP, "little")
    return packed


class Tiers:
    """The parts of a stored chunk of codec 4. Vectors change them."""

    def __init__(self, content, width, symbols=None, rotate=True):
        *planes, last = split_planes(content, width, rotate)[0]
        self.planes = b"".join(planes)
        self.symbols = frequent_bytes(last) if symbols is None else symbols
        parts = (last[at : at + TIERS_BLOCK] for at in range(0, len(last), TIERS_BLOCK))
        self.blocks = [TiersBlock(part, self.symbols) for part in parts]
        self.tail = content[len(content) // width * width :]

    def encode(self):
        return self.planes + self.symbols + b"".join(block.encode() for block in self.blocks) + self.tail


def frequent_bytes(content):
    """Returns symbols: the most frequent bytes, the most frequent one first, and zeros if there are fewer."""
    counts = Counter(content).most_common(sum(SYMBOLS))
    return bytes(byte for byte, _ in counts).ljust(sum(SYMBOLS), b"\0")


def encode_tiers(content, width, **fields):
    """A stored chunk of codec 4."""
    return Tiers(content, width, **fields).encode()


FLOATS = struct.pack("<f", 1.5) * 100  # 400 bytes. Shuffled by 4, they are four runs
# 400 bytes. Of the planes, only the last one gets shorter when it is coded
WEIGHTS = struct.pack("<100f", *((-1) ** i * (1 + i * 37 % 100 / 100) for i in range(100)))


def compressed(width=4, content=FLOATS, **fields):
    """A float32 tensor in a compressed storage of one chunk."""
    archive = runs(1).compressed(content, width, **fields)
    return archive.tensor((len(content) // 4,), FLOAT32)


def planar(stored=None, content=WEIGHTS, width=4):
    """A float32 tensor in a storage of one chunk of codec 2, which is `stored` if that is given."""
    given = None if stored is None else {0: stored}
    return compressed(width, content, given=given, planes=(0,))


def planar_with(number, plane, content=WEIGHTS):
    """As `planar`, but with another plane of this number."""
    planes, tail = split_planes(content, 4)
    planes = [Coded(frame(each)) if i == 3 else each for i, each in enumerate(planes)]
    planes[number] = plane
    return planar(join_planes(planes, tail), content)


def exponent_rank(i):
    """The place of exponent i of `EXPONENTS` in the order of frequency."""
    return 2 * (i // 25) + 6 if i % 25 == 0 else 3 + i // 5 % 3 if i % 5 == 0 else i % 3


# 250 bfloat16 elements. Of the exponents, 50 have a code in tier 2, of these 10 in tier 3, and of these 2 in tier 4.
# The last codes of tiers 2 and 3 are 0.
EXPONENTS = bytes(126 - exponent_rank((i + 16) % 250) for i in range(250))
SPREAD = struct.pack("<250H", *((i % 2) << 15 | each << 7 | i * 37 % 128 for i, each in enumerate(EXPONENTS)))
SPREAD_SYMBOLS = bytes(range(126, 105, -1))


def tiered(stored=None, content=SPREAD, width=2):
    """A tensor in a storage of one chunk of codec 4, which is `stored` if that is given."""
    stored = encode_tiers(SPREAD, 2, symbols=SPREAD_SYMBOLS) if stored is None else stored
    return runs(1).compressed(content, width, {0: stored}, tiers=(0,)).tensor((len(content),))


def tiered_with(counts=None, tiers=None):
    """As `tiered`, but with these counts. `tiers` has tiers, or functions of the old ones, by their number."""
    chunk = Tiers(SPREAD, 2, SPREAD_SYMBOLS)
    (only,) = chunk.blocks
    only.counts = counts or only.counts
    for number, tier in (tiers or {}).items():
        only.tiers[number - 1] = tier(only.tiers[number - 1]) if callable(tier) else tier
    return tiered(chunk.encode())


def fine(**fields):
    """A tensor in a storage of three chunks of 4 KiB. The last chunk is shorter."""
    content = bytes(number % 251 for number in range(9000))
    archive = runs(1).storage(content, chunk_log2=12).tensor((9000,))
    return archive.edit("storages", 0, **fields) if fields else archive


def three_chunks():
    """A tensor in a storage of three chunks: a MiB of 0, a MiB of 1, and a raw chunk."""
    content = bytes(CHUNK) + b"\1" * CHUNK + bytes(range(100))
    return runs(1).compressed(content, raw=(2,)).tensor((4,))


def two_compressed():
    """Two tensors, each in its own compressed storage."""
    archive = runs(1, 1).compressed(FLOATS, 4).compressed(bytes(1000))
    return archive.tensor((100,), FLOAT32).tensor((1000,), storage=1)


def framed(content):
    """A tensor in a compressed storage of 400 zeros, with a given frame."""
    return compressed(1, bytes(400), given={0: content}).only("deep")


# ---- Shard sets ----------------------------------------------------------------------------------


class ShardSet:
    """The directory of a shard set: a manifest, and the archives that it describes."""

    def __init__(self, manifest, files):
        self.manifest = manifest
        self.files = {name: archive.build() for name, archive in files.items()}
        self.links = {}
        self.at_stage = None
        for i, (name, archive) in enumerate(files.items()):
            trailer = struct.unpack("<QQIIIHHQQII8s", self.files[name][-64:])
            fields = {"index_off": trailer[0], "index_crc32": trailer[4], "file_len": trailer[8]}
            pages = archive.records("crc_pages")
            fields.update(zip(("crcs_off", "crcs_len"), archive.places()["crcs"]))
            fields.update(pages_crc32=zlib.crc32(struct.pack(f"<{len(pages)}I", *pages)))
            manifest.shard(name.encode(), writer=i, **fields)
            if archive.tables["digests"]:
                digest = content_digest(open_archive(self.files[name]))
                manifest.edit("shards", i, digest=digest)

    def record(self, i, **fields):
        """Edits the record of a shard in the manifest. A function gets the old value."""
        record = self.manifest.tables["shards"][i]
        for name, value in fields.items():
            record[name] = value(record[name]) if callable(value) else value
        return self

    def replace(self, name, content):
        self.files[name] = content
        return self

    def remove(self, name):
        del self.files[name]
        return self

    def link(self, name, target):
        """Moves a file to another name, and replaces it by a link."""
        self.files[target] = self.files.pop(name)
        self.links[name] = target
        return self

    def only(self, stage):
        self.at_stage = stage
        return self

    def build(self):
        return {"manifest.tssd": self.manifest.build(), **self.files}


def half(i, key="half", compress=False, more=b"", **packing):
    """The archive of a writer: one half of a tensor. With `more`, also another tensor."""
    items = [(key, Leaf(TENSOR, 0, count=1)), ("more", Leaf(TENSOR, 1, count=1))]
    archive = Archive().tree(Box(DICT, items if more else items[:1]))
    add_half(archive, i, compress, **packing).tensor((2, 50), slice=0)
    if more:
        archive.storage(more).tensor((len(more),), storage=1)
    return archive.slice((2 * i, 0), (4, 50))


HALVES = b"1" * 100, b"2" * 100


def add_half(archive, i, compress, contents=HALVES, **fields):
    return (archive.compressed if compress else archive.storage)(contents[i], **fields)


def shard_set(digests=False, compress=False, more=b"", **packing):
    """Two archives with the halves of a tensor of 4 x 50, and their manifest.

    If `digests` is True, all three have correct digests. If it is bytes, all digests are these bytes.
    `contents` has the bytes of the two storages, at least 100 each.
    """
    halves = [half(i, compress=compress, more=more, **packing) for i in range(2)]
    manifest = runs(2)
    for i, archive in enumerate(halves):
        offset = archive.tables["storages"][0]["offset"]
        add_half(manifest, i, compress, offset=offset, shard=i, **packing)
        manifest.tensor((2, 50), storage=i, slice=i)
    for i in range(2):
        manifest.slice((2 * i, 0), (4, 50))
    for archive in (*halves, manifest) if digests else ():
        archive.digested(subtrees=archive is not manifest)
        if isinstance(digests, bytes):
            archive.set("digests", [digests] * len(archive.raw_contents))
    return ShardSet(manifest, {"a.tssd": halves[0], "b.tssd": halves[1]})


# ---- Distributed leaves --------------------------------------------------------------------------

FINE = 0  # the `chunk_log2` of a distribution with fine chunks
SHARDED, STRIDED = {"kind": SHARD}, {"kind": STRIDED_SHARD, "split_factor": 2}
ON_TWO = {"mesh": (2,), "ranks": (0, 1), "placements": 0}  # the fields of a slice on a mesh of two writers


def distribution(group=0, chunk_log2=20):
    return group << 32 | chunk_log2


def distributed(shape=(4,), placed=(SHARDED,), inside=lambda leaf: leaf, tensor=(), **fields):
    """A manifest of one distributed leaf on a mesh of two writers.

    `placed` has its placements, `tensor` fields of its record, and `fields` are those of its slice.
    """
    leaf = Leaf(DISTRIBUTED, 0, distribution(), count=1)
    archive = Archive().tree(Box(DICT, [("leaf", inside(leaf))]))
    archive.tensor(shape, **{"storage": NONE, "slice": 0, **dict(tensor)})
    archive.slice(**{"offsets": (0,) * len(shape), "global_shape": shape, **ON_TWO, **fields})
    return two_shards(archive, *placed)


def two_shards(archive, *placements):
    for placement in placements:
        archive.add("placements", **placement)
    return archive.shard(b"a.tssd").shard(b"b.tssd", writer=1)


def distributed_pair(*distributions, slices=(0, 0), **fields):
    """A manifest of two distributed leaves. `fields` are those of the second record."""
    items = [(str(i), Leaf(DISTRIBUTED, i, b, count=1)) for i, b in enumerate(distributions)]
    archive = Archive().tree(Box(DICT, items)).tensor((4,), storage=NONE, slice=slices[0])
    archive.tensor((4,), **{"storage": NONE, "slice": slices[1], **fields})
    for _ in sorted(set(slices)):
        archive.slice((0,), (4,), **ON_TWO)
    return two_shards(archive, SHARDED)


def rows(i, names=("rows",), storages=(0,), box=lambda leaf: leaf, content=None, compress=False, **fields):
    """The archive of a writer: two of the four rows of a tensor, as a leaf for each name and number of a storage.

    `fields` are those of the records of tensors, storages and slices.
    """
    items = [(name, box(Leaf(TENSOR, number, count=1))) for number, name in enumerate(names)]
    archive = Archive().tree(Box(DICT, items))
    for _ in sorted(set(storages)):
        add = archive.compressed if compress else archive.storage
        add(content or HALVES[i], **fields.get("storage", {}))
    for number in storages:
        archive.tensor(**{"shape": (2, 50), "storage": number, "slice": 0, **fields.get("tensor", {})})
    part = {"offsets": (2 * i, 0), "global_shape": (4, 50), **ON_TWO, "coordinates": (i,), **fields.get("slice", {})}
    return archive.slice(**part).add("placements", **SHARDED)


def rows_set(first=None, groups=(0,), items=(), others=NONE, second=None, third=None):
    """A shard set with a distributed leaf of four rows for each of the groups.

    `first` and `second` replace the archives of the writers, and `third` is one more. `items` are tensor leaves of the
    manifest, in a storage of its own. `others` is that of the Shard records.
    """
    leaves = [Leaf(DISTRIBUTED, i, distribution(group), count=1) for i, group in enumerate(groups)]
    manifest = Archive().tree(Box(DICT, [*zip(row_names(groups), leaves), *items]))
    if items:
        manifest.storage(HALVES[0], offset=4096)
    for _ in groups:
        manifest.tensor((4, 50), storage=NONE, slice=0)
    for _ in items:
        manifest.tensor((100,))
    manifest.slice((0, 0), (4, 50), **ON_TWO).add("placements", **SHARDED)
    archives = [archive or rows(i, row_names(groups), groups) for i, archive in enumerate((first, second))]
    archives += [third] if third else []
    files = ShardSet(manifest, dict(zip(("a.tssd", "b.tssd", "c.tssd"), archives)))
    return files.record(0, others=others).record(1, others=others)


def row_names(groups):
    return ("rows", "more rows")[: len(groups)]


MORE = b"more" * 16
DISTRIBUTIONS = {"w": distribution(0), "tied": distribution(0), "strided": distribution(1, FINE)}


def mixed_leaves(lengths):
    """The leaves of `mixed_set`, with these numbers of records. The others are distributed."""
    names, firsts = ("w", "tied", "more", "strided"), [0]
    items = []
    for name in names:
        count = lengths.get(name, 1)
        is_tensor = name in lengths
        items.append((name, Leaf(TENSOR if is_tensor else DISTRIBUTED, firsts[-1], 0, count)))
        firsts.append(firsts[-1] + count)
    archive = Archive().tree(Box(DICT, items))
    for name in DISTRIBUTIONS.keys() - lengths.keys():
        archive.at(name, b=DISTRIBUTIONS[name])
    return archive


def mixed_archive(i, **fields):
    """The archive of a writer of `mixed_set`. `fields` are those of storages, by the name of their leaf."""
    archive = mixed_leaves({"w": 1, "tied": 1, "more": 1, "strided": 2})
    archive.storage(HALVES[i], **fields.get("w", {})).storage(MORE, **fields.get("more", {}))
    archive.storage(b"%d" % i * 4, **{"chunk_log2": 12, **fields.get("strided", {})})
    archive.tensor((2, 50), slice=0).tensor((2, 50), slice=0).tensor((64,), storage=1)
    for piece in range(2):
        archive.tensor((2,), storage=2, slice=1 + piece, byte_offset=2 * piece)
    archive.slice((2 * i, 0), (4, 50), **ON_TWO, coordinates=(i,))
    for piece in range(2):
        archive.slice((4 * piece + 2 * i,), (8,), **{**ON_TWO, "placements": 1}, coordinates=(i,))
    return archive.add("placements", **SHARDED).add("placements", **STRIDED)


def mixed_set(first=None, with_others=True):
    """A shard set with two groups: two tied leaves of four rows, and a leaf of which each writer has two regions.

    A tensor leaf has a storage between theirs, of the first writer. `first` replaces the archive of this writer. If
    `with_others`, the places of storages follow from the manifest.
    """
    manifest = mixed_leaves({"more": 1}).storage(MORE, offset=4352)
    manifest.tensor((4, 50), slice=0, storage=NONE).tensor((4, 50), slice=0, storage=NONE)
    manifest.tensor((64,)).tensor((8,), slice=1, storage=NONE)
    manifest.slice((0, 0), (4, 50), **ON_TWO).slice((0,), (8,), **{**ON_TWO, "placements": 1})
    manifest.add("placements", **SHARDED).add("placements", **STRIDED)
    files = ShardSet(manifest, {"a.tssd": first or mixed_archive(0), "b.tssd": mixed_archive(1)})
    if with_others:
        manifest.add("others", stored_len=len(MORE), position=1, crcs=1)
        for i in range(2):
            files.record(i, others=0, other_count=1)
    return files


def explicit_set():
    """The archives of `mixed_set`, and a manifest without distributed leaves that means the same."""
    manifest = mixed_leaves({"w": 2, "tied": 2, "more": 1, "strided": 4})
    for i in range(2):
        manifest.storage(HALVES[i], offset=4096, shard=i)
        if i == 0:
            manifest.storage(MORE, offset=4352)
        manifest.storage(b"%d" % i * 4, offset=4608, shard=i, chunk_log2=12)
    for _ in range(2):
        manifest.tensor((2, 50), slice=0).tensor((2, 50), storage=3, slice=1)
    manifest.tensor((64,), storage=1)
    for number in range(4):
        storage, piece = (2, 4)[number // 2], number % 2
        manifest.tensor((2,), storage=storage, slice=2 + number, byte_offset=2 * piece)
    for i in range(2):
        manifest.slice((2 * i, 0), (4, 50), **ON_TWO, coordinates=(i,))
    for number in range(4):
        i, piece = divmod(number, 2)
        manifest.slice((4 * piece + 2 * i,), (8,), **{**ON_TWO, "placements": 1}, coordinates=(i,))
    manifest.add("placements", **SHARDED).add("placements", **STRIDED)
    return ShardSet(manifest, {"a.tssd": mixed_archive(0), "b.tssd": mixed_archive(1)})


# ---- Deltas --------------------------------------------------------------------------------------


def patterns(*numbers, width=2):
    return writer.pack_numbers(writer.PATTERN_CODES[width], numbers)


def add_to(content, differences, width=2):
    """Returns a content with these differences added to elements, by their number."""
    numbers = list(writer.patterns(content, width))
    for place, difference in differences.items():
        numbers[place] = (numbers[place] + difference) % (1 << 8 * width)
    return patterns(*numbers, width=width)


# bfloat16 weights. Of the even elements the magnitude is below `THRESHOLD`, of the odd ones it is not.
COUNT = 203
THRESHOLD = 0x4000
OLD = patterns(*((i % 3 == 0) << 15 | (0x4000 if i % 2 else 0x3C00) + i * 7 % 256 for i in range(COUNT)))
# In a delta, the last two go on in the wide column, and the last one in the exception column.
NEW = add_to(OLD, {**{i: (-1) ** i for i in range(0, 195, 5)}, 7: 20, 11: -500})

# Two blocks of elements of one byte. The second one has 64 elements.
OLD_BLOCKS = bytes(writer.BLOCK + 64)
NEW_BLOCKS = add_to(OLD_BLOCKS, {1: 1, 300: 2, writer.BLOCK + 1: 1, writer.BLOCK + 2: -1}, width=1)


def compare(thresholds=(), bitmaps=0, old=OLD, new=NEW, width=2, **fields):
    """The delta chunk of two contents. `fields` are as in `edit_chunk`."""
    return edit_chunk(writer.compare_chunks(old, new, width, thresholds, bitmaps), **fields)


def compare_blocks(**fields):
    """A delta chunk of two blocks."""
    return compare(old=OLD_BLOCKS, new=NEW_BLOCKS, width=1, **fields)


def edit_chunk(chunk, columns=None, **fields):
    """Replaces parts of a delta chunk. `columns` has columns, or functions of the old ones, by their number."""
    for number, column in (columns or {}).items():
        chunk.columns[number] = column(chunk.columns[number]) if callable(column) else column
    for name, value in fields.items():
        setattr(chunk, name, value)
    return chunk


def listing(*classes, thresholds=(), bitmaps=0):
    """A delta chunk of one block of width 2 that lists these differences, by class and rank.

    Each class has a number of elements, which determines the length of a bitmap.
    """
    parts = [
        writer.encode_positions(size, list(differences), bitmaps >> number & 1)
        for number, (size, differences) in enumerate(classes)
    ]
    values, wide, exceptions = writer.encode_differences([list(each.values()) for _, each in classes], 2)
    columns = [column for each in zip(parts, values) for column in each] + [wide, exceptions]
    return writer.DeltaChunk(2, list(thresholds), bitmaps, [zlib.crc32(NEW)], [list(map(len, parts))], columns)


def delta(stored=None, old=OLD, new=NEW, width=2, codec=3):
    """A tensor in a delta storage of one chunk, which is `stored` if that is given."""
    stored = compare() if stored is None else stored
    chunk = stored if isinstance(stored, bytes) else stored.encode()
    archive = runs(1).delta(new, [(codec, chunk)], width).tensor((len(new),))
    return archive.digested().based(base_digest(old))


def blocks_delta(stored):
    """As `delta`, of two blocks."""
    return delta(stored, OLD_BLOCKS, NEW_BLOCKS, 1)


def two_chunks(codec=3, second=None, content=NEW):
    """A delta of two chunks: one without bytes, for 8 MiB, and the given one.

    The digests are zeros, because only the stage `base` compares them with the content.
    """
    second = compare().encode() if second is None else second
    archive = runs(1).delta(bytes(DELTA_CHUNK) + content, [(3, b""), (codec, second)]).tensor((4,))
    return archive.set("digests", [bytes(32)]).based()


def base_of(*contents):
    """An archive of tensors, each in its own storage. Longer ones are compressed."""
    archive = runs(*[1] * len(contents))
    for number, content in enumerate(contents):
        (archive.storage if len(content) < 4096 else archive.compressed)(content)
        archive.tensor((len(content),), storage=number)
    return archive


@lru_cache(maxsize=16)
def base_digest(old):
    return content_digest(open_archive(base_of(old).build()))


class DeltaPair:
    """The directory of a delta and its base."""

    def __init__(self, archive, base):
        self.base = base.build()
        self.delta = archive.based(content_digest(open_archive(self.base)))
        self.at_stage = None

    def only(self, stage):
        self.at_stage = stage
        return self

    def build(self):
        return {"base.tssd": self.base, "delta.tssd": self.delta.build()}


def delta_pair(stored=None, **contents):
    """The delta of `delta`, and its base."""
    return DeltaPair(delta(stored, **contents), base_of(contents.get("old", OLD)))


def blocks_pair(stored):
    """The delta of `blocks_delta`, and its base."""
    return DeltaPair(blocks_delta(stored), base_of(OLD_BLOCKS))


def two_deltas(*base_storages):
    """A delta of two storages, and its base."""
    old, new = (OLD, add_to(OLD, {0: 7})), (NEW, add_to(OLD, {0: 7, 1: 1}))
    archive = runs(1, 1)
    for number, pair in enumerate(zip(old, new)):
        chunk = compare(old=pair[0], new=pair[1]).encode()
        archive.delta(pair[1], [(3, chunk)], base=base_storages[number]).tensor((4,), storage=number)
    return DeltaPair(archive.digested(), base_of(*old))
