"""The invalid vectors of class tags: tags that no node can have (F-077), and content that does not fit (F-078)."""

from builder import (
    Archive,
    BIGINT,
    BYTES,
    Box,
    DICT,
    INT,
    K_INT,
    Key,
    LIST,
    Leaf,
    NONE_LEAF,
    ORDERED_DICT,
    SIZE,
    STR,
    TENSOR,
    TUPLE,
    bigint,
    keyed,
    u64,
)

COUNTER, DEFAULTDICT, SET, FROZENSET, NAMESPACE = range(1, 6)
WRAPPER, REGISTERED, DEQUE = 0x10, 0x11, 0x20
RANGE, SLICE, TIMEDELTA, TIMEZONE = range(0x30, 0x34)
PURE_POSIX_PATH, POSIX_PATH, PURE_WINDOWS_PATH, WINDOWS_PATH = range(0x40, 0x44)
DATE, TIME, DATETIME, LAYOUT, MEMORY_FORMAT = 0x48, 0x49, 0x4A, 0x50, 0x51


def parameter(number):
    return number << 16


def boxed(box):
    return Archive().tree(Box(DICT, [("leaf", box)]))


def text(tag, content):
    return Archive().tree(Box(DICT, [("leaf", Leaf(STR, content, tag))]))


def ints(tag, *numbers):
    return boxed(Box(TUPLE, [Leaf(INT, u64(number)) for number in numbers], tag))


def set_of(*keys, tag=SET):
    return boxed(Box(DICT, [(key, Leaf(NONE_LEAF)) for key in keys], tag))


def wrapper(tag=WRAPPER, **fields):
    """A wrapper of one tensor without elements. `fields` replace its entries, None removes one."""
    items = {
        "class": Leaf(STR, b"torchao.Int8Tensor"),
        "tensors": Box(DICT, [("qdata", Leaf(TENSOR, 0, count=1))]),
        "context": Leaf(NONE_LEAF),
        "size": Leaf(SIZE, (0,)),
        "stride": Leaf(SIZE, (1,)),
        **fields,
    }
    archive = boxed(Box(DICT, [each for each in items.items() if each[1] is not None], tag))
    has_tensor = any(node["kind"] == TENSOR for node in archive.tables["nodes"])
    return archive.tensor((0,)) if has_tensor else archive


def tag_cases():
    for name, about, archive in (
        ("root", "the root is a Counter", keyed("a").edit("nodes", 0, b=COUNTER)),
        ("number-0", "a parameter without a class", set_of("a", tag=parameter(1))),
        ("gap", "class 6 of a dict", set_of("a", tag=6)),
        ("set-of-list", "a list with the tag of a set", boxed(Box(LIST, [], SET))),
        ("deque-of-tuple", "a tuple with the tag of a deque", boxed(Box(TUPLE, [], DEQUE))),
        ("range-of-list", "a list with the tag of a range", boxed(Box(LIST, [Leaf(INT, 1)] * 3, RANGE))),
        ("path-of-list", "a list with the tag of a path", boxed(Box(LIST, [], POSIX_PATH))),
        ("counter-of-str", "a str with the tag of a Counter", text(COUNTER, b"text")),
        ("ordered", "an ordered_dict with the tag of a dict", boxed(Box(ORDERED_DICT, [], DEFAULTDICT))),
        ("factory-15", "a defaultdict with factory 15", boxed(Box(DICT, [], DEFAULTDICT | parameter(15)))),
        ("set-parameter", "a set with a parameter", set_of("a", tag=SET | parameter(1))),
        ("wrapper-flag-2", "a wrapper with flag bit 2", wrapper(WRAPPER | parameter(4))),
        ("path-parameter", "a path with a parameter", text(POSIX_PATH | 1 << 63, b"/tmp")),
    ):
        yield f"077-{name}", about, archive


def container_cases():
    namespace = boxed(Box(DICT, [(1, Leaf(NONE_LEAF))], NAMESPACE))
    for name, about, archive in (
        ("set-value", "a set whose element has a value", boxed(Box(DICT, [("a", Leaf(INT, 1))], SET))),
        ("set-order", "a set whose elements are not in key order", set_of("b", "a")),
        ("frozenset-order", "a frozenset with an int before a str", set_of(1, "a", tag=FROZENSET)),
        ("namespace-key", "a SimpleNamespace with a key that is an int", namespace),
        ("deque-maxlen", "a deque of 2 with maxlen 1", boxed(Box(LIST, [Leaf(NONE_LEAF)] * 2, DEQUE | parameter(2)))),
        ("deque-maxlen-0", "a deque of 1 with maxlen 0", boxed(Box(LIST, [Leaf(NONE_LEAF)], DEQUE | parameter(1)))),
    ):
        yield f"078-{name}", about, archive


def tuple_cases():
    none, one = Leaf(NONE_LEAF), Leaf(INT, 1)
    named = [Leaf(INT, 0), Leaf(INT, 3600), Leaf(INT, 0)]
    for name, about, archive in (
        ("range-2", "a range of two ints", ints(RANGE, 0, 1)),
        ("range-none", "a range whose start is None", boxed(Box(TUPLE, [none, one, one], RANGE))),
        ("range-step-0", "a range with step 0", ints(RANGE, 0, 1, 0)),
        ("slice-4", "a slice of four ints", ints(SLICE, 0, 1, 1, 1)),
        ("slice-str", "a slice whose stop is a str", boxed(Box(TUPLE, [none, Leaf(STR, b"a"), none], SLICE))),
        ("timedelta-2", "a timedelta without microseconds", ints(TIMEDELTA, 0, 1)),
        ("timedelta-days", "a timedelta of 10^9 days", ints(TIMEDELTA, 10**9, 0, 0)),
        ("timedelta-seconds", "a timedelta of 86400 seconds", ints(TIMEDELTA, 0, 86400, 0)),
        ("timedelta-negative", "a timedelta of -1 microseconds", ints(TIMEDELTA, 0, 0, -1)),
        ("timedelta-bigint", "2^64 days", boxed(Box(TUPLE, [Leaf(BIGINT, bigint(1 << 64)), one, one], TIMEDELTA))),
        ("timezone-3", "a timezone without a field for its name", ints(TIMEZONE, 0, 0, 0)),
        ("timezone-day", "an offset of a day", boxed(Box(TUPLE, [one, Leaf(INT, 0), Leaf(INT, 0), none], TIMEZONE))),
        (
            "timezone-minus-day",
            "an offset of minus a day",
            boxed(Box(TUPLE, [Leaf(INT, u64(-1)), Leaf(INT, 0), Leaf(INT, 0), none], TIMEZONE)),
        ),
        ("timezone-name", "a timezone named 1", boxed(Box(TUPLE, [*named, one], TIMEZONE))),
        (
            "timezone-path",
            "a timezone whose name is a path",
            boxed(Box(TUPLE, [*named, Leaf(STR, b"a", POSIX_PATH)], TIMEZONE)),
        ),
    ):
        yield f"078-{name}", about, archive


def text_cases():
    for name, tag, content in (
        ("path-empty", PURE_POSIX_PATH, b""),
        ("windows-path-empty", WINDOWS_PATH, b""),
        ("date-month", DATE, b"2026-13-01"),
        ("date-day", DATE, b"2026-02-29"),
        ("date-year", DATE, b"0000-01-01"),
        ("date-short", DATE, b"2026-1-1"),
        ("date-time", DATE, b"2026-01-01T00:00:00"),
        ("date-digits", DATE, "٢٠٢٦-01-01".encode()),
        ("date-newline", DATE, b"2026-01-01\n"),
        ("time-hour", TIME, b"24:00:00"),
        ("time-second", TIME, b"23:59:60"),
        ("time-short", TIME, b"23:59"),
        ("time-milliseconds", TIME, b"23:59:59.500"),
        ("time-microseconds-0", TIME, b"23:59:59.000000"),
        ("time-z", TIME, b"23:59:59Z"),
        ("time-offset-day", TIME, b"23:59:59+24:00"),
        ("time-offset-minus-0", TIME, b"23:59:59-00:00"),
        ("time-offset-seconds-0", TIME, b"23:59:59+01:00:00"),
        ("time-offset-microseconds-0", TIME, b"23:59:59+01:00:00.000000"),
        ("datetime-space", DATETIME, b"2026-01-01 00:00:00"),
        ("datetime-date", DATETIME, b"2026-01-01"),
        ("datetime-day", DATETIME, b"2026-04-31T00:00:00+02:00"),
        ("layout-module", LAYOUT, b"torch.strided"),
        ("layout-empty", LAYOUT, b""),
        ("memory-format-65", MEMORY_FORMAT, b"a" * 65),
    ):
        yield f"078-{name}", f"{content.decode()!r} as {name.split('-')[0]}", text(tag, content)
    long = Archive().tree(Box(DICT, [("leaf", Leaf(STR, b=POSIX_PATH, flags=1))]))
    yield "078-path-in-storage", "a path of 4100 bytes in a storage", long.storage(b"path" * 1025)


def wrapper_cases():
    inner = Box(DICT, [("x", Leaf(NONE_LEAF))])
    by_int = Box(DICT, [(Key(K_INT, 1), Leaf(TENSOR, 0, count=1))])
    for name, about, fields in (
        ("no-context", "without context", {"context": None}),
        ("more", "with a sixth entry", {"more": Leaf(NONE_LEAF)}),
        ("class", "whose class is bytes", {"class": Leaf(BYTES, b"a")}),
        ("class-empty", "whose class is empty", {"class": Leaf(STR)}),
        ("class-long", "whose class has 257 bytes", {"class": Leaf(STR, b"a" * 257)}),
        ("class-path", "whose class is a path", {"class": Leaf(STR, b"a", POSIX_PATH)}),
        ("tensors-list", "whose tensors are a list", {"tensors": Box(LIST, [Leaf(TENSOR, 0, count=1)])}),
        ("tensors-empty", "without tensors", {"tensors": Box(DICT, [])}),
        ("tensors-dict", "of a dict", {"tensors": Box(DICT, [("x", inner)])}),
        ("tensors-int", "of an int", {"tensors": Box(DICT, [("x", Leaf(INT, 1))])}),
        ("tensors-key", "whose tensor has an int as name", {"tensors": by_int}),
        ("tensors-counter", "whose tensors are a Counter", {
            "tensors": Box(DICT, [("x", Leaf(TENSOR, 0, count=1))], COUNTER),
        }),
        ("size", "whose size is a tuple", {"size": Box(TUPLE, [Leaf(INT, 0)])}),
        ("stride", "whose stride has another rank", {"stride": Leaf(SIZE, (1, 1))}),
    ):
        yield f"078-wrapper-{name}", f"a tensor wrapper {about}", wrapper(**fields)
    items = [("tensors", Box(DICT, [("x", Leaf(TENSOR, 0, count=1))])), ("class", Leaf(STR, b"a"))]
    items += [(name, Leaf(NONE_LEAF)) for name in ("context", "size", "stride")]
    order = boxed(Box(DICT, items, WRAPPER)).tensor((0,))
    yield "078-wrapper-order", "a tensor wrapper whose entries are in another order", order
    named = Leaf(STR, b"torchao.PerRow")
    for name, about, entries in (
        ("value", "without value", [("class", named)]),
        ("class", "whose class is None", [("class", Leaf(NONE_LEAF)), ("value", named)]),
        ("order", "whose value comes first", [("value", named), ("class", named)]),
    ):
        archive = boxed(Box(DICT, entries, REGISTERED))
        yield f"078-registered-{name}", f"an object of a registered class {about}", archive


def class_cases():
    yield from tag_cases()
    yield from container_cases()
    yield from tuple_cases()
    yield from text_cases()
    yield from wrapper_cases()
