//! Compression of what weights look like.

use std::hint::black_box;

use half::bf16;
use tssd_format::{
    Archive, Compression, Draft, Layout, Options, Pack, StateDict, Tensor, TorchStoreStateDict,
};
use tssd_tests::race::{Runner, Target, race, verdict};

const ELEMENTS: usize = 32 << 20;

/// How many bytes may be stored for each raw byte.
const MAX_STORED: f64 = 0.69;

/// Row 7: 64 MiB of `bfloat16`, normal with a deviation of 0.02, on one thread.
#[expect(clippy::print_stdout, reason = "a bench prints its result")]
#[expect(clippy::cast_precision_loss, reason = "a ratio is rounded anyway")]
pub(crate) fn bfloat16() {
    let raw_len = u64::try_from(2 * ELEMENTS).unwrap();
    let mut dict = StateDict::new();
    let shape = [u64::try_from(ELEMENTS).unwrap()];
    dict.insert("weight", Tensor::from_slice(&normal(), &shape).unwrap());
    let options = Options::new().compress(Compression::ShuffledZstd);
    let file = TorchStoreStateDict::with_options(&dict, &options).unwrap().as_bytes().clone();
    let archive = Archive::from_bytes(file.clone()).unwrap();
    let stored = archive.storage(0).stored_len() as f64 / raw_len as f64;
    let is_met = verdict(stored <= MAX_STORED);
    println!("7. bfloat16, N(0, 0.02), zstd level 1 after a byte shuffle");
    println!("  stored / raw {stored:.3}   target {MAX_STORED}: {is_met}\n");
    let layout = Layout::plan(&dict, &options).unwrap();
    let mut target = vec![1_u8; usize::try_from(layout.file_len()).unwrap()];
    let mut copy = archive.storage_bytes(0).unwrap().to_vec();
    let raw = archive.storage_bytes(0).unwrap();
    race(
        "7. 64 MiB of bfloat16 to zstd and back, one thread",
        Some(raw_len),
        9,
        vec![
            Runner::new("memcpy, warm memory", || black_box(&mut copy).copy_from_slice(&raw)),
            Runner::new("tssd: Archive::storage_bytes, new memory", || {
                black_box(archive.storage_bytes(0).unwrap());
            })
            .target(Target::Rate(1.0)),
            Runner::new("tssd: Archive::verify_deep", || archive.verify_deep().unwrap())
                .target(Target::Rate(1.0)),
            Runner::new("tssd: draft, pack, place, fill", || {
                let draft = Draft::new(&dict, &options).unwrap();
                let packed: Vec<_> =
                    draft.jobs().iter().map(|job| Pack::run(job).unwrap()).collect();
                draft.place(packed).unwrap().write_into(black_box(&mut target)).unwrap();
            }),
        ],
    );
}

/// Normal numbers: two for two uniform ones, as Box and Muller have it.
fn normal() -> Vec<bf16> {
    let mut state = 1_u64;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Above 0, at most 1.
        let upper = u32::try_from(state >> 32).unwrap();
        (f64::from(upper) + 1.0) / 4_294_967_296.0
    };
    let mut numbers = Vec::with_capacity(ELEMENTS);
    while numbers.len() < ELEMENTS {
        let (radius, angle) =
            (0.02 * (-2.0 * uniform().ln()).sqrt(), std::f64::consts::TAU * uniform());
        numbers.extend([angle.cos(), angle.sin()].map(|part| bf16::from_f64(radius * part)));
    }
    numbers
}
