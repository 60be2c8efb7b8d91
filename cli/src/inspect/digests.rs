//! `tssd inspect --digest`: prints the digests of a file, one per line.

use std::fmt::Write;
use std::path::Path;

use serde_json::json;
use tssd_format::{Archive, Node};

use crate::console::{Console, print, print_json};
use crate::document::Document;
use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// Prints the root digest, then one line for each leaf in a storage, in the format of `b3sum`.
pub(super) fn run(path: &Path, console: Console) -> Result<Exit> {
    let document = Document::open(path)?;
    let no_digests = |help| {
        let message = format_args!("{} has no digests", document.path().display());
        Failure::new(Exit::Refused, message).help(help)
    };
    let archive =
        document.archive().ok_or_else(|| no_digests("`tssd pack` makes an archive of it"))?;
    let root = archive.root_digest();
    let root =
        root.ok_or_else(|| no_digests("`tssd convert --digest` writes an archive with digests"))?;
    let leaves = leaf_digests(archive);
    if console.json {
        print_json(&json!({ "root": to_hex(&root), "leaves": leaves }))?;
        return Ok(Exit::Ok);
    }
    let mut lines = format!("blake3:{}  root\n", to_hex(&root));
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

fn to_hex(digest: &[u8]) -> String {
    let mut text = String::new();
    for byte in digest {
        write!(text, "{byte:02x}").expect("a String takes any text");
    }
    text
}
