//! LUKS headers: any bytes, and good ones of which some are others.
#![no_main]

use fathom_luks::{Effort, Header, Options, Passphrase, create};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use std::time::Duration;

static GOOD: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    let effort = Effort {
        time: Duration::from_millis(1),
        memory_kib: 32,
    };
    let passphrase = Passphrase::new(b"key".to_vec()).expect("a passphrase");
    [1, 2].map(|version| {
        let options = Options {
            version,
            effort,
            ..Options::default()
        };
        create(&options, &passphrase).expect("a header").bytes
    })
});

fn read(bytes: &[u8]) {
    if let Ok(header) = Header::read(&bytes) {
        let _ = (header.describe(), header.payload(), header.fingerprint());
    }
}

fuzz_target!(|data: &[u8]| {
    read(data);
    for good in &*GOOD {
        // The copy keeps the length of a good header, and changes in its first 8 KiB.
        let mut changed = good.clone();
        for change in data.chunks_exact(3) {
            let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % 8192;
            changed[at] ^= change[2];
        }
        read(&changed);
    }
});
