//! Where the elements of an archive are.

use std::ops::Range;

use tssd_format::{Archive, ElementWidth};

use crate::convert::{to_u64, to_usize};

/// Where the elements of an archive are, and their widths. Everything else counts as bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ElementLayout(Vec<ElementRun>);

/// Consecutive elements of one width.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ElementRun {
    pub(crate) range: Range<u64>,
    pub(crate) width: ElementWidth,
}

impl ElementLayout {
    /// Returns the layout of an archive.
    pub(crate) fn of(archive: &Archive) -> Self {
        let mut runs = Vec::new();
        for (number, width) in (0..).zip(archive.element_widths()) {
            let storage = archive.storage(number);
            if storage.compressed_layout.is_none() && storage.len > 0 {
                let range = storage.offset..storage.offset + storage.len;
                runs.push(ElementRun { range, width });
            }
        }
        runs.sort_unstable_by_key(|run| run.range.start);
        Self::new(runs)
    }

    /// Joins neighbours of one width. Padding between them counts as elements.
    pub(crate) fn new(runs: Vec<ElementRun>) -> Self {
        let mut joined: Vec<ElementRun> = Vec::new();
        for run in runs {
            match joined.last_mut() {
                Some(last) if last.width == run.width && is_aligned(last, run.range.start) => {
                    last.range.end = run.range.end;
                }
                _ => joined.push(run),
            }
        }
        Self(joined)
    }

    /// Returns the widths of the first `len` bytes, in their order: lengths in bytes, and the width of their elements.
    pub(crate) fn widths(&self, len: u64) -> Vec<(usize, ElementWidth)> {
        let mut widths = Vec::new();
        self.push_run(&mut widths, 0..len);
        widths
    }

    /// Returns the run that contains an offset.
    pub(crate) fn run_at(&self, offset: u64) -> Option<&ElementRun> {
        let next = self.0.partition_point(|run| run.range.end <= offset);
        self.0.get(next).filter(|run| run.range.start <= offset)
    }

    /// Appends the widths of bytes.
    pub(crate) fn push_run(&self, widths: &mut Vec<(usize, ElementWidth)>, bytes: Range<u64>) {
        let mut at = bytes.start;
        while at < bytes.end {
            let next = self.0.partition_point(|run| run.range.end <= at);
            let Some(run) = self.0.get(next).filter(|run| run.range.start < bytes.end) else {
                push_width(widths, bytes.end - at, ElementWidth::One);
                return;
            };
            let start = run.range.start.max(at);
            if start > at {
                push_width(widths, start - at, ElementWidth::One);
            }
            let end = run.range.end.min(bytes.end);
            let is_whole =
                is_aligned(run, start) && (end - start).is_multiple_of(to_u64(run.width.bytes()));
            push_width(widths, end - start, if is_whole { run.width } else { ElementWidth::One });
            at = end;
        }
    }
}

/// Returns whether an element of a run, or of its continuation, begins at an offset.
pub(crate) fn is_aligned(run: &ElementRun, offset: u64) -> bool {
    (offset - run.range.start).is_multiple_of(to_u64(run.width.bytes()))
}

/// Appends bytes with elements of a width.
pub(crate) fn push_width(widths: &mut Vec<(usize, ElementWidth)>, bytes: u64, width: ElementWidth) {
    match widths.last_mut() {
        Some((last, known)) if *known == width => *last += to_usize(bytes),
        _ => widths.push((to_usize(bytes), width)),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A layout with elements of all widths.
    pub(crate) fn layout() -> ElementLayout {
        let run = |start, end, width| ElementRun { range: start..end, width };
        ElementLayout::new(vec![
            run(64, 164, ElementWidth::Two),
            run(192, 1192, ElementWidth::Two),
            run(1200, 9200, ElementWidth::Four),
            run(9203, 9205, ElementWidth::One),
        ])
    }
}
