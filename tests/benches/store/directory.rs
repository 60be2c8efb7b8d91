//! Durable versions in a directory: on disk before they become visible.

use std::fs::File;
use std::io::Write;

use object_store::ObjectStoreExt;
use object_store::local::LocalFileSystem;
use tssd_format::TorchStoreStateDict;
use tssd_store::GetOptions;
use tssd_store::blocking::Store;
use tssd_store::file::wait_for_deferred_drops;
use tssd_tests::bench::{Bench, LastResult, Model, Race, Runner, read_into};

use crate::copies::put_one;
use crate::key;

/// Puts and gets versions in a directory without a daemon.
pub(crate) fn put_and_get(bench: &mut Bench) {
    let model = Model::four_hundred();
    let folder = tempfile::tempdir().unwrap();
    let store = Store::directory(folder.path().join("store")).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let objects = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
    let encoded = TorchStoreStateDict::from_state_dict(&model.dict).unwrap().as_bytes().clone();
    let plain = folder.path().join("plain");
    let sync = |path: &std::path::Path| File::open(path).unwrap().sync_all().unwrap();
    bench.race(
        Race::new("put durable", "a version in a directory, on the disk at the end", 3)
            .with_model(&model)
            .with_runner(
                Runner::ours("tssd", || put_one(&store, &model))
                    .with_setup(wait_for_deferred_drops),
            )
            .with_runner(
                Runner::peer("object_store", || {
                    let put = async { objects.put(&"object".into(), encoded.clone().into()).await };
                    runtime.block_on(put).unwrap();
                    sync(&folder.path().join("object"));
                    sync(folder.path());
                })
                .with_setup(wait_for_deferred_drops),
            )
            .with_runner(
                Runner::limit("write", || {
                    let mut file = File::create(&plain).unwrap();
                    file.write_all(&encoded).unwrap();
                    file.sync_all().unwrap();
                    sync(folder.path());
                })
                .with_setup(|| {
                    drop(std::fs::remove_file(&plain));
                    wait_for_deferred_drops();
                }),
            ),
    );
    let get = || store.get_state_dict(&key(), &GetOptions::default()).unwrap().0;
    // The last result is dropped before the next version, outside the measured time.
    let (last, object) = (LastResult::new(), LastResult::new());
    let mut warm = vec![1; encoded.len()];
    bench.race(
        Race::new("get durable", "views of a version in a directory, page cache, verified", 3)
            .with_model(&model)
            .with_runner(Runner::ours("tssd", || last.replace_with(get)).with_setup(|| {
                last.clear();
                put_one(&store, &model);
            }))
            .with_runner(
                Runner::peer("object_store", || {
                    let get = async { objects.get(&"object".into()).await.unwrap().bytes().await };
                    object.replace_with(|| runtime.block_on(get).unwrap());
                })
                .with_setup(|| object.clear()),
            )
            .with_runner(Runner::limit("read into warm memory, 2 threads", || {
                read_into(&plain, &mut warm, 2);
            })),
    );
    model.assert_equals(&last.take());
    assert!(object.take() == encoded && warm == encoded, "what is read is what was written");
}
