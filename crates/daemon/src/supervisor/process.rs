//! A tenant's process, and who opens things for it.

use super::permits::Permits;
use crate::events::Events;
use crate::link::{AtGate, FromGate, Link, ToTenant};
use crate::options::StopTimeout;
use crate::signals::LeftToThisThread;
use crate::table::PoolTable;
use crate::users::User;
use fathom_sandbox::Mode;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Instant;

/// Ends with this.
pub struct Process {
    child: Child,
    pub link: Link,
    pub started: Instant,
}

impl Process {
    /// Start the process of this tenant.
    pub fn start(
        name: &str,
        pools: &BTreeMap<String, PoolTable>,
        stop_timeout: StopTimeout,
        sandbox: Mode,
        user: Option<User>,
        permits: Arc<Permits>,
        events: Events,
    ) -> io::Result<Process> {
        let (link, tenants_link) = Link::pair()?;
        let (gate, tenants_gate) = Link::pair()?;
        let child = Command::new("/proc/self/exe")
            // Whoever looks for servers by their program's name does not mean this.
            .arg0("fathom-tenant")
            .args(["tenant", name])
            .env_remove("NOTIFY_SOCKET")
            .stdin(tenants_link)
            .stdout(tenants_gate)
            // Whoever ends this process from its terminal does not mean them.
            .process_group(0)
            .spawn()?;
        let process = Process {
            child,
            link,
            started: Instant::now(),
        };
        let _signals = LeftToThisThread::new();
        let thread = std::thread::Builder::new().name("gate".into());
        let tenant = name.to_owned();
        thread
            .stack_size(STACK)
            .spawn(move || attend(&tenant, &gate, &permits, &events))?;
        let begin = ToTenant::Begin {
            pools: pools.clone(),
            stop_timeout_ms: stop_timeout.0.as_millis() as u64,
            sandbox: sandbox.to_string(),
            user,
        };
        process.link.send(&begin, None, false)?;
        Ok(process)
    }

    /// End it, whatever it does; says how it has ended.
    pub fn end(mut self) -> String {
        // It may have ended.
        let _ = self.child.kill();
        match self.child.wait() {
            Err(error) => format!("cannot be waited for: {error}"),
            Ok(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("has ended with status {code}"),
                (_, Some(signal)) => format!("was ended by signal {signal}"),
                _ => "has ended".to_owned(),
            },
        }
    }
}

/// It opens files, and traces are made here.
const STACK: usize = 256 << 10;

/// Serve a tenant at its gate, until it has ended.
fn attend(tenant: &str, gate: &Link, permits: &Permits, events: &Events) {
    loop {
        let told = match gate.receive::<AtGate>(true) {
            Ok(Some((AtGate::Want(wanted), with))) => {
                let got = permits.get(&wanted, with.as_ref().map(AsFd::as_fd));
                let (answer, file): (FromGate, _) = match got {
                    Ok(got) => (Ok(got.path), Some(got.file)),
                    Err(refused) => (Err(refused), None),
                };
                gate.send(&answer, file.as_ref().map(AsFd::as_fd), true)
            }
            Ok(Some((AtGate::Happened(happened), _))) => {
                // Only what it can know.
                if happened.disk().is_none_or(|disk| permits.has(disk)) {
                    events.tell(happened);
                }
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        match told {
            Ok(()) => {}
            Err(error) if is_end(&error) => return,
            Err(error) => return tracing::error!("tenant '{tenant}' is not understood: {error}"),
        }
    }
}

fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}
