//! A qcow2 header, or entries of the tables.
#![no_main]

use fathom_formats::testing::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| match data.split_first() {
    Some((0..128, header)) => fuzz::qcow2_header(header),
    Some((_, tables)) => fuzz::qcow2_tables(tables),
    None => {}
});
