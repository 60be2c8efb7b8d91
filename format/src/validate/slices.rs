//! Slices: meshes, ranks, placements, names. Spec: section 7.

use super::claims::Claims;
use super::{Validator, narrow};
use crate::error::{Error, ErrorKind, Result};
use crate::record::{self, NONE};
use crate::shape::MAX_RANK;

/// The longest name of a mesh dimension. Names are looked at for every slice, so they are short.
const MAX_NAME_BYTES: usize = 256;

impl Validator<'_> {
    pub(super) fn slices(&mut self) -> Result<()> {
        let views = self.views;
        let mut placements = Claims::new(views.placements.len());
        for slice in views.slices {
            self.slice(slice, &mut placements)?;
        }
        if !placements.is_complete() {
            return Err(Error::new(ErrorKind::UnknownPlacement).note("placements of no slice"));
        }
        Ok(())
    }

    fn slice(&mut self, slice: &record::Slice, placements: &mut Claims) -> Result<()> {
        let wrong = |note: &str| Error::new(ErrorKind::MeshMismatch).note(note);
        let (rank, mesh_rank) = (u64::from(slice.rank), u64::from(slice.mesh_rank));
        self.claim_dims(slice.offsets.to_native(), rank)?;
        self.claim_dims(slice.global_shape.to_native(), rank)?;
        let fields = [slice.mesh, slice.coordinates, slice.ranks, slice.placements, slice.names];
        if slice.flags != 0 {
            return Err(wrong("flags"));
        }
        if mesh_rank == 0 {
            let none = fields.iter().all(|field| *field == NONE);
            return if none { Ok(()) } else { Err(wrong("a part of no mesh")) };
        }
        if usize::from(slice.mesh_rank) > MAX_RANK || slice.mesh == NONE {
            return Err(wrong("mesh"));
        }
        let mesh = self.views.dims_at(slice.mesh.to_native(), mesh_rank)?;
        let size = mesh.iter().try_fold(1_u64, |size, dim| size.checked_mul(*dim));
        let size = size.filter(|size| (1..1 << 32).contains(size)).ok_or_else(|| wrong("size"))?;
        if slice.ranks == NONE {
            self.claim_dims(slice.mesh.to_native(), mesh_rank)?;
        } else {
            self.mesh_with_ranks(slice, size)?;
        }
        if slice.coordinates != NONE {
            let coordinates = self.claim_dims(slice.coordinates.to_native(), mesh_rank)?;
            if coordinates.iter().zip(mesh).any(|(coordinate, size)| coordinate >= size) {
                return Err(wrong("coordinates outside the mesh"));
            }
        }
        if slice.placements != NONE {
            self.placements(slice, placements)?;
        }
        if slice.names != NONE {
            if slice.ranks == NONE {
                return Err(wrong("names without ranks"));
            }
            let mut seen = std::collections::BTreeSet::new();
            for name in self.claim_dims(slice.names.to_native(), mesh_rank)? {
                let name = self.claim_heap(*name)?;
                if name.len() > MAX_NAME_BYTES {
                    return Err(wrong("long name"));
                }
                if !seen.insert(std::str::from_utf8(name).map_err(|_| wrong("name is not UTF-8"))?)
                {
                    return Err(wrong("two dimensions have one name"));
                }
            }
        }
        Ok(())
    }

    /// A mesh whose ranks follow its shape. Each is looked at once, however many slices name it.
    fn mesh_with_ranks(&mut self, slice: &record::Slice, size: u64) -> Result<()> {
        let wrong = |note: &str| Error::new(ErrorKind::MeshMismatch).note(note);
        let start = u64::from(slice.mesh.to_native());
        let mesh_rank = u64::from(slice.mesh_rank);
        let (first, len) = (start + mesh_rank, mesh_rank + size);
        if u64::from(slice.ranks.to_native()) != first {
            return Err(wrong("ranks do not follow the mesh"));
        }
        if self.meshes.get(&start) == Some(&len) {
            return Ok(());
        }
        let mesh = self.claim_dims(slice.mesh.to_native(), len)?;
        let (_, ranks) = mesh.split_at(usize::from(slice.mesh_rank));
        let before = self.meshes.range(..=start).next_back();
        let after = self.meshes.range(start..).next();
        if before.is_some_and(|(other, len)| other + len > start)
            || after.is_some_and(|(other, _)| start + len > *other)
        {
            return Err(wrong("meshes overlap"));
        }
        self.meshes.insert(start, len);
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if sorted.last().is_some_and(|last| *last >= 1 << 32) {
            return Err(wrong("rank"));
        }
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(wrong("a rank is there twice"));
        }
        Ok(())
    }

    fn placements(&self, slice: &record::Slice, claims: &mut Claims) -> Result<()> {
        let wrong = |note: &str| Error::new(ErrorKind::UnknownPlacement).note(note);
        let first = u64::from(slice.placements.to_native());
        if !claims.in_order(first, u64::from(slice.mesh_rank)) {
            return Err(wrong("placements are out of order"));
        }
        let first = narrow(first);
        for placement in &self.views.placements[first..first + usize::from(slice.mesh_rank)] {
            let (dim, factor) = (placement.dim.to_native(), placement.split_factor.to_native());
            let fits = match placement.kind {
                0 => dim == 0 && factor == 0,
                1 => dim < u32::from(slice.rank) && factor == 0,
                2 => dim < u32::from(slice.rank) && factor > 0,
                _ => false,
            };
            if !fits || placement.reserved != [0; 3] {
                return Err(wrong("kind, dim or split_factor"));
            }
        }
        Ok(())
    }
}
