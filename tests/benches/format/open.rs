//! Opening: validation of all names, shapes and offsets, and the checksum of the index.

use std::hint::black_box;

use safetensors::SafeTensors;
use tssd_format::{Archive, TorchStoreStateDict};
use tssd_tests::bench::{Bench, LastResult, Model, Race, Runner, Target};

use crate::safetensors_peer;

/// Opens archives in memory. The peer is safetensors, which reads names and shapes without checksums.
///
/// Also opens archives with more tensors than safetensors supports.
pub(crate) fn open_archives(bench: &mut Bench) {
    for (tensors, rounds, speed) in [(30_000, 31, Some(20.0)), (232_670, 9, None)] {
        let model = Model::experts(tensors, 4);
        let ours = encoded(&model);
        let theirs = safetensors_peer::encoded(&model);
        let last = LastResult::new();
        let open = Runner::ours("tssd", || {
            last.replace_with(|| Archive::from_bytes(black_box(ours.clone())).unwrap());
        });
        let peer = "safetensors";
        let open = match speed {
            Some(speed) => open.with_target(Target::Speed(speed, peer)),
            None => open,
        };
        let what = "an archive in memory: all names, shapes and places";
        let race =
            Race::new("open", what, rounds).with_tensors(&model.name, tensors).with_runner(open);
        bench.race(race.with_runner(Runner::peer(peer, || {
            black_box(SafeTensors::deserialize(black_box(&theirs)).unwrap());
        })));
        model.assert_equals(&last.take().to_state_dict().unwrap());
    }
    million_tensors(bench);
}

/// Opens an archive of a million tensors, which safetensors refuses, from memory and page cache.
fn million_tensors(bench: &mut Bench) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("million.tssd");
    let model = Model::experts(1_000_000, 4);
    let ours = encoded(&model);
    std::fs::write(&path, &ours).unwrap();
    let index = usize::try_from(Archive::from_bytes(ours.clone()).unwrap().index_range().start);
    let index = ours.slice(index.unwrap()..);
    let mut copy = index.to_vec();
    let (last, last_of_file) = (LastResult::new(), LastResult::new());
    bench.race(
        Race::new(
            "open a million",
            "an archive of more tensors than safetensors takes, in memory",
            9,
        )
        .with_tensors(&model.name, model.tensors)
        .with_runner(
            Runner::ours("tssd", || {
                last.replace_with(|| Archive::from_bytes(black_box(ours.clone())).unwrap());
            })
            .with_target(Target::Milliseconds(120.0)),
        )
        .with_runner(
            Runner::variant("tssd, a file", || {
                last_of_file.replace_with(|| Archive::open(&path).unwrap());
            })
            .with_target(Target::Milliseconds(300.0)),
        )
        .with_runner(Runner::limit("memcpy, the index", || {
            black_box(&mut copy).copy_from_slice(&index);
        })),
    );
    for archive in [last.take(), last_of_file.take()] {
        model.assert_equals(&archive.to_state_dict().unwrap());
    }
}

fn encoded(model: &Model) -> bytes::Bytes {
    TorchStoreStateDict::from_state_dict(&model.dict).unwrap().as_bytes().clone()
}
