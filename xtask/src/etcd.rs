use std::env;
use std::path::PathBuf;

use crate::cache;
use crate::step::{Step, StepKind};

/// Environment variable: the etcd program, which tests start.
pub(crate) const VARIABLE: &str = "TSSD_ETCD";

/// Returns the etcd program: on `PATH`, or of the Debian package that is unpacked in the cache folder.
pub(crate) fn program() -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut folders = env::split_paths(&path);
    let installed = folders.find(|folder| folder.join("etcd").is_file());
    installed.unwrap_or_else(|| folder().join("usr/bin")).join("etcd")
}

/// Returns the step that installs etcd, or `None` if it is installed.
pub(crate) fn install_step() -> Option<Step> {
    if program().is_file() {
        return None;
    }
    let unpack = "mkdir -p \"$0\" && cd \"$0\" && apt-get download etcd-server && \
                  dpkg --extract etcd-server_*.deb .";
    let step = Step::program("install etcd", "sh", "-c").argument(unpack);
    Some(step.argument(folder()).kind(StepKind::Setup))
}

fn folder() -> PathBuf {
    cache::folder().join("tools/etcd")
}
