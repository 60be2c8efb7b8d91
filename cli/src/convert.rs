//! `tssd convert`: rewrites an archive with other storage options and the same content.

mod torch;

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::json;
use tssd_format::{
    ChunkPolicy, ChunkSize, Compression, Container, Node, ObjectPath, Options, ZSTD_LEVEL_ATTR,
};

use self::torch::ConvertedCheckpoint;
use crate::codec::Codec;
use crate::console::Console;
use crate::document::{Document, Source};
use crate::encode;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::model::{Links, with_attrs};
use crate::output::{Force, Output, display_output_path};
use crate::pattern::Pattern;
use crate::size::{Size, pluralize};
use crate::verify;

/// Convert an archive: compress it, align it, change its chunks, add digests, or join a shard set into one archive.
///
/// Without an option for it, a property stays as it is. The archive is verified first, so damage is not copied. A
/// safetensors file and the directory of a Hugging Face model become an archive as by `tssd pack`. Files of
/// torch.save and directories of torch.distributed.checkpoint are read by Python, with the packages tssd and torch of the
/// environment that has this command or that `VIRTUAL_ENV` names. Nothing in them is executed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The archive; a directory with a manifest.tssd, which becomes one archive; a safetensors file; a directory with a
    /// model; what torch.save or torch.distributed.checkpoint has written; `-`: an archive or safetensors from stdin
    input: PathBuf,
    /// The archive to write; `-`: stdout
    #[arg(short, long, value_name = "OUT.tssd")]
    output: PathBuf,
    #[command(flatten)]
    force: Force,
    /// Compress the storages with this codec
    #[arg(long, value_enum, value_name = "CODEC")]
    codec: Option<Codec>,
    /// Compress the leaves with this fqn, and no others; * stands for any text. Repeat it for more
    #[arg(long, value_name = "PATTERN", requires = "codec")]
    only: Vec<Pattern>,
    /// Level of zstd, 1 by default. With the codec planes, only bytes and strings have it
    #[arg(
        long,
        value_name = "LEVEL",
        allow_negative_numbers = true,
        requires = "codec",
        value_parser = clap::value_parser!(i32).range(ZSTD_LEVELS),
    )]
    zstd_level: Option<i32>,
    /// Write the BLAKE3 of each storage and of its chunks, which give the content digest
    #[arg(long, conflicts_with = "no_digest")]
    digest: bool,
    /// Write no digests
    #[arg(long)]
    no_digest: bool,
    /// Align all storages to this many bytes: a power of two from 64 to 2MiB
    #[arg(long, value_name = "BYTES")]
    align: Option<Size>,
    /// Chunk size of storages that are not compressed: a power of two from 4KiB to 1MiB, or `fine`: by the length of
    /// the storage, so that a reader fetches few other bytes with a slice. Each chunk has a checksum. Without this
    /// option, the sizes stay as they are
    #[arg(long, value_name = "BYTES", value_parser = parse_chunks)]
    chunks: Option<ChunkPolicy>,
    #[command(flatten)]
    links: Links,
}

fn parse_chunks(text: &str) -> std::result::Result<ChunkPolicy, String> {
    if text == "fine" {
        return Ok(ChunkPolicy::Fine);
    }
    let size = text.parse().ok().and_then(|Size(bytes)| ChunkSize::from_bytes(bytes));
    let malformed = || format!("`{text}` is neither `fine` nor a power of two from 4KiB to 1MiB");
    size.map(ChunkPolicy::Fixed).ok_or_else(malformed)
}

/// Levels of zstd. Negative levels are fast modes.
const ZSTD_LEVELS: std::ops::RangeInclusive<i64> = -50..=22;

/// Converts the input.
///
/// Memory holds the whole state dict, and the compressed storages in addition. A checkpoint of torch
/// is first converted to an archive in a scratch directory next to the output.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let console = console.for_output(&args.output);
    args.force.check(&args.output)?;
    let checkpoint = torch::convert_checkpoint(&args.input, &args.output, console)?;
    let (document, file_len_before, _scratch) =
        if let Some(ConvertedCheckpoint { document, file_len, scratch }) = checkpoint {
            (document, file_len, Some(scratch))
        } else {
            let document = Document::open_with(&args.input, args.links, Some(&args.output))?;
            let file_len = document.file_len();
            (document, file_len, None)
        };
    let structure = document.structure();
    reject_divergent(&structure)?;
    let options = args.options(&document, &structure)?;
    let bar = console.bytes_bar("writing", 0);
    let mut output = Output::create(&args.output, args.force, bar.clone())?;

    // Verify first: new checksums would hide damage. Safetensors files have none.
    let damage = document.archive().map(|archive| verify::verify_payload(archive, true, console));
    if let Some(error) = damage.into_iter().flatten().min_by_key(tssd_format::Error::offset) {
        return Err(Failure::format(document.path(), &error));
    }
    let dict = document.to_state_dict()?;
    let format_failure = |error| Failure::format(display_output_path(&args.output), &error);
    let layout = encode::plan(&dict, &options, console).map_err(format_failure)?;
    bar.set_length(layout.file_len());
    layout.write_to(&mut output).map_err(format_failure)?;
    let file_len = output.commit()?;

    let raw = document.raw_len();
    let leaves = structure.into_leaves().len();
    let line = format!(
        "{}: {}, {} raw, file {} -> {}",
        display_output_path(&args.output).display(),
        pluralize(leaves, "leaf"),
        Size(raw),
        Size(file_len_before),
        Size(file_len),
    );
    let json = json!({
        "output": args.output, "leaves": leaves, "raw_bytes": raw,
        "file_len_before": file_len_before, "file_len": file_len,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}

impl Args {
    /// Returns the options that the document records, overridden by the arguments.
    fn options(&self, document: &Document, structure: &Node) -> Result<Options> {
        let mut options = match document.source() {
            Source::Archive(archive, _) => Options::from_archive(archive),
            Source::Model(model) => with_attrs(Options::new(), &model.attrs),
        };
        if document.is_shard_set() {
            options = options.without_store_attrs();
        }
        if self.digest {
            options = options.digests();
        }
        if self.no_digest {
            options = options.without_digests();
        }
        if let Some(Size(bytes)) = self.align {
            let usage_failure = |error| Failure::new(Exit::Usage, format_args!("--align: {error}"));
            options = options.align(bytes).map_err(usage_failure)?;
        }
        if let Some(chunks) = self.chunks {
            options = options.chunks(chunks);
        }
        let Some(codec) = self.codec else { return Ok(options) };
        if codec == Codec::None && (!self.only.is_empty() || self.zstd_level.is_some()) {
            let message =
                "--codec none compresses nothing, so --only and --zstd-level have no effect";
            return Err(Failure::new(Exit::Usage, message).help("choose another codec"));
        }
        // The archive gets the attribute again if the codec has levels.
        options = options.without_attr(ZSTD_LEVEL_ATTR).zstd_level(self.zstd_level.unwrap_or(1));
        if self.only.is_empty() {
            return Ok(options.compress(codec.compression()));
        }
        let selected = self.selected_leaves(structure.clone())?;
        Ok(options.compress_leaves(move |path, _| {
            if selected.contains(path) { codec.compression() } else { Compression::None }
        }))
    }

    /// Returns the leaves that `--only` selects.
    fn selected_leaves(&self, structure: Node) -> Result<BTreeSet<ObjectPath>> {
        let mut is_used = vec![false; self.only.len()];
        let mut selected = BTreeSet::new();
        for (path, _) in structure.into_leaves() {
            let fqn = path.fqn();
            for (pattern, is_used) in self.only.iter().zip(&mut is_used) {
                if pattern.matches(&fqn) {
                    *is_used = true;
                    selected.insert(path.clone());
                }
            }
        }
        match is_used.iter().position(|is_used| !is_used) {
            Some(unused) => {
                let message = format_args!("`{}` matches no leaf", self.only[unused]);
                Err(Failure::new(Exit::NotFound, message).help("`tssd inspect` lists the leaves"))
            }
            None => Ok(selected),
        }
    }
}

/// Rejects an archive whose writers hold different values, because only a manifest can store them.
fn reject_divergent(structure: &Node) -> Result<()> {
    fn find(node: &Node, path: &ObjectPath) -> Option<ObjectPath> {
        let Node::Container(container, children) = node else { return None };
        if *container == Container::Divergent {
            return Some(path.clone());
        }
        children.iter().find_map(|(step, child)| find(child, &path.clone().step(step.clone())))
    }
    let Some(path) = find(structure, &ObjectPath::root()) else { return Ok(()) };
    let message = format_args!("the writers hold each their own value of {path}");
    Err(Failure::new(Exit::Refused, message)
        .help("`tssd get --writer RANK` makes an archive with the values of one of them"))
}
