use std::env;
use std::path::PathBuf;

use crate::step::{Step, Worth};
use crate::workspace::Workspace;

/// Names it for the tests.
pub(crate) const VARIABLE: &str = "TSSD_ETCD";

/// etcd, which tests start: that of the `PATH`, or Debian's, unpacked under `target/tools`.
pub(crate) fn program(workspace: &Workspace) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut folders = env::split_paths(&path);
    let installed = folders.find(|folder| folder.join("etcd").is_file());
    installed.unwrap_or_else(|| folder(workspace).join("usr/bin")).join("etcd")
}

/// What unpacks it: nothing if it is there.
pub(crate) fn installation(workspace: &Workspace) -> Option<Step> {
    if program(workspace).is_file() {
        return None;
    }
    let unpack = "mkdir -p \"$0\" && cd \"$0\" && apt-get download etcd-server && \
                  dpkg --extract etcd-server_*.deb .";
    let step = Step::program("etcd from Debian", "sh", "-c").argument(unpack);
    Some(step.argument(folder(workspace)).worth(Worth::Nothing))
}

fn folder(workspace: &Workspace) -> PathBuf {
    workspace.target.join("tools/etcd")
}
