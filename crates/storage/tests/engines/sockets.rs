//! Tests the contract of each engine for sockets.

use super::{each, iov, nothing_more, reap};
use fathom_core::{Completion, Engine, SocketIo, SocketIoKind, SourceId, Token, Wait};
use libc::iovec;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Makes a message header of these iovecs.
fn message(iovecs: &mut [iovec]) -> libc::msghdr {
    // SAFETY: an all-zero header is a message without data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iovecs.as_mut_ptr();
    message.msg_iovlen = iovecs.len() as _;
    message
}

const RECEIVE: u8 = 1;
const SEND: u8 = 2;

fn own(tag: u8) -> Token {
    SourceId::new(3, 5).token(tag)
}

/// # Safety
/// As for [`Engine::push_socket`].
unsafe fn push_socket(
    engine: &mut dyn Engine,
    socket: &UnixStream,
    tag: u8,
    message: &mut libc::msghdr,
) {
    let io = SocketIo {
        kind: match tag {
            RECEIVE => SocketIoKind::Receive,
            _ => SocketIoKind::Send,
        },
        socket: socket.as_raw_fd(),
        message,
    };
    // SAFETY: as required of the caller.
    unsafe { engine.push_socket(io, own(tag)) };
}

#[test]
fn sockets_receive_what_is_there_and_wait_for_what_is_not() {
    each(|mut engine| {
        let engine = &mut *engine;
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        engine.add_socket(ours.as_fd()).expect("added");
        let (mut a, mut b) = ([0u8; 3], [0u8; 100]);
        for round in 0..20 {
            let mut iovecs = [iov(&mut a), iov(&mut b)];
            let parts = if round % 3 == 0 { 1 } else { 2 };
            let mut message = message(&mut iovecs[..parts]);
            if round % 2 == 0 {
                theirs.write_all(b"12345").expect("sent");
            }
            // SAFETY: the test waits for the completion.
            unsafe { push_socket(engine, &ours, RECEIVE, &mut message) };
            if round % 2 == 1 {
                nothing_more(engine);
                theirs.write_all(b"12345").expect("sent");
            }
            let done = reap(engine, 1)[0];
            assert_eq!(done.token, own(RECEIVE));
            let expected = if parts == 1 { 3 } else { 5 };
            assert_eq!(done.result, expected);
            assert_eq!(&a, b"123");
            if parts == 1 {
                // SAFETY: the test waits for the completion.
                unsafe { push_socket(engine, &ours, RECEIVE, &mut message) };
                assert_eq!(reap(engine, 1)[0].result, 2);
            } else {
                assert_eq!(&b[..2], b"45");
            }
        }
        drop(theirs);
        let mut one = [iov(&mut b)];
        let mut message = message(&mut one);
        // SAFETY: the test waits for the completion.
        unsafe { push_socket(engine, &ours, RECEIVE, &mut message) };
        assert_eq!(reap(engine, 1)[0].result, 0, "the end");
        // SAFETY: the test waits for the completion.
        unsafe { push_socket(engine, &ours, SEND, &mut message) };
        assert_eq!(reap(engine, 1)[0].result, -libc::EPIPE);
        engine.remove_socket(ours.as_fd());
    });
}

#[test]
fn sockets_send_everything_while_they_also_receive() {
    const LEN: usize = 3 << 20;
    each(|mut engine| {
        let engine = &mut *engine;
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        engine.add_socket(ours.as_fd()).expect("added");
        let mut bytes: Vec<u8> = (0..LEN).map(|i| (i / 7) as u8).collect();
        let original = bytes.clone();
        let mut byte = [0u8; 1];
        let mut inward = [iov(&mut byte)];
        let mut receive = message(&mut inward);
        // SAFETY: the test waits for the completion.
        unsafe { push_socket(engine, &ours, RECEIVE, &mut receive) };
        let reader = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            let mut all = vec![0; LEN];
            theirs.read_exact(&mut all).expect("received");
            theirs.write_all(&[9]).expect("sent");
            (all, theirs)
        });
        let (mut sent, mut received) = (0, 0);
        while sent < LEN {
            let (x, y) = bytes[sent..].split_at_mut((LEN - sent) / 2);
            let mut iovecs = [iov(x), iov(y)];
            let mut outward = message(&mut iovecs);
            // SAFETY: the test waits for the completion.
            unsafe { push_socket(engine, &ours, SEND, &mut outward) };
            // The last receive may have completed as well.
            let mut done = Vec::new();
            while !done.iter().any(|c: &Completion| c.token == own(SEND)) {
                engine.submit(Wait::Forever, &mut done).expect("submitted");
            }
            for Completion { token, result } in done {
                assert!(result > 0, "{result}");
                match token == own(SEND) {
                    true => sent += result as usize,
                    false => received += result,
                }
            }
        }
        if received == 0 {
            let done = reap(engine, 1)[0];
            assert_eq!(done.token, own(RECEIVE));
            received = done.result;
        }
        assert_eq!(received, 1);
        let (all, _theirs) = reader.join().expect("read");
        assert!(all == original);
        nothing_more(engine);
        engine.remove_socket(ours.as_fd());
    });
}

#[test]
fn what_waits_for_a_socket_can_be_cancelled() {
    each(|mut engine| {
        let engine = &mut *engine;
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        engine.add_socket(ours.as_fd()).expect("added");
        let mut bytes = vec![1u8; 1 << 20];
        let mut byte = [0u8; 1];
        let mut iovecs = [iov(&mut byte)];
        let mut receive = message(&mut iovecs);
        for waits in [true, false] {
            // SAFETY: the test waits for the completion.
            unsafe { push_socket(engine, &ours, RECEIVE, &mut receive) };
            if waits {
                nothing_more(engine);
            }
            engine.cancel_socket(own(RECEIVE));
            let done = reap(engine, 1)[0];
            assert_eq!((done.token, done.result), (own(RECEIVE), -libc::ECANCELED));
        }
        // Data that can be sent at once is sent despite the cancellation.
        let mut iovecs = [iov(&mut bytes[..1000])];
        let mut send = message(&mut iovecs);
        // SAFETY: the test waits for the completion.
        unsafe { push_socket(engine, &ours, SEND, &mut send) };
        engine.cancel_socket(own(SEND));
        assert_eq!(reap(engine, 1)[0].result, 1000);
        theirs.read_exact(&mut [0; 1000]).expect("received");
        // A send that would have to wait is cancelled.
        let mut total = 0;
        loop {
            let mut iovecs = [iov(&mut bytes)];
            let mut send = message(&mut iovecs);
            // SAFETY: the test waits for the completion.
            unsafe { push_socket(engine, &ours, SEND, &mut send) };
            engine.cancel_socket(own(SEND));
            match reap(engine, 1)[0].result {
                n if n > 0 => total += n,
                n => break assert_eq!(n, -libc::ECANCELED),
            }
        }
        assert!(total > 0);
        engine.cancel_socket(own(SEND));
        nothing_more(engine);
        engine.remove_socket(ours.as_fd());
    });
}
