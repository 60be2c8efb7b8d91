//! Plain tensors and arrays: what becomes of them on their way into a store, or when they are filled.

use std::cell::RefCell;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tssd_format::{Dtype, Region, Storage, Tensor, TensorFlags};
use tssd_store::{Stream, pieces};

use crate::device::Devices;
use crate::dlpack::Borrowed;
use crate::error::{Refusal, Result};
use crate::numpy::Numpy;
use crate::slice::{Local, index_of};
use crate::tensor::{Copies, borrowed};
use crate::torch::Torch;

/// What plain tensors are taken for.
pub(crate) enum Purpose<'py> {
    /// They are stored, some of them as another dtype.
    Store(Option<Transfer<'py>>),
    /// They are filled.
    Fill(Filling<'py>),
}

/// The dtype that floating tensors are stored as, and which are not.
pub(crate) struct Transfer<'py> {
    dtype: Dtype,
    keeps: Bound<'py, PyAny>,
    /// What is wanted of each object; none: all of it.
    part: Option<Part>,
    /// What was cast: tied tensors stay tied.
    cast: Copies<'py>,
}

/// A box of one of the local tensors that an object has.
#[derive(Clone)]
pub(crate) struct Part {
    /// Which of them.
    pub(crate) local: usize,
    pub(crate) region: Region,
}

impl<'py> Transfer<'py> {
    /// To a dtype of torch or numpy, or of that name, but for what these patterns name.
    pub(crate) fn new(dtype: &Bound<'py, PyAny>, keep: Option<&Bound<'py, PyAny>>) -> Result<Self> {
        let py = dtype.py();
        // numpy's are classes too, such as `numpy.float16`.
        let name = dtype.getattr_opt("__name__")?.map_or_else(|| dtype.str(), |name| name.str())?;
        let name = name.to_string();
        let name = name.strip_prefix("torch.").unwrap_or(&name);
        let found = Dtype::from_name(name).filter(|dtype| is_floating(*dtype));
        let dtype = found.ok_or_else(|| {
            let text =
                format!("transfer_dtype is a floating dtype, such as \"bfloat16\", not {name}");
            Refusal::new("WrongType", text)
        })?;
        let keep = keep.cloned().unwrap_or_else(|| PyTuple::empty(py).into_any());
        let keeps = py.import("tssd._names")?.call_method1("matcher", (keep,))?;
        Ok(Self { dtype, keeps, part: None, cast: Copies::default() })
    }

    /// The same of a part of each object alone.
    pub(crate) fn of_part(&self, part: Part) -> Self {
        let keeps = self.keeps.clone();
        Self { dtype: self.dtype, keeps, part: Some(part), cast: Copies::default() }
    }

    /// What an object is cast by, if it is a tensor, or shards of one, that has more than so many bytes as the other
    /// dtype; and the shape of the first of its local tensors, which all have as many dimensions.
    pub(crate) fn parts(
        &self,
        object: &Bound<'py, PyAny>,
        fqn: &str,
        limit: u64,
    ) -> Result<Option<(Vec<u64>, Vec<Part>)>> {
        let Some(local) = Local::of(object)? else { return Ok(None) };
        let mut shapes: Vec<Vec<u64>> = Vec::new();
        let (mut bytes, mut stored) = (0_u64, 0_u64);
        for tensor in local.tensors() {
            let Some(dtype) = dtype_of(tensor)? else { return Ok(None) };
            if !self.is_cast(Some(dtype), || fqn.to_owned())? {
                return Ok(None);
            }
            let shape: Vec<u64> = tensor.getattr(intern!(tensor.py(), "shape"))?.extract()?;
            let itemsize = self.dtype.itemsize();
            let nbytes = shape.iter().fold(itemsize, |all, size| all.saturating_mul(*size));
            bytes = bytes.saturating_add(nbytes);
            // What is expanded is cast as it lies.
            stored = stored.saturating_add(match storage_bytes(tensor)? {
                Some(stored) => (stored / dtype.itemsize()).saturating_mul(itemsize),
                None => nbytes,
            });
            shapes.push(shape);
        }
        // What has no dimensions has no boxes: a part of it is a scalar, or it itself.
        let Some(first) = shapes.first().filter(|shape| !shape.is_empty()).cloned() else {
            return Ok(None);
        };
        if bytes.min(stored) <= limit || !local.fits(&first)? {
            return Ok(None);
        }
        let mut parts = Vec::new();
        for (local, shape) in shapes.iter().enumerate() {
            let regions = pieces(shape, self.dtype, limit)?.into_iter();
            let regions = regions.filter(|region| !region.shape().contains(&0));
            parts.extend(regions.map(|region| Part { local, region }));
        }
        Ok(Some((first, parts)))
    }

    fn is_cast(&self, dtype: Option<Dtype>, fqn: impl FnOnce() -> String) -> Result<bool> {
        // What has fewer bits has its scale elsewhere.
        let is_wide = dtype.is_some_and(|dtype| is_floating(dtype) && dtype.bits() >= 16);
        Ok(is_wide && dtype != Some(self.dtype) && self.keeps.call1((fqn(),))?.is_none())
    }

    /// A tensor of torch as the other dtype. What shares a storage, as tied and expanded tensors do, shares one
    /// still: all of it is cast, unless little of it is wanted.
    fn torch(&self, torch: &Torch<'py>, tensor: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let target = torch.dtype(self.dtype)?;
        let plain = tensor.call_method0("detach")?;
        if let Some(part) = &self.part {
            return Ok(of_part(&plain, &part.region)?.call_method1("to", (target,))?);
        }
        let storage = plain.call_method0("untyped_storage")?;
        let itemsize: u64 = plain.call_method0("element_size")?.extract()?;
        let stored: u64 = storage.call_method0("nbytes")?.extract()?;
        let wanted = plain.call_method0("numel")?.extract::<u64>()?.saturating_mul(itemsize);
        if !stored.is_multiple_of(itemsize) || stored > wanted.saturating_mul(2) {
            let cast = || Ok(plain.call_method1("to", (target,))?);
            return self.cast.once(&plain, Torch::place_of(&plain)?, cast);
        }
        let offset = plain.call_method0("storage_offset")?;
        let place = format!(
            "{} {} {}",
            plain.getattr("device")?,
            storage.call_method0("data_ptr")?,
            plain.getattr("dtype")?
        );
        let cast = || {
            let flat = plain.call_method1("as_strided", ((stored / itemsize,), (1,), 0))?;
            Ok(flat.call_method1("to", (target,))?)
        };
        let flat = self.cast.once(&plain, place, cast)?;
        let (shape, strides) = (plain.getattr("shape")?, plain.call_method0("stride")?);
        Ok(flat.call_method1("as_strided", (shape, strides, offset))?)
    }
}

/// That of a tensor of torch or an array of numpy, if a store has it.
fn dtype_of(object: &Bound<'_, PyAny>) -> Result<Option<Dtype>> {
    let py = object.py();
    let dtype = || object.getattr(intern!(py, "dtype"));
    Ok(match (Torch::imported(py)?, Numpy::imported(py)?) {
        (Some(torch), _) if torch.is_plain(object)? => torch.dtype_of(&dtype()?),
        (_, Some(numpy)) if numpy.is_array(object) => numpy.dtype_of(&dtype()?).ok(),
        _ => None,
    })
}

/// The bytes of the storage of a tensor of torch.
fn storage_bytes(object: &Bound<'_, PyAny>) -> Result<Option<u64>> {
    let Some(storage) = object.getattr_opt(intern!(object.py(), "untyped_storage"))? else {
        return Ok(None);
    };
    Ok(Some(storage.call0()?.call_method0("nbytes")?.extract()?))
}

/// A box of a tensor or an array, as a view.
fn of_part<'py>(object: &Bound<'py, PyAny>, part: &Region) -> Result<Bound<'py, PyAny>> {
    Ok(object.get_item(index_of(object.py(), part.offsets(), part.shape())?)?)
}

/// Whether it is a real number with a fraction.
pub(crate) fn is_floating(dtype: Dtype) -> bool {
    dtype.name().starts_with("float") || dtype == Dtype::Bfloat16
}

/// How tensors are filled.
pub(crate) struct Filling<'py> {
    /// As what they are stored.
    stored: Dtype,
    /// What cannot be filled as it is, with what is filled in its place.
    pub(crate) staged: RefCell<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>>,
}

impl<'py> Filling<'py> {
    pub(crate) fn new(stored: Dtype) -> Self {
        Self { stored, staged: RefCell::default() }
    }

    /// New memory of this dtype that is filled in place of an object.
    fn stage(
        &self,
        module: &Bound<'py, PyModule>,
        object: &Bound<'py, PyAny>,
        dtype: &Bound<'py, PyAny>,
        options: &Bound<'py, PyDict>,
    ) -> Result<Bound<'py, PyAny>> {
        options.set_item("dtype", dtype)?;
        let shape: Vec<u64> = object.getattr("shape")?.extract()?;
        let shape = PyTuple::new(object.py(), shape)?;
        let empty = module.getattr("empty")?.call((shape,), Some(options))?;
        self.staged.borrow_mut().push((object.clone(), empty.clone()));
        Ok(empty)
    }
}

impl<'py> Purpose<'py> {
    /// What is wanted of each object; none: all of it.
    pub(crate) fn part(&self) -> Option<&Part> {
        match self {
            Self::Store(Some(transfer)) => transfer.part.as_ref(),
            Self::Store(None) | Self::Fill(_) => None,
        }
    }

    /// A plain tensor of torch.
    pub(crate) fn torch(
        &self,
        torch: &Torch<'py>,
        devices: &Devices,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
        fqn: impl FnOnce() -> String,
    ) -> Result<Tensor> {
        let py = tensor.py();
        match self {
            Self::Store(None) => torch.take(tensor, flags, devices),
            Self::Store(Some(transfer)) => {
                let dtype = torch.dtype_of(&tensor.getattr(intern!(py, "dtype"))?);
                if !transfer.is_cast(dtype, fqn)? {
                    return torch.take(tensor, flags, devices);
                }
                torch.take(&transfer.torch(torch, tensor)?, flags, devices)
            }
            Self::Fill(filling) => {
                let dtype = torch.dtype_of(&tensor.getattr(intern!(py, "dtype"))?);
                Torch::prove_fillable(tensor)?;
                let options = PyDict::new(py);
                match torch.see(tensor, flags, devices)? {
                    Ok(seen) if dtype == Some(filling.stored) => return Ok(seen),
                    // It is cast where it is.
                    Ok(_) => options.set_item("device", tensor.getattr("device")?)?,
                    Err(why) => {
                        devices.paged(tensor.getattr("nbytes")?.extract()?, &why);
                        options.set_item("device", "cpu")?;
                    }
                }
                let dtype = torch.dtype(filling.stored)?;
                let staged = filling.stage(&torch.module, tensor, dtype, &options)?;
                torch.take(&staged, flags, devices)
            }
        }
    }

    /// An array of another framework.
    pub(crate) fn other(
        &self,
        devices: &Devices,
        borrowed: Borrowed,
        fqn: impl FnOnce() -> String,
    ) -> Result<Tensor> {
        let dtype = borrowed.meta.dtype();
        let refuse = |text: &str| {
            let advice = "convert it to a tensor of torch: `torch.from_dlpack`";
            Err(Refusal::leaf(text, advice).into())
        };
        match self {
            Self::Store(None) => {}
            Self::Store(Some(transfer)) => {
                if transfer.is_cast(Some(dtype), fqn)? {
                    return refuse("transfer_dtype casts tensors of torch and arrays of numpy");
                }
            }
            Self::Fill(filling) => {
                if !borrowed.is_writable {
                    return refuse("its framework does not say that it may be written to");
                }
                if dtype != filling.stored {
                    return refuse("what is cast is a tensor of torch or an array of numpy");
                }
            }
        }
        taken(devices, borrowed)
    }

    /// A plain array of numpy.
    pub(crate) fn numpy(
        &self,
        numpy: &Numpy<'py>,
        array: &Bound<'py, PyAny>,
        fqn: impl FnOnce() -> String,
    ) -> Result<Tensor> {
        let flags = TensorFlags::NDARRAY;
        match self {
            Self::Store(None) => numpy.take(array, flags),
            Self::Store(Some(transfer)) => {
                let dtype = numpy.dtype_of(&array.getattr("dtype")?).ok();
                if !transfer.is_cast(dtype, fqn)? {
                    return numpy.take(array, flags);
                }
                let target = numpy.dtype(transfer.dtype)?;
                if let Some(part) = &transfer.part {
                    let cast = of_part(array, &part.region)?.call_method1("astype", (target,))?;
                    return numpy.take(&cast, flags);
                }
                let cast = || Ok(array.call_method1("astype", (target,))?);
                numpy.take(&transfer.cast.once(array, Numpy::place_of(array)?, cast)?, flags)
            }
            Self::Fill(filling) => {
                let dtype = numpy.dtype_of(&array.getattr("dtype")?)?;
                Numpy::prove_fillable(array)?;
                if dtype == filling.stored {
                    return numpy.take(array, flags);
                }
                let dtype = numpy.dtype(filling.stored)?;
                let options = PyDict::new(array.py());
                numpy.take(&filling.stage(&numpy.module, array, &dtype, &options)?, flags)
            }
        }
    }
}

/// What another framework has lent.
#[expect(unsafe_code, reason = "the memory belongs to the framework")]
fn taken(devices: &Devices, lent: Borrowed) -> Result<Tensor> {
    let Borrowed { meta, start, is_cuda, owner, .. } = lent;
    if meta.numel() == 0 {
        return Ok(Tensor::new(meta, Storage::default(), 0)?);
    }
    if !is_cuda {
        // SAFETY: the framework says that the tensor is there, as long as the owner.
        return unsafe { borrowed(meta, start, owner) };
    }
    let place = (u64::try_from(start)?, meta.span_bytes());
    // SAFETY: as above; what is to be done to it comes before what is on the default stream, as the framework was asked.
    let storage = unsafe { devices.storage(place, Stream::default(), owner)? };
    Ok(Tensor::new(meta, storage, 0)?)
}
