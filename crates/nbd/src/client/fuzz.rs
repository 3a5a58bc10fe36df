//! Does handshakes with arbitrary bytes of a server: the body of a fuzz target and of a test.

use super::{Export, Refusal, Wishes, handshake};
use crate::protocol::{BASE_ALLOCATION, Replies};
use std::io::{self, Read, Write};

/// The server's side of a handshake. Bytes from the client are discarded.
struct Script<'a>(&'a [u8]);

impl Read for Script<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Script<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Does handshakes of both kinds of clients with a server that sends `input`, and checks the
/// results.
///
/// # Panics
/// Panics if a result of a handshake is invalid.
pub fn greeting(input: &[u8]) {
    let _ = greet_disk(input);
    let _ = greet(input, &[Replies::Extended, Replies::Structured], false);
}

/// Does the handshake of a client that uses the export as a disk.
fn greet_disk(input: &[u8]) -> Result<Export, Refusal> {
    greet(input, &[Replies::Structured], true)
}

fn greet(input: &[u8], replies: &[Replies], allocation: bool) -> Result<Export, Refusal> {
    let wishes = Wishes {
        export: "export",
        replies,
        context: allocation.then_some(BASE_ALLOCATION),
    };
    let outcome = handshake(&mut Script(input), &wishes);
    match &outcome {
        Ok(export) => {
            let unit = export.minimum_block.max(512);
            assert!(export.minimum_block.is_power_of_two() && unit <= 64 << 10);
            assert!(export.preferred_block.is_power_of_two());
            let longest = export.maximum_payload();
            assert!(longest.is_multiple_of(unit) && longest > 0 && longest <= 32 << 20);
            assert!(export.size <= i64::MAX as u64);
            assert!(export.replies == Replies::Simple || replies.contains(&export.replies));
            let may_tell = allocation && export.replies != Replies::Simple;
            assert!(export.context.is_none() || may_tell);
        }
        Err(Refusal(line)) => assert!(!line.chars().any(char::is_control), "{line:?}"),
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::OPTION_REPLY_MAGIC;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// A handshake ends, no matter which replies to options a server sends and in which order.
        #[test]
        fn a_handshake_ends_whatever_a_server_says(
            answers in prop::collection::vec(
                (0..5usize, 0..8usize, prop::collection::vec(any::<u8>(), 0..40)), 0..8),
            rest in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut input = b"NBDMAGICIHAVEOPT\0\x03".to_vec();
            for (option, kind, data) in answers {
                let option: u32 = [8, 10, 7, 1, 11][option];
                let error = 1 << 31;
                let kind: u32 = [1, 1, 3, 3, 4, error | 1, error | 6, 99][kind];
                input.extend(OPTION_REPLY_MAGIC.to_be_bytes());
                input.extend([option, kind, data.len() as u32].map(u32::to_be_bytes).concat());
                input.extend(data);
            }
            input.extend(rest);
            greeting(&input);
        }

        /// Block sizes and flags of an export are arbitrary.
        #[test]
        fn what_an_export_is_said_to_be_is_checked(
            size in any::<u64>(), flags in any::<u16>(),
            blocks in prop::array::uniform3(prop_oneof![any::<u32>(), (0..32u32).prop_map(|n| 1 << n)]),
        ) {
            let mut input = b"NBDMAGICIHAVEOPT\0\x03".to_vec();
            let mut reply = |option: u32, kind: u32, data: &[u8]| {
                input.extend(OPTION_REPLY_MAGIC.to_be_bytes());
                input.extend([option, kind, data.len() as u32].map(u32::to_be_bytes).concat());
                input.extend(data);
            };
            reply(8, 1, &[]);
            reply(10, 4, &[&7u32.to_be_bytes()[..], b"base:allocation"].concat());
            reply(10, 1, &[]);
            reply(7, 3, &[&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat());
            reply(7, 3, &[&[0, 3][..], &blocks.map(u32::to_be_bytes).concat()].concat());
            reply(7, 1, &[]);
            greeting(&input);
            let export = greet_disk(&input);
            let usable = blocks[0].is_power_of_two() && blocks[0] <= 65536
                && blocks[2] >= blocks[0].max(512) && size <= i64::MAX as u64;
            prop_assert_eq!(export.is_ok(), usable);
        }
    }
}
