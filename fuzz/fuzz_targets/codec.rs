//! A vhost-user front-end that sends what it likes.
#![no_main]

use fathom_exports::vhost_user::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| fuzz::codec(data));
