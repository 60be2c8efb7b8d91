//! Device meshes as plain data: the global rank at each coordinate.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::record::MAX_NAME_BYTES;
use crate::region::check_rank;

/// The device mesh of a `DTensor`: shape, global ranks and optional dimension names.
///
/// The shape is in devices. The ranks are in row-major order of the coordinates. They are distinct, and there is at
/// least one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeviceMesh {
    shape: Box<[u64]>,
    /// Shared, because thousands of tensors of a state dict have the same mesh.
    ranks: Arc<[u32]>,
    dim_names: Option<Box<[String]>>,
}

impl DeviceMesh {
    /// Creates the mesh of `shape`, in devices, with the global `ranks` in row-major order.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::RankTooLarge`] if the mesh has more than 64 dimensions.
    /// - [`ErrorKind::MeshMismatch`] if the mesh has no device, if the number of ranks is not the number of devices, or
    ///   if a rank occurs twice.
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

    /// Creates the mesh of `shape`, in devices, with the ranks 0, 1, 2 and so on in row-major order.
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
    /// - [`ErrorKind::MeshMismatch`] if there is not one name per dimension, or if a name occurs twice.
    /// - [`ErrorKind::NameLength`] if a name has more than 256 bytes.
    pub fn with_dim_names(mut self, names: Vec<String>) -> Result<Self> {
        if names.len() != self.shape.len() {
            let note = format!("{} dimensions, {} names", self.shape.len(), names.len());
            return Err(mismatch(note));
        }
        if let Some(long) = names.iter().find(|name| name.len() > MAX_NAME_BYTES) {
            return Err(Error::new(ErrorKind::NameLength)
                .with_detail(format_args!("dimension name of {} bytes", long.len())));
        }
        if let Some(name) = first_duplicate(&names) {
            return Err(mismatch(format!("dimension name `{name}` is there twice")));
        }
        self.dim_names = Some(names.into());
        Ok(self)
    }

    /// Returns the number of devices along each dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the global ranks in row-major order.
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// Returns the names of the dimensions, if they have names.
    pub fn dim_names(&self) -> Option<&[String]> {
        self.dim_names.as_deref()
    }

    /// Returns the coordinates of the global `rank`; `None` if it is not in the mesh.
    pub fn coordinates_of(&self, rank: u32) -> Option<Vec<u64>> {
        let (index, _) = (0_u64..).zip(self.ranks.iter()).find(|&(_, &other)| other == rank)?;
        Some(self.coordinates_at(index))
    }

    /// Returns the coordinates of the device with this row-major index.
    ///
    /// An index beyond the mesh wraps around.
    pub fn coordinates_at(&self, mut index: u64) -> Vec<u64> {
        let mut coordinates = vec![0; self.shape.len()];
        for (coordinate, size) in coordinates.iter_mut().zip(&self.shape).rev() {
            *coordinate = index % size;
            index /= size;
        }
        coordinates
    }

    /// Returns the global rank at `coordinates`; `None` if they are not in the mesh.
    pub fn rank_at(&self, coordinates: &[u64]) -> Option<u32> {
        check_coordinates(&self.shape, coordinates).ok()?;
        let row_major = |index, (size, coordinate): (&u64, &u64)| index * size + coordinate;
        let index = self.shape.iter().zip(coordinates).fold(0, row_major);
        self.ranks.get(usize::try_from(index).ok()?).copied()
    }
}

/// Checks that coordinates are in a mesh of `mesh_shape`.
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

/// Returns the number of devices in a mesh of `shape`, which must be at least 1.
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
    Error::new(ErrorKind::MeshMismatch).with_detail(note)
}
