//! Tensor slices: the part of a global tensor that one rank holds.

use crate::error::{Error, ErrorKind, Result};
use crate::mesh::{DeviceMesh, check_coordinates, device_count};
use crate::placement::Placement;
use crate::region::{Region, check_rank};

/// One rank's part of a global tensor, as torchstore describes it.
///
/// It is a box of the global tensor and the coordinates of the rank in its device mesh. The box lies
/// inside the global shape, and the coordinates inside the mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorSlice {
    region: Region,
    global_shape: Box<[u64]>,
    coordinates: Option<Box<[u64]>>,
    mesh_shape: Box<[u64]>,
}

impl TensorSlice {
    /// Creates a slice of a tensor of `global_shape` that starts at `offsets` and has `local_shape`.
    ///
    /// All three are in elements. The slice has no mesh: its mesh shape has no dimensions, and it has
    /// no coordinates.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::SliceMismatch`] if the three arguments have different lengths.
    /// - [`ErrorKind::RankTooLarge`] if there are more than 64 dimensions.
    /// - [`ErrorKind::ShapeOverflow`] if an offset plus its size exceeds `u64::MAX`.
    /// - [`ErrorKind::OutsideGlobal`] if the slice does not lie inside the global shape.
    pub fn new(offsets: &[u64], local_shape: &[u64], global_shape: &[u64]) -> Result<Self> {
        let region = Region::new(offsets, local_shape)?;
        if region.rank() != global_shape.len() {
            let note = format!("rank {} in a shape of rank {}", region.rank(), global_shape.len());
            return Err(Error::new(ErrorKind::SliceMismatch).with_detail(note));
        }
        if !Region::whole(global_shape).contains(&region) {
            let note = format!("global shape {global_shape:?}");
            return Err(Error::new(ErrorKind::OutsideGlobal)
                .with_detail(note)
                .with_region(region.offsets(), region.shape()));
        }
        Ok(Self {
            region,
            global_shape: global_shape.into(),
            coordinates: None,
            mesh_shape: Box::default(),
        })
    }

    /// Returns the slices of a tensor of `global_shape` that the global `rank` of `mesh` holds.
    ///
    /// `global_shape` is in elements. There is one slice per box, in the order of
    /// [`Placement::local_regions`].
    ///
    /// # Errors
    ///
    /// Those of [`Placement::local_regions`], and [`ErrorKind::MeshMismatch`] if the rank is not in
    /// the mesh.
    pub fn from_placements(
        global_shape: &[u64],
        mesh: &DeviceMesh,
        rank: u32,
        placements: &[Placement],
    ) -> Result<Vec<Self>> {
        let coordinates = mesh.coordinates_of(rank).ok_or_else(|| {
            Error::new(ErrorKind::MeshMismatch)
                .with_detail(format!("rank {rank} is not in the mesh"))
        })?;
        Placement::local_regions(global_shape, mesh.shape(), &coordinates, placements)?
            .iter()
            .map(|region| {
                Self::new(region.offsets(), region.shape(), global_shape)?
                    .with_mesh(mesh.shape(), Some(&coordinates))
            })
            .collect()
    }

    /// Sets the mesh of the rank, as its shape in devices, and the coordinates of the rank, if known.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::RankTooLarge`] if the mesh has more than 64 dimensions.
    /// - [`ErrorKind::MeshMismatch`] if the coordinates are not in the mesh, or the mesh has no device
    ///   or at least 2^32 devices.
    pub fn with_mesh(mut self, mesh_shape: &[u64], coordinates: Option<&[u64]>) -> Result<Self> {
        if device_count(mesh_shape)? >= 1 << 32 {
            let note = format!("mesh {mesh_shape:?} has 2^32 devices or more");
            return Err(Error::new(ErrorKind::MeshMismatch).with_detail(note));
        }
        // A mesh without dimensions counts as no mesh and has no coordinates.
        let coordinates = coordinates.filter(|_| !mesh_shape.is_empty());
        check_rank(mesh_shape)?;
        if let Some(coordinates) = coordinates {
            check_coordinates(mesh_shape, coordinates)?;
        }
        self.mesh_shape = mesh_shape.into();
        self.coordinates = coordinates.map(Into::into);
        Ok(self)
    }

    /// Returns the start of the slice in the global tensor, in elements.
    pub fn offsets(&self) -> &[u64] {
        self.region.offsets()
    }

    /// Returns the shape of the slice, in elements.
    pub fn local_shape(&self) -> &[u64] {
        self.region.shape()
    }

    /// Returns the shape of the global tensor, in elements.
    pub fn global_shape(&self) -> &[u64] {
        &self.global_shape
    }

    /// Returns the coordinates of the rank in its mesh, if known.
    pub fn coordinates(&self) -> Option<&[u64]> {
        self.coordinates.as_deref()
    }

    /// Returns the shape of the mesh, in devices; it has no dimensions if there is no mesh.
    pub fn mesh_shape(&self) -> &[u64] {
        &self.mesh_shape
    }

    /// Returns the slice as a box of the global tensor.
    pub fn region(&self) -> &Region {
        &self.region
    }
}
