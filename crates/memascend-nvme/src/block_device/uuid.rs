//! UUIDs: which device a block device is, whatever its path is today.

use std::io;

use uuid::Uuid;
use uuid::fmt::Hyphenated;

use crate::{BlockDeviceError, BlockDeviceResult};

/// A new random UUID (version 4).
///
/// # Errors
/// If the kernel gives no random bytes.
pub fn random_uuid() -> io::Result<Uuid> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes)?;
    Ok(uuid::Builder::from_random_bytes(bytes).into_uuid())
}

/// The UUID that `text` names: 32 hexadecimal digits in groups of 8, 4, 4, 4 and 12, divided by
/// hyphens.
///
/// # Errors
/// [`BlockDeviceError::NotUuid`] for any other text.
pub fn parse_uuid(text: &str) -> BlockDeviceResult<Uuid> {
    let parsed: Result<Hyphenated, _> = text.parse();
    parsed.map(Hyphenated::into_uuid).map_err(|_| BlockDeviceError::NotUuid { text: text.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_random_and_of_version_4() {
        let ids = [random_uuid().unwrap(), random_uuid().unwrap()];
        assert_ne!(ids[0], ids[1]);
        for id in ids {
            let text = id.to_string();
            assert_eq!(&text[14..15], "4");
            assert!("89ab".contains(&text[19..20]), "{text}");
            assert_eq!(parse_uuid(&text).unwrap(), id);
            assert_eq!(parse_uuid(&text.to_uppercase()).unwrap(), id);
        }
    }

    #[test]
    fn a_uuid_has_its_usual_form() {
        let id =
            Uuid::from_bytes([0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0x4c, 0xde, 0x8f, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(id.to_string(), "01234567-89ab-4cde-8f01-020304050607");
        for wrong in [
            "",
            "01234567",
            "0123456789ab4cde8f01020304050607",
            "{01234567-89ab-4cde-8f01-020304050607}",
            "urn:uuid:01234567-89ab-4cde-8f01-020304050607",
            "0123456-789ab-4cde-8f01-020304050607",
            "01234567-89ab-4cde-8f01-02030405060g",
            "é123456-89ab-4cde-8f01-020304050607",
        ] {
            assert!(parse_uuid(wrong).unwrap_err().to_string().contains("not a UUID"), "{wrong}");
        }
    }
}
