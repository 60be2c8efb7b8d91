//! What the good vectors hold, byte by byte, as `tssd inspect --hex` shows it, and their JSON view: a change
//! of the format shows itself here in words. `cargo insta review` takes a change over.

use std::path::Path;

use crate::cli::Place;

#[test]
fn vectors_mean_what_they_meant() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors/valid");
    let mut paths: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let place = Place::new();
    let mut count = 0;
    for path in paths.iter().filter(|path| path.extension() == Some("tssd".as_ref())) {
        let bytes = std::fs::read(path).unwrap();
        count += 1;
        let name = path.file_stem().unwrap().to_str().unwrap();
        place.write("vector.tssd", &bytes);
        let hex = place.expect(0, "inspect --hex vector.tssd");
        let archive = tssd_format::Archive::from_bytes(bytes).unwrap();
        let json = tssd_format::to_json(&archive).unwrap();
        // Long content is in the file beside the vector already.
        let json = shortened(&serde_json::to_string_pretty(&json).unwrap());
        settings.bind(|| insta::assert_snapshot!(name, format!("{json}\n{hex}")));
    }
    assert!(count >= 60);
}

fn shortened(json: &str) -> String {
    let short = |line: &str| match line.char_indices().nth(160) {
        Some((at, _)) => format!("{} …", &line[..at]),
        None => line.to_owned(),
    };
    json.lines().map(short).collect::<Vec<_>>().join("\n")
}
