//! Operations of a store and of its model as plain values, and random sequences of them.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use crate::conformance::types::{Array, Contribution, Extent, Job, Kind, PutRequest};

/// Number of clients and of keys.
pub(crate) const CLIENTS: usize = 2;
pub(crate) const KEYS: usize = 2;

/// One request of a client, or a fault.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Put {
        client: usize,
        key: usize,
        wish: PutSpec,
    },
    /// Begins a contribution. A later operation may finish or abort it.
    Begin {
        client: usize,
        key: usize,
        wish: PutSpec,
    },
    /// Selects a contribution by the number of contributions begun after it.
    Finish {
        from_last: usize,
    },
    Abort {
        back: usize,
    },
    Get {
        client: usize,
        key: usize,
        number: Option<u64>,
        read: Read,
    },
    /// Opens a version for reading and keeps it open.
    Open {
        client: usize,
        key: usize,
        number: Option<u64>,
    },
    Release,
    List {
        client: usize,
        key: usize,
    },
    Wait {
        client: usize,
        key: usize,
        number: u64,
    },
    Delete {
        client: usize,
        key: usize,
        number: Option<u64>,
    },
    Retain {
        client: usize,
        key: usize,
        keep: u32,
    },
    Pin {
        client: usize,
        key: usize,
        number: Option<u64>,
        label: bool,
    },
    Unpin {
        client: usize,
        key: usize,
        label: bool,
    },
    /// Disconnects a client without finishing its contributions, and connects another one.
    Disconnect {
        client: usize,
    },
    /// Kills the daemon process and starts another one.
    Kill,
    /// Kills the daemon process this long after the next operation has begun.
    KillDuringNext {
        after: Duration,
    },
}

impl Operation {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Put { .. } => "put",
            Self::Begin { .. } => "begin",
            Self::Finish { .. } => "finish",
            Self::Abort { .. } => "abort",
            Self::Get { read: Read::Whole, .. } => "get whole",
            Self::Get { read: Read::Tensor(_), .. } => "get tensor",
            Self::Get { read: Read::Slice(..), .. } => "get slice",
            Self::Get { read: Read::Into(_), .. } => "get into",
            Self::Get { read: Read::Resharded(_), .. } => "get resharded",
            Self::Open { .. } => "hold",
            Self::Release => "release",
            Self::List { .. } => "list",
            Self::Wait { .. } => "wait",
            Self::Delete { .. } => "delete",
            Self::Retain { .. } => "retain",
            Self::Pin { .. } => "pin",
            Self::Unpin { .. } => "unpin",
            Self::Disconnect { .. } => "leave",
            Self::Kill => "kill",
            Self::KillDuringNext { .. } => "kill meanwhile",
        }
    }
}

/// Names of all operations. Only a daemon process has the last two.
pub(crate) const OPERATION_NAMES: [&str; 20] = [
    "put",
    "begin",
    "finish",
    "abort",
    "get whole",
    "get tensor",
    "get slice",
    "get into",
    "get resharded",
    "hold",
    "release",
    "list",
    "wait",
    "delete",
    "retain",
    "pin",
    "unpin",
    "leave",
    "kill",
    "kill meanwhile",
];

/// A box of an array: first row and column, number of rows and of columns.
pub(crate) type ArrayBox = (u64, u64, u64, u64);

#[derive(Clone, Debug)]
pub(crate) enum Read {
    Whole,
    Tensor(usize),
    Slice(usize, ArrayBox),
    /// Reads into memory of the caller: whole arrays, or boxes of them.
    Into(Vec<(usize, Option<ArrayBox>)>),
    /// Reads the whole state dict, with boxes of the first leaf.
    Resharded(Vec<ArrayBox>),
}

/// Names of leaves. Reads address them by index. No writer puts the last one.
pub(crate) const LEAVES: [&str; 5] = ["matrix", "same", "own0", "own1", "nothing"];

/// Parameters of a put: writer, options and contents.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "the options of a put are such")]
pub(crate) struct PutSpec {
    pub(crate) writer: u32,
    /// Number of writers. Their numbers are `0..of`.
    pub(crate) writer_count: u32,
    /// Whether the put names no writers. The store then takes them from the mesh of the slices.
    pub(crate) infers_writers: bool,
    pub(crate) job: Option<Job>,
    pub(crate) number: Option<u64>,
    pub(crate) rewind: bool,
    pub(crate) durable: bool,
    pub(crate) seed: u32,
    pub(crate) flaw: Option<Flaw>,
    pub(crate) takes_lowest: bool,
    /// Whether the contribution, if it is published, is written as two archives.
    pub(crate) in_two_archives: bool,
}

/// A change of a contribution that may make it incompatible with those of other writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    Hole,
    Overlap,
    Kind,
    Shape,
    Whole,
    Differs,
    /// No incompatibility: the whole matrix, equal to that of every other writer with this change.
    Replica,
}

pub(crate) const ROWS: u64 = 5;
pub(crate) const COLUMNS: u64 = 3;

impl PutSpec {
    pub(crate) fn request(&self) -> PutRequest {
        let Self { writer, job, number, rewind, durable, infers_writers, .. } = *self;
        PutRequest {
            writer,
            writers: (0..self.writer_count).collect(),
            infers_writers,
            job,
            sequence: None,
            number,
            rewind,
            durable,
        }
    }

    /// Builds the contribution of this writer.
    ///
    /// It has rows of a matrix, an array of its own, an array that all writers have, and a number.
    pub(crate) fn contribution(&self, is_published: bool) -> Contribution {
        let Self { writer, writer_count, seed, flaw, .. } = *self;
        let (first, after) = self.rows();
        let kind = if flaw == Some(Flaw::Kind) { Kind::Int32 } else { Kind::Uint32 };
        let shape = if flaw == Some(Flaw::Shape) { (ROWS + 1, COLUMNS) } else { (ROWS, COLUMNS) };
        let extent = if flaw == Some(Flaw::Whole) { Extent::Whole } else { Extent::Slice };
        let rows = if extent == Extent::Whole { 0..ROWS } else { first..after };
        let places = rows.flat_map(|row| (0..COLUMNS).map(move |column| (row, column)));
        let word = |(row, column): (u64, u64)| {
            seed * 1000 + u32::try_from(row * COLUMNS + column).expect("small")
        };
        let elements = places.map(|place| (place, word(place))).collect();
        let matrix = Array { kind, shape, elements };
        let own = counting_array((2, 2), seed * 10 + writer);
        let same = counting_array((1, 4), u32::from(flaw == Some(Flaw::Differs)) * (writer + 1));
        let step = Array {
            kind: Kind::Number,
            shape: (1, 1),
            elements: BTreeMap::from([((0, 0), writer_count)]),
        };
        let whole = |name: &str, array| (name.to_owned(), array, Extent::Whole);
        let leaves = vec![
            ("matrix".to_owned(), matrix, extent),
            whole(&format!("own{writer}"), own),
            whole("same", same),
            whole("step", step),
        ];
        let archives = if self.in_two_archives && is_published { 2 } else { 1 };
        Contribution {
            leaves,
            takes_lowest: self.takes_lowest,
            archives,
            on_mesh: self.infers_writers,
        }
    }

    /// Returns the rows of the matrix that this writer has: the first, and one after the last.
    pub(crate) fn rows(&self) -> (u64, u64) {
        let (writer, of) = (u64::from(self.writer), u64::from(self.writer_count));
        let (first, after) = (ROWS * writer / of, (ROWS * (writer + 1) / of).min(ROWS));
        match self.flaw {
            Some(Flaw::Replica | Flaw::Whole) => (0, ROWS),
            Some(Flaw::Hole) => (first.min(ROWS), after.saturating_sub(1).max(first.min(ROWS))),
            Some(Flaw::Overlap) => (first.saturating_sub(1).min(ROWS), after),
            _ => (first.min(ROWS), after),
        }
    }
}

fn counting_array(shape: (u64, u64), seed: u32) -> Array {
    let places = (0..shape.0).flat_map(|row| (0..shape.1).map(move |column| (row, column)));
    let elements = places.zip(seed * 100..).collect();
    Array { kind: Kind::Uint32, shape, elements }
}

/// Generates sequences of operations. If the daemon process can be killed, they include kills.
pub(crate) fn sequences(can_be_killed: bool) -> impl Strategy<Value = Vec<Operation>> {
    let (kill, kill_during_next) = if can_be_killed { (2, 6) } else { (0, 0) };
    let steps = prop_oneof![
        40 => any_operation().prop_map(|operation| vec![operation]),
        12 => put_by_all_writers(),
        kill => Just(vec![Operation::Kill]),
        kill_during_next => call_with_kill(),
    ];
    prop::collection::vec(steps, 1..24).prop_map(|steps| steps.concat())
}

/// Generates a call during which the daemon process may be killed. Most are durable puts of one writer.
fn call_with_kill() -> impl Strategy<Value = Vec<Operation>> {
    let kill_during_next = (0..2500_u64)
        .prop_map(|after| Operation::KillDuringNext { after: Duration::from_micros(after) });
    let durable_single =
        |wish: PutSpec| PutSpec { writer: 0, writer_count: 1, durable: true, flaw: None, ..wish };
    let put = (0..CLIENTS, 0..KEYS, any_wish()).prop_map(move |(client, key, wish)| {
        Operation::Put { client, key, wish: durable_single(wish) }
    });
    // A client that disconnects waits for the daemon.
    let is_call = |operation: &Operation| !matches!(operation, Operation::Disconnect { .. });
    let other = any_operation().prop_filter("no call", is_call);
    (kill_during_next, prop_oneof![2 => put, 1 => other])
        .prop_map(|(kill_during_next, call)| vec![kill_during_next, call])
}

/// Generates one put by each writer of a version. The writers alternate between the clients.
fn put_by_all_writers() -> impl Strategy<Value = Vec<Operation>> {
    (any_wish(), 0..KEYS, 2..4_u32).prop_map(|(wish, key, of)| {
        let put = |writer: u32| {
            let client = usize::try_from(writer).expect("few") % CLIENTS;
            let (job, flaw) = (wish.job.or(Some(1)), wish.flaw.filter(|_| writer == 1));
            let wish = PutSpec { writer, writer_count: of, job, flaw, ..wish.clone() };
            Operation::Put { client, key, wish }
        };
        (0..of).map(put).collect()
    })
}

fn any_operation() -> impl Strategy<Value = Operation> {
    let at = || (0..CLIENTS, 0..KEYS);
    let number = || prop::option::weighted(0.4, any_number());
    prop_oneof![
        14 => (at(), any_wish())
            .prop_map(|((client, key), wish)| Operation::Put { client, key, wish }),
        7 => (at(), any_wish())
            .prop_map(|((client, key), wish)| Operation::Begin { client, key, wish }),
        6 => (0..3_usize).prop_map(|back| Operation::Finish { from_last: back }),
        2 => (0..3_usize).prop_map(|back| Operation::Abort { back }),
        12 => (at(), number(), any_read())
            .prop_map(|((client, key), number, read)| Operation::Get { client, key, number, read }),
        3 => (at(), number())
            .prop_map(|((client, key), number)| Operation::Open { client, key, number }),
        2 => Just(Operation::Release),
        4 => at().prop_map(|(client, key)| Operation::List { client, key }),
        1 => (at(), any_number())
            .prop_map(|((client, key), number)| Operation::Wait { client, key, number }),
        2 => (at(), number())
            .prop_map(|((client, key), number)| Operation::Delete { client, key, number }),
        2 => (at(), 1..4_u32)
            .prop_map(|((client, key), keep)| Operation::Retain { client, key, keep }),
        3 => (at(), number(), any::<bool>()).prop_map(|((client, key), number, label)| {
            Operation::Pin { client, key, number, label }
        }),
        1 => (at(), any::<bool>())
            .prop_map(|((client, key), label)| Operation::Unpin { client, key, label }),
        1 => (0..CLIENTS).prop_map(|client| Operation::Disconnect { client }),
    ]
}

/// Generates numbers that versions have early in a sequence.
fn any_number() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 1..8_u64, 1 => Just(0), 1 => Just(20)]
}

fn any_wish() -> impl Strategy<Value = PutSpec> {
    let writer_and_count = prop_oneof![
        5 => Just((0, 1)),
        6 => (0..2_u32).prop_map(|writer| (writer, 2)),
        2 => (0..3_u32).prop_map(|writer| (writer, 3)),
        1 => Just((3, 2)),
    ];
    let job =
        prop_oneof![8 => Just(None), 20 => Just(Some(1)), 2 => Just(Some(0)), 1 => Just(Some(2))];
    let flaw = prop_oneof![
        Just(Flaw::Hole),
        Just(Flaw::Overlap),
        Just(Flaw::Kind),
        Just(Flaw::Shape),
        Just(Flaw::Whole),
        Just(Flaw::Differs),
        Just(Flaw::Replica),
    ];
    let number_and_rewind = (prop::option::weighted(0.5, any_number()), prop::bool::weighted(0.2));
    let flags = (prop::bool::weighted(0.3), prop::bool::weighted(0.3), any::<bool>());
    let contents = (0..2_u32, prop::option::weighted(0.15, flaw), prop::bool::weighted(0.2));
    (writer_and_count, job, number_and_rewind, flags, contents).prop_map(
        |(writer_and_count, job, number_and_rewind, flags, contents)| {
            let ((writer, of), (number, rewind)) = (writer_and_count, number_and_rewind);
            let ((found, durable, cut), (seed, flaw, lowest)) = (flags, contents);
            // A writer that is not among the writers has no coordinate in their mesh.
            let found = found && writer < of && flaw != Some(Flaw::Whole);
            PutSpec {
                writer,
                writer_count: of,
                infers_writers: found,
                job,
                number,
                rewind,
                durable,
                seed,
                flaw,
                takes_lowest: lowest,
                in_two_archives: cut,
            }
        },
    )
}

fn any_read() -> impl Strategy<Value = Read> {
    let leaf = || 0..LEAVES.len();
    prop_oneof![
        3 => Just(Read::Whole),
        2 => leaf().prop_map(Read::Tensor),
        2 => (leaf(), any_box()).prop_map(|(leaf, part)| Read::Slice(leaf, part)),
        2 => prop::collection::vec((leaf(), prop::option::of(any_box())), 1..3).prop_map(Read::Into),
        2 => prop::collection::vec(any_box(), 1..3).prop_map(Read::Resharded),
    ]
}

/// Generates boxes, most of them inside the matrix.
fn any_box() -> impl Strategy<Value = ArrayBox> {
    (0..ROWS, 0..COLUMNS, 1..ROWS, 1..COLUMNS).prop_map(|(row, column, rows, columns)| {
        let is_cut = (row + column + rows) % 8 != 0;
        let rows = if is_cut { rows.min(ROWS - row) } else { rows };
        (row, column, rows, columns.min(COLUMNS - column))
    })
}
