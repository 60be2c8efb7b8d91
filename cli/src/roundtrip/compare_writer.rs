//! Comparison of written bytes with a file, without holding them in memory.

use std::io::{self, Write};

use tssd_format::Blob;

/// A writer that compares the written bytes with a file. The first different byte is an error.
pub(super) struct CompareWriter<'a> {
    file: &'a dyn Blob,
    position: u64,
    difference: Option<u64>,
    buffer: Vec<u8>,
}

impl<'a> CompareWriter<'a> {
    pub(super) fn new(file: &'a dyn Blob) -> Self {
        Self { file, position: 0, difference: None, buffer: Vec::new() }
    }

    /// Returns whether exactly the bytes of the file were written.
    pub(super) fn is_complete(&self) -> bool {
        self.difference.is_none() && self.file.size().is_ok_and(|size| size == self.position)
    }

    /// Returns the offset of the first byte that differs from the file.
    pub(super) fn first_difference(&self) -> Option<u64> {
        self.difference
    }

    /// Reads the next `len` bytes of the file, or fewer at its end.
    fn read_expected(&mut self, len: usize) -> io::Result<&[u8]> {
        let remaining = self.file.size()?.saturating_sub(self.position);
        let len = usize::try_from(remaining).unwrap_or(len).min(len);
        self.buffer.resize(len, 0);
        self.file.read_exact_at(&mut self.buffer, self.position)?;
        Ok(&self.buffer)
    }
}

impl Write for CompareWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(1 << 20)];
        let expected = self.read_expected(bytes.len())?;
        let to_u64 = |len: usize| u64::try_from(len).expect("usize is at most 64 bits");
        if expected == bytes {
            self.position += to_u64(bytes.len());
            return Ok(bytes.len());
        }
        let common =
            expected.iter().zip(bytes).take_while(|(expected, byte)| expected == byte).count();
        self.difference = Some(self.position + to_u64(common));
        Err(io::Error::other("other bytes than those of the file"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use bytes::Bytes;

    use super::CompareWriter;

    #[test]
    fn compare_writer_finds_first_different_byte() {
        let file = Bytes::from_static(b"abcdef");
        for (written, complete, difference) in [
            (&[&b"abc"[..], b"def"][..], true, None),
            (&[b"abc"], false, None),
            (&[b"abc", b"dxf"], false, Some(4)),
            (&[b"abcdef", b"g"], false, Some(6)),
            (&[b"abcdefgh"], false, Some(6)),
        ] {
            let mut comparer = CompareWriter::new(&file);
            let result = written.iter().try_for_each(|part| comparer.write_all(part));
            assert_eq!(result.is_err(), difference.is_some());
            assert_eq!(
                (comparer.is_complete(), comparer.first_difference()),
                (complete, difference),
                "{written:?}"
            );
        }
    }
}
