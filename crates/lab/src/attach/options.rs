//! Parses the disk-related options of QEMU's command line in both syntaxes: `key=value,...` with
//! doubled commas, and JSON, which libvirt uses.

use std::collections::BTreeMap;

use serde_json::Value;

/// Keys and values of one option. Nested JSON keys are joined by dots: `file.filename`.
pub(super) type Keys = BTreeMap<String, String>;

/// The disk-related options of a command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    pub devices: Vec<Keys>,
    pub drives: Vec<Keys>,
    pub blockdevs: Vec<Keys>,
    pub chardevs: Vec<Keys>,
    pub accelerator: Option<String>,
}

/// The file below a device, and how it is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Image {
    pub file: Option<String>,
    /// `raw`, `qcow2`, ...; empty if the command line does not say.
    pub format: String,
    pub aio: Option<String>,
    pub cache: Option<String>,
    /// The disk starts elsewhere in the file, or changes go to another file.
    pub is_moved: bool,
}

impl Image {
    /// Returns whether each byte of the disk is the byte of the file at the same offset.
    pub fn is_flat(&self) -> bool {
        matches!(self.format.as_str(), "raw" | "host_device") && !self.is_moved
    }
}

/// Maximum number of links between block nodes to follow, which also ends a cycle.
const MAX_NODES: usize = 16;

pub(super) fn is_qemu(arguments: &[String]) -> bool {
    let name = arguments.first().map_or("", String::as_str);
    let name = name.rsplit('/').next().unwrap_or(name);
    name.starts_with("qemu-system-") || name == "qemu-kvm" || name == "kvm" || name == "qemu"
}

pub(super) fn parse(arguments: &[String]) -> Options {
    let mut options = Options::default();
    for pair in arguments.windows(2) {
        let (option, value) = (pair[0].trim_start_matches('-'), pair[1].as_str());
        if option.len() == pair[0].len() {
            continue;
        }
        match option {
            "device" => options.devices.push(keys(value, "driver")),
            "drive" => options.drives.push(keys(value, "file")),
            "blockdev" => options.blockdevs.push(keys(value, "driver")),
            "chardev" => options.chardevs.push(keys(value, "backend")),
            "accel" => options.accelerator = keys(value, "accel").remove("accel"),
            "enable-kvm" => options.accelerator = Some("kvm".into()),
            "machine" | "M" => {
                let accel = keys(value, "type").remove("accel");
                options.accelerator = options.accelerator.or(accel);
            }
            _ => {}
        }
    }
    options
}

/// Parses an option. `first` is the key of a first value without a key.
pub(super) fn keys(text: &str, first: &str) -> Keys {
    if text.starts_with('{') {
        let mut keys = Keys::new();
        if let Ok(value) = serde_json::from_str::<Value>(text) {
            flatten("", &value, &mut keys);
        }
        return keys;
    }
    let mut keys = Keys::new();
    for (index, part) in split(text).into_iter().enumerate() {
        match part.split_once('=') {
            Some((key, value)) => keys.insert(key.to_owned(), value.to_owned()),
            None if index == 0 => keys.insert(first.to_owned(), part),
            None => keys.insert(part, "on".to_owned()),
        };
    }
    keys
}

/// Splits at single commas. Doubled commas are commas of a value.
fn split(text: &str) -> Vec<String> {
    let (mut parts, mut part) = (Vec::new(), String::new());
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter != ',' {
            part.push(letter);
        } else if letters.peek() == Some(&',') {
            letters.next();
            part.push(',');
        } else {
            parts.push(std::mem::take(&mut part));
        }
    }
    parts.push(part);
    parts
}

fn flatten(prefix: &str, value: &Value, keys: &mut Keys) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                let name = match prefix {
                    "" => name.clone(),
                    prefix => format!("{prefix}.{name}"),
                };
                flatten(&name, member, keys);
            }
        }
        Value::Bool(on) => {
            keys.insert(prefix.to_owned(), if *on { "on" } else { "off" }.to_owned());
        }
        Value::String(text) => {
            keys.insert(prefix.to_owned(), text.clone());
        }
        other => {
            keys.insert(prefix.to_owned(), other.to_string());
        }
    }
}

impl Options {
    /// Returns the socket path of a character device.
    pub fn socket(&self, id: &str) -> Option<&str> {
        let chardev = self.chardevs.iter().find(|keys| is(keys, "id", id))?;
        let path = chardev.get("path").or(chardev.get("addr.path"))?;
        Some(path)
    }

    /// Returns the image to which a device's `drive=NAME` leads.
    pub fn image(&self, drive: &str) -> Option<Image> {
        if let Some(keys) = self.drives.iter().find(|keys| is(keys, "id", drive)) {
            return Some(image_of_drive(keys));
        }
        let node = |name: &str| {
            self.blockdevs
                .iter()
                .find(|keys| is(keys, "node-name", name))
        };
        let mut keys = node(drive)?;
        let mut image = Image::default();
        for _ in 0..MAX_NODES {
            let driver = keys.get("driver").map_or("", String::as_str);
            let is_protocol = keys.contains_key("filename") || keys.contains_key("file.filename");
            if image.format.is_empty() && !matches!(driver, "file" | "host_device" | "throttle") {
                image.format = driver.to_owned();
            }
            let either = |name: &str| {
                let nested = keys.get(&format!("file.{name}"));
                keys.get(name).or(nested).cloned()
            };
            image.is_moved |= is_moved(keys);
            image.aio = image.aio.or(either("aio"));
            image.cache =
                image
                    .cache
                    .or(either("cache.direct").map(|direct| match direct.as_str() {
                        "on" => "none".to_owned(),
                        _ => "writeback".to_owned(),
                    }));
            if is_protocol {
                image.file = either("filename");
                break;
            }
            match keys.get("file").and_then(|name| node(name)) {
                Some(below) => keys = below,
                None => break,
            }
        }
        if image.format.is_empty() {
            image.format = "raw".into();
        }
        Some(image)
    }
}

pub(super) fn image_of_drive(keys: &Keys) -> Image {
    let file = keys.get("file").or(keys.get("file.filename"));
    Image {
        file: file.map(|name| name.strip_prefix("file:").unwrap_or(name).to_owned()),
        format: keys
            .get("format")
            .or(keys.get("driver"))
            .cloned()
            .unwrap_or_default(),
        aio: keys.get("aio").cloned(),
        cache: keys.get("cache").cloned(),
        is_moved: is_moved(keys),
    }
}

/// Returns whether a raw node starts at an offset, or writes to a temporary file.
fn is_moved(keys: &Keys) -> bool {
    let offset = keys.get("offset").or(keys.get("file.offset"));
    offset.is_some_and(|offset| offset != "0") || is(keys, "snapshot", "on")
}

pub(super) fn is(keys: &Keys, key: &str, value: &str) -> bool {
    keys.get(key).is_some_and(|text| text == value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Options {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        parse(&words)
    }

    #[test]
    fn commas_may_be_doubled() {
        let options = parsed(&["q", "-chardev", "socket,id=c,path=/a,,b,server=on"]);
        assert_eq!(options.socket("c"), Some("/a,b"));
        assert_eq!(options.socket("d"), None);
    }

    #[test]
    fn a_drive_names_its_file() {
        let options = parsed(&[
            "q",
            "-accel",
            "kvm,dirty-ring-size=0",
            "--drive",
            "if=none,id=d,format=raw,file=/x/y.img,cache=none,aio=native",
        ]);
        let image = options.image("d").unwrap();
        assert_eq!(image.file.as_deref(), Some("/x/y.img"));
        assert_eq!(
            (image.format.as_str(), image.aio.as_deref()),
            ("raw", Some("native"))
        );
        assert_eq!(options.accelerator.as_deref(), Some("kvm"));
    }

    #[test]
    fn libvirts_json_is_followed_from_node_to_node() {
        let options = parsed(&[
            "q",
            "-blockdev",
            r#"{"driver":"file","filename":"/i.qcow2","aio":"io_uring","node-name":"s","cache":{"direct":true}}"#,
            "-blockdev",
            r#"{"node-name":"f","driver":"qcow2","file":"s"}"#,
            "-device",
            r#"{"driver":"virtio-blk-pci","drive":"f","id":"virtio-disk0","num-queues":4}"#,
        ]);
        let image = options.image("f").unwrap();
        assert_eq!(image.file.as_deref(), Some("/i.qcow2"));
        assert_eq!(image.format, "qcow2");
        assert_eq!(
            (image.aio.as_deref(), image.cache.as_deref()),
            (Some("io_uring"), Some("none"))
        );
        assert!(is(&options.devices[0], "num-queues", "4"));
    }

    #[test]
    fn a_node_may_hold_its_file_itself() {
        let dotted = "driver=raw,node-name=n,file.driver=file,file.filename=/z,file.aio=native";
        let image = parsed(&["q", "-blockdev", dotted]).image("n").unwrap();
        assert_eq!(
            (image.file.as_deref(), image.format.as_str()),
            (Some("/z"), "raw")
        );
        assert_eq!(image.aio.as_deref(), Some("native"));
        // A cycle of nodes ends.
        let circle = ["q", "-blockdev", "driver=raw,node-name=a,file=a"];
        assert_eq!(parsed(&circle).image("a").unwrap().file, None);
    }

    /// Only such images have a place on the host's device for each byte of the disk.
    #[test]
    fn only_a_raw_image_as_a_whole_is_flat() {
        let drive = |keys: &str| image_of_drive(&super::keys(keys, "file")).is_flat();
        assert!(drive("/x,format=raw") && drive("/dev/x,format=host_device,offset=0"));
        for other in [
            "/x",
            "/x,format=qcow2",
            "/x,format=luks",
            "/x,format=raw,offset=1048576",
            "/x,format=raw,snapshot=on",
        ] {
            assert!(!drive(other), "{other}");
        }
        let node = |keys: &str| parsed(&["q", "-blockdev", keys]).image("n").unwrap();
        let file = "node-name=n,file.driver=file,file.filename=/z";
        assert!(node(&format!("driver=raw,{file}")).is_flat());
        assert!(!node(&format!("driver=raw,offset=512,{file}")).is_flat());
        assert!(!node(&format!("driver=luks,{file}")).is_flat());
    }

    #[test]
    fn qemu_is_known_by_its_name() {
        let named = |name: &str| is_qemu(&[name.to_owned()]);
        assert!(named("/usr/bin/qemu-system-x86_64") && named("/usr/libexec/qemu-kvm"));
        assert!(!named("/usr/bin/qemu-img") && !named("sh") && !is_qemu(&[]));
    }
}
