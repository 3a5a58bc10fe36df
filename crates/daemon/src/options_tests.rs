use super::*;
use fathom_storage::Location;

#[test]
fn sockets_are_paths_or_descriptors() {
    let parse = |text: &str| SocketSpec::parse(OsStr::new(text));
    assert_eq!(parse("/run/x"), Ok(SocketSpec::Path("/run/x".into())));
    assert_eq!(parse("fd:3"), Ok(SocketSpec::Fd(3)));
    for bad in ["fd:", "fd:-1", "fd:x", "fd:99999999999"] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}

fn null() -> Description {
    Description::new(Location::parse(OsStr::new("null:512")).unwrap())
}

#[test]
fn every_disk_can_be_reached_and_told_from_others() {
    let disk = |name: &str| {
        let mut disk = DiskOptions::new(null());
        disk.name = name.into();
        disk.nbd = Some(ExportOptions::default());
        disk
    };
    let mut options = ServeOptions::of(disk("a"));
    assert!(options.validate().unwrap_err().contains("--vhost-user"));
    options.nbd = Some(NbdOptions::default());
    assert_eq!(options.validate(), Ok(()));
    options.disks.push(disk("b"));
    assert_eq!(options.validate(), Ok(()));
    options.disks[1].nbd = None;
    assert!(options.validate().unwrap_err().contains("disk 'b'"));
    options.disks[1] = disk("a");
    assert!(options.validate().unwrap_err().contains("two disks"));
}
