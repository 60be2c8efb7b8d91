//! The Unix socket of a daemon, and its default memory limit.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixSocket};

use crate::error::{Error, ErrorKind, Result};

/// Maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// Listens on a Unix socket with a mode and, if given, a group.
///
/// # Errors
///
/// `Invalid` if the group cannot enter the folder of the socket; `Io` if a system call fails.
pub(crate) fn listen(socket: &Path, group: Option<u32>, mode: u32) -> Result<UnixListener> {
    let io_error = |error| Error::io_at(socket, error);
    if let Some(group) = group {
        let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let metadata = folder.metadata().map_err(|error| Error::io_at(folder, error))?;
        let execute_bits = if metadata.gid() == group { 0o011 } else { 0o001 };
        if metadata.mode() & execute_bits == 0 {
            return Err(Error::new(
                ErrorKind::Invalid,
                format_args!(
                    "group {group} may not enter the folder `{}`: give the socket a path in one that it \
                     may enter (and where nobody else writes)",
                    folder.display()
                ),
            ));
        }
    }
    let unbound = UnixSocket::new_stream().map_err(io_error)?;
    unbound.bind(socket).map_err(io_error)?;
    if let Some(group) = group {
        std::os::unix::fs::chown(socket, None, Some(group)).map_err(|error| {
            Error::io(format_args!("`{}` cannot be group {group}'s", socket.display()), error)
                .with_file(socket)
        })?;
    }
    // The mode is set before `listen`, so no process can connect with the wrong mode.
    std::fs::set_permissions(socket, Permissions::from_mode(mode)).map_err(io_error)?;
    unbound.listen(BACKLOG).map_err(io_error)
}

/// Returns half of the available memory in bytes.
///
/// The available memory is that of the host, or the limit of the control group of this process if that is lower.
///
/// # Errors
///
/// `Io` if the size of the memory cannot be read.
pub fn default_memory_limit() -> Result<u64> {
    let path = "/proc/meminfo";
    let failed = |error| Error::io_at(path, error);
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let total = text.lines().find_map(|line| {
        let kilobytes = line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?;
        kilobytes.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let total = total.ok_or_else(|| failed(io::Error::other("it names no MemTotal")))?;
    // A limit that cannot be read is ignored.
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits =
        cgroup_limit_paths(&own).into_iter().filter_map(|path| std::fs::read_to_string(path).ok());
    let limit = limits.filter_map(|text| text.trim().parse::<u64>().ok()).min();
    Ok(limit.map_or(total, |limit| limit.min(total)) / 2)
}

/// Returns the paths of the memory limits of a process, for cgroup versions 1 and 2.
///
/// `groups` is the content of `/proc/self/cgroup`. The paths include those of all ancestor groups. In a container the
/// group path can be that of the host; then the group of the container is the root, which is included too.
fn cgroup_limit_paths(groups: &str) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else { continue };
        let (mounts, limit): (&[&str], _) = if controllers.is_empty() {
            (&["/sys/fs/cgroup", "/sys/fs/cgroup/unified"], "memory.max")
        } else if controllers.split(',').any(|it| it == "memory") {
            (&["/sys/fs/cgroup/memory"], "memory.limit_in_bytes")
        } else {
            continue;
        };
        for ancestor in Path::new(group.trim_start_matches('/')).ancestors() {
            paths.extend(mounts.iter().map(|mount| Path::new(mount).join(ancestor).join(limit)));
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::cgroup_limit_paths;

    #[test]
    fn cgroup_limit_paths_include_ancestors() {
        let paths = |groups| {
            let paths = cgroup_limit_paths(groups).into_iter();
            paths.map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        let memory = "/sys/fs/cgroup/memory";
        let first =
            ["/a/b", "/a", ""].map(|group| format!("{memory}{group}/memory.limit_in_bytes"));
        assert_eq!(paths("9:name=systemd:/\n4:cpu,memory:/a/b\n1:cpu:/"), first);
        let second = ["", "/unified"].map(|mount| format!("/sys/fs/cgroup{mount}/memory.max"));
        assert_eq!(paths("0::/\n"), second);
    }
}
