//! Tests with vhost-user front-ends and NBD clients that send arbitrary data.

use fathom_core::testing::TestDisk;
use fathom_exports::VhostUser;
use fathom_exports::nbd::connection::fuzz::transmission;
use fathom_exports::nbd::fuzz::Handshakes;
use fathom_exports::vhost_user::{Options, fuzz};
use proptest::prelude::*;
use std::cell::OnceCell;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

fn export() -> (Arc<TestDisk>, VhostUser) {
    let disk = TestDisk::new();
    let options = Options {
        max_queues: 2,
        ..Options::default()
    };
    let export = VhostUser::new(disk.clone(), disk.workers(1), options).unwrap();
    (disk, export)
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

thread_local! {
    static EXPORT: OnceCell<(Arc<TestDisk>, VhostUser)> = const { OnceCell::new() };
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_bytes_upset_the_codec(data in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzz::codec(&data);
    }

    /// Random bytes seldom have a valid version and size.
    #[test]
    fn no_payload_upsets_the_codec(
        fds in any::<u8>(),
        messages in prop::collection::vec(
            (0u32..45, prop::collection::vec(any::<u8>(), 0..80)),
            0..8,
        ),
    ) {
        let mut data = vec![fds];
        for (request, payload) in messages {
            for word in [request, 1, payload.len() as u32] {
                data.extend(word.to_ne_bytes());
            }
            data.extend(payload);
        }
        fuzz::codec(&data);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn no_messages_upset_a_session(data in prop::collection::vec(any::<u8>(), 0..600)) {
        EXPORT.with(|served| fuzz::session(&served.get_or_init(export).1, &data));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn no_bytes_upset_a_handshake(data in prop::collection::vec(any::<u8>(), 0..600)) {
        let disk = TestDisk::new();
        Handshakes::new(disk.clone()).run(&data);
        assert!(!disk.is_active());
    }
}

/// Checks that the generated options get far enough to test something.
#[test]
fn some_handshakes_come_to_an_agreement() {
    let handshakes = Handshakes::new(TestDisk::new());
    // GO, with an empty name and no requests.
    assert!(handshakes.run(&[1, 7, 2, 0, 64]));
    // Structured replies, a context, and GO for the same export.
    assert!(handshakes.run(&[1, 8, 0, 10, 3, 100, 1, 130, 7, 2, 100, 64]));
    // The header announces one byte too many.
    assert!(!handshakes.run(&[1, 0xe4, 2, 0, 64]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_requests_upset_an_nbd_connection(data in prop::collection::vec(any::<u8>(), 0..1000)) {
        transmission(&data);
    }
}

proptest! {
    // Each case reads about 80 MiB. (The fuzz target `nbd_transmission` does the same for longer.)
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Reads of up to 8 MiB, more in total than the connection has memory for, with occasional
    /// completions of the disk.
    #[test]
    fn long_reads_never_wait_for_each_other(
        how in any::<u8>(),
        reads in prop::collection::vec((1u8..=128, any::<u8>(), any::<u8>()), 1..40),
    ) {
        let mut data = vec![how];
        for (len, odd, which) in reads {
            // A request: its length in 64 KiB, a flag, the command, the cookie and the offset.
            data.extend([0, 2, len, odd, 0, 0, 0, 0, 0]);
            data.push(10);
            if which % 4 == 0 {
                data.extend([11, which]);
            }
        }
        transmission(&data);
    }
}

#[test]
fn no_file_descriptor_stays_open() {
    let (disk, export) = export();
    let mut state = 1u32;
    let mut random = move || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 24) as u8
    };
    let mut data = vec![0; 1000];
    let mut round = |export: &VhostUser| {
        data.iter_mut().for_each(|byte| *byte = random());
        fuzz::session(export, &data);
        fuzz::codec(&data);
    };
    // Other tests of this file open and close files at the same time, so only large growth means a
    // leak.
    let before = open_files();
    (0..500).for_each(|_| round(&export));
    assert!(open_files() < before + 200);
    assert_eq!(export.status(), Default::default());
    assert!(!disk.is_active());
    // Checks that the messages get far enough to test something.
    assert!(disk.activated.load(SeqCst) > 250);
}
