//! `tssd inspect`: shows the content of a file.

mod digests;
mod hex;
mod tree;

use std::path::PathBuf;

use serde_json::{Map, Value as Json, json};

use crate::archives::list_archives;
use crate::console::{Console, print, print_json};
use crate::document::Document;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{is_shard_set, is_stream};

/// Show what is in an archive, a shard set or a safetensors file: the tree with dtypes, shapes, slices
/// and ties.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A file; `-`: stdin; a directory: with a manifest.tssd, it is shown as one archive; else every
    /// archive in it, one line each (with -v: the trees)
    path: PathBuf,
    /// Print the content digest, and the BLAKE3 of the storage of each leaf, as the index records them; `verify
    /// --deep` proves them. Without recorded digests, compute the content digest
    #[arg(long, conflicts_with = "hex")]
    digest: bool,
    /// Print every byte but those of tensors, with what it means
    #[arg(long, conflicts_with = "json")]
    hex: bool,
}

/// Prints the tree of a file, or one line per archive of a directory.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    if args.hex {
        return hex::run(&args.path);
    }
    if args.digest {
        return digests::run(&args.path, console);
    }
    let is_directory = !is_stream(&args.path) && args.path.is_dir() && !is_shard_set(&args.path);
    let files = if is_directory { list_archives(&args.path)? } else { vec![args.path.clone()] };
    let mut views = Map::new();
    for path in &files {
        let document = Document::open(path)?;
        if console.json {
            let view = document_json(&document)?;
            if !is_directory {
                print_json(&view)?;
                return Ok(Exit::Ok);
            }
            views.insert(path.display().to_string(), view);
            continue;
        }
        let tree = tree::Tree::new(&document, console.verbose);
        if is_directory && !console.verbose {
            print(format_args!("{}: {}\n", path.display(), tree.summary))?;
        } else {
            let tree::Tree { lines, summary, attributes } = tree;
            let path = document.path().display();
            print(format_args!("{path}  {lines}\n\n{attributes}{summary}\n"))?;
        }
    }
    if console.json {
        print_json(&Json::Object(views))?;
    }
    Ok(Exit::Ok)
}

/// Returns the JSON view of a document without the elements of tensors, which are not read.
fn document_json(document: &Document) -> Result<Json> {
    let Some(archive) = document.archive() else {
        return Ok(safetensors_json(document));
    };
    tssd_format::to_json_without_elements(archive)
        .map_err(|error| Failure::format(document.path(), &error))
}

/// Returns the JSON view of a safetensors file: name, dtype and shape of each tensor.
fn safetensors_json(document: &Document) -> Json {
    let leaves = document.structure().into_leaves();
    let tensors = leaves.iter().filter_map(|(path, node)| {
        let tssd_format::Node::Tensors(shards) = node else { return None };
        let meta = &shards.first()?.meta;
        let tensor = json!({ "dtype": meta.dtype().name(), "shape": meta.shape() });
        Some(json!([{ "str": path.fqn() }, { "tensor": tensor }]))
    });
    json!({ "safetensors": 1, "root": { "dict": tensors.collect::<Vec<_>>() } })
}
