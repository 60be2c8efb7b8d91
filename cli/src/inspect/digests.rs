//! The digests of a file, line by line, so that two lists can be compared.

use std::fmt::Write;
use std::path::Path;

use serde_json::json;
use tssd_format::{Archive, Node};

use crate::console::{Console, print, print_json};
use crate::document::Document;
use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// The root digest, then one line for each leaf that lies in a storage, as `b3sum` writes them.
pub(super) fn run(path: &Path, console: Console) -> Result<Exit> {
    let document = Document::open(path)?;
    let none = |help| {
        let message = format_args!("{} has no digests", document.path().display());
        Failure::new(Exit::Refused, message).help(help)
    };
    let archive = document.archive().ok_or_else(|| none("`tssd pack` makes an archive of it"))?;
    let root = archive.root_digest();
    let root =
        root.ok_or_else(|| none("`tssd convert --digest` writes an archive with digests"))?;
    let leaves = leaves(archive);
    if console.json {
        print_json(&json!({ "root": hex(&root), "leaves": leaves }))?;
        return Ok(Exit::Ok);
    }
    let mut lines = format!("blake3:{}  root\n", hex(&root));
    for (name, digest) in &leaves {
        let (mark, name) = escaped(name);
        writeln!(lines, "{mark}{digest}  {name}").expect("a String takes any text");
    }
    print(lines)?;
    Ok(Exit::Ok)
}

/// Leaves with the digests of their storages; the shards of one leaf are numbered.
fn leaves(archive: &Archive) -> Vec<(String, String)> {
    let digest = |number| archive.storage(number).digest.map(|digest| hex(&digest));
    let mut digests = Vec::new();
    for (path, node) in archive.leaves() {
        let fqn = path.fqn();
        if let Node::Tensors(run) = &node
            && run.len() > 1
        {
            for (place, each) in run.iter().enumerate() {
                let digest = each.storage.and_then(digest);
                digests.extend(digest.map(|digest| (format!("{fqn}#{place}"), digest)));
            }
        } else {
            let digest = node.storages().next().and_then(digest);
            digests.extend(digest.map(|digest| (fqn, digest)));
        }
    }
    digests
}

/// A name on one line: as `b3sum` does it, with a mark in front of the line.
fn escaped(name: &str) -> (&'static str, String) {
    if !name.contains(['\\', '\n', '\r']) {
        return ("", name.to_owned());
    }
    ("\\", name.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r"))
}

fn hex(digest: &[u8]) -> String {
    let mut text = String::new();
    for byte in digest {
        write!(text, "{byte:02x}").expect("a String takes any text");
    }
    text
}
