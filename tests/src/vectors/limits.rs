//! Sizes exactly at the limits of spec section 3, where no other vector has them.

use tssd_format::{
    AttrValue, Attrs, ChunkCodec, ChunkLocation, ChunkSize, CompressedLayout, Container, CrcTable,
    DeviceMesh, Dict, Dtype, Int, MapKey, Node, Options, Placement, Shard, ShardFile, ShardSpec,
    StateDict, Step, Storage, StorageReference, Tensor, TensorMeta, TensorReference, TensorSlice,
    Value,
};

use super::{Vector, bit_tensor, dict_of, encode, encode_plain, file_vector, single_value};

pub(super) fn vectors() -> Vec<Vector> {
    vec![
        file_vector(
            "100-key-limits",
            "keys of 4096 bytes: bytes, a bigint, a packed tuple; 64 elements, those of inner tuples \
             included",
            encode_plain(&keys()),
        ),
        file_vector(
            "101-content-limits",
            "bytes and opaque leaves of 4096 bytes, in the heap, and of 4097, in storages",
            encode(&content(), &Options::new().allow_opaque()),
        ),
        file_vector(
            "102-mesh-limits",
            "a mesh of 64 dimensions, a name of 256 bytes, global rank 2^32 - 1, a shard of dimension \
             63",
            encode_plain(&mesh()),
        ),
        file_vector(
            "109-name-limits",
            "names of 1 and 256 bytes, names of attributes of 0 and 4096, an int of 4096 bytes",
            encode(&names(), &long_attr()),
        ),
        file_vector(
            "103-size-limits",
            "tensors, strides, global tensors and meshes of the largest sizes",
            encode_plain(&sizes()),
        ),
        file_vector(
            "104-manifest-limits",
            "names of 1 and 255 bytes, the shortest files, writer 2^32 - 1, alignment 2 MiB, frames \
             as short as they may be",
            manifest(),
        ),
    ]
}

fn keys() -> StateDict {
    // A packed tuple has a count, and for each element its kind, its length and its content.
    let text = "k".repeat(4096 - 4 - 1 - 4);
    let inner = MapKey::Tuple((0..32).map(MapKey::from).collect::<Vec<_>>().into());
    let outer = (0..31).map(MapKey::from).chain([inner]).collect::<Vec<_>>();
    // 4096 bytes of two's complement: a sign bit and 32,767 bits.
    let big = num_bigint::BigInt::from(-1) << 32_767_u32;
    dict_of(vec![
        (MapKey::Bytes(vec![7; 4096].into()), 1_i64.into()),
        (MapKey::Int(Int::from(big)), 2_i64.into()),
        (MapKey::Tuple([MapKey::from(text)].into()), 3_i64.into()),
        (MapKey::Tuple(outer.into()), 4_i64.into()),
    ])
}

fn content() -> StateDict {
    let bytes = |len| Value::Bytes(vec![b'b'; len].into());
    let opaque = |len| Value::Opaque { media: "text/plain".into(), bytes: vec![b'o'; len].into() };
    dict_of(vec![
        ("bytes".into(), Value::List(vec![bytes(4096), bytes(4097)])),
        ("opaque".into(), Value::List(vec![opaque(4096), opaque(4097)])),
    ])
}

fn names() -> StateDict {
    let opaque = |media: String| Value::Opaque { media: media.into(), bytes: vec![b'o'].into() };
    let (short, long) = (|| "n".to_owned(), || "n".repeat(256));
    let big = num_bigint::BigInt::from(-1) << 32_767_u32;
    single_value(Value::List(vec![
        Value::Device(short().into()),
        Value::Device(long().into()),
        opaque(short()),
        opaque(long()),
        Value::NamedTuple(short().into(), Dict::new()),
        Value::NamedTuple(long().into(), Dict::new()),
        Value::Int(Int::from(big)),
    ]))
}

fn long_attr() -> Options {
    let options = Options::new().allow_opaque();
    options.attr("a".repeat(4096), AttrValue::Int(1)).attr("", AttrValue::Int(2))
}

fn mesh() -> StateDict {
    let names = (0..64).map(|dim| if dim == 0 { "d".repeat(256) } else { dim.to_string() });
    let mesh = DeviceMesh::new(&[1; 64], &[u32::MAX])
        .and_then(|mesh| mesh.with_dim_names(names.collect()))
        .expect("a legal mesh");
    let placements = vec![Placement::Shard { dim: 63 }; 64];
    let slices = TensorSlice::from_placements(&[1; 64], &mesh, u32::MAX, &placements);
    let place = ShardSpec::new(slices.expect("legal placements").remove(0))
        .with_mesh(mesh)
        .and_then(|place| place.with_placements(placements));
    let shard = Shard::new(bit_tensor(Dtype::Uint8, &[1; 64]), place.expect("it fits the mesh"));
    dict_of(vec![("value".into(), shard.expect("it has the local shape").into())])
}

fn sizes() -> StateDict {
    const LARGEST: u64 = (1 << 63) - 1;
    const RANKS: u64 = (1 << 32) - 1;
    let empty = TensorMeta::new(Dtype::Uint8, &[LARGEST, 0])
        .and_then(|meta| meta.with_strides(&[LARGEST, LARGEST]))
        .expect("the largest sizes");
    let empty = Tensor::new(empty, Storage::from(Vec::new()), 0).expect("it needs no bytes");
    let last = TensorSlice::new(&[LARGEST - 2], &[2], &[LARGEST])
        .and_then(|slice| slice.with_mesh(&[RANKS], Some(&[RANKS - 1])))
        .expect("a legal slice");
    let last = Shard::new(bit_tensor(Dtype::Uint8, &[2]), ShardSpec::new(last));
    dict_of(vec![
        ("empty".into(), empty.into()),
        ("last".into(), last.expect("it has the local shape").into()),
    ])
}

fn manifest() -> Vec<u8> {
    const CHUNK: u32 = 1 << 20;
    const ALIGNED: u64 = 1 << 21;
    let reference = |storage, len: u32| {
        Node::Tensors(vec![TensorReference {
            meta: TensorMeta::new(Dtype::Uint8, &[len.into()]).expect("a small shape"),
            storage: Some(storage),
            byte_offset: 0,
            shard_spec: None,
        }])
    };
    // A frame has at least one byte per 32,768 bytes of content, rounded up.
    let frames = [(0, 32), (32, 2)].map(|(offset, len)| ChunkLocation {
        offset,
        len,
        codec: ChunkCodec::Zstd,
    });
    let packed = StorageReference {
        offset: ALIGNED,
        len: u64::from(CHUNK) + 32_769,
        crc32: 1,
        chunk_size: ChunkSize::default(),
        crcs: vec![2, 3],
        align_log2: 21,
        shard: 1,
        base: None,
        compressed_layout: Some(CompressedLayout { width: 16, chunks: frames.into() }),
        digest: None,
    };
    let own = |writer: u32| {
        (Step::Key(MapKey::from_writer(writer)), Node::Leaf(Value::from(i64::from(writer))))
    };
    let children = vec![
        (Step::Key("packed".into()), reference(0, CHUNK + 32_769)),
        (
            Step::Key("seed".into()),
            Node::Container(Container::Divergent, vec![own(0), own(u32::MAX)]),
        ),
    ];
    // From its index on, an archive has at least a root of 152 bytes and the trailer.
    let shard = |name: String, writer, index_off| ShardFile {
        name,
        file_len: index_off + 152 + 64,
        index_off,
        index_crc32: 4,
        writer,
        digest: None,
        crcs: CrcTable::default(),
        others: None,
    };
    let shards = [shard("0".to_owned(), 0, 4096), shard("_".repeat(255), u32::MAX, ALIGNED + 64)];
    let root = Node::Container(Container::Dict, children);
    tssd_format::encode_manifest(&root, &[packed], &Attrs::new(), &shards)
        .expect("a legal manifest")
}
