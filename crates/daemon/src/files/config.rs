//! Reads the configuration file (`fathom serve --config`): TOML, with the names of the command
//! line's options.

use fathom_api::{ApiOptions, Groups, RemoteOptions};
use fathom_exports::nbd::{Address, TlsMode};
use fathom_host::allowance::AllowanceTable;
use fathom_host::options::{DiskOptions, NbdOptions, ServeOptions, TlsOptions};
use fathom_host::tenancy::{self, Tenancy};
use fathom_host::{Error, StopTimeout, access};
use fathom_metrics::Events;
use fathom_sandbox::Mode as SandboxMode;
use fathom_spec::SocketSpec;
use fathom_spec::text;
use fathom_spec::{DiskSpec, PoolSpec, check_first, check_name};
use fathom_spec::{Group, Mode};
use fathom_spec::{line_of, parse_toml, unreadable};
use fathom_stack::PoolOptions;
use fathom_units::Timeout;
use serde::{Deserialize, Deserializer, de};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// Reads a configuration. The error is one line that names the file and the line.
pub fn read_config(path: &Path) -> Result<ServeOptions, Error> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::Options(format!("{}: {}", path.display(), unreadable(&error))))?;
    let options = parse(&text);
    let mut options =
        options.map_err(|problem| Error::Options(format!("{}{problem}", path.display())))?;
    options.config = Some(path.to_owned());
    let dir = path.parent().unwrap_or(Path::new(""));
    options.kept = options.kept.map(|kept| dir.join(kept));
    for place in options
        .disks
        .iter_mut()
        .filter_map(|disk| disk.defined_at.as_mut())
    {
        place.insert_str(0, &path.display().to_string());
    }
    Ok(options)
}

/// Parses a configuration. The error is to be appended to the file's name.
fn parse(text: &str) -> Result<ServeOptions, String> {
    let mut file: File = parse_toml(text)?;
    let mut nbd = None;
    if let Some(table) = file.nbd {
        let line = line_of(text, table.span());
        let options = table.into_inner().into_options();
        let options = options.and_then(|nbd| nbd.validate().map(|()| nbd));
        nbd = Some(options.map_err(|problem| format!("{line}: [nbd]: {problem}"))?);
    }
    let mut pools = Vec::new();
    for (name, table) in file.pools {
        let line = line_of(text, table.span());
        let options = table.into_inner().into_options(&name);
        pools.push(options.map_err(|problem| format!("{line}: [pool.{name}]: {problem}"))?);
    }
    let mut disks: Vec<DiskOptions> = Vec::new();
    for table in file.disks {
        let line = line_of(text, table.span());
        let disk = table.into_inner();
        let name = disk.name.clone();
        let same = disks.iter().any(|other| other.name == name);
        let has_pool = |name: &String| pools.iter().any(|pool: &PoolOptions| pool.name == *name);
        let options = match &disk.pool {
            _ if name.is_empty() => Err("key 'name' is missing".into()),
            _ if same => {
                Err("another disk of this file has the same name; choose another one".into())
            }
            Some(pool) if !has_pool(pool) => {
                Err(format!("no pool '{pool}'; add a table [pool.{pool}]"))
            }
            _ => check_first(&name).and_then(|()| DiskOptions::of(disk, nbd.is_some())),
        };
        let options = options.map_err(|problem| format!("{line}: disk '{name}': {problem}"));
        disks.push(DiskOptions {
            defined_at: Some(line),
            ..options?
        });
    }
    if file.tenants.is_some() && nbd.is_some() {
        let problem = "[nbd] and tenants exclude each other, because one process serves all NBD clients; remove one of the two";
        return Err(format!(": {problem}"));
    }
    for (name, table) in file.tenant {
        let problem = match &mut file.tenants {
            None => "tenants are off; add tenants = true, or a table [tenants]",
            Some(_) if check_name(&name).is_err() => {
                "not a tenant's name: 1 to 64 letters, digits, -, _ and ., not beginning with a dot"
            }
            Some(tenancy) => {
                tenancy.each.insert(name, table.into_inner());
                continue;
            }
        };
        let line = line_of(text, table.span());
        return Err(format!("{line}: [tenant.{name}]: {problem}"));
    }
    let api = file.api.map(Api::into_options).transpose()?;
    Ok(ServeOptions {
        disks,
        pools,
        nbd,
        api: api.unwrap_or_default(),
        config: None,
        events: Events::default(),
        sandbox: file.sandbox.unwrap_or_default(),
        kept: file.disks_dir,
        tenants: file.tenants.is_some(),
        tenancy: file.tenants.unwrap_or_default(),
        stop_timeout: file.stop_timeout.unwrap_or_default(),
        arguments: Vec::new(),
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    api: Option<Api>,
    disks_dir: Option<PathBuf>,
    #[serde(default, deserialize_with = "tenancy::tenants")]
    tenants: Option<Tenancy>,
    #[serde(default)]
    tenant: BTreeMap<String, Spanned<AllowanceTable>>,
    #[serde(default, with = "text::optional")]
    sandbox: Option<SandboxMode>,
    #[serde(default, with = "text::optional")]
    stop_timeout: Option<StopTimeout>,
    nbd: Option<Spanned<Nbd>>,
    #[serde(rename = "pool", default)]
    pools: BTreeMap<String, Spanned<PoolSpec>>,
    #[serde(rename = "disk", default)]
    disks: Vec<Spanned<DiskSpec>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Nbd {
    #[serde(deserialize_with = "addresses")]
    listen: Vec<Address>,
    #[serde(default, with = "text::optional")]
    socket_mode: Option<Mode>,
    #[serde(default, with = "text::optional")]
    socket_group: Option<Group>,
    tls: Option<Tls>,
    tls_certificates: Option<PathBuf>,
    #[serde(default)]
    tls_verify_peer: bool,
    connections: Option<u16>,
    connections_per_client: Option<u16>,
    #[serde(default, with = "text::optional")]
    idle_timeout: Option<Timeout>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Api {
    #[serde(default, with = "text::optional")]
    socket: Option<SocketSpec>,
    http: Option<String>,
    listen: Option<String>,
    tls_certificates: Option<PathBuf>,
    #[serde(default, with = "text::optional")]
    group: Option<Group>,
    #[serde(default, with = "text::optional")]
    read_group: Option<Group>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Tls {
    Off,
    On,
    Require,
}

impl Api {
    fn into_options(self) -> Result<ApiOptions, String> {
        let remote = RemoteOptions::of(self.listen, self.tls_certificates);
        Ok(ApiOptions {
            socket: self.socket,
            groups: Groups::new(self.group, self.read_group),
            http: self.http,
            remote: remote.map_err(|problem| format!(": [api]: {problem}"))?,
        })
    }
}

impl Nbd {
    fn into_options(self) -> Result<NbdOptions, String> {
        if self.listen.is_empty() {
            return Err("listen: empty; name an address".into());
        }
        if self.connections == Some(0) {
            return Err("connections: 0 is below the minimum of 1".into());
        }
        if self.connections_per_client == Some(0) {
            return Err("connections-per-client: 0 is below the minimum of 1".into());
        }
        let mode = match (self.tls, &self.tls_certificates) {
            (Some(Tls::Off), _) | (None, None) => None,
            (Some(Tls::On), _) => Some(TlsMode::On),
            (Some(Tls::Require) | None, _) => Some(TlsMode::Require),
        };
        let tls = match (mode, self.tls_certificates) {
            (None, _) if self.tls_verify_peer => {
                return Err("tls-verify-peer: needs tls-certificates".into());
            }
            (None, _) => None,
            (Some(_), None) => return Err("tls: needs tls-certificates".into()),
            (Some(mode), Some(certificates)) => Some(TlsOptions {
                mode,
                certificates,
                verify_peer: self.tls_verify_peer,
            }),
        };
        Ok(NbdOptions {
            listen: self.listen,
            access: access(self.socket_mode, self.socket_group),
            tls,
            max_connections: self.connections.map(usize::from),
            max_per_peer: self.connections_per_client.map(usize::from),
            idle_timeout: self.idle_timeout.and_then(|timeout| timeout.0),
        })
    }
}

fn addresses<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Address>, D::Error> {
    let texts: Vec<String> = Deserialize::deserialize(from)?;
    let parsed = texts.iter().map(|text| Address::parse(OsStr::new(text)));
    parsed.collect::<Result<_, _>>().map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_formats::Format;
    use fathom_host::allowance::{Cpu, Memory, Tasks};
    use fathom_spec::SocketSpec;
    use fathom_stack::Description;
    use fathom_storage::{Cache, EngineKind, Location};

    const ONE: &str = "[[disk]]\nname = 'a'\nimage = 'null:1G'\nvhost-user = '/run/a'\n";

    #[test]
    fn a_disk_needs_a_name_an_image_and_a_way_to_it() {
        let options = parse(ONE).unwrap();
        let disk = &options.disks[0];
        let null = || Location::parse(OsStr::new("null:1G")).unwrap();
        assert_eq!((&*disk.name, &disk.disk.location), ("a", &null()));
        assert_eq!(disk.vhost_user, Some(SocketSpec::Path("/run/a".into())));
        assert_eq!(disk.nbd, None);
        assert!(options.nbd.is_none());
        // All other options have the defaults of the command line.
        assert_eq!(disk.queues, fathom_spec::DEFAULT_QUEUES);
        let told = |disk: &Description| (disk.iothreads, disk.discard, disk.cache);
        assert_eq!(told(&disk.disk), told(&Description::new(null())));
    }

    #[test]
    fn everything_can_be_said() {
        let text = r#"
            api = { socket = "/run/api", group = "root", read-group = "64001" }
            stop-timeout = "90s"
            [nbd]
            listen = ["unix:/run/nbd", "tcp:[::1]:10809"]
            socket-group = "root"
            tls = "on"
            tls-certificates = "/etc/pki"
            tls-verify-peer = true
            connections = 7
            connections-per-client = 3
            idle-timeout = "90s"
            [[disk]]
            name = "root"
            image = "/srv/root.qcow2"
            vhost-user = "/run/root"
            socket-mode = "666"
            export-name = ""
            export-description = "of the first machine"
            format = "qcow2"
            metadata-cache = "64M"
            allow-dirs = ["/srv/base"]
            data-file = "/srv/root.raw"
            readonly = true
            force-share = true
            aio = "threads"
            register-memory = true
            cache = "writeback"
            discard = false
            queues = 4
            iothreads = 2
            cpus = "1-2"
            poll = "off"
            serial = "x"
            trace = "/dev/shm/t"
            filters = ["delay:read=10ms", "pause"]
            [pool.shared]
            threads = 3
            cpus = "0-1"
            poll = "20us"
            aio = "native"
            [pool.plain]
            [[disk]]
            name = "part"
            pool = "shared"
            image = "/srv/disk"
            offset = 1048576
            size = "1G"
        "#;
        let options = parse(text).unwrap();
        assert_eq!(options.stop_timeout, "90s".parse().unwrap());
        let api = options.api;
        assert_eq!((api.groups.all, api.groups.read), (Some(0), Some(64001)));
        let nbd = options.nbd.unwrap();
        let listen: Vec<_> = nbd.listen.iter().map(ToString::to_string).collect();
        assert_eq!(listen, ["unix:/run/nbd", "tcp:[::1]:10809"]);
        let tls = nbd.tls.unwrap();
        assert_eq!((tls.mode, tls.verify_peer), (TlsMode::On, true));
        assert_eq!((nbd.max_connections, nbd.max_per_peer), (Some(7), Some(3)));
        assert_eq!(nbd.idle_timeout, Some(std::time::Duration::from_secs(90)));
        let [root, part] = &options.disks[..] else {
            panic!("two disks");
        };
        assert_eq!((root.access.mode, root.access.group), (Some(0o666), None));
        assert_eq!((nbd.access.mode, nbd.access.group), (None, Some(0)));
        let export = root.nbd.as_ref().unwrap();
        assert_eq!(
            (&*export.name, &*export.description),
            ("", "of the first machine")
        );
        assert_eq!(root.disk.format, Some(Format::Qcow2));
        assert_eq!(root.disk.metadata_cache, Some(64 << 20));
        assert_eq!(root.disk.allow_dirs, [PathBuf::from("/srv/base")]);
        assert_eq!(root.disk.data_file, Some("/srv/root.raw".into()));
        assert!(root.disk.read_only && root.disk.force_share && root.disk.register_memory);
        assert_eq!(
            (root.disk.engine, root.disk.cache),
            (EngineKind::Threads, Cache::Writeback)
        );
        assert!(!root.disk.discard);
        assert_eq!((root.queues, root.disk.iothreads), (4, 2));
        assert_eq!(root.serial.as_deref(), Some("x"));
        assert_eq!(part.nbd.as_ref().unwrap().name, "part");
        assert_eq!(
            (part.disk.offset, part.disk.size),
            (Some(1 << 20), Some(1 << 30))
        );
        let filters: Vec<_> = options.disks[0]
            .disk
            .filters
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(filters, ["delay:read=10ms", "pause"]);
        let pools: Vec<_> = options.pools.iter().map(|pool| &*pool.name).collect();
        assert_eq!(pools, ["plain", "shared"]);
        assert_eq!(options.pools[0], PoolOptions::new("plain".into()));
        let shared = &options.pools[1];
        assert_eq!((shared.threads, shared.engine), (3, EngineKind::Native));
        assert_eq!(shared.cpus.to_string(), "0,1");
        assert_eq!(shared.polling.to_string(), "20us");
        assert_eq!(part.disk.pool.as_deref(), Some("shared"));
        assert_eq!(root.disk.pool, None);
        let bad = text.replace("pause", "pose");
        assert!(parse(&bad).unwrap_err().contains("pose"));
    }

    #[test]
    fn the_documentations_examples_are_right() {
        let pages = [
            include_str!("../../../../docs/disks.md"),
            include_str!("../../../../docs/tenants.md"),
        ];
        let examples = { pages.iter() }.flat_map(|page| page.split("```toml").skip(1));
        let examples = examples.map(|rest| {
            // The file's name follows the language of the code block.
            let (_, rest) = rest.split_once('\n').unwrap();
            parse(rest.split_once("```").unwrap().0).unwrap()
        });
        let [nbd, pool, tenants] = examples.collect::<Vec<_>>().try_into().unwrap();
        let exports = nbd.disks.iter().map(|disk| disk.nbd.is_some());
        assert_eq!(exports.collect::<Vec<_>>(), [false, true]);
        assert_eq!(pool.disks[0].disk.pool.as_deref(), Some("small"));
        assert_eq!(pool.pools[0].cpus.to_string(), "2,3");
        assert!(tenants.tenants && tenants.tenancy.users.is_some());
        let limits = |tenant| tenants.tenancy.allowance_of(tenant);
        assert_eq!(limits("other").memory, Some(Memory(2 << 30)));
        assert_eq!(limits("other").cpu, Some(Cpu(150)));
        assert_eq!(limits("large").memory, Some(Memory(8 << 30)));
        assert_eq!(
            (limits("large").cpu, limits("large").tasks),
            (None, Some(Tasks(200)))
        );
    }

    #[test]
    fn the_packages_configuration_is_right() {
        let text = include_str!("../../../../packaging/fathom.toml");
        let options = parse(text).unwrap();
        assert_eq!(options.kept, Some("disks.d".into()));
        // The examples in its comments are valid, too.
        let example = text
            .lines()
            .filter_map(|line| match line.strip_prefix("# ") {
                Some(line) => (line.starts_with('[') || line.contains(" = ")).then_some(line),
                None => Some(line),
            });
        let example: Vec<_> = example.filter(|line| !line.contains("...")).collect();
        let options = parse(&example.join("\n")).unwrap();
        assert_eq!((options.disks.len(), options.nbd.is_some()), (1, true));
    }

    /// Each configuration, and a part of its error.
    #[test]
    fn errors_say_where_and_what() {
        let with = |line: &str| format!("{ONE}{line}\n");
        let pooled =
            |pool: &str, disk: &str| with(&format!("pool = 'p'\n{disk}\n[pool.p]\n{pool}"));
        let nbd = |lines: &str| format!("[nbd]\n{lines}\n{ONE}");
        for (text, wanted) in [
            (with("aio = 'libaio'"), ":5: "),
            (
                with("quues = 4"),
                ":5: unknown key 'quues'; did you mean 'queues'?",
            ),
            (with("queues = 0"), ":1: disk 'a': queues"),
            (with("queues = 'x'"), ":5: "),
            (with("offset = '1X'"), ":5: '1X' is not a size"),
            (with("offset = 1.5"), ":5: not a size"),
            (with("offset = 1"), "disk 'a': --offset"),
            (with("format = 'parallels'"), ":5: "),
            (with("serial = '123456789012345678901'"), "disk 'a': serial"),
            (with("force-share = true"), "readonly"),
            (with("nbd = true"), "[nbd]"),
            (with("export-name = \"a\\u0000b\""), "export-name: "),
            (format!("{ONE}{ONE}"), ":5: disk 'a': another disk"),
            ("[[disk]]\nname = 'a'\n".into(), ":1: missing field `image`"),
            ("x = \n".into(), ":1: "),
            ("[[disk]]\nname = 'a'\nimage = 'x'\n".into(), "--vhost-user"),
            (nbd(""), ":1: missing field `listen`"),
            (with("socket-mode = '8'"), ":5: '8' is not a mode"),
            (with("socket-group = 'no such'"), ":5: no group"),
            (nbd("listen = ['fd:3']\nsocket-mode = '660'"), ": [nbd]: "),
            (nbd("listen = []"), ":1: [nbd]: listen"),
            (nbd("listen = ['/run/x']"), ":2: '/run/x' is not unix:PATH"),
            (nbd("listen = ['fd:3']\ntls = 'maybe'"), ":3: "),
            (nbd("listen = ['fd:3']\ntls = 'on'"), "tls-certificates"),
            (nbd("listen = ['fd:3']\nconnections = 0"), "connections"),
            (
                format!("tenants = true\n{ONE}\n[nbd]\nlisten = ['unix:/n']"),
                "[nbd] and tenants exclude each other",
            ),
            (
                "tenants = 'yes'".into(),
                ":1: invalid type: string \"yes\", expected true",
            ),
            (
                "[tenants]\nuser = 'x'".into(),
                ":2: unknown key 'user'; did you mean 'users'?",
            ),
            ("[tenants]\nusers = '0-9'".into(), ":2: 0-9: contains root"),
            (
                "[tenants]\nmemory-max = '1M'".into(),
                ":2: '1M' is too little memory",
            ),
            ("[tenants]\ncpu-max = '2'".into(), ":2: '2' is not a share"),
            ("[tenant.a]\n".into(), ":1: [tenant.a]: tenants are off"),
            (
                "[tenants]\n[tenant.'a/b']\n".into(),
                ":2: [tenant.a/b]: not a tenant's name",
            ),
            (
                "[tenants]\n[tenant.a]\nusers = '5'".into(),
                ":3: unknown key 'users'",
            ),
            (with("pool = 'p'"), "disk 'a': no pool 'p'"),
            (pooled("", "iothreads = 2"), "iothreads: excluded by pool"),
            (pooled("", "cpus = '0'"), "cpus: excluded by pool"),
            (pooled("", "poll = 'off'"), "poll: excluded by pool"),
            (pooled("", "aio = 'threads'"), "aio: excluded by pool"),
            (pooled("threads = 0", ""), ":7: [pool.p]: threads"),
            (
                pooled("thread = 1", ""),
                ":8: unknown key 'thread'; did you mean 'threads'?",
            ),
            (
                format!("{ONE}[pool.'a b']\n"),
                "[pool.a b]: not a pool's name",
            ),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.starts_with(':'), "{error}");
            assert!(error.contains(wanted), "{text}{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
}
