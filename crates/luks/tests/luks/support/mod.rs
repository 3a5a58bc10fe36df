//! cryptsetup and QEMU's tools, which these tests ask.

use fathom_luks::{Change, Effort, Options, Passphrase, create};
use fathom_testing::MemoryDir;
use std::fs::File;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// What cryptsetup is told so that its key derivation is quick.
pub const QUICK: [&str; 4] = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];

/// As quick as may be.
pub const NO_EFFORT: Effort = Effort {
    time: Duration::from_millis(1),
    memory_kib: 256,
};

/// A directory with images and key files; in memory where there is one,
/// since cryptsetup flushes all it does.
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

    /// An empty file of `len` bytes.
    pub fn empty(&self, name: &str, len: u64) {
        let file = File::create(self.path(name)).expect("a file");
        file.set_len(len).expect("a length");
    }

    /// A key file of that name, which holds its name.
    pub fn key(&self, name: &str) -> Passphrase {
        self.write(name, name.as_bytes());
        passphrase(name)
    }

    /// `cryptsetup luksFormat` of a new file, opened by the key file "key".
    pub fn format(&self, name: &str, args: &[&str]) -> Passphrase {
        let key = self.key("key");
        self.empty(name, 20 << 20);
        let mut all = vec!["luksFormat", "--batch-mode", "--key-file", "key"];
        all.extend(args);
        all.push(name);
        self.run("cryptsetup", &all);
        key
    }

    /// Whether cryptsetup opens the image with that key file.
    pub fn opens(&self, image: &str, key: &str) -> bool {
        let args = ["open", "--test-passphrase", "--key-file", key, image];
        self.try_run("cryptsetup", &args).status.success()
    }

    /// The volume key, as cryptsetup finds it.
    pub fn volume_key(&self, image: &str, key: &str) -> Vec<u8> {
        let args = ["luksDump", "--dump-volume-key", "--batch-mode"];
        let file = ["--volume-key-file", "volume-key", "--key-file", key, image];
        let _ = std::fs::remove_file(self.path("volume-key"));
        self.run("cryptsetup", &[&args[..], &file[..]].concat());
        self.read("volume-key")
    }

    /// A header of ours with the key "key" and room for a payload.
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

/// As a caller writes them.
pub fn apply(file: &File, changes: &[Change]) {
    for change in changes {
        file.write_all_at(&change.bytes, change.at)
            .expect("a write");
    }
}
