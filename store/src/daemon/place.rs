//! For whom a daemon listens, and how much memory it takes, unless it is said.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixSocket};

use crate::error::{Error, ErrorKind, Result};

/// How many wait to be accepted at most.
const BACKLOG: u32 = 1024;

/// Listens at a socket of this mode, and of a group.
pub(crate) fn listen(socket: &Path, group: Option<u32>, mode: u32) -> Result<UnixListener> {
    let at = |error| Error::io(socket.display(), error);
    if let Some(group) = group {
        let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let metadata = folder.metadata().map_err(|error| Error::io(folder.display(), error))?;
        let enters = if metadata.gid() == group { 0o011 } else { 0o001 };
        if metadata.mode() & enters == 0 {
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
    let unbound = UnixSocket::new_stream().map_err(at)?;
    unbound.bind(socket).map_err(at)?;
    if let Some(group) = group {
        std::os::unix::fs::chown(socket, None, Some(group)).map_err(|error| {
            Error::io(format_args!("`{}` cannot be group {group}'s", socket.display()), error)
        })?;
    }
    // Nobody could connect so far: it listens only now.
    std::fs::set_permissions(socket, Permissions::from_mode(mode)).map_err(at)?;
    unbound.listen(BACKLOG).map_err(at)
}

/// Half of the memory that this process may take: of the machine's, or of its control group's.
///
/// # Errors
///
/// `Io` if the system does not say how much there is.
pub fn default_memory_limit() -> Result<u64> {
    let path = "/proc/meminfo";
    let failed = |error| Error::io(path, error);
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let total = text.lines().find_map(|line| {
        let kilobytes = line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?;
        kilobytes.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let total = total.ok_or_else(|| failed(io::Error::other("it names no MemTotal")))?;
    // A limit that cannot be read is none.
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = limits_of(&own).into_iter().filter_map(|path| std::fs::read_to_string(path).ok());
    let limit = limits.filter_map(|text| text.trim().parse::<u64>().ok()).min();
    Ok(limit.map_or(total, |limit| limit.min(total)) / 2)
}

/// Where the limits of control groups may be, of version 2 and of version 1: of those that a process is in, and of
/// those above them. In a container the path is one of the host perhaps; then its own group is the root.
fn limits_of(groups: &str) -> Vec<PathBuf> {
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
        for above in Path::new(group.trim_start_matches('/')).ancestors() {
            paths.extend(mounts.iter().map(|mount| Path::new(mount).join(above).join(limit)));
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::limits_of;

    #[test]
    fn a_group_has_its_own_limit_and_those_above_it() {
        let paths = |groups| {
            let paths = limits_of(groups).into_iter();
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
