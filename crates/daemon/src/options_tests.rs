use super::*;
use fathom_storage::Location;
use std::ffi::OsStr;

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
