/// Bytes of a handle that identifies an allocation to other processes (`CUipcMemHandle`).
pub const HANDLE_BYTES: usize = 64;

/// Tensors of an archive that other processes read in place (CUDA IPC).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpcExport {
    /// Identifies the exporting process, which cannot open its own handles.
    pub process: [u8; 16],
    /// The allocations that contain the tensors.
    pub allocations: Vec<ExportedAllocation>,
    /// The bytes of the archive, in ascending order of their offsets.
    pub ranges: Vec<ExportedRange>,
}

/// An allocation of the exporting process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportedAllocation {
    /// The driver's handle.
    pub handle: [u8; HANDLE_BYTES],
    /// Its address in the exporting process.
    pub base: u64,
}

/// Bytes of an archive that lie in one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportedRange {
    /// Offset in the archive, in bytes.
    pub archive_offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Index of the allocation.
    pub allocation: u64,
    /// Offset in the allocation, in bytes.
    pub offset: u64,
}
