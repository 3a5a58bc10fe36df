//! Runs a Ceph cluster while standard input is open: `cluster OSDS GIBIBYTES`.
//!
//! The first line of output is the path of its configuration.

use fathom_tests::ceph::Cluster;
use std::io::Read;

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let (Some(Ok(osds)), Some(Ok(size))) = (numbers.next(), numbers.next()) else {
        eprintln!("cluster OSDS GIBIBYTES");
        std::process::exit(2);
    };
    let cluster = Cluster::start(osds as usize, size << 30);
    println!("{}", cluster.conf().display());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}
