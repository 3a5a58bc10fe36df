//! The same load on a file.

use std::sync::mpsc::channel;
use std::time::Duration;

use fathom_bench::{Engine, File, Load, Op, Options, Rw, Target};

fn run(file: File, load: Load) -> Result<fathom_bench::Report, fathom_bench::Error> {
    let target = Target::File(file);
    fathom_bench::run(&Options { target, load }, &mut |_| {})
}

fn mixed(depth: u16) -> Load {
    Load {
        rw: Rw::RandRw,
        rwmixtrim: 3,
        rwmixzero: 3,
        fsync: 20,
        iodepth: depth,
        queues: 2,
        runtime: None,
        ramp: Duration::ZERO,
        number_ios: Some(2000),
        verify: true,
        ..Load::default()
    }
}

fn image() -> tempfile::NamedTempFile {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(16 << 20).unwrap();
    image
}

#[test]
fn both_engines_do_every_operation_and_verify() {
    for (engine, fixed, depth) in [
        (Engine::IoUring, false, 16),
        (Engine::IoUring, true, 16),
        (Engine::Psync, false, 1),
    ] {
        let image = image();
        let file = File {
            engine,
            buffered: true,
            fixedbufs: fixed,
            registerfiles: fixed,
            ..File::new(image.path())
        };
        let report = run(file, mixed(depth)).unwrap();
        let total: u64 = report.operations.iter().map(|d| d.ios).sum();
        assert_eq!(total, 4000, "{engine:?}");
        for op in Op::ALL {
            assert!(report.operation(op).is_some(), "{engine:?} {op:?}");
        }
        assert!(report.verify.unwrap().checked > 1000);
    }
}

#[test]
fn a_file_that_is_cut_short_is_one_clear_error() {
    let image = image();
    let path = image.path().to_owned();
    let load = Load {
        rw: Rw::RandRead,
        runtime: Some(Duration::from_secs(60)),
        ..Load::default()
    };
    let file = File {
        buffered: true,
        ..File::new(&path)
    };
    let (sender, reads) = channel();
    let reader = std::thread::spawn(move || {
        let target = Target::File(file);
        fathom_bench::run(&Options { target, load }, &mut |progress| {
            if progress.completed > 0 {
                let _ = sender.send(());
            }
        })
    });
    reads.recv().expect("it reads");
    image.as_file().set_len(4096).unwrap();
    let error = reader.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("only 0 bytes were done"), "{error}");
    let missing = run(File::new("/nonexistent"), mixed(1)).unwrap_err();
    let text = missing.to_string();
    assert!(text.starts_with("cannot open /nonexistent: "), "{text}");
}
