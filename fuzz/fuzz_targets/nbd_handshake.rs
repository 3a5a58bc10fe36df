//! An NBD client that says what it likes before it is served.
#![no_main]

use fathom_core::testing::TestDisk;
use fathom_exports::nbd::fuzz::Handshakes;
use libfuzzer_sys::fuzz_target;
use std::cell::OnceCell;

thread_local! {
    static HANDSHAKES: OnceCell<Handshakes> = const { OnceCell::new() };
}

fuzz_target!(|data: &[u8]| {
    HANDSHAKES.with(|cell| {
        cell.get_or_init(|| Handshakes::new(TestDisk::new()))
            .run(data);
    });
});
