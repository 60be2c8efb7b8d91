//! Archives that this process reads directly.

use std::sync::Arc;

use tssd_format::Blob;

use super::cow_map::CowMapPool;

/// An open archive in this process's memory, in a mapped file, or on a device.
#[derive(Clone)]
pub(crate) struct LocalArchive {
    pub(crate) blob: Arc<dyn Blob>,
    /// Copy-on-write maps of the file that contains the archive, and the offset of the archive in the file.
    pub(crate) maps: Option<(Arc<CowMapPool>, u64)>,
    /// Whether the index has checksums of the data.
    ///
    /// It has none if the writer left the data in device memory.
    pub(crate) has_checksums: bool,
}

impl LocalArchive {
    pub(crate) fn new(blob: impl Blob + 'static) -> Self {
        Self { blob: Arc::new(blob), maps: None, has_checksums: true }
    }

    /// An archive whose index has no checksums of its data.
    #[cfg(target_os = "linux")]
    pub(crate) fn without_checksums(blob: impl Blob + 'static) -> Self {
        Self { has_checksums: false, ..Self::new(blob) }
    }

    pub(crate) fn with_maps(self, maps: Arc<CowMapPool>, start: u64) -> Self {
        Self { maps: Some((maps, start)), ..self }
    }
}
