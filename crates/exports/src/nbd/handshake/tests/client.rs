//! A client for handshake tests, and a host for it.

use super::super::{Agreed, Denied, Failure, Handshake, Host, Outcome};
use crate::nbd::export::{Export, Exports, InUse};
use crate::nbd::tls::Tls;
use fathom_core::testing::TestDisk;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo};
use fathom_nbd::protocol::{OPTION_MAGIC, OPTION_REPLY_MAGIC, opt, rep};
use fathom_nbd::transport::Transport;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A host with two exports of one disk: "a", and "b" with a description.
pub struct TestHost {
    pub disk: Arc<TestDisk>,
    exports: Exports,
    pub tls: Option<Tls>,
}

/// A disk that reports another block size.
struct Blocks(Arc<TestDisk>, u32);

impl Disk for Blocks {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            block_size: self.1,
            ..self.0.info()
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.0.activate()
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.0.deactivate()
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        self.0.channel(cx)
    }
}

pub fn host() -> Arc<TestHost> {
    host_with_blocks(512)
}

pub fn host_with_blocks(size: u32) -> Arc<TestHost> {
    Arc::new(new_host(size, None))
}

pub fn host_with_tls(tls: Tls) -> Arc<TestHost> {
    Arc::new(new_host(512, Some(tls)))
}

fn new_host(block_size: u32, tls: Option<Tls>) -> TestHost {
    let disk = TestDisk::new();
    let seen: Arc<dyn Disk> = Arc::new(Blocks(disk.clone(), block_size));
    let export =
        |name: &str, text: &str| Export::new(name.into(), text.into(), seen.clone(), Arc::new([]));
    let exports = Exports::new(vec![export("a", ""), export("b", "the second")]);
    TestHost {
        disk,
        exports: exports.unwrap(),
        tls,
    }
}

impl Host for TestHost {
    fn exports(&self) -> &Exports {
        &self.exports
    }

    fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    fn admit(&self, export: &Arc<Export>) -> Result<InUse, Denied> {
        InUse::new(export).map_err(Denied::NotNow)
    }
}

/// A client, and the thread that runs the server's side of its handshake.
pub struct Client<S = UnixStream> {
    pub socket: S,
    /// A reply that was read ahead, for the next call of `reply`.
    ahead: Option<(u32, Vec<u8>)>,
    server: JoinHandle<Result<Outcome, Failure>>,
}

pub fn header(option: u32, len: u32) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
}

/// Encodes the data of INFO and GO.
pub fn choice(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut data = string(name.as_bytes());
    data.extend((infos.len() as u16).to_be_bytes());
    data.extend(infos.iter().flat_map(|info| info.to_be_bytes()));
    data
}

/// Encodes the data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub fn contexts(name: &str, queries: &[&[u8]]) -> Vec<u8> {
    let mut data = string(name.as_bytes());
    data.extend((queries.len() as u32).to_be_bytes());
    data.extend(queries.iter().flat_map(|query| string(query)));
    data
}

impl Client {
    /// Creates a client that has read the greeting and sent the flags for fixed newstyle and no
    /// zeroes.
    pub fn new(host: Arc<TestHost>) -> Client {
        let mut client = Client::without_flags(host);
        client.say(&3u32.to_be_bytes());
        client
    }

    pub fn without_flags(host: Arc<TestHost>) -> Client {
        Client::with_patience(host, fathom_testing::PATIENCE)
    }

    pub fn with_patience(host: Arc<TestHost>, patience: Duration) -> Client {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let transport = Transport::new(Arc::new(OwnedFd::from(theirs)), Instant::now() + patience);
        let server = std::thread::spawn(move || Handshake::new(&*host, transport).run().0);
        let socket = ours;
        let ahead = None;
        let mut client = Client {
            socket,
            ahead,
            server,
        };
        let mut greeting = [0; 18];
        client.hear(&mut greeting);
        assert_eq!(greeting, *b"NBDMAGICIHAVEOPT\0\x03");
        client
    }

    /// Checks that the server has closed the connection without another byte.
    pub fn is_hung_up(&mut self) {
        match self.socket.read(&mut [0]) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("{other:?}"),
        }
    }
}

impl<S: Read + Write> Client<S> {
    /// Replaces the socket, for example by a TLS stream.
    pub fn wrap<T>(self, wrap: impl FnOnce(S) -> T) -> Client<T> {
        Client {
            socket: wrap(self.socket),
            ahead: self.ahead,
            server: self.server,
        }
    }

    pub fn say(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
        self.socket.flush().unwrap();
    }

    pub fn try_say(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes);
    }

    pub fn hear(&mut self, bytes: &mut [u8]) {
        self.socket.read_exact(bytes).unwrap();
    }

    pub fn ask(&mut self, option: u32, data: &[u8]) {
        let mut bytes = header(option, data.len() as u32);
        bytes.extend(data);
        self.say(&bytes);
    }

    /// Reads the next reply to `option` and returns its type and data.
    pub fn reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        if let Some(reply) = self.ahead.take() {
            return reply;
        }
        let mut head = [0; 20];
        self.hear(&mut head);
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        assert_eq!(head[..8], OPTION_REPLY_MAGIC.to_be_bytes());
        assert_eq!(word(8), option);
        let mut data = vec![0; word(16) as usize];
        self.hear(&mut data);
        (word(12), data)
    }

    pub fn expect(&mut self, option: u32, kind: u32) -> Vec<u8> {
        let (actual, data) = self.reply(option);
        assert_eq!(actual, kind, "{:?}", String::from_utf8_lossy(&data));
        data
    }

    /// Reads the information replies to GO, by type, and keeps the final reply for the next call of
    /// `reply`.
    pub fn infos(&mut self) -> BTreeMap<u16, Vec<u8>> {
        self.infos_of(opt::GO)
    }

    pub fn infos_of(&mut self, option: u32) -> BTreeMap<u16, Vec<u8>> {
        let mut said = BTreeMap::new();
        loop {
            let (kind, data) = self.reply(option);
            if kind != rep::INFO {
                self.ahead = Some((kind, data));
                return said;
            }
            let kind = u16::from_be_bytes([data[0], data[1]]);
            let before = said.insert(kind, data[2..].to_vec());
            assert_eq!(before, None, "{kind} is told twice");
        }
    }

    pub fn abort(mut self) {
        self.ask(opt::ABORT, b"");
        self.expect(opt::ABORT, rep::ACK);
        assert!(matches!(self.outcome(), Ok(Outcome::Over)));
    }

    /// Closes the socket and returns the result of the server's handshake.
    pub fn outcome(self) -> Result<Outcome, Failure> {
        drop(self.socket);
        self.server.join().unwrap()
    }

    pub fn failure(self) -> String {
        match self.outcome() {
            Err(failure) => failure.to_string(),
            Ok(_) => panic!("it did not fail"),
        }
    }

    pub fn agreed(self) -> (Agreed, String) {
        match self.outcome() {
            Ok(Outcome::Agreed(agreement)) => (agreement.agreed, agreement.view.name),
            Ok(Outcome::Over) => panic!("it is over"),
            Err(failure) => panic!("{failure}"),
        }
    }
}
