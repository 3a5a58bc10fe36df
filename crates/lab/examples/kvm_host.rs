//! Boots a KVM host, runs a shell script in it, and copies a folder out of it. More programs than
//! fathom are named after it, parted by colons.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fathom_lab::KvmHost;

const LIMIT: Duration = Duration::from_secs(1200);

fn main() -> fathom_lab::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [programs, script, rest @ ..] = args.as_slice() else {
        eprintln!("usage: kvm_host FATHOM[:PROGRAM...] SCRIPT [FOLDER INTO]");
        std::process::exit(2);
    };
    let programs: Vec<PathBuf> = programs.split(':').map(PathBuf::from).collect();
    let more: Vec<&Path> = programs[1..].iter().map(PathBuf::as_path).collect();
    let script = std::fs::read_to_string(script).expect("the script can be read");
    let start = Instant::now();
    let seconds = || start.elapsed().as_secs_f64();
    let mut host = KvmHost::boot_with(&programs[0], &more, &[])?;
    eprintln!("booted in {:.1} s", seconds());
    let status = host.run(&script, LIMIT, &mut |line| {
        println!("{:7.1} {line}", seconds());
    })?;
    eprintln!("status {status} after {:.1} s", seconds());
    if let [folder, into] = rest {
        host.fetch(folder, Path::new(into), LIMIT)?;
    }
    Ok(())
}
