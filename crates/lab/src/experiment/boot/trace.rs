//! Trace of a guest's boot by its kernel: initcalls, and the programs of its user space.

use std::collections::HashMap;
use std::time::Duration;

use fathom_run::Span;

use crate::error::Result;
use crate::guest::Guest;

const EVENTS: &str = "initcall:initcall_start,initcall:initcall_finish,sched:sched_process_exec,\
                      sched:sched_process_exit";
const READ: &str = "mount -t tracefs tracefs /sys/kernel/tracing\ncat /sys/kernel/tracing/trace";
const PATIENCE: Duration = Duration::from_secs(120);
/// Minimum time of a span, in seconds. Shorter ones are not of interest.
const LEAST: f64 = 50e-6;

/// Returns kernel parameters that enable tracing from the start of the boot.
///
/// Time stamps use the same clock as the kernel's messages.
pub(super) fn words() -> [String; 3] {
    [
        format!("trace_event={EVENTS}"),
        "trace_buf_size=4M".to_owned(),
        "trace_clock=global".to_owned(),
    ]
}

/// Returns what the guest has traced so far, in seconds of its kernel's clock.
///
/// # Errors
/// If the guest's kernel cannot trace.
pub(super) fn read(guest: &mut Guest) -> Result<Vec<Span>> {
    Ok(spans(&guest.check(READ, PATIENCE)?))
}

/// An event in a line of the tracer's text: `comm-pid [cpu] flags seconds: event: fields`.
struct Event<'a> {
    pid: &'a str,
    at: f64,
    name: &'static str,
    fields: &'a str,
}

impl<'a> Event<'a> {
    fn parse(line: &'a str) -> Option<Event<'a>> {
        // A command name may contain anything, but is too short to contain the whole name of an
        // event.
        let mut names = EVENTS
            .split(',')
            .filter_map(|event| event.split(':').nth(1));
        let (name, (head, fields)) =
            names.find_map(|name| Some((name, line.split_once(&format!(": {name}: "))?)))?;
        let (task, _) = head.rsplit_once(" [")?;
        Some(Event {
            pid: task.rsplit_once('-')?.1.trim(),
            at: head.rsplit_once(' ')?.1.parse().ok()?,
            name,
            fields,
        })
    }

    fn field(&self, name: &str) -> Option<&'a str> {
        let mut words = self.fields.split_whitespace();
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }
}

fn spans(text: &str) -> Vec<Span> {
    let mut spans = Vec::new();
    // Calls and programs that have started, by thread. Initcalls of one thread are not nested.
    let (mut calls, mut programs) = (HashMap::new(), HashMap::new());
    for event in text.lines().filter_map(Event::parse) {
        match event.name {
            "initcall_start" => {
                let function = event.field("func").unwrap_or("?");
                calls.insert(event.pid, (function, event.at));
            }
            "initcall_finish" => {
                if let Some((function, begin)) = calls.remove(event.pid) {
                    spans.push(Span::new("initcalls", symbol(function), begin, event.at));
                }
            }
            "sched_process_exec" => {
                // A program ends when its process executes another one.
                let next = (event.field("filename").unwrap_or("?"), event.at);
                if let Some(pid) = event.field("pid")
                    && let Some((program, begin)) = programs.insert(pid, next)
                {
                    spans.push(Span::new("programs", program, begin, event.at));
                }
            }
            "sched_process_exit" => {
                if let Some((program, begin)) =
                    event.field("pid").and_then(|pid| programs.remove(pid))
                {
                    // busybox's shell executes itself; `comm` has the name of the applet.
                    let name = match program {
                        "/proc/self/exe" => event.field("comm").unwrap_or(program),
                        _ => program,
                    };
                    spans.push(Span::new("programs", name, begin, event.at));
                }
            }
            _ => {}
        }
    }
    spans.retain(|span| span.seconds >= LEAST);
    spans
}

/// Returns the name of a function: `pci_init+0x0/0x10` is `pci_init`. A module's init function has
/// no name, because it is freed before the trace is read.
fn symbol(function: &str) -> &str {
    match function.split('+').next() {
        Some(name) if !name.starts_with("0x") => name,
        _ => "(of a module)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# tracer: nop
       swapper/0-1       [000] .....     0.080000: initcall_level: level=early
       swapper/0-1       [000] .....     0.100000: initcall_start: func=pci_init+0x0/0x10
       swapper/0-1       [000] .....     0.250000: initcall_finish: func=pci_init+0x0/0x10 ret=0
   kworker/u2:0-7        [000] .....     0.260000: initcall_start: func=a+0x0/0x10
       swapper/0-1       [000] .....     0.261000: initcall_start: func=b+0x0/0x10
   kworker/u2:0-7        [000] .....     0.270000: initcall_finish: func=a+0x0/0x10 ret=0
       swapper/0-1       [000] .....     0.271000: initcall_finish: func=b+0x0/0x10 ret=0
            init-1       [000] .....     1.000000: sched_process_exec: filename=/init pid=1 old_pid=1
       my [odd]: -60      [000] .....     1.100000: sched_process_exec: filename=/bin/mount pid=60 old_pid=60
           mount-60      [000] .....     1.125000: sched_process_exit: comm=mount pid=60 prio=120
             exe-62      [000] .....     1.130000: sched_process_exec: filename=/proc/self/exe pid=62 old_pid=62
             seq-62      [000] .....     1.132000: sched_process_exit: comm=seq pid=62 prio=120
          insmod-61      [000] .....     1.200000: initcall_start: func=0xffffffffc0377000
          insmod-61      [000] .....     1.203000: initcall_finish: func=0xffffffffc0377000 ret=0
            init-1       [000] .....     1.500000: sched_process_exec: filename=/bin/agent pid=1 old_pid=1
garbage [0] x: initcall_start: y
";

    #[test]
    fn calls_and_programs_have_their_times() {
        let spans = spans(TEXT);
        let said: Vec<_> = { spans.iter() }
            .map(|span| {
                let micros = |seconds: f64| (seconds * 1e6).round() as u64;
                let times = (micros(span.begin), micros(span.seconds));
                (span.lane.as_str(), span.name.as_str(), times)
            })
            .collect();
        assert_eq!(
            said,
            [
                ("initcalls", "pci_init", (100_000, 150_000)),
                ("initcalls", "a", (260_000, 10_000)),
                ("initcalls", "b", (261_000, 10_000)),
                ("programs", "/bin/mount", (1_100_000, 25_000)),
                ("programs", "seq", (1_130_000, 2_000)),
                ("initcalls", "(of a module)", (1_200_000, 3_000)),
                ("programs", "/init", (1_000_000, 500_000)),
            ]
        );
    }
}
