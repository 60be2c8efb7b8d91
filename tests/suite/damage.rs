//! Damaged and foreign bytes: every change is found, and nothing panics.

use proptest::prelude::*;
use tssd_format::{Archive, ErrorKind, Result, StateDict, Tensor, TorchStoreStateDict, Value};
use tssd_tests::generate;

fn read(bytes: Vec<u8>) -> Result<StateDict> {
    let archive = Archive::from_bytes(bytes)?;
    archive.verify()?;
    archive.to_state_dict()
}

fn sample() -> Vec<u8> {
    let tensor = Tensor::from_slice(&[1.5_f32, -2.0, 0.25, 8.0], &[2, 2]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("weight", tensor.clone());
    dict.insert("tied", tensor);
    dict.insert("steps", Value::List(vec![Value::from(1_i64), Value::None]));
    dict.insert("bias", Tensor::from_slice(&[1_u8, 2, 3], &[3]).unwrap());
    TorchStoreStateDict::from_state_dict(&dict).unwrap().as_bytes().to_vec()
}

#[test]
fn every_changed_byte_is_found() {
    let good = sample();
    read(good.clone()).unwrap();
    for at in 0..good.len() {
        for change in [1_u8, 0x80, 0xFF] {
            let mut bad = good.clone();
            bad[at] ^= change;
            assert!(read(bad).is_err(), "byte {at} changed by {change:#x} is not found");
        }
    }
}

#[test]
fn every_truncation_and_extension_is_found() {
    let good = sample();
    for len in 0..good.len() {
        assert!(read(good[..len].to_vec()).is_err(), "the first {len} bytes are taken for a file");
    }
    for more in [1, 63, 64, 4096] {
        for filler in [0_u8, 0xFF] {
            let mut bad = good.clone();
            bad.resize(good.len() + more, filler);
            assert!(read(bad).is_err());
        }
    }
    let twice = [good.as_slice(), &good].concat();
    assert_eq!(read(twice).unwrap_err().kind(), ErrorKind::LengthMismatch);
}

#[test]
fn foreign_files_are_named_as_such() {
    let zip = [b"PK\x03\x04".as_slice(), &[0; 8192]].concat();
    let mut safetensors = 80_u64.to_le_bytes().to_vec();
    safetensors.extend(br#"{"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#);
    safetensors.resize(9000, b' ');
    for foreign in [zip, safetensors, vec![0; 8192], b"hello, world".to_vec()] {
        assert_eq!(read(foreign).unwrap_err().kind(), ErrorKind::NotTssd);
    }
    assert_eq!(read(Vec::new()).unwrap_err().kind(), ErrorKind::TooShort);
}

#[test]
fn damage_is_reported_with_the_leaf_and_the_byte() {
    let mut bad = sample();
    bad[4096 + 2] ^= 4;
    let error = read(bad).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ChunkCorrupt);
    assert_eq!((error.path(), error.offset()), (Some("weight"), Some(4096)));
    assert_eq!(
        error.to_string(),
        "stored bytes do not match their checksum: 16 bytes (in `weight`, at byte 4096)"
    );
}

#[test]
fn a_file_that_shrinks_under_its_reader_is_an_error() {
    let path = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(path.path(), sample()).unwrap();
    let archive = Archive::open(path.path()).unwrap();
    path.as_file().set_len(4000).unwrap();
    assert_eq!(archive.verify().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(archive.to_state_dict().unwrap_err().kind(), ErrorKind::Io);
}

/// Repairs the checksums, so that what is behind them is reached.
fn repair(file: &mut [u8]) {
    let len = file.len();
    let index_off = u64::from_le_bytes(file[len - 64..len - 56].try_into().unwrap()) as usize;
    if let Some(index) = file.get(index_off..len - 64) {
        let crc = crc32fast::hash(index).to_le_bytes();
        file[len - 40..len - 36].copy_from_slice(&crc);
    }
    let trailer = &file[len - 64..];
    let crc = crc32fast::hash(&[&trailer[..52], &trailer[56..]].concat()).to_le_bytes();
    file[len - 12..len - 8].copy_from_slice(&crc);
    let crc = crc32fast::hash(&file[..60]).to_le_bytes();
    file[60..64].copy_from_slice(&crc);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// With checksums repaired, a change of the index is refused or means something: never a panic.
    #[test]
    fn lies_behind_good_checksums_do_not_panic(
        dict in generate::state_dict(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut file = TorchStoreStateDict::from_state_dict(&dict).unwrap().as_bytes().to_vec();
        let len = file.len();
        let index_off = u64::from_le_bytes(file[len - 64..len - 56].try_into().unwrap()) as usize;
        for (at, byte) in changes {
            let at = index_off + at.index(len - 64 - index_off);
            file[at] = byte;
        }
        repair(&mut file);
        if let Ok(archive) = Archive::from_bytes(file) {
            let _ = archive.verify();
            let _ = archive.to_state_dict();
            let _ = tssd_format::to_json(&archive);
        }
    }
}
