//! Peak memory of a reader of untrusted files.
//!
//! A counting allocator measures it over every vector and over the fuzz corpora.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use peak_alloc::PeakAlloc;
use tssd_format::safetensors::{Export, FILES_KEY};
use tssd_format::{
    Archive, ArchiveWriter, Compression, Options, StateDict, Tensor, TorchStoreStateDict,
};
use tssd_tests::corpus::{self, Input};
use tssd_tests::fuzz::expand;
use tssd_tests::vectors;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Bytes that a call may allocate for any file: errors, names, zstd tables, one chunk and its shuffle.
const FIXED_BYTES: usize = 4 << 20;

/// Runs `work` and returns its result with its peak memory, in bytes above the usage before the call.
fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let result = work();
    (result, ALLOCATOR.peak_usage().saturating_sub(before))
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// Returns the files of a folder with their contents, sorted by path.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let paths = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.is_file()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

#[test]
fn memory_is_bounded_by_file_length() {
    let mut inputs = files(&folder("spec/vectors/valid"));
    inputs.extend(files(&folder("spec/vectors/invalid")));
    inputs.extend(files(vectors::generated_folder()));
    for target in ["parse", "index", "readers"] {
        for Input { name, bytes } in corpus::inputs(target).unwrap() {
            let file = if target == "parse" { bytes } else { expand(&bytes) };
            inputs.push((Path::new(target).join(name), file));
        }
    }
    let mut opened = 0;
    for (path, file) in inputs {
        let name = path.display();
        let file = Bytes::from(file);
        let (archive, open) = peak(|| Archive::from_bytes(file.clone()));
        let limit = 2 * file.len() + (64 << 10);
        assert!(open <= limit, "{name}: opening {} bytes took {open}", file.len());
        let Ok(archive) = archive else { continue };
        opened += 1;
        let (_, verify) = peak(|| archive.verify_deep());
        // The verifier decodes the content of a `str` in one piece.
        let max_str_bytes = 32_768 * file.len();
        let limit = FIXED_BYTES + if archive.storage_count() == 0 { 0 } else { max_str_bytes };
        assert!(verify <= limit, "{name}: verifying {} bytes took {verify}", file.len());
        let index = archive.index_bytes().len();
        let (_, structure) = peak(|| archive.structure());
        assert!(
            structure <= 400 * index,
            "{name}: the structure of an index of {index} bytes took {structure}"
        );
    }
    assert!(opened > 80, "only {opened} files could be opened");
    chunks_are_decoded_one_by_one();
    damage_is_found_before_allocation();
    other_files_are_buffered_one_by_one();
}

/// Verifying compressed zeros takes the memory of one chunk; reading a range, that of the range.
fn chunks_are_decoded_one_by_one() {
    let mut dict = StateDict::new();
    let zeros = Tensor::from_slice(&vec![0_u64; 8 << 20], &[8 << 20]).unwrap();
    dict.insert("zeros", zeros);
    let options = Options::new().compress(Compression::ShuffledZstd).digests();
    let file = TorchStoreStateDict::with_options(&dict, &options).unwrap().as_bytes().clone();
    drop(dict);
    assert!(file.len() < 20_000);
    let archive = Archive::from_bytes(file).unwrap();
    let (verified, verify) = peak(|| archive.verify_deep());
    verified.unwrap();
    assert!(verify <= FIXED_BYTES, "verifying took {verify}");
    let range = (20 << 20) + 5..(22 << 20) + 7;
    let (bytes, read) = peak(|| archive.storage_range(0, range.clone()).unwrap());
    assert_eq!(u64::try_from(bytes.len()).unwrap(), range.end - range.start);
    assert!(read <= bytes.len() + FIXED_BYTES, "reading 2 MiB took {read}");
    let (whole, read) = peak(|| archive.storage_bytes(0).unwrap());
    assert!(read <= whole.len() + FIXED_BYTES, "reading 64 MiB took {read}");
}

/// A trailer that claims an index of 1 GiB is rejected without an allocation of that size.
fn damage_is_found_before_allocation() {
    let mut file =
        TorchStoreStateDict::from_state_dict(&StateDict::new()).unwrap().as_bytes().to_vec();
    let trailer = file.len() - 64;
    file[trailer + 8..trailer + 16].copy_from_slice(&(1_u64 << 30).to_le_bytes());
    tssd_tests::checksums::repair_checksums(&mut file);
    let (opened, open) = peak(|| Archive::from_bytes(Bytes::from(file)));
    assert!(opened.is_err());
    assert!(open < 64 << 10, "rejecting the file took {open}");
}

/// Writing four files of 16 MiB takes the memory of one; unpacking them, of a piece of one.
fn other_files_are_buffered_one_by_one() {
    const LEN: usize = 16 << 20;
    let file = tempfile::tempfile().unwrap();
    let (written, write) = peak(|| {
        let mut writer = ArchiveWriter::new(&file, Options::new()).unwrap();
        for number in 0..4_u8 {
            let content = Bytes::from(vec![number; LEN]);
            writer.insert_into(FILES_KEY, number.to_string(), content).unwrap();
        }
        writer.finish().map(drop)
    });
    written.unwrap();
    assert!(write <= LEN + FIXED_BYTES, "writing took {write}");
    let archive = Archive::from_blob(Arc::new(file)).unwrap();
    let export = Export::from_archive(&archive).unwrap();
    for other in export.auxiliary_files() {
        let (read, unpack) = peak(|| other.write_to(&mut std::io::sink()));
        read.unwrap();
        assert!(unpack <= FIXED_BYTES, "unpacking took {unpack}");
    }
}
