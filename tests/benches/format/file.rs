//! Whole files: written without waiting for the disk, and loaded from the page cache.

use std::fs::File;
use std::hint::black_box;
use std::path::Path;

use memmap2::Mmap;
use object_store::ObjectStoreExt;
use object_store::local::LocalFileSystem;
use safetensors::SafeTensors;
use tssd_format::{Archive, Error, Options, StateDict};
use tssd_store::{Replacement, file};
use tssd_tests::bench::{Bench, Curve, Model, Race, Runner, Target, adding_up};

use crate::theirs;
use crate::verify::verify;

/// Each makes a file that was not there.
pub(crate) fn save(bench: &mut Bench) {
    for model in [Model::four_hundred(), Model::of(&bench.options)] {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let views = theirs::views(&model);
        let plain = theirs::encoded(&model);
        let payload = bytes::Bytes::from(plain);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let objects = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
        let clear = || clear(folder.path());
        bench.race(
            Race::new("save", "a new file, nobody waits for the disk", 11)
                .of(&model)
                .with(
                    Runner::ours("tssd", || write(&model, &at("x.tssd")))
                        .before(clear)
                        .target(Target::Speed(1.0, "safetensors")),
                )
                .with(
                    Runner::peer("safetensors", || {
                        safetensors::serialize_to_file(&views, None, &at("x.st")).unwrap();
                    })
                    .before(clear),
                )
                .with(
                    Runner::peer("object_store", || {
                        let put = async { objects.put(&"x".into(), payload.clone().into()).await };
                        runtime.block_on(put).unwrap();
                    })
                    .before(clear),
                )
                .with(
                    Runner::limit("write", || {
                        std::fs::write(at("x"), &payload).unwrap();
                    })
                    .before(clear),
                ),
        );
        write(&model, &at("x.tssd"));
        model.expect_same(&Archive::open(at("x.tssd")).unwrap().to_state_dict().unwrap());
    }
}

/// A load is over when every byte was looked at once.
pub(crate) fn load(bench: &mut Bench) {
    for model in [Model::four_hundred(), Model::of(&bench.options)] {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write(&model, &at("x.tssd"));
        safetensors::serialize_to_file(theirs::views(&model), None, &at("x.st")).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let objects = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
        bench.race(
            Race::new(
                "load",
                "a file in the page cache, every byte looked at once; ours proves checksums",
                5,
            )
            .of(&model)
            .with(
                Runner::ours("tssd, mapped", || {
                    black_box(read(&at("x.tssd"), 2));
                })
                .target(Target::Speed(1.0, "safetensors, mapped")),
            )
            .with(Runner::also("tssd, mapped, 1 thread", || {
                black_box(read(&at("x.tssd"), 1));
            }))
            .with(Runner::also("tssd, read", || {
                let archive = Archive::open(at("x.tssd")).unwrap();
                verify(&archive, 2);
                black_box(archive.to_state_dict().unwrap());
            }))
            .with(Runner::peer("safetensors, mapped", || {
                let map = map(&at("x.st"));
                for (_, view) in SafeTensors::deserialize(&map).unwrap().tensors() {
                    adding_up(view.data());
                }
            }))
            .with(Runner::peer("object_store", || {
                let get =
                    async { objects.get(&"x.st".into()).await.unwrap().bytes().await.unwrap() };
                black_box(runtime.block_on(get));
            }))
            .with(Runner::limit("read", || {
                black_box(std::fs::read(at("x.st")).unwrap());
            })),
        );
    }
}

/// What a save and a load cost by tensor and by byte.
pub(crate) fn fits(bench: &mut Bench) {
    let mut saves = Curve::fit("save", "a new file, nobody waits for the disk");
    let mut loads = Curve::fit("load", "a file in the page cache, every byte looked at once");
    for tensors in [100, 10_000] {
        for bytes in [16_000_000, 400_000_000] {
            let model = Model::uniform(tensors, bytes);
            let folder = tempfile::tempdir().unwrap();
            let at = |name: &str| folder.path().join(name);
            let views = theirs::views(&model);
            saves.at_size(
                bench,
                (tensors, bytes),
                5,
                vec![
                    Runner::ours("tssd", || write(&model, &at("x.tssd")))
                        .before(|| clear(folder.path())),
                    Runner::peer("safetensors", || {
                        safetensors::serialize_to_file(&views, None, &at("x.st")).unwrap();
                    })
                    .before(|| clear(folder.path())),
                ],
            );
            write(&model, &at("x.tssd"));
            safetensors::serialize_to_file(&views, None, &at("x.st")).unwrap();
            loads.at_size(
                bench,
                (tensors, bytes),
                5,
                vec![
                    Runner::ours("tssd", || {
                        black_box(read(&at("x.tssd"), 2));
                    }),
                    Runner::peer("safetensors", || {
                        let map = map(&at("x.st"));
                        for (_, view) in SafeTensors::deserialize(&map).unwrap().tensors() {
                            adding_up(view.data());
                        }
                    }),
                ],
            );
        }
    }
    saves.record(bench);
    loads.record(bench);
}

fn write(model: &Model, path: &Path) {
    let goes_on = || Ok::<(), Error>(());
    let layout = file::plan(&model.dict, &Options::new(), goes_on).unwrap();
    let replacement = Replacement::create(path, false).unwrap();
    file::write(&layout, &replacement, goes_on).unwrap();
    replacement.commit().unwrap();
}

#[expect(unsafe_code, reason = "maps are what users of safetensors have")]
fn read(path: &Path, threads: usize) -> StateDict {
    // SAFETY: as of `map`.
    let archive = unsafe { Archive::map(&File::open(path).unwrap()).unwrap() };
    verify(&archive, threads);
    archive.to_state_dict().unwrap()
}

/// A map of a file that nobody changes.
#[expect(unsafe_code, reason = "maps are what users of safetensors have")]
pub(crate) fn map(path: &Path) -> Mmap {
    // SAFETY: this process alone has the folder, and writes nothing while the map lives.
    unsafe { Mmap::map(&File::open(path).unwrap()).unwrap() }
}

/// Takes away what was written before, and waits until the disk has parted with it.
fn clear(folder: &Path) {
    for entry in folder.read_dir().unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    rustix::fs::sync();
}
