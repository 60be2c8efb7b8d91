//! The caller's memory: what may be written.

use std::any::Any;
use std::marker::PhantomData;
use std::{fmt, io};

use tssd_format::{Blob, Error, ErrorKind, Result, Runs, ShardPlace, TensorMeta};

use super::wide;

/// A tensor in the caller's memory that a get fills.
#[derive(Debug)]
pub struct Target<'a> {
    /// The leaf.
    pub fqn: String,
    /// The part of the leaf that is wanted; none is all of it.
    pub place: Option<ShardPlace>,
    /// Dtype, shape and strides of the memory.
    pub meta: TensorMeta,
    /// The memory, from the first element to the last.
    pub memory: TargetMemory<'a>,
}

/// Memory that a get fills.
#[derive(Debug)]
pub enum TargetMemory<'a> {
    /// This process's.
    Here(&'a mut [u8]),
    /// What is written and not seen, such as a GPU's.
    Elsewhere(&'a dyn BlobMut),
}

/// Bytes that can be written at any place, by several threads at once, each its own.
pub trait BlobMut: fmt::Debug + Send + Sync {
    /// Its length in bytes.
    fn size(&self) -> u64;

    /// Writes bytes from `offset` on: they are there when this returns.
    ///
    /// # Errors
    ///
    /// Whatever the system says; `UnexpectedEof` if there is no room for so many bytes.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Whether bytes can be copied straight from a blob, such as within one GPU, or to it from memory that its driver has
    /// pinned.
    fn takes(&self, source: &dyn Blob) -> bool {
        let _ = source;
        false
    }

    /// Begins to copy straight from a blob that it [`takes`](Self::takes), together with what is under way already.
    ///
    /// # Errors
    ///
    /// Whatever the system says; `Unsupported` if it does not take it.
    fn begin_copy<'a>(
        &'a self,
        source: &'a dyn Blob,
        copies: &[BlobCopy<'_>],
        under_way: &mut UnderWay<'a>,
    ) -> io::Result<()> {
        let _ = (source, copies, under_way);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Runs of bytes from one blob to another.
#[derive(Clone, Copy, Debug)]
pub struct BlobCopy<'a> {
    /// The byte that the first one begins at in the source.
    pub source: u64,
    /// And in the target.
    pub target: u64,
    /// The runs, counted from there.
    pub runs: &'a Runs,
}

/// Copies that have begun one after the other, such as on a stream of a GPU. Dropped, they are waited for.
pub trait Coming: Any + Send {
    /// Waits until all of them are done.
    ///
    /// # Errors
    ///
    /// Whatever the system says.
    fn wait(self: Box<Self>) -> io::Result<()>;
}

/// Copies from and to what is borrowed that have begun. Dropped, they are waited for.
///
/// Targets begin theirs together where they can: to wait for each of many alone would take longer than to copy it.
#[derive(Default)]
pub struct UnderWay<'a> {
    coming: Vec<Box<dyn Coming>>,
    borrowed: PhantomData<&'a dyn Blob>,
}

impl UnderWay<'_> {
    /// What has begun of a kind, or begins now.
    ///
    /// # Errors
    ///
    /// Whatever `begin` says.
    pub fn of<T: Coming>(
        &mut self,
        is_it: impl Fn(&T) -> bool,
        begin: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<&mut T> {
        let known = self.coming.iter().position(|coming| {
            let coming: &dyn Any = &**coming;
            coming.downcast_ref().is_some_and(&is_it)
        });
        let place = if let Some(place) = known {
            place
        } else {
            self.coming.push(Box::new(begin()?));
            self.coming.len() - 1
        };
        let coming: &mut dyn Any = &mut *self.coming[place];
        Ok(coming.downcast_mut().expect("it is of the kind that was looked for"))
    }

    /// Waits until all of them are done.
    ///
    /// # Errors
    ///
    /// Whatever the system says.
    pub fn wait(self) -> io::Result<()> {
        self.coming.into_iter().try_for_each(Coming::wait)
    }
}

impl<'a> From<&'a mut [u8]> for TargetMemory<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self::Here(bytes)
    }
}

impl<'a> From<&'a mut Vec<u8>> for TargetMemory<'a> {
    fn from(bytes: &'a mut Vec<u8>) -> Self {
        Self::Here(bytes)
    }
}

impl<'a, const N: usize> From<&'a mut [u8; N]> for TargetMemory<'a> {
    fn from(bytes: &'a mut [u8; N]) -> Self {
        Self::Here(bytes)
    }
}

impl TargetMemory<'_> {
    fn len(&self) -> u64 {
        match self {
            Self::Here(bytes) => wide(bytes.len()),
            Self::Elsewhere(blob) => blob.size(),
        }
    }
}

/// Proves that a target's memory holds its tensor.
pub(super) fn expect_room(target: &Target<'_>) -> Result<()> {
    let (needed, found) = (span(&target.meta), target.memory.len());
    if needed <= found {
        return Ok(());
    }
    let note = format_args!("{found} bytes, needed {needed}");
    Err(Error::new(ErrorKind::TargetSize).at(&target.fqn).note(note))
}

/// Proves that each element of a tensor has a place of its own.
pub(super) fn expect_apart(fqn: &str, meta: &TensorMeta) -> Result<()> {
    if meta.is_contiguous() {
        return Ok(());
    }
    let strides = meta.strides();
    let mut dims: Vec<(u64, u64)> = strides
        .into_iter()
        .zip(meta.shape().iter().copied())
        .filter(|(_, size)| *size > 1)
        .collect();
    dims.sort_unstable();
    let mut reach = 1;
    for (stride, size) in dims {
        if stride < reach {
            let strides = meta.strides();
            let note = format_args!("elements of the target overlap: strides {strides:?}");
            return Err(Error::new(ErrorKind::Overlap).at(fqn).note(note));
        }
        reach += stride * (size - 1);
    }
    Ok(())
}

/// How many bytes a tensor spans.
pub(super) fn span(meta: &TensorMeta) -> u64 {
    if meta.numel() == 0 { 0 } else { meta.span_bytes() }
}
