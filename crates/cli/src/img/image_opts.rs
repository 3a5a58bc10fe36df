//! `--image-opts`: images in QEMU's notation: `driver=qcow2,file.filename=disk.qcow2`.
//!
//! The supported options name an image's storage, its format and its keys. Other options of QEMU
//! are errors, because they would change what a command does.

use super::{json_name, pairs, parse_format};
use anyhow::anyhow;
use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use fathom_img::{Format, OpenOptions, Source};
use fathom_stack::{KeyRing, KeySource};
use fathom_storage::Location;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::str::FromStr;

/// Options of commands that accept images in QEMU's notation.
#[derive(Clone, Debug, Args)]
pub(super) struct ImageOptsArg {
    /// Images are options of QEMU, such as driver=qcow2,file.filename=vm1.qcow2
    ///
    /// The options can also name a disk on an NBD server or an image on Ceph.
    #[arg(long)]
    image_opts: bool,
    /// Key that --image-opts refers to, such as secret,id=NAME,file=PATH
    #[arg(long = "object", value_name = "OBJECT")]
    objects: Vec<Secret>,
}

impl ImageOptsArg {
    /// Returns the options in an image's name, or `None` if it is a path or a URI.
    fn options_in(&self, text: &OsStr) -> Option<Result<Vec<(String, String)>, String>> {
        if self.image_opts {
            return Some(text.to_str().map(pairs).ok_or(UTF_8.into()));
        }
        json_name::options(text.to_str()?)
    }

    /// Finds the image with this name.
    fn find(&self, text: &OsStr, format: Option<Format>) -> Result<Found, String> {
        let Some(options) = self.options_in(text) else {
            let file = Location::parse(text)?;
            return Ok(Found {
                file,
                format,
                keys: Vec::new(),
            });
        };
        if format.is_some() {
            return Err("the options name the format, too (driver=FORMAT); omit -f".into());
        }
        let said = Said::of(options?)?;
        let mut ids = Vec::from_iter(self.objects.iter().map(|secret| &secret.id));
        ids.sort();
        if let Some(two) = ids.windows(2).find(|two| two[0] == two[1]) {
            return Err(format!(
                "two objects are named '{}'; rename one of them",
                two[0]
            ));
        }
        let keys = said.keys.iter().map(|id| self.key(id));
        Ok(Found {
            file: said.location,
            format: said.format,
            keys: keys.collect::<Result<_, _>>()?,
        })
    }

    /// Returns the image as a source with the options of `open`.
    pub(super) fn source(
        &self,
        text: &OsStr,
        format: Option<Format>,
        open: impl FnOnce(Option<Format>) -> OpenOptions,
    ) -> anyhow::Result<Source> {
        if self.options_in(text).is_none() {
            return Ok(Source::new(text, open(format))?);
        }
        let found = self.find(text, format);
        let Found { file, format, keys } =
            found.map_err(|why| anyhow!("{}: {why}", text.display()))?;
        let mut open = open(format);
        if !keys.is_empty() {
            open.keys = KeyRing::new(keys);
        }
        Ok(Source::at(file, open)?)
    }

    /// Returns the key in a secret object.
    fn key(&self, id: &str) -> Result<KeySource, String> {
        let found = self.objects.iter().find(|secret| secret.id == id);
        let key = found.map(|secret| secret.key.clone());
        key.ok_or_else(|| format!("no object '{id}'; add --object secret,id={id},file=PATH"))
    }
}

/// An image on the command line.
struct Found {
    file: Location,
    format: Option<Format>,
    /// Keys in the image's options.
    keys: Vec<KeySource>,
}

/// Returns the location and the format of an existing target in QEMU's notation.
pub(super) fn target(text: &OsStr) -> anyhow::Result<(OsString, Format)> {
    let told = |why: String| anyhow!("{}: {why}", text.display());
    let said = text.to_str().ok_or_else(|| told(UTF_8.into()))?;
    let Said {
        location,
        format,
        keys,
    } = Said::parse(said).map_err(told)?;
    if !keys.is_empty() {
        return Err(told("name a key with --key".into()));
    }
    let format = format.ok_or_else(|| told("name its format with driver=FORMAT".into()))?;
    let text = match location.path() {
        Some(path) => std::path::absolute(path)?.into(),
        None => location.to_string().into(),
    };
    Ok((text, format))
}

const UTF_8: &str = "options must be UTF-8";

/// The image of a command.
#[derive(Debug)]
pub(super) struct ImageArg {
    pub(super) file: Location,
    pub(super) format: Option<Format>,
    /// Keys in the image's options.
    pub(super) keys: Vec<KeySource>,
}

/// The optional image of a command.
#[derive(Debug)]
pub(super) struct MaybeImageArg {
    pub(super) file: Option<Location>,
    pub(super) format: Option<Format>,
    /// Keys in the image's options.
    pub(super) keys: Vec<KeySource>,
}

/// The arguments of both.
#[derive(Debug, Args)]
struct Written {
    /// Format of the image, such as qcow2 [default: detected]
    #[arg(short, long, value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    opts: ImageOptsArg,
    /// Image: a file, a device or rbd:POOL/IMAGE; an NBD URI if the command only reads
    #[arg(value_name = "FILE")]
    file: Option<OsString>,
}

impl FromArgMatches for MaybeImageArg {
    fn from_arg_matches(matches: &ArgMatches) -> Result<MaybeImageArg, clap::Error> {
        let Written { format, opts, file } = Written::from_arg_matches(matches)?;
        let Some(text) = file else {
            return Ok(MaybeImageArg {
                file: None,
                format,
                keys: Vec::new(),
            });
        };
        let found = opts.find(&text, format).map_err(|why| {
            let text = text.to_string_lossy();
            let problem = format!("invalid value '{text}' for '<FILE>': {why}\n");
            clap::Error::raw(ErrorKind::ValueValidation, problem)
        })?;
        Ok(MaybeImageArg {
            file: Some(found.file),
            format: found.format,
            keys: found.keys,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = MaybeImageArg::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for MaybeImageArg {
    fn augment_args(command: Command) -> Command {
        Written::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Written::augment_args(command)
    }
}

impl FromArgMatches for ImageArg {
    fn from_arg_matches(matches: &ArgMatches) -> Result<ImageArg, clap::Error> {
        let MaybeImageArg { file, format, keys } = MaybeImageArg::from_arg_matches(matches)?;
        let missing = || clap::Error::new(ErrorKind::MissingRequiredArgument);
        let file = file.ok_or_else(missing)?;
        Ok(ImageArg { file, format, keys })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = ImageArg::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for ImageArg {
    fn augment_args(command: Command) -> Command {
        Written::augment_args(command).mut_arg("file", |file| file.required(true))
    }

    fn augment_args_for_update(command: Command) -> Command {
        ImageArg::augment_args(command)
    }
}

/// A QEMU `secret` object, which has a key.
#[derive(Clone, Debug)]
struct Secret {
    id: String,
    key: KeySource,
}

impl FromStr for Secret {
    type Err = String;

    fn from_str(text: &str) -> Result<Secret, String> {
        let mut options = pairs(text).into_iter();
        let kind = options.next().map(|(kind, _)| kind);
        if kind.as_deref() != Some("secret") {
            return Err("only keys are supported: secret,id=NAME,file=PATH".into());
        }
        let (mut id, mut key) = (None, None);
        for (name, value) in options {
            match (name.as_str(), value.as_str()) {
                ("id", _) => id = Some(value),
                ("file", _) => key = Some(KeySource::File(value.into())),
                ("format", "raw") => {}
                ("data", _) => {
                    return Err(
                        "other users can see arguments; write the secret into a file, and name \
                         it with file=PATH"
                            .into(),
                    );
                }
                _ => {
                    return Err(format!(
                        "unknown option {name}={value}; options are id, file and format=raw"
                    ));
                }
            }
        }
        let whole = id.zip(key).map(|(id, key)| Secret { id, key });
        whole.ok_or_else(|| "id=NAME or file=PATH is missing".into())
    }
}

/// The parsed options of an image.
#[derive(Debug)]
struct Said {
    location: Location,
    /// Format of the image; `None` to detect it.
    format: Option<Format>,
    /// Names of the objects with the image's keys.
    keys: Vec<String>,
}

/// QEMU's names for kinds of storage.
const PROTOCOLS: [&str; 5] = ["file", "host_device", "host_cdrom", "nbd", "rbd"];

/// Values of options, by the options' names.
struct Options(BTreeMap<String, String>);

impl Options {
    fn take(&mut self, name: &str) -> Option<String> {
        self.0.remove(name)
    }

    fn need(&mut self, name: &str) -> Result<String, String> {
        let value = self.take(name);
        value.ok_or_else(|| format!("option '{name}' is missing"))
    }
}

impl Said {
    fn parse(text: &str) -> Result<Said, String> {
        Said::of(pairs(text))
    }

    fn of(options: Vec<(String, String)>) -> Result<Said, String> {
        let mut options = Options(options.into_iter().collect());
        let driver = options.take("driver");
        let is_protocol = |driver: &String| PROTOCOLS.contains(&driver.as_str());
        let (format, prefix) = match &driver {
            Some(driver) if is_protocol(driver) => (Some(Format::Raw), ""),
            Some(driver) => (Some(parse_format(driver)?), "file."),
            None => (None, "file."),
        };
        let (mut format, mut keys, mut storage) = (format, Vec::new(), BTreeMap::new());
        for (name, value) in options.0 {
            if name == "force_size_calc" && format.is_some_and(|format| format.name() == "vpc") {
                format = Some(Format::vhd_sized(&value).map_err(|error| error.to_string())?);
                continue;
            }
            let is_own_key = match format {
                Some(Format::Luks) => name == "key-secret",
                Some(Format::Qcow2) => name == "encrypt.key-secret",
                _ => false,
            };
            let below = name.trim_start_matches("backing.");
            let is_key_below = matches!(format, Some(Format::Qcow2 | Format::Qed))
                && below.len() < name.len()
                && ["key-secret", "encrypt.key-secret"].contains(&below);
            match name.strip_prefix(prefix) {
                _ if is_own_key => keys.insert(0, value),
                _ if is_key_below => keys.push(value),
                // This option states the encryption that the image has anyway.
                _ if format == Some(Format::Qcow2)
                    && (name.as_str(), value.as_str()) == ("encrypt.format", "luks") => {}
                Some(name) => drop(storage.insert(name.to_owned(), value)),
                None => return Err(refused(&name)),
            }
        }
        let mut storage = Options(storage);
        let protocol = driver
            .filter(is_protocol)
            .or_else(|| storage.take("driver"));
        let location = located(protocol.as_deref(), &mut storage)?;
        match storage.0.keys().next() {
            Some(name) => Err(refused(&format!("{prefix}{name}"))),
            // QEMU would detect the image format inside, which Fathom does not do.
            None if !location.kind().images && format != Some(Format::Raw) => {
                let what = location.kind().what;
                Err(format!("{what} is a raw disk; write driver=raw"))
            }
            None => Ok(Said {
                location,
                format,
                keys,
            }),
        }
    }
}

/// Describes why an option is rejected.
fn refused(name: &str) -> String {
    let last = name.rsplit('.').next().unwrap_or(name);
    let instead = match (name, last) {
        ("file", _) => "write file.driver and file.filename instead",
        (_, "force-share") => "write -U instead",
        (_, "direct" | "no-flush") => "write -t or -T instead, where the command has it",
        (_, "offset" | "size") => "use 'fathom img dd' to copy a part of an image",
        (_, "read-only") => "a command writes only to the image that it changes",
        (name, _) if name.starts_with("backing") => "an image names its own backing file",
        _ => {
            "options are driver, file.driver, file.filename, key-secret, encrypt.key-secret, and \
             those of a server"
        }
    };
    format!("option '{name}' is not supported: {instead}")
}

fn located(protocol: Option<&str>, options: &mut Options) -> Result<Location, String> {
    match protocol {
        None => match options.take("filename") {
            Some(name) => Ok(Location::file(name)),
            None => Err("no file given; write file.filename=FILE".into()),
        },
        Some("file" | "host_device" | "host_cdrom") => {
            Ok(Location::file(options.need("filename")?))
        }
        Some("nbd") => nbd(options),
        Some("rbd") => rbd(options),
        Some(other) => Err(format!(
            "unknown driver '{other}'; drivers are {}",
            PROTOCOLS.join(", ")
        )),
    }
}

fn nbd(options: &mut Options) -> Result<Location, String> {
    let quoted = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let export = quoted(&options.take("export").unwrap_or_default());
    let kind = options.take("server.type").unwrap_or_default();
    let uri = match kind.as_str() {
        "unix" => {
            let path = quoted(&options.need("server.path")?);
            format!("nbd+unix:///{export}?socket={path}")
        }
        "inet" => {
            let host = options.need("server.host")?;
            let port = options.need("server.port")?;
            let is_port = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
            if !is_port || host.contains(['/', '?', '#', '@', '%', '[', ']']) {
                return Err(format!("{host}, {port}: not a host and a port"));
            }
            let host = match host.contains(':') {
                true => format!("[{host}]"),
                false => host,
            };
            format!("nbd://{host}:{port}/{export}")
        }
        _ => return Err("server.type of an NBD server must be unix or inet".into()),
    };
    Location::parse(OsStr::new(&uri))
}

fn rbd(options: &mut Options) -> Result<Location, String> {
    let plain = |value: String| match value.contains(['?', '@', '&']) {
        false => Ok(value),
        true => Err(format!(
            "'{value}' has a '?', '@' or '&', which names on Ceph must not have here"
        )),
    };
    let mut names = vec![options.need("pool")?];
    names.extend(options.take("namespace"));
    names.push(options.need("image")?);
    if names.iter().any(|name| name.contains('/')) {
        return Err("names on Ceph must not have '/' here".into());
    }
    let mut text = format!("rbd:{}", plain(names.join("/"))?);
    if let Some(snapshot) = options.take("snapshot") {
        text += &format!("@{}", plain(snapshot)?);
    }
    let mut before = '?';
    for name in ["conf", "user"] {
        if let Some(value) = options.take(name) {
            text += &format!("{before}{name}={}", plain(value)?);
            before = '&';
        }
    }
    Location::parse(OsStr::new(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> String {
        match Said::parse(text) {
            Ok(said) => format!("{} {:?} {:?}", said.location, said.format, said.keys),
            Err(problem) => problem,
        }
    }

    #[test]
    fn options_say_where_an_image_is() {
        let cases = [
            ("driver=qcow2,file.filename=a,,b", "a,b Some(Qcow2) []"),
            (
                "driver=qcow2,file.driver=file,file.filename=nbd:x",
                "nbd:x Some(Qcow2) []",
            ),
            ("driver=file,filename=a", "a Some(Raw) []"),
            ("file.filename=a", "a None []"),
            (
                "driver=luks,key-secret=s,file.driver=host_device,file.filename=/dev/x",
                "/dev/x Some(Luks) [\"s\"]",
            ),
            (
                "driver=qcow2,encrypt.format=luks,encrypt.key-secret=s,backing.encrypt.key-secret=t,file.filename=a",
                "a Some(Qcow2) [\"s\", \"t\"]",
            ),
            (
                "driver=vpc,force_size_calc=chs,file.filename=a",
                "a Some(Foreign(VhdSized(Geometry))) []",
            ),
            (
                "driver=nbd,server.type=unix,server.path=/run/a b?,export=x/&y",
                "nbd+unix:///x%2F%26y?socket=%2Frun%2Fa%20b%3F Some(Raw) []",
            ),
            (
                "driver=raw,file.driver=nbd,file.server.type=inet,file.server.host=::1,file.server.port=10810",
                "nbd://[::1]:10810/ Some(Raw) []",
            ),
            ("file.filename=nbd://x", "nbd://x None []"),
            (
                "driver=raw,file.driver=rbd,file.pool=p,file.namespace=n,file.image=i,file.user=u",
                "rbd:p/n/i?user=u Some(Raw) []",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(said(text), expected, "{text}");
        }
    }

    #[test]
    fn what_would_be_something_else_is_refused() {
        let cases = [
            ("", "file.filename"),
            ("driver=qcow2,filename=a", "'filename' is not supported"),
            ("driver=qcow2,file=node", "file.filename"),
            (
                "driver=vpc,force_size_calc=x,file.filename=a",
                "current_size or chs",
            ),
            (
                "driver=vhdx,force_size_calc=chs,file.filename=a",
                "'force_size_calc'",
            ),
            ("driver=qcow2", "file.filename"),
            ("driver=vfat,file.filename=a", "vfat"),
            ("driver=qcow2,file.driver=http,file.filename=a", "'http'"),
            ("driver=qcow2,file.filename=a,force-share=on", "-U"),
            ("driver=raw,offset=512,file.filename=a", "img dd"),
            (
                "driver=qcow2,file.filename=a,backing.driver=raw",
                "backing file",
            ),
            (
                "driver=qcow2,file.filename=a,file.locking=off",
                "'file.locking'",
            ),
            ("driver=nbd,server.type=unix", "server.path"),
            ("driver=nbd,export=x", "server.type"),
            (
                "driver=nbd,server.type=inet,server.host=h,server.port=x",
                "not a host",
            ),
            ("driver=rbd,pool=p/q,image=i", "'/'"),
            (
                "driver=nbd,server.type=inet,server.host=h/x,server.port=1",
                "not a host",
            ),
            (
                "driver=nbd,server.type=inet,server.host=h,server.port=1/x",
                "a port",
            ),
            (
                "driver=vmdk,encrypt.key-secret=s,file.filename=a",
                "'encrypt.key-secret'",
            ),
            (
                "driver=qcow2,encrypt.format=aes,file.filename=a",
                "'encrypt.format'",
            ),
            (
                "driver=qcow2,backing.xkey-secret=s,file.filename=a",
                "backing file",
            ),
            ("driver=rbd,pool=p,image=i,snapshot=s?user=a", "'?'"),
            ("driver=rbd,pool=p,image=i,conf=/a&user=x", "'&'"),
            ("driver=raw,key-secret=s,file.filename=a", "'key-secret'"),
            ("driver=qcow2,key-secret=s,file.filename=a", "'key-secret'"),
            (
                "file.driver=nbd,file.server.type=unix,file.server.path=s",
                "driver=raw",
            ),
            (
                "driver=qcow2,file.driver=nbd,file.server.type=unix,file.server.path=s",
                "driver=raw",
            ),
        ];
        for (text, why) in cases {
            assert!(said(text).contains(why), "{text}: {}", said(text));
        }
    }

    #[test]
    fn keys_are_in_files() {
        let parse = |text: &str| text.parse::<Secret>();
        let secret = parse("secret,id=a,file=b,,c,format=raw").expect("a key");
        assert_eq!(
            (secret.id.as_str(), secret.key),
            ("a", KeySource::File("b,c".into()))
        );
        for (text, why) in [
            ("secret,id=a,data=b", "other users can see"),
            ("secret,id=a", "file=PATH"),
            ("secret,file=a", "id=NAME"),
            ("secret,id=a,file=b,format=base64", "format=base64"),
            ("tls-creds-x509,id=a", "only keys"),
        ] {
            assert!(parse(text).unwrap_err().contains(why), "{text}");
        }
    }
}
