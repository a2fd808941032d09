//! The manifest's parser as the fuzz target calls it: with any bytes, and with JSON behind a first
//! line that is right, since a wrong checksum hides everything behind it.

use crate::checksums::checksum;
use crate::manifest::{Common, FORMAT, Manifest};
use crate::table::Table;

/// A note as a manifest: an accepted one gives a table in which every extent has its owners, and is written
/// as it was read.
pub fn manifest(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    let mut note = Vec::new();
    if mode & 1 == 1 {
        let line = format!("memascend-store {FORMAT} {} {:08x}\n", data.len(), checksum(data));
        note.extend_from_slice(line.as_bytes());
    }
    note.extend_from_slice(data);
    let Ok(manifest) = Manifest::parse(&note) else { return };
    let end = manifest.end();
    for volume in 0..manifest.body.volumes.len() {
        assert!(manifest.layout.share_bytes(volume, end) <= end);
    }
    let again = Common::of(&manifest.body).and_then(|common| common.note(manifest.volume)).unwrap();
    let second = Manifest::parse(&again).expect("what was accepted is written in a form that is accepted");
    assert_eq!(again, Common::of(&second.body).and_then(|common| common.note(second.volume)).unwrap());
    let mut table = Table::default();
    table.fill(manifest).expect("it was checked");
    table.check();
    assert!(table.allocator.end() <= end);
}
