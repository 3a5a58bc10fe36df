//! Tests of each option, with valid and invalid data.

mod client;
mod tls;

use super::{Failure, MAX_DATA, MAX_OPTIONS, MAX_SKIPPED, Outcome};
use client::{Client, choice, contexts, host};
use fathom_core::testing::SIZE;
use fathom_nbd::protocol::{
    MAX_STRING, OptionHeader, Replies, export_flag as flag, info, opt, rep,
};
use std::io::Write;
use std::time::{Duration, Instant};

#[test]
fn it_greets_and_wants_flags_that_it_knows() {
    let mut client = Client::without_flags(host());
    client.say(&3u32.to_be_bytes());
    client.abort();
    let mut client = Client::without_flags(host());
    client.say(&(3u32 | 1 << 9).to_be_bytes());
    client.is_hung_up();
    assert!(client.failure().contains("0x200"));
}

#[test]
fn go_tells_about_the_disk_and_begins() {
    let mut client = Client::new(host());
    client.ask(
        opt::GO,
        &choice("b", &[info::BLOCK_SIZE, info::NAME, info::DESCRIPTION]),
    );
    let said = client.infos();
    client.expect(opt::GO, rep::ACK);
    let flags = flag::HAS_FLAGS
        | flag::SEND_FLUSH
        | flag::SEND_FUA
        | flag::SEND_TRIM
        | flag::SEND_WRITE_ZEROES
        | flag::CAN_MULTI_CONN
        | flag::SEND_CACHE;
    let mut export = SIZE.to_be_bytes().to_vec();
    export.extend(flags.to_be_bytes());
    assert_eq!(said[&info::EXPORT], export);
    let blocks: Vec<u8> = [1u32, 4096, 32 << 20]
        .iter()
        .flat_map(|n| n.to_be_bytes())
        .collect();
    assert_eq!(said[&info::BLOCK_SIZE], blocks);
    assert_eq!(said[&info::NAME], b"b");
    assert_eq!(said[&info::DESCRIPTION], b"the second");
    let (agreed, name) = client.agreed();
    assert_eq!(agreed.replies, Replies::Simple);
    assert_eq!(agreed.allocation_context, None);
    assert_eq!(name, "b");
}

#[test]
fn info_says_the_same_and_takes_nothing_into_use() {
    let host = host();
    let mut client = Client::new(host.clone());
    for option in [opt::INFO, opt::GO] {
        client.ask(option, &choice("", &[info::NAME]));
        let said = client.infos_of(option);
        assert_eq!(said[&info::NAME], b"a", "the default export");
        client.expect(option, rep::ACK);
        let active = option == opt::GO;
        assert_eq!(host.disk.is_active(), active);
    }
    drop(client.agreed());
    assert!(!host.disk.is_active());
}

#[test]
fn export_name_is_answered_without_a_reply() {
    for (flags, zeroes) in [(0u32, 124), (1, 124), (2, 0), (3, 0)] {
        let mut client = Client::without_flags(host());
        client.say(&flags.to_be_bytes());
        client.ask(opt::EXPORT_NAME, b"b");
        let mut answer = vec![0; 10 + zeroes];
        client.hear(&mut answer);
        assert_eq!(answer[..8], SIZE.to_be_bytes());
        assert!(answer[10..].iter().all(|byte| *byte == 0));
        assert_eq!(client.agreed().1, "b");
    }
}

#[test]
fn an_export_name_that_is_wrong_ends_the_connection() {
    let long = vec![b'x'; MAX_STRING + 1];
    for bad in [&b"c"[..], b"a\0", b"\xff", &long] {
        let mut client = Client::new(host());
        client.ask(opt::EXPORT_NAME, bad);
        client.is_hung_up();
        client.failure();
    }
}

#[test]
fn without_fixed_newstyle_there_are_no_options() {
    let mut client = Client::without_flags(host());
    client.say(&0u32.to_be_bytes());
    client.ask(opt::LIST, b"");
    client.is_hung_up();
    assert!(client.failure().contains("fixed newstyle"));
}

#[test]
fn a_list_has_every_export() {
    let mut client = Client::new(host());
    client.ask(opt::LIST, b"");
    assert_eq!(client.expect(opt::LIST, rep::SERVER), b"\0\0\0\x01a");
    let second = client.expect(opt::LIST, rep::SERVER);
    assert_eq!(second, b"\0\0\0\x01bthe second");
    client.expect(opt::LIST, rep::ACK);
    client.ask(opt::LIST, b"x");
    client.expect(opt::LIST, rep::ERR_INVALID);
    client.abort();
}

#[test]
fn unknown_options_are_unsupported() {
    let mut client = Client::new(host());
    for option in [0, 4, 12, u32::MAX] {
        client.ask(option, b"whatever");
        client.expect(option, rep::ERR_UNSUP);
    }
    client.abort();
}

#[test]
fn an_abort_may_have_data() {
    let mut client = Client::new(host());
    client.ask(opt::ABORT, b"why not");
    client.expect(opt::ABORT, rep::ACK);
    client.is_hung_up();
    assert!(matches!(client.outcome(), Ok(Outcome::Over)));
    // A client need not wait for the reply.
    for _ in 0..20 {
        let mut client = Client::new(host());
        client.ask(opt::ABORT, b"");
        assert!(matches!(client.outcome(), Ok(Outcome::Over)));
    }
}

#[test]
fn who_goes_between_options_has_done_nothing_wrong() {
    for client in [Client::new(host()), Client::without_flags(host())] {
        assert!(matches!(client.outcome(), Ok(Outcome::Over)));
    }
    let mut client = Client::new(host());
    client.say(b"IHAVE");
    assert!(matches!(client.outcome(), Err(Failure::Vanished)));
}

#[test]
fn replies_and_headers_get_wider_and_never_narrower() {
    let mut client = Client::new(host());
    for (option, answer) in [
        (opt::STRUCTURED_REPLY, rep::ACK),
        (opt::STRUCTURED_REPLY, rep::ERR_INVALID),
        (opt::EXTENDED_HEADERS, rep::ACK),
        (opt::EXTENDED_HEADERS, rep::ERR_INVALID),
        (opt::STRUCTURED_REPLY, rep::ERR_EXT_HEADER_REQD),
    ] {
        client.ask(option, b"");
        client.expect(option, answer);
    }
    client.ask(opt::GO, &choice("a", &[]));
    let said = client.infos();
    client.expect(opt::GO, rep::ACK);
    let flags = u16::from_be_bytes(said[&info::EXPORT][8..].try_into().unwrap());
    assert_eq!(flags & flag::SEND_DF, flag::SEND_DF);
    assert_eq!(client.agreed().0.replies, Replies::Extended);

    for option in [opt::STRUCTURED_REPLY, opt::EXTENDED_HEADERS] {
        let mut client = Client::new(host());
        client.ask(option, b"x");
        client.expect(option, rep::ERR_INVALID);
        client.ask(opt::GO, &choice("a", &[]));
        client.infos();
        client.expect(opt::GO, rep::ACK);
        assert_eq!(client.agreed().0.replies, Replies::Simple);
    }
}

#[test]
fn after_extended_headers_only_go_can_go() {
    let mut client = Client::new(host());
    client.ask(opt::EXTENDED_HEADERS, b"");
    client.expect(opt::EXTENDED_HEADERS, rep::ACK);
    client.ask(opt::EXPORT_NAME, b"a");
    client.is_hung_up();
    client.failure();
}

const ALLOCATION: &[u8] = b"base:allocation";

fn structured() -> Client {
    let mut client = Client::new(host());
    client.ask(opt::STRUCTURED_REPLY, b"");
    client.expect(opt::STRUCTURED_REPLY, rep::ACK);
    client
}

#[test]
fn contexts_are_listed() {
    let mut client = structured();
    let option = opt::LIST_META_CONTEXT;
    let twice = [ALLOCATION, ALLOCATION];
    for queries in [&[][..], &[&b"base:"[..]], &[ALLOCATION], &twice] {
        client.ask(option, &contexts("a", queries));
        let context = client.expect(option, rep::META_CONTEXT);
        assert_eq!(context, [&[0; 4], ALLOCATION].concat());
        client.expect(option, rep::ACK);
    }
    for query in [
        &b"base:unknown"[..],
        b"qemu:dirty-bitmap:x",
        b"x-y:",
        b"no colon",
        b"",
    ] {
        client.ask(option, &contexts("a", &[query]));
        client.expect(option, rep::ACK);
    }
    client.ask(option, &contexts("c", &[]));
    client.expect(option, rep::ERR_UNKNOWN);
    client.abort();
}

#[test]
fn contexts_are_chosen_for_one_export() {
    for (context_of, chosen, id) in [("a", "a", Some(1)), ("", "a", Some(1)), ("b", "a", None)] {
        let mut client = Client::new(host());
        client.ask(opt::EXTENDED_HEADERS, b"");
        client.expect(opt::EXTENDED_HEADERS, rep::ACK);
        client.ask(
            opt::SET_META_CONTEXT,
            &contexts(context_of, &[b"x:y", ALLOCATION]),
        );
        let context = client.expect(opt::SET_META_CONTEXT, rep::META_CONTEXT);
        assert_eq!(context, [&[0, 0, 0, 1], ALLOCATION].concat());
        client.expect(opt::SET_META_CONTEXT, rep::ACK);
        client.ask(opt::GO, &choice(chosen, &[]));
        let said = client.infos();
        let flags = u16::from_be_bytes(said[&info::EXPORT][8..].try_into().unwrap());
        assert_eq!(flags & flag::BLOCK_STATUS_PAYLOAD != 0, id.is_some());
        client.expect(opt::GO, rep::ACK);
        assert_eq!(
            client.agreed().0.allocation_context,
            id,
            "{context_of} {chosen}"
        );
    }
}

#[test]
fn contexts_that_were_chosen_are_replaced_even_by_none() {
    let none = contexts("a", &[]);
    let wild = contexts("a", &[b"base:"]);
    let elsewhere = contexts("c", &[ALLOCATION]);
    let answers = [
        (none, rep::ACK),
        (wild, rep::ACK),
        (elsewhere, rep::ERR_UNKNOWN),
        (b"short".to_vec(), rep::ERR_INVALID),
    ];
    for (data, answer) in answers {
        let mut client = structured();
        client.ask(opt::SET_META_CONTEXT, &contexts("a", &[ALLOCATION]));
        client.expect(opt::SET_META_CONTEXT, rep::META_CONTEXT);
        client.expect(opt::SET_META_CONTEXT, rep::ACK);
        client.ask(opt::SET_META_CONTEXT, &data);
        client.expect(opt::SET_META_CONTEXT, answer);
        client.ask(opt::GO, &choice("a", &[]));
        client.infos();
        client.expect(opt::GO, rep::ACK);
        assert_eq!(client.agreed().0.allocation_context, None);
    }
}

#[test]
fn contexts_need_structured_replies() {
    for option in [opt::LIST_META_CONTEXT, opt::SET_META_CONTEXT] {
        let mut client = Client::new(host());
        client.ask(option, &contexts("a", &[]));
        client.expect(option, rep::ERR_INVALID);
        client.abort();
    }
}

#[test]
fn data_that_does_not_add_up_is_invalid() {
    let mut client = structured();
    let good = choice("a", &[info::NAME]);
    let more = [&good[..], b"x"].concat();
    let huge = [&u32::MAX.to_be_bytes()[..], &[0; 100]].concat();
    let not_utf8 = [&[0, 0, 0, 1, 0xff][..], &[0, 0]].concat();
    let nul = [&[0, 0, 0, 1, 0][..], &[0, 0]].concat();
    for option in [opt::INFO, opt::GO] {
        for bad in [
            &b""[..],
            &good[..4],
            &good[..good.len() - 1],
            &more,
            &huge,
            &not_utf8,
            &nul,
        ] {
            client.ask(option, bad);
            client.expect(option, rep::ERR_INVALID);
        }
    }
    let good = contexts("a", &[ALLOCATION]);
    let more = [&good[..], b"x"].concat();
    let many = [&[0, 0, 0, 1, b'a'][..], &u32::MAX.to_be_bytes()].concat();
    for option in [opt::LIST_META_CONTEXT, opt::SET_META_CONTEXT] {
        for bad in [
            &b""[..],
            &good[..5],
            &good[..good.len() - 1],
            &more,
            &huge,
            &many,
        ] {
            client.ask(option, bad);
            client.expect(option, rep::ERR_INVALID);
        }
    }
    client.abort();
}

#[test]
fn data_that_is_too_long_is_skipped_or_not_even_that() {
    let mut client = Client::new(host());
    client.ask(opt::LIST, &vec![7; MAX_DATA as usize + 1]);
    client.expect(opt::LIST, rep::ERR_TOO_BIG);
    let option = opt::GO;
    client.say(&client::header(option, MAX_SKIPPED + 1));
    client.is_hung_up();
    let why = client.failure();
    assert!(why.contains("bytes of data"), "{why}");
}

#[test]
fn unknown_export_is_refused_and_another_can_be_chosen() {
    let mut client = Client::new(host());
    client.ask(opt::GO, &choice("c", &[]));
    let why = client.expect(opt::GO, rep::ERR_UNKNOWN);
    assert_eq!(why, br#"no export "c""#);
    client.ask(opt::GO, &choice("a", &[]));
    client.infos();
    client.expect(opt::GO, rep::ACK);
    assert_eq!(client.agreed().1, "a");
}

#[test]
fn a_disk_that_cannot_be_used_is_told() {
    let host = host();
    host.disk
        .fail_activation
        .store(true, std::sync::atomic::Ordering::SeqCst);
    let mut client = Client::new(host.clone());
    client.ask(opt::GO, &choice("a", &[]));
    let why = client.expect(opt::GO, rep::ERR_POLICY);
    assert_eq!(why, b"test.img: locked by another process");
    client.ask(opt::EXPORT_NAME, b"a");
    client.is_hung_up();
    client.failure();
    assert!(!host.disk.is_active());
}

#[test]
fn a_client_that_goes_during_go_leaves_the_disk() {
    let host = host();
    let mut client = Client::new(host.clone());
    client.ask(opt::GO, &choice("a", &[]));
    drop(client.outcome());
    assert!(!host.disk.is_active());
}

#[test]
fn large_block_size_is_announced_without_a_request() {
    let mut client = Client::new(client::host_with_blocks(4096));
    client.ask(opt::GO, &choice("a", &[]));
    let said = client.infos_of(opt::GO);
    assert_eq!(said[&info::BLOCK_SIZE][..4], 4096u32.to_be_bytes());
    client.expect(opt::GO, rep::ACK);
    client.agreed();
}

#[test]
fn a_handshake_has_a_deadline_however_busy_it_is() {
    let begun = Instant::now();
    // Long enough for the valid part of the handshake on a busy machine.
    let patience = Duration::from_secs(3);
    let mut silent = Client::with_patience(host(), patience);
    let mut slow = Client::with_patience(host(), patience);
    slow.say(&3u32.to_be_bytes());
    slow.say(&client::header(opt::LIST, MAX_DATA));
    // Bytes that trickle in do not extend the deadline.
    let is_over = (0..100).any(|_| {
        std::thread::sleep(patience / 10);
        slow.socket.write_all(&[7]).is_err()
    });
    assert!(is_over, "it listens for as long as something comes");
    for client in [&mut silent, &mut slow] {
        client.is_hung_up();
    }
    for client in [silent, slow] {
        assert!(matches!(client.outcome(), Err(Failure::TimedOut)));
    }
    assert!(begun.elapsed() >= patience);
}

#[test]
fn options_come_to_an_end() {
    let mut client = Client::new(host());
    for _ in 0..MAX_OPTIONS {
        client.ask(opt::LIST, b"x");
        client.expect(opt::LIST, rep::ERR_INVALID);
    }
    client.is_hung_up();
    let why = client.failure();
    assert!(why.contains("options"), "{why}");
}

#[test]
fn what_is_no_option_ends_the_connection() {
    let mut client = Client::new(host());
    client.say(&[b'G'; OptionHeader::LEN]);
    client.is_hung_up();
    assert!(client.failure().contains("no NBD option"));
}
