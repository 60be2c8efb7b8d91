//! torch's tensors to tensors and back, without a copy.
#![expect(unsafe_code, reason = "the memory of tensors belongs to torch")]

use std::cell::OnceCell;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};
use tssd_format::{Dtype, Storage, Tensor, TensorFlags, TensorMeta, TensorReference};
use tssd_store::{ErrorKind, Stream};

use crate::device::Devices;
use crate::dlpack::capsule;
use crate::error::{Failure, Refusal, Result};
use crate::memory::Block;
use crate::tensor::{Copies, borrowed};

/// The module torch, and what of it is needed again and again.
pub(crate) struct Torch<'py> {
    pub(crate) module: Bound<'py, PyModule>,
    tensor: Bound<'py, PyAny>,
    parameter: OnceCell<Bound<'py, PyType>>,
    from_dlpack: OnceCell<Bound<'py, PyAny>>,
    strided: Bound<'py, PyAny>,
    /// By code, those that were asked for; none that this torch lacks.
    dtypes: [OnceCell<Option<Bound<'py, PyAny>>>; Dtype::ALL.len()],
    /// What was copied from devices.
    copies: Copies<'py>,
}

impl<'py> Torch<'py> {
    /// torch, if this process has imported it: else no object is one of its.
    pub(crate) fn imported(py: Python<'py>) -> Result<Option<Self>> {
        let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
        let Some(module) = modules.get_item("torch")? else { return Ok(None) };
        let Ok(module) = module.cast_into::<PyModule>() else { return Ok(None) };
        // While it is being imported, it has nothing yet.
        if !module.hasattr("Tensor")? || !module.hasattr("strided")? {
            return Ok(None);
        }
        Self::of(module).map(Some)
    }

    pub(crate) fn import(py: Python<'py>) -> Result<Self> {
        Self::of(py.import("torch")?)
    }

    fn of(module: Bound<'py, PyModule>) -> Result<Self> {
        Ok(Self {
            tensor: module.getattr("Tensor")?,
            parameter: OnceCell::new(),
            from_dlpack: OnceCell::new(),
            strided: module.getattr("strided")?,
            dtypes: [const { OnceCell::new() }; Dtype::ALL.len()],
            copies: Copies::default(),
            module,
        })
    }

    fn parameter(&self) -> Result<&Bound<'py, PyType>> {
        if let Some(class) = self.parameter.get() {
            return Ok(class);
        }
        let class = self.module.py().import("torch.nn")?.getattr("Parameter")?;
        Ok(self.parameter.get_or_init(|| class.cast_into().expect("Parameter is a class")))
    }

    pub(crate) fn is_tensor(&self, object: &Bound<'py, PyAny>) -> Result<bool> {
        Ok(self.is_plain(object)? || object.is_instance(&self.tensor)?)
    }

    /// Whether its class is torch's own.
    pub(crate) fn is_plain(&self, object: &Bound<'py, PyAny>) -> Result<bool> {
        let class = object.get_type();
        Ok(class.is(&self.tensor) || class.is(self.parameter()?))
    }

    /// The dtype of an object that is one.
    pub(crate) fn dtype_of(&self, object: &Bound<'py, PyAny>) -> Option<Dtype> {
        let is_it = |dtype: &Dtype| self.known(*dtype).is_some_and(|it| it.is(object));
        Dtype::ALL.iter().copied().find(is_it)
    }

    /// What this torch calls a dtype, if it has it.
    fn known(&self, dtype: Dtype) -> Option<&Bound<'py, PyAny>> {
        let asked = || self.module.getattr(dtype.name()).ok();
        self.dtypes[usize::from(dtype.code())].get_or_init(asked).as_ref()
    }

    /// What torch calls a dtype.
    pub(crate) fn dtype(&self, dtype: Dtype) -> Result<&Bound<'py, PyAny>> {
        self.known(dtype).ok_or_else(|| {
            Refusal::new("FeatureMissing", format!("this torch has no dtype {dtype}"))
                .advice("read it with a newer torch")
                .into()
        })
    }

    /// What a tensor is besides its elements.
    pub(crate) fn flags(&self, tensor: &Bound<'py, PyAny>) -> Result<TensorFlags> {
        let mut flags = TensorFlags::default();
        if tensor.getattr(intern!(tensor.py(), "requires_grad"))?.is_truthy()? {
            flags = flags.union(TensorFlags::REQUIRES_GRAD);
        }
        let is_plain = tensor.get_type().is(&self.tensor);
        if !is_plain && tensor.is_instance(self.parameter()?)? {
            flags = flags.union(TensorFlags::PARAMETER);
        }
        Ok(flags)
    }

    /// A tensor of torch's own class, whose memory is shared: the host's, and that of GPUs if there is a driver. What is
    /// on other devices is copied.
    pub(crate) fn take(
        &self,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
        devices: &Devices,
    ) -> Result<Tensor> {
        self.prove_strided(tensor)?;
        self.share(&Self::present(tensor)?, flags, devices)
    }

    /// The same of one that is storable, or was made of one.
    pub(crate) fn share(
        &self,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
        devices: &Devices,
    ) -> Result<Tensor> {
        match self.see(tensor, flags, devices)? {
            Ok(seen) => Ok(seen),
            Err(why) => {
                let copy = self.copy_to_host(tensor)?;
                devices.paged(tensor.getattr("nbytes")?.extract()?, &why);
                Ok(self.see(&copy, flags, devices)?.expect("it is the host's"))
            }
        }
    }

    /// A tensor that has its elements in memory, for whoever works on it before it is taken. Refuses what `take` would.
    pub(crate) fn storable(&self, tensor: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        self.prove_strided(tensor)?;
        let tensor = Self::present(tensor)?;
        let py = tensor.py();
        let shape: Vec<u64> = tensor.getattr(intern!(py, "shape"))?.extract()?;
        let strides: Vec<u64> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
        let offset: u64 = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
        let itemsize: u64 = tensor.call_method0(intern!(py, "element_size"))?.extract()?;
        let steps = shape.iter().zip(&strides);
        let steps = steps.map(|(size, stride)| size.saturating_sub(1).saturating_mul(*stride));
        let last = steps.fold(offset, u64::saturating_add);
        let end = last.saturating_add(1).saturating_mul(itemsize);
        let len = Self::storage_bytes(&tensor)?;
        if end > len && !shape.contains(&0) { Err(freed(end, len).into()) } else { Ok(tensor) }
    }

    /// What torch would conjugate, negate or make zeros of when it is read, as elements that are there; any other tensor
    /// as it is.
    fn present(tensor: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let mut tensor = tensor.clone();
        for (has, without) in
            [("is_conj", "resolve_conj"), ("is_neg", "resolve_neg"), ("_is_zerotensor", "clone")]
        {
            if tensor.call_method0(has)?.is_truthy()? {
                tensor = tensor.call_method0("detach")?.call_method0(without)?;
            }
        }
        Ok(tensor)
    }

    /// The bytes of the storage that a tensor is in.
    pub(crate) fn storage_bytes(tensor: &Bound<'py, PyAny>) -> Result<u64> {
        let py = tensor.py();
        let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
        Ok(storage.call_method0(intern!(py, "nbytes"))?.extract()?)
    }

    /// Refuses what has no elements that lie in memory by strides.
    fn prove_strided(&self, tensor: &Bound<'py, PyAny>) -> Result<()> {
        let py = tensor.py();
        let is = |name: &Bound<'py, _>| tensor.getattr(name)?.is_truthy();
        if !tensor.getattr(intern!(py, "layout"))?.is(&self.strided) {
            let layout = tensor.getattr("layout")?;
            return Err(Refusal::leaf(
                format!("a tensor of layout {layout} cannot be stored"),
                "convert it with `.to_dense()`",
            )
            .into());
        }
        if is(intern!(py, "is_nested"))? {
            return Err(Refusal::leaf(
                "a nested tensor cannot be stored",
                "store the tensors that `.unbind()` gives, or `.to_padded_tensor(0)`",
            )
            .into());
        }
        if is(intern!(py, "is_quantized"))? {
            return Err(Refusal::leaf(
                "a quantized tensor cannot be stored",
                "store `.int_repr()` with its scale and zero point, or `.dequantize()`",
            )
            .into());
        }
        if is(intern!(py, "is_meta"))? {
            return Err(Refusal::leaf(
                "a tensor on the meta device has no elements",
                "materialize the model first",
            )
            .into());
        }
        Ok(())
    }

    /// A tensor whose memory can be reached as it is: the host's, and that of GPUs if there is a driver. Else why not.
    pub(crate) fn see(
        &self,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
        devices: &Devices,
    ) -> Result<Result<Tensor, String>> {
        let py = tensor.py();
        let is_cpu = tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?;
        if !is_cpu && !tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
            return Ok(Err(format!("they are on {}", tensor.getattr("device")?)));
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let dtype = self.dtype_of(&dtype).ok_or_else(|| {
            Refusal::leaf(format!("the format has no {dtype}"), "convert the tensor first")
        })?;
        let shape: Vec<u64> = tensor.getattr(intern!(py, "shape"))?.extract()?;
        let strides: Vec<u64> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
        let meta = TensorMeta::new(dtype, &shape)?.with_strides(&strides)?.with_flags(flags);
        let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
        let len: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let offset: u64 = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
        let end = offset.saturating_mul(dtype.itemsize()).saturating_add(meta.span_bytes());
        if meta.numel() > 0 && end > len {
            return Err(freed(end, len).into());
        }
        if meta.numel() == 0 {
            return Ok(Ok(Tensor::new(meta, Storage::default(), 0)?));
        }
        if is_cpu {
            let start: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
            // SAFETY: proven above that the storage, which is kept, has the bytes from there on that the
            // tensor spans: `data_ptr` is that of the storage plus the offset.
            return unsafe { borrowed(meta, start, storage.unbind()) }.map(Ok);
        }
        let start: u64 = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let stream = self.stream(&tensor.getattr(intern!(py, "device"))?)?;
        // SAFETY: the storage has so many bytes from there on, and is kept. Whoever gives tensors away lets them rest,
        // as the docstrings say; what was to be done to them is on the stream that is the device's current one.
        let storage = unsafe { devices.storage((start, len), stream, storage.unbind()) };
        Ok(match storage {
            Ok(storage) => Ok(Tensor::new(meta, storage, offset * dtype.itemsize())?),
            Err(Failure::Store(error, ..)) if error.kind() == ErrorKind::Unsupported => {
                Err(error.to_string())
            }
            Err(error) => return Err(error),
        })
    }

    /// The stream of a GPU that is the current one.
    fn stream(&self, device: &Bound<'py, PyAny>) -> Result<Stream> {
        let cuda = self.module.getattr(intern!(self.module.py(), "cuda"))?;
        let stream = cuda.call_method1(intern!(self.module.py(), "current_stream"), (device,))?;
        Ok(Stream(stream.getattr("cuda_stream")?.extract()?))
    }

    /// Says which memory a tensor is, in which way.
    pub(crate) fn place_of(tensor: &Bound<'py, PyAny>) -> Result<String> {
        Ok(format!(
            "{} {} {} {} {}",
            tensor.getattr("device")?,
            tensor.call_method0("data_ptr")?,
            tensor.getattr("dtype")?,
            tensor.getattr("shape")?,
            tensor.call_method0("stride")?,
        ))
    }

    /// Refuses what has no memory, or would be filled in a copy.
    pub(crate) fn prove_fillable(tensor: &Bound<'py, PyAny>) -> Result<()> {
        if tensor.getattr(intern!(tensor.py(), "is_meta"))?.is_truthy()? {
            let text = "a tensor on the meta device has no memory";
            return Err(Refusal::leaf(text, "materialize it first, as with `to_empty`").into());
        }
        let shape: Vec<u64> = tensor.getattr(intern!(tensor.py(), "shape"))?.extract()?;
        let strides: Vec<u64> = tensor.call_method0(intern!(tensor.py(), "stride"))?.extract()?;
        if shape.iter().zip(&strides).any(|(size, stride)| *size > 1 && *stride == 0) {
            let text = "an expanded tensor has elements that share memory";
            return Err(Refusal::leaf(text, "give a copy of it: `.contiguous()`").into());
        }
        for has in ["is_conj", "is_neg"] {
            if tensor.call_method0(has)?.is_truthy()? {
                let text = "a view that conjugates or negates cannot be filled";
                return Err(Refusal::leaf(text, "resolve it first").into());
            }
        }
        Ok(())
    }

    /// A tensor of another device as one of the host. Equal views of one storage become one copy.
    fn copy_to_host(&self, tensor: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let copy = || Ok(tensor.call_method0("detach")?.call_method0("cpu")?);
        self.copies.once(tensor, Self::place_of(tensor)?, copy)
    }

    /// Memory as a tensor of bytes.
    pub(crate) fn bytes(&self, block: Block) -> Result<Bound<'py, PyAny>> {
        let len = u64::try_from(block.len()).map_err(std::io::Error::other)?;
        let meta = TensorMeta::new(Dtype::Uint8, &[len])?;
        self.view(block, &meta)?.map_err(|_| Refusal::new("FeatureMissing", "no bytes").into())
    }

    /// Memory as this tensor, if it is all of its storage; else the memory again.
    pub(crate) fn view(
        &self,
        block: Block,
        meta: &TensorMeta,
    ) -> Result<Result<Bound<'py, PyAny>, Block>> {
        Ok(match capsule(self.module.py(), block, meta) {
            Ok(capsule) => Ok(self.dlpack()?.call1((capsule?,))?),
            Err(block) => Err(block),
        })
    }

    /// The storage of a tensor of the host as an array of bytes.
    pub(crate) fn array_of(&self, tensor: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let py = self.module.py();
        let untyped = tensor.call_method0(intern!(py, "untyped_storage"))?;
        let len: u64 = untyped.call_method0(intern!(py, "nbytes"))?.extract()?;
        let meta = TensorMeta::new(Dtype::Uint8, &[len])?;
        let reference = TensorReference { meta, storage: None, byte_offset: 0, place: None };
        let bytes = self.make(&reference, Some(&untyped), None)?;
        Ok(bytes.call_method0(intern!(py, "numpy"))?)
    }

    /// The function that takes a capsule; the public one looks for more.
    fn dlpack(&self) -> Result<&Bound<'py, PyAny>> {
        if let Some(function) = self.from_dlpack.get() {
            return Ok(function);
        }
        let private = self.module.getattr("_C")?.getattr_opt("_from_dlpack")?;
        let function = match private {
            Some(function) => function,
            None => self.module.py().import("torch.utils.dlpack")?.getattr("from_dlpack")?,
        };
        Ok(self.from_dlpack.get_or_init(|| function))
    }

    /// A tensor of elements in a storage; none if it has no elements.
    pub(crate) fn make(
        &self,
        reference: &TensorReference,
        storage: Option<&Bound<'py, PyAny>>,
        device: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        let py = self.module.py();
        let meta = &reference.meta;
        let options = PyDict::new(py);
        options.set_item(intern!(py, "dtype"), self.dtype(meta.dtype())?)?;
        // Not the default one, which somebody may have changed.
        match device {
            Some(device) => options.set_item(intern!(py, "device"), device)?,
            None => options.set_item(intern!(py, "device"), intern!(py, "cpu"))?,
        }
        let shape = PyTuple::new(py, meta.shape())?;
        let strides = PyTuple::new(py, meta.strides())?;
        let tensor = match storage {
            None => {
                let empty = self.module.getattr(intern!(py, "empty_strided"))?;
                empty.call((shape, strides), Some(&options))?
            }
            Some(storage) => {
                let empty = self.module.getattr(intern!(py, "empty"))?;
                let empty = empty.call(((0,),), Some(&options))?;
                let offset = reference.byte_offset / meta.dtype().itemsize();
                empty.call_method1(intern!(py, "set_"), (storage, offset, shape, strides))?
            }
        };
        self.with_flags(tensor, meta.flags())
    }

    /// What basic indexing makes of a tensor of this shape: shape and strides in elements, and where
    /// element 0 is. No memory is looked at.
    pub(crate) fn index(
        &self,
        meta: &TensorMeta,
        index: &Bound<'py, PyTuple>,
    ) -> Result<(Vec<u64>, Vec<i64>, i64)> {
        let py = self.module.py();
        let options = PyDict::new(py);
        options.set_item("dtype", self.module.getattr("uint8")?)?;
        options.set_item("device", "meta")?;
        let shape = PyTuple::new(py, meta.shape())?;
        let strides = PyTuple::new(py, meta.strides())?;
        let whole = self.module.getattr("empty_strided")?.call((shape, strides), Some(&options))?;
        let part = whole.get_item(index)?;
        Ok((
            part.getattr("shape")?.extract()?,
            part.call_method0("stride")?.extract()?,
            part.call_method0("storage_offset")?.extract()?,
        ))
    }

    /// The same tensor as what the flags say.
    pub(crate) fn with_flags(
        &self,
        tensor: Bound<'py, PyAny>,
        flags: TensorFlags,
    ) -> Result<Bound<'py, PyAny>> {
        let requires_grad = flags.contains(TensorFlags::REQUIRES_GRAD);
        if flags.contains(TensorFlags::PARAMETER) {
            return Ok(self.parameter()?.call1((tensor, requires_grad))?);
        }
        if requires_grad {
            return Ok(tensor.call_method1(intern!(tensor.py(), "requires_grad_"), (true,))?);
        }
        Ok(tensor)
    }
}

/// A storage that has not what its tensor needs.
fn freed(end: u64, len: u64) -> Refusal {
    Refusal::leaf(
        format!("the tensor spans {end} bytes and its storage has {len}"),
        "its memory was freed or resized, as FSDP does: gather it first",
    )
}
