//! `tssd convert`: rewrites an archive with other storage options and the same content.

mod torch;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::json;
use tssd_format::{
    Archive, ChunkPolicy, ChunkSize, Compression, Container, Node, ObjectPath, Options,
    ZSTD_LEVEL_ATTR,
};

use self::torch::ConvertedCheckpoint;
use crate::console::Console;
use crate::document::Document;
use crate::encode;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::output::{Output, display_output_path};
use crate::pattern::Pattern;
use crate::size::{Size, pluralize};
use crate::verify;

/// Store an archive otherwise: compress it, align it, cut it finer, give it digests, or join a shard set into one.
///
/// What is not asked for stays as it is. An archive is proven first: damage is not copied. Files of
/// torch.save and directories of torch.distributed.checkpoint are read by Python, with the package
/// tssd and torch, of the environment that has this command or that `VIRTUAL_ENV` names; nothing in
/// them is executed.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub(crate) struct Args {
    /// The archive; a directory with a manifest.tssd, which becomes one archive; what torch.save or
    /// torch.distributed.checkpoint has written; `-`: an archive from stdin
    input: PathBuf,
    /// The archive to write; `-`: stdout
    #[arg(short, long, value_name = "OUT.tssd")]
    output: PathBuf,
    /// Compress all storages, after a byte shuffle; LEVEL is 1 unless it is given (--zstd=3)
    #[arg(
        long,
        value_name = "LEVEL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1",
        value_parser = clap::value_parser!(i32).range(ZSTD_LEVELS),
    )]
    zstd: Option<i32>,
    /// Compress these leaves and no others: fqns, with * for any text; repeat it for more
    #[arg(long, value_name = "PATTERN")]
    zstd_only: Vec<Pattern>,
    /// Shuffle the bytes of what is compressed, which suits floats
    #[arg(long, conflicts_with = "no_shuffle")]
    shuffle: bool,
    /// Do not shuffle the bytes of what is compressed
    #[arg(long)]
    no_shuffle: bool,
    /// Compress nothing
    #[arg(long, conflicts_with_all = ["zstd", "zstd_only", "shuffle", "no_shuffle"])]
    raw: bool,
    /// Write digests: a BLAKE3 for each storage, and one for all
    #[arg(long, conflicts_with = "no_digest")]
    digest: bool,
    /// Write no digests
    #[arg(long)]
    no_digest: bool,
    /// Align all storages to this many bytes: a power of two from 64 to 2MiB
    #[arg(long, value_name = "BYTES")]
    align: Option<Size>,
    /// Chunks, each with a checksum, of storages that are not compressed: of so many bytes, a power of two from 4KiB to
    /// 1MiB, or `fine` ones, by the length of each storage, so that slices are read from a bucket with little beside
    /// them. Without it, as the input has them
    #[arg(long, value_name = "BYTES", value_parser = parse_chunks)]
    chunks: Option<ChunkPolicy>,
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
    let checkpoint = torch::convert_checkpoint(&args.input, &args.output, console)?;
    let (document, file_len_before, _scratch) =
        if let Some(ConvertedCheckpoint { document, file_len, scratch }) = checkpoint {
            (document, file_len, Some(scratch))
        } else {
            let document = Document::open(&args.input)?;
            let file_len = document.file_len();
            (document, file_len, None)
        };
    let Some(archive) = document.archive() else {
        let message = format_args!("{} is a safetensors file", document.path().display());
        return Err(Failure::new(Exit::Refused, message).help("`tssd pack` makes an archive of it"));
    };
    reject_divergent(archive)?;
    let options = args.options(archive)?;
    let bar = console.bytes_bar("writing", 0);
    let mut output = Output::create(&args.output, bar.clone())?;

    // Verify first: new checksums would hide damage.
    let damage = verify::verify_payload(archive, true, console);
    if let Some(error) = damage.into_iter().min_by_key(tssd_format::Error::offset) {
        return Err(Failure::format(document.path(), &error));
    }
    let dict = document.to_state_dict()?;
    let format_failure = |error| Failure::format(display_output_path(&args.output), &error);
    let layout = encode::plan(&dict, &options, console).map_err(format_failure)?;
    bar.set_length(layout.file_len());
    layout.write_to(&mut output).map_err(format_failure)?;
    let file_len = output.commit()?;

    let raw = (0..archive.storage_count()).map(|number| archive.storage(number).len).sum();
    let leaves = archive.leaves().len();
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
    /// Returns the options that the archive records, overridden by the arguments.
    fn options(&self, archive: &Archive) -> Result<Options> {
        let mut options = Options::from_archive(archive);
        if !archive.shards().is_empty() {
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
        if self.raw {
            // No storage is compressed, so the level has no meaning.
            return Ok(options.without_attr(ZSTD_LEVEL_ATTR).compress(Compression::None));
        }
        if self.zstd.is_some() || !self.zstd_only.is_empty() {
            options = options.zstd_level(self.zstd.unwrap_or(1));
        } else if !(self.shuffle || self.no_shuffle) {
            return Ok(options);
        }
        let compression_by_leaf = self.compression_by_leaf(archive)?;
        Ok(options.compress_leaves(move |path, _| {
            compression_by_leaf.get(path).copied().unwrap_or_default()
        }))
    }

    /// Returns the leaves to compress, with their compression.
    fn compression_by_leaf(&self, archive: &Archive) -> Result<BTreeMap<ObjectPath, Compression>> {
        let mut is_used = vec![false; self.zstd_only.len()];
        let mut compression_by_leaf = BTreeMap::new();
        for (path, node) in archive.leaves() {
            let mut compress = self.zstd.is_some() && self.zstd_only.is_empty();
            let fqn = path.fqn();
            for (pattern, is_used) in self.zstd_only.iter().zip(&mut is_used) {
                let matches = pattern.matches(&fqn);
                *is_used |= matches;
                compress |= matches;
            }
            if self.zstd.is_none() && self.zstd_only.is_empty() {
                let mut storages = node.storages().map(|number| archive.storage(number));
                compress = storages.any(|storage| storage.compressed_layout.is_some());
            }
            if compress {
                let zstd =
                    if self.no_shuffle { Compression::Zstd } else { Compression::ShuffledZstd };
                compression_by_leaf.insert(path, zstd);
            }
        }
        if let Some(unused) = is_used.iter().position(|is_used| !is_used) {
            let message = format_args!("`{}` matches no leaf", self.zstd_only[unused]);
            return Err(
                Failure::new(Exit::NotFound, message).help("`tssd inspect` lists the leaves")
            );
        }
        if compression_by_leaf.is_empty() && self.zstd.is_none() {
            let message = "nothing in the archive is compressed, so nothing is shuffled";
            return Err(Failure::new(Exit::Usage, message).help("add --zstd"));
        }
        Ok(compression_by_leaf)
    }
}

/// Rejects an archive whose writers hold different values, because only a manifest can store them.
fn reject_divergent(archive: &Archive) -> Result<()> {
    fn find(node: &Node, path: &ObjectPath) -> Option<ObjectPath> {
        let Node::Container(container, children) = node else { return None };
        if *container == Container::Divergent {
            return Some(path.clone());
        }
        children.iter().find_map(|(step, child)| find(child, &path.clone().step(step.clone())))
    }
    let Some(path) = find(&archive.structure(), &ObjectPath::root()) else { return Ok(()) };
    let message = format_args!("the writers hold each their own value of {path}");
    Err(Failure::new(Exit::Refused, message)
        .help("`tssd get --writer RANK` makes an archive with the values of one of them"))
}
