//! Archives that this process reads by itself.

use std::sync::Arc;

use tssd_format::Blob;

use super::cow_map::PrivateMaps;

/// An open archive in this process's memory, in a mapped file, or on a device.
#[derive(Clone)]
pub(crate) struct Near {
    pub(crate) blob: Arc<dyn Blob>,
    /// Copy-on-write maps of the file that contains the archive, and the byte of the file at which the archive begins.
    pub(crate) maps: Option<(Arc<PrivateMaps>, u64)>,
    /// Whether the index has checksums of the data. It has none if the writer left the data in device memory.
    pub(crate) is_summed: bool,
}

impl Near {
    pub(crate) fn new(blob: impl Blob + 'static) -> Self {
        Self { blob: Arc::new(blob), maps: None, is_summed: true }
    }

    /// An archive whose index has no checksums of its data.
    #[cfg(target_os = "linux")]
    pub(crate) fn without_checksums(blob: impl Blob + 'static) -> Self {
        Self { is_summed: false, ..Self::new(blob) }
    }

    pub(crate) fn mapped(self, maps: Arc<PrivateMaps>, start: u64) -> Self {
        Self { maps: Some((maps, start)), ..self }
    }
}
