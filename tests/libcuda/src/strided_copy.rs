//! Copies of two and three dimensions, split into rows.

use std::ffi::{c_uint, c_void};

use crate::memory::CopyAddress;
use crate::result::Code;

/// Maximum pitch in bytes: the length of a row and of the gap after it.
pub(crate) const MAX_PITCH: i32 = i32::MAX;

/// One end of a copy of two dimensions.
#[repr(C)]
#[derive(Clone, Copy)]
struct Copy2dEnd {
    x: usize,
    y: usize,
    kind: c_uint,
    host: *const c_void,
    device: u64,
    _array: *const c_void,
    pitch: usize,
}

/// A copy of two dimensions.
#[repr(C)]
pub struct CUDA_MEMCPY2D {
    source: Copy2dEnd,
    target: Copy2dEnd,
    width: usize,
    height: usize,
}

/// One end of a copy of three dimensions.
#[repr(C)]
struct Copy3dEnd {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: c_uint,
    host: *const c_void,
    device: u64,
    _array: *const c_void,
    reserved: *const c_void,
    pitch: usize,
    height: usize,
}

/// A copy of three dimensions.
#[repr(C)]
pub struct CUDA_MEMCPY3D {
    source: Copy3dEnd,
    target: Copy3dEnd,
    width: usize,
    height: usize,
    depth: usize,
}

impl From<Copy2dEnd> for Copy3dEnd {
    fn from(plane: Copy2dEnd) -> Self {
        let Copy2dEnd { x, y, kind, host, device, pitch, .. } = plane;
        Self {
            x,
            y,
            z: 0,
            level: 0,
            kind,
            host,
            device,
            _array: std::ptr::null(),
            reserved: std::ptr::null(),
            pitch,
            height: 0,
        }
    }
}

impl Copy3dEnd {
    /// Checks the bounds of a copy before any row is computed.
    fn check(&self, copy: &CUDA_MEMCPY3D) -> Result<(), Code> {
        let fits = |first: usize, len: usize, total: usize| {
            first.checked_add(len).is_some_and(|end| end <= total)
        };
        // The height is the distance of planes in rows. A single plane does not need it.
        let fits_height =
            (copy.depth <= 1 && self.z == 0) || fits(self.y, copy.height, self.height);
        let fits_pitch = usize::try_from(MAX_PITCH).is_ok_and(|max| self.pitch <= max);
        let is_linear = self.level == 0 && self.reserved.is_null();
        let is_valid =
            fits(self.x, copy.width, self.pitch) && fits_height && fits_pitch && is_linear;
        if is_valid { Ok(()) } else { Err(Code::InvalidValue) }
    }

    /// Returns the start address of a row.
    fn row(&self, z: usize, y: usize) -> Result<CopyAddress, Code> {
        const HOST: c_uint = 1;
        const DEVICE: c_uint = 2;
        let first = match self.kind {
            HOST => CopyAddress::Host(self.host.addr()),
            DEVICE => CopyAddress::Device(self.device),
            _ => return Err(Code::InvalidValue),
        };
        let rows = self.z.checked_add(z).and_then(|z| z.checked_mul(self.height));
        let rows = rows.and_then(|rows| rows.checked_add(self.y)?.checked_add(y));
        let bytes = rows.and_then(|rows| rows.checked_mul(self.pitch)?.checked_add(self.x));
        first.offset_by(bytes.ok_or(Code::InvalidValue)?)
    }
}

impl CUDA_MEMCPY2D {
    /// Returns the target and source address of each row, and the length of a row in bytes.
    pub(crate) fn rows(&self) -> Result<(Vec<(CopyAddress, CopyAddress)>, usize), Code> {
        let (source, target) = (self.source.into(), self.target.into());
        CUDA_MEMCPY3D { source, target, width: self.width, height: self.height, depth: 1 }.rows()
    }
}

impl CUDA_MEMCPY3D {
    /// Returns the target and source address of each row, and the length of a row in bytes.
    pub(crate) fn rows(&self) -> Result<(Vec<(CopyAddress, CopyAddress)>, usize), Code> {
        self.source.check(self)?;
        self.target.check(self)?;
        let mut rows = Vec::new();
        for z in 0..self.depth {
            for y in 0..self.height {
                rows.push((self.target.row(z, y)?, self.source.row(z, y)?));
            }
        }
        Ok((rows, self.width))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuCtxSetCurrent, cuMemAlloc_v2, cuMemFree_v2, cuMemcpy2DAsync_v2, cuMemcpy3DAsync_v2,
        cuMemsetD8Async, cuStreamSynchronize, lock,
    };

    /// The default stream.
    const STREAM: *mut c_void = std::ptr::null_mut();

    fn copy_end(
        kind: c_uint,
        host: *const u8,
        device: u64,
        pitch: usize,
        height: usize,
    ) -> Copy3dEnd {
        Copy3dEnd {
            x: 0,
            y: 0,
            z: 0,
            level: 0,
            kind,
            host: host.cast(),
            device,
            _array: std::ptr::null(),
            reserved: std::ptr::null(),
            pitch,
            height,
        }
    }

    #[test]
    fn layouts_match_the_driver() {
        assert_eq!(size_of::<CUDA_MEMCPY2D>(), 128);
        assert_eq!(size_of::<CUDA_MEMCPY3D>(), 200);
        assert_eq!(std::mem::offset_of!(CUDA_MEMCPY2D, target.pitch), 104);
        assert_eq!(std::mem::offset_of!(CUDA_MEMCPY3D, target.pitch), 160);
    }

    #[test]
    fn copies_of_2_and_3_dimensions_move_the_right_rows() {
        let _lock = lock(&crate::TESTS);
        assert_eq!(cuCtxSetCurrent(crate::context::primary(0).unwrap()), 0);
        let mut there = 0;
        // SAFETY: the pointer is valid for writing.
        assert_eq!(unsafe { cuMemAlloc_v2(&raw mut there, 1000) }, 0);
        assert_eq!(cuMemsetD8Async(there, 7, 1000, STREAM), 0);
        // Copies 2 planes of 2 rows of 3 bytes into a box of 5 × 4 × 3 bytes, at (1, 1, 1).
        let from: Vec<u8> = (100..112).collect();
        let source = copy_end(1, from.as_ptr(), 0, 3, 2);
        let target = Copy3dEnd { x: 1, y: 1, z: 1, ..copy_end(2, std::ptr::null(), there, 5, 4) };
        let mut copy = CUDA_MEMCPY3D { source, target, width: 3, height: 2, depth: 2 };
        // SAFETY: the vector lives until the stream is synchronized below.
        assert_eq!(unsafe { cuMemcpy3DAsync_v2(&raw const copy, STREAM) }, 0);
        // Copies the second and third plane back, without their first column.
        let mut found = [0; 2 * 4 * 4];
        let host = found.as_mut_ptr().cast_const().cast();
        let (array, device) = (std::ptr::null(), there);
        let source = Copy2dEnd { x: 1, y: 4, kind: 2, host, device, _array: array, pitch: 5 };
        let target = Copy2dEnd { x: 0, y: 0, kind: 1, host, device: 0, _array: array, pitch: 4 };
        let mut plane = CUDA_MEMCPY2D { source, target, width: 4, height: 8 };
        // SAFETY: the array lives until the stream is synchronized below.
        assert_eq!(unsafe { cuMemcpy2DAsync_v2(&raw const plane, STREAM) }, 0);
        assert_eq!(cuStreamSynchronize(STREAM), 0);
        let rows = |first: u8| [[7; 4], [first, first + 1, first + 2, 7]];
        let expected = [rows(100)[0], rows(100)[1], rows(103)[1], rows(0)[0]];
        let others = [rows(0)[0], rows(106)[1], rows(109)[1], rows(0)[0]];
        assert_eq!(found.as_slice(), [expected, others].as_flattened().as_flattened());

        for (x, pitch) in [(0, 3), (2, 5), (0, 1 << 31)] {
            plane.source = Copy2dEnd { x, pitch, ..plane.source };
            // SAFETY: the copy is rejected, so no memory is accessed.
            assert_eq!(unsafe { cuMemcpy2DAsync_v2(&raw const plane, STREAM) }, 1);
        }
        copy.target.height = 2;
        // SAFETY: the copy is rejected, so no memory is accessed.
        assert_eq!(unsafe { cuMemcpy3DAsync_v2(&raw const copy, STREAM) }, 1);
        assert_eq!(cuMemFree_v2(there), 0);
    }
}
