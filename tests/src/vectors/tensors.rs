//! Tensors: dtypes, shapes, strides, ties, flags, alignment.

use tssd_format::{
    Dtype, MapKey, Options, StateDict, Storage, Tensor, TensorFlags, TensorMeta, Value,
};

use super::{Vector, counting, dict_of, encode, f32s, file, noise, of_bytes, one, plain};

pub(super) fn vectors() -> Vec<Vector> {
    let dtypes = Dtype::ALL
        .iter()
        .map(|dtype| (MapKey::from(dtype.name()), Value::from(counting(*dtype, &[3]))));
    let aligned = |bytes| Options::new().align(bytes).expect("a legal alignment");
    vec![
        file(
            "003-one-tensor",
            "one float32 tensor: the worked example of section 10",
            plain(&one(f32s(&[1.0, -2.0, 0.5], &[3]))),
        ),
        file("010-dtypes", "all 47 dtypes", plain(&dict_of(dtypes.collect()))),
        file("011-ranks", "0-dim and empty tensors", plain(&ranks())),
        file(
            "012-ties",
            "tied, overlapping, transposed, expanded views of one storage",
            plain(&ties()),
        ),
        file(
            "013-flags",
            "a Parameter that requires grad",
            plain(&one(flagged(TensorFlags::PARAMETER.union(TensorFlags::REQUIRES_GRAD)))),
        ),
        file("022-alignment", "a storage of 64 KiB is aligned to 4096", plain(&two_sizes())),
        file("040-numpy", "a numpy array and a numpy scalar", plain(&numpy())),
        file(
            "041-lead",
            "overlapping views whose alignment takes zeros in front of the storage",
            plain(&lead()),
        ),
        file(
            "042-channels-last",
            "a 4-dim tensor in channels_last order",
            plain(&one(channels_last())),
        ),
        file(
            "043-empty-strided",
            "tensors without elements, with strides and huge other sizes",
            plain(&empty_strided()),
        ),
        file(
            "044-rank-64",
            "a tensor of 64 dimensions",
            plain(&one(counting(Dtype::Uint8, &[1; 64]))),
        ),
        file(
            "045-chunks",
            "a storage of two chunks: 1 MiB and 3 bytes",
            plain(&one(of_bytes(Dtype::Uint8, &[(1 << 20) + 3], |place| {
                (place >> 12).to_le_bytes()[0]
            }))),
        ),
        file("046-align-64", "all storages aligned to 64", encode(&two_sizes(), &aligned(64))),
        file(
            "047-align-16384",
            "all storages aligned to 16384",
            encode(&two_sizes(), &aligned(16384)),
        ),
        file(
            "048-noncontiguous",
            "every second row, and a column, of one matrix",
            plain(&strided_views()),
        ),
        file("049-expanded", "one element expanded to a million", plain(&one(expanded()))),
    ]
}

fn ranks() -> StateDict {
    dict_of(vec![
        ("scalar".into(), f32s(&[1.0], &[]).into()),
        ("empty".into(), f32s(&[], &[0, 4]).into()),
        ("ones".into(), f32s(&[2.0], &[1, 1, 1]).into()),
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
        ("small".into(), f32s(&[1.0], &[1]).into()),
        ("large".into(), counting(Dtype::Uint8, &[65536]).into()),
    ])
}

fn numpy() -> StateDict {
    dict_of(vec![
        ("array".into(), flagged(TensorFlags::NDARRAY).into()),
        ("scalar".into(), flagged(TensorFlags::NDARRAY.union(TensorFlags::SCALAR)).into()),
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
