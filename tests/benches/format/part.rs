//! Reads of a part of a file, as by the ranks of an inference engine.

use std::fs::File;
use std::os::unix::fs::FileExt;

use safetensors::SafeTensors;
use safetensors::slice::IndexOp;
use tssd_format::{Archive, Node, TorchStoreStateDict};
use tssd_tests::bench::{Bench, LastResult, Model, Race, Runner, Target};

use crate::file::map;
use crate::safetensors_peer;

const NAME: &str = "layers.200.weight";

/// Opens a file, and copies one tensor into new memory.
pub(crate) fn copy_one_tensor(bench: &mut Bench) {
    part(bench, "one tensor", "open a file, copy one tensor of 400", 1..1);
}

/// Opens a file, and copies 5 % of the rows of one tensor into new memory.
pub(crate) fn copy_rows(bench: &mut Bench) {
    part(bench, "slice", "open a file, copy 5 % of one tensor of 400", 32..64);
}

/// Races the copy of these rows of one tensor. An empty range selects all rows.
fn part(bench: &mut Bench, case: &str, what: &str, rows: std::ops::Range<usize>) {
    let model = Model::four_hundred();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let ours = TorchStoreStateDict::from_state_dict(&model.dict).unwrap();
    std::fs::write(at("x.tssd"), ours.as_bytes()).unwrap();
    std::fs::write(at("x.st"), safetensors_peer::encoded(&model)).unwrap();
    let Node::Tensors(run) = ours.archive().node(NAME).unwrap() else { panic!("a tensor") };
    let shape: Vec<usize> =
        run[0].meta.shape().iter().map(|&size| usize::try_from(size).unwrap()).collect();
    let rows = if rows.is_empty() { 0..shape[0] } else { rows };
    let row = 2 * u64::try_from(shape[1]).unwrap();
    let part = u64::try_from(rows.start).unwrap() * row..u64::try_from(rows.end).unwrap() * row;
    let offset = ours.archive().storage(run[0].storage.unwrap()).offset + part.start;
    let read_ours = || {
        let archive = Archive::open(at("x.tssd")).unwrap();
        let Node::Tensors(run) = archive.node(NAME).unwrap() else { panic!("a tensor") };
        archive.storage_range(run[0].storage.unwrap(), part.clone()).unwrap().to_vec()
    };
    let read_theirs = || {
        let map = map(&at("x.st"));
        let file = SafeTensors::deserialize(&map).unwrap();
        let view = file.tensor(NAME).unwrap();
        view.slice(rows.clone()).unwrap().collect::<Vec<_>>().concat()
    };
    let read_plain = || {
        let mut bytes = vec![0; usize::try_from(part.end - part.start).unwrap()];
        File::open(at("x.tssd")).unwrap().read_exact_at(&mut bytes, offset).unwrap();
        bytes
    };
    let lasts = [LastResult::new(), LastResult::new(), LastResult::new()];
    let [last, theirs, plain] = &lasts;
    bench.race(
        Race::new(case, what, 31)
            .with_tensors(&model.name, model.tensors)
            .with_bytes(part.end - part.start)
            .with_runner(
                Runner::ours("tssd", || last.replace_with(read_ours))
                    .with_target(Target::Speed(1.0, "safetensors")),
            )
            .with_runner(Runner::peer("safetensors", || theirs.replace_with(read_theirs)))
            .with_runner(Runner::limit("pread", || plain.replace_with(read_plain))),
    );
    let tensors = model.tensors();
    let (_, tensor) = tensors.iter().find(|(name, _)| name == NAME).unwrap();
    let [start, end] = [part.start, part.end].map(|byte| usize::try_from(byte).unwrap());
    let source = &tensor.view().contiguous_bytes().unwrap()[start..end];
    assert!(lasts.iter().all(|last| last.take() == source), "what is read is what was written");
}
