//! Names by which manifests find volumes: text, though a path may be any bytes.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Before the digits of a path that is not UTF-8.
const BYTES: &str = "BYTES=";

/// The name of a path: the path itself, or its bytes in hexadecimal digits where it is not UTF-8.
pub(super) fn name_of(path: &Path) -> String {
    match path.to_str() {
        Some(text) => text.to_owned(),
        None => path
            .as_os_str()
            .as_bytes()
            .iter()
            .fold(BYTES.to_owned(), |name, byte| name + &format!("{byte:02x}")),
    }
}

/// The path or `UUID=…` of a volume whose name a manifest has.
pub fn path_of(name: &str) -> PathBuf {
    let digits =
        name.strip_prefix(BYTES).filter(|digits| digits.is_ascii() && digits.len().is_multiple_of(2));
    let bytes: Option<Vec<u8>> = digits.and_then(|digits| {
        let byte = |index| u8::from_str_radix(&digits[index..index + 2], 16).ok();
        (0..digits.len()).step_by(2).map(byte).collect()
    });
    bytes.map_or_else(|| name.into(), |bytes| OsString::from_vec(bytes).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_is_found_again_by_its_name() {
        for bytes in [&b"/a/b"[..], b"/\xff\xfe", "/\u{e9}".as_bytes(), b"/BYTES=zz", b"BYTES=0"] {
            let path = PathBuf::from(OsString::from_vec(bytes.to_vec()));
            assert_eq!(path_of(&name_of(&path)), path);
        }
        assert_eq!(name_of(Path::new("/a")), "/a");
    }
}
