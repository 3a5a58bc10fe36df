//! Finds QEMU's virtio-blk disks: from its command line to the processes and files behind them.

use fathom_units::cause;
use std::fs;
use std::path::{Path, PathBuf};

use fathom_run::Disk;

use super::options::{self, Image, Keys, Options, is};
use super::process::{arguments, path_of};
use super::{Found, eventfds, image, sockets};
use crate::error::Result;
use crate::tracers::fathom::Api;
use fathom_client::place::entry_in;

/// Finds the disks.
pub(super) fn find(pid: u32, options: &Options, problems: &mut Vec<String>) -> Result<Vec<Found>> {
    let sockets = sockets::all().unwrap_or_else(|error| {
        problems.push(format!(
            "the servers of vhost-user disks are unknown: {}",
            cause(error)
        ));
        Vec::new()
    });
    let mut found = Vec::new();
    for device in &options.devices {
        let driver = device.get("driver").map_or("", String::as_str);
        if driver.starts_with("vhost-user-blk") {
            found.push(vhost_user(pid, device, options, &sockets, problems));
        } else if driver.starts_with("virtio-blk") {
            found.push(in_qemu(pid, device, options, problems));
        }
    }
    for drive in options
        .drives
        .iter()
        .filter(|keys| is(keys, "if", "virtio"))
    {
        let image = options::image_of_drive(drive);
        let mut one = Found {
            disk: disk_of(drive, "virtio-blk"),
            ..Found::default()
        };
        one.disk.server_pid = Some(pid);
        use_image(pid, &mut one, &image, problems);
        found.push(one);
    }
    for (index, one) in found.iter_mut().enumerate() {
        if one.disk.name.is_empty() {
            one.disk.name = format!("disk{index}");
        }
    }
    share_eventfds(pid, &mut found, problems);
    Ok(found)
}

fn disk_of(keys: &Keys, device: &str) -> Disk {
    Disk {
        name: keys.get("id").cloned().unwrap_or_default(),
        device: device.to_owned(),
        ..Disk::default()
    }
}

/// Returns a disk that QEMU itself serves.
fn in_qemu(pid: u32, device: &Keys, options: &Options, problems: &mut Vec<String>) -> Found {
    let mut found = Found {
        disk: disk_of(device, "virtio-blk"),
        ..Found::default()
    };
    found.disk.server_pid = Some(pid);
    let drive = device.get("drive");
    if found.disk.name.is_empty() {
        found.disk.name = drive.cloned().unwrap_or_default();
    }
    match drive.and_then(|drive| options.image(drive)) {
        Some(image) => use_image(pid, &mut found, &image, problems),
        None => problems.push(format!("{}: its image is unknown", found.disk.name)),
    }
    found
}

/// A process that serves a vhost-user disk.
#[derive(Debug)]
pub(crate) struct ServerOf {
    pub pid: u32,
    /// The API socket, if the process is a Fathom server.
    pub api: Option<PathBuf>,
}

/// Returns the process that serves the vhost-user disk with this socket to a running QEMU. `None`
/// if the process is not known.
pub(crate) fn server_of(qemu: u32, socket: &Path) -> Option<ServerOf> {
    let pid = sockets::peer_over(qemu, socket.to_str()?, &sockets::all().ok()?)?;
    let arguments = arguments(pid).ok()?;
    let is_fathom = arguments.get(1).map(String::as_str) == Some("serve");
    let api = is_fathom.then(|| api_socket(pid, &arguments)).flatten();
    Some(ServerOf { pid, api })
}

/// Returns a disk that another process serves.
fn vhost_user(
    pid: u32,
    device: &Keys,
    options: &Options,
    sockets: &[sockets::Socket],
    problems: &mut Vec<String>,
) -> Found {
    let mut found = Found {
        disk: disk_of(device, "vhost-user-blk"),
        ..Found::default()
    };
    let chardev = device.get("chardev").map_or("", String::as_str);
    if found.disk.name.is_empty() {
        found.disk.name = chardev.to_owned();
    }
    let name = found.disk.name.clone();
    let Some(path) = options.socket(chardev) else {
        problems.push(format!(
            "{name}: the command line of QEMU does not have its socket"
        ));
        return found;
    };
    // The socket's name as bound. A relative path is relative to the directory of the binding
    // process.
    let server = sockets::peer_over(pid, path, sockets);
    found.socket = Some(path_of(pid, path));
    found.disk.server_pid = server;
    match server {
        Some(server) => ask_server(server, &mut found, problems),
        None => problems.push(format!("{name}: no process serves {path} at the moment")),
    }
    found
}

/// Determines the image of a vhost-user disk from its server's API or command line.
fn ask_server(server: u32, found: &mut Found, problems: &mut Vec<String>) {
    let arguments = arguments(server).unwrap_or_default();
    let program = arguments.first().map_or("", String::as_str);
    let program = program.rsplit('/').next().unwrap_or(program);
    if arguments.get(1).map(String::as_str) == Some("serve") {
        found.api = api_socket(server, &arguments);
        if let Some(socket) = &found.api {
            match Api::connect(socket).and_then(|api| api.info()) {
                Ok(info) => {
                    let is_moved = info.format == "raw" && !info.is_flat();
                    found.queues = Some(info.queues_running).filter(|&queues| queues > 0);
                    found.aio = Some(info.engine);
                    found.cache = info.cache;
                    let image = Image {
                        is_moved,
                        file: Some(info.disk),
                        format: info.format,
                        ..Image::default()
                    };
                    return use_image(server, found, &image, problems);
                }
                Err(error) => problems.push(format!("{}: {}", found.disk.name, cause(error))),
            }
        }
    }
    if program.starts_with("qemu-storage-daemon") {
        let parsed = options::parse(&arguments);
        let export = pairs(&arguments, "export").find(|keys| {
            let path = keys.get("addr.path").or(keys.get("path"));
            let path = path.map(|path| path_of(server, path));
            path.is_some() && path == found.socket
        });
        let queues = export.as_ref().map(|keys| keys.get("num-queues"));
        found.queues = queues.and_then(|queues| queues.map_or(Some(1), |text| text.parse().ok()));
        let node = export.and_then(|keys| keys.get("node-name").cloned());
        if let Some(image) = node.and_then(|node| parsed.image(&node)) {
            return use_image(server, found, &image, problems);
        }
    }
    problems.push(format!(
        "{}: the image that {program} ({server}) serves is unknown",
        found.disk.name
    ));
}

/// Returns the parsed values of all occurrences of an option.
fn pairs<'a>(arguments: &'a [String], option: &'a str) -> impl Iterator<Item = Keys> + 'a {
    let is_it = move |pair: &&[String]| pair[0].trim_start_matches('-') == option;
    arguments
        .windows(2)
        .filter(is_it)
        .map(|pair| options::keys(&pair[1], "type"))
}

/// Returns the path of a server's API socket: from its command line, or the default path.
fn api_socket(pid: u32, arguments: &[String]) -> Option<PathBuf> {
    let told = arguments.iter().enumerate().find_map(|(index, argument)| {
        match argument.strip_prefix("--api") {
            Some("") => arguments.get(index + 1).cloned(),
            Some(rest) => rest.strip_prefix('=').map(str::to_owned),
            None => None,
        }
    });
    // An inherited socket is searched at the default path, as without the option.
    if let Some(path) = told.filter(|path| !path.starts_with("fd:")) {
        return Some(path_of(pid, &path));
    }
    default_sockets(pid).into_iter().find(|path| path.exists())
}

/// Returns the default paths, of which the first is in the runtime directory of the server's user.
fn default_sockets(pid: u32) -> Vec<PathBuf> {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let prefix = b"XDG_RUNTIME_DIR=";
    let own = environment
        .split(|&byte| byte == 0)
        .find_map(|variable| variable.strip_prefix(prefix))
        .map(|dir| PathBuf::from(String::from_utf8_lossy(dir).into_owned()));
    let dirs = own.into_iter().chain([PathBuf::from("/run")]);
    dirs.map(|dir| entry_in(&dir.join("fathom"), pid)).collect()
}

/// Stores the image of a disk and its location on the host's devices.
fn use_image(pid: u32, found: &mut Found, image: &Image, problems: &mut Vec<String>) {
    found.aio = found.aio.take().or(image.aio.clone());
    found.cache = found.cache.take().or(image.cache.clone());
    let Some(file) = &image.file else {
        return;
    };
    let name = found.disk.name.clone();
    if file.starts_with("memory") || file.starts_with("null") {
        return; // no device below it
    }
    let path = path_of(pid, file);
    found.disk.image = Some(path.clone());
    if !image.is_flat() {
        let format = match image.format.as_str() {
            "" => "an unknown format",
            format => format,
        };
        problems.push(format!(
            "{name}: the bytes of its image ({format}) are not those of the disk, and are not \
             followed to the host's device"
        ));
    }
    match image::locate(&path) {
        Ok(mut located) => {
            problems.extend(
                located
                    .problems
                    .drain(..)
                    .map(|line| format!("{name}: {line}")),
            );
            found.disk.host = located.device.clone();
            found.is_flat = image.is_flat();
            if found.is_flat {
                found.disk.extents = located.extents.clone();
            }
            found.located = located;
        }
        Err(error) => problems.push(format!("{name}: {}", cause(error))),
    }
}

/// Stores the eventfds that QEMU shares with the disk's server. If a server has several of the
/// guest's disks, it is unknown which eventfds belong to which disk.
fn share_eventfds(pid: u32, found: &mut [Found], problems: &mut Vec<String>) {
    let ours = eventfds::of(pid);
    for index in 0..found.len() {
        let Some(server) = found[index].disk.server_pid.filter(|&server| server != pid) else {
            continue;
        };
        let same = |one: &&Found| one.disk.server_pid == Some(server);
        if found.iter().filter(same).count() > 1 {
            problems.push(format!(
                "{}: process {server} serves several of the guest's disks, whose kicks \
                 cannot be distinguished",
                found[index].disk.name
            ));
            continue;
        }
        let theirs = eventfds::by_fd(server).into_iter();
        let shared: Vec<(u64, u64)> = theirs.filter(|(_, id)| ours.contains(id)).collect();
        found[index].eventfds = shared.iter().map(|&(_, id)| id).collect();
        found[index].server_fds = shared;
    }
}
