//! A supervisor with one tenant, whose process is played by the test: it has the other ends of the
//! sockets.

use super::*;
use fathom_control::ErrorKind;
use fathom_host::handover::{ProcessState, TenantDisk, TenantState};
use fathom_host::link::{self, Link, ToTenant};
use fathom_host::options::DiskOptions;
use fathom_requests::Answer;
use fathom_sockets::Descriptors;
use fathom_spec::DiskSpec;
use rustix::pipe::{PipeFlags, pipe_with};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, channel};

struct Fake {
    tenants: Tenants,
    link: Link,
    _gate: OwnedFd,
    /// Writing a byte here simulates the end of the process, as reported by a pidfd.
    end: OwnedFd,
}

impl Fake {
    fn new() -> Fake {
        let table = |text: &str| serde_json::from_str::<DiskSpec>(text).unwrap();
        let own = table(r#"{"name": "own", "image": "null:1M", "nbd": true}"#);
        let options = ServeOptions::of(DiskOptions::of(own, true).unwrap());
        let mut files = Descriptors::default();
        let (ended, end) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (link, theirs) = Link::pair().unwrap();
        let (_, gate) = Link::pair().unwrap();
        let process = ProcessState {
            pid: std::process::id(),
            link_version: link::VERSION,
            lives_ms: 0,
            pidfd: files.add(&ended).unwrap(),
            link: files.add(&theirs).unwrap(),
            gate: files.add(&gate).unwrap(),
            log: None,
            owes_answer: false,
        };
        let disk = TenantDisk {
            table: table(r#"{"name": "a", "image": "null:1M"}"#),
            listener: None,
            is_there: true,
            found: Vec::new(),
            shown: serde_json::Value::Null,
        };
        let state = TenantState {
            name: "a".into(),
            user: None,
            process: Some(process),
            disks: vec![disk],
        };
        let tenants = Tenants::adopt(&options, vec![state], Vec::new(), &mut files);
        Fake {
            tenants: tenants.unwrap(),
            link,
            _gate: gate,
            end,
        }
    }

    fn ask(&mut self, command: Command) -> Receiver<Answer> {
        let (send, answered) = channel();
        let disk = Some("a".to_owned());
        let responder = Box::new(move |answer| drop(send.send(answer)));
        self.tenants.ask(Ask { disk, command }, responder);
        answered
    }

    /// Returns the number of the next command that the process receives.
    fn asked(&self) -> u64 {
        match self.link.receive::<ToTenant>(true).unwrap().unwrap().0 {
            ToTenant::Ask { number, .. } => number,
            _ => panic!("no command"),
        }
    }

    fn tenant(&mut self) -> &mut Tenant {
        self.tenants.all.get_mut("a").unwrap()
    }
}

#[test]
fn process_that_is_killed_and_does_not_end_holds_up_nobody() {
    let mut fake = Fake::new();
    let answered = fake.ask(Command::Stats);
    // The process sends something that is not a message.
    fake.link.send(&7, None, true).unwrap();
    fake.tenants.turn();
    assert_eq!(
        answered.try_recv().unwrap().unwrap_err().kind,
        ErrorKind::Failed
    );
    // The process may still write to its image, so the next process starts after its end.
    assert!(fake.tenant().process.is_none() && fake.tenant().restarts().is_none());
    assert!(!fake.tenants.is_settled());
    rustix::io::write(&fake.end, b"x").unwrap();
    fake.tenants.turn();
    assert!(fake.tenant().restarts().is_some());
    assert!(fake.tenants.is_settled());
}

#[test]
fn commands_without_a_reply_do_not_prevent_an_upgrade() {
    let mut fake = Fake::new();
    let stats = fake.ask(Command::Stats);
    let thaw = fake.ask(Command::Thaw);
    fake.tenants.turn();
    assert!(!fake.tenants.is_settled());
    // Commands that only read expire by themselves.
    let first = fake.tenant().expires().unwrap();
    let expired = fake.tenant().take_expired(first, false);
    assert_eq!(expired.len(), 1);
    expired
        .into_iter()
        .for_each(|one| fake.tenants.give_up(one));
    assert_eq!(stats.try_recv().unwrap().unwrap_err().kind, ErrorKind::Late);
    assert!(thaw.try_recv().is_err() && !fake.tenants.is_settled());
    fake.tenants.give_up_commands();
    assert_eq!(thaw.try_recv().unwrap().unwrap_err().kind, ErrorKind::Late);
    assert!(fake.tenants.is_settled());
    // A late reply is ignored, and the tenant continues.
    let number = fake.asked();
    let answer = Ok(());
    let late: FromTenant<()> = FromTenant::Answer { number, answer };
    fake.link.send(&late, None, true).unwrap();
    fake.tenants.turn();
    assert!(fake.tenant().process.is_some());
}

#[test]
fn only_a_tenant_that_was_told_to_end_has_ended_well() {
    let mut fake = Fake::new();
    let summary = || fathom_trace::Summary::default();
    let ended: FromTenant<()> = FromTenant::Ended(vec![("other".into(), summary())]);
    fake.link.send(&ended, None, true).unwrap();
    fake.tenants.turn();
    let tenant = fake.tenant();
    assert!(!tenant.ended_well && tenant.outcomes.is_empty());
    tenant.tell_to_end();
    let outcome: FromTenant<()> = FromTenant::Outcome("a".into(), Box::new(summary()));
    fake.link.send(&outcome, None, true).unwrap();
    fake.link.send(&outcome, None, true).unwrap();
    fake.link.send(&ended, None, true).unwrap();
    fake.tenants.turn();
    let tenant = fake.tenant();
    assert!(tenant.ended_well);
    assert_eq!(tenant.outcomes.len(), 1);
}
