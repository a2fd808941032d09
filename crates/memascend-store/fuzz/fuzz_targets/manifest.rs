//! Fuzzes the parser of the manifest.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| memascend_store::fuzzing::manifest(data));
