//! State dicts from arbitrary bytes.

use arbitrary::{Result, Unstructured};
use tssd_format::{
    ChunkPolicy, Compression, DeviceMesh, Dict, Dtype, DtypeClass, Float, Int, MapKey, Options,
    Shard, ShardSpec, StateDict, Storage, Tensor, TensorFlags, TensorMeta, TensorSlice, Text,
    Value,
};

/// Generates a state dict and the options to write it with. `None` if the bytes do not suffice.
pub(super) fn generate(data: &[u8]) -> Option<(StateDict, Options)> {
    let mut generator = Generator { u: Unstructured::new(data), pool: Vec::new() };
    let options = generator.options().ok()?;
    let dict = generator.dict(0).ok()?;
    let root =
        if generator.u.ratio(1, 4).ok()? { Value::OrderedDict(dict) } else { Value::Dict(dict) };
    Some((StateDict::from_value(root).ok()?, options))
}

struct Generator<'a> {
    u: Unstructured<'a>,
    /// Storages that tensors share.
    pool: Vec<Storage>,
}

impl Generator<'_> {
    fn options(&mut self) -> Result<Options> {
        let mut options = Options::new().allow_opaque();
        // Compression is slow, so only some inputs use it.
        options = match self.u.int_in_range(0..=15)? {
            0 => options.compress(Compression::Zstd),
            1 => options.compress(Compression::ShuffledZstd),
            _ => options,
        };
        let [digests, fine, aligned] = self.u.arbitrary()?;
        if digests {
            options = options.digests();
        }
        if fine {
            options = options.chunks(ChunkPolicy::Fine);
        }
        if aligned {
            let bytes = 1 << self.u.int_in_range(6..=12)?;
            options = options.align(bytes).expect("a power of two of that range");
        }
        Ok(options)
    }

    fn dict(&mut self, depth: u32) -> Result<Dict> {
        let mut dict = Dict::new();
        for _ in 0..self.u.int_in_range(0..=5)? {
            let key = self.key(0)?;
            let value = self.value(depth + 1)?;
            dict.insert(key, value);
        }
        Ok(dict)
    }

    fn values(&mut self, depth: u32) -> Result<Vec<Value>> {
        (0..self.u.int_in_range(0..=4)?).map(|_| self.value(depth + 1)).collect()
    }

    fn key(&mut self, depth: u32) -> Result<MapKey> {
        Ok(match self.u.int_in_range(0..=7)? {
            0 | 1 => MapKey::Str(self.text()?),
            2 => MapKey::Int(self.int()?),
            3 => MapKey::Bool(self.u.arbitrary()?),
            4 => MapKey::Float(Float::from_bits(self.u.arbitrary()?)),
            5 => MapKey::None,
            6 => MapKey::Bytes(self.bytes(6)?.into()),
            _ if depth < 3 => {
                let keys = (0..self.u.int_in_range(0..=3)?).map(|_| self.key(depth + 1));
                MapKey::Tuple(keys.collect::<Result<Vec<_>>>()?.into())
            }
            _ => MapKey::from(""),
        })
    }

    fn value(&mut self, depth: u32) -> Result<Value> {
        if depth > 4 {
            return Ok(Value::None);
        }
        Ok(match self.u.int_in_range(0..=18)? {
            0 => Value::None,
            1 => Value::Bool(self.u.arbitrary()?),
            2 => Value::Int(self.int()?),
            3 => Value::Float(Float::from_bits(self.u.arbitrary()?)),
            4 => Value::Complex(
                Float::from_bits(self.u.arbitrary()?),
                Float::from_bits(self.u.arbitrary()?),
            ),
            5 => Value::Str(self.text()?),
            6 => Value::Bytes(self.bytes(40)?.into()),
            7 => Value::Dtype(self.dtype()?),
            8 => Value::Size(self.sizes()?),
            9 => Value::Device(self.text()?),
            10 => Value::Opaque { media: self.text()?, bytes: self.bytes(20)?.into() },
            11 => Value::Dict(self.dict(depth)?),
            12 => Value::OrderedDict(self.dict(depth)?),
            13 => Value::List(self.values(depth)?),
            14 => Value::Tuple(self.values(depth)?),
            15 => {
                let mut fields = Dict::new();
                for _ in 0..self.u.int_in_range(0..=3)? {
                    let name = MapKey::Str(self.text()?);
                    fields.insert(name, self.value(depth + 1)?);
                }
                Value::NamedTuple(self.text()?, fields)
            }
            16 => self.shard()?,
            _ => Value::Tensor(self.tensor()?),
        })
    }

    fn text(&mut self) -> Result<Text> {
        let bytes = self.bytes(12)?;
        let text = Text::from_generalized_utf8(bytes.clone());
        Ok(text.unwrap_or_else(|_| String::from_utf8_lossy(&bytes).into_owned().into()))
    }

    /// Generates short bytes, and sometimes bytes that are too long for the index.
    fn bytes(&mut self, short: usize) -> Result<Vec<u8>> {
        let len = self.u.int_in_range(0..=short)?;
        let bytes = self.u.bytes(len.min(self.u.len()))?.to_vec();
        if self.u.ratio(1, 32)? && !bytes.is_empty() {
            return Ok(bytes.repeat(5000 / bytes.len()));
        }
        Ok(bytes)
    }

    fn int(&mut self) -> Result<Int> {
        if self.u.ratio(1, 4)? {
            let bytes = self.bytes(20)?;
            return Ok(num_bigint::BigInt::from_signed_bytes_le(&bytes).into());
        }
        Ok(Int::from(self.u.arbitrary::<i64>()?))
    }

    fn sizes(&mut self) -> Result<Box<[i64]>> {
        (0..self.u.int_in_range(0..=4)?).map(|_| self.u.arbitrary()).collect()
    }

    fn dtype(&mut self) -> Result<Dtype> {
        self.u.choose(Dtype::ALL).copied()
    }

    /// Returns a storage that was used before, or a new one.
    fn storage(&mut self) -> Result<Storage> {
        if !self.pool.is_empty() && self.u.arbitrary()? {
            return self.u.choose(&self.pool).cloned();
        }
        let len =
            if self.u.ratio(1, 64)? { 70_000 } else { self.u.int_in_range(64..=2048_usize)? };
        let pattern = self.u.bytes(self.u.len().min(32))?;
        let bytes =
            if pattern.is_empty() { vec![0; len] } else { pattern.repeat(len / pattern.len() + 1) };
        let storage = Storage::from(bytes[..len].to_vec());
        self.pool.push(storage.clone());
        Ok(storage)
    }

    fn tensor(&mut self) -> Result<Tensor> {
        let shape: Vec<u64> = (0..self.u.int_in_range(0..=3)?)
            .map(|_| self.u.int_in_range(0..=4))
            .collect::<Result<_>>()?;
        self.tensor_of(&shape)
    }

    /// Generates a tensor of any dtype and strides over a shared storage.
    ///
    /// If the tensor does not fit there, it gets a storage of its own.
    fn tensor_of(&mut self, shape: &[u64]) -> Result<Tensor> {
        let bits = self.u.int_in_range(0..=15)?;
        let dtype = self.dtype()?;
        let flags = TensorFlags::from_bits(bits).unwrap_or_default();
        let meta = TensorMeta::new(dtype, shape).expect("it is small");
        // The format checks which flags a tensor can have.
        let fits = match bits {
            1 | 3 => matches!(dtype.class(), DtypeClass::Float | DtypeClass::Complex),
            8 => shape.is_empty(),
            _ => true,
        };
        let meta = meta.with_flags(if fits { flags } else { TensorFlags::default() });
        let mut strided = meta.clone();
        if self.u.ratio(1, 3)? {
            let strides: Vec<u64> =
                shape.iter().map(|_| self.u.int_in_range(0..=5)).collect::<Result<_>>()?;
            strided = strided.with_strides(&strides).expect("it is small");
        }
        let storage = self.storage()?;
        let offset = u64::from(self.u.int_in_range(0..=40_u8)?) * meta.dtype().itemsize();
        Ok(Tensor::new(strided, storage, offset).unwrap_or_else(|_| {
            let bytes = vec![1; usize::try_from(meta.nbytes()).expect("it is small")];
            Tensor::new(meta, bytes.into(), 0).expect("it has enough bytes")
        }))
    }

    /// Generates a box of a global tensor, sometimes on a mesh.
    fn shard(&mut self) -> Result<Value> {
        let rank = self.u.int_in_range(0..=2)?;
        let (mut offsets, mut local, mut global) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rank {
            let (before, own, after) = self.u.arbitrary::<(u8, u8, u8)>()?;
            let size = u64::from(own % 4);
            offsets.push(u64::from(before));
            local.push(size);
            global.push(u64::from(before) + size + u64::from(after));
        }
        let tensor = self.tensor_of(&local)?;
        let mut slice = TensorSlice::new(&offsets, &local, &global).expect("it is inside");
        let mesh_shape = [2, u64::from(self.u.int_in_range(1..=3_u8)?)];
        let on_mesh = self.u.int_in_range(0..=3)?;
        if on_mesh > 0 {
            let coordinates = [1, mesh_shape[1] - 1];
            let known = (on_mesh > 1).then_some(&coordinates[..]);
            slice = slice.with_mesh(&mesh_shape, known).expect("it is inside");
        }
        let mut place = ShardSpec::new(slice);
        if on_mesh == 3 {
            let mesh = DeviceMesh::from_shape(&mesh_shape).expect("it is small");
            let names = vec![self.text()?.to_string(), "other".to_owned()];
            let mesh = mesh.clone().with_dim_names(names).unwrap_or(mesh);
            place = place.with_mesh(mesh).expect("it has the same shape");
        }
        let shard = Shard::new(tensor, place).expect("it has the local shape");
        Ok(Value::Shards(vec![shard]))
    }
}
