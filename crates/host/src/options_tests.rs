use super::*;

#[test]
fn every_disk_can_be_reached_and_told_from_others() {
    let disk = |name: &str| {
        let spec = serde_json::json!({ "name": name, "image": "null:512" });
        DiskOptions::of(serde_json::from_value(spec).unwrap(), true).unwrap()
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
