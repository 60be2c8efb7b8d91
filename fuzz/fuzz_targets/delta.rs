#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tssd_tests::fuzz::delta(data));
