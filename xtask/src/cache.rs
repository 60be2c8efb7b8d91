use std::env;
use std::path::PathBuf;

/// Environment variable: overrides the cache folder.
const VARIABLE: &str = "TSSD_XTASK_CACHE";

/// Returns the cache folder for Python environments and tools, which all checkouts of the user share.
pub(crate) fn folder() -> PathBuf {
    let from = |variable: &str| env::var_os(variable).filter(|value| !value.is_empty());
    if let Some(folder) = from(VARIABLE) {
        return folder.into();
    }
    let caches = if cfg!(windows) {
        from("LOCALAPPDATA").map(PathBuf::from)
    } else {
        let home = || env::home_dir().unwrap_or_else(env::temp_dir);
        let default = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
        Some(from("XDG_CACHE_HOME").map_or_else(|| home().join(default), PathBuf::from))
    };
    caches.unwrap_or_else(env::temp_dir).join("tssd-xtask")
}
