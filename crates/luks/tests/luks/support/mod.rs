//! Runs cryptsetup and QEMU's tools for the tests.

use fathom_luks::{Change, Effort, Options, Passphrase, create};
use fathom_testing::MemoryDir;
use std::fs::File;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Options that make cryptsetup's key derivation fast.
pub const QUICK: [&str; 4] = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];

/// The lowest effort, for fast key derivation.
pub const NO_EFFORT: Effort = Effort {
    time: Duration::from_millis(1),
    memory_kib: 256,
};

/// A directory for images and key files, in memory if possible, because cryptsetup flushes all
/// writes.
pub struct Dir(MemoryDir);

impl Deref for Dir {
    type Target = MemoryDir;

    fn deref(&self) -> &MemoryDir {
        &self.0
    }
}

impl Dir {
    pub fn new() -> Dir {
        Dir(MemoryDir::new())
    }

    pub fn open(&self, name: &str) -> File {
        let mut options = File::options();
        let file = options.read(true).write(true).open(self.path(name));
        file.expect("a file")
    }

    /// Creates a file of `len` zero bytes.
    pub fn empty(&self, name: &str, len: u64) {
        let file = File::create(self.path(name)).expect("a file");
        file.set_len(len).expect("a length");
    }

    /// Creates a key file called `name` whose contents are its own name.
    pub fn key(&self, name: &str) -> Passphrase {
        self.write(name, name.as_bytes());
        passphrase(name)
    }

    /// Runs `cryptsetup luksFormat` on a new file that the key file "key" opens.
    pub fn format(&self, name: &str, args: &[&str]) -> Passphrase {
        let key = self.key("key");
        self.empty(name, 20 << 20);
        let mut all = vec!["luksFormat", "--batch-mode", "--key-file", "key"];
        all.extend(args);
        all.push(name);
        self.run("cryptsetup", &all);
        key
    }

    /// Returns whether cryptsetup opens the image with the key file `key`.
    pub fn opens(&self, image: &str, key: &str) -> bool {
        let args = ["open", "--test-passphrase", "--key-file", key, image];
        self.try_run("cryptsetup", &args).status.success()
    }

    /// Returns the volume key that cryptsetup extracts.
    pub fn volume_key(&self, image: &str, key: &str) -> Vec<u8> {
        let args = ["luksDump", "--dump-volume-key", "--batch-mode"];
        let file = ["--volume-key-file", "volume-key", "--key-file", key, image];
        let _ = std::fs::remove_file(self.path("volume-key"));
        self.run("cryptsetup", &[&args[..], &file[..]].concat());
        self.read("volume-key")
    }

    /// Creates a header with this crate, opened by the key "key", with space for a payload.
    ///
    /// Returns the volume key.
    pub fn create(&self, name: &str, version: u32) -> Vec<u8> {
        let options = Options {
            version,
            effort: NO_EFFORT,
            ..Options::default()
        };
        let mut made = create(&options, &self.key("key")).expect("a header");
        let len = made.bytes.len() + (1 << 20);
        made.bytes.resize(len, 0);
        self.write(name, &made.bytes);
        made.key.bytes().to_vec()
    }
}

pub fn passphrase(text: &str) -> Passphrase {
    Passphrase::new(text.as_bytes().to_vec()).expect("a passphrase")
}

/// Writes changes to a file, as a caller of this crate would.
pub fn apply(file: &File, changes: &[Change]) {
    for change in changes {
        file.write_all_at(&change.bytes, change.at)
            .expect("a write");
    }
}
