//! `tssd inspect`: shows the content of a file.

mod digests;
mod hex;
mod tree;

use std::path::PathBuf;

use serde_json::{Map, Value as Json, json};
use tssd_format::{AttrValue, Container, MapKey, Node, Step, Value};

use crate::archives::list_archives;
use crate::console::{Console, print, print_json};
use crate::document::{Document, Source};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{is_directory, is_shard_set};
use crate::inspect::digests::to_hex;
use crate::model::{Links, Model, is_model_directory};

/// Show what is in an archive, a shard set, a safetensors file or the directory of a Hugging Face model: the tree with
/// dtypes, shapes, slices and ties.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A file; `-`: stdin; a directory: with a manifest.tssd or a model, it is shown as one archive; else
    /// every archive in it, one line each (with -v: the trees)
    path: PathBuf,
    /// Print the content digest, and the BLAKE3 of the storage of each leaf, as the index records them; `verify
    /// --deep` proves them. Without recorded digests, compute the content digest. A model is packed in memory for it
    #[arg(long, conflicts_with = "hex")]
    digest: bool,
    /// Print every byte of an archive but those of tensors, with what it means
    #[arg(long, conflicts_with = "json")]
    hex: bool,
    #[command(flatten)]
    links: Links,
}

/// Prints the tree of a file, or one line per archive of a directory.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    if args.hex {
        return hex::run(&args.path, args.links);
    }
    if args.digest {
        return digests::run(&args.path, args.links, console);
    }
    let is_directory =
        is_directory(&args.path)? && !is_shard_set(&args.path) && !is_model_directory(&args.path);
    let files = if is_directory { list_archives(&args.path)? } else { vec![args.path.clone()] };
    let mut views = Map::new();
    for path in &files {
        let document = Document::open_with(path, args.links, None)?;
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
    match document.source() {
        Source::Archive(archive, _) => tssd_format::to_json_without_elements(archive)
            .map_err(|error| Failure::format(document.path(), &error)),
        Source::Model(model) => Ok(model_json(model, document)),
    }
}

/// Returns the JSON view of a model: its metadata, and the name, dtype and shape of each tensor.
///
/// The content of long other files is not read.
fn model_json(model: &Model, document: &Document) -> Json {
    let attrs = document.attrs().into_iter().map(|(name, value)| {
        let value = match value {
            AttrValue::Int(int) => json!({ "int": int.to_string() }),
            AttrValue::Text(text) => json!({ "str": text.as_str() }),
            AttrValue::Bytes(bytes) => json!({ "bytes": to_hex(&bytes) }),
        };
        json!([name, value])
    });
    let mut json = json!({
        "safetensors": 1,
        "attrs": attrs.collect::<Vec<_>>(),
        "root": model_node_json(&document.structure()),
    });
    if model.directory.is_some() {
        json["left_alone"] = json!(model.skipped());
    }
    json
}

fn model_node_json(node: &Node) -> Json {
    match node {
        Node::Container(Container::Dict, children) => {
            let child = |(step, child): &(Step, Node)| {
                let name = match step {
                    Step::Key(MapKey::Str(name)) => name.as_str(),
                    _ => None,
                };
                json!([{ "str": name }, model_node_json(child)])
            };
            json!({ "dict": children.iter().map(child).collect::<Vec<_>>() })
        }
        Node::Tensors(shards) => {
            let tensor = shards.first().map(
                |shard| json!({ "dtype": shard.meta.dtype().name(), "shape": shard.meta.shape() }),
            );
            json!({ "tensor": tensor })
        }
        Node::Leaf(Value::Bytes(bytes)) => json!({ "bytes": to_hex(bytes) }),
        _ => json!({ "bytes": null }),
    }
}
