//! Keys of dicts, and paths of keys.

use std::cmp::Ordering;
use std::fmt;

use bytes::Bytes;

use crate::error::{Error, ErrorKind, Result};
use crate::number::{Float, Int, bigint_to_float, is_canonical_bigint};
use crate::text::{Text, is_text};

/// A key of a dict, with its Python type: `1`, `"1"` and `True` are three different keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum MapKey {
    /// A `str`.
    Str(Text),
    /// An `int`.
    Int(Int),
    /// A `bool`.
    Bool(bool),
    /// A `float`. NaN cannot be a key.
    Float(Float),
    /// `None`.
    None,
    /// A `bytes`.
    Bytes(Bytes),
    /// A `tuple` of keys.
    Tuple(Box<[MapKey]>),
}

impl From<&str> for MapKey {
    fn from(text: &str) -> Self {
        Self::Str(text.into())
    }
}

impl From<String> for MapKey {
    fn from(text: String) -> Self {
        Self::Str(text.into())
    }
}

impl From<i64> for MapKey {
    fn from(int: i64) -> Self {
        Self::Int(int.into())
    }
}

/// Formats the key as Python's `str(key)`, which is how torch writes keys in an fqn.
impl fmt::Display for MapKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Str(text) => text.fmt(f),
            Self::Int(int) => int.fmt(f),
            Self::Bool(true) => f.write_str("True"),
            Self::Bool(false) => f.write_str("False"),
            Self::Float(float) => float.fmt(f),
            Self::None => f.write_str("None"),
            Self::Bytes(bytes) => write!(f, "b\"{}\"", bytes.escape_ascii()),
            Self::Tuple(keys) => {
                f.write_str("(")?;
                for (index, key) in keys.iter().enumerate() {
                    let comma = if index > 0 { ", " } else { "" };
                    match key {
                        Self::Str(text) => write!(f, "{comma}{text:?}")?,
                        other => write!(f, "{comma}{other}")?,
                    }
                }
                f.write_str(if keys.len() == 1 { ",)" } else { ")" })
            }
        }
    }
}

/// One step of a path: from a container to a child.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// Into a list or tuple, by index.
    Index(u32),
    /// Into a dict or ordered dict by key, or into a namedtuple by field name.
    Key(MapKey),
}

/// Formats the index, or the key as Python's `str` does.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => index.fmt(f),
            Self::Key(key) => key.fmt(f),
        }
    }
}

/// The exact path of a value in a state dict. Unlike an fqn, it keeps the type of each key.
///
/// # Examples
///
/// ```
/// use tssd_format::ObjectPath;
/// let path = ObjectPath::root().key("state").key(0).key("exp_avg");
/// assert_eq!(path.fqn(), "state.0.exp_avg");
/// assert_eq!(path.to_string(), r#"["state"][0]["exp_avg"]"#);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ObjectPath(Vec<Step>);

impl ObjectPath {
    /// Returns the path of the state dict itself.
    pub fn root() -> Self {
        Self::default()
    }

    /// Returns the path of the child with this key.
    #[must_use]
    pub fn key(mut self, key: impl Into<MapKey>) -> Self {
        self.0.push(Step::Key(key.into()));
        self
    }

    /// Returns the path of the child at this index of a list or tuple.
    #[must_use]
    pub fn index(mut self, index: u32) -> Self {
        self.0.push(Step::Index(index));
        self
    }

    /// Returns the path extended by one step.
    #[must_use]
    pub fn step(mut self, step: Step) -> Self {
        self.0.push(step);
        self
    }

    /// Returns the steps from the root.
    pub fn steps(&self) -> &[Step] {
        &self.0
    }

    /// Returns the dotted name that torch uses. Different paths may have the same fqn.
    pub fn fqn(&self) -> String {
        let mut fqn = String::new();
        for (index, step) in self.0.iter().enumerate() {
            use fmt::Write;
            let dot = if index > 0 { "." } else { "" };
            write!(fqn, "{dot}{step}").expect("writing to a String does not fail");
        }
        fqn
    }

    pub(crate) fn push(&mut self, step: Step) {
        self.0.push(step);
    }

    pub(crate) fn pop(&mut self) {
        self.0.pop();
    }
}

impl FromIterator<Step> for ObjectPath {
    fn from_iter<I: IntoIterator<Item = Step>>(steps: I) -> Self {
        Self(steps.into_iter().collect())
    }
}

/// Formats the path as Python indexing: `["state"][0]`.
impl fmt::Display for ObjectPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.0 {
            match step {
                Step::Index(index) => write!(f, "[{index}]")?,
                Step::Key(MapKey::Str(text)) => write!(f, "[{text:?}]")?,
                Step::Key(key) => write!(f, "[{key}]")?,
            }
        }
        Ok(())
    }
}

/// Key kinds, with their numbers in files. Spec: section 5.
pub(crate) mod kind {
    pub(crate) const INDEX: u8 = 0;
    pub(crate) const STR: u8 = 1;
    pub(crate) const INT: u8 = 2;
    pub(crate) const BIGINT: u8 = 3;
    pub(crate) const BOOL: u8 = 4;
    pub(crate) const FLOAT: u8 = 5;
    pub(crate) const NONE: u8 = 6;
    pub(crate) const BYTES: u8 = 7;
    pub(crate) const TUPLE: u8 = 8;

    /// Returns whether keys of this kind are stored in the heap.
    pub(crate) const fn is_heap(kind: u8) -> bool {
        matches!(kind, STR | BIGINT | BYTES | TUPLE)
    }
}

/// Maximum length of the encoded content of a key, in bytes.
pub(crate) const MAX_KEY_BYTES: usize = 4096;

/// Maximum number of elements of a tuple in a key, including the elements of nested tuples.
const MAX_TUPLE_ELEMENTS: usize = 64;

/// Maximum nesting depth of tuples in a key.
const MAX_TUPLE_DEPTH: u8 = 8;

/// The sort order of keys in `by_key`: kind, then bytes in the heap, then word.
pub(crate) type SortKey<'a> = (u8, &'a [u8], u64);

/// A key as it is stored in files: its kind, and a word or bytes. Sorted like `by_key`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EncodedKey<'a> {
    pub(crate) kind: u8,
    pub(crate) content: KeyContent<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeyContent<'a> {
    Word(u64),
    Heap(std::borrow::Cow<'a, [u8]>),
}

impl Ord for EncodedKey<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.sort_key().cmp(&other.sort_key())
    }
}

impl PartialOrd for EncodedKey<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<'a> EncodedKey<'a> {
    pub(crate) fn word(kind: u8, word: u64) -> Self {
        Self { kind, content: KeyContent::Word(word) }
    }

    pub(crate) fn heap(kind: u8, bytes: impl Into<std::borrow::Cow<'a, [u8]>>) -> Self {
        Self { kind, content: KeyContent::Heap(bytes.into()) }
    }

    /// Returns the sort order of this key.
    pub(crate) fn sort_key(&self) -> SortKey<'_> {
        match &self.content {
            KeyContent::Word(word) => (self.kind, &[], *word),
            KeyContent::Heap(bytes) => (self.kind, bytes, 0),
        }
    }

    /// Encodes a key.
    ///
    /// # Errors
    ///
    /// `KeyKind` for NaN, for tuples with more than 64 elements or more than 8 levels, and for keys of more than
    /// [`MAX_KEY_BYTES`].
    pub(crate) fn encode(key: &'a MapKey) -> Result<Self> {
        let file_key = match key {
            MapKey::Str(text) => Self::heap(kind::STR, text.as_bytes()),
            MapKey::Int(int) => match int.as_i64() {
                Some(small) => Self::word(kind::INT, small.cast_unsigned()),
                None => Self::heap(kind::BIGINT, int.to_bigint_bytes().unwrap_or_default()),
            },
            MapKey::Bool(bool) => Self::word(kind::BOOL, u64::from(*bool)),
            MapKey::Float(float) if float.get().is_nan() => {
                return Err(Error::new(ErrorKind::KeyKind).with_detail("NaN cannot be a key"));
            }
            MapKey::Float(float) => Self::word(kind::FLOAT, float.to_bits()),
            MapKey::None => Self::word(kind::NONE, 0),
            MapKey::Bytes(bytes) => Self::heap(kind::BYTES, &**bytes),
            MapKey::Tuple(keys) => {
                let mut encoded = Vec::new();
                encode_tuple(keys, MAX_TUPLE_DEPTH, &mut { MAX_TUPLE_ELEMENTS }, &mut encoded)?;
                Self::heap(kind::TUPLE, encoded)
            }
        };
        match &file_key.content {
            KeyContent::Heap(bytes) if bytes.len() > MAX_KEY_BYTES => Err(Error::new(
                ErrorKind::KeyKind,
            )
            .with_detail(format_args!("key of {} bytes, at most {MAX_KEY_BYTES}", bytes.len()))),
            _ => Ok(file_key),
        }
    }

    /// Decodes and validates the key: the inverse of [`EncodedKey::encode`].
    ///
    /// # Errors
    ///
    /// `KeyKind`, `NotText` and `NonCanonicalInt`, as the spec defines them.
    pub(crate) fn decode(&self) -> Result<MapKey> {
        let malformed = || Error::new(ErrorKind::KeyKind);
        Ok(match (self.kind, &self.content) {
            (kind::STR, KeyContent::Heap(bytes)) => {
                MapKey::Str(Text::from_generalized_utf8(bytes.to_vec())?)
            }
            (kind::INT, KeyContent::Word(word)) => MapKey::Int(word.cast_signed().into()),
            (kind::BIGINT, KeyContent::Heap(bytes)) => MapKey::Int(Int::from_bigint_bytes(bytes)?),
            (kind::BOOL, KeyContent::Word(word @ 0..=1)) => MapKey::Bool(*word == 1),
            (kind::FLOAT, KeyContent::Word(word)) if !f64::from_bits(*word).is_nan() => {
                MapKey::Float(Float::from_bits(*word))
            }
            (kind::NONE, KeyContent::Word(0)) => MapKey::None,
            (kind::BYTES, KeyContent::Heap(bytes)) => MapKey::Bytes(Bytes::copy_from_slice(bytes)),
            (kind::TUPLE, KeyContent::Heap(bytes)) => {
                let mut rest = &**bytes;
                let keys = decode_tuple(&mut rest, MAX_TUPLE_DEPTH, &mut { MAX_TUPLE_ELEMENTS });
                let keys = keys.and_then(Result::ok).ok_or_else(malformed)?;
                if !rest.is_empty() {
                    return Err(malformed());
                }
                MapKey::Tuple(keys.into())
            }
            _ => return Err(malformed()),
        })
    }

    /// Validates the key like [`EncodedKey::decode`], but does not allocate for the common kinds.
    pub(crate) fn check(&self) -> Result<()> {
        match (self.kind, &self.content) {
            (kind::STR, KeyContent::Heap(bytes)) if !is_text(bytes) => {
                Err(Error::new(ErrorKind::NotText))
            }
            (kind::BIGINT, KeyContent::Heap(bytes)) if !is_canonical_bigint(bytes) => {
                Err(Error::new(ErrorKind::NonCanonicalInt))
            }
            (kind::STR | kind::BIGINT | kind::BYTES, KeyContent::Heap(_))
            | (kind::INT, KeyContent::Word(_)) => Ok(()),
            _ => self.decode().map(drop),
        }
    }
}

/// Returns the keys of other kinds that Python treats as equal (F-045): `True == 1 == 1.0`, `-0.0 == 0.0`.
///
/// Only one of two equal keys needs to find the other one: a bool finds ints and floats, a float finds ints, a bigint
/// finds floats. A key that breaks a rule of its own is equal to nothing.
pub(crate) fn equal_python_keys((kind, bytes, word): SortKey<'_>) -> Vec<EncodedKey<'static>> {
    let float = |float: f64| EncodedKey::word(kind::FLOAT, float.to_bits());
    let int = |int: i64| EncodedKey::word(kind::INT, int.cast_unsigned());
    match kind {
        kind::BOOL if word == 0 => vec![int(0), float(0.0), float(-0.0)],
        kind::BOOL if word == 1 => vec![int(1), float(1.0)],
        kind::FLOAT => {
            let value = f64::from_bits(word);
            let zero = (value == 0.0).then(|| float(-value));
            float_to_int(value).map(int).into_iter().chain(zero).collect()
        }
        kind::BIGINT if is_canonical_bigint(bytes) => {
            bigint_to_float(bytes).map(float).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

/// Returns a float without fraction as an int, if it is in the `i64` range.
fn float_to_int(float: f64) -> Option<i64> {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "in this range, a float without fraction is taken to an int exactly"
    )]
    // -2^63 is a float; 2^63 is the first float out of range.
    ((-9_223_372_036_854_775_808.0..9_223_372_036_854_775_808.0).contains(&float)
        && float.fract() == 0.0)
        .then_some(float as i64)
}

/// Appends a form of a key that is the same for all keys that Python treats as equal (F-045).
///
/// It has at most as many bytes as the packed key, so forms need no more memory than the index.
pub(crate) fn push_python_form(key: &MapKey, form: &mut Vec<u8>) {
    let int = |int: i64, form: &mut Vec<u8>| {
        if let Ok(bit @ 0..=1) = u8::try_from(int) {
            form.extend([kind::BOOL, bit]);
        } else {
            form.push(kind::INT);
            form.extend(int.to_le_bytes());
        }
    };
    let float = |float: f64, form: &mut Vec<u8>| {
        form.push(kind::FLOAT);
        form.extend(float.to_bits().to_le_bytes());
    };
    let content = |kind: u8, bytes: &[u8], form: &mut Vec<u8>| {
        form.push(kind);
        let len = u32::try_from(bytes.len()).expect("a key has at most 4096 bytes");
        form.extend(len.to_le_bytes());
        form.extend_from_slice(bytes);
    };
    match key {
        MapKey::Str(text) => content(kind::STR, text.as_bytes(), form),
        MapKey::Bytes(bytes) => content(kind::BYTES, bytes, form),
        MapKey::None => form.push(kind::NONE),
        MapKey::Bool(bool) => int((*bool).into(), form),
        MapKey::Float(value) => match float_to_int(value.get()) {
            Some(value) => int(value, form),
            None => float(value.get(), form),
        },
        MapKey::Int(value) => match (value.as_i64(), value.to_bigint_bytes()) {
            (Some(value), _) => int(value, form),
            (None, bytes) => {
                let bytes = bytes.unwrap_or_default();
                match bigint_to_float(&bytes) {
                    Some(value) => float(value, form),
                    None => content(kind::BIGINT, &bytes, form),
                }
            }
        },
        MapKey::Tuple(keys) => {
            form.push(kind::TUPLE);
            // A tuple has at most 64 elements.
            form.extend(u8::try_from(keys.len()));
            keys.iter().for_each(|key| push_python_form(key, form));
        }
    }
}

fn encode_tuple(
    keys: &[MapKey],
    depth: u8,
    remaining: &mut usize,
    encoded: &mut Vec<u8>,
) -> Result<()> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(Error::new(ErrorKind::KeyKind).with_detail("tuples nest deeper than 8"));
    };
    let length = |len: usize| {
        u32::try_from(len).map_err(|_| Error::new(ErrorKind::TooLarge)).map(u32::to_le_bytes)
    };
    *remaining = remaining.checked_sub(keys.len()).ok_or_else(|| {
        Error::new(ErrorKind::KeyKind).with_detail("tuple of more than 64 elements")
    })?;
    encoded.extend(length(keys.len())?);
    for key in keys {
        if let MapKey::Tuple(keys) = key {
            encoded.push(kind::TUPLE);
            encode_tuple(keys, depth, remaining, encoded)?;
            continue;
        }
        let EncodedKey { kind, content } = EncodedKey::encode(key)?;
        encoded.push(kind);
        match content {
            KeyContent::Heap(bytes) => {
                encoded.extend(length(bytes.len())?);
                encoded.extend_from_slice(&bytes);
            }
            KeyContent::Word(word) => match kind {
                kind::NONE => {}
                kind::BOOL => encoded.extend(word.to_le_bytes().first()),
                _ => encoded.extend(word.to_le_bytes()),
            },
        }
    }
    Ok(())
}

/// Decodes the elements of a packed tuple.
///
/// Returns `None` if the bytes end early, or if the tuple exceeds a limit.
fn decode_tuple(rest: &mut &[u8], depth: u8, remaining: &mut usize) -> Option<Result<Vec<MapKey>>> {
    let depth = depth.checked_sub(1)?;
    let count = take_u32(rest)?;
    *remaining = remaining.checked_sub(usize::try_from(count).ok()?)?;
    let mut keys = Vec::new();
    for _ in 0..count {
        let [kind] = take_array(rest)?;
        let key = match kind {
            kind::TUPLE => {
                decode_tuple(rest, depth, remaining)?.map(|keys| MapKey::Tuple(keys.into()))
            }
            kind::STR | kind::BYTES | kind::BIGINT => {
                let len = usize::try_from(take_u32(rest)?).ok()?;
                let (bytes, tail) = rest.split_at_checked(len)?;
                *rest = tail;
                EncodedKey::heap(kind, bytes).decode()
            }
            kind::NONE => Ok(MapKey::None),
            kind::BOOL => {
                let [byte] = take_array(rest)?;
                EncodedKey::word(kind, u64::from(byte)).decode()
            }
            _ => EncodedKey::word(kind, u64::from_le_bytes(take_array(rest)?)).decode(),
        };
        match key {
            Ok(key) => keys.push(key),
            Err(error) => return Some(Err(error)),
        }
    }
    Some(Ok(keys))
}

fn take_array<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (bytes, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(*bytes)
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    take_array(rest).map(u32::from_le_bytes)
}
