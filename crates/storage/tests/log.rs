//! Tests log messages of disks, in a program of their own: the log belongs to the whole process.

mod common;

use common::Guest;
use fathom_storage::{Cache, EngineKind, FileDisk, FileOptions, engine};
use parking_lot::Mutex;
use std::io;
use std::path::Path;
use std::sync::Arc;
use tempfile::NamedTempFile;

/// Collects log lines.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn install() -> Log {
        let log = Log::default();
        let writer = log.clone();
        tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .init();
        log
    }

    /// Returns the lines about a file since the last call.
    fn take(&self, path: &Path) -> Vec<String> {
        let bytes = std::mem::take(&mut *self.0.lock());
        let text = String::from_utf8(bytes).expect("UTF-8");
        let about = |line: &&str| line.contains(&*path.to_string_lossy());
        text.lines().filter(about).map(str::to_owned).collect()
    }
}

#[test]
fn a_truncated_file_is_told_once_with_both_sizes() {
    let log = Log::install();
    // A file on tmpfs, and one on a disk file system.
    for folder in ["/dev/shm", env!("CARGO_TARGET_TMPDIR")] {
        for (kind, cache) in [
            (EngineKind::IoUring, Cache::None),
            (EngineKind::IoUring, Cache::Writeback),
            (EngineKind::Native, Cache::None),
            (EngineKind::Threads, Cache::Writethrough),
        ] {
            let image = NamedTempFile::new_in(folder).expect("a file");
            image.as_file().set_len(1 << 20).expect("sized");
            let options = FileOptions {
                cache,
                engine: kind,
                ..FileOptions::default()
            };
            let disk = FileDisk::open(image.path(), options).expect("opened");
            let mut guest = Guest::new(Arc::new(disk), move || engine(kind));
            let case = format!("{folder}, {kind}, {cache}");
            let said = || log.take(image.path());

            image.as_file().set_len(10_000).expect("truncated");
            assert_eq!(guest.read(0, 4096), Ok(vec![0; 4096]));
            assert_eq!(said(), [""; 0], "{case}");
            for offset in [8192, 1 << 19, 8192, (1 << 20) - 4096] {
                assert_eq!(guest.read(offset, 4096), Err(libc::EIO));
            }
            assert_eq!(guest.read(0, 4096), Ok(vec![0; 4096]));
            let lines = said();
            assert_eq!(lines.len(), 1, "{case}: {lines:?}");
            for word in [
                "truncated",
                "ends at 10000 bytes",
                "the disk at 1048576",
                "resize",
            ] {
                assert!(lines[0].contains(word), "{case}: {}", lines[0]);
            }
            image.as_file().set_len(512).expect("truncated again");
            assert_eq!(guest.read(512, 512), Err(libc::EIO));
            let lines = said();
            assert_eq!(lines.len(), 1, "{case}: {lines:?}");
            assert!(
                lines[0].contains("ends at 512 bytes"),
                "{case}: {}",
                lines[0]
            );
            image.as_file().set_len(1 << 20).expect("whole");
            assert_eq!(guest.read(512, 512), Ok(vec![0; 512]));
            assert_eq!(said(), [""; 0], "{case}");
            guest.detach();
        }
    }
}
