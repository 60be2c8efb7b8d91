//! Manifests, alone and with the archives that they name.

use tssd_format::{
    Archive, Attrs, ChunkPolicy, ChunkSize, Compression, Container, CrcTable, Dtype, MapKey, Node,
    Options, ShardFile, ShardSpec, StateDict, Step, StorageReference, TensorMeta, TensorReference,
    TensorSlice, Value,
};

use super::{Content, Vector, dict_of, encode, f32_tensor, file_vector, tensor_from_bytes};

pub(super) fn vectors() -> Vec<Vector> {
    vec![
        file_vector(
            "023-manifest",
            "a version of two writers: slices in two files",
            manifest_alone(),
        ),
        file_vector(
            "024-divergent",
            "a version whose writers hold different values for one leaf",
            divergent(),
        ),
        set("080-shard-set", "a matrix whose rows two writers hold", &Options::new(), 2),
        set(
            "081-shard-set-zstd",
            "the same in frames",
            &Options::new().compress(Compression::ShuffledZstd),
            2,
        ),
        set(
            "082-shard-set-digests",
            "archives named by their content digests",
            &Options::new().digests(),
            3,
        ),
        set(
            "083-shard-set-all",
            "frames and digests, of four writers",
            &Options::new().digests().compress(Compression::Zstd),
            4,
        ),
        set("084-shard-set-of-one", "a version of one writer", &Options::new(), 1),
        set(
            "085-shard-set-fine",
            "archives in fine chunks",
            &Options::new().chunks(ChunkPolicy::Fine),
            2,
        ),
    ]
}

/// Returns a file that a manifest names. The manifest can be read without it.
fn shard_file(writer: u32) -> ShardFile {
    ShardFile {
        name: format!("{writer}.tssd"),
        file_len: 4672,
        index_off: 4160,
        index_crc32: 7,
        writer,
        digest: None,
        crcs: CrcTable::default(),
        others: None,
    }
}

fn manifest_alone() -> Vec<u8> {
    let reference = |row: u64, storage: u32| TensorReference {
        meta: TensorMeta::new(Dtype::Float32, &[1, 2]).expect("a small shape"),
        storage: Some(storage),
        byte_offset: 0,
        shard_spec: Some(place(row, &[1, 2], &[2, 2])),
    };
    let weight = Node::Tensors(vec![reference(0, 0), reference(1, 1)]);
    let storage = |shard| StorageReference {
        offset: 4096,
        len: 8,
        crc32: crc32fast::hash(&[0; 8]),
        chunk_size: ChunkSize::default(),
        crcs: vec![crc32fast::hash(&[0; 8])],
        align_log2: 8,
        shard,
        base: None,
        compressed_layout: None,
        digest: None,
    };
    let root = Node::Container(Container::Dict, vec![(Step::Key("weight".into()), weight)]);
    let shards = [shard_file(0), shard_file(1)];
    tssd_format::encode_manifest(&root, &[storage(0), storage(1)], &Attrs::new(), &shards)
        .expect("a legal manifest")
}

fn divergent() -> Vec<u8> {
    let own = |writer: u32| {
        (Step::Key(MapKey::from_writer(writer)), Node::Leaf(Value::from(i64::from(writer) * 10)))
    };
    let node = Node::Container(Container::Divergent, vec![own(0), own(3)]);
    let root = Node::Container(Container::Dict, vec![(Step::Key("seed".into()), node)]);
    tssd_format::encode_manifest(&root, &[], &Attrs::new(), &[shard_file(0), shard_file(3)])
        .expect("a legal manifest")
}

fn place(row: u64, local: &[u64], global: &[u64]) -> ShardSpec {
    let offsets = [row, 0];
    ShardSpec::new(TensorSlice::new(&offsets, local, global).expect("a legal slice"))
}

/// Returns the state dict of one writer: rows of a matrix. Writer 0 adds a vector and a str.
fn contribution(writer: u64, writers: u64) -> StateDict {
    let (rows, global) = (40, [40 * writers, 8]);
    let place = place(writer * rows, &[rows, 8], &global);
    let tensor = tensor_from_bytes(Dtype::Float32, &[rows, 8], |byte| {
        ((byte / 256) + writer).to_le_bytes()[0]
    });
    let shard = tssd_format::Shard::new(tensor, place).expect("it has the local shape");
    let mut entries = vec![("matrix".into(), shard.into())];
    if writer == 0 {
        entries.push(("vector".into(), f32_tensor(&[1.0, 2.0, 3.0], &[3]).into()));
        entries.push(("text".into(), "long ".repeat(1000).into()));
    }
    dict_of(entries)
}

/// Returns a vector with the archives of several writers and their manifest.
fn set(name: &'static str, description: &'static str, options: &Options, writers: u64) -> Vector {
    let mut files = Vec::new();
    let (mut shards, mut storages) = (Vec::new(), Vec::new());
    let mut matrix = Vec::new();
    let mut children = Vec::new();
    for writer in 0..writers {
        let bytes = encode(&contribution(writer, writers), options);
        let archive = Archive::from_bytes(bytes.clone()).expect("it was written just now");
        let shard = u32::try_from(shards.len()).expect("a few");
        let first = u32::try_from(storages.len()).expect("a few");
        storages.extend(
            (0..archive.storage_count())
                .map(|number| StorageReference { shard, ..archive.storage(number) }),
        );
        let Node::Container(_, own) = archive.structure() else {
            unreachable!("the root is a dict")
        };
        for (step, mut node) in own {
            match &mut node {
                Node::Tensors(run) => run.iter_mut().for_each(|each| {
                    each.storage = each.storage.map(|storage| storage + first);
                }),
                Node::StoredLeaf(_, storage) => *storage += first,
                Node::Leaf(_) | Node::Distributed(_) | Node::Container(..) => {}
            }
            match node {
                Node::Tensors(run) if run[0].shard_spec.is_some() => matrix.extend(run),
                node => children.push((step, node)),
            }
        }
        let file = format!("{writer}.tssd");
        shards.push(archive.shard_file(&file, shard));
        files.push((file, bytes));
    }
    children.insert(0, (Step::Key("matrix".into()), Node::Tensors(matrix)));
    let root = Node::Container(Container::Dict, children);
    let manifest = tssd_format::encode_manifest(&root, &storages, &Attrs::new(), &shards);
    files.push((tssd_format::MANIFEST_NAME.to_owned(), manifest.expect("a legal manifest")));
    Vector { name, description, content: Content::Set(files) }
}
