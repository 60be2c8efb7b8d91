use std::env;
use std::path::PathBuf;

use crate::cache;
use crate::step::{Step, Worth};

/// Names it for the tests.
pub(crate) const VARIABLE: &str = "TSSD_ETCD";

/// etcd, which tests start: that of the `PATH`, or Debian's, unpacked in the cache.
pub(crate) fn program() -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut folders = env::split_paths(&path);
    let installed = folders.find(|folder| folder.join("etcd").is_file());
    installed.unwrap_or_else(|| folder().join("usr/bin")).join("etcd")
}

/// What unpacks it: nothing if it is there.
pub(crate) fn installation() -> Option<Step> {
    if program().is_file() {
        return None;
    }
    let unpack = "mkdir -p \"$0\" && cd \"$0\" && apt-get download etcd-server && \
                  dpkg --extract etcd-server_*.deb .";
    let step = Step::program("etcd from Debian", "sh", "-c").argument(unpack);
    Some(step.argument(folder()).worth(Worth::Nothing))
}

fn folder() -> PathBuf {
    cache::folder().join("tools/etcd")
}
