//! The lines of a dump: an offset, bytes, and what they are.

use std::fmt::Write;

use crate::console::print;
use crate::failure::Result;

/// More bytes than this take more lines.
pub(super) const LINE: usize = 12;

/// Text is printed once there is so much of it.
const FULL: usize = 1 << 16;

/// Lines that are yet to be printed.
pub(super) struct Page {
    /// Of the longest offset.
    width: usize,
    text: String,
}

impl Page {
    /// For a file of this length.
    pub(super) fn new(file_len: u64) -> Self {
        Self { width: file_len.to_string().len(), text: String::new() }
    }

    pub(super) fn heading(&mut self, text: &str) {
        writeln!(self.text, "{text}").expect("a String takes any text");
    }

    /// Bytes as they are, on as many lines as they need; many zeros are counted.
    pub(super) fn bytes(&mut self, at: u64, bytes: &[u8], what: &str) -> Result<()> {
        if bytes.len() > LINE && bytes.iter().all(|byte| *byte == 0) {
            return self.repeated(at, "00", wide(bytes.len()), what);
        }
        let mut at = at;
        let mut what = what;
        for part in bytes.chunks(LINE) {
            let mut hex = String::new();
            for byte in part {
                write!(hex, "{byte:02X} ").expect("a String takes any text");
            }
            self.line(at, hex.trim_end(), what)?;
            at += wide(part.len());
            what = "";
        }
        Ok(())
    }

    /// So many zeros, or bytes that are not shown.
    pub(super) fn repeated(&mut self, at: u64, byte: &str, count: u64, what: &str) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        self.line(at, &format!("{byte} * {count}"), what)
    }

    fn line(&mut self, at: u64, bytes: &str, what: &str) -> Result<()> {
        let (width, column) = (self.width, LINE * 3 - 1);
        let line = format!("{at:>width$}: {bytes:column$}  {what}");
        writeln!(self.text, "{}", line.trim_end()).expect("a String takes any text");
        if self.text.len() > FULL { self.print() } else { Ok(()) }
    }

    pub(super) fn print(&mut self) -> Result<()> {
        print(std::mem::take(&mut self.text))
    }
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}
