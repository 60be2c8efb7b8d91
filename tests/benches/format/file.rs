//! Whole files: saves without sync, and loads from the page cache.

use std::fs::File;
use std::hint::black_box;
use std::path::Path;

use memmap2::Mmap;
use object_store::ObjectStoreExt;
use object_store::local::LocalFileSystem;
use safetensors::SafeTensors;
use tssd_format::{Archive, Error, Options, StateDict};
use tssd_store::{Replacement, file};
use tssd_tests::bench::{
    Bench, Curve, LastResult, Model, Race, Runner, Target, read_in_pieces, sum_words,
};

use crate::safetensors_peer;
use crate::verify::verify;

/// File of the last turn, which [`clear`] keeps for the comparison.
const LAST: &str = "last.tssd";

/// Names of the runners that load.
const OURS: &str = "tssd, mapped, 2 threads";
const THEIRS: &str = "safetensors, mapped, 1 thread";

/// Saves to a new file in each turn.
pub(crate) fn save(bench: &mut Bench) {
    for model in [Model::four_hundred(), Model::from_options(&bench.options)] {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let views = safetensors_peer::views(&model);
        let plain = safetensors_peer::encoded(&model);
        let payload = bytes::Bytes::from(plain);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let objects = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
        let clear = || clear(folder.path());
        let keep = || std::fs::rename(at("x.tssd"), at(LAST)).unwrap();
        bench.race(
            Race::new("save", "a new file, nobody waits for the disk", 11)
                .with_model(&model)
                .with_runner(
                    Runner::ours("tssd", || write(&model, &at("x.tssd")))
                        .with_setup(clear)
                        .with_teardown(keep)
                        .with_target(Target::Speed(1.0, "safetensors")),
                )
                .with_runner(
                    Runner::peer("safetensors", || {
                        safetensors::serialize_to_file(&views, None, &at("x.st")).unwrap();
                    })
                    .with_setup(clear),
                )
                .with_runner(
                    Runner::peer("object_store", || {
                        let put = async { objects.put(&"x".into(), payload.clone().into()).await };
                        runtime.block_on(put).unwrap();
                    })
                    .with_setup(clear),
                )
                .with_runner(
                    Runner::limit("write", || {
                        std::fs::write(at("x"), &payload).unwrap();
                    })
                    .with_setup(clear),
                ),
        );
        model.assert_equals(&Archive::open(at(LAST)).unwrap().to_state_dict().unwrap());
    }
}

/// Loads a file, and reads every byte once.
///
/// The limit is to read the file through a small buffer that stays in the cache of the core.
pub(crate) fn load(bench: &mut Bench) {
    for model in [Model::four_hundred(), Model::from_options(&bench.options)] {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write(&model, &at("x.tssd"));
        safetensors::serialize_to_file(safetensors_peer::views(&model), None, &at("x.st")).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let objects = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
        let lasts = [const { LastResult::new() }; 3];
        let [last, single_thread, copied] = &lasts;
        bench.race(
            Race::new(
                "load",
                "a file in the page cache, every byte looked at once; ours proves checksums",
                5,
            )
            .with_model(&model)
            .with_runner(
                Runner::ours(OURS, || last.replace_with(|| read(&at("x.tssd"), 2)))
                    .with_target(Target::Speed(1.0, THEIRS)),
            )
            .with_runner(Runner::variant("tssd, mapped, 1 thread", || {
                single_thread.replace_with(|| read(&at("x.tssd"), 1));
            }))
            .with_runner(Runner::variant("tssd, read, 2 threads", || {
                copied.replace_with(|| {
                    let archive = Archive::open(at("x.tssd")).unwrap();
                    verify(&archive, 2);
                    archive.to_state_dict().unwrap()
                });
            }))
            .with_runner(Runner::peer(THEIRS, || read_theirs(&at("x.st"))))
            .with_runner(Runner::peer("object_store", || {
                let get =
                    async { objects.get(&"x.st".into()).await.unwrap().bytes().await.unwrap() };
                black_box(runtime.block_on(get));
            }))
            .with_runner(Runner::limit("read 1 MiB at a time, 2 threads", || {
                read_in_pieces(&at("x.st"), 2, |_| {});
            })),
        );
        for last in &lasts {
            model.assert_equals(&last.take());
        }
    }
}

/// Measures the cost of a save and of a load per tensor and per byte.
pub(crate) fn fits(bench: &mut Bench) {
    let mut saves = Curve::fit("save", "a new file, nobody waits for the disk");
    let mut loads = Curve::fit("load", "a file in the page cache, every byte looked at once");
    for tensors in [100, 10_000] {
        for bytes in [16_000_000, 400_000_000] {
            let model = Model::uniform(tensors, bytes);
            let folder = tempfile::tempdir().unwrap();
            let at = |name: &str| folder.path().join(name);
            let views = safetensors_peer::views(&model);
            saves.measure_size(
                bench,
                (tensors, bytes),
                11,
                vec![
                    Runner::ours("tssd", || write(&model, &at("x.tssd")))
                        .with_setup(|| clear(folder.path()))
                        .with_teardown(|| std::fs::rename(at("x.tssd"), at(LAST)).unwrap()),
                    Runner::peer("safetensors", || {
                        safetensors::serialize_to_file(&views, None, &at("x.st")).unwrap();
                    })
                    .with_setup(|| clear(folder.path())),
                ],
            );
            safetensors::serialize_to_file(&views, None, &at("x.st")).unwrap();
            let last = LastResult::new();
            loads.measure_size(
                bench,
                (tensors, bytes),
                11,
                vec![
                    Runner::ours(OURS, || last.replace_with(|| read(&at(LAST), 2))),
                    Runner::peer(THEIRS, || read_theirs(&at("x.st"))),
                ],
            );
            // The last load has read the file of the last save.
            model.assert_equals(&last.take());
        }
    }
    saves.record(bench);
    loads.record(bench);
}

fn write(model: &Model, path: &Path) {
    let never_cancelled = || Ok::<(), Error>(());
    let layout = file::plan(&model.dict, &Options::new(), never_cancelled).unwrap();
    let replacement = Replacement::create(path, false).unwrap();
    file::write(&layout, &replacement, never_cancelled).unwrap();
    replacement.commit().unwrap();
}

#[expect(unsafe_code, reason = "maps are what users of safetensors have")]
fn read(path: &Path, threads: usize) -> StateDict {
    // SAFETY: as in `map`.
    let archive = unsafe { Archive::map(&File::open(path).unwrap()).unwrap() };
    verify(&archive, threads);
    archive.to_state_dict().unwrap()
}

fn read_theirs(path: &Path) {
    let map = map(path);
    for (_, view) in SafeTensors::deserialize(&map).unwrap().tensors() {
        sum_words(view.data());
    }
}

/// Maps a file.
#[expect(unsafe_code, reason = "maps are what users of safetensors have")]
pub(crate) fn map(path: &Path) -> Mmap {
    // SAFETY: only this process uses the temporary folder, and it does not write to the file while the map lives.
    unsafe { Mmap::map(&File::open(path).unwrap()).unwrap() }
}

/// Deletes all files except [`LAST`], and waits until the deletions are on disk.
fn clear(folder: &Path) {
    for entry in folder.read_dir().unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != LAST {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    rustix::fs::sync();
}
