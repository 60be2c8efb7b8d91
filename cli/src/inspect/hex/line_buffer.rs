//! Lines of a dump: an offset, bytes, and their description.

use std::fmt::Write;

use crate::console::print;
use crate::failure::Result;

/// Number of bytes on a line.
pub(super) const LINE_BYTES: usize = 12;

/// Size of the buffer at which it is printed, in bytes (64 KiB).
const BUFFER_MAX_BYTES: usize = 1 << 16;

/// Buffer of lines that have not been printed.
pub(super) struct LineBuffer {
    /// Width of the longest offset, in digits.
    width: usize,
    text: String,
}

impl LineBuffer {
    /// Creates the buffer for a file of this length in bytes.
    pub(super) fn new(file_len: u64) -> Self {
        Self { width: file_len.to_string().len(), text: String::new() }
    }

    pub(super) fn add_heading(&mut self, text: &str) {
        writeln!(self.text, "{text}").expect("a String takes any text");
    }

    /// Adds bytes, on several lines if necessary. More than `LINE` zeros are printed as a count.
    pub(super) fn add_bytes(&mut self, at: u64, bytes: &[u8], description: &str) -> Result<()> {
        if bytes.len() > LINE_BYTES && bytes.iter().all(|byte| *byte == 0) {
            return self.add_repeated(at, "00", to_u64(bytes.len()), description);
        }
        let mut at = at;
        let mut description = description;
        for part in bytes.chunks(LINE_BYTES) {
            let mut hex = String::new();
            for byte in part {
                write!(hex, "{byte:02X} ").expect("a String takes any text");
            }
            self.add_line(at, hex.trim_end(), description)?;
            at += to_u64(part.len());
            description = "";
        }
        Ok(())
    }

    /// Adds a line for `count` bytes that are zeros or not shown.
    pub(super) fn add_repeated(
        &mut self,
        at: u64,
        byte: &str,
        count: u64,
        description: &str,
    ) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        self.add_line(at, &format!("{byte} * {count}"), description)
    }

    fn add_line(&mut self, at: u64, bytes: &str, description: &str) -> Result<()> {
        let (width, column) = (self.width, LINE_BYTES * 3 - 1);
        let line = format!("{at:>width$}: {bytes:column$}  {description}");
        writeln!(self.text, "{}", line.trim_end()).expect("a String takes any text");
        if self.text.len() > BUFFER_MAX_BYTES { self.flush() } else { Ok(()) }
    }

    pub(super) fn flush(&mut self) -> Result<()> {
        print(std::mem::take(&mut self.text))
    }
}

fn to_u64(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}
