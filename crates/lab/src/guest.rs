//! A running guest with its console, agent and QMP monitor.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::agent::{Agent, Output, READY};
use crate::console::Console;
use crate::data_port::DataPort;
use crate::error::{Context, Error, Result};
use crate::host;
use crate::initramfs;
use crate::kernel::Kernel;
use crate::lines::LineStream;
use crate::machine::{Boot, Files, MAX_DISKS, Machine};
use crate::process::{Process, tail_of};
use crate::qmp::Qmp;
use crate::scratch::Scratch;
use crate::tools;

/// Kernel message after the guest's timer has stopped.
pub(crate) const NO_TIMER: &str = "Possible timer handling issue";
/// Message of an assertion that sometimes ends QEMU with multi-threaded TCG (seen with 10.0): one
/// CPU maps a device while another looks it up. Devices are mapped at boot, when the guest has done
/// nothing yet.
const RACE: &str = "iotlb_to_section: Assertion";
/// Number of times a machine is restarted after [`RACE`].
const AGAIN: usize = 2;
/// Maximum number of resets after [`NO_TIMER`]. More resets have never restored the timer.
const RESETS: usize = 2;
const CONNECT: Duration = Duration::from_secs(30);
/// Time for QEMU to exit after it has closed its sockets.
const CLOSING: Duration = Duration::from_secs(20);

/// A virtual machine that has been started. On drop, QEMU is killed and the machine's files are
/// removed.
#[derive(Debug)]
pub struct Guest {
    // Fields are dropped in order: QEMU must end before its directory is removed.
    qemu: Process,
    console: Console,
    qmp: Qmp,
    agent: Agent,
    data: DataPort,
    monitor: PathBuf,
    /// Ids and PCI addresses of the disks.
    disks: Vec<(String, String)>,
    patience: Duration,
    started: Instant,
    connected: Instant,
    _dir: Scratch,
}

impl Guest {
    /// Starts the machine and waits until its agent responds. [`Boot::SeaBios`] boots no Linux, so
    /// the function then waits only until QEMU runs.
    ///
    /// # Errors
    /// When a program or file is missing, QEMU fails, or the guest does not boot within the
    /// machine's `patience`. The error has the last lines of the console or of QEMU's log.
    pub fn boot(machine: &Machine) -> Result<Self> {
        for _ in 0..AGAIN {
            match Self::boot_once(machine) {
                Err(error) if error.to_string().contains(RACE) => {}
                outcome => return outcome,
            }
        }
        Self::boot_once(machine)
    }

    fn boot_once(machine: &Machine) -> Result<Self> {
        let mut guest = Self::start(machine)?;
        if machine.boot != Boot::SeaBios && !machine.incoming {
            guest.wait_ready(0)?;
        }
        Ok(guest)
    }

    /// Starts the machine and waits only for QEMU's monitor.
    ///
    /// # Errors
    /// When a program or file is missing or QEMU fails.
    pub fn start(machine: &Machine) -> Result<Self> {
        if machine.disks.len() > MAX_DISKS {
            return Err(Error::Protocol(format!(
                "a machine has at most {MAX_DISKS} disks"
            )));
        }
        let kernel = machine.kernel.clone().map_or_else(Kernel::find, Ok)?;
        let dir = Scratch::small()?;
        let initramfs = dir.path().join("initramfs");
        if machine.boot == Boot::Kernel {
            write(&initramfs, &initramfs::build(&kernel, machine)?)?;
        }
        let tools = if machine.tools {
            Some(tools::image(machine.profiler)?)
        } else {
            None
        };
        let files = Files {
            dir: dir.path(),
            kernel: &kernel.image,
            initramfs: &initramfs,
            tools: tools.as_deref(),
        };
        let mut command = Command::new(host::program("qemu-system-x86_64")?);
        command
            .args(machine.arguments(&files)?)
            .stdout(Stdio::piped());
        let started = Instant::now();
        let mut qemu = Process::spawn("QEMU", command, &dir.path().join("qemu.log"))?;
        let stdout = qemu
            .take_stdout()
            .ok_or_else(|| Error::Protocol("no console".into()))?;
        let console = Console::collect(stdout);
        wait_for(&files.qmp(), &mut qemu)?;
        let qmp = explain(Qmp::connect(&files.qmp(), CONNECT), &mut qemu)?;
        let connected = Instant::now();
        let agent = explain(LineStream::connect(&files.agent(), CONNECT), &mut qemu)?;
        let data = explain(
            DataPort::connect(&files.data(), &files.signal(), CONNECT),
            &mut qemu,
        )?;
        let disks = machine.disks.iter().enumerate();
        let disks = disks.map(|(index, disk)| (disk.id.clone(), disk.address(index)));
        Ok(Self {
            qemu,
            agent: Agent::new(agent, console.clone()),
            console,
            qmp,
            data,
            monitor: files.monitor(),
            disks: disks.collect(),
            patience: machine.patience,
            started,
            connected,
            _dir: dir,
        })
    }

    /// Waits until the agent of a booting or rebooting guest is ready. `from` is the console's
    /// [position](Console::position) before the boot.
    ///
    /// Under load, an emulated CPU may start without its timer. The kernel then hangs forever,
    /// independently of its disks. This function resets such a guest.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the last lines of the console.
    pub fn wait_ready(&mut self, mut from: usize) -> Result<()> {
        for _ in 0..RESETS {
            let seen = self
                .console
                .wait_for_either([READY, NO_TIMER], from, self.patience);
            match self.explain(seen.map_err(not_booted))? {
                (0, _) => return Ok(()),
                _ => eprintln!("the guest's kernel has lost its timer: it is reset"),
            }
            from = self.console.position();
            self.qmp.execute("system_reset", json!({}))?;
        }
        let ready = self.console.wait_for(READY, from, self.patience);
        self.explain(ready.map_err(not_booted)).map(drop)
    }

    /// Runs a shell script in the guest. If the script exceeds the timeout, its status is 124 and
    /// its output holds the guest's diagnostics: requests in flight and blocked tasks.
    ///
    /// # Errors
    /// When the guest does not respond. A failure of the script itself is reported in the output.
    pub fn run(&mut self, script: &str, timeout: Duration) -> Result<Output> {
        let output = self.agent.run(script, timeout);
        self.explain(output)
    }

    pub(crate) fn agent(&mut self) -> &mut Agent {
        &mut self.agent
    }

    pub(crate) fn data(&self) -> &DataPort {
        &self.data
    }

    pub(crate) fn explain<T>(&mut self, result: Result<T>) -> Result<T> {
        let console = &self.console;
        explain(result, &mut self.qemu).map_err(|error| with_console(error, console))
    }

    /// Runs a shell script in which each command must succeed (`set -e`), and returns its output.
    ///
    /// # Errors
    /// Like [`run`](Self::run), and [`Error::Guest`] when the script fails.
    pub fn check(&mut self, script: &str, timeout: Duration) -> Result<String> {
        let text = self.agent.check(script, timeout);
        self.explain(text)
    }

    /// Returns the guest's block device for a disk, which is named by its id in the machine.
    ///
    /// # Errors
    /// When the machine has no such disk, or the guest does not see it.
    pub fn device(&mut self, id: &str) -> Result<String> {
        let Some((_, address)) = self.disks.iter().find(|(disk, _)| disk == id) else {
            return Err(Error::Protocol(format!("the machine has no disk '{id}'")));
        };
        let script = format!("disk {address}");
        Ok(self
            .check(&script, Duration::from_secs(60))?
            .trim()
            .to_owned())
    }

    /// Runs one QMP command.
    ///
    /// # Errors
    /// [`Error::Qmp`] when QEMU replies with an error, or the last lines of QEMU's log when it has
    /// ended.
    pub fn qmp(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let answer = self.qmp.execute(command, arguments);
        explain(answer, &mut self.qemu)
    }

    /// Waits for a QMP event and returns its data.
    ///
    /// # Errors
    /// A timeout, or the last lines of QEMU's log when it has ended.
    pub fn wait_event(&mut self, name: &str, timeout: Duration) -> Result<Value> {
        let event = self.qmp.wait_event(name, timeout);
        explain(event, &mut self.qemu)
    }

    /// Reboots the guest from inside and waits until its agent is ready.
    ///
    /// # Errors
    /// When the guest does not boot.
    pub fn reboot(&mut self) -> Result<()> {
        let from = self.console.position();
        // The script never responds, because `reboot` replaces it.
        self.agent.ask("exec reboot -f", Duration::from_secs(30))?;
        self.wait_ready(from)
    }

    /// Powers the guest off from inside and waits for QEMU to exit.
    ///
    /// # Errors
    /// When QEMU still runs after a minute, or exited with a failure.
    pub fn power_off(&mut self) -> Result<()> {
        // The script never responds, because `poweroff` replaces it.
        self.agent
            .ask("exec poweroff -f", Duration::from_secs(30))?;
        let status = self.qemu.wait(Duration::from_secs(60))?;
        if status.success() {
            return Ok(());
        }
        self.qemu.expect_running()
    }

    /// Powers the guest off from inside without delay. Returns when the guest was off, and when
    /// QEMU had exited.
    ///
    /// # Errors
    /// When one of the two takes longer than a minute.
    pub fn power_off_now(&mut self) -> Result<(Instant, Instant)> {
        const MINUTE: Duration = Duration::from_secs(60);
        // The script never responds, because `poweroff` replaces it.
        self.agent.ask("exec poweroff -f", MINUTE)?;
        self.wait_event("SHUTDOWN", MINUTE)?;
        let off = Instant::now();
        let status = self.qemu.wait(MINUTE)?;
        if !status.success() {
            self.qemu.expect_running()?;
        }
        Ok((off, Instant::now()))
    }

    /// Returns when QEMU was started, and when its monitor accepted the connection.
    pub fn begin(&self) -> (Instant, Instant) {
        (self.started, self.connected)
    }

    /// Ends QEMU through its monitor, like a host that removes the machine.
    ///
    /// # Errors
    /// When QEMU still runs after half a minute.
    pub fn quit(&mut self) -> Result<()> {
        let _ = self.qmp.execute("quit", json!({})); // QEMU may hang up before it answers
        self.qemu.wait(Duration::from_secs(30)).map(|_| ())
    }

    /// The serial console.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Returns QEMU's standard error.
    pub fn qemu_log(&self) -> String {
        self.qemu.log()
    }

    /// Returns the path of a QMP socket that the lab itself does not use.
    pub fn monitor(&self) -> &Path {
        &self.monitor
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.qemu.pid()
    }
}

/// Waits until QEMU has created a socket. Fails if QEMU has exited.
fn wait_for(socket: &Path, qemu: &mut Process) -> Result<()> {
    let deadline = Instant::now() + CONNECT;
    while !socket.exists() && Instant::now() < deadline {
        qemu.expect_running()?;
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn not_booted(error: Error) -> Error {
    match error {
        Error::Timeout { after, tail, .. } => Error::Timeout {
            what: match tail.0.is_empty() {
                true => "waiting for the guest to boot (its console is empty)".into(),
                false => "waiting for the guest to boot".into(),
            },
            after,
            tail,
        },
        other => other,
    }
}

/// Replaces a communication error with QEMU's own last messages if QEMU has exited.
fn explain<T>(result: Result<T>, qemu: &mut Process) -> Result<T> {
    match result {
        Err(error @ (Error::Io { .. } | Error::Protocol(_) | Error::Timeout { .. }))
            if is_gone(qemu, &error) =>
        {
            qemu.expect_running()?;
            Err(error)
        }
        other => other,
    }
}

/// Replaces an error with the guest's kernel panic if there was one. After a panic, QEMU exits
/// without a message (-no-reboot), or the guest reboots again and again. Otherwise the console's
/// last lines are added to QEMU's.
fn with_console(error: Error, console: &Console) -> Error {
    if let Error::Program { .. } = error {
        console.wait_end(CLOSING);
    }
    if let (Error::Program { .. } | Error::Timeout { .. }, Some(reason)) = (&error, panic(console))
    {
        let tail = console.tail();
        return Error::Panic { reason, tail };
    }
    match error {
        Error::Program {
            program,
            status,
            tail,
        } => Error::Program {
            program,
            status,
            tail: tail_of(&format!("{}\n-- console --\n{}", tail.0, console.tail().0)),
        },
        other => other,
    }
}

/// Returns the message of the guest's kernel panic, if there was one.
fn panic(console: &Console) -> Option<String> {
    let text = console.text();
    let (_, rest) = text.rsplit_once("Kernel panic - not syncing: ")?;
    Some(rest.lines().next()?.trim().to_owned())
}

/// Returns whether QEMU has exited. QEMU's sockets close before the process can be waited for. The
/// delay is short, or seconds if the machine is busy and the kernel must free much memory.
fn is_gone(qemu: &mut Process, error: &Error) -> bool {
    let patience = match error {
        Error::Timeout { .. } => Duration::from_millis(200),
        _ => CLOSING,
    };
    qemu.wait(patience).is_ok()
}

fn write(path: &PathBuf, data: &[u8]) -> Result<()> {
    fs::write(Path::new(path), data).context(|| format!("cannot write {}", path.display()))
}
