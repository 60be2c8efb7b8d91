//! Errors: one kind for each rule of `spec/format.md`, and the location of the violation.

use std::fmt::{self, Write};

use crate::abridge::{abridge, abridge_name};

/// Result of the fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Violation of one rule, and its location.
///
/// Callers match on the kind. The message is for people and not part of the API. Its form is
/// `<what is wrong>: <the values> (in <fqn or path>, at byte <offset>, region <box>)`, without the parts that
/// are unknown.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    note: Option<String>,
    path: Option<String>,
    offset: Option<u64>,
    region: Option<ErrorRegion>,
    source: Option<std::io::Error>,
}

/// A region of a global tensor, in elements.
struct ErrorRegion {
    offsets: Box<[u64]>,
    shape: Box<[u64]>,
}

impl Error {
    /// Creates an error of one kind, without a location.
    pub fn new(kind: ErrorKind) -> Self {
        Self(Box::new(Inner {
            kind,
            note: None,
            path: None,
            offset: None,
            region: None,
            source: None,
        }))
    }

    /// Creates an error of kind `Io` from an error of the operating system.
    pub fn io(source: std::io::Error) -> Self {
        let mut error = Self::new(ErrorKind::Io);
        error.0.source = Some(source);
        error
    }

    /// Sets the values that violate the rule, such as `expected 3, found 4`.
    #[must_use]
    pub fn with_detail(mut self, note: impl fmt::Display) -> Self {
        self.0.note = Some(abridge(note.to_string()));
        self
    }

    /// Sets the fqn or path of the leaf, the name of the table, or the name of the file.
    ///
    /// An error that already has one keeps it, so that the innermost location is reported.
    #[must_use]
    pub fn with_path(mut self, path: impl fmt::Display) -> Self {
        if self.0.path.is_none() {
            self.0.path = Some(path.to_string());
        }
        self
    }

    /// Sets the byte offset in the file.
    #[must_use]
    pub fn with_offset(mut self, offset: u64) -> Self {
        self.0.offset = Some(offset);
        self
    }

    /// Sets the region of the global tensor, in elements.
    #[must_use]
    pub fn with_region(mut self, offsets: &[u64], shape: &[u64]) -> Self {
        self.0.region = Some(ErrorRegion { offsets: offsets.into(), shape: shape.into() });
        self
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the values that violate the rule, if they are known.
    pub(crate) fn detail(&self) -> Option<&str> {
        self.0.note.as_deref()
    }

    /// Returns the fqn or path where the error occurred, if it is known.
    pub fn path(&self) -> Option<&str> {
        self.0.path.as_deref()
    }

    /// Returns the byte offset in the file where the error occurred, if it is known.
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// Returns the region of the global tensor where the error occurred, if it is known: its offsets and its shape, in
    /// elements.
    pub fn region(&self) -> Option<(&[u64], &[u64])> {
        self.0.region.as_ref().map(|region| (&*region.offsets, &*region.shape))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, note, path, offset, region, source } = &*self.0;
        f.write_str(kind.message())?;
        if let Some(note) = note {
            write!(f, ": {note}")?;
        }
        if let Some(source) = source {
            write!(f, ": {source}")?;
        }
        let mut separator = " (";
        let mut write_location = |f: &mut fmt::Formatter<'_>, text: fmt::Arguments<'_>| {
            write!(f, "{separator}{text}")?;
            separator = ", ";
            fmt::Result::Ok(())
        };
        if let Some(path) = path {
            write_location(f, format_args!("in `{}`", Escaped(&abridge_name(path))))?;
        }
        if let Some(offset) = offset {
            write_location(f, format_args!("at byte {offset}"))?;
        }
        if let Some(ErrorRegion { offsets, shape }) = region {
            write_location(f, format_args!("region {}", RegionText { offsets, shape }))?;
        }
        if separator == ", " { f.write_str(")") } else { Ok(()) }
    }
}

/// A region as text, such as `[0:2, 4:8]`.
pub(crate) struct RegionText<'a> {
    pub(crate) offsets: &'a [u64],
    pub(crate) shape: &'a [u64],
}

impl fmt::Display for RegionText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (dim, (start, size)) in self.offsets.iter().zip(self.shape).enumerate() {
            let separator = if dim == 0 { "" } else { ", " };
            write!(f, "{separator}{start}:{}", start.saturating_add(*size))?;
        }
        f.write_str("]")
    }
}

/// Text from a file with escaped control characters, which would move the cursor of a terminal.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for char in self.0.chars() {
            if char.is_control() {
                write!(f, "{}", char.escape_default())?;
            } else {
                f.write_char(char)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.kind())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|source| source as _)
    }
}

impl From<std::io::Error> for Error {
    fn from(source: std::io::Error) -> Self {
        Self::io(source)
    }
}

macro_rules! kinds {
    ($($rule:literal $kind:ident $message:literal,)*) => {
        /// Kind of an [`Error`]: a way in which bytes, a state dict or a request can be invalid.
        ///
        /// A kind with a rule number belongs to that rule of `spec/format.md`. A reader rejects a file that
        /// violates the rule with this kind.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum ErrorKind {
            $(#[doc = concat!($message, " (", $rule, ").")] $kind,)*
        }

        impl ErrorKind {
            /// All kinds, in the order of their rules.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// Returns the name of the variant, as used in the test vectors and in the CLI.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$kind => stringify!($kind),)* }
            }

            /// Returns the rule of `spec/format.md` that the kind belongs to, such as `F-013`.
            ///
            /// A kind that no file can cause returns a word such as `write` or `read`.
            pub const fn rule(self) -> &'static str {
                match self { $(Self::$kind => $rule,)* }
            }

            /// Returns the description of the violation, in lower case and without the location.
            pub const fn message(self) -> &'static str {
                match self { $(Self::$kind => $message,)* }
            }
        }
    };
}

kinds! {
    // 2. Framing
    "F-001" TooShort "file is shorter than the smallest archive",
    "F-002" NotTssd "file does not begin with the TSSD magic",
    "F-003" HeadCorrupt "head checksum does not match",
    "F-004" UnsupportedVersion "major version is not supported",
    "F-005" UnknownIncompat "file needs a feature that this reader does not know",
    "F-006" ReservedNotZero "reserved bytes are not zero",
    "F-007" NoTrailer "file does not end with the TSSD magic: it is truncated or has bytes after its end",
    "F-008" TrailerCorrupt "trailer checksum does not match",
    "F-009" LengthMismatch "file length differs from the length that the trailer records",
    "F-010" DataStart "data does not start at byte 4096",
    "F-011" IndexRange "index lies outside the file or is misplaced",
    "F-012" IndexTooLarge "index is larger than the limit",
    "F-013" IndexCorrupt "index checksum does not match",
    "F-014" IndexCodec "index encoding is not supported",
    // 3. Tables
    "F-020" RootRange "index root is misplaced",
    "F-021" TableLayout "index table is not where its place in the root says",
    "F-022" IndexEncoding "index is no valid rkyv archive",
    // 4. Heap and dims
    "F-030" HeapRange "heap range is out of bounds or out of order",
    "F-031" HeapUnclaimed "heap or dims hold entries that nothing names",
    "F-032" NotText "text is not generalized UTF-8, or a name is not UTF-8",
    "F-033" DimsRange "dims range is out of bounds or out of order",
    "F-034" NameLength "name is empty or too long",
    // 5. Nodes
    "F-040" UnknownKind "node kind is unknown",
    "F-041" ChildRange "children are not the next unclaimed nodes",
    "F-042" TooDeep "containers are nested deeper than 64 levels",
    "F-043" KeyKind "key kind does not fit the container",
    "F-044" DuplicateKey "keys are not strictly increasing: a key is there twice, or by_key is out of order",
    "F-045" KeysCollide "two keys are equal in Python",
    "F-046" NonCanonicalInt "integer is not in its shortest form, or too long",
    "F-047" LeafValue "leaf holds a value that its kind does not allow",
    "F-048" RootKind "root is not a dict",
    "F-049" TextPlace "str, bytes or opaque leaf is not where its length says",
    // 6. Tensors and storages
    "F-050" UnknownDtype "dtype number is neither listed nor described in the file",
    "F-051" TensorRun "tensor leaf does not name the next unclaimed tensor records",
    "F-052" RankTooLarge "rank is larger than 64",
    "F-053" ShapeOverflow "shape or strides overflow",
    "F-054" TensorRange "tensor lies outside its storage",
    "F-055" Misaligned "tensor is not aligned to its element size",
    "F-056" TensorFlags "tensor flags are unknown or contradict each other",
    "F-057" DtypeTable "description of a dtype is not allowed",
    "F-058" RowMajorStrides "strides are row-major, but stored",
    "F-060" StorageLayout "storages do not tile the blob",
    "F-061" Alignment "alignment is out of range",
    "F-062" UnusedStorage "storage is named by no leaf",
    "F-063" UnknownCodec "storage codec is unknown",
    "F-064" CrcTable "checksum table does not match the storages",
    "F-065" ChunkTable "chunk table does not match the compressed storages",
    "F-066" BaseTable "base table does not match the delta storages",
    "F-067" CrcPages "checksum of a page of the checksum table does not match",
    // 7. Slices, placements, attributes, shards
    "F-068" DistributedLeaf "distributed leaf is not allowed",
    "F-069" ShardLayout "shard record does not say where the storages of the file are",
    "F-070" OutsideGlobal "shard lies outside its global shape",
    "F-071" MeshMismatch "mesh, coordinates and placements do not fit together",
    "F-072" PartialPlacement "Partial placement cannot be stored: reduce the tensor first",
    "F-073" UnknownPlacement "placement is unknown or does not fit the tensor",
    "F-074" MixedRun "slices of one tensor disagree on dtype or global shape",
    "F-075" SliceTable "slice does not fit its tensor, or slices are not claimed in order by the tensors",
    "F-076" DivergentNode "divergent node is not allowed here",
    "F-077" ClassTag "class tag is unknown, or not allowed on this kind of node",
    "F-078" ClassContent "content does not fit the class tag",
    "F-080" AttrTable "attributes are not sorted, or a value has a kind that is not allowed",
    "F-081" DigestTable "digest table does not match the storages",
    "F-082" ShardTable "shard record is not allowed or names no plain file",
    "F-083" ShardMismatch "file is not the one that its manifest names",
    "F-084" DistributedMismatch "file does not hold what a distributed leaf of its manifest says",
    // 8. Payload
    "F-090" ChunkCorrupt "stored bytes do not match their checksum",
    "F-091" StorageCorrupt "storage checksum does not match its bytes",
    "F-092" PaddingNotZero "padding between storages is not zero",
    "F-093" FrameCorrupt "compressed chunk is no zstd frame of its bytes",
    "F-094" DigestMismatch "bytes of the storage do not match their digest",
    "F-095" ShardContent "archive lacks a storage that its manifest names",
    "F-096" ContentNotText "content of a str leaf in a storage is not generalized UTF-8",
    "F-097" PlaneLengths "lengths of the planes of a chunk do not fit the chunk",
    "F-098" DeltaChunk "delta chunk is malformed",
    "F-099" DeltaMismatch "delta chunk does not fit its base",
    "F-100" TiersChunk "chunk in tiers is malformed",
    // Writers and requests
    "write" UntypedLeaf "object is no typed leaf and cannot be stored",
    "write" ShapeMismatch "shape, strides and bytes do not fit together",
    "write" SliceMismatch "local shape of the slice is not the shape of the tensor",
    "write" TargetSize "target memory has another length than its content",
    "write" Unfilled "not every job of the layout has run",
    "write" TooLarge "larger than an archive or memory can hold",
    "read" NotFound "there is no such leaf",
    "read" AmbiguousFqn "fqn names more than one leaf: use the exact path",
    "read" NotATensor "leaf is not a tensor",
    "read" UnsupportedDtype "dtype is unknown to this reader",
    "read" WrongType "tensor has another dtype than the one asked for",
    "read" NotContiguous "tensor is not contiguous",
    "read" LimitExceeded "result is larger than the limit that the caller gave",
    "read" FeatureMissing "this build lacks a feature that the file needs",
    "read" BlobElsewhere "bytes of this storage are in another file of the shard set",
    "delta" BaseMissing "storage is a delta, and its base is not open",
    "delta" WrongBase "archive is not the base of the delta",
    "delta" NotADelta "archive is no delta",
    "delta" NotFoldable "deltas cannot be folded without their base",
    "reshard" Uncovered "region is covered by no stored slice",
    "reshard" Overlap "slices overlap without being equal",
    "reshard" NotABox "shard is not one box of the global tensor",
    "safetensors" NotSafetensors "file is no valid safetensors file",
    "safetensors" WeightMap "index of safetensors files is wrong",
    "safetensors" NotImportable "archives cannot hold this from safetensors",
    "safetensors" NotExportable "safetensors cannot hold this",
    "safetensors" OtherFile "`.files` holds what cannot be a file of a directory",
    "io" Io "reading or writing failed",
}
