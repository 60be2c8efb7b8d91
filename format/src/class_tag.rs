//! Class tags: the class of a value that is stored as a dict, list, tuple or str. Spec: section 5, "Class tags".

use std::fmt;

use crate::convert::index_to_usize;
use crate::error::{Error, ErrorKind, Result};
use crate::iso_time;
use crate::key;
use crate::record::{self, MAX_NAME_BYTES, kind};
use crate::table_views::{TableViews, path_of};

macro_rules! classes {
    ($($number:literal $class:ident $name:literal $kind:ident $parameters:literal,)*) => {
        /// A class of the closed table of `spec/format.md`, section 5.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum TaggedClass {
            $(#[doc = concat!("`", $name, "`, stored as a plain value.")] $class,)*
        }

        impl TaggedClass {
            /// All classes, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$class,)*];

            /// Returns the number in files, such as 0x01.
            pub const fn number(self) -> u16 {
                match self { $(Self::$class => $number,)* }
            }

            /// Returns the name in the JSON view, such as `collections.Counter`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$class => $name,)* }
            }

            /// Returns the class with this name in the JSON view, if there is one.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|class| class.name() == name)
            }

            /// Returns the node kind of its values.
            pub(crate) const fn kind(self) -> u8 {
                match self { $(Self::$class => kind::$kind,)* }
            }

            /// Returns the number of parameters that are allowed: those from 0 on.
            pub const fn parameter_count(self) -> u64 {
                match self { $(Self::$class => $parameters,)* }
            }
        }
    };
}

classes! {
    0x01 Counter "collections.Counter" DICT 1,
    0x02 DefaultDict "collections.defaultdict" DICT 15,
    0x03 Set "set" DICT 1,
    0x04 FrozenSet "frozenset" DICT 1,
    0x05 SimpleNamespace "types.SimpleNamespace" DICT 1,
    0x10 Wrapper "wrapper" DICT 4,
    0x11 Registered "registered" DICT 1,
    0x20 Deque "collections.deque" LIST 0x1_0000_0000_0000,
    0x30 Range "range" TUPLE 1,
    0x31 Slice "slice" TUPLE 1,
    0x32 Timedelta "datetime.timedelta" TUPLE 1,
    0x33 Timezone "datetime.timezone" TUPLE 1,
    0x40 PurePosixPath "pathlib.PurePosixPath" STR 1,
    0x41 PosixPath "pathlib.PosixPath" STR 1,
    0x42 PureWindowsPath "pathlib.PureWindowsPath" STR 1,
    0x43 WindowsPath "pathlib.WindowsPath" STR 1,
    0x48 Date "datetime.date" STR 1,
    0x49 Time "datetime.time" STR 1,
    0x4A DateTime "datetime.datetime" STR 1,
    0x50 TorchLayout "torch.layout" STR 1,
    0x51 TorchMemoryFormat "torch.memory_format" STR 1,
}

impl TaggedClass {
    /// Returns the name of the plain kind of its values: `dict`, `list`, `tuple` or `str`.
    pub const fn kind_name(self) -> &'static str {
        match self.kind() {
            kind::STR => "str",
            kind::LIST => "list",
            kind::TUPLE => "tuple",
            _ => "dict",
        }
    }
}

/// The class of a value, with its parameter.
///
/// The parameter of `defaultdict` is its factory, that of `deque` is 0 without `maxlen`, else `maxlen` + 1, and that of
/// a tensor wrapper has the flags of the tensor. All other classes have the parameter 0.
///
/// # Examples
///
/// ```
/// use tssd_format::{ClassTag, StateDict, TaggedClass, Value};
///
/// let last_losses = Value::List(vec![0.5.into(), 0.25.into()]);
/// let tag = ClassTag::deque(Some(2))?;
/// let mut dict = StateDict::new();
/// dict.insert("losses", Value::Tagged(tag, last_losses.into()));
/// assert_eq!(tag.class(), TaggedClass::Deque);
/// # Ok::<(), tssd_format::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassTag {
    class: TaggedClass,
    parameter: u64,
}

impl ClassTag {
    /// Creates a tag.
    ///
    /// # Errors
    ///
    /// `ClassTag` (F-077) if the class does not have this parameter.
    pub fn new(class: TaggedClass, parameter: u64) -> Result<Self> {
        if parameter < class.parameter_count() {
            return Ok(Self { class, parameter });
        }
        Err(Error::new(ErrorKind::ClassTag)
            .with_detail(format_args!("{} with parameter {parameter}", class.name())))
    }

    /// Creates the tag of a `deque`.
    ///
    /// # Errors
    ///
    /// `ClassTag` (F-077) if `max_len` is 2^48 - 1 or more.
    pub fn deque(max_len: Option<u64>) -> Result<Self> {
        Self::new(TaggedClass::Deque, max_len.map_or(0, |max_len| max_len.saturating_add(1)))
    }

    /// Returns the class.
    pub fn class(self) -> TaggedClass {
        self.class
    }

    /// Returns the parameter.
    pub fn parameter(self) -> u64 {
        self.parameter
    }

    /// Returns whether values of the class are dicts to which any entries with `str` keys can be added.
    pub fn is_open_dict(self) -> bool {
        use TaggedClass::{Counter, DefaultDict, SimpleNamespace};
        matches!(self.class, Counter | DefaultDict | SimpleNamespace)
    }

    /// Returns whether values of the class consist of plain leaves of fixed kinds, so that they merge only as a whole.
    pub fn is_atomic(self) -> bool {
        use TaggedClass::{Deque, Registered, Wrapper};
        !self.is_open_dict() && !matches!(self.class, Deque | Registered | Wrapper)
    }

    /// Returns the word `b` of a node with this tag.
    pub(crate) fn to_word(self) -> u64 {
        self.parameter << 16 | u64::from(self.class.number())
    }

    /// Returns the tag for the word `b` of a node of this kind.
    ///
    /// # Errors
    ///
    /// `ClassTag` (F-077) if the number is not in the table, or has another kind or other parameters.
    #[cold]
    pub(crate) fn from_word(word: u64, kind: u8) -> Result<Self> {
        let is_same = |class: &&TaggedClass| {
            class.kind() == kind && u64::from(class.number()) == word & 0xFFFF
        };
        let class = TaggedClass::ALL.iter().find(is_same).ok_or_else(|| {
            Error::new(ErrorKind::ClassTag)
                .with_detail(format_args!("{:#06x} on node kind {kind}", word & 0xFFFF))
        })?;
        Self::new(*class, word >> 16)
    }
}

impl fmt::Display for ClassTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.class.name())
    }
}

impl fmt::Debug for ClassTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}({})", self.parameter)
    }
}

/// Returns the word of a node that holds its class tag; 0 if it has none.
pub(crate) fn class_word(node: &record::Node) -> u64 {
    match node.kind {
        kind::STR | kind::DICT | kind::ORDERED_DICT | kind::LIST | kind::TUPLE => {
            node.b.to_native()
        }
        _ => 0,
    }
}

/// Checks the content of all nodes with class tags (F-078), in table order.
///
/// All nodes keep the other rules of section 5.
///
/// # Errors
///
/// `ClassContent` with the path of the node.
#[cold]
pub(crate) fn check_tagged_nodes(views: &TableViews<'_>) -> Result<()> {
    for (number, node) in views.nodes.iter().enumerate() {
        let word = class_word(node);
        if word != 0 {
            let tag = ClassTag::from_word(word, node.kind)?;
            TaggedNode { views, number, node, tag }.check().map_err(|reason| {
                Error::new(ErrorKind::ClassContent)
                    .with_detail(format_args!("{tag}: {reason}"))
                    .with_path(path_of(views, number))
            })?;
        }
    }
    Ok(())
}

/// A node with a class tag, for the check of its content. A failed check gives the reason.
struct TaggedNode<'a> {
    views: &'a TableViews<'a>,
    number: usize,
    node: &'a record::Node,
    tag: ClassTag,
}

/// The fields of a tensor wrapper, in order.
const WRAPPER_KEYS: [&str; 5] = ["class", "tensors", "context", "size", "stride"];

/// The fields of an object of a registered class, in order.
const REGISTERED_KEYS: [&str; 2] = ["class", "value"];

impl<'a> TaggedNode<'a> {
    fn check(&self) -> Result<(), &'static str> {
        match self.tag.class {
            TaggedClass::Counter | TaggedClass::DefaultDict => Ok(()),
            TaggedClass::Set | TaggedClass::FrozenSet => self.check_set(),
            TaggedClass::SimpleNamespace => {
                ensure(self.has_str_keys(self.number), "a key that is no str")
            }
            TaggedClass::Wrapper => self.check_wrapper(),
            TaggedClass::Registered => {
                ensure(self.has_keys(&REGISTERED_KEYS), "its keys are not class and value")?;
                ensure(self.is_name(self.children()[0]), "class is no name")
            }
            TaggedClass::Deque => {
                let (max_len, len) = (self.tag.parameter, u64::from(self.node.count.to_native()));
                ensure(max_len == 0 || len < max_len, "more elements than maxlen")
            }
            TaggedClass::Range => {
                let [start, stop, step] = self.fields()?;
                let is_int = |node: &record::Node| matches!(node.kind, kind::INT | kind::BIGINT);
                ensure([start, stop, step].into_iter().all(is_int), "not three ints")?;
                ensure(step.kind != kind::INT || step.a != 0, "its step is 0")
            }
            TaggedClass::Slice => {
                let is_index = |node: &&record::Node| {
                    matches!(node.kind, kind::NONE | kind::INT | kind::BIGINT)
                };
                let fields: [_; 3] = self.fields()?;
                ensure(fields.iter().all(is_index), "a bound that is neither int nor None")
            }
            TaggedClass::Timedelta => {
                let fields: [_; 3] = self.fields()?;
                check_timedelta(fields)
            }
            TaggedClass::Timezone => {
                let [days, seconds, microseconds, name] = self.fields()?;
                check_timedelta([days, seconds, microseconds])?;
                let is_below_a_day = match int(days) {
                    Some(-1) => seconds.a != 0 || microseconds.a != 0,
                    days => days == Some(0),
                };
                ensure(is_below_a_day, "an offset of a day or more")?;
                let is_str = name.kind == kind::STR && name.b == 0 && name.flags == 0;
                let is_name = name.kind == kind::NONE || is_str;
                ensure(is_name, "a name that is neither a short str nor None")
            }
            TaggedClass::PurePosixPath
            | TaggedClass::PosixPath
            | TaggedClass::PureWindowsPath
            | TaggedClass::WindowsPath => {
                ensure(!self.text(self.node)?.is_empty(), "an empty path")
            }
            TaggedClass::Date => ensure(iso_time::is_date(self.text(self.node)?), "no such date"),
            TaggedClass::Time => ensure(iso_time::is_time(self.text(self.node)?), "no such time"),
            TaggedClass::DateTime => {
                ensure(iso_time::is_datetime(self.text(self.node)?), "no such date and time")
            }
            TaggedClass::TorchLayout | TaggedClass::TorchMemoryFormat => {
                let is_name_byte = |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
                let name = self.text(self.node)?;
                let is_name = matches!(name.len(), 1..=64) && name.iter().all(is_name_byte);
                ensure(is_name, "not 1 to 64 bytes of a-z 0-9 _")
            }
        }
    }

    fn check_set(&self) -> Result<(), &'static str> {
        let range = self.views.children(self.number);
        let order = self.views.by_key[range.clone()].iter();
        let order = order.map(|child| index_to_usize(child.to_native()));
        ensure(
            self.children().iter().all(|child| child.kind == kind::NONE),
            "a value is not None",
        )?;
        ensure(range.eq(order), "its elements are not in key order")
    }

    fn check_wrapper(&self) -> Result<(), &'static str> {
        ensure(
            self.has_keys(&WRAPPER_KEYS),
            "its keys are not class, tensors, context, size and stride",
        )?;
        let first = self.views.children(self.number).start;
        let [class, tensors, _, size, stride] = self.fields()?;
        ensure(self.is_name(*class), "class is no name")?;
        let is_inner = |child: &record::Node| match child.kind {
            kind::TENSOR | kind::DISTRIBUTED => true,
            kind::DICT => ClassTag::from_word(child.b.to_native(), child.kind)
                .is_ok_and(|tag| tag.class == TaggedClass::Wrapper),
            _ => false,
        };
        let inner = &self.views.nodes[self.views.children(first + 1)];
        let is_dict_of_tensors = tensors.kind == kind::DICT
            && tensors.b == 0
            && !inner.is_empty()
            && self.has_str_keys(first + 1)
            && inner.iter().all(is_inner);
        ensure(is_dict_of_tensors, "tensors is no dict of tensors")?;
        let is_size = size.kind == kind::SIZE && stride.kind == kind::SIZE;
        ensure(is_size && size.count == stride.count, "size and stride are no sizes of one rank")
    }

    fn children(&self) -> &'a [record::Node] {
        &self.views.nodes[self.views.children(self.number)]
    }

    /// Returns the children of a container with a fixed number of them.
    fn fields<const N: usize>(&self) -> Result<[&'a record::Node; N], &'static str> {
        let children: &[record::Node; N] =
            self.children().try_into().map_err(|_| "another number of elements")?;
        Ok(children.each_ref())
    }

    fn has_str_keys(&self, container: usize) -> bool {
        let children = &self.views.nodes[self.views.children(container)];
        children.iter().all(|child| child.key_kind == key::kind::STR)
    }

    /// Returns whether the keys are these, in insertion order.
    fn has_keys(&self, keys: &[&str]) -> bool {
        let is_key = |(child, key): (&record::Node, &&str)| {
            child.key_kind == key::kind::STR
                && self.views.validated_heap(child.key.to_native()) == key.as_bytes()
        };
        let children = self.children();
        children.len() == keys.len() && children.iter().zip(keys).all(is_key)
    }

    /// Returns whether a node is a `str` without a tag of 1 to 256 bytes.
    fn is_name(&self, node: record::Node) -> bool {
        node.kind == kind::STR
            && node.b == 0
            && self.text(&node).is_ok_and(|text| (1..=MAX_NAME_BYTES).contains(&text.len()))
    }

    /// Returns the content of a `str` leaf.
    fn text(&self, node: &record::Node) -> Result<&'a [u8], &'static str> {
        ensure(node.flags == 0, "its content is in a storage")?;
        Ok(self.views.validated_heap(node.a.to_native()))
    }
}

/// Checks that the nodes are days, seconds and microseconds as Python normalizes them.
fn check_timedelta(fields: [&record::Node; 3]) -> Result<(), &'static str> {
    let ranges = [-999_999_999..=999_999_999, 0..=86_399, 0..=999_999];
    let is_in = |(node, range): (&record::Node, std::ops::RangeInclusive<i64>)| {
        int(node).is_some_and(|int| range.contains(&int))
    };
    let is_normalized = fields.into_iter().zip(ranges).all(is_in);
    ensure(is_normalized, "no normalized days, seconds and microseconds")
}

fn int(node: &record::Node) -> Option<i64> {
    (node.kind == kind::INT).then(|| node.a.to_native().cast_signed())
}

fn ensure(holds: bool, reason: &'static str) -> Result<(), &'static str> {
    if holds { Ok(()) } else { Err(reason) }
}

/// Checks that the numbers of the table increase.
const _: () = {
    let mut index = 1;
    while index < TaggedClass::ALL.len() {
        assert!(TaggedClass::ALL[index - 1].number() < TaggedClass::ALL[index].number());
        index += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::{ClassTag, TaggedClass};
    use crate::error::ErrorKind;
    use crate::key::MapKey;
    use crate::state_dict::{Dict, StateDict, Value};
    use crate::structure::{Container, Node};
    use crate::torchstore_state_dict::TorchStoreStateDict;

    fn tagged(class: TaggedClass, plain: Value) -> Value {
        Value::Tagged(ClassTag::new(class, 0).expect("0 is always allowed"), plain.into())
    }

    fn encode(value: Value) -> Result<TorchStoreStateDict, ErrorKind> {
        let dict = StateDict::from_value(Value::Dict(Dict::from_iter([("a", value)])));
        let encoded = TorchStoreStateDict::from_state_dict(&dict.expect("it is a dict"));
        encoded.map_err(|error| error.kind())
    }

    #[test]
    fn writer_refuses_other_kinds_and_parameters() {
        for plain in [Value::List(vec![]), Value::OrderedDict(Dict::new()), Value::None, "a".into()]
        {
            let refused = encode(tagged(TaggedClass::Counter, plain)).map(drop);
            assert_eq!(refused, Err(ErrorKind::ClassTag));
        }
        let nested = tagged(TaggedClass::Set, tagged(TaggedClass::Set, Dict::new().into()));
        assert_eq!(encode(nested).map(drop), Err(ErrorKind::ClassTag));
        for (class, parameter) in
            [(TaggedClass::Set, 1), (TaggedClass::DefaultDict, 15), (TaggedClass::Deque, 1 << 48)]
        {
            let error = ClassTag::new(class, parameter).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ClassTag);
        }
        assert!(ClassTag::deque(Some(u64::MAX)).is_err());
    }

    #[test]
    fn writer_refuses_content_that_does_not_fit() {
        let unsorted = Dict::from_iter([("b", Value::None), ("a", Value::None)]);
        let of_values = Dict::from_iter([("a", Value::from(1_i64))]);
        let long = "a".repeat(4097);
        for (class, plain) in [
            (TaggedClass::Set, unsorted.into()),
            (TaggedClass::FrozenSet, of_values.into()),
            (TaggedClass::Range, Value::Tuple(vec![0_i64.into(), 1_i64.into(), 0_i64.into()])),
            (TaggedClass::Date, "2026-02-29".into()),
            (TaggedClass::PosixPath, "".into()),
            (TaggedClass::PosixPath, long.as_str().into()),
            (TaggedClass::Wrapper, Dict::new().into()),
        ] {
            let refused = encode(tagged(class, plain)).map(drop);
            assert_eq!(refused, Err(ErrorKind::ClassContent), "{}", class.name());
        }
    }

    #[test]
    fn elements_of_a_set_are_sorted() {
        let set = || Value::set([MapKey::from(2), MapKey::from("b"), MapKey::from("a")]).unwrap();
        let encoded = encode(set()).unwrap().to_state_dict().unwrap();
        assert_eq!(encoded.at(&crate::ObjectPath::root().key("a")).unwrap(), &set());
        let leaves: Vec<String> = encoded.leaves().iter().map(|(path, _)| path.fqn()).collect();
        assert_eq!(leaves, ["a.a", "a.b", "a.2"]);
    }

    #[test]
    fn reader_of_plain_values_ignores_the_class() {
        let list = Value::List(vec![1_i64.into()]);
        let deque = encode(tagged(TaggedClass::Deque, list)).unwrap();
        let Node::Container(_, children) = deque.archive().structure() else { panic!("a dict") };
        let (_, Node::Container(container, _)) = &children[0] else { panic!("a deque") };
        assert_eq!(container.to_plain(), Container::List);
        assert_ne!(container, &Container::List);
    }

    #[test]
    fn class_tag_is_content() {
        let digest = |value: Value| encode(value).unwrap().archive().compute_content_digest();
        let list = || Value::List(vec![1_i64.into()]);
        let plain = digest(list()).unwrap();
        let deque = digest(tagged(TaggedClass::Deque, list())).unwrap();
        let bounded = ClassTag::deque(Some(1)).unwrap();
        let bounded = digest(Value::Tagged(bounded, list().into())).unwrap();
        assert!(plain != deque && deque != bounded && plain != bounded);
    }
}
