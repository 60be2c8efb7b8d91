//! Comparing bytes with a file while they are written, so that memory never holds them.

use std::io::{self, Write};

use tssd_format::Blob;

/// Takes what is written as long as it is what the file has; the first other byte is an error.
pub(super) struct Same<'a> {
    file: &'a dyn Blob,
    at: u64,
    difference: Option<u64>,
    buffer: Vec<u8>,
}

impl<'a> Same<'a> {
    pub(super) fn to(file: &'a dyn Blob) -> Self {
        Self { file, at: 0, difference: None, buffer: Vec::new() }
    }

    /// Whether all bytes of the file were written, and no other.
    pub(super) fn is_whole(&self) -> bool {
        self.difference.is_none() && self.file.size().is_ok_and(|size| size == self.at)
    }

    /// Where the first byte is that is not the file's.
    pub(super) fn difference(&self) -> Option<u64> {
        self.difference
    }

    /// Reads what the file has where `len` bytes are written; it may have less.
    fn read(&mut self, len: usize) -> io::Result<&[u8]> {
        let rest = self.file.size()?.saturating_sub(self.at);
        let len = usize::try_from(rest).unwrap_or(len).min(len);
        self.buffer.resize(len, 0);
        self.file.read_exact_at(&mut self.buffer, self.at)?;
        Ok(&self.buffer)
    }
}

impl Write for Same<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(1 << 20)];
        let own = self.read(bytes.len())?;
        let wide = |len: usize| u64::try_from(len).expect("usize is at most 64 bits");
        if own == bytes {
            self.at += wide(bytes.len());
            return Ok(bytes.len());
        }
        let common = own.iter().zip(bytes).take_while(|(own, byte)| own == byte).count();
        self.difference = Some(self.at + wide(common));
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

    use super::Same;

    #[test]
    fn the_first_other_byte_is_found() {
        let file = Bytes::from_static(b"abcdef");
        for (written, whole, difference) in [
            (&[&b"abc"[..], b"def"][..], true, None),
            (&[b"abc"], false, None),
            (&[b"abc", b"dxf"], false, Some(4)),
            (&[b"abcdef", b"g"], false, Some(6)),
            (&[b"abcdefgh"], false, Some(6)),
        ] {
            let mut same = Same::to(&file);
            let result = written.iter().try_for_each(|part| same.write_all(part));
            assert_eq!(result.is_err(), difference.is_some());
            assert_eq!((same.is_whole(), same.difference()), (whole, difference), "{written:?}");
        }
    }
}
