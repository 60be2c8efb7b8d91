//! Shards: local tensors and the boxes of global tensors that they hold.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::mesh::DeviceMesh;
use crate::placement::Placement;
use crate::region::Region;
use crate::shape::check_shape;
use crate::slice::TensorSlice;
use crate::tensor::Tensor;

/// One box of a global tensor: the local tensor of a DTensor, and its shard spec.
#[derive(Clone, Debug, PartialEq)]
pub struct Shard<T = Tensor> {
    tensor: T,
    place: ShardSpec,
}

/// The spec of a shard: its slice of the global tensor and, if known, its mesh and placements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ShardSpec {
    slice: TensorSlice,
    mesh: Option<Arc<DeviceMesh>>,
    placements: Option<Arc<[Placement]>>,
}

impl ShardSpec {
    /// Creates a spec without mesh and placements.
    pub fn new(slice: TensorSlice) -> Self {
        Self { slice, mesh: None, placements: None }
    }

    /// Sets the mesh.
    ///
    /// # Errors
    ///
    /// `MeshMismatch` if the slice is from a mesh of another shape.
    pub fn with_mesh(mut self, mesh: impl Into<Arc<DeviceMesh>>) -> Result<Self> {
        let mesh = mesh.into();
        if mesh.shape() != self.slice.mesh_shape() {
            return Err(Error::new(ErrorKind::MeshMismatch).with_detail(format_args!(
                "mesh {:?}, slice of mesh {:?}",
                mesh.shape(),
                self.slice.mesh_shape()
            )));
        }
        // A mesh without dimensions counts as no mesh.
        self.mesh = Some(mesh).filter(|mesh| !mesh.shape().is_empty());
        Ok(self)
    }

    /// Sets the placements, one per mesh dimension.
    ///
    /// # Errors
    ///
    /// - `PartialPlacement` if a placement is Partial.
    /// - `UnknownPlacement` if a placement names a dimension that the tensor does not have.
    /// - `MeshMismatch` if there is not one placement per mesh dimension.
    pub fn with_placements(mut self, placements: impl Into<Arc<[Placement]>>) -> Result<Self> {
        let placements = placements.into();
        if placements.len() != self.slice.mesh_shape().len() {
            return Err(Error::new(ErrorKind::MeshMismatch).with_detail(format_args!(
                "{} placements for {} mesh dimensions",
                placements.len(),
                self.slice.mesh_shape().len()
            )));
        }
        let rank = self.slice.global_shape().len();
        for placement in placements.iter() {
            placement.division(rank)?;
        }
        self.placements = Some(placements).filter(|placements| !placements.is_empty());
        Ok(self)
    }

    /// Returns the spec of a box of the local tensor, with the same mesh and placements.
    ///
    /// Offsets and shape of the box are in elements of the local tensor.
    ///
    /// # Errors
    ///
    /// `SliceMismatch` if the box has another rank, `OutsideGlobal` if it does not lie inside the local tensor.
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_format::{Region, ShardSpec, TensorSlice};
    ///
    /// let rows = ShardSpec::new(TensorSlice::new(&[4, 0], &[4, 3], &[8, 3])?);
    /// let last = rows.subregion(&Region::new(&[3, 0], &[1, 3])?)?;
    /// assert_eq!(last.slice(), &TensorSlice::new(&[7, 0], &[1, 3], &[8, 3])?);
    /// # Ok::<(), tssd_format::Error>(())
    /// ```
    pub fn subregion(&self, region: &Region) -> Result<Self> {
        let own = &self.slice;
        // Checks the box against the local shape, as if the local tensor were the global one.
        let local_slice = TensorSlice::new(region.offsets(), region.shape(), own.local_shape())?;
        let offsets =
            own.offsets().iter().zip(local_slice.offsets()).map(|(own, inner)| own + inner);
        let offsets: Vec<u64> = offsets.collect();
        let slice = TensorSlice::new(&offsets, region.shape(), own.global_shape())?
            .with_mesh(own.mesh_shape(), own.coordinates())?;
        Ok(Self { slice, ..self.clone() })
    }

    /// Returns true if the rank holds the first replica of the shard, or if that is unknown.
    ///
    /// See [`Placement::is_first_replica`].
    pub fn is_first_replica(&self) -> bool {
        let (Some(at), Some(placements)) = (self.slice.coordinates(), self.placements()) else {
            return true;
        };
        Placement::is_first_replica(at, placements)
    }

    /// Returns the slice of the global tensor.
    pub fn slice(&self) -> &TensorSlice {
        &self.slice
    }

    /// Returns the mesh with its ranks, if known.
    pub fn mesh(&self) -> Option<&DeviceMesh> {
        self.mesh.as_deref()
    }

    /// Returns the placements, if known.
    pub fn placements(&self) -> Option<&[Placement]> {
        self.placements.as_deref()
    }

    /// Returns the mesh as the object that specs share.
    pub(crate) fn shared_mesh(&self) -> Option<&Arc<DeviceMesh>> {
        self.mesh.as_ref()
    }

    /// Returns the placements as the object that specs share.
    pub(crate) fn shared_placements(&self) -> Option<&Arc<[Placement]>> {
        self.placements.as_ref()
    }
}

impl<T> Shard<T> {
    /// Returns the local tensor.
    pub fn tensor(&self) -> &T {
        &self.tensor
    }

    /// Returns the spec of the shard.
    pub fn spec(&self) -> &ShardSpec {
        &self.place
    }

    /// Returns the slice of the global tensor.
    pub fn slice(&self) -> &TensorSlice {
        &self.place.slice
    }
}

impl Shard<Tensor> {
    /// Creates a shard from a local tensor and its spec.
    ///
    /// # Errors
    ///
    /// `SliceMismatch` if the slice has another shape than the tensor, `ShapeOverflow` if the global
    /// tensor would have 2^63 bytes or more.
    pub fn new(tensor: Tensor, place: ShardSpec) -> Result<Self> {
        if place.slice.local_shape() != tensor.meta().shape() {
            return Err(Error::new(ErrorKind::SliceMismatch).with_detail(format_args!(
                "slice {:?}, tensor {:?}",
                place.slice.local_shape(),
                tensor.meta().shape()
            )));
        }
        check_shape(tensor.meta().dtype().itemsize(), place.slice.global_shape())?;
        Ok(Self { tensor, place })
    }
}
