//! Reads the disks of a domain from the metadata in its XML.

use super::table;
use anyhow::{Context, bail};
use fathom_spec::{DiskSpec, check_name};
use roxmltree::{Document, Node};

/// The namespace of the elements in `<metadata>`.
pub const NAMESPACE: &str = "urn:fathom:libvirt:1";
/// Groups under which distributions run QEMU.
const QEMU_GROUPS: [&str; 2] = ["libvirt-qemu", "qemu"];

/// The part of a domain's XML that the hook needs.
#[derive(Debug)]
pub struct Domain {
    pub uuid: String,
    /// Process id or API socket of the server; `None` for the only server on this host.
    pub server: Option<String>,
    /// Disks in the metadata, or the error in them.
    pub disks: anyhow::Result<Vec<DiskSpec>>,
}

impl Domain {
    /// Parses the XML of a domain.
    ///
    /// Errors in the disks are returned in [`Domain::disks`]: the hook removes the disks of a
    /// stopped domain even if its metadata is invalid by then.
    ///
    /// # Errors
    ///
    /// Fails if the XML is not that of a domain.
    pub fn parse(xml: &str) -> anyhow::Result<Domain> {
        let document = Document::parse(xml).context("the domain's XML")?;
        let root = document.root_element();
        let uuid = text(root, "uuid");
        if uuid.is_empty() || !uuid.chars().all(|c| c.is_ascii_hexdigit() || c == '-') {
            bail!("the XML has no valid <uuid>");
        }
        let server = metadata(root).find_map(|node| node.attribute("server"));
        Ok(Domain {
            uuid: uuid.to_owned(),
            server: server.map(str::to_owned),
            disks: disks(root),
        })
    }
}

fn text<'a>(node: Node<'a, '_>, name: &str) -> &'a str {
    child(node, name)
        .and_then(|node| node.text())
        .unwrap_or_default()
}

/// Returns Fathom's elements directly below `<metadata>`.
fn metadata<'a, 'input: 'a>(root: Node<'a, 'input>) -> impl Iterator<Item = Node<'a, 'input>> {
    child(root, "metadata")
        .into_iter()
        .flat_map(|node| node.children())
        .filter(is_ours)
}

fn is_ours(node: &Node) -> bool {
    node.tag_name().namespace() == Some(NAMESPACE)
}

fn disks(root: Node) -> anyhow::Result<Vec<DiskSpec>> {
    let mut disks = Vec::new();
    for node in metadata(root) {
        match node.tag_name().name() {
            "disk" => disks.push(disk(root, node)?),
            "disks" => {
                for node in node.children().filter(is_ours) {
                    disks.push(disk(root, node)?);
                }
            }
            other => bail!("unknown element <{other}> in the metadata; use <disks> or <disk>"),
        }
    }
    Ok(disks)
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|node| node.has_tag_name(name))
}

/// Converts a `<disk>` of the metadata. The attributes of the element are options of the disk.
///
/// The attribute `target` names the domain's device, which has the socket.
fn disk(root: Node, node: Node) -> anyhow::Result<DiskSpec> {
    let target = node
        .attribute("target")
        .context("a <disk> in the metadata needs the attribute target, such as vda")?;
    let name = match node.attribute("name") {
        Some(name) => name.to_owned(),
        None => format!("{}-{target}", text(root, "name")),
    };
    of_attributes(root, &name, target, node).with_context(|| format!("disk '{name}'"))
}

fn of_attributes(root: Node, name: &str, target: &str, node: Node) -> anyhow::Result<DiskSpec> {
    check_name(name).map_err(anyhow::Error::msg)?;
    if node.attribute("image").is_none() {
        bail!("the metadata's <disk> needs the attribute image");
    }
    let socket = socket_of(root, target)?;
    let mut options = vec![("name", name), ("vhost-user", socket)];
    let group = QEMU_GROUPS.into_iter().find(|group| has_group(group));
    options.extend(group.map(|group| ("socket-group", group)));
    for attribute in node.attributes() {
        let (option, text) = (attribute.name(), attribute.value());
        match option {
            "name" | "target" => continue,
            "vhost-user" => bail!("the socket is that of target '{target}'; remove vhost-user"),
            _ => {}
        }
        // An option in the metadata replaces the default.
        options.retain(|(name, _)| *name != option);
        options.push((option, text));
    }
    table(&options)
}

/// Returns the socket of the domain's device with this target.
fn socket_of<'a>(root: Node<'a, '_>, target: &str) -> anyhow::Result<&'a str> {
    let devices = child(root, "devices").context("the XML has no <devices>")?;
    let mut disks = devices.children().filter(|node| node.has_tag_name("disk"));
    let is_it =
        |disk: &Node| child(*disk, "target").and_then(|node| node.attribute("dev")) == Some(target);
    let disk = disks
        .find(is_it)
        .with_context(|| format!("the domain has no device with <target dev='{target}'/>"))?;
    let source = child(disk, "source");
    match (
        disk.attribute("type"),
        source.and_then(|node| node.attribute("path")),
    ) {
        (Some("vhostuser"), Some(path)) => Ok(path),
        _ => bail!(
            "device '{target}' must be <disk type='vhostuser'> with <source type='unix' path=...>"
        ),
    }
}

fn has_group(name: &str) -> bool {
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    groups
        .lines()
        .any(|line| line.split(':').next() == Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn xml(metadata: &str, devices: &str) -> String {
        format!(
            "<domain type='kvm'><name>web</name><uuid>6ba7b810-9dad-11d1-80b4-00c04fd430c8</uuid>\
             <metadata>{metadata}</metadata><devices>{devices}</devices></domain>"
        )
    }

    const DEVICE: &str = "<disk type='vhostuser' device='disk'><source type='unix' path='/run/f/vda.sock'/>\
                          <target dev='vda' bus='virtio'/></disk>";

    fn with_disks(inner: &str) -> String {
        format!("<fathom:disks xmlns:fathom='{NAMESPACE}'>{inner}</fathom:disks>")
    }

    #[test]
    fn attributes_are_options_of_the_disk() {
        let inner = "<fathom:disk target='vda' image='/srv/web.qcow2' format='qcow2' iothreads='2' readonly='yes' \
                     filters='delay' socket-group='root'/>";
        let domain = Domain::parse(&xml(&with_disks(inner), DEVICE)).unwrap();
        let disks = domain.disks.unwrap();
        let [disk] = &disks[..] else {
            panic!("{disks:?}")
        };
        let shown = serde_json::to_value(disk).unwrap();
        assert_eq!(shown["name"], "web-vda");
        assert_eq!(shown["vhost-user"], "/run/f/vda.sock");
        assert_eq!(shown["iothreads"], 2);
        assert_eq!(shown["readonly"], true);
        assert_eq!(shown["socket-group"], "0");
    }

    #[test]
    fn domain_without_our_metadata_has_no_disks() {
        let other = "<app:x xmlns:app='http://app.example/'><app:disk/></app:x>";
        let domain = Domain::parse(&xml(other, DEVICE)).unwrap();
        assert!(domain.disks.unwrap().is_empty());
    }

    #[test]
    fn mistakes_are_named() {
        let all = [
            ("<fathom:disk image='/i'/>", DEVICE, "attribute target"),
            ("<fathom:disk target='vda'/>", DEVICE, "attribute image"),
            (
                "<fathom:disk target='vdb' image='/i'/>",
                DEVICE,
                "dev='vdb'",
            ),
            (
                "<fathom:disk target='vda' image='/i' cach='none'/>",
                DEVICE,
                "cach",
            ),
            (
                "<fathom:disk target='vda' image='/i' name='a b'/>",
                DEVICE,
                "a b",
            ),
            (
                "<fathom:disk target='vda' image='/i'/>",
                "<disk type='file'><target dev='vda'/></disk>",
                "vhostuser",
            ),
        ];
        for (inner, device, expected) in all {
            let domain = Domain::parse(&xml(&with_disks(inner), device)).unwrap();
            let error = domain.disks.unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains(expected), "{inner}: {error}");
        }
        assert!(Domain::parse("<domain").is_err());
        assert!(Domain::parse("<domain><uuid>../../x</uuid></domain>").is_err());
    }
}
