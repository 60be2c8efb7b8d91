//! `tssd unpack`: an archive becomes a safetensors file.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde_json::json;
use tssd_format::{
    Archive, AttrValue, Container, Node, ObjectPath, Runs, TensorMeta, TensorReference,
};

use crate::console::Console;
use crate::document::{open_archive, open_file};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::header::{self, HEADER_ATTR, Header};
use crate::output::Output;
use crate::size::{Size, count};

/// Unpack an archive of tensors into a safetensors file.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The archive
    pub(crate) input: PathBuf,
    /// The safetensors file to write
    #[arg(short, long, value_name = "OUT.safetensors")]
    pub(crate) output: PathBuf,
}

/// What a safetensors file is made of, in the order in which it is written.
struct Plan {
    header: String,
    tensors: Vec<TensorReference>,
    bytes: u64,
}

/// Storage by storage, so that memory holds one of them at a time.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let archive = open_archive(&args.input, open_file(&args.input)?)?;
    let plan = plan(&archive)?;
    let mut output = Output::create(&args.output, console.bytes_bar("unpacking", plan.bytes))?;
    let failed = |error| Failure::io("write", &args.output, error);
    let header_len = u64::try_from(plan.header.len()).expect("usize is at most 64 bits");
    output.write_all(&header_len.to_le_bytes()).map_err(failed)?;
    output.write_all(plan.header.as_bytes()).map_err(failed)?;
    let mut loaded = None;
    for reference in &plan.tensors {
        let Some(number) = reference.storage else { continue };
        // Views of one storage that follow each other read it once.
        let bytes = match loaded.take() {
            Some((last, bytes)) if last == number => bytes,
            _ => read_storage(&archive, number, &args.input)?,
        };
        write_elements(reference, &bytes, &mut output).map_err(failed)?;
        loaded = Some((number, bytes));
    }
    let file_len = output.commit()?;

    let tensors = plan.tensors.len();
    let line = format!(
        "{}: {}, {}, file {}",
        args.output.display(),
        count(tensors, "tensor"),
        Size(plan.bytes),
        Size(file_len)
    );
    let json = json!({
        "output": args.output, "tensors": tensors, "bytes": plan.bytes, "file_len": file_len,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}

fn read_storage(archive: &Archive, number: u32, path: &Path) -> Result<Bytes> {
    archive.storage_bytes(number).map_err(|error| Failure::format(path, &error))
}

/// Row by row if need be: safetensors has no strides.
fn write_elements(
    reference: &TensorReference,
    storage: &[u8],
    output: &mut impl Write,
) -> io::Result<()> {
    let meta = &reference.meta;
    let size = |bytes: u64| usize::try_from(bytes).expect("it is in memory");
    let span = &storage[size(reference.byte_offset)..];
    let mut written = Ok(());
    Runs::to_row_major(meta.dtype().itemsize(), meta.shape(), &meta.strides()).for_each(
        |source, _, run| {
            if written.is_ok() {
                written = output.write_all(&span[size(source)..][..size(run)]);
            }
        },
    );
    written
}

fn plan(archive: &Archive) -> Result<Plan> {
    let mut leaves = Vec::new();
    tensors_of(archive.structure(), ObjectPath::root(), &mut leaves)?;
    let mut names = BTreeSet::new();
    let mut tensors = Vec::with_capacity(leaves.len());
    for (path, reference) in &leaves {
        let name = path.fqn();
        if name == header::METADATA {
            return Err(refused(path, "the name is taken by the metadata"));
        }
        if !names.insert(name.clone()) {
            return Err(refused(path, format_args!("another leaf is `{name}` too")));
        }
        let dtype = reference.meta.dtype();
        if dtype.safetensors().is_none() {
            return Err(refused(path, format_args!("it has no dtype for torch's {dtype}")));
        }
        tensors.push((name, reference.meta.clone()));
    }
    let bytes = tensors.iter().map(|(_, meta)| meta.nbytes()).sum::<u64>();
    // An expanded tensor takes no room in an archive and any amount of it here.
    if bytes > archive.file_len().saturating_mul(64).max(1 << 30) {
        let message = format_args!("its tensors would take {} when written out", Size(bytes));
        return Err(Failure::new(Exit::Refused, message)
            .help("the archive has expanded tensors (stride 0): store them as they are"));
    }
    let (header, order) = match remembered(archive, &tensors) {
        Some(remembered) => remembered,
        None => header::canonical(metadata_of(archive)?.as_ref(), &tensors)?,
    };
    let tensors = order.into_iter().map(|place| leaves[place].1.clone()).collect();
    Ok(Plan { header, tensors, bytes })
}

/// The header that the archive was packed from, if it still describes its tensors; and the order in
/// which it has their bytes.
fn remembered(archive: &Archive, tensors: &[(String, TensorMeta)]) -> Option<(String, Vec<usize>)> {
    let attrs = archive.attrs();
    let AttrValue::Text(text) = attrs.get(HEADER_ATTR)? else { return None };
    let (header, _) = Header::parse(text.as_str()?.to_owned(), 0).ok()?;
    let same = header.metadata.clone().unwrap_or_default()
        == metadata_of(archive).ok()?.unwrap_or_default()
        && header.tensors.len() == tensors.len();
    let place_of: BTreeMap<&str, usize> =
        tensors.iter().zip(0..).map(|((name, _), place)| (&**name, place)).collect();
    let mut order = Vec::with_capacity(tensors.len());
    for entry in &header.tensors {
        let place = *place_of.get(&*entry.name)?;
        let meta = &tensors[place].1;
        if meta.dtype() != entry.meta.dtype() || meta.shape() != entry.meta.shape() {
            return None;
        }
        order.push((entry.range.start, entry.range.end, place));
    }
    order.sort_unstable();
    same.then(|| (header.text, order.into_iter().map(|(.., place)| place).collect()))
}

/// The attributes as safetensors has them: text only, and `None` if there are none.
fn metadata_of(archive: &Archive) -> Result<Option<BTreeMap<String, String>>> {
    let mut metadata = BTreeMap::new();
    for (name, value) in archive.attrs() {
        if name.starts_with("tssd.") {
            continue;
        }
        let text = match &value {
            AttrValue::Text(text) => text.as_str(),
            AttrValue::Int(_) | AttrValue::Bytes(_) => None,
        };
        let text = text.ok_or_else(|| {
            Failure::new(Exit::Refused, format_args!("attribute `{name}` is no text"))
                .help("the metadata of safetensors is text only")
        })?;
        metadata.insert(name, text.to_owned());
    }
    Ok((!metadata.is_empty()).then_some(metadata))
}

/// All tensors of the tree; whatever safetensors cannot hold is an error.
fn tensors_of(
    node: Node,
    path: ObjectPath,
    tensors: &mut Vec<(ObjectPath, TensorReference)>,
) -> Result<()> {
    match node {
        Node::Container(Container::Divergent, _) => {
            Err(refused(&path, "the writers disagree on it")
                .help("`tssd get` it as one of the writers has it"))
        }
        Node::Container(_, children) => {
            if children.is_empty() && !path.steps().is_empty() {
                return Err(refused(&path, "it is an empty container"));
            }
            for (step, child) in children {
                tensors_of(child, path.clone().step(step), tensors)?;
            }
            Ok(())
        }
        Node::Tensors(mut run) => match run.pop() {
            Some(reference) if run.is_empty() && reference.place.is_none() => {
                tensors.push((path, reference));
                Ok(())
            }
            _ => Err(refused(&path, "it is a shard of a larger tensor")
                .help("put all shards into a store, then `tssd get` the whole")),
        },
        Node::Leaf(_) | Node::Stored(..) => Err(refused(&path, "it is no tensor")),
    }
}

fn refused(path: &ObjectPath, why: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::Refused, format_args!("safetensors cannot hold {path}: {why}"))
        .help("safetensors holds named tensors only: keep this state dict as .tssd")
}
