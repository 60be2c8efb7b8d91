"""Corruptions: archives with correct checksums and one invalid field.

Each violates one rule by one field of one table: its value is just outside the valid range, or contradicts another
table. `table` and `field` name the field:

- `table` is the name of a table of the index, `head`, `trailer` or `root`. For bytes of the payload it is
  `blob`, `frame`, `planes`, `tiers` or `delta`.
- `field` is the name of the field. The words of nodes, and keys, have a meaning that depends on the kind. So
  their fields are `KIND-FIELD`, such as `size-count`, and `key-KIND`. An entry of `dims`, `heap` or `by_key`
  has the name of the thing that contains it. `records` is the number of records of a table.
"""

import struct
import zlib
from collections import namedtuple

from builder import (
    Archive,
    BIGINT,
    BOOL,
    BYTES,
    Box,
    CHUNK,
    COMPLEX128,
    COUNT,
    Coded,
    DEVICE,
    DICT,
    DISTRIBUTED,
    DIVERGENT,
    DTYPE,
    FLOAT32,
    INT,
    INT8,
    INT_CLASS,
    K_BIGINT,
    K_BOOL,
    K_BYTES,
    K_INDEX,
    K_INT,
    K_NONE,
    K_STR,
    Key,
    LIST,
    Leaf,
    MIN_TAIL,
    NAMEDTUPLE,
    NONE,
    NONE_LEAF,
    ON_TWO,
    OPAQUE,
    ORDERED_DICT,
    OTHER,
    REPLICATE,
    ROOT_LEN,
    SHARD,
    SHARDED,
    SIZE,
    SPREAD,
    STR,
    STRIDED_SHARD,
    TABLES,
    TENSOR,
    THRESHOLD,
    TUPLE,
    U64,
    UINT8,
    WEIGHTS,
    attrs,
    bigint,
    block,
    compare,
    compressed,
    delta,
    distributed,
    distribution,
    divergent,
    encode_planes,
    encode_tiers,
    fine,
    frame,
    framed,
    keyed,
    leaf,
    leaves,
    listing,
    manifest,
    meshed,
    one_slice,
    one_tensor,
    other_dtype,
    packed,
    packed_key,
    planar,
    planar_with,
    runs,
    sliced,
    stored,
    tensors,
    three_chunks,
    tiered,
    tiered_with,
    two_shards,
)

Corruption = namedtuple("Corruption", "rule table field about archive")


def corruptions():
    """Yields all corruptions. No two of them have the same rule, table and field."""
    for section in SECTIONS:
        for rule, table, field, about, archive in section():
            yield Corruption(rule, table, field, about, archive)


# ---- Head, trailer, root -------------------------------------------------------------------------


def head_and_trailer_cases():
    """Invalid fields of head and trailer, with correct checksums."""
    for rule, field, value in (
        ("F-002", "magic", b"\x89TSD\r\n\x1a\x0b"),
        ("F-004", "major", 0),
        ("F-005", "incompat", 1 << 63 | 1 << 48),
        ("F-010", "data_start", 8192),
        ("F-006", "index_off", 4096),
        ("F-006", "index_len", 1),
        ("F-006", "flags", 1 << 31),
    ):
        yield rule, "head", field, f"{field} is {value}", tensors().override(
            "head", **{field: value}
        )
    zeros = tensors().patch(2048, b"\x01")
    yield "F-006", "head", "zeros", "a byte between head and blob", zeros
    index_off, index_len = struct.unpack_from("<QQ", tensors().build()[-64:])
    root_off = index_len - ROOT_LEN
    for rule, field, fields in (
        ("F-007", "end_magic", {"end_magic": b"\n\x1a\n\rDST\x88"}),
        ("F-009", "file_len", {"file_len": index_off + index_len}),
        ("F-006", "flags", {"flags": 1}),
        ("F-006", "prev_trailer_off", {"prev_trailer_off": 4096}),
        ("F-006", "generation", {"generation": 1}),
        ("F-014", "index_codec", {"index_codec": 0}),
        ("F-012", "index_len", {"index_len": (1 << 64) - 1}),
        ("F-011", "index_len", {"index_len": index_len - 64}),
        ("F-011", "index_off", {"index_off": index_off + 64}),
        ("F-020", "root_off", {"root_off": root_off - 4}),
        ("F-020", "root_len", {"root_len": ROOT_LEN + 4}),
        ("F-021", "root_off", {"root_off": root_off - 8, "root_len": ROOT_LEN + 8}),
    ):
        archive = tensors().override("trailer", **fields)
        yield rule, "trailer", field, f"{field} is {fields[field]}", archive


def root_cases():
    for table in TABLES:
        late = manifest().misplace(table, shift=8)
        yield "F-021", "root", f"{table}-rel", f"{table} begin 8 bytes late", late
        more = manifest().misplace(table, more=1000)
        yield "F-021", "root", f"{table}-len", f"{table} have 1000 records more", more


def record_count_cases():
    """Tables with a record that other tables do not refer to, or without one that they refer to."""

    def without_last(archive, table):
        return archive.set(table, archive.tables[table][:-1])

    more_nodes = keyed("a").add("nodes").set("by_key", (0, 1, 2))
    for rule, table, archive in (
        ("F-031", "heap", keyed("a").set("heap", b"a\0")),
        ("F-030", "heap", without_last(keyed("ab"), "heap")),
        ("F-031", "dims", one_tensor((2, 3)).set("dims", (2, 3, 0))),
        ("F-033", "dims", one_tensor((2, 3)).set("dims", (2,))),
        ("F-041", "nodes", more_nodes),
        ("F-048", "nodes", keyed().set("nodes", ()).set("by_key", ())),
        ("F-041", "by_key", keyed("a").set("by_key", (0, 1, 1))),
        ("F-051", "tensors", one_tensor((0,)).tensor((0,))),
        ("F-054", "storages", without_storages(one_tensor((2,)))),
        ("F-062", "storages", one_tensor((2,)).storage(b"hidden")),
        ("F-049", "storages", without_storages(stored())),
        ("F-064", "crcs", without_last(tensors(), "crcs")),
        ("F-067", "crc_pages", tensors().set("crc_pages", ())),
        ("F-065", "chunks", without_last(three_chunks(), "chunks")),
        ("F-075", "slices", meshed().slice((0,), (4,))),
        ("F-073", "placements", sliced().add("placements")),
        ("F-081", "digests", tensors().set("digests", [bytes(32)])),
        ("F-060", "shards", manifest().set("shards", manifest().tables["shards"][:1])),
        ("F-076", "shards", divergent(0, 1).set("shards", ())),
        ("F-068", "shards", without_last(distributed(), "shards")),
        ("F-069", "others", with_others(1).add("others", stored_len=100, position=1, crcs=1)),
        ("F-050", "dtypes", other_dtype().set("dtypes", ()).set("heap", b"0")),
        ("F-057", "dtypes", one_tensor((4,)).dtype()),
        ("F-081", "subtrees", without_last(fine().digested(), "subtrees")),
        ("F-066", "base", without_last(delta(), "base")),
        ("F-066", "base_storages", without_last(delta(), "base_storages")),
        ("F-066", "digests", delta().set("digests", ())),
    ):
        yield rule, table, "records", f"{len(archive.tables[table])} records of {table}", archive


def without_storages(archive):
    """Removes the storages of an archive, with their CRCs and bytes."""
    return archive.set("storages", ()).set("crcs", ()).lay(blob=bytearray())


# ---- Nodes ---------------------------------------------------------------------------------------

# The kinds of nodes that use the field. In all other kinds it is 0.
HAS_COUNT = {"size", "tensor", "distributed", "dict", "ordered_dict", "list", "tuple", "namedtuple", "divergent"}
HAS_B = {"complex", "opaque", "distributed", "namedtuple"}
HAS_TAG = {"str", "dict", "ordered_dict", "list", "tuple"}
CONTAINERS = ("dict", "ordered_dict", "list", "tuple", "namedtuple")
LONG = b"text" * 1025


def a(name):
    """The name with its article."""
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def unused_word_cases():
    """Fields of nodes that their kind does not use."""
    kinds = {name: leaves for name in leaves().named}
    kinds |= {"tensor": lambda: one_tensor((2,)), "distributed": distributed, "divergent": lambda: divergent(0, 1)}
    place = {"tensor": "0", "distributed": "leaf", "divergent": "leaf"}
    for kind, make in kinds.items():
        name = place.get(kind, kind)
        yield "F-047", "nodes", f"{kind}-flags", f"flags of {a(kind)}", make().at(name, flags=2)
        if kind not in HAS_COUNT:
            yield "F-047", "nodes", f"{kind}-count", f"count of {a(kind)}", make().at(name, count=1)
        if kind in HAS_TAG:
            about = f"{a(kind)} with a class tag that is not in the table"
            yield "F-077", "nodes", f"{kind}-b", about, make().at(name, b=0xFFFF)
        elif kind not in HAS_B:
            yield "F-047", "nodes", f"{kind}-b", f"b of {a(kind)}", make().at(name, b=1)
    for rule, kind, value in (("F-047", "none", 1), ("F-047", "bool", 2), ("F-050", "dtype", 0)):
        yield rule, "nodes", f"{kind}-a", f"a of a {kind} is {value}", leaves().at(kind, a=value)


def reference_cases():
    """Words of nodes that refer to ranges or records that do not exist."""
    beyond = 1 << 32 | 1 << 16
    for kind in ("bigint", "str", "bytes", "device", "opaque"):
        yield "F-030", "nodes", f"{kind}-a", f"the content of {a(kind)}", leaves().at(kind, a=beyond)
    for kind in ("opaque", "namedtuple"):
        yield "F-030", "nodes", f"{kind}-b", f"the name of {a(kind)}", leaves().at(kind, b=beyond)
    for kind, field, archive in (
        ("device", "a", leaf(DEVICE, b"cuda:0")),
        ("opaque", "b", leaf(OPAQUE, b"{}", b"a/b")),
        ("namedtuple", "b", Archive().tree(Box(DICT, [("leaf", Box(NAMEDTUPLE, [], b"Point"))]))),
    ):
        about = f"an empty range for the name of {a(kind)}"
        yield "F-034", "nodes", f"{kind}-{field}", about, archive.at("leaf", **{field: 0})
    yield "F-033", "nodes", "size-a", "the entries of a size", leaves().at("size", a=1)
    yield "F-033", "nodes", "size-count", "three entries of two", leaves().at("size", count=3)
    yield "F-047", "nodes", "size-count", "a size of 65 entries", leaf(SIZE, (7,) * 65)
    for name, kind, b in (("str", STR, 0), ("bytes", BYTES, 0), ("opaque", OPAQUE, b"a/b")):

        def content():
            items = [("long", Leaf(kind, 0, b, flags=1))]
            return Archive().tree(Box(DICT, items)).storage(LONG)

        about = f"{a(name)} in storage 1 of 1"
        yield "F-049", "nodes", f"{name}-a", about, content().at("long", a=1)
        about = f"{a(name)} of 4 bytes whose flag says that it lies in a storage"
        short = leaf(kind, b"leaf", b)  # its content is the range of its key
        yield "F-049", "nodes", f"{name}-flags", about, short.at("leaf", flags=1)
        about = f"{a(name)} in a storage, without the flag"
        yield "F-062", "nodes", f"{name}-flags", about, content().at("long", flags=0)
    yield "F-051", "nodes", "tensor-a", "a run from record 1", one_tensor((2,)).at("0", a=1)
    yield "F-051", "nodes", "tensor-count", "an empty run", one_tensor((2,)).at("0", count=0)
    yield "F-051", "nodes", "distributed-a", "record 1 of 1", distributed().at("leaf", a=1)
    yield "F-051", "nodes", "distributed-count", "no record", distributed().at("leaf", count=0)
    about = "a distribution with an undefined bit"
    yield "F-068", "nodes", "distributed-b", about, distributed().at("leaf", b=distribution() | 1 << 8)
    for kind in CONTAINERS:
        first = leaves().named[kind]["a"]
        about = f"the children of {a(kind)}"
        yield "F-041", "nodes", f"{kind}-a", f"{about} from the next one", leaves().at(
            kind, a=first + 1
        )
        count = leaves().at(kind, count=NONE)
        yield "F-041", "nodes", f"{kind}-count", f"{about}, 2^32 - 1 of them", count
    values = divergent(0, 1)
    yield "F-041", "nodes", "divergent-a", "values from node 3", values.at("leaf", a=3)
    values = divergent(0, 1)
    yield "F-041", "nodes", "divergent-count", "a third value of two", values.at("leaf", count=3)


def kind_cases():
    """Nodes with the kind of another node."""
    ints = [(i, Leaf(INT, 7)) for i in range(2)]
    dict_of_ints = Archive().tree(Box(DICT, [("box", Box(DICT, ints))]))
    # The name of the type is the key "a".
    root = keyed("a").edit("nodes", 0, kind=NAMEDTUPLE, b=1 << 32)
    for rule, about, archive in (
        ("F-040", "kind 31", leaves().at("none", kind=31)),
        ("F-048", "a root that is a namedtuple", root),
        ("F-047", "a none with a word", leaves().at("int", kind=NONE_LEAF)),
        ("F-043", "a list whose children have keys", leaves().at("dict", kind=LIST)),
        ("F-051", "a tensor without records", leaf(INT, 0).at("leaf", kind=TENSOR)),
        ("F-054", "a tensor leaf in place of the storage of another", tensor_in_place()),
        ("F-030", "bytes in place of the int 5", leaf(INT, 5).at("leaf", kind=BYTES)),
        ("F-031", "an int in place of a str", leaf(STR, b"text").at("leaf", kind=INT)),
        ("F-046", "a bigint in place of a str", leaf(STR, b"text").at("leaf", kind=BIGINT)),
        ("F-032", "a str in place of bytes", leaf(BYTES, b"\xff").at("leaf", kind=STR)),
        ("F-033", "a size in place of an int", leaf(INT, 5).at("leaf", kind=SIZE)),
        ("F-041", "a list in place of a str", leaf(STR, b"text").at("leaf", kind=LIST)),
        ("F-076", "a divergent dict", dict_of_ints.at("box", kind=DIVERGENT)),
        ("F-068", "a distributed leaf in place of a tensor", one_tensor((0,)).at("0", kind=DISTRIBUTED)),
    ):
        yield rule, "nodes", "kind", about, archive


def tensor_in_place():
    """Two leaves: a str in a storage, and a tensor with elements but without a storage."""
    items = [("long", Leaf(STR, flags=1)), ("tensor", Leaf(TENSOR, 0, count=1))]
    archive = Archive().tree(Box(DICT, items)).storage(LONG)
    return archive.tensor((4,), storage=NONE)


def key_kind_cases():
    def child(kind, **fields):
        content = Leaf(INT, 7)
        items = [content] if kind in (LIST, TUPLE) else [("x", content)]
        name = b"Point" if kind == NAMEDTUPLE else b""
        box = Box(kind, items, name)
        return Archive().tree(Box(DICT, [("box", box)])).edit("nodes", 2, **fields)

    for name, kind in (("dict", DICT), ("ordered_dict", ORDERED_DICT)):
        archive = child(kind, key_kind=K_INDEX, key=0).set("heap", b"box")
        yield "F-043", "nodes", f"{name}-key_kind", f"an index in {a(name)}", archive
    for name, kind in (("list", LIST), ("tuple", TUPLE)):
        yield "F-043", "nodes", f"{name}-key_kind", f"a none key in a {name}", child(
            kind, key_kind=K_NONE
        )
    archive = child(NAMEDTUPLE, key_kind=K_BYTES)
    yield "F-043", "nodes", "namedtuple-key_kind", "a field named by bytes", archive
    archive = divergent(0, 1).edit("nodes", 2, key_kind=K_BOOL)
    yield "F-043", "nodes", "divergent-key_kind", "a writer that is a bool", archive
    as_int = keyed(None, False).edit("nodes", 1, key_kind=K_INT).set("by_key", (0, 1, 2))
    for rule, about, archive in (
        ("F-048", "a root with a str key", keyed("a").edit("nodes", 0, key_kind=K_STR)),
        ("F-043", "key kind 9", keyed("a").edit("nodes", 1, key_kind=9)),
        ("F-046", "a bigint in place of a str", keyed("text").edit("nodes", 1, key_kind=K_BIGINT)),
        ("F-032", "a str in place of bytes", keyed(b"\xff").edit("nodes", 1, key_kind=K_STR)),
        ("F-044", "bytes in place of a str", keyed("a", "b").edit("nodes", 1, key_kind=K_BYTES)),
        ("F-045", "an int 0 beside false", as_int),
        ("F-030", "a str in place of an int", keyed(5 << 32).edit("nodes", 1, key_kind=K_STR)),
        ("F-031", "an int in place of a str", keyed("a").edit("nodes", 1, key_kind=K_INT)),
    ):
        yield rule, "nodes", "key_kind", about, archive


def key_cases():
    tuple_of_list = Archive().tree(Box(DICT, [("box", Box(LIST, [Leaf(INT, 7)]))]))
    nan = 0x7FF0 << 48 | 1
    long = b"\x7f" * 4097
    for name, archive in (
        ("index", tuple_of_list.edit("nodes", 2, key=1)),
        ("none", keyed(None).edit("nodes", 1, key=1)),
        ("bool", keyed(False).edit("nodes", 1, key=2)),
        ("float", keyed(1.5).edit("nodes", 1, key=nan)),
        ("writer", divergent(0, 1).edit("nodes", 3, key=1 << 32)),
        ("str", keyed(Key(K_STR, long))),
        ("bigint", keyed(Key(K_BIGINT, long))),
        ("bytes", keyed(Key(K_BYTES, long))),
        ("tuple", packed_key(packed(1)[:-1])),
    ):
        yield "F-043", "nodes", f"key-{name}", f"{a(name)} key that there cannot be", archive
    beyond = 1 << 32 | 1 << 16
    for name, key in (("str", "a"), ("bigint", 1 << 64), ("bytes", b"a"), ("tuple", (1, 2))):
        archive = keyed(key).edit("nodes", 1, key=beyond)
        yield "F-030", "nodes", f"key-{name}", f"{a(name)} key beyond the heap", archive
    for name, first, second in (
        ("str", "a", "b"),
        ("int", 1, 2),
        ("bigint", 1 << 64, 1 << 65),
        ("bool", False, True),
        ("float", 1.5, 2.5),
        ("bytes", b"a", b"b"),
        ("tuple", (1,), (2,)),
    ):
        archive = keyed(first, second)
        archive.edit("nodes", 2, key=archive.tables["nodes"][1]["key"])
        yield "F-044", "nodes", f"key-{name}", f"{a(name)} key twice", archive
    writers = divergent(0, 1).edit("nodes", 3, key=0)
    yield "F-044", "nodes", "key-writer", "a writer twice", writers
    for name, keys in (
        ("int", (True, 1)),
        ("bool", (0.0, False)),
        ("float", (7, 7.0)),
        ("bigint", (-(1 << 64), -(2.0**64))),
        ("tuple", (((1, "a"),), ((1.0, "a"),))),
    ):
        yield "F-045", "nodes", f"key-{name}", f"the keys {keys}", keyed(*keys)
    yield "F-048", "nodes", "key-root", "the key of the root", keyed("a").edit(
        "nodes", 0, key=1 << 63
    )


def by_key_cases():
    def swapped(kind):
        archive = leaves()
        first = archive.named[kind]["a"]
        archive.tables["by_key"][first : first + 2] = first + 1, first
        return archive

    yield "F-041", "by_key", "root", "the first entry", keyed("a").set("by_key", (1, 1))
    for kind in ("list", "tuple"):
        yield "F-041", "by_key", kind, f"the children of a {kind}, swapped", swapped(kind)
    for kind in ("dict", "ordered_dict", "namedtuple"):
        yield "F-044", "by_key", kind, f"the children of a {kind}, swapped", swapped(kind)
    archive = divergent(0, 1).set("by_key", (0, 1, 3, 2))
    yield "F-044", "by_key", "divergent", "the values of a divergent node, swapped", archive


# ---- Tensors and storages ------------------------------------------------------------------------


def tensor_cases():
    def edited(archive, i=0, **fields):
        return archive.edit("tensors", i, **fields)

    def pair(first, second, **fields):
        """Two tensors of one storage of 64 bytes."""
        return runs(1, 1).storage(bytes(64)).tensor(first).tensor(second, **fields)

    def content():
        items = [("long", Leaf(STR, flags=1)), ("tensor", Leaf(TENSOR, 0, count=1))]
        archive = Archive().tree(Box(DICT, items)).storage(LONG).storage(bytes(64))
        return archive.tensor((4,), storage=1)

    large = runs(1).storage(bytes(64)).tensor((1 << 62,), UINT8, (0,))
    wide = one_slice((0,), (0,), (1 << 62,))
    shapes = runs(1, 1).storage(bytes(64)).tensor((0, 1 << 62)).tensor((2,), FLOAT32)
    steps = runs(1, 1).storage(bytes(64)).tensor((0, 1 << 62)).tensor((2,), FLOAT32, (3,))
    halves = sliced().edit("tensors", 1, dtype=INT8)
    for rule, field, about, archive in (
        ("F-054", "storage", "storage 1 of 1", edited(one_tensor((2,)), storage=1)),
        ("F-049", "storage", "the storage of a str", edited(content(), storage=0)),
        (
            "F-062",
            "storage",
            "not the storage that is there for it",
            edited(tensors(), 2, storage=0),
        ),
        ("F-050", "dtype", "dtype 0", edited(one_tensor((2,)), dtype=0)),
        ("F-053", "dtype", "elements of 16 bytes, 2^62 of them", edited(large, dtype=COMPLEX128)),
        (
            "F-054",
            "dtype",
            "elements too large for the storage",
            edited(one_tensor((64,)), dtype=FLOAT32),
        ),
        (
            "F-055",
            "dtype",
            "elements at odd bytes",
            edited(one_tensor((2,), byte_offset=2), dtype=FLOAT32),
        ),
        ("F-070", "dtype", "a global tensor of 2^64 bytes", edited(wide, dtype=FLOAT32)),
        ("F-074", "dtype", "halves of uint8 and int8", halves),
        ("F-052", "rank", "rank 255", edited(one_tensor((2,)), rank=255)),
        ("F-033", "rank", "rank 3 of a shape of 2", edited(one_tensor((2, 3)), rank=3)),
        ("F-031", "rank", "rank 1 of a shape of 2", edited(one_tensor((2, 3)), rank=1)),
        (
            "F-054",
            "rank",
            "rank 2, of a size that is another's",
            edited(pair((8, 64), (8,)), 1, rank=2),
        ),
        ("F-075", "rank", "rank 1 and a slice of rank 2", edited(two_corners(), 1, rank=1)),
        ("F-056", "flags", "flag 128", edited(one_tensor((2,)), flags=128)),
        ("F-056", "reserved", "reserved", edited(one_tensor((2,)), reserved=1 << 31)),
        ("F-033", "shape", "a shape beyond dims", edited(one_tensor((2, 3)), shape=2)),
        ("F-031", "shape", "the shape of another", edited(pair((4, 8), (2, 2)), 1, shape=0)),
        ("F-053", "shape", "2^62 elements of four bytes", edited(shapes, 1, shape=1)),
        ("F-054", "shape", "sizes too large for the storage", tensor_beyond_storage()),
        ("F-070", "shape", "local sizes that are the global ones", sliced_shape()),
        ("F-033", "strides", "strides beyond dims", edited(one_tensor((2, 3)), strides=1)),
        ("F-031", "strides", "no strides", edited(one_tensor((2, 3), UINT8, (1, 2)), strides=NONE)),
        ("F-053", "strides", "a stride of 2^62", edited(steps, 1, strides=1)),
        ("F-054", "strides", "strides 64 and 1", edited(pair((64, 1), (2, 2)), 1, strides=0)),
        ("F-075", "slice", "slice 1 of 1", edited(meshed(), slice=1)),
        ("F-051", "slice", "no slice in a run of two", edited(sliced(), slice=NONE)),
        ("F-070", "slice", "the slice of another", tensor_with_wrong_slice()),
        ("F-053", "byte_offset", "2^64 - 1", edited(one_tensor((2,)), byte_offset=U64)),
        (
            "F-054",
            "byte_offset",
            "the last element outside",
            edited(one_tensor((2,)), byte_offset=63),
        ),
        (
            "F-055",
            "byte_offset",
            "float32 at byte 2",
            edited(one_tensor((2,), FLOAT32), byte_offset=2),
        ),
    ):
        yield rule, "tensors", field, about, archive


def distributed_cases():
    """Fields of the records of distributed leaves, other than those of nodes."""

    def edited(table, i, **fields):
        return three_distributed().edit(table, i, **fields)

    # Dims: the shapes 4 and 2, the offset 0, the mesh 2 with its ranks 0 and 1.
    strided = distributed(placed=({"kind": STRIDED_SHARD, "split_factor": 2},))
    for table, field, about, archive in (
        ("tensors", "dtype", "tied leaves of two dtypes", edited("tensors", 2, dtype=INT8)),
        ("tensors", "shape", "a shape that is not the global one", edited("tensors", 2, shape=1)),
        ("tensors", "strides", "strides", edited("tensors", 2, strides=1)),
        ("tensors", "slice", "no slice", edited("tensors", 2, slice=NONE)),
        ("slices", "global_shape", "a global shape that is not the shape", edited("slices", 1, global_shape=0)),
        ("slices", "coordinates", "coordinates", edited("slices", 1, coordinates=2)),
        ("slices", "ranks", "no ranks", edited("slices", 1, ranks=NONE)),
        ("slices", "placements", "no placements", edited("slices", 1, placements=NONE)),
        ("placements", "strided-split_factor", "2^64 - 1 pieces", strided.edit("placements", 0, split_factor=U64)),
        ("shards", "writer", "a writer that is no rank", edited("shards", 0, writer=NONE)),
    ):
        yield "F-068", table, field, f"a distributed leaf: {about}", archive


def three_distributed():
    """Three distributed leaves of 4, 2 and 4 elements. The first and the third are tied."""
    items = [(str(i), Leaf(DISTRIBUTED, i, distribution(i % 2), count=1)) for i in range(3)]
    archive = Archive().tree(Box(DICT, items))
    for i, size in enumerate((4, 2, 4)):
        archive.tensor((size,), storage=NONE, slice=i % 2)
    for size in (4, 2):
        archive.slice((0,), (size,), **ON_TWO)
    return two_shards(archive, SHARDED)


def tensor_beyond_storage():
    """Two tensors of 65 elements. The storage of the second has only 64 bytes."""
    archive = (
        runs(1, 1).storage(bytes(65)).storage(bytes(64)).tensor((65,)).tensor((65,), storage=1)
    )
    return archive


def two_corners():
    """Two tensors with equal slices, at (0, 0) of 4 x 4."""
    archive = runs(1, 1).storage(bytes(64)).tensor((2, 2), slice=0).tensor((2, 2), slice=1)
    return archive.slice((0, 0), (4, 4)).slice((0, 0), (4, 4))


def sliced_shape():
    archive = runs(1).storage(bytes(64)).tensor((4,), slice=0)
    return archive.slice((1,), (4,))


def tensor_with_wrong_slice():
    """Two tensors of 2 and 4 elements, of which the second names the slice of the first."""
    archive = runs(1, 1).storage(bytes(64)).tensor((2,), slice=0).tensor((4,), slice=0)
    return archive.slice((0,), (3,))


def dtype_cases():
    beyond = 1 << 32 | 1 << 16

    def other(**fields):
        return other_dtype(**fields)

    def edited(archive=None, **fields):
        return (archive or other()).edit("dtypes", 0, **fields)

    two_bytes = one_tensor((32,), OTHER).dtype(size=2)
    many = one_tensor((1 << 61,), OTHER, strides=(0,)).dtype()
    whole = one_slice((0,), (0,), (1 << 61,)).edit("tensors", 0, dtype=OTHER).dtype()
    has_grad = one_tensor((4,), OTHER, flags=1).dtype()
    odd = one_tensor((4,), OTHER, byte_offset=3).dtype()
    for rule, field, about, archive in (
        ("F-030", "name", "beyond the heap", edited(name=beyond)),
        ("F-031", "name", "the name of a key", edited(name=other().tables["nodes"][1]["key"])),
        ("F-057", "name", "an empty range", edited(name=0)),
        ("F-050", "number", "another number than that of its tensor", edited(number=OTHER + 1)),
        ("F-057", "number", "a number that is listed", edited(leaf(DTYPE, UINT8).dtype(), number=UINT8)),
        ("F-053", "size", "2^61 elements of 4 bytes", edited(many, size=4)),
        ("F-054", "size", "elements too large for the storage", edited(two_bytes, size=256)),
        ("F-055", "size", "elements at byte 3, of 2 bytes", edited(odd, size=2)),
        ("F-057", "size", "size 0", edited(size=0)),
        ("F-070", "size", "a global tensor of 2^63 bytes", edited(whole, size=4)),
        ("F-057", "bits", "2^16 - 1 bits in a byte", edited(bits=0xFFFF)),
        ("F-057", "values", "255 values in a byte", edited(values=255)),
        ("F-056", "class", "a tensor of ints that requires grad", edited(has_grad, **{"class": INT_CLASS})),
        ("F-057", "class", "class 255", edited(**{"class": 255})),
    ):
        yield rule, "dtypes", field, about, archive


def storage_cases():
    def first(make=lambda: one_tensor((2,)), **fields):
        return make().edit("storages", 0, **fields)

    text = Archive().tree(Box(DICT, [("long", Leaf(STR, flags=1))])).compressed(bytes(5000))
    ends_raw = runs(1).compressed(bytes(CHUNK) + b"raw", raw=(1,)).tensor((4,))
    ends_raw.edit("storages", 0, raw_len=CHUNK + 4)
    for rule, field, about, archive in (
        ("F-060", "offset", "256 bytes late", first(offset=4352)),
        ("F-063", "stored_len", "a byte more than raw_len", first(stored_len=65)),
        ("F-065", "stored_len", "a byte more than its chunks", first(compressed, stored_len=20)),
        ("F-063", "raw_len", "a byte less than stored_len", first(raw_len=63)),
        ("F-064", "raw_len", "2^64 - 1 bytes and one CRC", first(compressed, raw_len=U64)),
        ("F-065", "raw_len", "a byte more than its last chunk, which is raw", ends_raw),
        ("F-054", "raw_len", "a byte less than its tensor", first(compressed, raw_len=399)),
        ("F-049", "raw_len", "a str of 4096 bytes", text.edit("storages", 0, raw_len=4096)),
        (
            "F-093",
            "raw_len",
            "a byte more than its frame",
            first(compressed, raw_len=401).only("deep"),
        ),
        ("F-097", "raw_len", "a byte more than its planes", first(planar, raw_len=401)),
        ("F-060", "shard", "shard 1 of none", first(shard=1)),
        ("F-063", "chunks", "chunks of codec 0", first(chunks=0)),
        ("F-065", "chunks", "chunks of codec 1 that are NONE", first(compressed, chunks=NONE)),
        ("F-064", "crcs", "CRCs from entry 1 on", first(crcs=1)),
        ("F-091", "crc32", "the CRC of a storage", first(crc32=0)),
        ("F-063", "codec", "codec 0 with chunks", first(compressed, codec=0)),
        ("F-061", "align_log2", "an alignment of 32", first(align_log2=5)),
        ("F-060", "align_log2", "an alignment of 2 MiB at 4096", first(align_log2=21)),
        ("F-063", "chunk_log2", "chunks of 2 KiB", first(chunk_log2=11)),
        ("F-063", "width", "width 5", first(compressed, width=5)),
        ("F-065", "width", "width 16 and a chunk of codec 2", first(planar, width=16)),
        ("F-091", "width", "width 2 in place of 4", first(compressed, width=2).only("deep")),
        ("F-097", "width", "width 8 in place of 4, for planes", first(planar, width=8)),
        ("F-100", "width", "width 4 in place of 2, for tiers", first(tiered, width=4)),
        ("F-100", "raw_len", "a byte more than its tiers", first(tiered, raw_len=501)),
        ("F-098", "width", "width 1 in place of 2, for a delta chunk", first(delta, width=1)),
        ("F-098", "raw_len", "seven elements more than the bitmap", first(delta_of_bitmap, raw_len=2 * COUNT + 14)),
        ("F-081", "subtrees", "an entry, and no digests", first(subtrees=0)),
    ):
        yield rule, "storages", field, about, archive


def delta_of_bitmap():
    return delta(compare(bitmaps=1))


def chunk_cases():
    def chunk(i, **fields):
        return three_chunks().edit("chunks", i, **fields)

    # The record of the first frame includes a byte of the second one.
    moved = chunk(0, stored_len=42).edit("chunks", 1, offset=42, stored_len=40)
    stale = chunk(0, stored_len=42).edit("chunks", 1, offset=42, stored_len=40)
    stored = bytes(moved.blob)
    crcs = moved.tables["crcs"]
    moved.set("crcs", (zlib.crc32(stored[:42]), zlib.crc32(stored[42:82]), crcs[2])).only("deep")
    for rule, field, about, archive in (
        ("F-065", "offset", "a chunk that begins in the one before it", chunk(1, offset=40)),
        ("F-065", "stored_len", "a frame of 2^32 - 1 bytes", chunk(0, stored_len=NONE)),
        ("F-090", "stored_len", "a frame with a byte of the next one", stale),
        ("F-093", "stored_len", "a frame with a byte of the next one, and its CRC", moved),
        ("F-065", "codec", "codec 5", chunk(2, codec=5)),
        ("F-098", "codec", "codec 3 for planes", delta(encode_planes(bytes(2 * COUNT), 2))),
        ("F-098", "stored_len", "a delta chunk without its last byte", delta(compare().encode()[:-1])),
        ("F-093", "codec", "codec 1 for planes", planar().edit("chunks", 0, codec=1)),
        ("F-097", "codec", "codec 2 for a frame", compressed().edit("chunks", 0, codec=2)),
        ("F-100", "codec", "codec 4 for planes", planar().edit("chunks", 0, codec=4)),
        ("F-100", "stored_len", "tiers without their last byte", tiered(tiered().blob[:-1])),
    ):
        yield rule, "chunks", field, about, archive
    pages = tensors().records("crc_pages")
    yield "F-067", "crcs", "crc", "the CRC of a chunk", tensors().set("crcs", (0, 0)).set("crc_pages", pages)
    yield "F-067", "crc_pages", "crc", "the CRC of a page", tensors().set("crc_pages", (pages[0] ^ 1,))
    both = tensors().edit("storages", 0, crc32=0)
    yield "F-090", "crcs", "crc", "the CRCs of a storage and its chunk", both.set(
        "crcs", [0] + both.tables["crcs"][1:]
    )
    # Of a manifest alone, verification does not look at the chunks.
    other = manifest()
    yield "F-091", "crcs", "crc", "the CRC of a chunk", other.set(
        "crcs", [0] + other.tables["crcs"][1:]
    )
    digests = tensors().digested()
    digests.set("digests", [bytes(32), digests.tables["digests"][1]])
    yield "F-094", "digests", "digest", "the digest of a storage", digests
    without_base_storage = delta().set("base_storages", (NONE,))
    yield "F-066", "base_storages", "storage", "NONE for a delta storage", without_base_storage
    subtrees = fine().digested()
    subtrees.set("subtrees", subtrees.tables["subtrees"][:2] + [bytes(32)])
    yield "F-094", "subtrees", "subtree", "the subtree of a chunk", subtrees.only("verify")


# ---- Slices, placements, attributes, shards ------------------------------------------------------


def slice_cases():
    def edited(archive, **fields):
        return archive.edit("slices", 0, **fields)

    fields = {"coordinates": (1,), "ranks": (5, 6), "names": (b"dp",), "placements": 0}

    def complete():
        """A slice with all its parts: on a mesh of 2, with coordinates, ranks, names and placements."""
        return meshed(**fields).add("placements", kind=SHARD)

    without_mesh = one_slice((2,), (0,), (4,))
    start = complete().tables["slices"][0]
    beyond = len(complete().tables["dims"])
    # Dims: 2, 0, 4, the mesh 2 with its ranks 5 and 6, the coordinate 1, the name.
    for rule, field, about, archive in (
        ("F-033", "offsets", "beyond dims", edited(complete(), offsets=beyond)),
        ("F-070", "offsets", "those of a tensor that ends outside", third_slice("offsets", 5)),
        ("F-033", "global_shape", "beyond dims", edited(complete(), global_shape=beyond)),
        ("F-070", "global_shape", "the offsets", third_slice("global_shape", 1)),
        ("F-074", "global_shape", "another than that of the other half", halves_of_two_shapes()),
        ("F-033", "mesh", "beyond dims", edited(complete(), mesh=beyond, ranks=beyond + 1)),
        ("F-071", "mesh", "a mesh that is NONE", second_slice(mesh=NONE)),
        ("F-033", "coordinates", "beyond dims", edited(complete(), coordinates=beyond)),
        ("F-071", "coordinates", "outside the mesh", coordinates_outside()),
        (
            "F-071",
            "ranks",
            "a number behind the mesh",
            edited(complete(), ranks=start["ranks"] + 1),
        ),
        ("F-031", "ranks", "no ranks, which are there", edited(meshed(ranks=(5, 6)), ranks=NONE)),
        ("F-071", "placements", "placements without a mesh", edited(without_mesh, placements=0)),
        ("F-073", "placements", "from record 1 on", edited(complete(), placements=1)),
        ("F-033", "names", "beyond dims", edited(complete(), names=beyond)),
        ("F-071", "names", "names of no mesh", edited(one_slice((2,), (0,), (4,)), names=0)),
        ("F-030", "names", "numbers that are no heap ranges", edited(complete(), names=3)),
        ("F-075", "rank", "rank 2 of a tensor of rank 1", slice_of_other_rank()),
        ("F-071", "mesh_rank", "no mesh, with its fields", edited(complete(), mesh_rank=0)),
        (
            "F-033",
            "mesh_rank",
            "rank 9 of a mesh of one dimension: the range ends beyond dims",
            edited(meshed((2,)), mesh_rank=9),
        ),
        ("F-071", "flags", "flags", edited(complete(), flags=1 << 15)),
    ):
        yield rule, "slices", field, about, archive


def halves_of_two_shapes():
    """Two halves of tensors of 4 x 3 and 5 x 3."""
    archive = runs(2).storage(bytes(6)).storage(bytes(6))
    archive.tensor((2, 3), slice=0).tensor((2, 3), storage=1, slice=1)
    return archive.slice((0, 0), (4, 3)).slice((2, 0), (5, 3))


def third_slice(field, number):
    """Three slices, of which the third names the range of a number that the first two have claimed."""
    archive = runs(1, 1, 1).storage(bytes(64))
    archive.tensor((2,), slice=0).tensor((1,), slice=1).tensor((2,), slice=2)
    archive.slice((3,), (5,)).slice((1,), (5,)).slice((1,), (5,))
    return archive.edit("slices", 2, **{field: archive.tables["dims"].index(number)})


def second_slice(**fields):
    """Two slices on one mesh, of which the second is edited."""
    archive = runs(1, 1).storage(bytes(64)).tensor((2,), slice=0).tensor((2,), slice=1)
    archive.slice((0,), (4,), (2,), (5, 6)).slice((2,), (4,), (2,), (5, 6))
    return archive.edit("slices", 1, **fields)


def coordinates_outside():
    """A mesh of 3, and the coordinate 4, which is the global size. No other record names that range."""
    archive = one_slice((2,), (0,), (4,), (3,))
    return archive.edit("slices", 0, coordinates=archive.tables["dims"].index(4))


def slice_of_other_rank():
    """Two tensors of rank 2 and 1. The slice of the second names the vectors of the first one's slice."""
    archive = runs(1, 1).storage(bytes(64)).tensor((2, 2), slice=0).tensor((2,), slice=1)
    return archive.slice((0, 0), (4, 4)).slice((0,), (4,)).edit("slices", 1, rank=2)


def placement_cases():
    def placed(kind=SHARD, **fields):
        return meshed(placements=0).add("placements", kind=kind, **fields)

    for field, about, archive in (
        ("kind", "kind 255", placed(255)),
        ("reserved", "reserved", placed(reserved=1)),
        ("replicate-dim", "a dim of Replicate", placed(REPLICATE, dim=1)),
        ("shard-dim", "dim 1 of rank 1", placed(dim=1)),
        ("strided-dim", "dim 2^32 - 1 of rank 1", placed(STRIDED_SHARD, dim=NONE, split_factor=1)),
        ("replicate-split_factor", "a factor of Replicate", placed(REPLICATE, split_factor=1)),
        ("shard-split_factor", "a factor of Shard", placed(SHARD, split_factor=1)),
        (
            "strided-split_factor",
            "no factor of _StridedShard",
            placed(STRIDED_SHARD, split_factor=0),
        ),
    ):
        yield "F-073", "placements", field, about, archive


def attr_and_shard_cases():
    beyond = 1 << 32 | 1 << 16

    def attr(node_kind, content, **fields):
        return keyed("k").attr(b"name", node_kind, content).edit("attrs", 0, **fields)

    for rule, field, about, archive in (
        ("F-030", "name", "beyond the heap", attr(INT, 1, name=beyond)),
        (
            "F-080",
            "name",
            "the name of the one before it",
            attrs(b"a", b"b").edit("attrs", 1, name=1 << 32),
        ),
        ("F-030", "str-value", "a str beyond the heap", attr(STR, b"text", value=beyond)),
        ("F-030", "bytes-value", "bytes beyond the heap", attr(BYTES, b"text", value=beyond)),
        ("F-080", "kind", "an attribute that is a bool", attr(INT, 1, kind=BOOL)),
        ("F-032", "kind", "a str in place of bytes", attr(BYTES, b"\xff", kind=STR)),
        ("F-030", "kind", "bytes in place of an int", attr(INT, 7, kind=BYTES)),
        ("F-031", "kind", "an int in place of a str", attr(STR, b"text", kind=INT)),
        ("F-080", "reserved", "reserved", attr(INT, 1, reserved3=1 << 31)),
    ):
        yield rule, "attrs", field, about, archive

    def shard(**fields):
        return manifest().edit("shards", 1, **fields)

    first = manifest().tables["shards"][0]["name"]
    for rule, field, about, archive in (
        ("F-030", "name", "beyond the heap", shard(name=beyond)),
        ("F-082", "name", "the name of another", shard(name=first)),
        ("F-082", "file_len", "a byte too short for index and trailer", shard(file_len=8192 + MIN_TAIL - 1)),
        ("F-082", "index_off", "no multiple of 64", shard(index_off=8191)),
        ("F-060", "index_off", "before the end of a storage", shard(index_off=4160)),
        ("F-069", "crcs_off", "no multiple of 4", shard(crcs_off=2)),
        ("F-069", "crcs_len", "2^32 - 1 entries", shard(crcs_len=NONE)),
        ("F-069", "others", "from record 1 of 1 on", with_others(1).edit("shards", 0, others=1)),
        ("F-069", "other_count", "one record, and others of NONE", shard(other_count=1)),
        ("F-069", "reserved", "reserved", shard(reserved=1 << 31)),
    ):
        yield rule, "shards", field, about, archive
    for field, about, archive in (
        ("stored_len", "a storage without bytes", with_others(1).edit("others", 0, stored_len=0)),
        ("position", "positions that decrease", with_others(2).edit("others", 0, position=NONE)),
        ("crcs", "a storage without crcs", with_others(1).edit("others", 0, crcs=0)),
    ):
        yield "F-069", "others", field, about, archive


def with_others(count):
    """A manifest whose first shard has this number of Other records."""
    archive = manifest().edit("shards", 0, others=0, other_count=count)
    for _ in range(count):
        archive.add("others", stored_len=100, position=0, crcs=1)
    return archive


# ---- The contents of dims, heap and blob ---------------------------------------------------------


def dims_cases():
    def entry(archive, old, new):
        """Replaces the only entry of dims that equals `old`."""
        dims = list(archive.tables["dims"])
        assert dims.count(old) == 1, dims
        dims[dims.index(old)] = new
        return archive.set("dims", dims)

    def tensor(*shape, **fields):
        return one_tensor(shape, **fields)

    def mesh(*numbers, **known):
        return meshed(numbers, **known)

    sizes = one_slice((7,), (3,), (11,))
    two_globals = runs(2).storage(bytes(6)).storage(bytes(6))
    two_globals.tensor((2, 3), storage=0, slice=0).tensor((2, 3), storage=1, slice=1)
    two_globals.slice((0, 0), (9, 3)).slice((2, 0), (10, 3))
    for rule, field, about, archive in (
        ("F-053", "shape", "a size of 2^63", entry(tensor(7, 3), 7, 1 << 63)),
        ("F-054", "shape", "a size of 65", entry(tensor(7), 7, 65)),
        (
            "F-070",
            "shape",
            "a local size that ends outside",
            entry(one_slice((7,), (3,), (11,)), 7, 9),
        ),
        ("F-053", "strides", "a stride of 2^63", entry(tensor(2, strides=(7,)), 7, 1 << 63)),
        ("F-054", "strides", "a stride of 64", entry(tensor(2, strides=(7,)), 7, 64)),
        ("F-058", "strides", "the stride 1", entry(tensor(2, strides=(7,)), 7, 1)),
        ("F-070", "offsets", "an offset of 2^64 - 1", entry(sizes, 3, U64)),
        (
            "F-070",
            "global_shape",
            "a global size of 2^63",
            entry(one_slice((7,), (3,), (11,)), 11, 1 << 63),
        ),
        ("F-074", "global_shape", "global sizes that differ", two_globals),
        ("F-071", "mesh", "a mesh of no devices", entry(mesh(2, 9, 1), 9, 0)),
        ("F-033", "mesh", "more devices than ranks", entry(mesh(1, ranks=(9,)), 1, 1 << 20)),
        ("F-071", "ranks", "a rank twice", entry(mesh(2, ranks=(8, 9)), 9, 8)),
        ("F-068", "ranks", "a rank that is no writer", entry(distributed(), 1, 2**32 - 1)),
        ("F-071", "coordinates", "a coordinate outside", entry(mesh(3, coordinates=(1,)), 1, 3)),
        ("F-030", "names", "a name beyond the heap", edit_dim_name(1 << 32 | 1 << 16)),
        ("F-071", "names", "a name that is there twice", edit_dim_name(None)),
        ("F-034", "names", "a name with a byte more, which is the last of the heap", longer_dim_name()),
    ):
        yield rule, "dims", field, about, archive


def edit_dim_name(heap_range):
    """A mesh of two named dimensions, of which the second has another name, or that of the first."""
    archive = meshed((1, 2), ranks=(8, 9), names=(b"dp", b"tp"))
    first = archive.tables["slices"][0]["names"]
    dims = list(archive.tables["dims"])
    dims[first + 1] = dims[first] if heap_range is None else heap_range
    return archive.set("dims", dims)


def longer_dim_name():
    """A mesh of one named dimension. Its range has 257 bytes in place of 256."""
    archive = meshed(ranks=(8, 9), names=(b"d" * 256,))
    archive.set("heap", archive.tables["heap"] + [0x64])
    name = archive.tables["slices"][0]["names"]
    dims = archive.tables["dims"]
    return archive.set("dims", dims[:name] + [dims[name] + (1 << 32)] + dims[name + 1 :])


def heap_cases():
    def text(archive, old, new):
        """Replaces the first occurrence of `old` in the heap."""
        heap = bytes(archive.tables["heap"])
        assert old in heap and len(old) == len(new), heap
        return archive.set("heap", heap.replace(old, new, 1))

    def two_names():
        return meshed((1, 2), ranks=(8, 9), names=(b"dp", b"tp"))

    for rule, field, about, archive in (
        ("F-032", "str", "a str", text(leaf(STR, b"text"), b"text", b"tex\xff")),
        ("F-032", "device", "a device", text(leaf(DEVICE, b"cuda"), b"cuda", b"cud\xff")),
        ("F-032", "media", "a media tag", text(leaf(OPAQUE, b"{}", b"a/b"), b"a/b", b"a/\xff")),
        ("F-032", "type_name", "the name of a namedtuple", text(leaves(), b"Point", b"Poin\xff")),
        ("F-032", "field_name", "a field of a namedtuple", text(point(), b"field", b"fiel\xff")),
        ("F-032", "key-str", "a str key", text(keyed("key"), b"key", b"ke\xff")),
        ("F-044", "key-str", "str keys in another order", text(keyed("ka", "kb"), b"ka", b"kc")),
        ("F-044", "key-bytes", "bytes keys that are one", text(keyed(b"ka", b"kb"), b"ka", b"kb")),
        ("F-046", "key-bigint", "a bigint key", text(keyed(1 << 64), b"\1", b"\0")),
        ("F-043", "key-tuple", "a packed tuple", text(keyed((1,)), b"\1\0\0\0", b"\2\0\0\0")),
        ("F-046", "bigint", "a bigint", text(leaf(BIGINT, bigint(1 << 64)), b"\1", b"\0")),
        ("F-032", "attr_name", "the name of an attribute", text(attrs(b"name"), b"name", b"nam\xff")),
        ("F-032", "dim_name", "the name of a mesh dimension", text(two_names(), b"tp", b"t\xff")),
        ("F-032", "attr_value", "a str of an attribute", text(str_attr(), b"text", b"tex\xff")),
        ("F-071", "dim_name", "two names of a mesh that are one", text(two_names(), b"tp", b"dp")),
        ("F-082", "shard_name", "the name of a shard", text(manifest(), b"b.tssd", b"b/tssd")),
        ("F-057", "dtype_name", "the name of a dtype", text(other_dtype(), b"float6", b"Float6")),
    ):
        yield rule, "heap", field, about, archive


def point():
    return Archive().tree(Box(DICT, [("p", Box(NAMEDTUPLE, [("field", Leaf(INT, 1))], b"Point"))]))


def str_attr():
    return keyed("k").attr(b"name", STR, b"text")


def payload_cases():
    """Invalid bytes of the payload. The checksums match them unless the checksum is tested."""
    aligned = runs(1).storage(bytes(64), align_log2=13).tensor((2,))
    bad_text = b"text" * 1025 + b"\xff"
    zstd_text = Archive().tree(Box(DICT, [("long", Leaf(STR, flags=1))]))
    zstd_text.compressed(b"\xff" * 5000).only("deep")
    for rule, field, about, archive in (
        ("F-090", "chunk", "a byte of a storage", tensors().patch(4096 + 99, b"\xff")),
        ("F-092", "padding-first", "padding before the first storage", aligned.patch(8191, b"\1")),
        ("F-092", "padding-between", "padding between two", tensors().patch(4351, b"\1")),
        ("F-092", "padding-last", "padding before the index", tensors().patch(4352 + 16, b"\1")),
        ("F-096", "text", "a str in a storage", stored(STR, bad_text).only("verify")),
        ("F-096", "zstd-text", "a str in a compressed storage", zstd_text),
    ):
        yield rule, "blob", field, about, archive
    good = frame(bytes(400))
    for field, about, content in (
        ("magic", "a magic that is none", b"\0" + good[1:]),
        ("content_size", "a content size of 402", frame(bytes(400), size=402)),
        ("window", "a window of 2 MiB", frame(bytes(400), window=0x58)),
        ("dictionary", "a dictionary, in two bytes", frame(bytes(400), dictionary=b"\1\0")),
        ("reserved", "the reserved bit", frame(bytes(400), flags=8)),
        (
            "block-kind",
            "a block of the reserved kind",
            frame(bytes(400), block(3, 400, b"\0", True)),
        ),
        ("block-size", "a block of 398 bytes", frame(bytes(400), block(1, 398, b"\0", True))),
        ("block-last", "a block after the last one", good + block(1, 400, b"\0", True)),
        ("checksum", "a checksum that is not there", frame(bytes(400), flags=4)),
    ):
        yield "F-093", "frame", field, f"a frame with {about}", framed(content)
    good = encode_planes(WEIGHTS, 4)
    for rule, field, about, archive in (
        ("F-097", "table", "a table cut short", planar(good[:15])),
        ("F-097", "raw", "a raw plane of 98 bytes", planar_with(2, bytes(98))),
        ("F-097", "coded", "a coded plane of 102 bytes", planar_with(2, Coded(bytes(102)))),
        ("F-097", "tail", "a tail of 2 bytes in place of 3", planar(good + b"in", WEIGHTS + b"ind")),
        ("F-093", "coded", "a plane with another magic", planar_with(3, Coded(b"\0" + frame(bytes(100))[1:]))),
    ):
        yield rule, "planes", field, about, archive
    yield from tiers_cases()
    yield from delta_cases()


def tiers_cases():
    """Fields of a chunk of codec 4. Its counts are 50, 10 and 2."""
    good = bytes(tiered().blob)
    short_tail = encode_tiers(SPREAD * 2, 4) + b"in"
    for field, about, archive in (
        ("planes", "a raw plane of 249 bytes", tiered(good[1:])),
        ("symbols", "22 symbols", tiered(good[:271] + b"\0" + good[271:])),
        ("count-2", "a count of 0 codes in tier 2", tiered_with([0, 10, 2])),
        ("count-3", "a count of 9 codes in tier 3", tiered_with([50, 9, 2])),
        ("count-4", "a count of 255 bytes in tier 4", tiered_with([50, 10, 255])),
        ("tier-1", "an escape more in tier 1", tiered_with(tiers={1: lambda codes: b"\3" + codes[1:]})),
        ("tier-2", "only escapes in tier 2", tiered_with(tiers={2: b"\3" * 50})),
        ("tier-3", "no escape in tier 3", tiered_with(tiers={3: bytes(10)})),
        ("tier-4", "a byte more in tier 4", tiered_with(tiers={4: lambda content: content + b"\0"})),
        ("rest", "a code after the last one of tier 3", tiered_with(tiers={3: lambda codes: codes + b"\x0e"})),
        ("tail", "a tail of 2 bytes in place of 3", tiered(short_tail, SPREAD * 2 + b"ind", 4)),
    ):
        yield "F-100", "tiers", field, about, archive


def delta_cases():
    """Fields of a delta chunk. Contradictions to the base are in make_invalid.py."""

    def class_of(*differences):
        return COUNT, dict.fromkeys(differences, 1)

    good = compare().encode()
    both = class_of(0), class_of(COUNT)
    beyond = compare(bitmaps=1, columns={0: lambda bitmap: bitmap[:-1] + b"\x08"})
    for field, about, stored in (
        ("classes", "no classes", b"\0" + good[1:]),
        ("bitmaps", "bitmaps of eight classes", compare(bitmaps=255)),
        ("thresholds", "a threshold of 2^16 - 1", compare([0xFFFF])),
        ("counts", "a count of 2^16 - 2", compare(counts=[[0xFFFE]])),
        ("lengths", "the length of a column that is one less", good[:20] + b"\1" + good[21:]),
        ("gaps", "a gap of 254 in 203 elements", compare(columns={0: lambda gaps: b"\xfe" + gaps[1:]})),
        ("bitmap", "a bit beyond the last element", beyond),
        ("ranks", "a rank of class 1 that is the number of elements", listing(*both, thresholds=[THRESHOLD])),
        ("values", "a code 15 more", compare(columns={1: lambda codes: b"\xff" + codes[1:]})),
        ("wide", "a byte 255 more", compare(columns={2: b"\xff\xff"})),
        ("exceptions", "an exception of three bytes", compare(columns={3: lambda exceptions: exceptions + b"\0"})),
    ):
        yield "F-098", "delta", field, about, delta(stored)


SECTIONS = (
    head_and_trailer_cases,
    root_cases,
    record_count_cases,
    unused_word_cases,
    reference_cases,
    kind_cases,
    key_kind_cases,
    key_cases,
    by_key_cases,
    tensor_cases,
    distributed_cases,
    dtype_cases,
    storage_cases,
    chunk_cases,
    slice_cases,
    placement_cases,
    attr_and_shard_cases,
    dims_cases,
    heap_cases,
    payload_cases,
)
