//! The lab against QEMU's own storage daemon: when this fails, the lab is at fault and not Fathom.

use std::time::Duration;

use fathom_lab::scenario::seqread::{self, Options, Peer};

#[test]
fn a_guest_reads_a_disk_of_qemu_storage_daemon() {
    let options = Options {
        peer: Peer::QemuStorageDaemon,
        image: None,
        size: 64 << 20,
        runtime: Duration::from_secs(2),
        serve_args: Vec::new(),
    };
    let mut steps = Vec::new();
    let report = seqread::run(&options, &mut |step| steps.push(step.to_owned())).unwrap();
    assert!(
        report.guest.count > 0 && report.guest.iops > 0.0,
        "{report}"
    );
    assert_eq!(report.guest.percentiles.len(), 4, "{report}");
    assert!(
        steps.iter().any(|step| step.contains("booting")),
        "{steps:?}"
    );
}
