//! Files and folders of the user that appear under their names when they are complete.

use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::files::{OutputFile, PositionedWriter, Progress};
use super::{optional, parent, system, temporary};

/// A file of the user that appears under its name when it is [committed](Self::commit).
///
/// Until then it has no name, where the system supports that, or else a temporary name in the same folder. If it is
/// dropped, or if the process is killed, the old file of that name stays. A later replacement in the folder removes
/// temporary files that processes of this machine have abandoned since its last boot.
#[derive(Debug)]
pub struct Replacement {
    file: File,
    progress: Progress,
    is_durable: bool,
    target: PathBuf,
    /// The name that the file has, if `is_named` is set, or has for a moment during the commit.
    temporary: PathBuf,
    is_named: bool,
    old: OldFile,
}

/// The file that has the name of a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OldFile {
    /// There was one. The replacement has its attributes.
    Present,
    /// There was none. One that appears meanwhile is replaced.
    Absent,
    /// There must be none.
    Forbidden,
}

impl Replacement {
    /// Creates a file that will replace `target`.
    ///
    /// If `is_durable` is set, the file is on the disk after the commit. If `target` is a symbolic link, the file that
    /// it points to is replaced. The new file gets the mode, the owner and the group of the old one, as far as the
    /// system permits.
    ///
    /// # Errors
    ///
    /// Errors of the system; `IsADirectory` if `target` is a folder; `InvalidInput` if it is not a regular file.
    pub fn create(target: &Path, is_durable: bool) -> io::Result<Self> {
        let target = resolve(target)?;
        let old = optional(target.metadata())?;
        if let Some(old) = old.as_ref().filter(|old| !old.is_file()) {
            return Err(irregular_file_error(old));
        }
        let Some(old) = old else { return Self::create_at(target, is_durable, OldFile::Absent) };
        let new = Self::create_at(target, is_durable, OldFile::Present)?;
        system::copy_attributes(&old, &new.file)?;
        Ok(new)
    }

    /// Creates a file that will have the name `target`, which must be free.
    ///
    /// # Errors
    ///
    /// Those of [`create`](Self::create); `AlreadyExists` if the name is taken.
    pub fn create_new(target: &Path, is_durable: bool) -> io::Result<Self> {
        if target.symlink_metadata().is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        Self::create_at(target.to_owned(), is_durable, OldFile::Forbidden)
    }

    fn create_at(target: PathBuf, is_durable: bool, old: OldFile) -> io::Result<Self> {
        let folder = parent(&target)?;
        temporary::remove_abandoned(folder);
        let (file, temporary, is_named) = if let Some(file) = system::create_unnamed(folder)? {
            (file, temporary::next_name(folder), false)
        } else {
            let (file, path) = temporary::create_locked(folder, |path| File::create_new(path))?;
            (file, path, true)
        };
        let progress = Progress::new(0, is_durable);
        Ok(Self { file, progress, is_durable, target, temporary, is_named, old })
    }

    /// Preallocates `len` bytes.
    pub fn preallocate(&self, len: u64) {
        self.file.preallocate(len);
    }

    /// Returns a writer at an offset. Several writers may write at different offsets at once.
    pub fn at(&self, offset: u64) -> impl Write + Send + use<'_> {
        PositionedWriter { output: &self.file, progress: Progress::new(offset, self.is_durable) }
    }

    /// Gives the file its name. A durable file is on the disk when the call returns.
    ///
    /// # Errors
    ///
    /// Errors of the system; `AlreadyExists` after [`create_new`](Self::create_new) if the name is taken.
    pub fn commit(mut self) -> io::Result<()> {
        if self.is_durable {
            self.file.sync()?;
        }
        match self.old {
            OldFile::Forbidden => self.claim_name()?,
            // Without an old file, an unnamed one needs no temporary name.
            OldFile::Absent if !self.is_named && self.link(&self.target).is_ok() => {}
            OldFile::Absent | OldFile::Present => self.rename()?,
        }
        self.remove_temporary();
        if self.is_durable { system::sync_folder(parent(&self.target)?) } else { Ok(()) }
    }

    /// Removes the temporary name, if the file has it.
    ///
    /// A file that cannot be removed is abandoned: a later replacement removes it.
    fn remove_temporary(&mut self) {
        if std::mem::replace(&mut self.is_named, false) {
            let _ = fs::remove_file(&self.temporary);
        }
    }

    /// Adds a name to the file. Fails if the name is taken.
    fn link(&self, name: &Path) -> io::Result<()> {
        if self.is_named {
            fs::hard_link(&self.temporary, name)
        } else {
            system::link_unnamed(&self.file, name)
        }
    }

    /// Gives the file its name if that is free.
    fn claim_name(&mut self) -> io::Result<()> {
        match self.link(&self.target) {
            // A file system without hard links, such as exFAT. Between the check and the rename, another process can
            // create the file.
            Err(error) if self.is_named && error.kind() != io::ErrorKind::AlreadyExists => {
                if self.target.symlink_metadata().is_ok() {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                self.rename()
            }
            linked => linked,
        }
    }

    /// Replaces the target.
    fn rename(&mut self) -> io::Result<()> {
        if !self.is_named {
            // While it has its temporary name, a lock shows that the process lives.
            let _unsupported = self.file.try_lock();
            while let Err(error) = self.link(&self.temporary) {
                if error.kind() != io::ErrorKind::AlreadyExists {
                    return Err(error);
                }
                self.temporary = temporary::next_name(parent(&self.target)?);
            }
            self.is_named = true;
        }
        fs::rename(&self.temporary, &self.target)?;
        self.is_named = false;
        Ok(())
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        self.remove_temporary();
    }
}

/// The temporary name.
impl AsRef<Path> for Replacement {
    fn as_ref(&self) -> &Path {
        &self.temporary
    }
}

/// Writes one byte after the other, from the beginning of the file.
impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.progress.write(&self.file, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A folder with a temporary name, which is locked. If it is dropped, it is removed with all that it contains.
///
/// A folder of a killed process is removed as an abandoned file of a [`Replacement`] is.
#[derive(Debug)]
pub struct ReplacementFolder {
    path: PathBuf,
    /// Locked.
    folder: File,
    is_kept: bool,
}

impl ReplacementFolder {
    /// Creates an empty folder in `parent`.
    ///
    /// # Errors
    ///
    /// Errors of the system.
    pub fn create_in(parent: &Path) -> io::Result<Self> {
        temporary::remove_abandoned(parent);
        let create = |path: &Path| {
            fs::create_dir(path)?;
            // Another process may remove the folder before it is locked. The next name is tried then.
            let taken = |error: io::Error| match error.kind() {
                io::ErrorKind::NotFound => io::ErrorKind::AlreadyExists.into(),
                _ => error,
            };
            system::open_folder(path).map_err(taken)
        };
        let (folder, path) = temporary::create_locked(parent, create)?;
        Ok(Self { path, folder, is_kept: false })
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Exchanges the folder with `target`, a folder, in one step. Returns the path of the old folder.
    ///
    /// The new folder has the mode, the owner and the group of the old one, as far as the system permits. No process
    /// removes the old folder as an abandoned one.
    ///
    /// # Errors
    ///
    /// Errors of the system; `Unsupported` or `InvalidInput` if it cannot exchange folders. The old folder is unchanged
    /// then.
    pub fn exchange_with(mut self, target: &Path) -> io::Result<PathBuf> {
        system::copy_attributes(&fs::metadata(target)?, &self.folder)?;
        let aside = self.visible_name(target)?;
        fs::rename(&self.path, &aside)?;
        self.path.clone_from(&aside);
        system::exchange(&aside, target)?;
        self.is_kept = true;
        Ok(aside)
    }

    /// Returns a name next to `target` that begins with the name of `target`.
    fn visible_name(&self, target: &Path) -> io::Result<PathBuf> {
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let suffix = self.path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut visible = name.to_owned();
        visible.push(suffix);
        Ok(target.with_file_name(visible))
    }

    /// Renames the folder to `target`, which must be free or an empty folder.
    ///
    /// # Errors
    ///
    /// Errors of the system.
    pub fn rename_to(mut self, target: &Path) -> io::Result<()> {
        fs::rename(&self.path, target)?;
        self.is_kept = true;
        Ok(())
    }
}

impl Drop for ReplacementFolder {
    fn drop(&mut self) {
        if !self.is_kept {
            // A folder that cannot be removed is abandoned: a later replacement removes it.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

impl AsRef<Path> for ReplacementFolder {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

/// Resolves a link, so that the file that it points to is replaced.
fn resolve(target: &Path) -> io::Result<PathBuf> {
    match target.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match fs::read_link(target) {
            // The link stays, and the file that it names is created.
            Ok(name) => Ok(parent(target)?.join(name)),
            Err(_) => Ok(target.to_owned()),
        },
        resolved => resolved,
    }
}

fn irregular_file_error(old: &Metadata) -> io::Error {
    if old.is_dir() {
        return system::is_a_directory();
    }
    io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    use super::*;

    impl Replacement {
        /// Gives an unnamed file its temporary name, as on a file system that has no unnamed files.
        fn into_named(mut self) -> Self {
            if !self.is_named {
                self.link(&self.temporary).unwrap();
                self.is_named = true;
            }
            self
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Runs a test with an unnamed file, and with a named one.
    fn with_both_kinds(
        test: impl Fn(&Path, &dyn Fn(io::Result<Replacement>) -> io::Result<Replacement>),
    ) {
        for is_named in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            test(folder.path(), &|created| {
                if is_named { created.map(Replacement::into_named) } else { created }
            });
        }
    }

    #[test]
    fn file_appears_when_it_is_committed() {
        with_both_kinds(|folder, create| {
            let target = folder.join("file");
            for content in ["first", "second, which replaces the first"] {
                for is_durable in [false, true] {
                    let mut new = create(Replacement::create(&target, is_durable)).unwrap();
                    new.write_all(content.as_bytes()).unwrap();
                    new.commit().unwrap();
                    assert_eq!(fs::read_to_string(&target).unwrap(), content);
                    assert_eq!(names(folder), ["file"]);
                }
            }
            let mut dropped = create(Replacement::create(&target, true)).unwrap();
            dropped.write_all(b"half").unwrap();
            drop(dropped);
            assert_eq!(fs::read_to_string(&target).unwrap(), "second, which replaces the first");
            assert_eq!(names(folder), ["file"]);
        });
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn file_has_no_name_before_it_is_committed() {
        let folder = tempfile::tempdir().unwrap();
        let new = Replacement::create(&folder.path().join("file"), true).unwrap();
        assert!(new.is_named || names(folder.path()).is_empty());
        assert!(!new.is_named, "the file system of the tests has unnamed files");
    }

    #[test]
    fn file_that_must_be_new_replaces_nothing() {
        with_both_kinds(|folder, create| {
            let target = folder.join("file");
            let new = create(Replacement::create_new(&target, true)).unwrap();
            fs::write(&target, "another process").unwrap();
            let error = new.commit().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
            let error = create(Replacement::create_new(&target, true)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(fs::read_to_string(&target).unwrap(), "another process");
            let link = folder.join("link");
            symlink("nowhere", &link).unwrap();
            let error = create(Replacement::create_new(&link, true)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(names(folder), ["file", "link"]);
            fs::remove_file(&target).unwrap();
            create(Replacement::create_new(&target, true)).unwrap().commit().unwrap();
            assert_eq!(names(folder), ["file", "link"]);
        });
    }

    #[test]
    fn mode_owner_and_group_of_the_old_file_stay() {
        with_both_kinds(|folder, create| {
            let target = folder.join("file");
            fs::write(&target, "old").unwrap();
            // Without privileges, only the mode can be changed.
            let is_privileged = chown(&target, Some(12), Some(34)).is_ok();
            fs::set_permissions(&target, fs::Permissions::from_mode(0o640)).unwrap();
            create(Replacement::create(&target, true)).unwrap().commit().unwrap();
            let new = target.metadata().unwrap();
            assert_eq!((new.len(), new.mode() & 0o7777), (0, 0o640));
            assert!(!is_privileged || (new.uid(), new.gid()) == (12, 34));
        });
    }

    #[test]
    fn link_stays_and_its_file_is_replaced() {
        with_both_kinds(|folder, create| {
            fs::write(folder.join("file"), "old").unwrap();
            symlink("file", folder.join("link")).unwrap();
            create(Replacement::create(&folder.join("link"), true)).unwrap().commit().unwrap();
            assert!(folder.join("link").is_symlink());
            assert_eq!(fs::read_to_string(folder.join("file")).unwrap(), "");
            fs::remove_file(folder.join("file")).unwrap();
            create(Replacement::create(&folder.join("link"), true)).unwrap().commit().unwrap();
            assert!(folder.join("link").is_symlink() && folder.join("file").is_file());
        });
    }

    #[test]
    fn irregular_files_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        for target in [folder.path(), Path::new("/")] {
            let error = Replacement::create(target, true).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
            assert!(error.raw_os_error().is_some());
        }
        let error = Replacement::create(Path::new("/dev/null"), true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let error = Replacement::create(&folder.path().join("none/file"), true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn folder_appears_when_it_is_complete_and_replaces_none() {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("folder");
        let new = ReplacementFolder::create_in(parent.path()).unwrap();
        fs::write(new.path().join("part"), "whole").unwrap();
        new.rename_to(&target).unwrap();
        assert_eq!(names(&target), ["part"]);
        let other = ReplacementFolder::create_in(parent.path()).unwrap();
        other.rename_to(&target).unwrap_err();
        assert_eq!(
            (names(&target), names(parent.path())),
            (vec!["part".into()], vec!["folder".into()])
        );
        let dropped = ReplacementFolder::create_in(parent.path()).unwrap();
        fs::write(dropped.path().join("part"), "half").unwrap();
        drop(dropped);
        assert_eq!(names(parent.path()), ["folder"]);
    }
}
