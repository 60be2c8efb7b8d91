//! Deltas between two versions of bf16 weights, against XOR and zstd, as weight-sync systems send them.

use std::cell::RefCell;
use std::hint::black_box;

use tssd_format::{DeltaClasses, DeltaDecoder, DeltaEncoder, DeltaOptions, ElementWidth};
use tssd_tests::bench::{Bench, CopyBuffers, Race, Runner, normal_bf16};

const ELEMENTS: usize = 32 << 20;

/// Bytes of a chunk of a delta.
const CHUNK: usize = 8 << 20;

/// Bytes of a frame of the peer.
const FRAME: usize = 2 << 20;

/// Makes and applies the delta between two versions of 64 MiB of `bfloat16`, on one thread, without file and digests.
///
/// About 1 % of the elements differ, by one unit in the last place: those of small magnitude more often, as after a step
/// of training.
pub(crate) fn make_and_apply(bench: &mut Bench) {
    let old: Vec<u8> = normal_bf16(ELEMENTS).iter().flat_map(|bf16| bf16.to_le_bytes()).collect();
    let new = trained(&old);
    let len = u64::try_from(old.len()).unwrap();
    let mut encoder = DeltaEncoder::new().unwrap();
    let mut decoder = DeltaDecoder::new().unwrap();
    let encode = |encoder: &mut DeltaEncoder, classes| -> Vec<Vec<u8>> {
        let options = DeltaOptions { classes, ..DeltaOptions::default() };
        let pairs = old.chunks(CHUNK).zip(new.chunks(CHUNK));
        let chunks = pairs.map(|(old, new)| {
            let mut chunk = Vec::new();
            encoder.encode([old, new], ElementWidth::Two, &options, &mut chunk).unwrap();
            chunk
        });
        chunks.collect()
    };
    let [one, four] =
        [DeltaClasses::One, DeltaClasses::Four].map(|classes| encode(&mut encoder, classes));
    let mut zstd = zstd::bulk::Compressor::new(1).unwrap();
    let frames = xor_frames(&mut zstd, &old, &new);
    let percent = |chunks: &[Vec<u8>]| 100.0 * ratio(chunks.iter().map(Vec::len).sum(), old.len());
    let differing = old.chunks(2).zip(new.chunks(2)).filter(|(old, new)| old != new).count();
    bench.record_counts(
        "delta of 64 MiB of bfloat16",
        &[
            ("elements that differ, %", 100.0 * ratio(differing, ELEMENTS)),
            ("stored %, 1 class", percent(&one)),
            ("stored %, 4 classes", percent(&four)),
            ("stored %, XOR and zstd", percent(&frames)),
        ],
    );
    let four_encoder = RefCell::new(DeltaEncoder::new().unwrap());
    bench.race(
        Race::new("make delta", "64 MiB of bfloat16, 1 thread", 7)
            .with_bytes(2 * len)
            .with_runner(Runner::ours("tssd, 1 class", || {
                black_box(encode(&mut encoder, DeltaClasses::One));
            }))
            .with_runner(Runner::variant("tssd, 4 classes", || {
                black_box(encode(&mut four_encoder.borrow_mut(), DeltaClasses::Four));
            }))
            .with_runner(Runner::peer("XOR and zstd", || {
                black_box(xor_frames(&mut zstd, &old, &new));
            })),
    );
    let memory = RefCell::new(CopyBuffers::new(len));
    let targets = [RefCell::new(old.clone()), RefCell::new(old.clone()), RefCell::new(old.clone())];
    let apply = |decoder: &mut DeltaDecoder, chunks: &[Vec<u8>], target: &RefCell<Vec<u8>>| {
        let mut target = target.borrow_mut();
        let parts = old.chunks(CHUNK).zip(target.chunks_mut(CHUNK)).zip(chunks);
        for ((base, target), chunk) in parts {
            decoder.apply_to(chunk, ElementWidth::Two, base, target).unwrap();
        }
    };
    let four_decoder = RefCell::new(DeltaDecoder::new().unwrap());
    let mut unzstd = zstd::bulk::Decompressor::new().unwrap();
    let mut buffer = vec![0; FRAME];
    bench.race(
        Race::new(
            "apply delta",
            "64 MiB of bfloat16 to other memory, checksums proven, 1 thread",
            7,
        )
        .with_bytes(len)
        .with_runner(Runner::ours("tssd, 1 class", || apply(&mut decoder, &one, &targets[0])))
        .with_runner(Runner::variant("tssd, 4 classes", || {
            apply(&mut four_decoder.borrow_mut(), &four, &targets[1]);
        }))
        .with_runner(Runner::peer("XOR and zstd, no checksums", || {
            let mut target = targets[2].borrow_mut();
            let parts = old.chunks(FRAME).zip(target.chunks_mut(FRAME)).zip(&frames);
            for ((old, target), frame) in parts {
                let len = unzstd.decompress_to_buffer(frame, &mut buffer).unwrap();
                xor(old, &buffer[..len], target);
            }
        }))
        .with_runner(Runner::limit("memcpy", || memory.borrow_mut().copy(1))),
    );
    for target in targets {
        assert!(target.take() == new, "the result is the new version");
    }
}

/// Returns the next version of bf16 weights.
fn trained(old: &[u8]) -> Vec<u8> {
    let mut random = 1_u64;
    let mut new = old.to_vec();
    for element in new.as_chunks_mut::<2>().0 {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let pattern = u16::from_le_bytes(*element);
        let exponent = u32::from(pattern >> 7 & 0xFF);
        // The larger the exponent, the larger is the unit in the last place, and the rarer a change.
        let rarity = 1_u64 << (exponent.saturating_sub(115)).min(20);
        if random >> 33 & 0xFFFF < 4096 / rarity.max(1) {
            let step = if random >> 60 & 1 == 0 { 1 } else { u16::MAX };
            *element = pattern.wrapping_add(step).to_le_bytes();
        }
    }
    new
}

fn xor_frames(zstd: &mut zstd::bulk::Compressor<'_>, old: &[u8], new: &[u8]) -> Vec<Vec<u8>> {
    let mut buffer = vec![0; FRAME];
    let pairs = old.chunks(FRAME).zip(new.chunks(FRAME));
    let frames = pairs.map(|(old, new)| {
        let buffer = &mut buffer[..old.len()];
        xor(old, new, buffer);
        zstd.compress(buffer).unwrap()
    });
    frames.collect()
}

fn xor(one: &[u8], other: &[u8], target: &mut [u8]) {
    for ((target, one), other) in target.iter_mut().zip(one).zip(other) {
        *target = one ^ other;
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio is rounded anyway")]
fn ratio(one: usize, other: usize) -> f64 {
    one as f64 / other as f64
}
