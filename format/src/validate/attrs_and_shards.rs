//! Validation of attributes and shard records. Spec: section 7.

use super::Validator;
use super::claims::Claims;
use crate::checksum::CRCS_PER_PAGE;
use crate::convert::{index_to_usize, to_u64};
use crate::error::{Error, ErrorKind, Result};
use crate::frame::{DATA_START, FRAME_LEN, INDEX_ALIGN};
use crate::record::{self, MAX_ATTR_NAME_BYTES, NONE, kind};
use crate::table::ROOT_LEN;

impl Validator<'_> {
    pub(super) fn validate_attrs(&mut self) -> Result<()> {
        let mut last: Option<&[u8]> = None;
        for attr in self.views.attrs {
            let attr_error = || Error::new(ErrorKind::AttrTable);
            let name = self.claim_name(attr.name.to_native(), 0..=MAX_ATTR_NAME_BYTES)?.as_bytes();
            if last.is_some_and(|last| last >= name) || attr.reserved != [0; 7] {
                return Err(attr_error().with_path(name.escape_ascii()));
            }
            last = Some(name);
            match attr.kind {
                kind::INT => {}
                kind::STR => self.claim_text(attr.value.to_native())?,
                kind::BYTES => drop(self.claim_heap(attr.value.to_native())?),
                _ => return Err(attr_error().with_path(name.escape_ascii())),
            }
        }
        Ok(())
    }

    pub(super) fn validate_shards(&mut self) -> Result<()> {
        let mut names = std::collections::BTreeSet::new();
        let mut others = Claims::new(self.views.others.len());
        for shard in self.views.shards {
            let name = self.views.heap_at(shard.name.to_native())?;
            self.claim_heap(shard.name.to_native())?;
            let index_off = shard.index_off.to_native();
            let end = index_off.checked_add(MIN_TAIL_BYTES);
            let is_valid = index_off >= DATA_START
                && index_off.is_multiple_of(INDEX_ALIGN)
                && end.is_some_and(|end| end <= shard.file_len.to_native());
            let is_valid = is_valid && is_shard_name(name);
            if !is_valid || !names.insert(name.to_ascii_lowercase()) {
                return Err(Error::new(ErrorKind::ShardTable).with_path(name.escape_ascii()));
            }
            if !self.is_layout_valid(shard, &mut others) {
                return Err(Error::new(ErrorKind::ShardLayout).with_path(name.escape_ascii()));
            }
        }
        if others.is_complete() { Ok(()) } else { Err(Error::new(ErrorKind::ShardLayout)) }
    }

    /// Checks where a shard says that its checksum table and its other storages are (F-069).
    fn is_layout_valid(&self, shard: &record::Shard, claims: &mut Claims) -> bool {
        let index_len = shard.file_len.to_native() - shard.index_off.to_native() - FRAME_BYTES;
        let crcs_len = u64::from(shard.crcs_len.to_native());
        let entries = crcs_len + crcs_len.div_ceil(to_u64(CRCS_PER_PAGE));
        let crcs_off = u64::from(shard.crcs_off.to_native());
        if !crcs_off.is_multiple_of(4) || crcs_off + 4 * entries > index_len || shard.reserved != 0
        {
            return false;
        }
        let (first, count) = (shard.others.to_native(), shard.other_count.to_native());
        if first == NONE {
            return count == 0;
        }
        if !claims.claim_in_order(first.into(), count.into()) {
            return false;
        }
        let first = index_to_usize(first);
        let others = &self.views.others[first..first + index_to_usize(count)];
        let is_empty = |other: &record::Other| other.stored_len == 0 || other.crcs == 0;
        !others.iter().any(is_empty) && others.is_sorted_by_key(|other| other.position.to_native())
    }
}

/// The length of the trailer, in bytes.
const FRAME_BYTES: u64 = FRAME_LEN as u64;

/// The length of the smallest index, a root alone, and the trailer, in bytes.
const MIN_TAIL_BYTES: u64 = (ROOT_LEN + FRAME_LEN) as u64;

/// The reserved file name of manifests, which no shard can have.
const MANIFEST: &[u8] = b"manifest.tssd";

/// The file name extension of signatures, which no shard can have.
const SIGNATURE_SUFFIX: &[u8] = b".sig";

fn is_shard_name(name: &[u8]) -> bool {
    let is_signature = name
        .last_chunk::<{ SIGNATURE_SUFFIX.len() }>()
        .is_some_and(|suffix| suffix.eq_ignore_ascii_case(SIGNATURE_SUFFIX));
    is_base_name(name) && !name.eq_ignore_ascii_case(MANIFEST) && !is_signature
}

/// Returns true if a name is a base name that a manifest or an index can refer to (F-082).
pub(crate) fn is_base_name(name: &[u8]) -> bool {
    let is_word_byte = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    (1..=255).contains(&name.len())
        && name.first().is_some_and(is_word_byte)
        && name.iter().all(|byte| is_word_byte(byte) || matches!(byte, b'.' | b'-'))
}
