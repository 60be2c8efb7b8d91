//! Copies of planes and of boxes, as the rows that they are.

use std::ffi::{c_uint, c_void};

use crate::memory::Side;
use crate::result::Code;

/// What a row and the gap after it may be together, at most.
pub(crate) const MAX_PITCH: i32 = i32::MAX;

/// One end of the copy of a plane.
#[repr(C)]
#[derive(Clone, Copy)]
struct Plane {
    x: usize,
    y: usize,
    kind: c_uint,
    host: *const c_void,
    device: u64,
    _array: *const c_void,
    pitch: usize,
}

/// A copy of a plane.
#[repr(C)]
pub struct CUDA_MEMCPY2D {
    source: Plane,
    target: Plane,
    width: usize,
    height: usize,
}

/// One end of the copy of a box.
#[repr(C)]
struct Space {
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

/// A copy of a box.
#[repr(C)]
pub struct CUDA_MEMCPY3D {
    source: Space,
    target: Space,
    width: usize,
    height: usize,
    depth: usize,
}

impl From<Plane> for Space {
    fn from(plane: Plane) -> Self {
        let Plane { x, y, kind, host, device, pitch, .. } = plane;
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

impl Space {
    /// What is not copied has no addresses.
    fn check(&self, copy: &CUDA_MEMCPY3D) -> Result<(), Code> {
        let fits = |first: usize, len: usize, all: usize| {
            first.checked_add(len).is_some_and(|end| end <= all)
        };
        // One plane has no other after it, so that nobody needs to know its height.
        let has_height = (copy.depth <= 1 && self.z == 0) || fits(self.y, copy.height, self.height);
        let is_short = usize::try_from(MAX_PITCH).is_ok_and(|longest| self.pitch <= longest);
        let is_plain = self.level == 0 && self.reserved.is_null();
        let is_right = fits(self.x, copy.width, self.pitch) && has_height && is_short && is_plain;
        if is_right { Ok(()) } else { Err(Code::InvalidValue) }
    }

    /// Where a row begins.
    fn row(&self, z: usize, y: usize) -> Result<Side, Code> {
        const HOST: c_uint = 1;
        const DEVICE: c_uint = 2;
        let first = match self.kind {
            HOST => Side::Host(self.host.addr()),
            DEVICE => Side::Device(self.device),
            _ => return Err(Code::InvalidValue),
        };
        let rows = self.z.checked_add(z).and_then(|z| z.checked_mul(self.height));
        let rows = rows.and_then(|rows| rows.checked_add(self.y)?.checked_add(y));
        let bytes = rows.and_then(|rows| rows.checked_mul(self.pitch)?.checked_add(self.x));
        first.after(bytes.ok_or(Code::InvalidValue)?)
    }
}

impl CUDA_MEMCPY2D {
    /// Where rows are copied to and from, and how long each is.
    pub(crate) fn rows(&self) -> Result<(Vec<(Side, Side)>, usize), Code> {
        let (source, target) = (self.source.into(), self.target.into());
        CUDA_MEMCPY3D { source, target, width: self.width, height: self.height, depth: 1 }.rows()
    }
}

impl CUDA_MEMCPY3D {
    /// As above.
    pub(crate) fn rows(&self) -> Result<(Vec<(Side, Side)>, usize), Code> {
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
        cuMemsetD8Async, cuStreamSynchronize, held,
    };

    /// The default stream.
    const STREAM: *mut c_void = std::ptr::null_mut();

    fn space(kind: c_uint, host: *const u8, device: u64, pitch: usize, height: usize) -> Space {
        Space {
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
    fn layouts_are_those_of_the_driver() {
        assert_eq!(size_of::<CUDA_MEMCPY2D>(), 128);
        assert_eq!(size_of::<CUDA_MEMCPY3D>(), 200);
        assert_eq!(std::mem::offset_of!(CUDA_MEMCPY2D, target.pitch), 104);
        assert_eq!(std::mem::offset_of!(CUDA_MEMCPY3D, target.pitch), 160);
    }

    #[test]
    fn a_box_and_a_plane_are_where_they_belong() {
        let _turn = held(&crate::TESTS);
        assert_eq!(cuCtxSetCurrent(crate::context::of(0).unwrap()), 0);
        let mut there = 0;
        // SAFETY: there is room for a pointer.
        assert_eq!(unsafe { cuMemAlloc_v2(&raw mut there, 1000) }, 0);
        assert_eq!(cuMemsetD8Async(there, 7, 1000, STREAM), 0);
        // Rows of 3 bytes, 2 in each of 2 planes, into a box of 5 × 4 × 3 behind (1, 1, 1).
        let from: Vec<u8> = (100..112).collect();
        let source = space(1, from.as_ptr(), 0, 3, 2);
        let target = Space { x: 1, y: 1, z: 1, ..space(2, std::ptr::null(), there, 5, 4) };
        let mut copy = CUDA_MEMCPY3D { source, target, width: 3, height: 2, depth: 2 };
        // SAFETY: the vector is there until the stream has done with it.
        assert_eq!(unsafe { cuMemcpy3DAsync_v2(&raw const copy, STREAM) }, 0);
        // Its second and third plane, and of them all but the first column.
        let mut found = [0; 2 * 4 * 4];
        let host = found.as_mut_ptr().cast_const().cast();
        let (array, device) = (std::ptr::null(), there);
        let source = Plane { x: 1, y: 4, kind: 2, host, device, _array: array, pitch: 5 };
        let target = Plane { x: 0, y: 0, kind: 1, host, device: 0, _array: array, pitch: 4 };
        let mut plane = CUDA_MEMCPY2D { source, target, width: 4, height: 8 };
        // SAFETY: as above.
        assert_eq!(unsafe { cuMemcpy2DAsync_v2(&raw const plane, STREAM) }, 0);
        assert_eq!(cuStreamSynchronize(STREAM), 0);
        let rows = |first: u8| [[7; 4], [first, first + 1, first + 2, 7]];
        let expected = [rows(100)[0], rows(100)[1], rows(103)[1], rows(0)[0]];
        let others = [rows(0)[0], rows(106)[1], rows(109)[1], rows(0)[0]];
        assert_eq!(found.as_slice(), [expected, others].as_flattened().as_flattened());

        for (x, pitch) in [(0, 3), (2, 5), (0, 1 << 31)] {
            plane.source = Plane { x, pitch, ..plane.source };
            // SAFETY: nothing is copied.
            assert_eq!(unsafe { cuMemcpy2DAsync_v2(&raw const plane, STREAM) }, 1);
        }
        copy.target.height = 2;
        // SAFETY: as above.
        assert_eq!(unsafe { cuMemcpy3DAsync_v2(&raw const copy, STREAM) }, 1);
        assert_eq!(cuMemFree_v2(there), 0);
    }
}
