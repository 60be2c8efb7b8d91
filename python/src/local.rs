//! Plain tensors and arrays: what becomes of them on their way into a store, or when they are filled.

use std::cell::RefCell;
use std::ops::Range;

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

/// Some of the local tensors that an object has.
#[derive(Clone)]
pub(crate) struct Part {
    /// Which of them.
    pub(crate) locals: Range<usize>,
    /// The box that is wanted, where it is one of them; none: all of each.
    pub(crate) region: Option<Region>,
}

impl Part {
    /// The first element of a box; else the part itself.
    pub(crate) fn least(&self) -> Result<Self> {
        let one = |box_: &Region| Region::new(box_.offsets(), &vec![1; box_.shape().len()]);
        Ok(Self { locals: self.locals.clone(), region: self.region.as_ref().map(one).transpose()? })
    }
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

    /// The parts that an object is cast in, if it is a tensor, or shards of one, that has more than so many bytes as the
    /// other dtype.
    pub(crate) fn parts(
        &self,
        object: &Bound<'py, PyAny>,
        fqn: &str,
        limit: u64,
    ) -> Result<Option<Vec<Part>>> {
        let py = object.py();
        let Some(local) = Local::of(object)? else { return Ok(None) };
        let tensors = local.tensors();
        let mut shapes: Vec<Vec<u64>> = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            // Whoever takes it says what is wrong with it.
            let Ok(shape) = tensor.getattr(intern!(py, "shape")).and_then(|shape| shape.extract())
            else {
                return Ok(None);
            };
            shapes.push(shape);
        }
        let itemsize = self.dtype.itemsize();
        let bytes_of =
            |shape: &Vec<u64>| shape.iter().fold(itemsize, |all, size| all.saturating_mul(*size));
        if shapes.iter().map(bytes_of).fold(0, u64::saturating_add) <= limit {
            return Ok(None);
        }
        let mut cast = Vec::with_capacity(tensors.len());
        for (tensor, shape) in tensors.iter().zip(&shapes) {
            let Some(stored) = elements_stored(tensor)? else { return Ok(None) };
            if !self.is_cast(Some(stored.dtype), || fqn.to_owned())? {
                return Ok(None);
            }
            // What is expanded is cast as it lies.
            cast.push(bytes_of(shape).min(stored.elements.saturating_mul(itemsize)));
        }
        let is_small = cast.iter().fold(0, |all: u64, bytes| all.saturating_add(*bytes)) <= limit;
        // What has no dimensions has no boxes: a part of it is a scalar, or it itself.
        if is_small || shapes.iter().any(Vec::is_empty) || !local.fits(&shapes[0])? {
            return Ok(None);
        }
        self.pack(&shapes, &cast, limit).map(Some)
    }

    /// Local tensors of these shapes, and of so many bytes: what is small is in one part with what comes next.
    fn pack(&self, shapes: &[Vec<u64>], bytes: &[u64], limit: u64) -> Result<Vec<Part>> {
        let mut parts = Vec::new();
        let (mut start, mut packed) = (0, 0_u64);
        for (number, (shape, bytes)) in shapes.iter().zip(bytes).enumerate() {
            if packed.saturating_add(*bytes) > limit && start < number {
                parts.push(Part { locals: start..number, region: None });
                (start, packed) = (number, 0);
            }
            if *bytes > limit {
                let regions = pieces(shape, self.dtype, limit)?.into_iter();
                let part = |region| Part { locals: number..number + 1, region: Some(region) };
                parts.extend(regions.map(part));
                (start, packed) = (number + 1, 0);
            } else {
                packed += *bytes;
            }
        }
        if start < shapes.len() {
            parts.push(Part { locals: start..shapes.len(), region: None });
        }
        Ok(parts)
    }

    fn region(&self) -> Option<&Region> {
        self.part.as_ref()?.region.as_ref()
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
        if let Some(region) = self.region() {
            return Ok(of_region(&plain, region)?.call_method1("to", (target,))?);
        }
        let storage = plain.call_method0("untyped_storage")?;
        let itemsize: u64 = plain.call_method0("element_size")?.extract()?;
        let stored: u64 = storage.call_method0("nbytes")?.extract()?;
        let wanted = plain.call_method0("numel")?.extract::<u64>()?.saturating_mul(itemsize);
        // Of several chunks in one storage each is cast alone: no two have an element in common.
        let most = if self.part.is_some() { wanted } else { wanted.saturating_mul(2) };
        if !stored.is_multiple_of(itemsize) || stored > most {
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

/// How many elements lie in memory where a tensor or an array does.
struct Stored {
    dtype: Dtype,
    elements: u64,
}

/// None of what cannot be stored, and of arrays of other frameworks.
fn elements_stored(object: &Bound<'_, PyAny>) -> Result<Option<Stored>> {
    let py = object.py();
    if let Some(torch) = Torch::imported(py)?
        && torch.is_plain(object)?
    {
        let Ok(object) = torch.storable(object) else { return Ok(None) };
        let dtype = torch.dtype_of(&object.getattr(intern!(py, "dtype"))?);
        let bytes = Torch::storage_bytes(&object)?;
        return Ok(dtype.map(|dtype| Stored { dtype, elements: bytes / dtype.itemsize() }));
    }
    Ok(match Numpy::imported(py)? {
        Some(numpy) if numpy.is_array(object) => {
            let dtype = numpy.dtype_of(&object.getattr(intern!(py, "dtype"))?).ok();
            dtype.map(|dtype| Stored { dtype, elements: u64::MAX })
        }
        _ => None,
    })
}

/// A box of a tensor or an array, as a view.
fn of_region<'py>(object: &Bound<'py, PyAny>, region: &Region) -> Result<Bound<'py, PyAny>> {
    Ok(object.get_item(index_of(object.py(), region.offsets(), region.shape())?)?)
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
                let tensor = torch.storable(tensor)?;
                torch.share(&transfer.torch(torch, &tensor)?, flags, devices)
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
                if let Some(region) = transfer.region() {
                    let cast = of_region(array, region)?.call_method1("astype", (target,))?;
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
