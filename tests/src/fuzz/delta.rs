//! Delta chunks: arbitrary ones, and those of the encoder.

use tssd_format::{
    DeltaClasses, DeltaDecoder, DeltaEncoder, DeltaFolder, DeltaOptions, ElementWidth, ErrorKind,
};

/// Applies the input as a delta chunk, and encodes the input as two versions.
///
/// # Panics
///
/// If a decoder changes memory that it refuses to change, or a chunk does not lead to its result.
pub fn delta(data: &[u8]) {
    let Some(([choice, short, long], bytes)) = data.split_first_chunk::<3>() else { return };
    let width = [ElementWidth::One, ElementWidth::Two, ElementWidth::Four][usize::from(choice % 3)];
    // More than one block of 65,536 elements if the highest bit is set.
    let elements = usize::from(u16::from_le_bytes([*short, *long])) * 2;
    let base: Vec<u8> =
        (0..=u8::MAX).map(|byte| byte / 3).cycle().take(elements * width.bytes()).collect();
    decode(bytes, width, &base);
    let (old, new) = bytes.split_at(bytes.len() / 2 / width.bytes() * width.bytes());
    let old = [old, &base[..base.len().min(1000 * width.bytes())]].concat();
    let new = [&new[..old.len().min(new.len())], old.get(new.len()..).unwrap_or_default()].concat();
    let classes = [DeltaClasses::One, DeltaClasses::Two, DeltaClasses::Four, DeltaClasses::Auto];
    encode(width, [&old, &new], classes[usize::from(choice >> 4) % 4]);
}

fn decode(chunk: &[u8], width: ElementWidth, base: &[u8]) {
    let mut decoder = DeltaDecoder::new().expect("zstd has memory");
    let mut target = base.to_vec();
    let applied = decoder.apply(chunk, width, &mut target);
    let count = decoder.count(chunk, width, base.len());
    match applied {
        Ok(()) => assert!(count.is_ok()),
        Err(error) if error.kind() == ErrorKind::DeltaMismatch => assert!(count.is_ok()),
        Err(error) => {
            assert_eq!(target, base, "changed in spite of an error");
            assert_eq!(count.map_err(|count| count.kind()), Err(error.kind()));
        }
    }
    let mut copy = vec![0; base.len()];
    let copied = decoder.apply_to(chunk, width, base, &mut copy);
    let kind = |result: tssd_format::Result<()>| result.map_err(|error| error.kind());
    assert_eq!(kind(copied), kind(decoder.apply(chunk, width, &mut base.to_vec())));
    let mut folder = DeltaFolder::new().expect("zstd has memory");
    let mut folded = Vec::new();
    if folder.fold([chunk, chunk], width, base.len(), &mut folded).is_ok() {
        decoder.count(&folded, width, base.len()).expect("what is folded is legal");
    }
}

fn encode(width: ElementWidth, versions: [&[u8]; 2], classes: DeltaClasses) {
    let mut chunk = Vec::new();
    let options = DeltaOptions { classes, ..DeltaOptions::default() };
    let mut encoder = DeltaEncoder::new().expect("zstd has memory");
    encoder.encode(versions, width, &options, &mut chunk).expect("versions of one length");
    let mut target = versions[0].to_vec();
    let mut decoder = DeltaDecoder::new().expect("zstd has memory");
    decoder.apply(&chunk, width, &mut target).expect("what is encoded is legal");
    assert_eq!(target, versions[1]);
}
