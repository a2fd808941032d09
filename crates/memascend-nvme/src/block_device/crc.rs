//! The checksum of superblocks and notes.

use crc_fast::CrcAlgorithm::Crc32IsoHdlc;

/// CRC-32 as zlib and GPT compute it.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    crc_fast::checksum(Crc32IsoHdlc, bytes) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_is_that_of_the_catalogues() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(&[0; 32]), 0x190a_55ad);
    }
}
