//! Tests servers that lie about changed blocks.

use crate::hostile::{ALL_FLAGS, SIZE, next, shake};
use crate::server::{short_dir, uri};
use fathom_nbd::protocol::{ChunkHeader, Replies};
use fathom_storage::ChangesClient;
use std::io::Write;
use std::os::unix::net::UnixListener;

/// Makes a server's reply to a query for changes.
fn told(extents: &[(u64, u64)], cookie: u64) -> Vec<u8> {
    let mut payload = 7u32.to_be_bytes().to_vec();
    payload.extend((extents.len() as u32).to_be_bytes());
    for (len, flags) in extents {
        payload.extend(len.to_be_bytes());
        payload.extend(flags.to_be_bytes());
    }
    let header = ChunkHeader {
        flags: 1,
        kind: 6,
        cookie,
        offset: 0,
        len: payload.len() as u64,
    };
    [&header.extended()[..], &payload].concat()
}

/// Inconsistent changes are rejected.
#[test]
fn changes_that_make_no_sense_are_refused() {
    type Answer = fn(u64) -> Vec<u8>;
    let cases: [(Answer, bool); 10] = [
        (|cookie| told(&[(4096, 1), (SIZE - 4096, 0)], cookie), true),
        (|cookie| told(&[(4096, 1)], cookie), true),
        (|cookie| told(&[], cookie), false),
        (|cookie| told(&[(0, 1)], cookie), false),
        (|cookie| told(&[(4096, 1), (0, 0)], cookie), false),
        (|cookie| told(&[(SIZE + 1, 1)], cookie), false),
        (
            |cookie| told(&[(u64::MAX, 1), (u64::MAX, 1)], cookie),
            false,
        ),
        (|cookie| told(&[(4096, 1)], cookie + 1), false),
        (|cookie| told(&vec![(1, 1); 4096], cookie), false),
        (|_| vec![0; 64], false),
    ];
    for (n, (answer, is_right)) in cases.into_iter().enumerate() {
        let dir = short_dir();
        let socket = dir.path().join("s");
        let listener = UnixListener::bind(&socket).expect("bound");
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            shake(&mut stream, Replies::Extended, ALL_FLAGS).expect("a handshake");
            let asked = next(&mut stream, Replies::Extended).expect("a question");
            stream.write_all(&answer(asked.cookie)).expect("answered");
            // The client must reject the reply itself, not the end of the connection.
            let _ = next(&mut stream, Replies::Extended);
        });
        let mut client = ChangesClient::connect(&uri(&socket), "id", true).expect("connected");
        assert_eq!(client.size(), SIZE);
        let told = client.next(0, SIZE);
        assert_eq!(told.is_ok(), is_right, "{n}: {told:?}");
    }
}
