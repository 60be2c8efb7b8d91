#!/usr/bin/env python3
"""A writer of TSSD archives with only the standard library: the format as a readable program.

    writer.py OUT.tssd       writes a demonstration
    writer.py --self-test    writes all vectors that it supports, and compares the bytes

`encode` converts a dict to the bytes of an archive. Read the code from the end: `encode` joins the four
parts, and the functions above it create them. The numbers in parentheses are the sections of format.md.

Its output equals that of the reference writer for the same values, byte for byte. It does not support
tensors that share a storage, strides and flags of tensors, shards of tensors, namedtuples, complex
numbers, dtype leaves, dtypes that a file describes, sizes, devices, opaque leaves, attributes,
compression, digests and manifests. It rejects values of other types, because they could not be restored
exactly. A `Tagged` value has a class tag; its content is not checked against F-078.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from math import isnan, prod
from pathlib import Path
from typing import Any, NamedTuple


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
CHUNK = 1 << 20
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
    crcs: list[int] = field(default_factory=list)

    def add(self, raw: bytes) -> int:
        """Adds a storage and returns its number."""
        # Large storages begin at a page, so that they can be mapped.
        align_log2 = 12 if len(raw) >= 1 << 16 else 8
        offset = align_up(DATA_START + len(self.content), 1 << align_log2)
        self.content += bytes(offset - DATA_START - len(self.content)) + raw
        fields = offset, len(raw), len(raw), 0, NONE, len(self.crcs), zlib.crc32(raw)
        self.storages.append(struct.pack("<QQQIIIIBBBBI", *fields, 0, align_log2, 20, 0, NONE))
        self.crcs += (zlib.crc32(raw[at : at + CHUNK]) for at in range(0, len(raw), CHUNK))
        return len(self.storages) - 1


@dataclass
class Node:
    """A node. Its storage is already in the blob; bytes in the index are placed later."""

    kind: int
    content: int | bytes = 0
    flags: int = 0
    children: list[tuple[tuple[int, int | bytes], "Node"]] = field(default_factory=list)
    tensor: tuple[Tensor, int] | None = None
    tag: int = 0


def build_node(value: Any, blob: Blob, level: int = 1) -> Node:
    """Returns the node of a value. Adds its storages to the blob, in the iteration order of the dict."""
    if type(value) is Tagged:
        node = build_node(value.plain, blob, level)
        cls = CLASSES[value.name]
        if level == 1 or node.kind != KINDS[cls["kind"]] or not 0 <= value.parameter < cls["parameters"]:
            raise ValueError(f"a tag of {value.name} that this node cannot have (F-077)")
        node.tag = value.parameter << 16 | cls["number"]
        return node
    kind = CONTAINERS.get(type(value))
    encoded = atom(value)
    if kind:
        if level > MAX_LEVELS:
            raise ValueError("containers nest more than 64 deep (F-042)")
        is_dict = isinstance(value, dict)
        items = value.items() if is_dict else ((None, each) for each in value)
        keyed = ((encode_key(key) if is_dict else (K_INDEX, 0), each) for key, each in items)
        return Node(kind, children=[(key, build_node(each, blob, level + 1)) for key, each in keyed])
    if type(value) is Tensor:
        check_tensor(value)
        storage = blob.add(value.data) if value.data else NONE
        return Node(TENSOR, tensor=(value, storage))
    if not encoded:
        raise TypeError(f"a {type(value).__name__} cannot be stored")
    if encoded[0] in (STR, BYTES) and len(encoded[1]) > MAX_INLINE:
        return Node(encoded[0], blob.add(encoded[1]), flags=1)
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
        tables: list[tuple[int, int, bytes]] = [
            (len(self.heap), 1, bytes(self.heap)),
            (len(self.dims), 8, pack_numbers("Q", self.dims)),
            (len(self.nodes), 8, b"".join(self.nodes)),
            (len(self.by_key), 4, pack_numbers("I", self.by_key)),
            (len(self.tensors), 8, b"".join(self.tensor_records)),
            (len(blob.storages), 8, b"".join(blob.storages)),
            (0, 8, b""),  # chunks
            (len(blob.crcs), 4, pack_numbers("I", blob.crcs)),
            (0, 4, b""),  # slices
            (0, 8, b""),  # placements
            (0, 8, b""),  # attrs
            (0, 1, b""),  # digests
            (0, 8, b""),  # shards
            (0, 8, b""),  # dtypes
            (0, 1, b""),  # subtrees
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


# ---- The file (2) --------------------------------------------------------------------------------


def encode(state_dict: dict) -> bytes:
    """Returns the bytes of an archive of a dict. Raises TypeError or ValueError for unsupported values."""
    if type(state_dict) not in (dict, OrderedDict):
        raise TypeError("the root is a dict (F-048)")
    blob = Blob()
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
    has_tables = view["attrs"] or "dtypes" in view or "shards" in view
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
    """Compares the output with the vectors, and reads the demonstration with reader.py."""
    import reader

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
    print(*(f"{name}: other bytes" for name in different), sep="\n", end="\n" * bool(different))
    print(f"{compared - len(different)} vectors are as written here, {len(different)} not, {skipped} left out")
    return 1 if different or not compared else 0


def main(arguments: list[str]) -> int:
    if arguments == ["--self-test"]:
        return self_test()
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.exit(__doc__)
    Path(arguments[0]).write_bytes(encode(DEMONSTRATION))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
