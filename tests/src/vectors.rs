//! The valid test vectors: archives that each show one feature.
//!
//! They are written by the writer of this project.

mod class_tags;
mod compressed;
mod deltas;
mod distributed;
mod forward_compat;
mod limits;
mod shard_sets;
mod shards;
mod tensors;
mod values;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::LazyLock;

use tssd_format::{
    Archive, Dict, Dtype, Layout, MapKey, Options, Result, StateDict, Tensor, TensorMeta, Value,
    open_shard_set,
};

/// A test vector.
#[derive(Debug)]
pub struct Vector {
    /// Number and short description. Also the file name.
    pub name: &'static str,
    /// The feature that it shows.
    pub description: &'static str,
    /// Contents.
    pub content: Content,
}

/// Contents of a vector.
#[derive(Debug)]
pub enum Content {
    /// An archive.
    File(Vec<u8>),
    /// A shard set, or a delta and its base: the files of a directory, by name.
    Set(Vec<(String, Vec<u8>)>),
}

/// Returns all vectors by number.
pub fn vectors() -> Vec<Vector> {
    let mut vectors = values::vectors();
    vectors.extend(class_tags::vectors());
    vectors.extend(tensors::vectors());
    vectors.extend(shards::vectors());
    vectors.extend(compressed::vectors());
    vectors.extend(shard_sets::vectors());
    vectors.extend(distributed::vectors());
    vectors.extend(forward_compat::vectors());
    vectors.extend(deltas::vectors());
    vectors.extend(limits::vectors());
    vectors.sort_by_key(|vector| vector.name);
    vectors
}

/// Opens a vector: an archive, the directory of a shard set, or a directory with `delta.tssd` and `base.tssd`.
///
/// # Errors
///
/// The errors of opening these files.
pub fn open(path: &Path) -> Result<Archive> {
    let delta = path.join("delta.tssd");
    if delta.exists() {
        return Archive::open(delta)?.with_base(Archive::open(path.join("base.tssd"))?);
    }
    if path.is_dir() { open_shard_set(path) } else { Archive::open(path) }
}

/// Returns the directory of the invalid vectors that are not under version control.
///
/// The first call writes them.
///
/// # Panics
///
/// If `spec/vectors/make_invalid.py` fails.
pub fn generated_folder() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors");
        let mut command = Command::new("python3");
        let status = command.arg(vectors.join("make_invalid.py")).arg("--generated").status();
        assert!(status.as_ref().is_ok_and(ExitStatus::success), "{command:?}: {status:?}");
        vectors.join("generated")
    });
    &FOLDER
}

fn file_vector(name: &'static str, description: &'static str, bytes: Vec<u8>) -> Vector {
    Vector { name, description, content: Content::File(bytes) }
}

/// Encodes a state dict as an archive.
fn encode(dict: &StateDict, options: &Options) -> Vec<u8> {
    let layout = Layout::plan(dict, options).expect("vectors are legal");
    let mut file = Vec::new();
    layout.write_to(&mut file).expect("a Vec takes all");
    file
}

fn encode_plain(dict: &StateDict) -> Vec<u8> {
    encode(dict, &Options::new())
}

fn dict_of(entries: Vec<(MapKey, Value)>) -> StateDict {
    StateDict::from_value(Value::Dict(Dict::from_iter(entries))).expect("it is a dict")
}

fn single_value(value: impl Into<Value>) -> StateDict {
    dict_of(vec![("value".into(), value.into())])
}

fn f32_tensor(values: &[f32], shape: &[u64]) -> Tensor {
    Tensor::from_slice(values, shape).expect("shapes of vectors fit")
}

/// Returns a tensor of any dtype with the bytes 0, 1, 0, 1, …
fn bit_tensor(dtype: Dtype, shape: &[u64]) -> Tensor {
    tensor_from_bytes(dtype, shape, |byte| byte.to_le_bytes()[0] & 1)
}

/// Returns a tensor whose bytes are functions of their offsets.
fn tensor_from_bytes(dtype: Dtype, shape: &[u64], byte: impl Fn(u64) -> u8) -> Tensor {
    let meta = TensorMeta::new(dtype, shape).expect("shapes of vectors fit");
    let bytes: Vec<u8> = (0..meta.nbytes()).map(byte).collect();
    Tensor::new(meta, bytes.into(), 0).expect("there are as many bytes as it has")
}

/// Returns a byte of deterministic noise.
fn noise(place: u64) -> u8 {
    let mixed = (place + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (mixed >> 56).to_le_bytes()[0]
}
