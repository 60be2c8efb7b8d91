//! `tssd inspect --digest`: prints the digests of a file, one per line.

use std::fmt::Write;
use std::path::Path;

use serde_json::json;
use tssd_format::{Archive, Node};

use crate::console::{Console, print, print_json};
use crate::document::{Document, DocumentArchive};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::model::Links;

/// Prints the content digest, then one line for each leaf in a storage, in the format of `b3sum`.
///
/// If the archive has no digests, the content digest is computed from the bytes, and no leaves are listed.
pub(super) fn run(path: &Path, links: Links, console: Console) -> Result<Exit> {
    let document = Document::open_with(path, links, None)?;
    let DocumentArchive { archive, .. } = &document.to_archive(None, console)?;
    let content = match archive.content_digest() {
        Some(digest) => digest,
        None => archive
            .compute_content_digest()
            .map_err(|error| Failure::format(document.path(), &error))?,
    };
    let leaves = leaf_digests(archive);
    if console.json {
        print_json(&json!({ "content": to_hex(&content), "leaves": leaves }))?;
        return Ok(Exit::Ok);
    }
    let mut lines = format!("blake3:{}  content\n", to_hex(&content));
    for (name, digest) in &leaves {
        let (prefix, name) = escape(name);
        writeln!(lines, "{prefix}{digest}  {name}").expect("a String takes any text");
    }
    print(lines)?;
    Ok(Exit::Ok)
}

/// Returns the leaves with the digests of their storages. The shards of one leaf are numbered.
fn leaf_digests(archive: &Archive) -> Vec<(String, String)> {
    let digest = |number| archive.storage(number).digest.map(|digest| to_hex(&digest));
    let mut digests = Vec::new();
    for (path, node) in archive.leaves() {
        let fqn = path.fqn();
        if let Node::Tensors(shards) = &node
            && shards.len() > 1
        {
            for (index, each) in shards.iter().enumerate() {
                let digest = each.storage.and_then(digest);
                digests.extend(digest.map(|digest| (format!("{fqn}#{index}"), digest)));
            }
        } else {
            let digest = node.storages().next().and_then(digest);
            digests.extend(digest.map(|digest| (fqn, digest)));
        }
    }
    digests
}

/// Escapes a name with line breaks as `b3sum` does. Returns the prefix of the line and the name.
fn escape(name: &str) -> (&'static str, String) {
    if !name.contains(['\\', '\n', '\r']) {
        return ("", name.to_owned());
    }
    ("\\", name.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r"))
}

pub(super) fn to_hex(digest: &[u8]) -> String {
    let mut text = String::new();
    for byte in digest {
        write!(text, "{byte:02x}").expect("a String takes any text");
    }
    text
}
