//! Sets of writers, stored and written as ranges of global ranks.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A set of writers, each a global rank. Its text form is compact: `0-3,8`.
///
/// The set is also stored as ranges, so its size in memory is proportional to its text: `0-4294967295` takes one
/// range, as `0` does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WriterSet {
    /// Ascending, with at least one absent rank between neighbours.
    ranges: Vec<Range>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    first: u32,
    last: u32,
}

impl WriterSet {
    /// Returns the set of one writer.
    pub fn one(writer: u32) -> Self {
        Self { ranges: vec![Range { first: writer, last: writer }] }
    }

    /// Whether the writer is in the set.
    pub fn contains(&self, writer: u32) -> bool {
        let index = self.ranges.partition_point(|range| range.first <= writer);
        index > 0 && writer <= self.ranges[index - 1].last
    }

    /// Returns the number of writers.
    pub fn len(&self) -> u64 {
        self.ranges.iter().map(|range| u64::from(range.last - range.first) + 1).sum()
    }

    /// Whether the set has no writer.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the writers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.ranges.iter().flat_map(|range| range.first..=range.last)
    }

    /// Returns this set without some of its writers.
    #[must_use]
    pub fn without(&self, writers: &BTreeSet<u32>) -> Self {
        let ranges = self.ranges.iter().flat_map(|range| range.without(writers)).collect();
        Self { ranges }
    }
}

impl Range {
    /// Returns the range without the absent writers, in time proportional to the number of absent writers.
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

/// Error for text that is not a set of writers such as `0-3,8`: ascending ranges that do not touch.
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

    /// Parses exactly the text that `Display` writes, so each set has one text form.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidWriterSet(text.to_owned());
        let ranges = text.split(',').filter(|part| !part.is_empty()).map(parse_range);
        let set = Self { ranges: ranges.collect::<Option<_>>().ok_or_else(invalid)? };
        if set.is_ordered() && set.to_string() == text { Ok(set) } else { Err(invalid()) }
    }
}

fn parse_range(text: &str) -> Option<Range> {
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
    fn writer_set_displays_as_ranges() {
        for text in ["", "0", "0-3,8", "1,3,5-4294967295"] {
            assert_eq!(writers(text).to_string(), text);
        }
        assert_eq!([8, 2, 1, 0, 3, 8].into_iter().collect::<WriterSet>().to_string(), "0-3,8");
    }

    #[test]
    fn parsing_rejects_text_that_is_not_a_writer_set() {
        for text in ["-", "a", "3-1", "1,0", "0,1", "0-3,3", "+1", "0,", " 0", "4294967296"] {
            let error = text.parse::<WriterSet>().unwrap_err();
            assert!(error.to_string().ends_with(&format!("found `{text}`")), "{error}");
        }
    }

    #[test]
    fn without_removes_writers() {
        let absent = |ranks: &[u32]| ranks.iter().copied().collect();
        assert_eq!(writers("0-3,8").without(&absent(&[0, 2, 8])).to_string(), "1,3");
        assert_eq!(writers("0-3,8").without(&absent(&[1, 7])).to_string(), "0,2-3,8");
        assert_eq!(writers("0-4294967295").without(&absent(&[u32::MAX])).len(), 4_294_967_295);
        assert!(writers("0-1").without(&absent(&[0, 1])).is_empty());
    }

    #[test]
    fn contains_agrees_with_iter() {
        let set = writers("1-3,8");
        let found: Vec<u32> = (0..10).filter(|&writer| set.contains(writer)).collect();
        assert_eq!(found, set.iter().collect::<Vec<_>>());
        assert_eq!((set.len(), WriterSet::one(8).len()), (4, 1));
    }
}
