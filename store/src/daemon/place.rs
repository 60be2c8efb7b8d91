//! For whom a daemon listens, and how much memory it takes, unless it is said.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use tokio::net::{UnixListener, UnixSocket};

use crate::error::{Error, ErrorKind, Result};

/// How many wait to be accepted at most.
const BACKLOG: u32 = 1024;

/// Listens at a socket of this mode, and of a group.
pub(super) fn listen(socket: &Path, group: Option<u32>, mode: u32) -> Result<UnixListener> {
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
    // Version 2 of control groups, and version 1. A limit that cannot be read is none.
    let groups = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limits = groups.iter().filter_map(|path| std::fs::read_to_string(path).ok());
    let limit = limits.filter_map(|text| text.trim().parse::<u64>().ok()).min();
    Ok(limit.map_or(total, |limit| limit.min(total)) / 2)
}
