//! Conformance tests: every volume satisfies the contract of [`Volume`].

use std::any::Any;
use std::sync::{Arc, Barrier};

use crate::blob::backend::{DirectoryVolume, MemoryVolume};
use crate::blob::{Reservation, Volume};
use crate::convert::to_u64;
use crate::error::ErrorKind;
use crate::io::disk::Disk;
use crate::io::local_archive::LocalArchive;
use crate::ledger::Durability;

/// A volume under test.
struct Backend {
    name: &'static str,
    volume: Arc<dyn Volume>,
    /// The highest durability that the volume provides.
    durability: Durability,
    deletion: DeletionDuringRead,
    /// Resources that must live until the end of the test.
    _resources: Option<Box<dyn Any + Send + Sync>>,
}

/// What happens to an open blob that is deleted.
enum DeletionDuringRead {
    /// It stays readable.
    Readable,
    /// It stays readable while this pool holds it.
    #[cfg(target_os = "linux")]
    ReadableWhileHeld(Arc<crate::shm::Pool>),
    /// Reads fail, because nothing protects it.
    #[cfg(feature = "object")]
    ReadsFail,
}

fn backends() -> Vec<Backend> {
    vec![
        memory(),
        directory(),
        #[cfg(target_os = "linux")]
        pool(),
        #[cfg(target_os = "linux")]
        tiered(),
        #[cfg(feature = "object")]
        object(),
    ]
}

fn memory() -> Backend {
    Backend {
        name: "memory",
        volume: Arc::new(MemoryVolume::default()),
        durability: Durability::Memory,
        deletion: DeletionDuringRead::Readable,
        _resources: None,
    }
}

fn new_directory() -> (DirectoryVolume, Box<dyn Any + Send + Sync>) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    (DirectoryVolume::new(Disk::at(root)), Box::new(folder))
}

fn directory() -> Backend {
    let (volume, folder) = new_directory();
    Backend {
        name: "directory",
        volume: Arc::new(volume),
        durability: Durability::Disk,
        deletion: DeletionDuringRead::Readable,
        _resources: Some(folder),
    }
}

#[cfg(target_os = "linux")]
fn pool() -> Backend {
    let pool = Arc::new(crate::shm::Pool::new(1 << 30));
    Backend {
        name: "pool",
        volume: Arc::new(crate::blob::backend::PoolVolume(pool.clone())),
        durability: Durability::Memory,
        deletion: DeletionDuringRead::ReadableWhileHeld(pool),
        _resources: None,
    }
}

/// The volume of a daemon with a directory.
#[cfg(target_os = "linux")]
fn tiered() -> Backend {
    use crate::daemon::remote_blobs::RemoteBlobIndex;
    use crate::daemon::tiered::TieredVolume;

    let (directory, folder) = new_directory();
    let pool = Arc::new(crate::shm::Pool::new(1 << 30));
    let remote_blobs = RemoteBlobIndex::new(crate::net::tls::Identity::default(), None);
    Backend {
        name: "tiered",
        volume: Arc::new(TieredVolume::new(pool.clone(), Some(directory), remote_blobs, false)),
        durability: Durability::Disk,
        deletion: DeletionDuringRead::ReadableWhileHeld(pool),
        _resources: Some(folder),
    }
}

#[cfg(feature = "object")]
fn object() -> Backend {
    let objects = Arc::new(crate::testing::faulty_bucket::FaultyBucket::default());
    let root = object_store::path::Path::parse("some/prefix").unwrap();
    let bucket = crate::io::bucket::Bucket::new(objects, root, "s3://test/some/prefix").unwrap();
    Backend {
        name: "object",
        volume: Arc::new(crate::blob::backend::ObjectVolume::new(bucket)),
        durability: Durability::Object,
        deletion: DeletionDuringRead::ReadsFail,
        _resources: None,
    }
}

impl Backend {
    fn reserve(&self, name: &str, len: usize) -> Box<dyn Reservation> {
        let durability = self.volume.admit(self.durability).unwrap();
        self.volume.reserve(name, u64::try_from(len).unwrap(), durability).unwrap()
    }

    /// Puts a blob in parts of these lengths, the last part first. Returns whether the name was free.
    fn put(&self, name: &str, bytes: &[u8], lens: &[u64]) -> bool {
        let mut reservation = self.reserve(name, bytes.len());
        let mut end = bytes.len();
        for (part, len) in reservation.parts(lens).iter_mut().zip(lens).rev() {
            let start = end - usize::try_from(*len).unwrap();
            part.write(&bytes[start..end]).unwrap();
            end = start;
        }
        reservation.seal().unwrap()
    }

    fn put_whole(&self, name: &str, bytes: &[u8]) -> bool {
        self.put(name, bytes, &[u64::try_from(bytes.len()).unwrap()])
    }

    fn open(&self, name: &str) -> Option<LocalArchive> {
        self.volume.open(name).unwrap()
    }

    fn read(&self, name: &str) -> Option<Vec<u8>> {
        self.open(name).map(|archive| contents(&archive))
    }
}

fn contents(archive: &LocalArchive) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(archive.blob.size().unwrap()).unwrap()];
    archive.blob.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Returns bytes that differ at each offset, and for each seed.
fn bytes(len: usize, seed: u32) -> Vec<u8> {
    (seed..).flat_map(u32::to_le_bytes).take(len).collect()
}

#[test]
fn blob_of_any_length_reads_back() {
    for backend in backends() {
        let kind = backend.name;
        // The last one is longer than a part of a multipart upload, and than a slab of a pool.
        for len in [0, 1, 4095, 4096, 100_000, 20 << 20] {
            let (name, bytes) = (format!("key/1-0/{len}"), bytes(len, 7));
            assert!(backend.put_whole(&name, &bytes), "{kind} {len}");
            assert!(backend.read(&name).as_ref() == Some(&bytes), "{kind} {len}");
            let opened = backend.volume.open_all(std::slice::from_ref(&name)).unwrap().unwrap();
            let mut middle = vec![0; len / 2];
            opened[0].blob().read_exact_at(&mut middle, to_u64(len / 4)).unwrap();
            assert!(middle == bytes[len / 4..len / 4 + len / 2], "{kind} {len}");
        }
    }
}

#[test]
fn parts_are_written_in_any_order() {
    for backend in backends() {
        for (len, lens) in [
            (10, vec![0, 4, 0, 6]),
            (100_001, vec![1, 100_000]),
            (12 << 20, vec![5 << 20, 1 << 20, 6 << 20]),
        ] {
            let (name, bytes) = (format!("key/{len}"), bytes(len, 1));
            assert!(backend.put(&name, &bytes, &lens), "{} {lens:?}", backend.name);
            assert!(backend.read(&name) == Some(bytes), "{} {lens:?}", backend.name);
        }
    }
}

#[test]
fn blob_is_invisible_until_it_is_sealed() {
    for backend in backends() {
        let kind = backend.name;
        for len in [100, 12 << 20] {
            let (name, bytes) = (format!("key/{len}"), bytes(len, 1));
            let check_absent = || {
                assert!(backend.open(&name).is_none(), "{kind} {len}");
                let all = backend.volume.open_all(std::slice::from_ref(&name)).unwrap();
                assert!(all.is_none(), "{kind} {len}");
                let listed = backend.volume.list("key").unwrap();
                let is_temporary = |name: &String| name.starts_with(".tmp");
                assert!(listed.iter().all(is_temporary), "{kind} {len}: {listed:?}");
            };
            let mut reservation = backend.reserve(&name, len);
            check_absent();
            reservation.parts(&[to_u64(len)])[0].write(&bytes).unwrap();
            check_absent();
            drop(reservation);
            check_absent();
            assert!(backend.put_whole(&name, &bytes), "{kind} {len}: it was never sealed");
            assert!(backend.read(&name) == Some(bytes), "{kind} {len}");
            backend.volume.delete(&name).unwrap();
        }
    }
}

#[test]
fn sealed_blob_never_changes() {
    for backend in backends() {
        let kind = backend.name;
        let (first, second) = (bytes(5000, 1), bytes(7000, 2));
        let late = {
            let mut reservation = backend.reserve("key/blob", second.len());
            reservation.parts(&[to_u64(second.len())])[0].write(&second).unwrap();
            reservation
        };
        assert!(backend.put_whole("key/blob", &first), "{kind}");
        let opened = backend.open("key/blob").unwrap();
        assert!(!late.seal().unwrap(), "{kind}: reserved before the name was taken");
        assert!(!backend.put_whole("key/blob", &second), "{kind}: reserved afterwards");
        backend.put_whole("key/blob", &first);
        assert!(backend.read("key/blob").as_ref() == Some(&first), "{kind}");
        assert!(contents(&opened) == first, "{kind}");
    }
}

#[test]
fn one_of_concurrent_seals_succeeds() {
    const WRITERS: usize = 4;
    for backend in backends() {
        for round in 0..20 {
            let (name, start) = (format!("race/{round}"), Barrier::new(WRITERS));
            let put = |seed: usize| {
                start.wait();
                backend.put_whole(&name, &bytes(3000, u32::try_from(seed).unwrap()))
            };
            let sealed: Vec<bool> = std::thread::scope(|scope| {
                let put = &put;
                let threads: Vec<_> =
                    (0..WRITERS).map(|seed| scope.spawn(move || put(seed))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let winners: Vec<usize> = (0..WRITERS).filter(|seed| sealed[*seed]).collect();
            let &[winner] = &*winners else {
                panic!("{} {round}: {winners:?} were all sealed", backend.name)
            };
            let expected = bytes(3000, u32::try_from(winner).unwrap());
            assert!(backend.read(&name) == Some(expected), "{} {round}", backend.name);
        }
    }
}

#[test]
fn list_returns_direct_children() {
    for backend in backends() {
        let kind = backend.name;
        assert_eq!(backend.volume.list("a").unwrap(), [""; 0], "{kind}");
        for name in ["a/x", "a/y/z", "a/y/w", "a%/x", "b/v", "ab/x"] {
            assert!(backend.put_whole(name, name.as_bytes()), "{kind}");
        }
        assert_eq!(backend.volume.list("a").unwrap(), ["x", "y"], "{kind}");
        assert_eq!(backend.volume.list("a/y").unwrap(), ["w", "z"], "{kind}");
        backend.volume.delete("a/y/w").unwrap();
        assert_eq!(backend.volume.list("a/y").unwrap(), ["z"], "{kind}");
        backend.volume.delete("a/y/z").unwrap();
        backend.volume.remove_folder("a/y").unwrap();
        assert_eq!(backend.volume.list("a").unwrap(), ["x"], "{kind}");
        assert_eq!(backend.read("a/x").unwrap(), b"a/x", "{kind}");
    }
}

#[test]
fn deleted_name_is_free_again() {
    for backend in backends() {
        let kind = backend.name;
        backend.volume.delete("key/blob").unwrap();
        assert!(backend.put_whole("key/blob", b"first"), "{kind}");
        backend.volume.delete("key/blob").unwrap();
        assert!(backend.open("key/blob").is_none(), "{kind}");
        backend.volume.delete("key/blob").unwrap();
        assert!(backend.put_whole("key/blob", b"second"), "{kind}");
        assert_eq!(backend.read("key/blob").unwrap(), b"second", "{kind}");
    }
}

/// The blob is longer than what opening it fetches.
#[test]
fn open_blob_stays_readable_or_reports_its_deletion() {
    for backend in backends() {
        let (kind, names) = (backend.name, ["key/blob".to_owned()]);
        let first = bytes(6 << 20, 1);
        assert!(backend.put_whole("key/blob", &first), "{kind}");
        let opened = backend.open("key/blob").unwrap();
        #[cfg(target_os = "linux")]
        if let DeletionDuringRead::ReadableWhileHeld(pool) = &backend.deletion {
            pool.hold(&names);
        }
        backend.volume.delete("key/blob").unwrap();
        // Freed memory is used for new blobs.
        for number in 0..4 {
            assert!(backend.put_whole(&format!("key/{number}"), &bytes(6 << 20, 2)), "{kind}");
        }
        match &backend.deletion {
            DeletionDuringRead::Readable => assert!(contents(&opened) == first, "{kind}"),
            #[cfg(target_os = "linux")]
            DeletionDuringRead::ReadableWhileHeld(pool) => {
                assert!(contents(&opened) == first, "{kind}");
                pool.release(&names);
                assert!(!pool.is_held("key/blob") && pool.span("key/blob").is_none(), "{kind}");
            }
            #[cfg(feature = "object")]
            DeletionDuringRead::ReadsFail => {
                let error = opened.blob.read_exact_at(&mut [0; 100], 0).unwrap_err();
                let error = error.downcast::<crate::Error>().unwrap();
                assert_eq!(error.kind(), ErrorKind::Overtaken, "{kind}: {error}");
            }
        }
    }
}

#[test]
fn durability_is_provided_or_refused() {
    for backend in backends() {
        for wanted in [Durability::Memory, Durability::Disk, Durability::Object] {
            match backend.volume.admit(wanted) {
                Ok(admitted) => assert!(
                    backend.volume.reserve("key/blob", 10, admitted).is_ok(),
                    "{}: {wanted:?}",
                    backend.name
                ),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Invalid, "{}: {error}", backend.name);
                    assert!(wanted != Durability::Memory, "{}: {error}", backend.name);
                }
            }
        }
    }
}
