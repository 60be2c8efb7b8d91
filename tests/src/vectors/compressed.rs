//! Compressed storages, and digests.

use tssd_format::{
    AttrValue, ChunkPolicy, ChunkSize, Compression, Dtype, ObjectPath, Options, StateDict, Storage,
    Tensor, TensorMeta, Value,
};

use super::{
    Vector, bit_tensor, dict_of, encode, f32_tensor, file_vector, noise, single_value,
    tensor_from_bytes,
};

pub(super) fn vectors() -> Vec<Vector> {
    compressed().into_iter().chain(tiers()).chain(chunk_sizes()).chain(digested()).collect()
}

fn tiers() -> Vec<Vector> {
    let tiers = Options::new().compress(Compression::Tiers);
    vec![
        file_vector(
            "191-tiers-widths",
            "elements of 1, 2, 4 and 8 bytes, and complex numbers, in tiers",
            encode(&widths(), &tiers),
        ),
        file_vector(
            "192-tiers-blocks",
            "bf16 weights of which the exponents fill a block and a part of one, with codes in all tiers",
            encode(&single_value(weights(Dtype::Bfloat16, 40_000)), &tiers),
        ),
        file_vector(
            "193-tiers-tail",
            "tiers of a view whose storage is no multiple of the element",
            encode(&single_value(odd_tail()), &tiers),
        ),
        file_vector(
            "194-tiers-raw-chunk",
            "a chunk in tiers and a raw chunk",
            encode(&single_value(half_noise()), &tiers),
        ),
    ]
}

/// Returns a vector for each chunk size.
fn chunk_sizes() -> Vec<Vector> {
    [
        ("110-chunks-of-8k", 13),
        ("111-chunks-of-16k", 14),
        ("112-chunks-of-32k", 15),
        ("113-chunks-of-64k", 16),
        ("114-chunks-of-128k", 17),
        ("115-chunks-of-256k", 18),
        ("116-chunks-of-512k", 19),
    ]
    .map(|(name, log2)| chunk_size_vector(name, log2))
    .into()
}

/// Returns vectors of subtrees, and two files with the same content digest.
fn digested() -> Vec<Vector> {
    let chunks = ChunkPolicy::Fixed(ChunkSize::from_log2(12).expect("4 KiB"));
    let small_chunks = Options::new().digests().chunks(chunks);
    let compressed = Options::new().digests().compress(Compression::ShuffledZstd);
    let repacked = compressed.clone().align(1 << 13).expect("a power of two");
    let format = |options: Options| options.attr("format", AttrValue::Text("pt".into()));
    let content = dict_of(vec![
        ("w".into(), weights(Dtype::Bfloat16, 3000).into()),
        ("zeros".into(), bit_tensor(Dtype::Int64, &[700]).into()),
        ("note".into(), "w".into()),
    ]);
    vec![
        file_vector(
            "120-subtrees",
            "digests of storages of four chunks, of two and of one",
            encode(&subtrees(), &small_chunks),
        ),
        file_vector(
            "121-zstd-subtrees",
            "digests of a compressed storage of three chunks",
            encode(
                &single_value(tensor_from_bytes(Dtype::Float32, &[(2 << 18) + 5], |_| 0)),
                &compressed,
            ),
        ),
        file_vector(
            "122-content",
            "a file without digests, with the content of 123-content-repacked",
            encode(&content, &format(Options::new())),
        ),
        file_vector(
            "123-content-repacked",
            "the content of 122-content, compressed, with digests, at another alignment",
            encode(&content, &format(repacked)),
        ),
    ]
}

/// Returns tensors for which different codecs are best.
fn chosen() -> StateDict {
    let repeats =
        tensor_from_bytes(Dtype::Float32, &[4096], |at| noise(at % 1024 / 512 * 512 + at % 512));
    dict_of(vec![
        ("weights".into(), weights(Dtype::Bfloat16, 8000).into()),
        ("repeats".into(), repeats.into()),
        ("noise".into(), tensor_from_bytes(Dtype::Uint8, &[3000], noise).into()),
        ("text".into(), "weights ".repeat(1000).into()),
    ])
}

fn subtrees() -> StateDict {
    let pattern = |len| tensor_from_bytes(Dtype::Uint8, &[len], |at| (at % 251).to_le_bytes()[0]);
    dict_of(vec![
        ("four".into(), pattern((3 << 12) + 1).into()),
        ("two".into(), pattern(2 << 12).into()),
        ("one".into(), pattern(1 << 12).into()),
    ])
}

#[expect(clippy::too_many_lines, reason = "a list")]
fn compressed() -> Vec<Vector> {
    let zstd = Options::new().compress(Compression::Zstd);
    let shuffled = Options::new().compress(Compression::ShuffledZstd);
    let digests = Options::new().digests();
    let mixed = Options::new().digests().compress_leaves(|path: &ObjectPath, _| {
        let fqn = path.fqn();
        if fqn.starts_with("moment") { Compression::ShuffledZstd } else { Compression::None }
    });
    let planes = Options::new().compress(Compression::Planes);
    vec![
        file_vector(
            "124-planes-widths",
            "planes of elements of 1, 2, 4 and 8 bytes, and of complex numbers",
            encode(&widths(), &planes),
        ),
        file_vector(
            "125-planes-bf16",
            "planes of bf16 weights, of which the exponents are coded",
            encode(&single_value(weights(Dtype::Bfloat16, 3000)), &planes),
        ),
        file_vector(
            "126-planes-tail",
            "planes of a view whose storage is no multiple of the element",
            encode(&single_value(odd_tail()), &planes),
        ),
        file_vector(
            "127-planes-raw-chunk",
            "a chunk of planes and a raw chunk",
            encode(&single_value(half_noise()), &planes),
        ),
        file_vector(
            "128-auto",
            "weights in planes, repeats in zstd, noise raw",
            encode(&chosen(), &Options::new().compress(Compression::Auto)),
        ),
        file_vector(
            "060-zstd-zeros",
            "64 KiB of zeros in one frame",
            encode(&single_value(tensor_from_bytes(Dtype::Uint8, &[65536], |_| 0)), &zstd),
        ),
        file_vector(
            "061-shuffle-bf16",
            "bf16 weights, shuffled by 2",
            encode(&single_value(weights(Dtype::Bfloat16, 3000)), &shuffled),
        ),
        file_vector(
            "062-shuffle-widths",
            "shuffles by 2, 4, 8 and 16, and none for single bytes",
            encode(&widths(), &shuffled),
        ),
        file_vector(
            "063-raw-chunk",
            "two chunks, of which the noisy one stays raw",
            encode(&single_value(half_noise()), &zstd),
        ),
        file_vector(
            "064-three-chunks",
            "three chunks of zeros, the last one short",
            encode(
                &single_value(tensor_from_bytes(Dtype::Float32, &[(2 << 18) + 5], |_| 0)),
                &shuffled,
            ),
        ),
        file_vector(
            "065-zstd-content",
            "a str, bytes and an opaque leaf in frames",
            encode(&content(), &zstd.clone().allow_opaque()),
        ),
        file_vector(
            "066-zstd-ties",
            "tied and transposed views of a compressed storage",
            encode(&tied(), &shuffled),
        ),
        file_vector(
            "067-digests",
            "digests of raw storages, one of more than one chunk",
            encode(&raw_storages(), &digests),
        ),
        file_vector(
            "068-digests-empty",
            "asked for digests where there is no storage",
            encode(&single_value(1_i64), &digests),
        ),
        file_vector(
            "069-mixed",
            "compression leaf by leaf, and digests",
            encode(&moments(), &mixed),
        ),
        file_vector(
            "070-zstd-tail",
            "a view whose storage is no multiple of the shuffle's width",
            encode(&single_value(odd_tail()), &shuffled),
        ),
        file_vector(
            "071-incompressible",
            "noise, which stays raw",
            encode(&single_value(tensor_from_bytes(Dtype::Uint8, &[4096], noise)), &zstd),
        ),
        file_vector(
            "072-level",
            "another level",
            encode(&single_value(weights(Dtype::Float32, 2000)), &shuffled.clone().zstd_level(7)),
        ),
        file_vector(
            "073-zstd-aligned",
            "compressed and aligned to 16 KiB",
            encode(&moments(), &shuffled.clone().align(16384).expect("a legal alignment")),
        ),
        file_vector(
            "074-small",
            "storages too small to be worth it",
            encode(&single_value(f32_tensor(&[0.0; 100], &[100])), &shuffled),
        ),
        file_vector(
            "075-zstd-shard",
            "a compressed shard with a digest",
            encode(&shard(), &shuffled.digests()),
        ),
        file_vector(
            "076-fine-chunks",
            "raw storages in chunks of 4 and of 8 KiB, one of one chunk, with digests",
            encode(&fine_storages(), &digests.chunks(ChunkPolicy::Fine)),
        ),
        file_vector(
            "077-fine-and-zstd",
            "fine chunks beside a compressed storage, whose chunks have 1 MiB",
            encode(&moments(), &mixed.chunks(ChunkPolicy::Fine)),
        ),
    ]
}

/// Returns a vector with storages of exactly one chunk, of one more byte, and of fewer.
fn chunk_size_vector(name: &'static str, log2: u8) -> Vector {
    let size = ChunkSize::from_log2(log2).expect("a size of chunks");
    let bytes =
        |len: u64| tensor_from_bytes(Dtype::Uint8, &[len], |place| place.to_le_bytes()[1]).into();
    let dict = dict_of(vec![
        ("whole".into(), bytes(size.bytes())),
        ("more".into(), bytes(size.bytes() + 1)),
        ("less".into(), bytes(100)),
    ]);
    let about = "storages of one chunk, of two and of a part of one";
    file_vector(name, about, encode(&dict, &Options::new().chunks(ChunkPolicy::Fixed(size))))
}

/// Returns values that look like weights: small, of both signs, with noisy low bits.
fn weights(dtype: Dtype, count: u64) -> Tensor {
    let itemsize = dtype.itemsize();
    tensor_from_bytes(dtype, &[count], |place| {
        let element = place / itemsize;
        match itemsize - 1 - place % itemsize {
            0 => 0x3C | (noise(element) & 0x80),
            1 => noise(element ^ 0xFFFF) & 0x9F,
            _ => noise(place),
        }
    })
}

fn widths() -> StateDict {
    let dtypes = [Dtype::Uint8, Dtype::Int16, Dtype::Float32, Dtype::Complex64, Dtype::Complex128];
    let tensor = |dtype: Dtype| {
        let itemsize = dtype.itemsize();
        tensor_from_bytes(dtype, &[1024 / itemsize], |place| {
            (place / itemsize).to_le_bytes()[0] / 3
        })
    };
    dict_of(dtypes.iter().map(|dtype| (dtype.name().into(), tensor(*dtype).into())).collect())
}

fn half_noise() -> Tensor {
    tensor_from_bytes(Dtype::Uint8, &[(1 << 20) + 3000], |place| {
        if place < 1 << 20 { 7 } else { noise(place) }
    })
}

fn content() -> StateDict {
    let opaque = Value::Opaque { media: "text/plain".into(), bytes: vec![b'o'; 6000].into() };
    dict_of(vec![
        ("str".into(), "π".repeat(3000).into()),
        ("bytes".into(), Value::Bytes(vec![9; 6000].into())),
        ("opaque".into(), opaque),
    ])
}

fn tied() -> StateDict {
    let values: Vec<f32> = (0_u8..240).map(f32::from).collect();
    let storage = Storage::from(&*values);
    let view = |shape: &[u64], strides: &[u64], offset| {
        let meta =
            TensorMeta::new(Dtype::Float32, shape).and_then(|meta| meta.with_strides(strides));
        let tensor = Tensor::new(meta.expect("a legal view"), storage.clone(), offset);
        tensor.expect("it lies inside").into()
    };
    dict_of(vec![
        ("embedding".into(), view(&[24, 10], &[10, 1], 0)),
        ("head".into(), view(&[24, 10], &[10, 1], 0)),
        ("transposed".into(), view(&[10, 24], &[1, 10], 0)),
        ("row".into(), view(&[10], &[1], 40)),
    ])
}

fn raw_storages() -> StateDict {
    dict_of(vec![
        ("small".into(), f32_tensor(&[1.0, 2.0], &[2]).into()),
        (
            "large".into(),
            tensor_from_bytes(Dtype::Uint8, &[(1 << 20) + 1], |place| {
                (place >> 13).to_le_bytes()[0]
            })
            .into(),
        ),
        ("same as small".into(), f32_tensor(&[1.0, 2.0], &[2]).into()),
    ])
}

fn fine_storages() -> StateDict {
    let tensor =
        |len: u64| tensor_from_bytes(Dtype::Uint8, &[len], |at| (at % 251).to_le_bytes()[0]);
    let lens = [("small", 100), ("one", 4096), ("three", 9000), ("wider", (2 << 20) + 1)];
    let tensors = lens.map(|(name, len)| (name.into(), tensor(len).into()));
    dict_of(tensors.into_iter().collect())
}

fn moments() -> StateDict {
    dict_of(vec![
        ("weight".into(), bit_tensor(Dtype::Bfloat16, &[40, 50]).into()),
        ("moment.0".into(), weights(Dtype::Float32, 2000).into()),
        ("moment.1".into(), tensor_from_bytes(Dtype::Float32, &[2000], |_| 0).into()),
    ])
}

/// 1001 bytes, and a bf16 view of the first 1000.
fn odd_tail() -> Value {
    let storage = Storage::from(vec![5_u8; 1001]);
    let whole = TensorMeta::new(Dtype::Uint8, &[1001]).expect("a small shape");
    let pairs = TensorMeta::new(Dtype::Bfloat16, &[500]).expect("a small shape");
    Value::List(vec![
        Tensor::new(pairs, storage.clone(), 0).expect("it lies inside").into(),
        Tensor::new(whole, storage, 0).expect("it lies inside").into(),
    ])
}

fn shard() -> StateDict {
    use tssd_format::{Shard, ShardSpec, TensorSlice};
    let slice = TensorSlice::new(&[100, 0], &[100, 10], &[200, 10]).expect("a legal slice");
    let tensor =
        tensor_from_bytes(Dtype::Float32, &[100, 10], |place| (place / 400).to_le_bytes()[0]);
    single_value(Shard::new(tensor, ShardSpec::new(slice)).expect("it has the local shape"))
}
