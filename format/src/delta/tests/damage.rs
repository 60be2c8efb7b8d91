//! Chunks that are put together by hand, valid and damaged.

use super::super::layout::{Block, Header, MAX_CLASSES, NO_THRESHOLDS, StoredColumn};
use super::super::*;
use super::{bytes16, options};
use crate::element::ElementWidth;
use crate::error::{ErrorKind, Result};

/// A chunk of 100 elements of 2 bytes that is put together by hand.
#[derive(Clone)]
struct Parts {
    header: Header,
    columns: Vec<(Vec<u8>, bool)>,
    dense: Vec<u8>,
}

impl Parts {
    /// Elements 3 and 10 change by -1 and 1.
    fn one_class() -> Self {
        let blocks = vec![Block { counts: [2, 0, 0, 0], ..Block::default() }];
        let header = Header {
            width: ElementWidth::Two,
            elements: 100,
            classes: 1,
            bitmaps: [false; MAX_CLASSES],
            thresholds: NO_THRESHOLDS,
            blocks,
        };
        let columns = [vec![3, 6], vec![0x10], vec![], vec![]];
        Self { header, columns: columns.map(|column| (column, false)).into(), dense: Vec::new() }
    }

    /// The first element of the class of large patterns changes by 1.
    fn two_classes() -> Self {
        let mut parts = Self::one_class();
        parts.header.classes = 2;
        parts.header.thresholds[0] = 0x100;
        parts.header.blocks[0].counts = [0, 1, 0, 0];
        parts.columns = [vec![], vec![], vec![0], vec![0x01], vec![], vec![]]
            .map(|column| (column, false))
            .into();
        parts
    }

    fn chunk(&self) -> Vec<u8> {
        let mut chunk = Vec::new();
        let stored = |(column, is_frame): &(Vec<u8>, bool)| StoredColumn {
            len: column.len(),
            is_frame: *is_frame,
        };
        let stored: Vec<StoredColumn> = self.columns.iter().map(stored).collect();
        self.header.write(&stored, &mut chunk);
        self.columns.iter().for_each(|(column, _)| chunk.extend(column));
        chunk.extend(&self.dense);
        chunk
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Vec<u8> {
        change(&mut self);
        self.chunk()
    }
}

/// Applies a chunk whose checksums are not set.
fn apply(chunk: &[u8], base: &[u8]) -> Result<Vec<u8>> {
    let mut target = base.to_vec();
    match DeltaDecoder::new()?.apply(chunk, ElementWidth::Two, &mut target) {
        Err(error) if !is_checksum_error(&error) => Err(error),
        _ => Ok(target),
    }
}

fn is_checksum_error(error: &crate::Error) -> bool {
    error.kind() == ErrorKind::DeltaMismatch && error.to_string().contains("CRC")
}

fn frame(content: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(content, 1).unwrap()
}

/// A chunk with one byte replaced.
fn poke(parts: &Parts, at: usize, byte: u8) -> Vec<u8> {
    let mut chunk = parts.chunk();
    chunk[at] = byte;
    chunk
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table of all cases")]
fn damaged_chunks_have_typed_errors_and_leave_the_target() {
    use ErrorKind as Kind;
    let (one, two) = (Parts::one_class(), Parts::two_classes());
    // 90 elements of the second class, 10 of the first.
    let base =
        bytes16(&std::array::from_fn::<u16, 100, _>(|at| if at < 10 { 0x00FF } else { 0x100 }));
    let good = apply(&one.chunk(), &base).unwrap();
    assert_eq!(good[6..8], [0xFE, 0x00]);
    assert_eq!(good[20..22], [0x01, 0x01]);
    assert_eq!(
        apply(&two.chunk(), &base).unwrap(),
        [&base[..20], &[0x01, 0x01], &base[22..]].concat()
    );

    let wide = |values: u8, wide: &[u8], exceptions: &[u8]| {
        let [wide, exceptions] = [wide, exceptions].map(<[u8]>::to_vec);
        one.clone().with(|parts| {
            parts.columns[1].0 = vec![values];
            parts.columns[2].0 = wide;
            parts.columns[3].0 = exceptions;
        })
    };
    // A wide value and an exception: +8 (zigzag 16) and 0x1234.
    let result = apply(&wide(0xFF, &[0, 255], &[0x34, 0x12]), &base).unwrap();
    assert_eq!((&result[6..8], &result[20..22]), (&[0x07, 0x01][..], &[0x34, 0x13][..]));

    let framed = |content: Vec<u8>| one.clone().with(|parts| parts.columns[0] = (content, true));
    assert_eq!(apply(&framed(frame(&[3, 6])), &base).unwrap(), good);
    let mut streamed = Vec::new();
    zstd::stream::copy_encode(&[3, 6][..], &mut streamed, 1).unwrap();
    let skippable = vec![0x50, 0x2A, 0x4D, 0x18, 0, 0, 0, 0];
    let gaps = |gaps: &[u8]| {
        let gaps = gaps.to_vec();
        one.clone().with(|parts| {
            parts.header.blocks[0].counts[0] = u16::try_from(gaps.len()).unwrap();
            parts.columns[0].0 = gaps;
        })
    };
    let bitmap = |bitmap: &[u8]| {
        let bitmap = bitmap.to_vec();
        one.clone().with(|parts| {
            parts.header.bitmaps[0] = true;
            parts.header.blocks[0].counts[0] = u16::try_from(bitmap.len()).unwrap();
            parts.columns[0].0 = bitmap;
        })
    };
    assert_eq!(apply(&bitmap(&[8, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), &base).unwrap(), good);
    assert!(apply(&gaps(&[3, 95]), &base).is_ok());
    let ranks = |class: usize, bytes: &[u8], is_bitmap: bool| {
        let bytes = bytes.to_vec();
        two.clone().with(|parts| {
            parts.header.blocks[0].counts[..2].fill(0);
            parts.header.blocks[0].counts[class] = u16::try_from(bytes.len()).unwrap();
            parts.header.bitmaps[class] = is_bitmap;
            parts.columns[..4].iter_mut().for_each(|column| column.0.clear());
            if !is_bitmap && class == 0 {
                parts.header.bitmaps[1] = false;
            }
            parts.columns[2 * class].0 = bytes;
            parts.columns[2 * class + 1].0 = vec![0];
        })
    };
    assert!(apply(&ranks(1, &[89], false), &base).is_ok());
    assert!(apply(&ranks(0, &[9], false), &base).is_ok());
    assert!(apply(&ranks(0, &[0, 2], true), &base).is_ok());
    let dense = |len: usize| {
        one.clone().with(|parts| {
            parts.header.blocks[0].dense = true;
            parts.columns.iter_mut().for_each(|column| column.0.clear());
            parts.dense = vec![7; len];
        })
    };
    assert_eq!(apply(&dense(200), &base).unwrap(), [7; 200]);
    let counts = 2 + 4;
    let lengths = counts + 2;
    let cases: Vec<(&str, Vec<u8>, Kind)> = vec![
        ("empty", vec![], Kind::DeltaChunk),
        ("short header", one.chunk()[..12].to_vec(), Kind::DeltaChunk),
        ("no class", poke(&one, 0, 0), Kind::DeltaChunk),
        ("five classes", poke(&one, 0, 5), Kind::DeltaChunk),
        ("bitmap flag of a missing class", poke(&one, 1, 2), Kind::DeltaChunk),
        ("threshold 0", two.clone().with(|parts| parts.header.thresholds[0] = 0), Kind::DeltaChunk),
        ("threshold with sign", poke(&two, 3, 0x81), Kind::DeltaChunk),
        ("count", poke(&one, counts, 3), Kind::DeltaChunk),
        ("column too long", poke(&one, lengths, 3), Kind::DeltaChunk),
        ("column of 1 GiB", poke(&one, lengths + 3, 0x40), Kind::DeltaChunk),
        ("bytes at the end", [one.chunk(), vec![0]].concat(), Kind::DeltaChunk),
        ("cut off", one.chunk()[..one.chunk().len() - 1].to_vec(), Kind::DeltaChunk),
        (
            "more values than positions",
            one.clone().with(|parts| parts.columns[1].0.push(0)),
            Kind::DeltaChunk,
        ),
        (
            "fewer values than positions",
            one.clone().with(|parts| parts.columns[1].0.clear()),
            Kind::DeltaChunk,
        ),
        (
            "half of the last value",
            two.clone().with(|parts| parts.columns[3].0 = vec![0x11]),
            Kind::DeltaChunk,
        ),
        ("missing wide value", wide(0x1F, &[], &[]), Kind::DeltaChunk),
        ("additional wide value", wide(0x1F, &[1, 1], &[]), Kind::DeltaChunk),
        ("missing exception", wide(0x1F, &[255], &[]), Kind::DeltaChunk),
        ("additional exception", wide(0x1F, &[254], &[1, 1]), Kind::DeltaChunk),
        ("half an exception", wide(0x1F, &[255], &[1]), Kind::DeltaChunk),
        ("no frame", framed(vec![3, 6]), Kind::DeltaChunk),
        ("two frames", framed([frame(&[3]), frame(&[6])].concat()), Kind::DeltaChunk),
        ("frame that is too long", framed(frame(&[3, 6, 6])), Kind::DeltaChunk),
        ("frame that is too short", framed(frame(&[3])), Kind::DeltaChunk),
        ("frame that is cut off", framed(frame(&[3, 6])[..9].to_vec()), Kind::DeltaChunk),
        ("frame without content size", framed(streamed), Kind::DeltaChunk),
        ("skippable frame", framed(skippable.clone()), Kind::DeltaChunk),
        (
            "empty skippable frame",
            one.clone().with(|parts| parts.columns[2] = (skippable, true)),
            Kind::DeltaChunk,
        ),
        ("last gap byte is an escape", gaps(&[3, 6, 255]), Kind::DeltaChunk),
        ("position after the block", gaps(&[3, 96]), Kind::DeltaChunk),
        ("escapes lead out of the block", gaps(&[3, 255, 0]), Kind::DeltaChunk),
        ("bitmap too short", bitmap(&[8, 4]), Kind::DeltaChunk),
        (
            "bit after the block",
            bitmap(&[8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10]),
            Kind::DeltaChunk,
        ),
        ("rank after the first class", ranks(0, &[10], false), Kind::DeltaMismatch),
        ("rank after the second class", ranks(1, &[90], false), Kind::DeltaMismatch),
        ("bit after the class", ranks(0, &[0, 4], true), Kind::DeltaMismatch),
        ("bitmap longer than the class", ranks(0, &[0, 2, 0], true), Kind::DeltaMismatch),
        ("long dense block", dense(201), Kind::DeltaChunk),
        ("short dense block", dense(199), Kind::DeltaChunk),
    ];
    for (name, chunk, kind) in cases {
        let mut target = base.clone();
        let mut decoder = DeltaDecoder::new().unwrap();
        let error = decoder.apply(&chunk, ElementWidth::Two, &mut target).expect_err(name);
        assert!(!is_checksum_error(&error), "{name}: {error}");
        assert_eq!(error.kind(), kind, "{name}: {error}");
        assert!(target == base, "{name}: the target changed");
        let count = decoder.count(&chunk, ElementWidth::Two, base.len());
        assert_eq!(count.is_err(), kind == Kind::DeltaChunk, "{name}");
        let applied = decoder.apply_to(&chunk, ElementWidth::Two, &base, &mut target);
        assert_eq!(applied.unwrap_err().kind(), kind, "{name}");
        assert!(target == base, "{name}: the target of a copy changed");
        // The decoder is as before.
        let applied = decoder.apply(&one.chunk(), ElementWidth::Two, &mut target);
        assert!(is_checksum_error(&applied.unwrap_err()) && target == good, "{name}");
    }
    let odd = apply(&one.chunk(), &base[1..]).unwrap_err();
    assert_eq!(odd.kind(), Kind::TargetSize);
    let mut encoder = DeltaEncoder::new().unwrap();
    for (old, new) in [(&base[..], &base[2..]), (&base[1..], &base[1..])] {
        let options = options(DeltaClasses::One);
        let error =
            encoder.encode([old, new], ElementWidth::Two, &options, &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), Kind::TargetSize);
    }
}
