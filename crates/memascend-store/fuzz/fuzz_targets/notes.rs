//! Fuzzes the parser of notes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memascend_nvme::fuzzing::notes(data));
