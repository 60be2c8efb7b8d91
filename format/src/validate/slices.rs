//! Validation of slices: meshes, ranks, placements and dimension names. Spec: section 7.

use super::Validator;
use super::claims::Claims;
use crate::convert::to_usize;
use crate::error::{Error, ErrorKind, Result};
use crate::record::{self, MAX_NAME_BYTES, NONE};
use crate::shape::MAX_RANK;

impl Validator<'_> {
    pub(super) fn validate_slices(&mut self) -> Result<()> {
        let views = self.views;
        let mut placements = Claims::new(views.placements.len());
        for slice in views.slices {
            self.validate_slice(slice, &mut placements)?;
        }
        if !placements.is_complete() {
            return Err(
                Error::new(ErrorKind::UnknownPlacement).with_detail("placements of no slice")
            );
        }
        Ok(())
    }

    fn validate_slice(&mut self, slice: &record::Slice, placements: &mut Claims) -> Result<()> {
        let mesh_error = |note: &str| Error::new(ErrorKind::MeshMismatch).with_detail(note);
        let (rank, mesh_rank) = (u64::from(slice.rank), u64::from(slice.mesh_rank));
        self.claim_dims(slice.offsets.to_native(), rank)?;
        self.claim_dims(slice.global_shape.to_native(), rank)?;
        let fields = [slice.mesh, slice.coordinates, slice.ranks, slice.placements, slice.names];
        if slice.flags != 0 {
            return Err(mesh_error("flags"));
        }
        if mesh_rank == 0 {
            let are_unset = fields.iter().all(|field| *field == NONE);
            return if are_unset { Ok(()) } else { Err(mesh_error("a part of no mesh")) };
        }
        if usize::from(slice.mesh_rank) > MAX_RANK || slice.mesh == NONE {
            return Err(mesh_error("mesh"));
        }
        let mesh = self.views.dims_at(slice.mesh.to_native(), mesh_rank)?;
        let size = mesh.iter().try_fold(1_u64, |size, dim| size.checked_mul(*dim));
        let size =
            size.filter(|size| (1..1 << 32).contains(size)).ok_or_else(|| mesh_error("size"))?;
        if slice.ranks == NONE {
            self.claim_dims(slice.mesh.to_native(), mesh_rank)?;
        } else {
            self.validate_mesh_with_ranks(slice, size)?;
        }
        if slice.coordinates != NONE {
            let coordinates = self.claim_dims(slice.coordinates.to_native(), mesh_rank)?;
            if coordinates.iter().zip(mesh).any(|(coordinate, size)| coordinate >= size) {
                return Err(mesh_error("coordinates outside the mesh"));
            }
        }
        if slice.placements != NONE {
            self.validate_placements(slice, placements)?;
        }
        if slice.names != NONE {
            if slice.ranks == NONE {
                return Err(mesh_error("names without ranks"));
            }
            let mut seen = std::collections::BTreeSet::new();
            // Names are short, because they are validated again for each slice.
            for name in self.claim_dims(slice.names.to_native(), mesh_rank)? {
                if !seen.insert(self.claim_name(*name, 0..=MAX_NAME_BYTES)?) {
                    return Err(mesh_error("two dimensions have one name"));
                }
            }
        }
        Ok(())
    }

    /// Validates a mesh whose ranks follow its shape in dims.
    ///
    /// Validates each mesh once, regardless of the number of slices that refer to it.
    fn validate_mesh_with_ranks(&mut self, slice: &record::Slice, size: u64) -> Result<()> {
        let mesh_error = |note: &str| Error::new(ErrorKind::MeshMismatch).with_detail(note);
        let start = u64::from(slice.mesh.to_native());
        let mesh_rank = u64::from(slice.mesh_rank);
        let (first, len) = (start + mesh_rank, mesh_rank + size);
        if u64::from(slice.ranks.to_native()) != first {
            return Err(mesh_error("ranks do not follow the mesh"));
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
            return Err(mesh_error("meshes overlap"));
        }
        self.meshes.insert(start, len);
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if sorted.last().is_some_and(|last| *last >= 1 << 32) {
            return Err(mesh_error("rank"));
        }
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(mesh_error("a rank is there twice"));
        }
        Ok(())
    }

    fn validate_placements(&self, slice: &record::Slice, claims: &mut Claims) -> Result<()> {
        let placement_error =
            |note: &str| Error::new(ErrorKind::UnknownPlacement).with_detail(note);
        let first = u64::from(slice.placements.to_native());
        if !claims.claim_in_order(first, u64::from(slice.mesh_rank)) {
            return Err(placement_error("placements are out of order"));
        }
        let first = to_usize(first);
        for placement in &self.views.placements[first..first + usize::from(slice.mesh_rank)] {
            let (dim, factor) = (placement.dim.to_native(), placement.split_factor.to_native());
            let is_valid = match placement.kind {
                0 => dim == 0 && factor == 0,
                1 => dim < u32::from(slice.rank) && factor == 0,
                2 => dim < u32::from(slice.rank) && factor > 0,
                _ => false,
            };
            if !is_valid || placement.reserved != [0; 3] {
                return Err(placement_error("kind, dim or split_factor"));
            }
        }
        Ok(())
    }
}
