//! Deltas: the difference between two versions of a state dict. Spec: section 6, "Deltas".
//!
//! A delta chunk lists the elements that differ between two versions of a chunk, and for each one the difference of the
//! two bit patterns. The chunks of a storage are independent of each other. [`DeltaEncoder`], [`DeltaDecoder`] and
//! [`DeltaFolder`] work on one chunk in memory.
//!
//! ```
//! # #[cfg(feature = "zstd")] {
//! use tssd_format::{DeltaDecoder, DeltaEncoder, DeltaOptions, ElementWidth};
//!
//! let (base, result) = ([0, 1, 2, 3], [0, 1, 2, 4]);
//! let mut chunk = Vec::new();
//! let options = DeltaOptions::default();
//! DeltaEncoder::new()?.encode([&base, &result], ElementWidth::Two, &options, &mut chunk)?;
//!
//! let mut tensor = base;
//! DeltaDecoder::new()?.apply(&chunk, ElementWidth::Two, &mut tensor)?;
//! assert_eq!(tensor, result);
//! # }
//! # Ok::<(), tssd_format::Error>(())
//! ```
// Kernels must be inlined into the function that enables their instructions.
#![allow(clippy::inline_always)]

mod add;
mod class_map;
mod classes;
mod column;
mod compare;
mod decode;
mod encode;
mod error;
mod fold;
mod layout;
mod positions;
mod resolve;
#[cfg(all(test, feature = "zstd"))]
mod tests;
mod values;

pub use self::classes::DeltaClasses;
pub use self::decode::{Change, ChangeCount, DeltaDecoder};
pub use self::encode::{DeltaEncoder, DeltaOptions, EncodedDelta};
pub use self::fold::DeltaFolder;
