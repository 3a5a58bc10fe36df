//! A minimal NBD server for tests, whose replies may be right or wrong.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;

const REPLY_MAGIC: u64 = 0x3_e889_0455_65a9;

/// Form of replies that the server negotiates in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// No handshake: the test sends all data itself.
    None,
    Simple,
    Structured,
    Extended,
}

/// A connection, which is closed on drop.
pub struct Fake {
    stream: UnixStream,
    form: Form,
}

impl Fake {
    /// Starts a server for one connection, which runs `script` after the handshake. Returns its
    /// URI.
    pub fn start(
        size: u64,
        form: Form,
        script: impl FnOnce(&mut Fake) + Send + 'static,
    ) -> (String, JoinHandle<()>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let uri = format!("nbd+unix:///?socket={}", path.display());
        let listener = UnixListener::bind(path).unwrap();
        let serve = move || {
            let _dir = dir;
            let (stream, _) = listener.accept().unwrap();
            let mut fake = Fake { stream, form };
            if form != Form::None {
                fake.handshake(size);
            }
            script(&mut fake);
            // Closing the socket with unread data would reset the connection, and the client would
            // not receive all data.
            let _ = fake.stream.shutdown(Shutdown::Write);
            let _ = std::io::copy(&mut fake.stream, &mut std::io::sink());
        };
        (uri, std::thread::spawn(serve))
    }

    /// Sends data. Ignores errors, because the client may have closed the connection.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    fn read<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn read_u32(&mut self) -> u32 {
        u32::from_be_bytes(self.read())
    }

    fn read_u64(&mut self) -> u64 {
        u64::from_be_bytes(self.read())
    }

    fn answer(&mut self, option: u32, kind: u32, data: &[u8]) {
        self.send(&REPLY_MAGIC.to_be_bytes());
        for word in [option, kind, data.len() as u32] {
            self.send(&word.to_be_bytes());
        }
        self.send(data);
    }

    fn handshake(&mut self, size: u64) {
        self.send(b"NBDMAGICIHAVEOPT\x00\x03");
        assert_eq!(self.read_u32(), 3);
        loop {
            assert_eq!(&self.read(), b"IHAVEOPT");
            let option = self.read_u32();
            let mut data = vec![0; self.read_u32() as usize];
            self.stream.read_exact(&mut data).unwrap();
            let known = match option {
                7 => break,
                8 => self.form == Form::Structured,
                11 => self.form == Form::Extended,
                _ => false,
            };
            self.answer(option, if known { 1 } else { 0x8000_0001 }, &[]);
        }
        let mut info = vec![0, 0];
        info.extend(size.to_be_bytes());
        info.extend(1u16.to_be_bytes());
        self.answer(7, 3, &info);
        self.answer(7, 1, &[]);
    }

    /// Receives the next request, which must be a read. Returns its cookie and offset.
    pub fn request(&mut self) -> (u64, u64) {
        let (magic, command, cookie, offset) = self.any_request();
        let extended = self.form == Form::Extended;
        assert_eq!(magic, if extended { 0x21e4_1c71 } else { 0x2560_9513 });
        assert_eq!(command, 0);
        (cookie, offset)
    }

    /// Checks that the client sends a disconnect request and closes the connection.
    pub fn goodbye(&mut self) {
        assert_eq!(self.any_request().1, 2);
        assert_eq!(self.stream.read(&mut [0]).unwrap(), 0);
    }

    fn any_request(&mut self) -> (u32, u32, u64, u64) {
        let (magic, command) = (self.read_u32(), self.read_u32());
        let (cookie, offset) = (self.read_u64(), self.read_u64());
        let len = match self.form {
            Form::Extended => self.read_u64(),
            _ => u64::from(self.read_u32()),
        };
        assert!(len == 4096 || command == 2, "{len}");
        (magic, command, cookie, offset)
    }

    pub fn simple(&mut self, error: u32, cookie: u64, data: &[u8]) {
        let mut out = 0x6744_6698u32.to_be_bytes().to_vec();
        out.extend(error.to_be_bytes());
        out.extend(cookie.to_be_bytes());
        out.extend(data);
        self.send(&out);
    }

    /// Sends a chunk in the negotiated form.
    pub fn chunk(&mut self, flags: u16, kind: u16, cookie: u64, offset: u64, data: &[&[u8]]) {
        let data = data.concat();
        let extended = self.form == Form::Extended;
        let magic: u32 = if extended { 0x6e8a_278c } else { 0x668e_33ef };
        let mut out = magic.to_be_bytes().to_vec();
        out.extend(flags.to_be_bytes());
        out.extend(kind.to_be_bytes());
        out.extend(cookie.to_be_bytes());
        if extended {
            out.extend(offset.to_be_bytes());
            out.extend((data.len() as u64).to_be_bytes());
        } else {
            out.extend((data.len() as u32).to_be_bytes());
        }
        out.extend(data);
        self.send(&out);
    }
}
