//! Small file systems: a tmpfs with a size limit, and an ext4 in a file.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use tempfile::TempDir;
use tssd_tests::command::memory_tempdir;

/// A mounted file system of a few MiB. Unmounted on drop.
pub(super) struct TempMount {
    pub(super) kind: &'static str,
    folder: TempDir,
}

fn run(program: &str, args: &[&str], path: &Path) -> Result<(), String> {
    let output = Command::new(program).args(args).arg(path).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

impl TempMount {
    /// Mounts a tmpfs.
    pub(super) fn tmpfs(mib: u64) -> Result<Self, String> {
        let mounted = Self { kind: "tmpfs", folder: memory_tempdir() };
        fs::create_dir(mounted.root()).unwrap();
        let size = format!("size={mib}m");
        run("mount", &["-t", "tmpfs", "-o", &size, "tssd"], &mounted.root())?;
        Ok(mounted)
    }

    /// Mounts an ext4 with blocks of 1 KiB, from an image file.
    pub(super) fn ext4(mib: u64) -> Result<Self, String> {
        let mounted = Self { kind: "ext4", folder: memory_tempdir() };
        fs::create_dir(mounted.root()).unwrap();
        let image = mounted.folder.path().join("image");
        File::create(&image).unwrap().set_len(mib << 20).unwrap();
        run("mkfs.ext4", &["-q", "-F", "-b", "1024", "-m", "0"], &image)?;
        run("mount", &["-o", "loop", image.to_str().unwrap()], &mounted.root())?;
        Ok(mounted)
    }

    pub(super) fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    /// Returns the free space in bytes.
    fn free(&self) -> u64 {
        let status = statvfs(self.root()).unwrap();
        status.f_bavail * status.f_frsize
    }

    /// Fills the file system up to this number of free bytes, until the result is dropped.
    pub(super) fn fill(&self, free: u64) -> FillerFile {
        let path = self.root().join("ballast");
        let file = File::create(&path).unwrap();
        let mut len = self.free().saturating_sub(free);
        // The overhead of the file system is not known in advance.
        while len > 0 && fallocate(&file, FallocateFlags::empty(), 0, len).is_err() {
            len = len.saturating_sub(1024);
        }
        FillerFile(path)
    }
}

impl Drop for TempMount {
    fn drop(&mut self) {
        // This also detaches the loop device.
        let unmounted = run("umount", &[], &self.root());
        if unmounted.is_err() {
            let _ = run("umount", &["-l"], &self.root());
        }
        assert!(unmounted.is_ok() || std::thread::panicking(), "{unmounted:?}");
    }
}

/// A file that fills a disk. Removed on drop.
pub(super) struct FillerFile(PathBuf);

impl Drop for FillerFile {
    fn drop(&mut self) {
        fs::remove_file(&self.0).unwrap();
    }
}
