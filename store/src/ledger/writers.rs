//! A set of writers: global ranks, kept and written as ranges.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A set of writers, each a global rank. It is shown, parsed and serialized compactly: `0-3,8`.
///
/// It is kept as ranges too, so that a set costs what its text costs: `0-4294967295` is as cheap
/// as `0`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WriterSet {
    /// Ascending, with at least one absent rank between each two.
    ranges: Vec<Range>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    first: u32,
    last: u32,
}

impl WriterSet {
    /// The set of one writer.
    pub fn one(writer: u32) -> Self {
        Self { ranges: vec![Range { first: writer, last: writer }] }
    }

    /// Whether the writer is in the set.
    pub fn contains(&self, writer: u32) -> bool {
        let after = self.ranges.partition_point(|range| range.first <= writer);
        after > 0 && writer <= self.ranges[after - 1].last
    }

    /// How many writers there are.
    pub fn len(&self) -> u64 {
        self.ranges.iter().map(|range| u64::from(range.last - range.first) + 1).sum()
    }

    /// Whether there is no writer.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The writers, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.ranges.iter().flat_map(|range| range.first..=range.last)
    }

    /// This set without some of its writers.
    #[must_use]
    pub fn without(&self, writers: &BTreeSet<u32>) -> Self {
        let ranges = self.ranges.iter().flat_map(|range| range.without(writers)).collect();
        Self { ranges }
    }
}

impl Range {
    /// What the absent writers leave of the range, in time proportional to their number.
    fn without(self, absent: &BTreeSet<u32>) -> Vec<Self> {
        let mut left = Vec::new();
        let mut first = Some(self.first);
        for &writer in absent.range(self.first..=self.last) {
            if let Some(first) = first.filter(|first| *first < writer) {
                left.push(Self { first, last: writer - 1 });
            }
            first = writer.checked_add(1);
        }
        if let Some(first) = first.filter(|first| *first <= self.last) {
            left.push(Self { first, last: self.last });
        }
        left
    }
}

impl FromIterator<u32> for WriterSet {
    fn from_iter<T: IntoIterator<Item = u32>>(writers: T) -> Self {
        let mut ranges: Vec<Range> = Vec::new();
        for writer in writers.into_iter().collect::<BTreeSet<_>>() {
            match ranges.last_mut() {
                Some(range) if range.last + 1 == writer => range.last = writer,
                _ => ranges.push(Range { first: writer, last: writer }),
            }
        }
        Self { ranges }
    }
}

impl fmt::Display for WriterSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Range { first, last }) in self.ranges.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

/// Text that is not a set of writers such as `0-3,8`: ranges in ascending order that do not touch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidWriterSet(String);

impl fmt::Display for InvalidWriterSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected writers in ascending order such as `0-3,8`, found `{}`", self.0)
    }
}

impl std::error::Error for InvalidWriterSet {}

impl FromStr for WriterSet {
    type Err = InvalidWriterSet;

    /// Reads exactly what `Display` writes, so that each set has one text.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidWriterSet(text.to_owned());
        let ranges = text.split(',').filter(|part| !part.is_empty()).map(range);
        let set = Self { ranges: ranges.collect::<Option<_>>().ok_or_else(invalid)? };
        if set.is_ordered() && set.to_string() == text { Ok(set) } else { Err(invalid()) }
    }
}

fn range(text: &str) -> Option<Range> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = Range { first: first.parse().ok()?, last: last.parse().ok()? };
    (range.first <= range.last).then_some(range)
}

impl WriterSet {
    fn is_ordered(&self) -> bool {
        self.ranges
            .windows(2)
            .all(|pair| pair[0].last.checked_add(1).is_some_and(|absent| absent < pair[1].first))
    }
}

impl TryFrom<String> for WriterSet {
    type Error = InvalidWriterSet;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<WriterSet> for String {
    fn from(writers: WriterSet) -> Self {
        writers.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writers(text: &str) -> WriterSet {
        text.parse().unwrap()
    }

    #[test]
    fn a_set_is_written_as_its_ranges() {
        for text in ["", "0", "0-3,8", "1,3,5-4294967295"] {
            assert_eq!(writers(text).to_string(), text);
        }
        assert_eq!([8, 2, 1, 0, 3, 8].into_iter().collect::<WriterSet>().to_string(), "0-3,8");
    }

    #[test]
    fn a_text_that_is_no_set_is_refused() {
        for text in ["-", "a", "3-1", "1,0", "0,1", "0-3,3", "+1", "0,", " 0", "4294967296"] {
            let error = text.parse::<WriterSet>().unwrap_err();
            assert!(error.to_string().ends_with(&format!("found `{text}`")), "{error}");
        }
    }

    #[test]
    fn a_set_without_some_writers() {
        let absent = |ranks: &[u32]| ranks.iter().copied().collect();
        assert_eq!(writers("0-3,8").without(&absent(&[0, 2, 8])).to_string(), "1,3");
        assert_eq!(writers("0-3,8").without(&absent(&[1, 7])).to_string(), "0,2-3,8");
        assert_eq!(writers("0-4294967295").without(&absent(&[u32::MAX])).len(), 4_294_967_295);
        assert!(writers("0-1").without(&absent(&[0, 1])).is_empty());
    }

    #[test]
    fn a_set_contains_its_writers() {
        let set = writers("1-3,8");
        let found: Vec<u32> = (0..10).filter(|&writer| set.contains(writer)).collect();
        assert_eq!(found, set.iter().collect::<Vec<_>>());
        assert_eq!((set.len(), WriterSet::one(8).len()), (4, 1));
    }
}
