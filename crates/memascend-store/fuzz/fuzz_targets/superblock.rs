//! Fuzzes the parser of the superblock.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memascend_nvme::fuzzing::superblock(data));
