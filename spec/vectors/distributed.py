"""The invalid vectors of distributed leaves: F-068 and F-084, and the records F-069 of the archives of a shard set."""

from builder import (
    Archive,
    Box,
    DICT,
    DIVERGENT,
    HALVES,
    INT,
    INT8,
    K_INT,
    Key,
    LIST,
    Leaf,
    NONE,
    ON_TWO,
    REPLICATE,
    SHARDED,
    STR,
    STRIDED_SHARD,
    TENSOR,
    U64,
    base_digest,
    compare,
    distributed,
    distributed_pair,
    distribution,
    manifest,
    mixed_archive,
    mixed_set,
    row_names,
    rows,
    rows_set,
    shard_set,
)


def distributed_cases():
    yield from leaf_cases()
    yield from group_cases()
    yield from layout_cases()
    yield from shard_field_cases()
    yield from place_cases()
    yield from archive_leaf_cases()
    yield from archive_storage_cases()


def leaf_cases():
    """Manifests, opened alone, whose distributed leaf breaks F-068 or a rule of tensor records."""

    def edited(**fields):
        return distributed().at("leaf", **fields)

    other = 1, Leaf(INT, 7)
    values = distributed(inside=lambda leaf: Box(DIVERGENT, [(0, leaf), other]))
    below = distributed(inside=lambda leaf: Box(DIVERGENT, [(0, Box(LIST, [leaf])), other]))
    factors = {"kind": STRIDED_SHARD, "split_factor": 65_537}
    two_factors = [{"kind": STRIDED_SHARD, "dim": dim, "split_factor": 257} for dim in range(2)]
    on_two_by_one = {"mesh": (2, 1), "ranks": (0, 1)}
    without_mesh = dict.fromkeys(("mesh", "ranks"), ()) | {"placements": NONE}
    for name, about, archive in (
        ("no-shards", "in a file without shards", distributed().set("shards", ()).set("heap", b"leaf")),
        ("divergent", "as a value of a divergent node", values),
        ("below-divergent", "in a list in a divergent node", below),
        ("chunk-log2-11", "with chunks of 2 KiB", edited(b=distribution(0, 11))),
        ("chunk-log2-21", "with chunks of 2 MiB", edited(b=distribution(0, 21))),
        ("bit-8", "with bit 8 of the distribution", edited(b=distribution() | 1 << 8)),
        ("bit-31", "with bit 31 of the distribution", edited(b=distribution() | 1 << 31)),
        ("group-1", "of group 1, alone", edited(b=distribution(1))),
        ("group-huge", "of group 2^32 - 1, alone", edited(b=distribution(NONE))),
        ("empty", "without elements", distributed((0,))),
        ("strides", "with strides", distributed((2, 3), tensor={"strides": (1, 2)})),
        ("no-slice", "without a slice", without_slice()),
        ("no-mesh", "without a mesh", distributed(placed=(), **without_mesh)),
        ("no-ranks", "without ranks", distributed(ranks=())),
        ("no-placements", "without placements", distributed(placed=(), placements=NONE)),
        ("coordinates", "with coordinates", distributed(coordinates=(1,))),
        ("offset", "with an offset", distributed(offsets=(1,), global_shape=(5,))),
        ("global-shape", "of a part of the global tensor", distributed(global_shape=(5,))),
        ("split-factor", "with a split factor of 65,537", distributed(placed=(factors,))),
        ("split-factors", "with split factors of 257 x 257", distributed((4, 4), two_factors, **on_two_by_one)),
        ("rank-no-writer", "on ranks 0 and 2, which has no shard", distributed(ranks=(0, 2))),
        ("rank-of-replica", "replicated, on ranks 0 and 2, which has no shard", replicated()),
        ("rank-writes-two", "on rank 0, which writes two shards", distributed().edit("shards", 1, writer=0)),
    ):
        yield f"068-{name}", f"a distributed leaf {about}", archive
    for name, about, archive in (
        ("count-0", "without a record", edited(count=0)),
        ("count-2", "of two records", two_records()),
        ("beyond", "of record 1 of 1", edited(a=1)),
    ):
        yield f"051-distributed-{name}", f"a distributed leaf {about}", archive
    with_storage = distributed(tensor={"storage": 0}).storage(bytes(4), offset=4096)
    for name, about, archive in (
        ("storage", "in a storage", with_storage),
        ("storage-beyond", "in storage 0 of none", distributed(tensor={"storage": 0})),
        ("byte-offset", "at byte 1", distributed(tensor={"byte_offset": 1})),
    ):
        yield f"054-distributed-{name}", f"a distributed leaf {about}", archive
    yield "047-distributed-flag", "a distributed leaf with flag bit 0", edited(flags=1)
    yield "053-distributed", "a distributed leaf at byte 2^64 - 1", distributed(tensor={"byte_offset": U64})


def without_slice():
    archive = distributed(placed=(), tensor={"slice": NONE})
    return archive.set("slices", ()).set("dims", (4,))


def replicated():
    return distributed(placed=({"kind": REPLICATE},), ranks=(0, 2))


def two_records():
    archive = distributed().at("leaf", count=2)
    return archive.tensor((4,), storage=NONE, slice=0)


def group_cases():
    """Manifests, opened alone, whose groups break F-068."""
    one, other = distribution(0), distribution(1)
    for name, about, archive in (
        ("gap", "groups 0 and 2", distributed_pair(one, distribution(2))),
        ("from-1", "groups 1 and 2", distributed_pair(other, distribution(2))),
        ("dtypes", "a group of two dtypes", distributed_pair(one, one, dtype=INT8)),
        ("slices", "a group of two slices, which are equal", distributed_pair(one, one, slices=(0, 1))),
        ("chunks", "a group of two chunk sizes", distributed_pair(one, distribution(0, 12))),
    ):
        yield f"068-group-{name}", f"distributed leaves: {about}", archive


def layout_cases():
    """Manifests whose Shard or Other records break F-069."""

    def shard(**fields):
        return manifest().edit("shards", 0, **fields)

    def others(*records, **fields):
        """A manifest whose first shard has these Other records, each with its position and the default length."""
        archive = shard(**{"others": 0, "other_count": len(records), **fields})
        for record in records:
            archive.add("others", **{"stored_len": 100, "crcs": 1, **record})
        return archive

    index_len = 12288 - 8192 - 64
    entries = index_len // 4
    # With this number of entries, entries and pages take 2^32 bytes.
    overflow = (1 << 30) * 1024 // 1025
    assert overflow + -(-overflow // 1024) == 1 << 30
    first = {"position": 0}
    both = others(first).edit("shards", 1, others=1, other_count=1).add("others", stored_len=100, crcs=1)
    for name, about, archive in (
        ("crcs-unaligned", "crcs at 2", shard(crcs_off=2)),
        ("crcs-beyond", "crcs at the end of the index", shard(crcs_off=index_len, crcs_len=1)),
        ("crcs-end", "an entry of crcs too many", shard(crcs_off=8, crcs_len=entries - 2)),
        ("pages-beyond", "crcs up to the end of the index, without space for pages", shard(crcs_len=entries)),
        ("crcs-overflow", "crcs and pages of 2^32 bytes", shard(crcs_len=overflow)),
        ("reserved", "reserved is 1", shard(reserved=1)),
        ("none-with-count", "others of NONE, and one record", shard(other_count=1)),
        ("unclaimed", "an Other record of no shard", others(first, other_count=0)),
        ("unclaimed-none", "an Other record, and others of NONE", others(first, others=NONE, other_count=0)),
        ("too-few", "two Other records, and one is there", others(first, other_count=2)),
        ("late", "others from record 1 on", others(first, first, others=1, other_count=1)),
        ("empty-not-at-0", "no others, from record 1 on", others(first).edit("shards", 1, others=1, other_count=0)),
        ("out-of-order", "the second range is named first", swap_others(both)),
        ("positions", "positions that decrease", others({"position": 1}, first)),
        ("positions-shared", "positions that decrease between two claimed ranges", decreasing()),
        ("stored-len-0", "an other storage without bytes", others({"stored_len": 0})),
        ("crcs-0", "an other storage without crcs", others({"crcs": 0})),
    ):
        yield f"069-{name}", f"a shard record: {about}", archive
    no_shards = rows(0).add("others", stored_len=100, crcs=1)
    yield "069-no-shards", "an Other record in a file without shards", no_shards


def swap_others(archive):
    return archive.edit("shards", 0, others=1).edit("shards", 1, others=0)


def decreasing():
    """Three shards: two with a record each, and one with both, whose positions decrease."""
    archive = manifest().shard(b"c.tssd", writer=2, others=0, other_count=2)
    for i in range(2):
        archive.edit("shards", i, others=i, other_count=1).add("others", stored_len=100, position=1 - i, crcs=1)
    return archive


def shard_field_cases():
    """Shard sets with another layout of an archive than its Shard record says."""
    fields = (
        ("crcs-off", {"crcs_off": lambda at: at + 4}),
        ("crcs-len", {"crcs_len": lambda count: count - 1}),
        ("pages-crc", {"pages_crc32": lambda crc: crc ^ 1}),
    )
    for name, change in fields:
        about = f"a shard set with distributed leaves: another {name}"
        yield f"084-{name}/", about, mixed_set().record(1, **change)
    for name, change in fields:
        about = f"a shard set without distributed leaves: another {name}"
        yield f"084-plain-{name}/", about, shard_set().record(1, **change).only("verify")
    files = shard_set().record(0, others=0, other_count=1)
    files.manifest.add("others", stored_len=101, crcs=1)
    yield "084-plain-others/", "a shard set without distributed leaves: an other storage", files.only("verify")


def place_cases():
    """Shard sets whose storages lie elsewhere than computed."""

    def others(**fields):
        files = mixed_set()
        files.manifest.edit("others", 0, **fields)
        return files

    more = mixed_set()
    more.manifest.add("others", stored_len=4, position=2, crcs=1)
    without = mixed_set(with_others=False).record(0, others=0)
    two = row_names((0, 1))
    each_in_other = rows_set(rows(0, two, (1, 0)), groups=(0, 1), others=0)
    swapped = mixed_set()
    for name, group in (("w", 1), ("tied", 1), ("strided", 0)):
        node = swapped.manifest.named[name]
        node.update(b=node["b"] & 0xFF | group << 32)
    for name, about, files in (
        ("first-late", "the first storage at 8192", mixed_set(mixed_archive(0, w={"align_log2": 13}))),
        ("held-late", "a storage of a group 3.5 KiB late", mixed_set(mixed_archive(0, strided={"align_log2": 12}))),
        ("held-early", "a storage of a group aligned to 64", mixed_set(mixed_archive(0, strided={"align_log2": 6}))),
        ("other-late", "an other storage aligned to 4096", mixed_set(mixed_archive(0, more={"align_log2": 12}))),
        ("other-len", "an other storage that is a byte longer", others(stored_len=65)),
        ("other-crcs", "an other storage with two entries of crcs", others(crcs=2)),
        ("other-position", "an other storage before the held ones", others(position=0)),
        ("last-late", "an other storage at the end, aligned to 4096", with_last(align_log2=12)),
        ("last-early", "an other storage at the end, aligned to 64", with_last(align_log2=6)),
        ("of-manifest", "an other storage of an archive that is a manifest", with_manifest()),
        ("position-2", "an other storage behind two held ones of one", behind_two()),
        ("too-few", "a storage that no record is about", without),
        ("too-many", "an other storage that is not there", more.record(0, other_count=2)),
        ("group-order", "groups in another order than the storages", swapped),
        ("group-swapped", "two groups of one length, each in the storage of the other", each_in_other),
        ("compressed", "a compressed storage of a group", rows_set(rows(0, compress=True), others=0)),
    ):
        yield f"084-place-{name}/", f"a shard set with places from the manifest: {about}", files


def with_last(**fields):
    """Archives with a held storage and an other storage behind it, which has `fields` in the first archive."""
    items = [("rows", Leaf(TENSOR, 0, count=1)), ("other", Leaf(TENSOR, 1, count=1))]
    archives = []
    for i in range(2):
        archive = Archive().tree(Box(DICT, items)).storage(HALVES[i]).storage(HALVES[i], **(fields if i == 0 else {}))
        archive.tensor((2, 50), slice=0).tensor((100,), storage=1)
        archive.slice((2 * i, 0), (4, 50), **ON_TWO, coordinates=(i,)).add("placements", **SHARDED)
        archives.append(archive)
    files = rows_set(archives[0], second=archives[1], others=0)
    files.manifest.add("others", stored_len=100, position=1, crcs=1)
    return files.record(0, other_count=1).record(1, other_count=1)


def with_manifest():
    """A third archive that is a manifest with a storage, and places that count it."""
    third = Archive().tree(Box(DICT, [("more", Leaf(TENSOR, 0, count=1))])).storage(HALVES[0], offset=4096)
    files = rows_set(others=0, third=third.tensor((100,)).shard(b"d.tssd"))
    files.manifest.add("others", stored_len=100, crcs=1)
    return files.record(2, others=0, other_count=1)


def behind_two():
    """Archives with a held storage, and an other storage behind it, whose record says that it is behind two."""
    archives = [rows(i, ("rows", "other"), (0, 1)) for i in range(2)]
    files = rows_set(archives[0], second=archives[1], others=0)
    files.manifest.add("others", stored_len=100, position=2, crcs=1)
    return files.record(0, other_count=1).record(1, other_count=1)


def archive_leaf_cases():
    """Shard sets in which an archive has another leaf than a distributed leaf means."""

    def tensor(**fields):
        return rows_set(rows(0, tensor=fields))

    def part(**fields):
        return rows_set(rows(0, slice=fields))

    two = rows(0, tensor={"shape": (1, 50)}).at("rows", count=2)
    two.tensor((1, 50), slice=1, byte_offset=50).slice((1, 0), (4, 50), **ON_TWO, coordinates=(0,))
    plain = rows(0, tensor={"slice": NONE}).set("slices", ()).set("placements", ()).set("dims", (2, 50))
    transposed = Archive().tree(Box(DICT, [("rows", Leaf(TENSOR, 0, count=1))])).storage(HALVES[0])
    transposed.tensor((2, 50), strides=(1, 2), slice=0).slice((0, 0), (4, 50), **ON_TWO, coordinates=(0,))
    text = Archive().tree(Box(DICT, [("rows", Leaf(STR, b"text"))]))
    on_two_by_one = {"mesh": (2, 1), "coordinates": (0, 0), "placements": NONE}
    int_key = rows(0, names=(Key(K_INT, 0),))
    for name, about, files in (
        ("absent", "no leaf at the path", rows_set(rows(0, names=("row",)))),
        ("absent-second", "no leaf at the path, in the second archive", rows_set(second=rows(1, names=("row",)))),
        ("tied-absent", "no leaf at the path of a tied one", rows_set(rows(0), groups=(0, 0))),
        ("key-kind", "a leaf with an int key", rows_set(int_key)),
        ("nested", "a leaf below the path", rows_set(rows(0, box=lambda leaf: Box(LIST, [leaf])))),
        ("text", "a str at the path", rows_set(text)),
        ("offset", "a region a row lower", part(offsets=(1, 0))),
        ("other-place", "the region of the other place", rows_set(rows(1))),
        ("global-shape", "another global shape", part(global_shape=(5, 50))),
        ("shape", "another shape", tensor(shape=(2, 25))),
        ("dtype", "another dtype", tensor(dtype=INT8)),
        ("flags", "a Parameter", tensor(flags=2)),
        ("strides", "other strides", rows_set(transposed.add("placements", **SHARDED))),
        ("mesh", "a mesh of two dimensions", rows_set(rows(0, slice=on_two_by_one).set("placements", ()))),
        ("plain", "a tensor without a slice", rows_set(plain)),
        ("two-records", "two records in place of one", rows_set(two)),
        ("record-order", "two regions in the other order", mixed_set(with_regions(reversed))),
        ("record-missing", "one of two regions", mixed_set(with_regions(lambda records: records[:1]))),
    ):
        yield f"084-leaf-{name}/", f"a shard set with distributed leaves: an archive has {about}", files


def with_regions(change):
    """The archive of the first writer of `mixed_set`, with other records of the leaf of two regions."""
    archive = mixed_archive(0)
    *others, first, second = archive.tables["tensors"]
    records = list(change([first, second]))
    slices = archive.tables["slices"]
    archive.set("tensors", others + records)
    archive.set("slices", slices[:1] + [slices[record["slice"]] for record in records])
    for number, record in enumerate(records):
        record.update(slice=1 + number)
    return archive.at("strided", count=len(records))


def archive_storage_cases():
    """Shard sets in which the records of a leaf lie in another storage than described."""
    longer = HALVES[0] + b"1"
    at_1 = rows_set(rows(0, content=longer, tensor={"byte_offset": 1}))
    tied = row_names((0, 0))
    item = "more", Leaf(TENSOR, 1, count=1)
    in_manifest = rows(0, storage={"offset": 4096}).shard(b"c.tssd")
    in_delta = Archive().tree(Box(DICT, [("rows", Leaf(TENSOR, 0, count=1))]))
    in_delta.delta(HALVES[0], [(3, compare(old=HALVES[1], new=HALVES[0]).encode())])
    in_delta.tensor((2, 50), slice=0).slice((0, 0), (4, 50), **ON_TWO, coordinates=(0,))
    in_delta.add("placements", **SHARDED).digested().based(base_digest(HALVES[1]))
    coarse = {"chunk_log2": 20}
    in_two = mixed_archive(0).storage(bytes(4), chunk_log2=12).edit("tensors", 4, storage=3)
    for name, about, files in (
        ("longer", "that is a byte longer", rows_set(rows(0, content=longer))),
        ("byte-offset", "from byte 1 on", at_1),
        ("chunks", "with other chunks", rows_set(rows(0, storage={"chunk_log2": 12}))),
        ("fine-chunks", "with coarse chunks, and fine ones are described", mixed_set(mixed_archive(0, strided=coarse))),
        ("fine-chunks-alone", "as before, without places", mixed_set(mixed_archive(0, strided=coarse), False)),
        ("records-in-two", "for each of its two records", mixed_set(in_two, False)),
        ("group-in-two", "of two of a group", rows_set(rows(0, tied, (0, 1)), groups=(0, 0))),
        ("two-groups", "of two groups", rows_set(rows(0, tied, (0, 0)), groups=(0, 1))),
        ("named", "that the manifest names too", rows_set(items=(item,))),
        ("of-manifest", "of another manifest", rows_set(in_manifest)),
        ("of-delta", "that is a delta storage", rows_set(in_delta)),
    ):
        yield f"084-storage-{name}/", f"a shard set with distributed leaves: a leaf in a storage {about}", files
