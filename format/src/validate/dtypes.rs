//! Validation of the dtypes that a file describes. Spec: section 6.

use std::collections::BTreeSet;

use super::Validator;
use crate::dtype::{OtherDtype, listed_itemsize};
use crate::error::{Error, ErrorKind, Result};
use crate::table_views::TableViews;

/// The dtypes that a file describes, in the order of their numbers.
pub(super) struct OtherDtypes {
    dtypes: Vec<OtherDtype>,
    /// Whether a tensor or a dtype leaf uses the dtype, by position.
    are_used: Vec<bool>,
}

impl OtherDtypes {
    /// Validates the Dtype records (F-057), except that each is used.
    pub(super) fn new(views: &TableViews<'_>) -> Result<Self> {
        let mut dtypes = Vec::new();
        let mut names = BTreeSet::new();
        for record in views.dtypes {
            let dtype = views.other_dtype(record)?;
            let number = record.number.to_native();
            let is_sorted = dtypes.last().is_none_or(|last: &OtherDtype| last.number() < number);
            if !is_sorted || !names.insert(views.heap_at(record.name.to_native())?) {
                return Err(Error::new(ErrorKind::DtypeTable)
                    .with_path(dtype.name())
                    .with_detail("records are out of order, or two have one name"));
            }
            dtypes.push(dtype);
        }
        Ok(Self { are_used: vec![false; dtypes.len()], dtypes })
    }

    /// Returns a dtype by number and marks it as used.
    fn use_number(&mut self, number: u16) -> Option<OtherDtype> {
        let position = self.dtypes.binary_search_by_key(&number, OtherDtype::number).ok()?;
        self.are_used[position] = true;
        Some(self.dtypes[position])
    }
}

impl Validator<'_> {
    /// Returns the size in bytes of the elements of the dtype with this number (F-050).
    #[expect(clippy::inline_always, reason = "for each tensor; a hint alone is taken by chance")]
    #[inline(always)]
    pub(super) fn itemsize(&mut self, number: u16) -> Result<u64> {
        match listed_itemsize(number) {
            0 => self.other_itemsize(number),
            itemsize => Ok(itemsize.into()),
        }
    }

    #[cold]
    fn other_itemsize(&mut self, number: u16) -> Result<u64> {
        match self.dtypes.use_number(number) {
            Some(dtype) => Ok(dtype.itemsize()),
            None => Err(Error::new(ErrorKind::UnknownDtype).with_detail(number)),
        }
    }

    /// Claims the names of the Dtype records, and checks that each record is used (F-057).
    pub(super) fn validate_dtypes(&mut self) -> Result<()> {
        for record in self.views.dtypes {
            self.claim_heap_range(record.name.to_native())?;
        }
        match self.dtypes.are_used.iter().position(|is_used| !is_used) {
            Some(unused) => Err(Error::new(ErrorKind::DtypeTable)
                .with_path(self.dtypes.dtypes[unused].name())
                .with_detail("no tensor and no dtype leaf uses it")),
            None => Ok(()),
        }
    }
}
