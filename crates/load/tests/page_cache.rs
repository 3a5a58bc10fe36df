//! A test that verification without O_DIRECT reads the disk, and not the page cache.
//!
//! The test is alone in its process, because it counts what the process reads from disks.

use std::time::Duration;

use fathom_load::{Engine, File, Load, Options, Rw, Target, files};

const LEN: u64 = 4 << 20;

/// Returns the number of bytes that this process has read from disks.
fn read_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix("read_bytes: "));
    line.unwrap().parse().unwrap()
}

#[test]
fn verification_of_a_buffered_load_reads_the_disk() {
    // Do not use /tmp: a tmpfs has no disk.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for engine in [Engine::Psync, Engine::IoUring] {
        let path = dir.path().join(engine.name());
        std::fs::File::create(&path).unwrap().set_len(LEN).unwrap();
        let load = Load {
            rw: Rw::Write,
            runtime: None,
            ramp: Duration::ZERO,
            number_ios: Some(LEN / 4096),
            verify: true,
            ..Load::default()
        };
        let target = Target::File(File {
            engine,
            buffered: true,
            ..File::new(&path)
        });
        let before = read_bytes();
        let report = fathom_load::run(&Options { target, load }, &mut |_| {}).unwrap();
        assert_eq!(report.verify.unwrap().checked, LEN / 4096);
        let read = read_bytes() - before;
        assert!(read >= LEN, "{engine:?}: {read} of {LEN}");
    }
    let options = files::Options {
        files: 100,
        dirs: 1,
        max_size: 64 << 10,
        // A load that only creates: its reads would come from the page cache.
        weights: files::Weights([1, 0, 0, 0, 0]),
        runtime: None,
        number_ios: Some(1),
        direct: false,
        verify: true,
        ..files::Options::new(dir.path())
    };
    let before = read_bytes();
    let report = files::run(&options, &mut |_| {}).unwrap();
    let checked = report.verify.unwrap().checked * 8192;
    let read = read_bytes() - before;
    assert!(checked > 0 && read >= checked, "{read} of {checked}");
}
