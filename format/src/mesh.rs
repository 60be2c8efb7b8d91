//! Device meshes as pure data: which global rank stands at which coordinates.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::region::check_rank;

/// The device mesh of a `DTensor`: its shape in devices, the global rank at each of its coordinates
/// in row-major order, and optionally a name for each dimension.
///
/// The ranks are distinct, and there is at least one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeviceMesh {
    shape: Box<[u64]>,
    /// Shared: a state dict has one mesh and thousands of tensors on it.
    ranks: Arc<[u32]>,
    dim_names: Option<Box<[String]>>,
}

impl DeviceMesh {
    /// The mesh of `shape`, in devices, with the global `ranks` in row-major order.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::RankTooLarge`] if the mesh has more than 64 dimensions.
    /// - [`ErrorKind::MeshMismatch`] if the mesh has no device, the number of ranks is not the
    ///   number of devices, or a rank is there twice.
    pub fn new(shape: &[u64], ranks: &[u32]) -> Result<Self> {
        let count = device_count(shape)?;
        if u64::try_from(ranks.len()).ok() != Some(count) {
            return Err(mismatch(format!("{count} devices, {} ranks", ranks.len())));
        }
        if let Some(rank) = first_duplicate(ranks) {
            return Err(mismatch(format!("rank {rank} is there twice")));
        }
        Ok(Self { shape: shape.into(), ranks: ranks.into(), dim_names: None })
    }

    /// The mesh of `shape`, in devices, whose ranks are 0, 1, 2 and so on in row-major order.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::RankTooLarge`] if the mesh has more than 64 dimensions.
    /// - [`ErrorKind::MeshMismatch`] if the mesh has no device, or more than `u32::MAX`.
    pub fn from_shape(shape: &[u64]) -> Result<Self> {
        let count = device_count(shape)?;
        let count = u32::try_from(count).map_err(|_| mismatch(format!("{count} devices")))?;
        Ok(Self { shape: shape.into(), ranks: (0..count).collect(), dim_names: None })
    }

    /// Names the dimensions, as `init_device_mesh(mesh_dim_names=...)` does.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::MeshMismatch`] if there is not one name per dimension, or a name is there
    /// twice.
    pub fn with_dim_names(mut self, names: Vec<String>) -> Result<Self> {
        if names.len() != self.shape.len() {
            let note = format!("{} dimensions, {} names", self.shape.len(), names.len());
            return Err(mismatch(note));
        }
        if names.iter().any(|name| name.len() > 256) {
            return Err(mismatch("dimension name of more than 256 bytes".to_owned()));
        }
        if let Some(name) = first_duplicate(&names) {
            return Err(mismatch(format!("dimension name `{name}` is there twice")));
        }
        self.dim_names = Some(names.into());
        Ok(self)
    }

    /// The number of devices along each dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The global ranks in row-major order.
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// The names of the dimensions, if they have names.
    pub fn dim_names(&self) -> Option<&[String]> {
        self.dim_names.as_deref()
    }

    /// Where the global `rank` stands; `None` if it is not in the mesh.
    pub fn coordinates_of(&self, rank: u32) -> Option<Vec<u64>> {
        let (mut index, _) = (0_u64..).zip(self.ranks.iter()).find(|&(_, &other)| other == rank)?;
        let mut coordinates = vec![0; self.shape.len()];
        for (coordinate, size) in coordinates.iter_mut().zip(&self.shape).rev() {
            *coordinate = index % size;
            index /= size;
        }
        Some(coordinates)
    }

    /// The global rank at `coordinates`; `None` if they are not in the mesh.
    pub fn rank_at(&self, coordinates: &[u64]) -> Option<u32> {
        check_coordinates(&self.shape, coordinates).ok()?;
        let row_major = |index, (size, coordinate): (&u64, &u64)| index * size + coordinate;
        let index = self.shape.iter().zip(coordinates).fold(0, row_major);
        self.ranks.get(usize::try_from(index).ok()?).copied()
    }
}

/// Refuses coordinates that are not in a mesh of `mesh_shape`.
pub(crate) fn check_coordinates(mesh_shape: &[u64], coordinates: &[u64]) -> Result<()> {
    if coordinates.len() != mesh_shape.len() {
        let (dims, count) = (mesh_shape.len(), coordinates.len());
        return Err(mismatch(format!("{dims} mesh dimensions, {count} coordinates")));
    }
    for (&coordinate, &size) in coordinates.iter().zip(mesh_shape) {
        if coordinate >= size {
            let note = format!("coordinate {coordinate} in a mesh dimension of {size}");
            return Err(mismatch(note));
        }
    }
    Ok(())
}

/// The number of devices in a mesh of `shape`: at least one.
pub(crate) fn device_count(shape: &[u64]) -> Result<u64> {
    check_rank(shape)?;
    if shape.contains(&0) {
        return Err(mismatch(format!("mesh shape {shape:?} has no device")));
    }
    let count = shape.iter().try_fold(1_u64, |product, &size| product.checked_mul(size));
    count.ok_or_else(|| mismatch(format!("mesh shape {shape:?} overflows")))
}

fn first_duplicate<T: Ord>(values: &[T]) -> Option<&T> {
    let mut sorted: Vec<&T> = values.iter().collect();
    sorted.sort_unstable();
    sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

fn mismatch(note: String) -> Error {
    Error::new(ErrorKind::MeshMismatch).note(note)
}
