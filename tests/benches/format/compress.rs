//! Compression of data with the distribution of model weights.

use std::cell::RefCell;
use std::hint::black_box;

use tssd_format::{
    Archive, CompressJob, Compression, Draft, Layout, Options, StateDict, Tensor,
    TorchStoreStateDict,
};
use tssd_tests::bench::{Bench, CopyBuffers, LastResult, Race, Runner, Target, normal_bf16};

const ELEMENTS: usize = 32 << 20;

/// The default compression level of the format.
const LEVEL: i32 = 1;

/// Compresses and decompresses 64 MiB of `bfloat16`, N(0, 0.02), on one thread. The peer is plain zstd.
pub(crate) fn compress_bfloat16(bench: &mut Bench) {
    let mut dict = StateDict::new();
    let shape = [u64::try_from(ELEMENTS).unwrap()];
    let tensor = Tensor::from_slice(&normal_bf16(ELEMENTS), &shape).unwrap();
    let source = tensor.view().contiguous_bytes().unwrap().to_vec();
    dict.insert("weight", tensor);
    let options = Options::new().compress(Compression::ShuffledZstd);
    let file = TorchStoreStateDict::with_options(&dict, &options).unwrap().as_bytes().clone();
    let archive = Archive::from_bytes(file.clone()).unwrap();
    let planes_options = Options::new().compress(Compression::Planes);
    let planes = TorchStoreStateDict::with_options(&dict, &planes_options).unwrap();
    let planes_archive = Archive::from_bytes(planes.as_bytes().clone()).unwrap();
    let tiers_options = Options::new().compress(Compression::Tiers);
    let tiers = TorchStoreStateDict::with_options(&dict, &tiers_options).unwrap();
    let tiers_archive = Archive::from_bytes(tiers.as_bytes().clone()).unwrap();
    let mut tiers_target = vec![1_u8; tiers.as_bytes().len()];
    let raw = archive.storage_bytes(0).unwrap();
    let len = u64::try_from(raw.len()).unwrap();
    let layout = Layout::plan(&dict, &options).unwrap();
    let mut target = vec![1_u8; usize::try_from(layout.file_len()).unwrap()];
    let mut planes_target = vec![1_u8; planes.as_bytes().len()];
    let plain = zstd::bulk::compress(&raw, LEVEL).unwrap();
    let memory = RefCell::new(CopyBuffers::new(len));
    let stored_percent = |len: u64| 100.0 * ratio(len, 2 * u64::try_from(ELEMENTS).unwrap());
    bench.record_counts(
        "zstd level 1 of 64 MiB of bfloat16, N(0, 0.02)",
        &[
            (
                "stored % after a byte shuffle (target 69)",
                stored_percent(archive.storage(0).stored_len()),
            ),
            (
                "stored % in planes (target 66.8)",
                stored_percent(planes_archive.storage(0).stored_len()),
            ),
            ("stored % in tiers", stored_percent(tiers_archive.storage(0).stored_len())),
            ("stored % of zstd alone", stored_percent(u64::try_from(plain.len()).unwrap())),
        ],
    );
    let decompressed = LastResult::new();
    bench.race(
        Race::new("unpack zstd", "64 MiB of bfloat16, checksums proven, 1 thread", 7)
            .with_bytes(len)
            .with_runner(
                Runner::ours("tssd", || {
                    decompressed.replace_with(|| archive.storage_bytes(0).unwrap());
                })
                .with_target(Target::Rate(1.0)),
            )
            .with_runner(
                Runner::variant("tssd, verify_deep", || archive.verify_deep().unwrap())
                    .with_target(Target::Rate(1.0)),
            )
            .with_runner(Runner::variant("tssd, planes", || {
                black_box(planes_archive.storage_bytes(0).unwrap());
            }))
            .with_runner(Runner::variant("tssd, tiers", || {
                black_box(tiers_archive.storage_bytes(0).unwrap());
            }))
            .with_runner(Runner::peer("zstd alone", || {
                black_box(zstd::bulk::decompress(&plain, raw.len()).unwrap());
            }))
            .with_runner(Runner::limit("memcpy into new memory", || {
                memory.borrow_mut().copy_to_new_memory(1);
            })),
    );
    assert!(decompressed.take() == source, "what is unpacked is what was packed");
    bench.race(
        Race::new("pack zstd", "64 MiB of bfloat16, 1 thread", 5)
            .with_bytes(len)
            .with_runner(Runner::ours("tssd", || pack(&dict, &options, &mut target)))
            .with_runner(Runner::variant("tssd, planes", || {
                pack(&dict, &planes_options, &mut planes_target);
            }))
            .with_runner(Runner::variant("tssd, tiers", || {
                pack(&dict, &tiers_options, &mut tiers_target);
            }))
            .with_runner(Runner::peer("zstd alone", || {
                black_box(zstd::bulk::compress(&raw, LEVEL).unwrap());
            }))
            .with_runner(Runner::limit("memcpy", || memory.borrow_mut().copy(1))),
    );
    let loaded = Archive::from_bytes(target).unwrap().to_state_dict().unwrap();
    assert_eq!(loaded.leaves(), dict.leaves());
}

/// Compresses a state dict into memory, on one thread.
fn pack(dict: &StateDict, options: &Options, target: &mut [u8]) {
    let draft = Draft::new(dict, options).unwrap();
    let compressed: Vec<_> =
        draft.jobs().iter().map(|job| CompressJob::run(job).unwrap()).collect();
    draft.into_layout(compressed).unwrap().write_into(black_box(target)).unwrap();
}

#[expect(clippy::cast_precision_loss, reason = "a ratio is rounded anyway")]
fn ratio(one: u64, other: u64) -> f64 {
    one as f64 / other as f64
}
