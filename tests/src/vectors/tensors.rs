//! Tensors: dtypes, shapes, strides, ties, flags, alignment.

use tssd_format::{
    Dtype, DtypeClass, MapKey, Options, OtherDtype, Shard, ShardSpec, StateDict, Storage, Tensor,
    TensorFlags, TensorMeta, TensorSlice, Value,
};

use super::{
    Vector, bit_tensor, dict_of, encode, encode_plain, f32_tensor, file_vector, noise,
    single_value, tensor_from_bytes,
};

pub(super) fn vectors() -> Vec<Vector> {
    let dtypes = Dtype::ALL
        .iter()
        .map(|dtype| (MapKey::from(dtype.name()), Value::from(bit_tensor(*dtype, &[3]))));
    let aligned = |bytes| Options::new().align(bytes).expect("a legal alignment");
    vec![
        file_vector(
            "003-one-tensor",
            "one float32 tensor: the worked example of section 10",
            encode_plain(&single_value(f32_tensor(&[1.0, -2.0, 0.5], &[3]))),
        ),
        file_vector("010-dtypes", "all 42 dtypes", encode_plain(&dict_of(dtypes.collect()))),
        file_vector(
            "105-other-dtypes",
            "tensors, a shard and leaves of dtypes that the file describes",
            encode_plain(&other_dtypes()),
        ),
        file_vector(
            "106-dtype-limits",
            "descriptions of dtypes at their limits",
            encode_plain(&dtype_limits()),
        ),
        file_vector("011-ranks", "0-dim and empty tensors", encode_plain(&ranks())),
        file_vector(
            "012-ties",
            "tied, overlapping, transposed, expanded views of one storage",
            encode_plain(&ties()),
        ),
        file_vector(
            "013-flags",
            "a tensor that requires grad, a Parameter, a Parameter that requires grad",
            encode_plain(&flags()),
        ),
        file_vector(
            "022-alignment",
            "a storage of 64 KiB is aligned to 4096",
            encode_plain(&two_sizes()),
        ),
        file_vector("040-numpy", "a numpy array and a numpy scalar", encode_plain(&numpy())),
        file_vector(
            "041-lead",
            "overlapping views whose alignment takes zeros in front of the storage",
            encode_plain(&lead()),
        ),
        file_vector(
            "042-channels-last",
            "a 4-dim tensor in channels_last order",
            encode_plain(&single_value(channels_last())),
        ),
        file_vector(
            "043-empty-strided",
            "tensors without elements, with strides and huge other sizes",
            encode_plain(&empty_strided()),
        ),
        file_vector(
            "044-rank-64",
            "a tensor of 64 dimensions",
            encode_plain(&single_value(bit_tensor(Dtype::Uint8, &[1; 64]))),
        ),
        file_vector(
            "045-chunks",
            "a storage of two chunks: 1 MiB and 3 bytes",
            encode_plain(&single_value(tensor_from_bytes(
                Dtype::Uint8,
                &[(1 << 20) + 3],
                |place| (place >> 12).to_le_bytes()[0],
            ))),
        ),
        file_vector(
            "046-align-64",
            "all storages aligned to 64",
            encode(&two_sizes(), &aligned(64)),
        ),
        file_vector(
            "047-align-16384",
            "all storages aligned to 16384",
            encode(&two_sizes(), &aligned(16384)),
        ),
        file_vector(
            "048-noncontiguous",
            "every second row, and a column, of one matrix",
            encode_plain(&strided_views()),
        ),
        file_vector(
            "049-expanded",
            "one element expanded to a million",
            encode_plain(&single_value(expanded())),
        ),
        file_vector(
            "059-elements",
            "bool 0, 1, 2, 255; int4 1, -8, -1 with other upper bits; complex64 1-2j; \
             float4_e2m1fn_x2 0.5, 1, 6, -6; float32 NaN with a payload, -0.0; bfloat16 1, -2",
            encode_plain(&elements()),
        ),
    ]
}

fn ranks() -> StateDict {
    dict_of(vec![
        ("scalar".into(), f32_tensor(&[1.0], &[]).into()),
        ("empty".into(), f32_tensor(&[], &[0, 4]).into()),
        ("ones".into(), f32_tensor(&[2.0], &[1, 1, 1]).into()),
    ])
}

/// Returns a view of a storage of float32.
fn view(storage: &Storage, shape: &[u64], strides: &[u64], offset: u64) -> Tensor {
    let meta = TensorMeta::new(Dtype::Float32, shape).and_then(|meta| meta.with_strides(strides));
    Tensor::new(meta.expect("a legal view"), storage.clone(), offset).expect("a legal view")
}

fn ties() -> StateDict {
    let storage = Storage::from(&[0.0_f32, 1.0, 2.0, 3.0, 4.0, 5.0][..]);
    let view =
        |shape: &[u64], strides: &[u64], offset| view(&storage, shape, strides, offset).into();
    dict_of(vec![
        ("embedding".into(), view(&[2, 3], &[3, 1], 0)),
        ("head".into(), view(&[2, 3], &[3, 1], 0)),
        ("transposed".into(), view(&[3, 2], &[1, 3], 0)),
        ("row".into(), view(&[3], &[1], 12)),
        ("expanded".into(), view(&[4, 3], &[0, 1], 0)),
        ("column".into(), view(&[2], &[3], 4)),
    ])
}

fn flagged(flags: TensorFlags) -> Tensor {
    let meta = TensorMeta::new(Dtype::Float32, &[2]).expect("a small shape").with_flags(flags);
    Tensor::new(meta, Storage::from(&[1.0_f32, 2.0][..]), 0).expect("as many bytes")
}

fn two_sizes() -> StateDict {
    dict_of(vec![
        ("small".into(), f32_tensor(&[1.0], &[1]).into()),
        ("large".into(), bit_tensor(Dtype::Uint8, &[65536]).into()),
    ])
}

fn flags() -> StateDict {
    let both = TensorFlags::PARAMETER.union(TensorFlags::REQUIRES_GRAD);
    dict_of(vec![
        ("requires_grad".into(), flagged(TensorFlags::REQUIRES_GRAD).into()),
        ("parameter".into(), flagged(TensorFlags::PARAMETER).into()),
        ("both".into(), flagged(both).into()),
    ])
}

/// The encodings of section 6, "Elements".
fn elements() -> StateDict {
    let tensor = |dtype, bytes: &[u8], count| {
        let meta = TensorMeta::new(dtype, &[count]).expect("a small shape");
        Value::from(Tensor::new(meta, bytes.to_vec().into(), 0).expect("as many bytes"))
    };
    let complex = [1.0_f32, -2.0].map(f32::to_le_bytes);
    let floats = [0x7FC0_1234_u32, 0x8000_0000].map(u32::to_le_bytes);
    let halves = [0x3F80_u16, 0xC000].map(u16::to_le_bytes);
    dict_of(vec![
        ("bool".into(), tensor(Dtype::Bool, &[0, 1, 2, 255], 4)),
        ("int4".into(), tensor(Dtype::Int4, &[0xF1, 0x08, 0xFF], 3)),
        ("complex64".into(), tensor(Dtype::Complex64, complex.as_flattened(), 1)),
        ("float4_e2m1fn_x2".into(), tensor(Dtype::Float4E2m1fnX2, &[0x21, 0xF7], 2)),
        ("float32".into(), tensor(Dtype::Float32, floats.as_flattened(), 2)),
        ("bfloat16".into(), tensor(Dtype::Bfloat16, halves.as_flattened(), 2)),
    ])
}

fn numpy() -> StateDict {
    let scalar = TensorMeta::new(Dtype::Float32, &[]).expect("a small shape");
    let scalar = scalar.with_flags(TensorFlags::SCALAR);
    let scalar = Tensor::new(scalar, Storage::from(&[1.0_f32][..]), 0);
    dict_of(vec![
        ("array".into(), flagged(TensorFlags::NDARRAY).into()),
        ("scalar".into(), scalar.expect("as many bytes").into()),
    ])
}

/// A float64 that begins 4 bytes into overlapping float32s. Its storage begins 4 bytes earlier.
fn lead() -> StateDict {
    let storage = Storage::from(&[1.0_f32, 2.0, 3.0, 4.0][..]);
    let double = TensorMeta::new(Dtype::Float64, &[1]).expect("a small shape");
    let double = Tensor::new(double, storage.clone(), 4).expect("it lies inside");
    dict_of(vec![
        ("floats".into(), view(&storage, &[4], &[1], 0).into()),
        ("double".into(), double.into()),
    ])
}

fn channels_last() -> Tensor {
    let storage: Vec<f32> = (0_u8..48).map(f32::from).collect();
    view(&Storage::from(&*storage), &[2, 3, 2, 4], &[24, 1, 12, 3], 0)
}

fn empty_strided() -> StateDict {
    let empty = |shape: &[u64], strides: &[u64]| {
        let meta = TensorMeta::new(Dtype::Int8, shape).and_then(|meta| meta.with_strides(strides));
        let storage = Storage::from(Vec::new());
        Tensor::new(meta.expect("a legal view"), storage, 0).expect("it needs no bytes").into()
    };
    dict_of(vec![
        ("strided".into(), empty(&[0, 4], &[7, 2])),
        ("huge".into(), empty(&[1 << 62, 0], &[1, 1])),
    ])
}

fn strided_views() -> StateDict {
    let values: Vec<f32> = (0..24_u64).map(|place| f32::from(noise(place))).collect();
    let storage = Storage::from(&*values);
    dict_of(vec![
        ("rows".into(), view(&storage, &[3, 4], &[8, 1], 0).into()),
        ("column".into(), view(&storage, &[6], &[4], 8).into()),
    ])
}

fn expanded() -> Tensor {
    view(&Storage::from(&[1.0_f32][..]), &[1000, 1000], &[0, 0], 0)
}

fn other_dtypes() -> StateDict {
    let float6 = OtherDtype::new(0x2000, "float6_e3m2").expect("a free number");
    let float6 = float6.with_layout(1, 1, 6).expect("6 bits fit").with_class(DtypeClass::Float);
    let float6 = Dtype::Other(float6);
    let q4 = OtherDtype::new(0x8000, "example.q4_0").expect("a number of a vendor");
    let q4 = Dtype::Other(q4.with_layout(18, 32, 4).expect("128 of 144 bits"));
    let slice = TensorSlice::new(&[2], &[2], &[4]).expect("a legal slice");
    let shard = Shard::new(bit_tensor(float6, &[2]), ShardSpec::new(slice)).expect("two elements");
    let meta = TensorMeta::new(q4, &[2]).expect("36 bytes");
    let meta = meta.with_flags(TensorFlags::REQUIRES_GRAD);
    let bytes: Vec<u8> = (0..36).map(noise).collect();
    dict_of(vec![
        ("tensor".into(), bit_tensor(float6, &[2, 3]).into()),
        ("shard".into(), shard.into()),
        ("empty".into(), bit_tensor(float6, &[0, 3]).into()),
        ("dtype".into(), Value::Dtype(float6)),
        ("vendor".into(), Tensor::new(meta, bytes.into(), 0).expect("36 bytes").into()),
        ("vendor_dtype".into(), Value::Dtype(q4)),
    ])
}

fn dtype_limits() -> StateDict {
    let name = "z0123456789_.abcdefghijklmnopqrs";
    let large = OtherDtype::new(u16::MAX, name).expect("a name of 32 bytes");
    let large = large.with_layout(256, 255, 8).expect("2040 of 2048 bits");
    let small = OtherDtype::new(2, "a").expect("a free number");
    let small = small.with_layout(1, 8, 1).expect("8 bits").with_class(DtypeClass::Bits);
    dict_of(vec![
        ("large".into(), tensor_from_bytes(Dtype::Other(large), &[1], noise).into()),
        ("small".into(), bit_tensor(Dtype::Other(small), &[]).into()),
    ])
}
