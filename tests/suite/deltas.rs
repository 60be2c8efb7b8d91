//! Deltas between versions: made, applied and folded as archives.

use bytes::Bytes;
use proptest::prelude::*;
use tssd_format::{
    Archive, Compression, DeltaClasses, DeltaDraft, DeltaJob, Dtype, ErrorKind, Node, Options,
    Result, Shard, ShardSpec, StateDict, Storage, Tensor, TensorMeta, TensorSlice,
    TorchStoreStateDict, Value,
};
use tssd_tests::checksums::repair_checksums;
use tssd_tests::generate;

use super::cli::Sandbox;

fn encode(dict: &StateDict, options: &Options) -> Archive {
    TorchStoreStateDict::with_options(dict, options).unwrap().archive().clone()
}

fn plain(dict: &StateDict) -> Archive {
    encode(dict, &Options::new().allow_opaque())
}

fn write(draft: DeltaDraft) -> Result<Bytes> {
    let mut file = Vec::new();
    draft.plan()?.write_to(&mut file)?;
    Ok(file.into())
}

fn delta_file(base: &Archive, result: &Archive, classes: DeltaClasses) -> Bytes {
    write(DeltaDraft::between(base, result, classes).unwrap()).unwrap()
}

fn delta(base: &Archive, result: &Archive) -> Archive {
    Archive::from_bytes(delta_file(base, result, DeltaClasses::One)).unwrap()
}

fn fold(first: &Archive, second: &Archive) -> Result<Archive> {
    Archive::from_bytes(write(DeltaDraft::fold(first, second)?)?)
}

fn apply(delta: &Archive, base: &Archive) -> Result<StateDict> {
    let applied = delta.clone().with_base(base.clone())?;
    applied.verify_deep()?;
    applied.to_state_dict()
}

/// A dict of one bf16 tensor.
fn weights(elements: &[u16]) -> StateDict {
    let bytes: Vec<u8> = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
    let meta = TensorMeta::new(Dtype::Bfloat16, &[elements.len() as u64]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::new(meta, Storage::from(bytes), 0).unwrap());
    dict
}

/// Bit patterns of bf16 that look like weights.
fn elements(count: usize) -> Vec<u16> {
    let mixed = |at: usize| (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    let element = |at| {
        let [.., low, sign, exponent] = mixed(at + 1);
        u16::from(sign & 1) << 15
            | (120 - exponent.trailing_zeros() as u16) << 7
            | u16::from(low >> 1)
    };
    (0..count).map(element).collect()
}

/// Adds 1 to one of `every` elements.
fn step(elements: &[u16], every: usize, offset: usize) -> Vec<u16> {
    let change = |(at, element): (usize, &u16)| element + u16::from(at % every == offset % every);
    elements.iter().enumerate().map(change).collect()
}

/// Returns the archive with other bytes in its tensors: one of `every` changes.
fn with_changed_tensors(archive: &Archive, file: &[u8], every: u64, seed: u64) -> Archive {
    let mut file = file.to_vec();
    for (_, node) in archive.leaves() {
        if !matches!(node, Node::Tensors(_)) {
            continue;
        }
        for number in node.storages() {
            for at in archive.storage(number).stored_range() {
                let mixed = (at ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
                if mixed.is_multiple_of(every) {
                    let byte = &mut file[at as usize];
                    *byte = byte.wrapping_add(1 + (mixed >> 16 & 3) as u8);
                }
            }
        }
    }
    // Reading uncompressed tensors does not look at the checksums, which are wrong now.
    plain(&Archive::from_bytes(file).unwrap().to_state_dict().unwrap())
}

fn classes() -> impl Strategy<Value = DeltaClasses> {
    use DeltaClasses::{Auto, Four, One, Two};
    prop::sample::select(vec![One, Two, Four, Auto])
}

fn options() -> impl Strategy<Value = Options> {
    use Compression::{None, Planes, ShuffledZstd, Tiers};
    let compressions = vec![None, ShuffledZstd, Planes, Tiers];
    (prop::sample::select(compressions), any::<bool>()).prop_map(|(compression, digests)| {
        let options = Options::new().allow_opaque().compress(compression);
        if digests { options.digests() } else { options }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn delta_turns_base_into_result(
        dict in generate::state_dict(),
        every in prop::sample::select(vec![1_u64, 7, 100]),
        seed: u64,
        base_options in options(),
        result_options in options(),
        classes in classes(),
    ) {
        let encoded = TorchStoreStateDict::with_options(&dict, &Options::new().allow_opaque()).unwrap();
        let changed = with_changed_tensors(encoded.archive(), encoded.as_bytes(), every, seed);
        let base = encode(&encoded.to_state_dict().unwrap(), &base_options);
        let result = encode(&changed.to_state_dict().unwrap(), &result_options);

        let delta = Archive::from_bytes(delta_file(&base, &result, classes)).unwrap();
        delta.verify_deep().unwrap();
        let digest = result.compute_content_digest().unwrap();
        prop_assert_eq!(delta.content_digest(), Some(digest));
        prop_assert_eq!(delta.base_digest(), Some(base.compute_content_digest().unwrap()));
        prop_assert_eq!(delta.structure().into_leaves().len(), result.leaves().len());
        let applied = delta.with_base(base).unwrap();
        applied.verify_deep().unwrap();
        prop_assert_eq!(applied.compute_content_digest().unwrap(), digest);
        prop_assert!(applied.to_state_dict().unwrap() == result.to_state_dict().unwrap());
    }

    #[test]
    fn folded_delta_has_the_effect_of_both(
        dict in generate::state_dict(),
        every in prop::sample::select(vec![1_u64, 7, 100]),
        seeds: [u64; 2],
        change_dict: bool,
    ) {
        let encoded = TorchStoreStateDict::with_options(&dict, &Options::new().allow_opaque()).unwrap();
        let base = encoded.archive();
        let second = with_changed_tensors(base, encoded.as_bytes(), 10, seeds[0]);
        let mut third = with_changed_tensors(base, encoded.as_bytes(), every, seeds[1]);
        if change_dict {
            let mut dict = third.to_state_dict().unwrap();
            dict.insert("new", Tensor::from_slice(&[1_u8; 1000], &[1000]).unwrap());
            third = plain(&dict);
        }
        let folded = fold(&delta(base, &second), &delta(&second, &third)).unwrap();
        folded.verify_deep().unwrap();
        prop_assert_eq!(folded.content_digest(), Some(third.compute_content_digest().unwrap()));
        prop_assert!(apply(&folded, base).unwrap() == third.to_state_dict().unwrap());
    }
}

#[test]
fn chunks_of_8_mib_are_independent() {
    let old = elements(10_000_000);
    let mut new = step(&old, 150, 0);
    // The second chunk stays as it is, except for one element; the third does not change.
    new[4_194_304..].copy_from_slice(&old[4_194_304..]);
    new[5_000_000] ^= 1;
    let [base, result] = [&old, &new].map(|elements| plain(&weights(elements)));
    for (classes, max) in [(DeltaClasses::One, 60_000), (DeltaClasses::Four, 60_000)] {
        let delta = Archive::from_bytes(delta_file(&base, &result, classes)).unwrap();
        let storage = delta.storage(0);
        let lens: Vec<u64> = (0..3)
            .map(|chunk| storage.stored_chunk(chunk))
            .map(|range| range.end - range.start)
            .collect();
        assert!(lens[0] < max && lens[1] < 1000 && lens[2] == 0, "{lens:?}");
        let applied = delta.with_base(base.clone()).unwrap();
        applied.verify_deep().unwrap();
        // A range touches one chunk.
        let part = applied.storage_range(0, 10_000_000..10_000_002).unwrap();
        assert_eq!(part, new[5_000_000].to_le_bytes()[..]);
        assert!(applied.to_state_dict().unwrap() == weights(&new));
    }
}

#[test]
fn unchanged_tensors_take_no_bytes() {
    let mut dict = weights(&elements(100_000));
    dict.insert("frozen", Tensor::from_slice(&[7_u64; 1000], &[1000]).unwrap());
    let base = plain(&dict);
    let delta = delta(&base, &base);
    assert_eq!(delta.storage_count(), 2);
    assert!((0..2).all(|number| delta.storage(number).stored_len() == 0));
    assert!(delta.file_len() < 5_000);
    assert!(apply(&delta, &base).unwrap() == dict);
}

#[test]
fn tensors_of_another_shape_or_dtype_are_whole() {
    let numbers = [3_u16; 1000];
    let with = |name: &str, tensor: Tensor| {
        let mut dict = weights(&numbers);
        dict.insert(name, tensor);
        dict
    };
    let base = plain(&with("other", Tensor::from_slice(&numbers, &[1000]).unwrap()));
    for (name, tensor) in [
        ("other", Tensor::from_slice(&numbers, &[10, 100]).unwrap()),
        ("other", Tensor::from_slice(&[3_i16; 1000], &[1000]).unwrap()),
        ("other", Tensor::from_slice(&numbers[..999], &[999]).unwrap()),
        ("renamed", Tensor::from_slice(&numbers, &[1000]).unwrap()),
    ] {
        let dict = with(name, tensor);
        let delta = delta(&base, &plain(&dict));
        assert_eq!(delta.storage(0).base, Some(0), "{name}");
        assert_eq!(delta.storage(1).base, None, "{name}");
        assert!(!delta.tensor(name).unwrap().meta().shape().is_empty());
        assert!(apply(&delta, &base).unwrap() == dict);
    }
}

#[test]
fn tied_and_strided_tensors_and_shards_stay_what_they_are() {
    let version = |add: u16| {
        let storage = Storage::from(
            step(&elements(10_000), 50, 0)
                .iter()
                .enumerate()
                .flat_map(|(at, element)| (element + u16::from(at % 77 == 0) * add).to_le_bytes())
                .collect::<Vec<u8>>(),
        );
        let meta = |shape: &[u64]| TensorMeta::new(Dtype::Bfloat16, shape).unwrap();
        let tensor = |meta: TensorMeta| Tensor::new(meta, storage.clone(), 0).unwrap();
        let mut dict = StateDict::new();
        dict.insert("weight", tensor(meta(&[100, 100])));
        dict.insert("tied", tensor(meta(&[100, 100])));
        dict.insert("columns", tensor(meta(&[100, 100]).with_strides(&[1, 100]).unwrap()));
        let slice = TensorSlice::new(&[2, 0], &[2, 80], &[4, 80]).unwrap();
        let mut local = [0_u16; 160];
        local[7] = add;
        let local = Tensor::from_slice(&local, &[2, 80]).unwrap();
        dict.insert("shard", Shard::new(local, ShardSpec::new(slice)).unwrap());
        dict
    };
    let (base, result) = (plain(&version(0)), plain(&version(1)));
    let delta = delta(&base, &result);
    assert_eq!([0, 1].map(|number| delta.storage(number).base), [Some(0), Some(1)]);
    assert!(apply(&delta, &base).unwrap() == version(1));
}

#[test]
fn nan_payloads_signs_of_zero_and_zeros_are_exact() {
    let zeros = vec![0; 70_000];
    let bits: Vec<u16> = (0..=u16::MAX).chain(0..4464).collect();
    for (old, new) in
        [(&zeros, &bits), (&bits, &zeros), (&bits, &bits.iter().rev().copied().collect())]
    {
        let [base, result] = [old, new].map(|elements| plain(&weights(elements)));
        assert!(apply(&delta(&base, &result), &base).unwrap() == weights(new));
    }
}

#[test]
fn wrong_bases_are_refused_before_anything_is_decoded() {
    let [first, second, third]: [Archive; 3] =
        [0, 1, 2].map(|offset| plain(&weights(&step(&elements(200_000), 100, offset))));
    let delta = delta(&first, &second);
    // Half of the blocks have the result, the others the base.
    let [mut half, new] =
        [&first, &second].map(|archive| archive.storage_bytes(0).unwrap().to_vec());
    half[..131_072].copy_from_slice(&new[..131_072]);
    let half: Vec<u16> =
        half.chunks(2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]])).collect();
    let cases = [
        ("another version", third.clone(), "content"),
        ("the result", second.clone(), "result already"),
        ("a target that is half done", plain(&weights(&half)), "content"),
        ("another tree", plain(&StateDict::new()), "content"),
    ];
    for (name, base, detail) in cases {
        let error = delta.clone().with_base(base).expect_err(name);
        assert_eq!(error.kind(), ErrorKind::WrongBase, "{name}: {error}");
        assert!(error.to_string().contains(detail), "{name}: {error}");
    }
    let error = third.with_base(first.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotADelta);
    // A base that is the result already is taken for the result.
    let result = delta.clone().result_from(second.clone()).unwrap();
    assert!(result.base().is_none() && result.base_digest().is_none());
    assert!(delta.clone().result_from(first).unwrap().base().is_some());
    // A base must be readable.
    let error = delta.clone().with_base(delta).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BaseMissing);
}

/// The digest of a base can be right although its storages are not those that the delta names.
#[test]
fn base_storages_must_exist_and_have_the_right_length() {
    let [first, second]: [Archive; 2] =
        [0, 1].map(|offset| plain(&weights(&step(&elements(500), 20, offset))));
    let mut file = delta_file(&first, &second, DeltaClasses::One).to_vec();
    // The entry of `base_storages` is followed by the root.
    let entry = file.len() - 64 - 152 - 4;
    file[entry] = 7;
    repair_checksums(&mut file);
    let error = Archive::from_bytes(file).unwrap().with_base(first).unwrap_err();
    assert_eq!((error.kind(), error.path()), (ErrorKind::WrongBase, Some("weight")));
    assert!(error.to_string().contains("no such storage"), "{error}");
}

#[test]
fn delta_without_its_base_is_listed_and_verified_but_not_read() {
    let mut dict = weights(&elements(100_000));
    let base = plain(&dict);
    dict.insert("name", "a value");
    dict.insert("new", Tensor::from_slice(&[1.5_f32; 500], &[500]).unwrap());
    let mut result = weights(&step(&elements(100_000), 100, 3));
    result.insert("name", "a value");
    result.insert("new", Tensor::from_slice(&[1.5_f32; 500], &[500]).unwrap());
    let delta = delta(&base, &plain(&result));
    delta.verify_deep().unwrap();
    assert!(delta.lacks_base());
    assert_eq!(delta.leaves().len(), 3);
    assert_eq!(delta.leaf("name").unwrap(), Value::from("a value"));
    assert_eq!(delta.tensor("new").unwrap().meta().shape(), [500]);
    for error in [delta.tensor("weight").unwrap_err(), delta.to_state_dict().unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::BaseMissing);
        assert!(error.to_string().contains("weight"), "{error}");
    }
    let changes = delta.count_changes(&delta.storage(0)).unwrap();
    assert_eq!((changes.listed, changes.dense), (1000, 0));
}

#[test]
fn damage_of_the_base_is_found_and_names_the_leaf() {
    let old = elements(100_000);
    let file =
        TorchStoreStateDict::with_options(&weights(&old), &Options::new().digests()).unwrap();
    let base = file.archive().clone();
    let result = plain(&weights(&step(&old, 100, 0)));
    let mut damaged = file.as_bytes().to_vec();
    damaged[base.storage(0).offset as usize + 70_001] ^= 1;
    let damaged = Archive::from_bytes(damaged).unwrap();
    let delta = delta(&base, &result);
    // The digest in the index of the base is the right one. The bytes are not.
    let error = delta.with_base(damaged.clone()).unwrap().to_state_dict().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeltaMismatch);
    assert!(error.to_string().contains("weight"), "{error}");
    // A delta that changes nothing has no checksums of blocks. Verification finds the damage.
    let unchanged = Archive::from_bytes(delta_file(&base, &base, DeltaClasses::One)).unwrap();
    let error = unchanged.with_base(damaged.clone()).unwrap().verify_deep().unwrap_err();
    assert_eq!((error.kind(), error.path()), (ErrorKind::StorageCorrupt, Some("weight")));
    // No delta is made from damaged versions.
    for (base, result) in [(&damaged, &result), (&result, &damaged)] {
        let error =
            write(DeltaDraft::between(base, result, DeltaClasses::One).unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageCorrupt, "{error}");
        assert_eq!(error.path(), Some("weight"));
    }
}

/// Damage of what a delta has whole is found when the delta is made or folded, and does not get new checksums.
#[test]
fn damage_of_whole_storages_is_found() {
    let empty = plain(&StateDict::new());
    let file = TorchStoreStateDict::from_state_dict(&weights(&elements(300))).unwrap();
    let version = file.archive().clone();
    let mut damaged = file.as_bytes().to_vec();
    damaged[version.storage(0).offset as usize + 5] ^= 1;
    let damaged = Archive::from_bytes(damaged).unwrap();
    let error =
        write(DeltaDraft::between(&empty, &damaged, DeltaClasses::One).unwrap()).unwrap_err();
    assert_eq!((error.kind(), error.path()), (ErrorKind::StorageCorrupt, Some("weight")));

    let mut file = delta_file(&empty, &version, DeltaClasses::One).to_vec();
    let first = Archive::from_bytes(file.clone()).unwrap();
    assert_eq!(first.storage(0).base, None);
    file[first.storage(0).offset as usize + 5] ^= 1;
    let damaged = Archive::from_bytes(file).unwrap();
    let unchanged = delta(&version, &version);
    let emptied = delta(&empty, &empty);
    for (first, second) in [(&damaged, &unchanged), (&emptied, &damaged)] {
        let error = fold(first, second).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::StorageCorrupt | ErrorKind::ChunkCorrupt),
            "{error}"
        );
        assert_eq!(error.path(), Some("weight"));
    }
}

#[test]
fn eight_deltas_fold_to_the_file_of_the_direct_delta() {
    let mut versions = vec![elements(150_000)];
    for offset in 0..8 {
        versions.push(step(versions.last().unwrap(), 200, 31 * offset));
    }
    let archives: Vec<Archive> =
        versions.iter().map(|elements| plain(&weights(elements))).collect();
    let deltas: Vec<Archive> = archives.windows(2).map(|pair| delta(&pair[0], &pair[1])).collect();
    let folded =
        deltas[1..].iter().fold(deltas[0].clone(), |folded, next| fold(&folded, next).unwrap());
    let direct = delta(&archives[0], &archives[8]);
    assert_eq!(folded.index_bytes(), direct.index_bytes());
    assert_eq!(folded.file_len(), direct.file_len());
    assert!(apply(&folded, &archives[0]).unwrap() == weights(&versions[8]));
}

/// Folds deltas whose sparse and dense blocks meet in all ways, in one chunk of several blocks.
#[test]
fn folds_of_dense_and_sparse_blocks_are_legal_and_right() {
    const BLOCK: usize = 65_536;
    let noise = |at: usize| (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
    let base = elements(2 * BLOCK + 1000);
    // Which elements change: none, few, half, or all of a block.
    let change = |old: &[u16], seed: usize, parts: [usize; 2]| -> Vec<u16> {
        let change = |(at, element): (usize, &u16)| {
            let (block, place) = (at / BLOCK % 2, at % BLOCK);
            let is_changed = match parts[block] {
                0 => false,
                1 => place % 100 == seed % 100,
                2 => (place < BLOCK / 2) == seed.is_multiple_of(2),
                _ => true,
            };
            if is_changed { noise(at * 7 + seed) as u16 } else { *element }
        };
        old.iter().enumerate().map(change).collect()
    };
    let cases = (0..4).flat_map(|one| (0..4).map(move |other| [one, other]));
    for (number, first_parts) in cases.enumerate() {
        let second_parts = [(first_parts[1] + number) % 4, first_parts[0]];
        let next = change(&base, number, first_parts);
        let last = change(&next, number + 1, second_parts);
        let [base, next, last] = [&base, &next, &last].map(|elements| plain(&weights(elements)));
        let folded = fold(&delta(&base, &next), &delta(&next, &last)).unwrap();
        folded.verify_deep().unwrap();
        assert_eq!(folded.content_digest(), Some(last.compute_content_digest().unwrap()));
        let expected = last.to_state_dict().unwrap();
        assert!(apply(&folded, &base).unwrap() == expected, "{first_parts:?} {second_parts:?}");
        assert!(folded.file_len() < 2 * last.file_len());
    }
}

#[test]
fn fold_takes_storages_that_the_first_delta_has_whole() {
    let old = elements(3000);
    let base = plain(&StateDict::new());
    let [first, second] = [&old, &step(&old, 50, 0)].map(|elements| plain(&weights(elements)));
    // The second delta changes the storage, or leaves it as it is.
    for (next, elements) in [(&second, step(&old, 50, 0)), (&first, old.clone())] {
        let folded = fold(&delta(&base, &first), &delta(&first, next)).unwrap();
        assert_eq!(folded.storage(0).base, None);
        assert!(apply(&folded, &base).unwrap() == weights(&elements));
    }
}

#[test]
fn deltas_that_do_not_meet_are_not_folded() {
    let archives = [0, 1, 2].map(|offset| plain(&weights(&step(&elements(70_000), 100, offset))));
    let [first, second, third] = &archives;
    let one = delta(first, second);
    for (left, right) in [(&one, &delta(first, third)), (&one, &one)] {
        assert_eq!(fold(left, right).unwrap_err().kind(), ErrorKind::WrongBase);
    }
    for (left, right) in [(&one, second), (second, &one)] {
        assert_eq!(fold(left, right).unwrap_err().kind(), ErrorKind::NotADelta);
    }
}

#[test]
fn deltas_of_several_classes_are_not_folded() {
    // Small weights change often, large ones rarely.
    let old = elements(200_000);
    let change = |(at, element): (usize, &u16)| {
        element + u16::from(at % 3 == 0 && element & 0x7F80 < 117 << 7)
    };
    let new: Vec<u16> = old.iter().enumerate().map(change).collect();
    let [base, result] = [&old, &new].map(|elements| plain(&weights(elements)));
    let four = Archive::from_bytes(delta_file(&base, &result, DeltaClasses::Four)).unwrap();
    let back = delta(&result, &base);
    let error = fold(&four, &back).unwrap_err();
    assert_eq!((error.kind(), error.path()), (ErrorKind::NotFoldable, Some("weight")));
}

#[test]
fn bases_can_be_deltas() {
    let versions: Vec<Vec<u16>> =
        (0..4).map(|offset| step(&elements(50_000), 100, offset)).collect();
    let archives: Vec<Archive> =
        versions.iter().map(|elements| plain(&weights(elements))).collect();
    let mut current = archives[0].clone();
    for (next, elements) in archives[1..].iter().zip(&versions[1..]) {
        current = delta(&current, next).with_base(current).unwrap();
        assert!(current.to_state_dict().unwrap() == weights(elements));
    }
    current.verify_deep().unwrap();
}

#[test]
fn damaged_deltas_are_refused_without_a_panic() {
    let old = elements(3000);
    let [base, result] = [&old, &step(&old, 20, 0)].map(|elements| plain(&weights(elements)));
    let file = delta_file(&base, &result, DeltaClasses::Auto).to_vec();
    let expected = result.storage_bytes(0).unwrap();
    for at in 0..file.len() {
        for bit in [1, 0x80] {
            let mut damaged = file.clone();
            damaged[at] ^= bit;
            assert!(Archive::from_bytes(damaged.clone()).and_then(|delta| delta.verify()).is_err());
            // With a right checksum of the index, what is read is refused or right.
            repair_checksums(&mut damaged);
            let Ok(delta) = Archive::from_bytes(damaged) else { continue };
            let _ = delta.verify_deep();
            if let Ok(applied) = delta.with_base(base.clone())
                && applied.verify_deep().is_ok()
            {
                assert!(applied.storage_bytes(0).unwrap() == expected, "byte {at}");
            }
        }
    }
}

/// Tests that all jobs of a draft can run at the same time.
#[test]
fn jobs_run_on_any_thread() {
    let old = elements(9_000_000);
    let mut versions = [old.clone(), step(&old, 300, 0)].map(|elements| weights(&elements));
    for dict in &mut versions {
        dict.insert("text", "long".repeat(10_000));
    }
    let [base, result] = versions.each_ref().map(plain);
    let draft = DeltaDraft::between(&base, &result, DeltaClasses::One).unwrap();
    assert!(draft.jobs().iter().map(DeltaJob::len).sum::<u64>() >= 18_000_000);
    let chunks: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            draft.jobs().iter().rev().map(|job| scope.spawn(|| job.run().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut file = Vec::new();
    draft.into_layout(chunks).unwrap().write_to(&mut file).unwrap();
    assert_eq!(file, delta_file(&base, &result, DeltaClasses::One));
    let draft = DeltaDraft::between(&base, &result, DeltaClasses::One).unwrap();
    assert_eq!(draft.into_layout([]).unwrap_err().kind(), ErrorKind::Unfilled);
}

/// Runs `delta make`, `apply` and `fold` as a user does.
#[test]
fn command_makes_applies_and_folds_deltas() {
    let sandbox = Sandbox::new();
    let versions: Vec<Vec<u16>> =
        (0..3).map(|offset| step(&elements(30_000), 100, offset)).collect();
    for (number, elements) in versions.iter().enumerate() {
        sandbox.write_dict(&format!("{number}.tssd"), &weights(elements));
    }
    let made = sandbox.run_with_code(0, "delta make 0.tssd 1.tssd -o 01.tssd");
    assert!(made.contains("600 elements changed one by one, 0 elements in dense blocks"), "{made}");
    sandbox.run_with_code(0, "delta make 1.tssd 2.tssd -o 12.tssd --classes 1");
    sandbox.run_with_code(0, "delta fold 01.tssd 12.tssd -o 02.tssd");
    sandbox.run_with_code(0, "delta apply 0.tssd 02.tssd -o again.tssd");
    sandbox.run_with_code(0, "diff --values 2.tssd again.tssd");
    sandbox.run_with_code(0, "verify --deep again.tssd 02.tssd");
    sandbox.run_with_code(0, "verify --deep 02.tssd --base 0.tssd");
    sandbox.run_with_code(0, "diff 2.tssd 02.tssd --base 0.tssd");
    let tree = sandbox.run_with_code(0, "inspect 02.tssd");
    assert!(tree.contains("delta 60.0 kB -> ") && tree.contains("delta of base blake3:"), "{tree}");
    // A base that is the result already is written once more, also if it has no digests.
    let copied = sandbox.run_with_code(0, "delta apply 2.tssd 02.tssd -o copy.tssd");
    assert!(copied.contains("the base was the result already"), "{copied}");
    sandbox.run_with_code(0, "diff --values 2.tssd copy.tssd");
    let copied = sandbox.run_with_code(0, "delta apply again.tssd 02.tssd -o copy.tssd --force");
    assert!(copied.contains("the base was the result already"), "{copied}");
    assert_eq!(sandbox.read("copy.tssd"), sandbox.read("again.tssd"));
}

#[test]
fn command_refuses_wrong_bases_and_leaves_no_file() {
    let sandbox = Sandbox::new();
    for number in 0..3 {
        let elements = step(&elements(30_000), 100, number);
        sandbox.write_dict(&format!("{number}.tssd"), &weights(&elements));
    }
    sandbox.run_with_code(0, "delta make 0.tssd 1.tssd -o 01.tssd");
    let before = sandbox.file_names();
    for (command, code, words) in [
        ("delta apply 2.tssd 01.tssd -o out.tssd", 5, "WrongBase"),
        (
            "delta apply 0.tssd 1.tssd -o out.tssd",
            5,
            "1.tssd is no delta\nhelp: the base comes first",
        ),
        ("delta apply 01.tssd 01.tssd -o out.tssd", 5, "BaseMissing"),
        ("delta make 01.tssd 1.tssd -o out.tssd", 5, "01.tssd is a delta"),
        ("delta fold 01.tssd 1.tssd -o out.tssd", 5, "1.tssd is no delta"),
        ("verify --deep 01.tssd 0.tssd --base 0.tssd", 2, "--base belongs to one delta"),
        ("delta fold 01.tssd 01.tssd -o out.tssd", 5, "does not continue the first one"),
        ("delta make 0.tssd none.tssd -o out.tssd", 3, "none.tssd"),
        ("verify --deep 01.tssd --base 2.tssd", 5, "WrongBase"),
        ("diff 1.tssd 01.tssd", 5, "tssd delta apply"),
        ("unpack 01.tssd -o out.safetensors", 5, "tssd delta apply"),
        ("convert 01.tssd -o out.tssd", 5, "tssd delta apply"),
        ("delta fold 01.tssd -o out.tssd", 2, "2 values required"),
    ] {
        let output = sandbox.run_with_code(code, command);
        assert!(output.contains(words), "{command}: {output}");
    }
    assert_eq!(sandbox.file_names(), before);
}
