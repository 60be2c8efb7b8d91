#!/usr/bin/env python3
"""Writes the invalid archives, which a reader must reject, and lists them in manifest.json.

    make_invalid.py                rewrites invalid/, generated/ and the "invalid" list of manifest.json
    make_invalid.py --check        checks that invalid/ and manifest.json are up to date
    make_invalid.py --generated    writes only generated/, which is not under version control

Each vector is a valid archive that was changed to violate one rule of format.md, and no other rule that does
not presuppose it: precedence.py checks this, except with --generated. All checksums are then updated, unless
the checksum is tested. The name begins with the number of the rule. A name that ends with
a slash is that of a directory: a manifest and its shards, or a delta and its base. Of each rule, the first
8 vectors lie in invalid/, to be read, and the others in generated/. So do the archives that corruptions.py
creates for each field of each table. builder.py builds the archives, and ../writer.py the stored chunks of
deltas.
"""

import hashlib
import json
import os
import shutil
import struct
import sys
import zipfile
import zlib
from collections import Counter
from io import BytesIO
from pathlib import Path

from builder import (
    Archive,
    BIGINT,
    BITS8,
    BOOL_DTYPE,
    BYTES,
    Box,
    CHUNK,
    COMPLEX128,
    COUNT,
    Coded,
    DEVICE,
    DICT,
    DIVERGENT,
    DTYPE,
    DeltaPair,
    FLOAT,
    FLOAT32,
    FLOATS,
    HALVES,
    INT,
    INT8,
    K_BIGINT,
    K_BOOL,
    K_FLOAT,
    K_INDEX,
    K_INT,
    K_NONE,
    K_STR,
    Key,
    LIST,
    Leaf,
    MIN_FILE,
    MIN_TAIL,
    NAMEDTUPLE,
    NEW,
    NEW_BLOCKS,
    NONE,
    OLD,
    OPAQUE,
    OTHER,
    REPLICATE,
    ROOT_LEN,
    SHARD,
    SIZE,
    SPREAD,
    SPREAD_SYMBOLS,
    STR,
    STRIDED_SHARD,
    ShardSet,
    TENSOR,
    THRESHOLD,
    TIERS_BLOCK,
    TUPLE,
    Tiers,
    U64,
    UINT8,
    WEIGHTS,
    align_up,
    attrs,
    bigint,
    block,
    blocks,
    blocks_delta,
    blocks_pair,
    compare,
    compare_blocks,
    compressed,
    delta,
    delta_pair,
    distributed,
    divergent,
    edit_chunk,
    encode_planes,
    encode_tiers,
    fine,
    frame,
    frame_head,
    framed,
    half,
    join_planes,
    keyed,
    leaf,
    leaves,
    listing,
    manifest,
    meshed,
    mixed_set,
    nested,
    one_mesh,
    one_slice,
    one_tensor,
    other_dtype,
    other_dtypes,
    packed,
    packed_key,
    packed_nested,
    planar,
    planar_with,
    runs,
    shard_set,
    sliced,
    split_planes,
    stored,
    tensors,
    three_chunks,
    tiered,
    tiered_with,
    two_chunks,
    two_compressed,
    two_deltas,
    two_meshes,
)
from class_tags import class_cases
from corruptions import corruptions
from distributed import distributed_cases
from precedence import check_precedence
from reader import KINDS, blake3, merge_subtrees
from writer import BLOCK, Frame

# Vectors of each rule in invalid/. The others are not under version control.
MAX_COMMITTED = 8

HERE = Path(__file__).parent

# ---- Foreign files -------------------------------------------------------------------------------


def zip_file():
    file = BytesIO()
    entry = zipfile.ZipInfo("archive/data.pkl")
    entry.create_system = 3
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(entry, bytes(MIN_FILE))
    return file.getvalue()


def safetensors_file():
    head = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (MIN_FILE, MIN_FILE)
    return struct.pack("<Q", len(head)) + head + bytes(MIN_FILE)


def png_file():
    def chunk(name, content):
        crc = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", crc)

    size = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    # One gray pixel in a stored block.
    pixel = b"\x78\x01\x01\x02\x00\xfd\xff\x00\x00\x00\x02\x00\x01"
    chunks = (b"IHDR", size), (b"tEXt", b"Comment\0".ljust(MIN_FILE)), (b"IDAT", pixel), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


# ---- The vectors, as (name, description, archive or bytes) ---------------------------------------


def head_and_trailer_cases():
    good = tensors().build()
    trailer = good[-64:]
    index_off, index_len = struct.unpack_from("<QQ", trailer)

    yield "001-empty-file", "no bytes at all", b""
    short = MIN_FILE - 1
    yield "001-one-byte-short", f"{short} bytes, one less than F-001 allows", good[:short]
    yield "001-magic", "the magic and nothing else", good[:8]
    yield "001-seven-bytes", "7 bytes, too few to say that they are no archive", zip_file()[:7]

    yield "002-all-zeros", "nothing but zeros", bytes(MIN_FILE)
    yield "002-zip", "a zip file, as torch.save writes", zip_file()
    yield "002-safetensors", "a safetensors file", safetensors_file()
    yield "002-png", "a PNG image", png_file()
    yield "002-short", "8 bytes of a zip file: foreign, and too short besides", zip_file()[:8]
    yield "002-one-byte-short", f"{short} zeros: foreign, and too short besides", bytes(short)
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
    yield "008-bit-flipped", "a bit of index_off flipped", tensors().patch(-64, b"\x01")
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


def root_and_table_cases():
    good = leaves()
    index, _ = good.build_index()
    length = len(index)

    def root_at(start, size):
        return leaves().override("trailer", root_off=start, root_len=size)

    short, unaligned = ROOT_LEN - 4, ROOT_LEN + 2
    yield "020-root-too-short", f"a root of {short} bytes", root_at(length - short, short)
    yield "020-unaligned", "root_off no multiple of 4", root_at(length - unaligned, unaligned)
    short = leaves().lay(after_root=bytes(8)).override("trailer", root_len=ROOT_LEN)
    yield "020-short-of-end", "the root ends before the index", short
    wrapped = root_at((1 << 32) - 256, length + 256)
    yield "020-overflow", "root_off + root_len is right modulo 2^32", wrapped

    # The sizes of the tables of `leaves`, and the end of its last table that is not empty.
    heap, dims = len(good.tables["heap"]), len(good.tables["dims"])
    end = align_up(align_up(heap, 8) + 8 * dims + 36 * len(good.tables["nodes"]), 8)

    yield "021-gap-not-zero", "gaps between tables are not zero", leaves().lay(gap=b"\x01")
    yield "021-root-too-late", "four zeros before the root", leaves().lay(before_root=bytes(4))
    lower = leaves().override("root", heap=(1, heap - 1))
    yield "021-first-not-at-0", "the heap begins at 1", lower
    yield "021-unaligned", "nodes follow a misaligned heap", unaligned_tables()
    # After one CRC, its page begins at an odd multiple of 4. After two CRCs and their page, the slices do.
    spaced = one_tensor((2,)).lay(alignments={"crc_pages": 8})
    yield "021-pages-aligned-to-8", "four zeros before the CRCs of pages", spaced
    spaced = sliced().lay(alignments={"slices": 8})
    yield "021-slices-aligned-to-8", "four zeros before the slices", spaced
    elsewhere = leaves().override("root", tensors=(0, 0))
    yield "021-empty-elsewhere", "no tensors, but elsewhere", elsewhere
    # The base storages are the last table, so no later table is misplaced.
    for name, records in (("into-root", 1), ("beyond-file", NONE)):
        about = f"the last table claims {records} records that it does not have"
        yield f"021-{name}", about, leaves().override("root", base_storages=(end, records))
    longer = leaves().lay(after_root=bytes(64)).override("root", base_storages=(end, 1))
    yield "021-longer-root-in-table", f"a root of {ROOT_LEN + 64} bytes begins in the last table", longer
    gap = leaves().lay(gap=b"\x01", after_root=bytes(8))
    yield "021-longer-root-gap", f"a root of {ROOT_LEN + 8} bytes and gaps that are not zero", gap


def unaligned_tables():
    """An archive whose nodes follow a heap of 9 bytes without padding."""
    archive = keyed("123456789")
    index, root_off = archive.build_index()
    # Heap, nodes and by_key, which stays aligned. The empty tables after it keep their places.
    tables = (index[:9] + index[16:80] + bytes(3) + index[80:88]).ljust(root_off, b"\0")
    archive.override("root", dims=(9, 0), nodes=(9, 2), by_key=(76, 2))
    index = tables + archive.build_index()[0][root_off:]
    archive.override("trailer", index_crc32=zlib.crc32(index))
    return archive.patch(-64 - len(index), tables)


def heap_and_dims_cases():
    def with_heap(heap, *ranges):
        """A dict whose keys are at these ranges of the heap."""
        archive = keyed(*"ab"[: len(ranges)]).set("heap", heap)
        for node, (start, length) in zip(archive.tables["nodes"][1:], ranges):
            node["key"] = length << 32 | start
        return archive

    prefix = with_heap(b"ab", (0, 2), (0, 1)).set("by_key", (0, 2, 1))
    beyond = 9 << 32
    dim_name = meshed(ranks=(0, 1), names=(b"dp",))
    dim_name.set("dims", [d + beyond if d >> 32 else d for d in dim_name.tables["dims"]])
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
        ("type-name-beyond", "the name of a namedtuple", named_type(b"P").at("p", b=beyond | 1)),
        ("dim-name-beyond", "a mesh dimension's name", dim_name),
        ("shard-name-beyond", "a shard's name", divergent(0, 1).edit("shards", 0, name=beyond | 4)),
        ("dtype-name-beyond", "the name of a dtype", other_dtype().edit("dtypes", 0, name=beyond | 4)),
        ("dtype-name-straddles", "the name of a dtype begins in a key and goes on", straddling_dtype_name()),
    ):
        yield f"030-{name}", about, archive

    straddling = one_tensor((2, 3), UINT8, (1, 2)).set("dims", (2, 3, 2))
    # The shape of the mesh is already claimed as global_shape, but the ranks are not.
    mesh = one_slice((0,), (0,), (2,), (2,), (4, 5)).edit("slices", 0, mesh=1, ranks=2)
    mesh.set("dims", (0, 2, 4, 5))
    for name, about, archive in (
        ("shape-none", "a shape of NONE", one_tensor((2, 3)).edit("tensors", 0, shape=NONE)),
        ("strides-straddle", "strides", straddling.edit("tensors", 0, strides=1)),
        ("empty-not-0", "a size without entries, at 1,", leaf(SIZE, ()).at("leaf", a=1)),
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
    twice = keyed("a").attr(b"x", BYTES, bytes(5001)).attr(b"y", BYTES, bytes(5001))
    yield "030-long-twice", "a heap range of 5001 bytes that two attributes name", twice
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
        ("attr-name", "the name of an attribute", attrs(bad)),
        ("type-name", "the name of a namedtuple", named_type(bad)),
        ("dim-name", "the name of a mesh dimension", meshed(ranks=(5, 6), names=(bad,))),
    ):
        yield f"032-{name}", f"{about} is not UTF-8", archive
    content = stored(STR, b"text" * 1025 + bad).only("verify")
    yield "096-stored", "a str in a storage is not UTF-8", content
    surrogate = b"a\xed\xa0\x80"
    for name, about, archive in (
        ("device", "a device", leaf(DEVICE, surrogate)),
        ("media", "a media tag", leaf(OPAQUE, b"{}", surrogate)),
        ("type-name", "the name of a namedtuple", named_type(surrogate)),
        ("attr", "the name of an attribute", attrs(surrogate)),
        ("dim", "the name of a mesh dimension", meshed(ranks=(5, 6), names=(surrogate,))),
    ):
        yield f"032-{name}-surrogate", f"{about} has a surrogate", archive
    yield from name_length_cases()


def name_length_cases():
    long = b"d" * 257
    characters = ("d" + "é" * 128).encode()
    for name, about, archive in (
        ("device-empty", "an empty device", leaf(DEVICE, b"")),
        ("device-257", "a device of 257 bytes", leaf(DEVICE, long)),
        ("device-characters", "a device of 129 characters and 257 bytes", leaf(DEVICE, characters)),
        ("media-empty", "an empty media tag", leaf(OPAQUE, b"{}", b"")),
        ("media-257", "a media tag of 257 bytes", leaf(OPAQUE, b"{}", long)),
        ("type-name-empty", "an empty name of a namedtuple", named_type(b"")),
        ("type-name-257", "a name of a namedtuple of 257 bytes", named_type(long)),
        ("dim-257", "a name of a mesh dimension of 257 bytes", meshed(ranks=(5, 6), names=(long,))),
        ("attr-4097", "a name of an attribute of 4097 bytes", attrs(b"d" * 4097)),
    ):
        yield f"034-{name}", about, archive


def named_type(name):
    """A namedtuple without fields, of a type with this name."""
    return Archive().tree(Box(DICT, [("p", Box(NAMEDTUPLE, [], name))]))


def node_cases():
    for kind in (14, 38):
        yield f"040-kind-{kind}", f"a node of kind {kind}", leaves().at("none", kind=kind)
    yield "048-no-root", "no nodes at all", Archive()
    yield "048-list", "the root is a list", Archive().tree(Box(LIST, []))
    yield "048-key-kind", "the root has a none key", keyed("a").edit("nodes", 0, key_kind=K_NONE)
    yield "048-key", "the key of the root is 1", keyed("a").edit("nodes", 0, key=1)
    yield "042-65-levels", "65 levels of containers", nested(65)
    yield from child_cases()
    yield from key_cases()
    yield from leaf_cases()
    yield from class_cases()


def child_cases():
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
    yield "041-by-key-of-list", "by_key of a list is not in order", swap_by_key("list")


def swap_by_key(kind):
    archive = leaves()
    first = archive.named[kind]["a"]
    archive.tables["by_key"][first : first + 2] = first + 1, first
    return archive


def key_cases():
    def child(kind, **fields):
        """A container with one child, whose node is edited."""
        content = Leaf(INT, 7)
        items = [content] if kind in (LIST, TUPLE) else [("x", content)]
        name = b"Point" if kind == NAMEDTUPLE else b""
        archive = Archive().tree(Box(DICT, [("box", Box(kind, items, name))]))
        return archive.edit("nodes", 2, **fields)

    integer = {"key_kind": K_INT, "key": 1}
    nan = 0x7FF8 << 48
    long = b"k" * 4097
    for name, about, archive in (
        ("kind-9", "a key of kind 9", keyed(Key(9, 0))),
        ("index-in-dict", "a dict with an index key", keyed(Key(K_INDEX, 0))),
        ("int-in-list", "a list with an int key", child(LIST, **integer)),
        ("int-in-namedtuple", "a field named 1", child(NAMEDTUPLE, **integer).set("heap", b"boxPoint")),
        ("bool-in-divergent", "two writers that are bools", divergent(False, True)),
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
        yield f"044-by-key-of-{kind}", f"by_key of a {kind} out of order", swap_by_key(kind)
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
        ("bigint-float", (1 << 70, 2.0**70)),
        ("bigint-float-negative", (-(1 << 70), -(2.0**70))),
        ("bigint-float-2-63", (1 << 63, 2.0**63)),
        ("tuple-bool", ((1,), (True,))),
        ("tuple-float", ((1,), (1.0,))),
        ("tuple-zero", ((0.0,), (-0.0,))),
        ("tuple-bigint", ((1 << 70,), (2.0**70,))),
        ("tuple-nested", ((((1,), "a"), None), (((True,), "a"), None))),
    ):
        yield f"045-{name}", f"the keys {keys}", keyed(*keys)
    yield "045-bigint-float-large", "the keys int(1e300) and 1e300", keyed(int(1e300), 1e300)
    many = [(n, n + 1) for n in range(98)]
    yield "045-tuple-apart", "two equal tuples among 100", keyed((7.0, True), *many, (7, 1))


def leaf_cases():
    for name, content in (
        ("empty", b""),
        ("i64-max-in-9", ((1 << 63) - 1).to_bytes(9, "little")),
        ("i64-min-in-9", (-(1 << 63)).to_bytes(9, "little", signed=True)),
        ("zero-at-end", bigint(1 << 64) + b"\0"),
        ("sign-at-end", bigint(-(1 << 64)) + b"\xff"),
    ):
        about = f"a bigint of {len(content)} bytes, {content.hex() or 'empty'}"
        yield f"046-{name}", about, leaf(BIGINT, content)
    yield "046-long", "a bigint of 4097 bytes", leaf(BIGINT, bigint(1 << 32768))
    short = Key(K_BIGINT, (7).to_bytes(8, "little"))
    yield "046-key", "a bigint key that is an i64", keyed(short)

    for kind, field in (
        ("none", "a"),
        ("bool", "b"),
        ("int", "count"),
        ("size", "b"),
        ("opaque", "count"),
    ):
        about = f"{field} of a {kind} node is 1"
        yield f"047-{kind}-{field}", about, leaves().at(kind, **{field: 1})
    yield "047-tensor-b", "b of a tensor node is 1", one_tensor((2,)).at("0", b=1)
    yield "047-size-65", "a size of 65 entries", leaf(SIZE, (1,) * 65)
    yield "047-bool-2", "a bool of 2", leaves().at("bool", a=2)
    # The last two are those of float32, if a reader takes only 16 or 32 bits.
    for number in (0, 15, 1 << 16 | FLOAT32, 1 << 32 | FLOAT32):
        about = f"a dtype leaf of number {number}"
        yield f"050-leaf-{number}", about, leaves().at("dtype", a=number)
    for name, number in (("", OTHER + 1), ("-wide", 1 << 16 | OTHER)):
        about = f"a dtype leaf of number {number:#x}, and a record of {OTHER:#x}"
        yield f"050-leaf{name}", about, dtype_and_tensor(number)
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


def dtype_and_tensor(number):
    """A tensor of a dtype that the file describes, and a dtype leaf."""
    items = [("tensor", Leaf(TENSOR, 0, count=1)), ("dtype", Leaf(DTYPE, number))]
    return Archive().tree(Box(DICT, items)).storage(bytes(64)).tensor((4,), OTHER).dtype()


def straddling_dtype_name():
    """A key "float6", and a dtype whose name begins in it. The rest of the name follows in the heap."""
    archive = Archive().tree(Box(DICT, [("float6", Leaf(TENSOR, 0, count=1))])).storage(bytes(64))
    archive.tensor((4,), OTHER).dtype(b"_e3m2")
    return archive.edit("dtypes", 0, name=len("float6_e3m2") << 32)


def dtype_cases():
    """Dtype records that break F-057."""
    for name, about, archive in (
        ("unsorted", "two records in the wrong order", other_dtypes((b"a", OTHER + 1), (b"b", OTHER))),
        ("number-twice", "two records of one number", other_dtypes((b"a", OTHER), (b"b", OTHER))),
        ("number-0", "a record of number 0", other_dtype(number=0)),
        ("listed-number", "a record of the number of float32", other_dtype(number=FLOAT32)),
        ("listed-name", "a record named float32", other_dtype(b"float32")),
        ("name-twice", "two records of one name", other_dtypes((b"a", OTHER), (b"a", OTHER + 1))),
        ("name-empty", "a record without a name", other_dtype(b"")),
        ("name-33", "a name of 33 bytes", other_dtype(b"f" * 33)),
        ("name-upper", "a name with a capital letter", other_dtype(b"Float6")),
        ("name-dash", "a name with a dash", other_dtype(b"float6-e3m2")),
        ("name-newline", "a name that ends with a line feed", other_dtype(b"float6\n")),
        ("size-0", "elements of 0 bytes", other_dtype(size=0)),
        ("size-257", "elements of 257 bytes", one_tensor((0,), OTHER).dtype(size=257)),
        ("bits-0", "values of 0 bits", other_dtype(bits=0)),
        ("values-0", "elements without values", other_dtype(values=0)),
        ("too-many-bits", "three values of 6 bits in 2 bytes", other_dtype(size=2, values=3)),
        ("class-7", "class 7", other_dtype(**{"class": 7})),
        ("unused", "a record that neither a tensor nor a leaf uses", one_tensor((2,)).dtype()),
    ):
        yield f"057-{name}", about, archive


def tensor_cases():
    yield from dtype_cases()

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

    # 12 and 46 were numbers of a draft.
    for number in (0, 12, 46, 256, 65535):
        yield f"050-dtype-{number}", f"a tensor of dtype {number}", one_tensor((2,), number)
    yield "052-rank-65", "a tensor of rank 65", one_tensor((1,) * 65)

    top = 1 << 63
    for name, about, archive in (
        ("size", "a size of 2^63 beside one of 0", one_tensor((top, 0))),
        ("stride-empty", "a stride of 2^63, no elements", one_tensor((0,), UINT8, (top,))),
        ("product-empty", "2^80 bytes but for a size of 0", one_tensor((1 << 40, 0, 1 << 40))),
        ("itemsize", "2^63 bytes in 2^61 elements", one_tensor((1 << 61,), FLOAT32, (0,))),
        ("span", "a span of 4 modulo 2^64", one_tensor((5,), FLOAT32, (1 << 62,))),
        ("end", "an end of 2^63", one_tensor((2,), FLOAT32, byte_offset=top - 8)),
        ("offset-wraps", "an end of 1 modulo 2^64", one_tensor((2,), byte_offset=U64)),
    ):
        yield f"053-{name}", about, archive

    for name, about, archive in (
        ("flag-16", "flag 16", one_tensor((2,), flags=16)),
        ("reserved", "reserved is 1", one_tensor((2,), reserved=1)),
        ("numpy-grad", "a numpy array that requires grad", one_tensor((2,), FLOAT32, flags=5)),
        ("numpy-parameter", "a numpy array that is a Parameter", one_tensor((2,), flags=6)),
        ("array-scalar", "a numpy array that is a scalar", one_tensor((), flags=12)),
        ("scalar-rank-1", "a numpy scalar of rank 1", one_tensor((1,), flags=8)),
        ("grad-int", "an int tensor that requires grad", one_tensor((2,), INT8, flags=1)),
        ("grad-int-parameter", "a Parameter of ints that requires grad", one_tensor((2,), INT8, flags=3)),
        ("grad-bool", "a bool tensor that requires grad", one_tensor((2,), BOOL_DTYPE, flags=1)),
        ("grad-bits", "a tensor of bits that requires grad", one_tensor((2,), BITS8, flags=1)),
    ):
        yield f"056-{name}", about, archive
    for name, about, archive in (
        ("explicit", "row-major strides", one_tensor((2, 3), UINT8, (3, 1))),
        ("rank-0", "strides of a tensor of rank 0", one_tensor((), UINT8, ())),
        ("rank-1", "the stride 1", one_tensor((2,), UINT8, (1,))),
        ("size-1", "row-major strides beside a size of 1", one_tensor((2, 1, 3), UINT8, (3, 3, 1))),
        ("empty", "row-major strides, no elements", one_tensor((0, 4), UINT8, (4, 1))),
        ("inner-empty", "row-major strides, a size of 0 counts as 1", one_tensor((2, 0, 3), UINT8, (3, 3, 1))),
    ):
        yield f"058-{name}", about, archive

    empty = tensors().edit("tensors", 3, storage=0)
    yield "054-empty-with-storage", "a tensor without elements in a storage", empty
    empty = tensors().edit("tensors", 3, byte_offset=8)
    yield "054-empty-with-offset", "a tensor without elements at byte 8", empty
    bare = runs(1).tensor((2,), storage=NONE)
    yield "054-no-storage", "a tensor with elements but no storage", bare
    for name, about, archive in (
        ("storage-beyond", "storage 1 of 1", runs(1).tensor((2,), storage=1)),
        ("storage-of-second", "the second of four", tensors().edit("tensors", 1, storage=2)),
        ("shape", "one element too many", one_tensor((65,))),
        ("itemsize", "its last element is cut", one_tensor((4,), FLOAT32, byte_offset=52)),
        ("strides", "its last corner is outside", one_tensor((8, 8), UINT8, (8, 2))),
        ("end", "an end of 2^63 - 1", one_tensor((2,), byte_offset=top - 3)),
    ):
        yield f"054-{name}", about, archive
    far = one_tensor((0,), byte_offset=U64)
    yield "054-empty-far", "a tensor without elements at byte 2^64 - 1", far
    odd = one_tensor((2,), COMPLEX128, byte_offset=8)
    yield "055-complex128", "a complex128 tensor at byte 8", odd


def storage_cases():
    yield "061-align-5", "align_log2 is 5", one_tensor((2,)).edit("storages", 0, align_log2=5)
    far = manifest().edit("storages", 1, align_log2=22, offset=1 << 22)
    far.edit("shards", 1, index_off=1 << 23, file_len=1 << 24)
    yield "061-align-22", "align_log2 is 22, in a shard", far

    for name, about, fields in (
        ("codec-3", "codec 3", {"codec": 3}),
        ("vendor", "codec 128, without a vendor bit", {"codec": 128}),
        ("chunk-log2", "chunks of 2 MiB", {"chunk_log2": 21}),
        ("chunk-log2-small", "chunks of 2 KiB", {"chunk_log2": 11}),
        ("width-1", "width 1, and codec 0", {"width": 1}),
        ("chunks", "a first chunk", {"chunks": 0}),
        ("raw-longer", "raw_len above stored_len", {"raw_len": 65}),
    ):
        yield f"063-{name}", about, one_tensor((2,)).edit("storages", 0, **fields)
    for name, about, fields in (
        ("width-0", "width 0, and codec 1", {"width": 0}),
        ("width-3", "width 3", {"width": 3}),
        ("width-32", "width 32", {"width": 32}),
        ("zstd-chunk-log2", "compressed chunks of 64 KiB", {"chunk_log2": 16}),
    ):
        yield f"063-{name}", about, compressed().edit("storages", 0, **fields)
    for name, about, fields in (
        ("width-0", "width 0", {"width": 0}),
        ("width-3", "width 3", {"width": 3}),
        ("width-8", "width 8", {"width": 8, "raw_len": 408}),
        ("chunk-log2-20", "chunks of 1 MiB", {"chunk_log2": 20}),
        ("chunk-log2-22", "chunks of 4 MiB", {"chunk_log2": 22}),
        ("chunk-log2-24", "chunks of 16 MiB", {"chunk_log2": 24}),
        ("raw-len", "half an element more", {"raw_len": 407}),
    ):
        yield f"063-delta-{name}", f"a delta storage with {about}", delta().edit("storages", 0, **fields)

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

    def manifest_with_places(*places):
        archive = manifest()
        for i, (shard, offset) in enumerate(places):
            archive.edit("storages", i, shard=shard, offset=offset)
        return archive

    touching = manifest_with_places((0, 4096), (0, 4352)).edit("storages", 0, stored_len=257, raw_len=257)
    for name, about, archive in (
        ("unsorted", "storages not sorted by shard", manifest_with_places((1, 4096), (0, 4096))),
        ("touch", "storages that overlap by a byte", touching),
        ("unaligned", "a storage that is not aligned", manifest_with_places((0, 4096), (1, 4097))),
        ("shard", "a storage in shard 2 of 2", manifest_with_places((0, 4096), (2, 4096))),
        ("in-head", "a storage in the head of its shard", manifest_with_places((0, 0), (1, 4096))),
        ("in-index", "a storage in the index of its shard", manifest_with_places((0, 4096), (1, 8192))),
        ("overflow", "a storage at 2^64 - 256", manifest_with_places((0, 4096), (1, (1 << 64) - 256))),
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
        ("zstd-too-few", "three chunks and two CRCs", three_chunks().set("crcs", (1, 2))),
        ("zstd-by-stored", "a CRC for each MiB of the stored bytes", by_stored_bytes()),
        ("tebibyte", "a storage of 1 TiB with one CRC", large),
        ("fine", "chunks of 4 KiB, and one CRC for more", fine().set("crcs", (1,))),
        ("fine-by-mib", "three CRCs, and chunks of 1 MiB", fine(chunk_log2=20)),
        ("delta-by-mib", "a CRC for each MiB of a delta storage", two_chunks().set("crcs", range(9))),
    ):
        yield f"064-{name}", about, archive

    yield from crc_page_cases()
    yield from chunk_cases()
    yield from delta_storage_cases()
    yield "062-unused", "a storage that nothing names", one_tensor((2,)).storage(b"hidden")
    unused = manifest().edit("tensors", 1, storage=0)
    yield "062-unused-in-shard", "a storage in a shard that nothing names", unused
    yield "062-empty", "a storage without bytes, which nothing can name", keyed("a").storage(b"")


def crc_page_cases():
    """Manifests whose table crc_pages breaks F-067."""

    def paged(chunks, change):
        """A manifest with a storage of this number of chunks and another one of one chunk, and changed crc_pages."""
        archive, size = manifest(), chunks << 12
        archive.edit("storages", 1, chunk_log2=12, stored_len=size, raw_len=size)
        archive.edit("shards", 1, index_off=size + 4096, file_len=size + 8192)
        archive.set("crcs", archive.tables["crcs"][:1] + list(range(chunks)))
        return archive.set("crc_pages", change(archive.records("crc_pages")))

    crcs = struct.pack("<2I", *tensors().tables["crcs"])
    of_each = [zlib.crc32(crcs[:4]), zlib.crc32(crcs[4:])]
    padded = zlib.crc32(crcs.ljust(4096, b"\0"))
    for name, about, archive in (
        ("none", "no entry for two CRCs", tensors().set("crc_pages", ())),
        ("crc", "another CRC than that of the page", tensors().set("crc_pages", (zlib.crc32(crcs) ^ 1,))),
        ("of-crcs", "an entry for each CRC", tensors().set("crc_pages", of_each)),
        ("no-crcs", "an entry, and no CRCs", keyed("a").set("crc_pages", (0,))),
        ("padded", "the CRC of a page that is filled with zeros", tensors().set("crc_pages", (padded,))),
        ("too-many", "an entry for an empty page after 1024 CRCs", paged(1023, lambda pages: pages + [0])),
        ("too-few", "one entry for 1025 CRCs", paged(1024, lambda pages: pages[:1])),
        ("last", "a wrong CRC of the second page", paged(1024, lambda pages: [pages[0], 0])),
        ("swapped", "the entries of two pages, swapped", paged(1024, lambda pages: pages[::-1])),
    ):
        yield f"067-{name}", about, archive


def by_stored_bytes():
    """An archive with two storages. The first has three chunks, but one CRC as if they were one chunk."""
    archive = runs(1, 1).compressed(bytes(2 * CHUNK + 100)).storage(b"after")
    crcs = archive.tables["crcs"]
    archive.set("crcs", (crcs[0], crcs[3])).edit("storages", 1, crcs=1)
    return archive.tensor((4,)).tensor((5,), storage=1)


def chunk_cases():
    def chunk(number, **fields):
        return three_chunks().edit("chunks", number, **fields)

    def frame_of_length(size, length, **codec):
        """A storage of `size` zeros. Its only chunk is described as a frame, planes or tiers of `length` bytes."""
        archive = runs(1).compressed(bytes(size), given={0: bytes(length)}, **codec)
        return archive.tensor((1,))

    def record(**fields):
        return three_chunks().edit("storages", 0, **fields)

    swapped = two_compressed().edit("storages", 0, chunks=1).edit("storages", 1, chunks=0)
    swapped.set("chunks", swapped.tables["chunks"][::-1])
    shared = two_compressed().edit("storages", 1, chunks=0)
    stored = shared.tables["storages"][0]["stored_len"]
    shared.edit("storages", 1, stored_len=stored)
    # A tensor cannot be in a storage without bytes.
    no_chunks = keyed("a").compressed(b"")
    wide_tiers = tiered(encode_tiers(bytes(4096), 16), bytes(4096), 16)
    short = three_chunks()
    short.set("chunks", short.tables["chunks"][:2])
    for name, about, archive in (
        ("none", "codec 1, and chunks NONE", one_tensor((2,)).edit("storages", 0, codec=1, width=1)),
        ("unclaimed", "a chunk record of no storage", tensors().add("chunks", stored_len=100)),
        ("late", "a storage whose chunks begin at record 1", record(chunks=1)),
        ("swapped", "two storages with each other's chunks", swapped),
        ("shared", "two storages with the same chunk", shared),
        ("too-few", "three chunks and two records", short),
        ("too-many", "three chunks and four records", three_chunks().add("chunks")),
        ("first-not-at-0", "the first chunk begins at 1", chunk(0, offset=1)),
        ("gap", "a byte between two chunks", chunk(1, offset=42)),
        ("overlap", "the second chunk begins in the first", chunk(1, offset=40)),
        ("overflow", "a chunk at 2^64 - 1", chunk(1, offset=U64)),
        ("end-early", "the last chunk ends before the storage", record(stored_len=183)),
        ("end-late", "the last chunk ends after the storage", record(stored_len=181)),
        ("codec-3", "a chunk of codec 3 in a storage of codec 1", chunk(0, codec=3)),
        ("codec-5", "a chunk of codec 5", chunk(0, codec=5)),
        ("vendor", "a chunk of codec 2^31, without a vendor bit", chunk(0, codec=1 << 31)),
        ("raw-short", "a raw chunk of 99 bytes for 100", chunk(2, stored_len=99)),
        ("raw-long", "a raw chunk of 101 bytes for 100", chunk(2, stored_len=101)),
        ("raw-frame", "a raw chunk of 41 bytes for a MiB", chunk(0, codec=0)),
        ("not-shorter", "a frame as long as its content", frame_of_length(100, 100)),
        ("longer", "a frame longer than its content", frame_of_length(100, 101)),
        ("one-byte", "a frame for one byte", frame_of_length(1, 1)),
        ("31-for-mib", "a MiB in a frame of 31 bytes", frame_of_length(CHUNK, 31)),
        ("rounded-up", "32,769 bytes in a frame of one byte", frame_of_length(32_769, 1)),
        ("planes-width-16", "a chunk of codec 2, and width 16", planar(None, bytes(400), 16)),
        ("planes-not-shorter", "planes as long as their content", frame_of_length(100, 100, planes=(0,))),
        ("planes-31-for-mib", "a MiB in planes of 31 bytes", frame_of_length(CHUNK, 31, planes=(0,))),
        ("tiers-width-16", "a chunk of codec 4, and width 16", wide_tiers),
        ("tiers-not-shorter", "tiers as long as their content", frame_of_length(100, 100, tiers=(0,))),
        ("tiers-longer", "tiers longer than their content", frame_of_length(100, 101, tiers=(0,))),
        ("tiers-31-for-mib", "a MiB in tiers of 31 bytes", frame_of_length(CHUNK, 31, tiers=(0,))),
        (
            "all-raw",
            "codec 1, and all chunks raw",
            runs(1).compressed(b"raw", raw=(0,)).tensor((3,)),
        ),
        ("no-chunks", "codec 1, and no chunks", no_chunks),
    ):
        yield f"065-{name}", about, archive


def delta_storage_cases():
    """Records of delta storages, and of the tables `base` and `base_storages`."""
    size = len(NEW)
    one_record = two_chunks()
    one_record.set("chunks", one_record.tables["chunks"][:1])
    for name, about, archive in (
        ("codec-1", "a chunk of codec 1", two_chunks(1, frame(bytes(size)), bytes(size))),
        ("codec-5", "a chunk of codec 5", delta(codec=5)),
        ("only-raw", "only a raw chunk", delta(NEW, codec=0)),
        ("raw-short", "a raw chunk without its last byte", two_chunks(0, NEW[:-1])),
        ("raw-empty", "a raw chunk without bytes", two_chunks(0, b"")),
        ("planes-empty", "a chunk of codec 2 without bytes", two_chunks(2, b"")),
        ("tiers-empty", "a chunk of codec 4 without bytes", two_chunks(4, b"")),
        ("tiers-not-shorter", "tiers as long as their content", two_chunks(4, bytes(size))),
        ("too-few", "one record of two chunks", one_record),
        ("none", "no first chunk", delta().edit("storages", 0, chunks=NONE)),
    ):
        yield f"065-delta-{name}", f"a delta storage with {about}", archive

    def ordinary():
        return tensors().digested().based()

    def mixed():
        archive = runs(1, 1).storage(OLD).tensor((4,)).delta(NEW, [(3, compare().encode())])
        return archive.tensor((4,), storage=1).digested().based()

    digests = [bytes(32)] * 2
    empty = Archive().tree(Box(DICT, [])).based().set("base_storages", (NONE,))
    codec_alone = delta().set("base", ()).set("base_storages", ())
    of_codec_1 = compressed().digested().based().set("base_storages", (0,))
    for name, about, archive in (
        ("two-bases", "two entries of base", delta().set("base", digests)),
        ("no-base", "a delta storage and its base storage, and no base", delta().set("base", ())),
        ("codec-alone", "a delta storage, and nothing else of a delta", codec_alone),
        ("numbers-alone", "two base storages, and no base", tensors().set("base_storages", (0, 1))),
        ("nones-alone", "NONE for both storages, and no base", tensors().set("base_storages", (NONE, NONE))),
        ("no-entry", "no entry for a delta storage", delta().set("base_storages", ())),
        ("no-entries", "a base, and no entries for two ordinary storages", ordinary().set("base_storages", ())),
        ("entry-missing", "an entry for the delta storage alone", mixed().set("base_storages", (0,))),
        ("entry-too-many", "two entries for one storage", delta().set("base_storages", (0, 0))),
        ("entry-of-no-storage", "an entry, and no storage", empty),
        ("none", "NONE for a delta storage", delta().set("base_storages", (NONE,))),
        ("number", "a number for an ordinary storage", mixed().set("base_storages", (0, 0))),
        ("number-alone", "a number for an ordinary storage alone", ordinary().set("base_storages", (NONE, 0))),
        ("number-of-codec-1", "a number for a storage of codec 1", of_codec_1),
        ("swapped", "two storages with each other's entries", mixed().set("base_storages", (0, NONE))),
        ("manifest", "a manifest with a base", manifest().set("digests", digests).based()),
        ("manifest-nones", "a manifest with NONE for each storage", manifest().set("base_storages", (NONE, NONE))),
        ("no-digests", "a delta storage, and no digests", delta().set("digests", ())),
        ("no-digests-ordinary", "a base, and neither digests nor delta storages", tensors().based()),
    ):
        yield f"066-{name}", about, archive


def slice_cases():
    for name, about, archive in (
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
    # The ranks 3 and 1 follow the shape of the mesh in dims. The field `ranks` names another range.
    apart = meshed(ranks=(3, 1), coordinates=(1,)).edit("slices", 0, ranks=0)
    # The mesh of the second slice is the global shape, 1. Its rank is the 2 with which the other mesh begins.
    before = runs(1, 1).tensor((0,), slice=0).tensor((0,), slice=1)
    before.slice((0,), (1,), (2,), (5, 6)).slice((0,), (1,), (2,), (5, 6))
    before.edit("slices", 1, mesh=1, ranks=2)
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
        ("mesh-overlaps-later", "a mesh that ends in another one", before),
        ("mesh-inside", "a mesh inside another", two_meshes((3, (1, 7, 8)), (1, (7,)))),
        ("names-without-ranks", "names, but no ranks", meshed(names=(b"dp",))),
        ("names-twice", "two dimensions dp", meshed((1, 1), ranks=(5,), names=(b"dp", b"dp"))),
        ("flags", "flags of a slice", meshed().edit("slices", 0, flags=1)),
    ):
        yield f"071-{name}", about, archive

    swapped = sliced().edit("tensors", 0, slice=1).edit("tensors", 1, slice=0)
    for name, about, archive in (
        ("unnamed", "a slice that no tensor names", meshed().slice((0,), (4,))),
        ("rank", "a slice of rank 2 of a tensor of rank 1", one_slice((2,), (0, 0), (4, 4))),
        ("beyond", "slice 1 of 1", meshed().edit("tensors", 0, slice=1)),
        ("out-of-order", "the second slice is named first", swapped),
    ):
        yield f"075-{name}", about, archive

    def placed(kind=SHARD, **fields):
        return meshed(placements=0).add("placements", kind=kind, **fields)

    swapped = sliced().edit("slices", 0, placements=1).edit("slices", 1, placements=0)
    # On a mesh of 1 x 2, slice 0 has the placements 0 and 1, and slice 1 has 1 and 2.
    straddling = runs(1, 1).tensor((0,), slice=0).tensor((0,), slice=1)
    for i in range(2):
        straddling.slice((0,), (4,), (1, 2), placements=i)
    for _ in range(3):
        straddling.add("placements", kind=SHARD)
    for name, about, archive in (
        ("kind-3", "a placement of kind 3", placed(3)),
        ("reserved", "a reserved byte", placed(reserved=1)),
        ("replicate-dim", "Replicate with a dim", placed(REPLICATE, dim=1)),
        ("strided-no-factor", "_StridedShard without", placed(STRIDED_SHARD)),
        ("dim", "Shard(1) of a tensor of rank 1", placed(SHARD, dim=1)),
        ("strided-dim", "_StridedShard(1, 2) of it", placed(STRIDED_SHARD, dim=1, split_factor=2)),
        ("unclaimed", "a placement of no slice", placed().add("placements")),
        ("beyond", "a slice with a placement beyond", meshed(placements=0)),
        ("out-of-order", "the second placement is named first", swapped),
        ("straddles", "a range that begins in the claimed part and goes on", straddling),
    ):
        yield f"073-{name}", about, archive

    yield "074-dtype", "a run of uint8 and int8", sliced().edit("tensors", 1, dtype=INT8)
    mixed = runs(2).storage(b"first half").storage(b"secondhalf")
    for i in range(2):
        mixed.tensor((2, 3), storage=i, slice=i)
    mixed.slice((0, 0), (4, 3)).slice((0, 0), (5, 3))
    yield "074-global-shape", "a run of two global shapes", mixed


def attr_and_shard_cases():
    for name, about, archive in (
        ("unsorted", "b before a", attrs(b"b", b"a")),
        ("twice", "a name twice", attrs(b"a", b"b", b"b")),
        ("unsigned", "bytes are compared without sign", attrs("é".encode(), b"a")),
        ("float", "an attribute of kind float", attrs(b"a").edit("attrs", 0, kind=FLOAT)),
        ("reserved", "a reserved byte", attrs(b"a").edit("attrs", 0, reserved=1)),
    ):
        yield f"080-{name}", about, archive
    for name, about, archive, count in (
        ("too-few", "one digest of two storages", tensors(), 1),
        ("too-many", "three digests of two storages", tensors(), 3),
        ("no-storages", "a digest of no storage", keyed("a"), 1),
        ("manifest", "one digest of two storages in a manifest", manifest(), 1),
    ):
        yield f"081-{name}", about, archive.set("digests", [bytes(32)] * count)
    yield from subtree_cases()

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
    yield "082-sig", "a shard with the name of a signature", keyed("a").shard(b"b.tssd.sig")
    yield "082-sig-case", "a shard whose name ends with .SIG", keyed("a").shard(b"b.SIG")
    twice = keyed("a").shard(b"b.tssd").shard(b"B.tssd", writer=1)
    yield "082-name-twice-case", "two shards of one name but for its case", twice
    short = MIN_TAIL - 1
    for name, about, fields in (
        ("low", "below 4096", {"index_off": 4032}),
        ("unaligned", "no multiple of 64", {"index_off": 8200}),
        ("short", f"{short} bytes before the end", {"index_off": 8192, "file_len": 8192 + short}),
        ("overflow", "at 2^64 - 64", {"index_off": (1 << 64) - 64}),
    ):
        archive = keyed("a").shard(b"b.tssd", **fields)
        yield f"082-index-{name}", f"the index of a shard is {about} of its file", archive
    outside = divergent(0, 1).set("shards", []).set("heap", b"leaf")
    other = 1, Leaf(INT, 7)
    inside = divergent(0, 1, inside=lambda values: Box(DIVERGENT, [(0, values), other]))
    below = divergent(0, 1, inside=lambda values: Box(DIVERGENT, [(0, Box(LIST, [values])), other]))
    for name, about, archive in (
        ("outside", "a divergent node in a file without shards", outside),
        ("inside", "a divergent node in another", inside),
        ("below", "a divergent node in a list in another", below),
        ("no-children", "a divergent node without children", divergent()),
        ("one-child", "a divergent node with one child", divergent(0)),
    ):
        yield f"076-{name}", about, archive


def subtree_cases():
    """Entries of subtrees that break F-081."""

    def digested(archive, count, **fields):
        """Digests of zeros, and as many subtrees. The fields are those of storage 0."""
        archive.set("digests", [bytes(32)] * len(archive.tables["storages"]))
        return archive.set("subtrees", [bytes(32)] * count).edit("storages", 0, **fields)

    def two_fine():
        """Two storages of three chunks each."""
        archive = runs(1, 1)
        for number in range(2):
            archive.storage(bytes(9000), chunk_log2=12).tensor((9000,), storage=number)
        return archive

    large = manifest()
    for number in range(2):
        large.edit("storages", number, chunk_log2=12, stored_len=4100, raw_len=4100)
    large.set("crcs", [crc for crc in large.tables["crcs"] for _ in range(2)])
    large.edit("storages", 1, crcs=2)
    for number in range(2):
        large.edit("shards", number, index_off=1 << 14, file_len=1 << 15)
    digested(large, 4, subtrees=0).edit("storages", 1, subtrees=2)
    without_digests = digested(fine(), 3, subtrees=0).set("digests", ())
    swapped = digested(two_fine(), 6, subtrees=3).edit("storages", 1, subtrees=0)
    shared = digested(two_fine(), 3, subtrees=0).edit("storages", 1, subtrees=0)
    for name, about, archive in (
        ("without-digests", "three subtrees of a storage, and no digests", without_digests),
        ("none", "digests, and no subtrees of a storage of three chunks", digested(fine(), 0)),
        ("too-few", "two subtrees of three chunks", digested(fine(), 2, subtrees=0)),
        ("too-many", "four subtrees of three chunks", digested(fine(), 4, subtrees=0)),
        ("late", "the subtrees of a storage begin at entry 1", digested(fine(), 4, subtrees=1)),
        ("swapped-storages", "two storages with each other's subtrees", swapped),
        ("shared", "two storages with the same subtrees", shared),
        ("in-manifest", "a manifest with subtrees", large),
        ("of-one-chunk", "a subtree of a storage of one chunk", digested(one_tensor((2,)), 1, subtrees=0)),
        ("of-delta", "two subtrees of a delta storage of two chunks", digested(two_chunks(), 2, subtrees=0)),
    ):
        yield f"081-subtrees-{name}", about, archive


def payload_cases():
    yield from frame_cases()
    yield from planes_cases()
    yield from tiers_cases()
    yield from tier_code_cases()
    yield from digest_cases()
    yield from delta_cases()
    yield from delta_position_cases()
    yield from delta_column_cases()
    yield from base_cases()
    yield "090-first-byte", "the first byte of a storage", tensors().patch(4096, b"\xff")
    # The storage has one chunk, which has the same CRC. Both are changed, so that they agree.
    wrong = tensors().edit("storages", 0, crc32=1)
    wrong.set("crcs", [1] + wrong.tables["crcs"][1:])
    yield "090-crc", "the CRCs agree, but not with the bytes", wrong
    damaged_fine = fine().patch(4096 + 8999, b"\xff")
    yield "090-fine", "the last byte of a storage in chunks of 4 KiB", damaged_fine
    damaged_frame = three_chunks().patch(4096 + 60, b"\xff")
    yield "090-frame", "a byte of the second frame of a storage", damaged_frame
    damaged_raw_chunk = three_chunks().patch(4096 + 82, b"\xff")
    yield "090-raw-chunk", "a byte of a raw chunk of a compressed storage", damaged_raw_chunk
    yield "090-planes", "a byte of a raw plane", planar().patch(4096 + 16, b"\xff")
    yield "090-tiers", "a byte of tier 1", tiered().patch(4096 + 250 + 27, b"\xff")
    yield "090-delta", "a byte of a delta chunk", delta().patch(4096 + 30, b"\xff")
    swapped = three_chunks()
    swapped.set("crcs", swapped.tables["crcs"][::-1])
    yield "090-swapped", "a compressed storage whose chunks have each other's CRCs", swapped
    yield "091-crc", "the CRC of a storage", tensors().edit("storages", 1, crc32=1)
    wrong = manifest().edit("storages", 1, crc32=1)
    yield "091-manifest", "the CRC of a storage of a manifest", wrong
    wrong = compressed().edit("storages", 0, crc32=1).only("deep")
    yield "091-zstd", "the CRC of a compressed storage", wrong
    stored_crc = compressed()
    stored_crc.edit("storages", 0, crc32=stored_crc.tables["crcs"][0]).only("deep")
    yield "091-of-stored", "the CRC of the stored bytes of a compressed storage", stored_crc
    wrong = compressed().edit("storages", 0, width=1).only("deep")
    yield "091-not-shuffled", "bytes that are shuffled, and width 1", wrong
    wrong = planar().edit("storages", 0, crc32=1).only("deep")
    yield "091-planes", "the CRC of a storage of codec 2", wrong
    wrong = planar(encode_planes(FLOATS, 4, rotate=False), FLOATS).only("deep")
    yield "091-planes-not-rotated", "planes of elements that are not rotated", wrong
    wrong = tiered().edit("storages", 0, crc32=1).only("deep")
    yield "091-tiers", "the CRC of a storage of codec 4", wrong
    wrong = tiered(encode_tiers(SPREAD, 2, rotate=False)).only("deep")
    yield "091-tiers-not-rotated", "tiers of elements that are not rotated", wrong
    swapped = Tiers(SPREAD, 2, SPREAD_SYMBOLS)
    swapped.symbols = SPREAD_SYMBOLS[::-1]
    yield "091-tiers-symbols", "symbols in reverse order", tiered(swapped.encode()).only("deep")
    # Two chunks of zeros and a short one. The CRCs of the chunks are right; the CRC of the storage is not.
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


def frame_cases():
    """Invalid frames of a chunk of 400 zeros. Their CRCs are right, so only decoding detects them."""
    good = frame(bytes(400))
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 7) + bytes(7)
    unsized = frame_head(400, window=80)
    unsized = unsized[:4] + b"\0" + unsized[5:6] + blocks(bytes(400))
    checked = frame_head(400, flags=4) + blocks(bytes(400)) + bytes(4)
    huge = frame_head(400, flags=0) + block(2, 100, bytes(range(100)), last=True)
    for name, about, content in (
        ("no-frame", "400 bytes of 7 where a frame should be", b"\7" * 40),
        ("magic", "the magic of another version", b"\x27" + good[1:]),
        ("skippable", "a skippable frame", skippable),
        ("after-skippable", "a frame after a skippable one", skippable + good),
        ("two-frames", "the frame twice", good * 2),
        ("two-halves", "two frames of 200 bytes each", frame(bytes(200)) * 2),
        ("trailing", "a byte after the frame", good + b"\0"),
        ("unsized", "no content size", unsized),
        ("larger-size", "a content size of 401", frame(bytes(400), size=401)),
        ("smaller-size", "a content size of 399", frame(bytes(400), size=399)),
        ("size-2-32", "a content size of 2^32 + 400", frame_of_size(400 + (1 << 32))),
        ("window", "a window of 2^20 + 2^17", frame(bytes(400), window=0x51)),
        ("window-largest", "a window of 15 * 2^38", frame(bytes(400), window=0xFF)),
        ("dictionary", "dictionary 1, in one byte", frame(bytes(400), dictionary=b"\1")),
        ("dictionary-4", "dictionary 2^24, in four", frame(bytes(400), dictionary=b"\0\0\0\1")),
        ("reserved", "the reserved bit", frame(bytes(400), flags=8)),
        ("cut-header", "a frame that ends in its header", good[:6]),
        ("cut-block", "a frame that ends in its only block", good[:-1]),
        ("not-last", "no block is the last", frame(bytes(400), body=block(1, 400, b"\0"))),
        ("block-type-3", "a block of the reserved type", frame(bytes(400), block(3, 0, b"", True))),
        ("short", "blocks of 399 bytes", frame(bytes(400), blocks(bytes(399)))),
        ("long", "blocks of 401 bytes", frame(bytes(400), blocks(bytes(401)))),
        ("bomb", "blocks of 2 MiB", frame(bytes(400), blocks(bytes(2 << 20)))),
        ("empty", "a block of no bytes", frame(bytes(400), block(0, 0, b"", True))),
        ("checksum", "a checksum that is wrong", checked),
        ("garbage", "a compressed block that is none", huge),
    ):
        yield f"093-{name}", f"a chunk with {about}", framed(content)
    wrong = three_chunks()
    given = {0: frame(bytes(CHUNK)), 1: frame(bytes(CHUNK - 1))}
    content = bytes(CHUNK) + b"\1" * CHUNK + bytes(range(100))
    wrong = runs(1).compressed(content, given=given, raw=(2,)).tensor((4,)).only("deep")
    yield "093-second-chunk", "the second of three chunks is a byte short", wrong
    damaged = shard_set(compress=True, given={0: frame(bytes(99))})
    yield "093-in-shard/", "a shard set: frames that are a byte short", damaged.only("deep")


def planes_cases():
    """Invalid chunks of codec 2. Their CRCs are right, so only decoding detects them."""
    planes, _ = split_planes(WEIGHTS, 4)
    alike, _ = split_planes(FLOATS, 4)
    exponents = planes[3]
    assert exponents == alike[3]
    last = frame(exponents)
    good = join_planes([*planes[:3], Coded(last)])
    assert good == encode_planes(WEIGHTS, 4)
    with_tail = WEIGHTS + b"end"
    zeros = Coded(frame(bytes(100)))
    # A frame as long as its content, of a raw block and an RLE block, and one of a byte more.
    as_long = frame(exponents, block(0, 87, exponents[:87]) + block(1, 13, exponents[:1], True))
    longer = frame(exponents, block(0, 88, exponents[:88]) + block(1, 12, exponents[:1], True))
    assert (len(as_long), len(longer)) == (100, 101)

    def last_length(length):
        """The length of the last plane, a frame of 10 bytes, is given by the table."""
        return planar(join_planes([*planes[:3], Coded(last)], lengths={3: length}))

    def with_last(plane):
        """All planes are coded, so the chunk is shorter than its content even if the last plane is not."""
        return planar(join_planes([*map(Coded, map(frame, alike[:3])), Coded(plane)]), FLOATS)

    second = runs(1).compressed(bytes(CHUNK) + WEIGHTS, 4, {1: good + b"\0"}, planes=(1,)).tensor((4,))
    one_plane = encode_planes(HALVES[0], 1) + b"\0"
    for name, about, archive in (
        ("no-table", "15 bytes, and a table of 16", planar(good[:15])),
        ("table-alone", "a table, and no planes", planar(good[:16])),
        ("plane-too-long", "a coded plane of 99 bytes, of which 10 are there", last_length(99)),
        ("plane-2-gib", "a coded plane of 2^31 - 1 bytes", last_length((1 << 31) - 1)),
        ("raw-bit", "a coded plane that is marked as raw", last_length(1 << 31 | len(last))),
        ("raw-bit-missing", "a raw plane that is marked as coded", planar_with(1, Coded(planes[1]))),
        ("raw-shorter", "a raw plane of 99 bytes for 100 elements", planar_with(1, planes[1][:99])),
        ("raw-longer", "a raw plane of 101 bytes for 100 elements", planar_with(1, planes[1] + b"\0")),
        ("not-smaller", "a coded plane of 100 bytes for 100 elements", with_last(as_long)),
        ("coded-longer", "a coded plane of 101 bytes for 100 elements", with_last(longer)),
        ("byte-missing", "planes without the last byte", planar(good[:-1])),
        ("byte-too-many", "a byte after the planes", planar(good + b"\0")),
        ("no-tail", "no tail, of 3 bytes", planar(good, with_tail)),
        ("tail-shorter", "a tail of 2 bytes for 3", planar(good + b"en", with_tail)),
        ("tail-longer", "a tail of 4 bytes for 3", planar(good + b"end!", with_tail)),
        ("width-1", "a byte after the only plane", planar(one_plane, HALVES[0], 1)),
        ("second-chunk", "a byte after the planes of the second chunk", second),
    ):
        yield f"097-{name}", f"a chunk of codec 2: {about}", archive
    in_shard = shard_set(compress=True, planes=(0,), given={0: one_plane})
    yield "097-in-shard/", "a shard set: a byte after the planes of a chunk", in_shard.only("deep")

    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 7) + bytes(7)
    unsized = frame_head(100, window=80)
    unsized = unsized[:4] + b"\0" + unsized[5:6] + blocks(exponents)
    checked = frame_head(100, flags=4) + blocks(exponents) + bytes(4)
    huge = frame_head(100) + block(2, 50, bytes(range(50)), last=True)
    for name, about, content in (
        ("no-frame", "40 bytes of 7", b"\7" * 40),
        ("empty", "no bytes", b""),
        ("after-skippable", "a frame after a skippable one", skippable + last),
        ("two-frames", "the frame twice", last * 2),
        ("two-halves", "two frames of 50 bytes each", frame(exponents[:50]) * 2),
        ("trailing", "a byte after the frame", last + b"\0"),
        ("unsized", "no content size", unsized),
        ("larger-size", "a content size of 101", frame(exponents, size=101)),
        ("smaller-size", "a content size of 99", frame(exponents, size=99)),
        ("of-chunk", "a frame of 400 bytes, as of the whole chunk", frame(exponents * 4)),
        ("window", "a window of 2^20 + 2^17", frame(exponents, window=0x51)),
        ("dictionary", "dictionary 1, in one byte", frame(exponents, dictionary=b"\1")),
        ("reserved", "the reserved bit", frame(exponents, flags=8)),
        ("cut", "a frame that ends in its only block", last[:-1]),
        ("short", "blocks of 99 bytes", frame(exponents, blocks(exponents[1:]))),
        ("long", "blocks of 101 bytes", frame(exponents, blocks(exponents + exponents[:1]))),
        ("block-type-3", "a block of the reserved type", frame(exponents, block(3, 0, b"", True))),
        ("checksum", "a checksum that is wrong", checked),
        ("garbage", "a compressed block that is none", huge),
    ):
        yield f"093-plane-{name}", f"a coded plane with {about}", planar_with(3, Coded(content))
    short = Coded(frame(bytes(99)))
    for name, about, archive in (
        ("first", "the first plane, which is the only coded one", join_planes([short, *[bytes(100)] * 3])),
        ("second-of-four", "the second of four coded ones", join_planes([zeros, short, zeros, zeros])),
    ):
        yield f"093-plane-{name}", f"{about}, is a byte short", planar(archive, bytes(400))
    size = len(NEW)
    zeros = two_chunks(2, encode_planes(bytes(size), 2) + b"\0", bytes(size))
    yield "097-in-delta", "a delta storage: a byte after the planes of a chunk", zeros
    zeros = two_chunks(2, encode_planes(bytes(size - 2), 2), bytes(size))
    yield "093-plane-in-delta", "a delta storage: planes that are a byte short", zeros
    only = planar(join_planes([Coded(frame(bytes(399)))]), bytes(400), 1)
    yield "093-plane-width-1", "the only plane is a byte short", only


def tiers_cases():
    """Invalid chunks of codec 4. Their CRCs are right, so only decoding detects them."""
    good = encode_tiers(SPREAD, 2, symbols=SPREAD_SYMBOLS)
    # Of the stored bytes, 250 are those of a raw plane, 21 symbols, 6 counts, and 64, 32, 32 and 2 those of the tiers.
    counts, tier_1 = 250 + 21, 250 + 21 + 6
    tier_2 = tier_1 + 64
    assert len(good) == tier_2 + 32 + 32 + 2
    with_tail = SPREAD * 2 + b"end"
    of_four, of_eight = encode_tiers(SPREAD * 2, 4), encode_tiers(SPREAD * 4, 8)
    one_plane = encode_tiers(SPREAD[1::2], 1)
    for name, about, archive in (
        ("planes-cut", "249 bytes, and a raw plane of 250", tiered(good[:249])),
        ("counts-cut", "no byte after a part of the counts", tiered(good[: tier_1 - 1])),
        ("tier-1-cut", "no byte after half of tier 1", tiered(good[: tier_1 + 32])),
        ("byte-too-many", "a byte after the tiers", tiered(good + b"\0")),
        ("tail-shorter", "a tail of 2 bytes for 3", tiered(of_four + b"en", with_tail, 4)),
        ("count-a-high", "a count of 51 codes in tier 2, and 50 escapes", tiered_with([51, 10, 2])),
        ("count-c-low", "1 byte in tier 4, and 2 escapes", tiered_with([50, 10, 1], {4: lambda tier: tier[:1]})),
        ("rest", "unused codes of tier 1 that are not 0", tiered_with(tiers={1: lambda codes: codes + b"\1" * 6})),
        ("no-tiers", "raw planes, and nothing else", tiered(good[:250])),
        ("symbols-cut", "20 symbols of 21", tiered(good[: counts - 1])),
        ("no-blocks", "symbols, and no counts", tiered(good[:counts])),
        ("no-tier-1", "counts, and no codes", tiered(good[:tier_1])),
        ("tier-2-cut", "tier 2 without its last byte", tiered(good[: tier_2 + 31])),
        ("tier-3-cut", "tier 3 without its last byte", tiered(good[: tier_2 + 63])),
        ("tier-4-cut", "tier 4 without its last byte", tiered(good[:-1])),
        ("no-tier-4", "no byte of tier 4", tiered(good[:-2])),
        ("group-missing", "one group of tier 1 for 250 codes", tiered(good[:tier_1] + good[tier_1 + 32 :])),
        ("group-too-many", "three groups of tier 1 for 250 codes", tiered(good[:tier_2] + bytes(32) + good[tier_2:])),
        ("no-tail", "no tail, of 3 bytes", tiered(of_four, with_tail, 4)),
        ("tail-longer", "a tail of 4 bytes for 3", tiered(of_four + b"end!", with_tail, 4)),
        ("tail-of-7", "a tail of 6 bytes for 7", tiered(of_eight + b"a tail", SPREAD * 4 + b"a tail!", 8)),
        ("width-1", "a byte after the only plane", tiered(one_plane + b"\0", SPREAD[1::2], 1)),
    ):
        yield f"100-{name}", f"a chunk of codec 4: {about}", archive
    yield from tiers_block_cases()
    second = runs(1).compressed(bytes(CHUNK) + SPREAD, 2, {1: good + b"\0"}, tiers=(1,)).tensor((4,))
    yield "100-second-chunk", "a chunk of codec 4: a byte after the tiers of the second chunk", second
    in_shard = shard_set(compress=True, tiers=(0,), given={0: encode_tiers(HALVES[0], 1) + b"\0"})
    yield "100-in-shard/", "a shard set: a byte after the tiers of a chunk", in_shard.only("deep")
    size = len(NEW)
    zeros = two_chunks(4, encode_tiers(bytes(size), 2) + b"\0", bytes(size))
    yield "100-in-delta", "a delta storage: a byte after the tiers of a chunk", zeros


def tiers_block_cases():
    """Invalid chunks of codec 4 with blocks of 32,768 bytes."""
    zeros = bytes(TIERS_BLOCK)
    longer = zeros + bytes(100)
    good = encode_tiers(longer, 1)
    first_end = 21 + 6 + TIERS_BLOCK // 4
    assert len(good) == first_end + 6 + 32
    # All codes are 0. Tier 1 has a group more than that of a whole block.
    one_block = bytes(first_end + 32)
    for name, about, stored, content in (
        ("no-second-block", "one block, and no second one for 100 bytes", good[:first_end], longer),
        ("second-counts-cut", "the second of two blocks ends in its counts", good[: first_end + 5], longer),
        ("second-tier-cut", "the second of two blocks ends in its tier 1", good[:-1], longer),
        ("one-block", "32,868 bytes in one block", one_block, longer),
        ("empty-block", "a block without bytes after a block of 32,768", encode_tiers(zeros, 1) + bytes(6), zeros),
    ):
        yield f"100-{name}", f"a chunk of codec 4: {about}", tiered(stored, content, 1)
    # Two escapes in the first block, and one in the second one.
    content = b"\3\3" + longer[:-1] + b"\3"
    symbols = bytes(range(21))

    def of_two(*counts, rest=b""):
        chunk = Tiers(content, 1, symbols)
        for block, count in zip(chunk.blocks, counts):
            block.counts[0] = count
        chunk.blocks[0].tiers[1] += rest
        return tiered(chunk.encode(), content, 1)

    reverse = Tiers(content, 1, symbols)
    reverse.blocks.reverse()
    most = Tiers(zeros, 1)
    most.blocks[0].counts[0] = 0xFFFF
    most.blocks[0].tiers[1] = bytes(0xFFFF)
    for name, about, archive in (
        ("count-a-max", "65,535 codes in tier 2, and no escape", tiered(most.encode(), zeros, 1)),
        ("short-block", "a block of 100 bytes before a block of 32,768", tiered(reverse.encode(), content, 1)),
        ("counts-swapped", "two blocks with each other's counts", of_two(1, 2)),
        ("second-count", "a code of tier 2 too many in the second of two blocks", of_two(2, 2)),
        ("first-rest", "a code after the last one of tier 2 in the first of two blocks", of_two(2, 1, rest=b"\1")),
    ):
        yield f"100-{name}", f"a chunk of codec 4: {about}", archive


def tier_code_cases():
    """Invalid chunks of codec 4: counts and codes that contradict each other."""

    def more(count, code=0):
        return lambda codes: codes + bytes(count) + bytes([code])

    def replace(old, new):
        return lambda codes: codes.replace(bytes([old]), bytes([new]), 1)

    # All lengths are as the counts say.
    for name, about, counts, tiers in (
        ("a-low", "49 codes in tier 2, and 50 escapes", [49, 10, 2], {}),
        ("b-high", "11 codes in tier 3, and 10 escapes", [50, 11, 2], {}),
        ("b-low", "9 codes in tier 3, and 10 escapes", [50, 9, 2], {}),
        ("c-high", "3 bytes in tier 4, and 2 escapes", [50, 10, 3], {4: more(0)}),
        ("a-0", "no codes in tier 2, and 50 escapes", [0, 10, 2], {2: b""}),
        ("b-0", "no codes in tier 3, and 10 escapes", [50, 0, 2], {3: b""}),
        ("c-0", "no bytes in tier 4, and 2 escapes", [50, 10, 0], {4: b""}),
        ("all-0", "only tier 1, and 50 escapes", [0, 0, 0], {2: b"", 3: b"", 4: b""}),
        ("a-129", "129 codes in tier 2, and 50 escapes", [129, 10, 2], {2: more(78)}),
        ("b-65", "65 codes in tier 3, and 10 escapes", [50, 65, 2], {3: more(54)}),
    ):
        yield f"100-count-{name}", f"a chunk of codec 4: {about}", tiered_with(counts, tiers)
    for name, about, counts in (
        ("max", "three counts of 65,535", [0xFFFF] * 3),
        ("c-cut", "a count of 3 bytes in tier 4, which has 2", [50, 10, 3]),
        ("c-trailing", "a count of 1 byte in tier 4, which has 2", [50, 10, 1]),
    ):
        yield f"100-count-{name}", f"a chunk of codec 4: {about}", tiered_with(counts)
    for number, escape, zeros in ((1, 3, 2 * 128 - 251), (2, 3, 128 - 51), (3, 15, 64 - 11)):
        high_bit = (escape + 1) // 2
        for name, about, change in (
            ("escape-more", "an escape more in", replace(0, escape)),
            ("escape-less", "an escape less in", replace(escape, 0)),
            ("rest-first", "the lowest bit of the first unused code in", more(0, 1)),
            ("rest-last", "the highest bit of the last unused code in", more(zeros, high_bit)),
            ("rest-escape", "an unused code that is an escape in", more(zeros, escape)),
        ):
            archive = tiered_with(tiers={number: change})
            yield f"100-{name}-{number}", f"a chunk of codec 4: {about} tier {number}", archive
    for name, about, counts, tiers in (
        ("1", "tier 1, and a code for it in tier 2", [51, 10, 2], {1: more(0, 3), 2: more(0)}),
        ("2", "tier 2, and a code for it in tier 3", [50, 11, 2], {2: more(0, 3), 3: more(0)}),
        ("3", "tier 3, and a byte for it in tier 4", [50, 10, 3], {3: more(0, 15), 4: more(0)}),
    ):
        about = f"a chunk of codec 4: an unused code that is an escape in {about}"
        yield f"100-rest-counted-{name}", about, tiered_with(counts, tiers)


def delta_cases():
    """Invalid chunks of codec 3: header, lengths, and parts that are cut off. Their CRCs are right."""
    one_class, two_classes = compare().encode(), compare([THRESHOLD]).encode()
    # The header ends at byte 24: classes, bitmaps, a checksum, a count, and the lengths of four columns.
    two_gib = one_class[:8] + struct.pack("<I", (1 << 31) - 1) + one_class[12:]
    for name, about, stored in (
        ("no-class", "no class", b"\0" + one_class[1:]),
        ("classes-5", "five classes", compare([1, 2, 3, 4])),
        ("classes-255", "255 classes", b"\xff" + one_class[1:]),
        ("bitmap-of-class-1", "a bitmap of class 1 of one", compare(bitmaps=2)),
        ("bitmap-of-class-2", "a bitmap of class 2 of two", compare([THRESHOLD], 4)),
        ("bitmap-of-class-7", "a bitmap of class 7 of one", compare(bitmaps=128)),
        ("threshold-0", "the threshold 0", compare([0])),
        ("threshold-sign", "a threshold with its highest bit set", compare([1 << 15])),
        ("thresholds-equal", "two equal thresholds", compare([THRESHOLD] * 2)),
        ("thresholds-unsorted", "two thresholds, the larger one first", compare([THRESHOLD, THRESHOLD - 1])),
        ("one-byte", "one byte", one_class[:1]),
        ("cut-thresholds", "no byte after half a threshold", two_classes[:3]),
        ("cut-checksums", "no byte after a part of a checksum", one_class[:5]),
        ("cut-counts", "no byte after half a count", one_class[:7]),
        ("cut-count-of-class", "no byte after the count of the first of two classes", two_classes[:10]),
        ("cut-lengths", "no byte after a part of the last length", one_class[:23]),
        ("no-columns", "lengths, and no columns", one_class[:24]),
        ("cut-column", "the last column without its last byte", one_class[:-1]),
        ("trailing", "a byte after the last column", one_class + b"\0"),
        ("length-2-gib", "a column of 2^31 - 1 bytes", two_gib),
        ("marked-dense", "a dense block without bytes", compare(counts=[None])),
    ):
        yield f"098-{name}", f"a delta chunk with {about}", delta(stored)
    dense = with_dense_block().encode()
    for name, about, stored in (
        ("cut-dense", "a dense block without its last byte", dense[:-1]),
        ("no-dense", "a dense block without its bytes", dense[:-64]),
        ("trailing-dense", "a byte after the last dense block", dense + b"\0"),
    ):
        yield f"098-{name}", f"a delta chunk with {about}", blocks_delta(stored)
    second = two_chunks(3, one_class + b"\0")
    yield "098-second-chunk", "a delta storage: a byte after the columns of the second chunk", second


def with_dense_block():
    """A delta chunk of two blocks, of which the second one is dense."""
    chunk = compare_blocks(dense=[NEW_BLOCKS[BLOCK:]])
    count = chunk.counts[0][0]
    # The first block has two listed elements, whose codes are one byte.
    columns = {0: lambda gaps: gaps[:count], 1: lambda values: values[:1]}
    return edit_chunk(chunk, columns, counts=[chunk.counts[0], None])


def delta_position_cases():
    """Invalid chunks of codec 3: positions and values that contradict each other, or the number of elements."""
    gaps, bitmap = compare().columns[0], compare(bitmaps=1).columns[0]

    def bitmap_of(column, new=NEW):
        return compare(new=new, bitmaps=1, columns={0: column}, counts=[[len(column)]])

    def of_two_classes(second, bitmaps=0):
        return listing((COUNT, {0: 1}), second, thresholds=[THRESHOLD], bitmaps=bitmaps)

    half = {rank: 1 for rank in range(102)}
    together = listing((COUNT, half), (COUNT, half), thresholds=[THRESHOLD])
    three = listing((COUNT, {0: 1, 1: 1, 2: 1}))
    three.columns[1] = three.columns[1][:1] + b"\x11"
    for name, about, stored in (
        ("positions-shorter", "a position less than its count", compare(columns={0: gaps[:-1]})),
        ("positions-longer", "a position more than its count", compare(columns={0: gaps + b"\0"})),
        ("count-less", "a count below the positions", compare(counts=[[len(gaps) - 1]])),
        ("count-more", "a count above the positions", compare(counts=[[len(gaps) + 1]])),
        ("last-gap-255", "gaps that end with 255", compare(columns={0: gaps + b"\xff"}, counts=[[len(gaps) + 1]])),
        ("only-gap-255", "only the gap 255", compare(new=OLD, columns={0: b"\xff"}, counts=[[1]])),
        ("bitmap-short", "a bitmap of 25 bytes for 203 elements", bitmap_of(bitmap[:-1])),
        ("bitmap-long", "a bitmap of 27 bytes for 203 elements", bitmap_of(bitmap + b"\0")),
        ("bitmap-empty", "an empty bitmap for 203 elements", bitmap_of(b"", OLD)),
        ("gap-beyond", "gaps that list rank 203 of 203", listing((COUNT, {0: 1, COUNT: 1}))),
        ("gap-far-beyond", "gaps that list rank 600 of 203", listing((COUNT, {0: 1, 600: 1}))),
        ("bitmap-beyond", "a bitmap that lists rank 203 of 203", listing((COUNT + 1, {0: 1, COUNT: 1}), bitmaps=1)),
        ("class-gap-beyond", "gaps of class 1 that list rank 203 of 203", of_two_classes((COUNT, {COUNT: 1}))),
        (
            "class-bitmap-beyond",
            "a bitmap of class 1 that lists rank 203 of 203",
            of_two_classes((COUNT + 1, {COUNT: 1}), bitmaps=2),
        ),
        ("listed-together", "two classes that list 204 of 203 elements", together),
        ("values-shorter", "two codes less than positions", compare(columns={1: lambda column: column[:-1]})),
        ("values-longer", "two codes more than positions", compare(columns={1: lambda column: column + b"\0"})),
        ("values-high-half", "a code after the last of three", three),
        ("wide-shorter", "a byte of the wide column less", compare(columns={2: lambda column: column[:-1]})),
        ("wide-longer", "a byte of the wide column more", compare(columns={2: lambda column: column + b"\0"})),
        ("no-exception", "a byte 255 of the wide column, and no exception", compare(columns={3: b""})),
        ("two-exceptions", "two wide bytes of 255, and one exception", compare(columns={2: b"\xff\xff"})),
        ("exceptions-shorter", "half an exception", compare(columns={3: lambda column: column[:1]})),
        ("exceptions-longer", "an exception more", compare(columns={3: lambda column: column * 2})),
    ):
        yield f"098-{name}", f"a delta chunk with {about}", delta(stored)
    gaps = compare_blocks().columns[0]
    first, second = gaps[:3], gaps[3:]
    ends = compare_blocks(columns={0: first + b"\xff" + second}, counts=[[4], [2]])
    beyond = compare_blocks(columns={0: first + bytes((1, 62))})
    for name, about, stored in (
        ("first-block-gap-255", "gaps of the first of two blocks that end with 255", ends),
        ("last-block-beyond", "gaps of the last block that list rank 64 of 64", beyond),
    ):
        yield f"098-{name}", f"a delta chunk with {about}", blocks_delta(stored)


def delta_column_cases():
    """Invalid frames of columns of a delta chunk."""
    gaps, values, wide, exceptions = compare().columns
    bitmap = compare(bitmaps=1).columns[0]
    good = frame(gaps)
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 7) + bytes(7)
    unsized = frame_head(len(gaps), window=80)
    unsized = unsized[:4] + b"\0" + unsized[5:6] + blocks(gaps)
    checked = frame_head(len(gaps), flags=4) + blocks(gaps) + bytes(4)
    huge = frame_head(len(gaps)) + block(2, 20, bytes(range(20)), last=True)
    for name, about, content in (
        ("no-frame", "40 bytes of 7 for a frame", b"\7" * 40),
        ("empty", "no byte of a frame", b""),
        ("magic", "the magic of another version", b"\x27" + good[1:]),
        ("after-skippable", "a frame after a skippable one", skippable + good),
        ("two-frames", "the frame twice", good * 2),
        ("two-halves", "two frames", frame(gaps[:20]) + frame(gaps[20:])),
        ("trailing", "a byte after the frame", good + b"\0"),
        ("unsized", "no content size", unsized),
        ("larger-size", "a content size of a byte more", frame(gaps, size=len(gaps) + 1)),
        ("smaller-size", "a content size of a byte less", frame(gaps, size=len(gaps) - 1)),
        ("longer", "a frame of a byte more", frame(gaps + b"\0")),
        ("window", "a window of 2^20 + 2^17", frame(gaps, window=0x51)),
        ("dictionary", "dictionary 1, in one byte", frame(gaps, dictionary=b"\1")),
        ("reserved", "the reserved bit", frame(gaps, flags=8)),
        ("cut-header", "a frame that ends in its header", good[:5]),
        ("cut", "a frame that ends in its last block", good[:-1]),
        ("short", "blocks of a byte less", frame(gaps, blocks(gaps[1:]))),
        ("long", "blocks of a byte more", frame(gaps, blocks(gaps + b"\0"))),
        ("bomb", "blocks of 2 MiB", frame(gaps, blocks(bytes(2 << 20)))),
        ("block-type-3", "a block of the reserved type", frame(gaps, block(3, 0, b"", True))),
        ("checksum", "a checksum that is wrong", checked),
        ("garbage", "a compressed block that is none", huge),
    ):
        archive = delta(compare(columns={0: Frame(content)}))
        yield f"098-frame-{name}", f"the positions of a delta chunk, with {about}", archive
    for name, about, stored in (
        ("as-bytes", "a frame that is not marked as one", compare(columns={0: good})),
        ("as-frame", "positions that are marked as a frame", compare(columns={0: Frame(gaps)})),
        ("bitmap", "a frame of half a bitmap", compare(bitmaps=1, columns={0: Frame(frame(bitmap[:13]))})),
        ("values", "a frame of values without the last byte", compare(columns={1: Frame(frame(values[:-1]))})),
        ("wide", "a frame of a byte more than the wide column", compare(columns={2: Frame(frame(wide + b"\0"))})),
        ("exceptions", "a frame of half an exception", compare(columns={3: Frame(frame(exceptions[:1]))})),
        ("no-exceptions", "an empty frame for no exceptions", listing_with_empty_frame()),
    ):
        yield f"098-column-{name}", f"a delta chunk with {about}", delta(stored)


def listing_with_empty_frame():
    """A delta chunk whose exception column is empty and marked as a frame."""
    chunk = listing((COUNT, {0: 1}))
    chunk.columns[3] = Frame(b"")
    return chunk


def base_cases():
    """Deltas that contradict their base. Each is a directory with both."""
    size = COUNT // 2  # of class 1, which has the odd elements; class 0 has one more
    crc = zlib.crc32(NEW)

    def of_two_classes(second, threshold=THRESHOLD, bitmaps=0):
        return listing((COUNT - size, {0: 1}), second, thresholds=[threshold], bitmaps=bitmaps)

    def changed(column):
        return bytes([column[0] ^ 1]) + column[1:]

    for name, about, chunk in (
        ("checksum", "a checksum", compare(checksums=[crc ^ 1])),
        ("checksum-of-base", "the checksum of the base", compare(checksums=[zlib.crc32(OLD)])),
        ("gap", "a gap", compare(columns={0: changed})),
        ("value", "a code", compare(columns={1: changed})),
        ("wide", "a byte of the wide column", compare(columns={2: changed})),
        ("exception", "an exception", compare(columns={3: changed})),
        ("no-change", "no listed element", compare(new=OLD, checksums=[crc])),
        ("threshold", "another threshold", edit_chunk(compare([THRESHOLD]), thresholds=[THRESHOLD + 64])),
        ("classes-swapped", "the differences of each class in the other one", swap_classes()),
        ("class-gap", "gaps that list rank 101 of 101", of_two_classes((size, {0: 1, size: 1}))),
        ("class-bitmap", "a bitmap that lists rank 101 of 101", of_two_classes((104, {0: 1, size: 1}), bitmaps=2)),
        ("class-bitmap-short", "a bitmap of 12 bytes for 101 elements", of_two_classes((96, {0: 1}), bitmaps=2)),
        ("class-bitmap-long", "a bitmap of 14 bytes for 101 elements", of_two_classes((112, {0: 1}), bitmaps=2)),
        ("class-bitmap-of-block", "a bitmap for all elements", of_two_classes((COUNT, {0: 1}), bitmaps=2)),
        ("class-bitmap-empty", "no bitmap for 101 elements", of_two_classes((0, {}), bitmaps=2)),
        ("no-member", "rank 0 of a class without elements", of_two_classes((1, {0: 1}), (1 << 15) - 1)),
        ("bitmap-of-no-member", "a bitmap of a class without elements", of_two_classes((8, {}), (1 << 15) - 1, 2)),
    ):
        yield f"099-{name}/", f"a delta chunk with {about}", delta_pair(chunk)
    both = compare_blocks()
    wrong = [both.checksums[0], both.checksums[1] ^ 1]
    for name, about, chunk in (
        ("second-block", "the checksum of the second of two blocks", compare_blocks(checksums=wrong)),
        ("dense", "the checksum of a dense block", edit_chunk(with_dense_block(), checksums=wrong)),
    ):
        yield f"099-{name}/", f"a delta chunk with another CRC than {about}", blocks_pair(chunk)
    yield "099-base-storages/", "two delta storages with each other's base storages", two_deltas(1, 0)

    crc = delta_pair()
    crc.delta.edit("storages", 0, crc32=1)
    digest_of_base = delta_pair()
    digest_of_base.delta.set("digests", [blake3(OLD)])
    text = b"text" * 1025
    bad = DeltaPair(text_delta(text, text[:-1] + b"\xff"), stored(STR, text))
    for name, about, pair in (
        ("091-delta", "the CRC of a delta storage", crc),
        ("091-delta-same", "a chunk without bytes, and another content than that of the base", delta_pair(b"")),
        ("094-delta", "a delta storage with the digest of the base storage", digest_of_base),
        ("096-delta", "a str in a delta storage is not UTF-8", bad),
    ):
        yield f"{name}/", about, pair.only("base")


def swap_classes():
    """A delta chunk of two classes with each other's columns."""
    chunk = compare([THRESHOLD])
    (counts,), columns = chunk.counts, chunk.columns
    return edit_chunk(chunk, counts=[counts[::-1]], columns=dict(enumerate(columns[2:4] + columns[:2])))


def text_delta(old, new):
    """A str in a delta storage."""
    chunk = compare(old=old, new=new, width=1).encode()
    return Archive().tree(Box(DICT, [("long", Leaf(STR, flags=1))])).delta(new, [(3, chunk)], 1).digested()


def frame_of_size(size):
    """A frame of 400 zeros whose content size takes eight bytes."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + blocks(bytes(400))


def digest_cases():
    def digested(archive, *digests):
        archive.digested()
        found = [each or archive.tables["digests"][i] for i, each in enumerate(digests)]
        return archive.set("digests", found).only("deep")

    swapped = tensors().digested()
    swapped.set("digests", swapped.tables["digests"][::-1]).only("deep")
    large = runs(1).storage(bytes(1025)).tensor((4,)).digested()
    chunk = runs(1).storage(bytes(1024)).tensor((4,)).digested()
    stored_bytes = compressed().digested()
    of_stored = runs(1).storage(bytes(stored_bytes.blob)).digested().tables["digests"][0]
    for name, about, archive in (
        ("zeros", "a digest of zeros", digested(tensors(), None, bytes(32))),
        ("swapped", "two storages with each other's digests", swapped),
        ("of-stored", "the digest of stored bytes", digested(compressed(), of_stored)),
        ("other-length", "the digest of a byte less", digested(large, chunk.tables["digests"][0])),
        ("zstd", "the digest of a compressed storage", digested(compressed(), bytes(32))),
    ):
        yield f"094-{name}", about, archive
    one_wrong = fine().digested()
    one_wrong.set("subtrees", [bytes(32)] + one_wrong.tables["subtrees"][1:]).only("verify")
    swapped = fine().digested()
    swapped.set("subtrees", swapped.tables["subtrees"][::-1]).only("verify")
    both = fine().digested()
    both.set("subtrees", [bytes(32)] + both.tables["subtrees"][1:])
    both.set("digests", [merge_subtrees(both.tables["subtrees"])]).only("deep")
    other = fine().digested().set("digests", [blake3(bytes(9000))]).only("verify")
    for name, about, archive in (
        ("subtree", "the subtree of the first of three chunks", one_wrong),
        ("subtrees-swapped", "two chunks with each other's subtrees", swapped),
        ("both", "a subtree, and the digest to which the subtrees merge", both),
        ("digest-of-subtrees", "the digest of a storage whose subtrees are right", other),
    ):
        yield f"094-{name}", about, archive
    damaged = shard_set(digests=b"\1" * 32)
    yield "094-in-shard/", "a shard set: digests on which manifest and shards agree", damaged.only("deep")


def shard_set_cases():
    def other(key="half", **fields):
        """The archive of the first writer with another key, which may have another length."""
        return half(0, key, **fields).build()

    def digested(i, digest):
        return shard_set(digests=True).record(i, digest=digest)

    names = "a.tssd", "b.tssd"
    swapped = shard_set()
    swapped.files = dict(zip(names, reversed(swapped.files.values())))
    later = shard_set().record(0, index_off=lambda at: at + 64)
    of_distributed = ShardSet(keyed("a"), {names[0]: distributed()}).record(0, digest=b"\1" * 32)
    for name, about, files in (
        (
            "longer",
            "a shard that is another archive, longer",
            shard_set().replace(names[0], other("longer")),
        ),
        (
            "shorter",
            "a shard that is the smallest archive",
            shard_set().replace(names[1], keyed().build()),
        ),
        (
            "other",
            "another archive of the same length",
            shard_set().replace(names[0], other("flah")),
        ),
        ("swapped", "two shards under each other's names", swapped),
        ("file-len", "file_len", shard_set().record(0, file_len=lambda size: size + 64)),
        ("index-off", "index_off", later),
        ("index-crc", "index_crc32", shard_set().record(1, index_crc32=lambda crc: crc ^ 1)),
        ("digest", "a content digest", digested(1, b"\1" * 32)),
        ("digest-swapped", "the content digest of the other shard", swap_digests()),
        (
            "digest-of-none",
            "a content digest of a shard without digests",
            shard_set().record(0, digest=b"\1" * 32),
        ),
        ("digest-of-distributed", "a content digest of a manifest with a distributed leaf", of_distributed),
        ("missing", "a shard that is not there", shard_set().remove(names[1])),
        ("link", "a link to a shard", shard_set().link(names[1], "c.tssd")),
    ):
        yield f"083-{name}/", f"a shard set: {about}", files
    elsewhere = runs(1).storage(bytes(164)).tensor((2, 50)).build()
    same_length = shard_set().replace(names[0], elsewhere)
    assert len(elsewhere) == len(other()), "only the place of the index is another"
    yield "083-other-index-off/", "a shard set: an archive with the index elsewhere", same_length
    dangling = shard_set().remove(names[0])
    dangling.links[names[0]] = "c.tssd"
    yield "083-link-dangling/", "a shard set: a link to a file that is not there", dangling
    other_bytes = shard_set().replace(names[1], half_with_bytes(b"3" * 100))
    about = "a shard set: a shard whose bytes are not those of the manifest"
    yield "090-in-shard/", about, other_bytes
    yield from differing_storage_cases()
    yield from damaged_shard_cases()


def differing_storage_cases():
    """Manifests that describe a storage differently than its shard. The stored bytes match the manifest."""
    longer = shard_set()
    crc = zlib.crc32(HALVES[1] + b"\0")
    longer.manifest.edit("storages", 1, stored_len=101, raw_len=101, crc32=crc)
    longer.manifest.tables["crcs"][1] = crc
    swapped = shard_set(digests=True)
    swapped.manifest.set("digests", swapped.manifest.tables["digests"][::-1])
    for name, about, files in (
        ("longer", "a byte longer", longer),
        ("alignment", "another alignment", manifest_with_storage(align_log2=6)),
        ("chunks", "other chunks", manifest_with_storage(chunk_log2=12)),
        ("raw-len", "compressed, with another raw_len", manifest_with_storage(compress=True, raw_len=101)),
        ("crc", "compressed, with another crc32", manifest_with_storage(compress=True, crc32=1)),
        ("width", "compressed, with another width", manifest_with_storage(compress=True, width=2)),
        ("digest", "with the digest of another", swapped),
        ("chunk-records", "compressed, with another end of the first chunk", manifest_with_chunks()),
        ("absent", "with another offset, where the shard has none", manifest_with_padding()),
    ):
        about = f"a shard set: a storage that the shard has otherwise: {about}"
        yield f"095-storage-{name}/", about, files


def manifest_with_padding():
    """A manifest that names 100 bytes of padding of the second shard, between its two storages."""
    files = shard_set(more=b"more" * 25)
    files.manifest.edit("storages", 1, offset=4224, align_log2=7, crc32=zlib.crc32(bytes(100)))
    files.manifest.tables["crcs"][1] = zlib.crc32(bytes(100))
    return files


def manifest_with_chunks():
    """A manifest in which the first frame of a storage of the second shard ends a byte later."""
    files = shard_set(compress=True, contents=[bytes(2 * CHUNK), b"\1" * 2 * CHUNK])
    first, second = files.manifest.tables["chunks"][2:]
    first["stored_len"] += 1
    second.update(offset=second["offset"] + 1, stored_len=second["stored_len"] - 1)
    record = files.manifest.tables["storages"][1]
    stored = files.files["b.tssd"][record["offset"] :][: record["stored_len"]]
    ends = stored[: second["offset"]], stored[second["offset"] :]
    files.manifest.tables["crcs"][2:] = map(zlib.crc32, ends)
    return files


def manifest_with_storage(compress=False, **fields):
    """A manifest that describes a storage differently than the shard that contains it."""
    files = shard_set(compress=compress)
    files.manifest.edit("storages", 1, **fields)
    return files


def damaged_shard_cases():
    """Shards in which one byte was changed.

    Opening reads their trailers. If the manifest has a digest or a distributed leaf, it also reads everything but the
    blob.
    """
    for name, about, stage, files in (
        ("002-in-shard", "the first byte", "verify", damage_shard(0)),
        ("002-in-shard-digest", "the first byte, with a digest", "open", damage_shard(0, True)),
        ("006-in-shard", "a byte behind the head", "verify", damage_shard(64)),
        ("007-in-shard", "the last byte", "open", damage_shard(-1)),
        ("008-in-shard", "a byte of the trailer", "open", damage_shard(-64)),
        ("013-in-shard", "a byte of the index", "verify", damage_shard(-65)),
        ("013-in-shard-digest", "a byte of the index, with a digest", "open", damage_shard(-65, True)),
        ("013-in-shard-leaf", "a byte of the index, with a distributed leaf", "open", flip_bit(mixed_set(), -65)),
        ("090-in-shard-unnamed", "a storage that the manifest does not name", "verify", damage_unnamed_storage()),
        ("092-in-shard", "the byte before the index", "verify", damage_shard(4223)),
    ):
        yield f"{name}/", f"a shard set: of a shard, {about}", files.only(stage)


def damage_shard(at, digests=False):
    return flip_bit(shard_set(digests), at)


def flip_bit(files, at):
    content = bytearray(files.files["b.tssd"])
    content[at] ^= 1
    return files.replace("b.tssd", bytes(content))


def damage_unnamed_storage():
    """Both shards have a storage that the manifest does not name, at 4352."""
    return flip_bit(shard_set(more=b"more" * 25), 4352)


def swap_digests():
    files = shard_set(digests=True)
    first, second = (shard["digest"] for shard in files.manifest.tables["shards"])
    return files.record(0, digest=second).record(1, digest=first)


def half_with_bytes(content):
    """The archive of the second writer, with other bytes and the old index."""
    return half(1).patch(4096, content).build()


def corruption_cases():
    """The vectors of corruptions.py: archives with correct checksums and one invalid field."""
    for corruption in corruptions():
        name = f"{corruption.rule[2:]}-lie-{corruption.table}-{corruption.field}"
        yield name, corruption.about, corruption.archive, {"table": corruption.table, "field": corruption.field}


SECTIONS = (
    head_and_trailer_cases,
    root_and_table_cases,
    heap_and_dims_cases,
    node_cases,
    tensor_cases,
    storage_cases,
    slice_cases,
    attr_and_shard_cases,
    shard_set_cases,
    distributed_cases,
    payload_cases,
    corruption_cases,
)
# By its own text, no file can violate only F-022. F-072 is a rule for writers.
NOT_TESTABLE = {"F-022", "F-072"}


# ---- Writing them --------------------------------------------------------------------------------


# The stage of reader.py that detects a violation of a rule, if it is not `open`.
STAGES = {
    **dict.fromkeys(("F-090", "F-091", "F-092", "F-095", "F-096"), "verify"),
    **dict.fromkeys(("F-093", "F-094", "F-097", "F-098", "F-100"), "deep"),
    "F-099": "base",
}


def make_vectors():
    """Returns the files by name, and their list for the manifest. The files of a directory are a dict.

    In the list, `at` is the stage that rejects the vector, after the stages before it have accepted it:
    `open`, `verify` (of the stored bytes), `deep` or `base`. A corruption of corruptions.py also has its table and
    field.
    """
    files, listed = {}, []
    for section in SECTIONS:
        for name, about, archive, *place in section():
            assert name not in files, name
            files[name] = archive if isinstance(archive, bytes) else archive.build()
            if isinstance(archive, ShardSet):
                files[name] |= {each: Link(target) for each, target in archive.links.items()}
            rule = f"F-{name[:3]}"
            stage = getattr(archive, "at_stage", None) or STAGES.get(rule, "open")
            entry = {"name": name, "rule": rule, "kind": KINDS[rule], "at": stage, "about": about}
            listed.append({**entry, **(place[0] if place else {})})
    missing = KINDS.keys() - NOT_TESTABLE - {vector["rule"] for vector in listed}
    assert not missing, f"no vector breaks {sorted(missing)}"
    fields = {(each["rule"], each["table"], each["field"]) for each in listed if "table" in each}
    assert len(fields) >= 320, f"only {len(fields)} corruptions"
    return files, listed


class Link(str):
    """The target of a symbolic link."""


def read_folder(folder, suffix=""):
    """Returns the existing vectors of a folder, in the form of `make_vectors`. Leaves out those that are being written."""
    found = {}
    for path in folder.iterdir() if folder.exists() else ():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            found[f"{path.name}/"] = {each.name: read_file(each) for each in path.iterdir()}
        elif path.name.endswith(suffix):
            found[path.name.removesuffix(".tssd")] = read_file(path)
    return found


def read_file(path):
    return Link(os.readlink(path)) if path.is_symlink() else path.read_bytes()


def update_generated(files):
    """Writes the files of generated/ that are missing or outdated, and removes others.

    Each file and directory is created by one rename, because concurrent test processes may all do this.
    """
    folder = HERE / "generated"
    folder.mkdir(exist_ok=True)
    present = read_folder(folder)
    for name in present.keys() - files.keys():
        remove(path_of(folder, name))
    for name, content in files.items():
        if present.get(name) != content:
            path = path_of(folder, name)
            staged = folder / f".{path.name}.{os.getpid()}"
            write_vector(staged, content)
            if isinstance(content, dict):
                remove(path)
            try:
                staged.replace(path)
            except OSError:
                # Another process has created the directory.
                remove(staged)


def path_of(folder, name):
    return folder / (name if name.endswith("/") else f"{name}.tssd")


def remove(path):
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_vector(path, content):
    if not isinstance(content, dict):
        path.write_bytes(content)
        return
    path.mkdir()
    for each, part in content.items():
        if isinstance(part, Link):
            os.symlink(part, path / each)
        else:
            (path / each).write_bytes(part)


def digest(content):
    """Returns the SHA-256 of a file. For a directory: of each file by its name, without links."""
    if isinstance(content, dict):
        parts = {each: digest(part) for each, part in content.items() if not isinstance(part, Link)}
        return dict(sorted(parts.items()))
    return hashlib.sha256(content).hexdigest()


def valid_entries(listed):
    """Returns the manifest entries of the valid vectors, with the digests of the existing files."""
    found = read_folder(HERE / "valid", suffix=".tssd")
    entries = []
    for each in listed:
        name, directory = each["name"], f"{each['name']}/"
        content = found[directory] if directory in found else found[name]
        entries.append(
            {
                "name": name,
                "about": each["about"],
                "file": f"valid/{directory if directory in found else name + '.tssd'}",
                "sha256": digest(content),
                "verdict": "valid",
                "json": f"valid/{name}.json",
            }
        )
    return entries


def invalid_entries(listed, files, generated):
    """Returns the manifest entries of the invalid vectors. The names of directories lose their slash."""
    entries = []
    for each in listed:
        name = each["name"]
        folder = "generated" if name in generated else "invalid"
        file = f"{folder}/{name if name.endswith('/') else name + '.tssd'}"
        details = {"file": file, "sha256": digest(files[name]), "verdict": "invalid"}
        entries.append({**each, "name": name.removesuffix("/"), **details})
    return entries


def generated_names(listed):
    """Returns the names of the vectors in generated/: corruptions, and the vectors of a rule after its first ones."""
    names, counts = set(), Counter()
    for each in listed:
        if "table" not in each:
            counts[each["rule"]] += 1
        if "table" in each or counts[each["rule"]] > MAX_COMMITTED:
            names.add(each["name"])
    return names


def main(arguments):
    if arguments not in ([], ["--check"], ["--generated"]):
        sys.exit(__doc__)
    files, listed = make_vectors()
    generated = {name: files.pop(name) for name in generated_names(listed)}
    if arguments != ["--check"]:
        update_generated(generated)
    if arguments == ["--generated"]:
        return 0
    check_precedence(listed, files | generated)
    path = HERE / "manifest.json"
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"valid": []}
    invalid = invalid_entries(listed, files | generated, generated)
    wanted = {"valid": valid_entries(written["valid"]), "invalid": invalid}
    folder = HERE / "invalid"
    if arguments:
        present = read_folder(folder)
        names = sorted(files.keys() | present.keys())
        stale = [name for name in names if files.get(name) != present.get(name)]
        if written != wanted:
            stale.append(path.name)
        print("\n".join(f"{name} is not what make_invalid.py writes" for name in stale) or "ok")
        return 1 if stale else 0
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        write_vector(path_of(folder, name), content)
    text = json.dumps(wanted, indent=1, ensure_ascii=False)
    path.write_bytes(text.encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
