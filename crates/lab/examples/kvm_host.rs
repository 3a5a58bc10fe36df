//! Boots a KVM host, runs the scripts named by `SCRIPT [FOLDER INTO]`, and copies a folder out of it.

use std::path::Path;
use std::time::{Duration, Instant};

use fathom_lab::KvmHost;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [fathom, script, rest @ ..] = args.as_slice() else {
        eprintln!("usage: kvm_host FATHOM SCRIPT [FOLDER INTO]");
        std::process::exit(2);
    };
    let start = Instant::now();
    let mut host = KvmHost::boot(Path::new(fathom)).unwrap();
    eprintln!("booted in {:.1} s", start.elapsed().as_secs_f64());
    let script = std::fs::read_to_string(script).unwrap();
    let status = host
        .run(&script, Duration::from_secs(1200), &mut |line| {
            println!("{:7.1} {line}", start.elapsed().as_secs_f64());
        })
        .unwrap();
    eprintln!(
        "status {status} after {:.1} s",
        start.elapsed().as_secs_f64()
    );
    if let [folder, into] = rest {
        host.fetch(folder, Path::new(into), Duration::from_secs(300))
            .unwrap();
    }
}
