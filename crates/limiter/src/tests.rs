//! Tests of all rules together, with complete cells of known limits.

mod any;
mod laws;
mod truth;

use fathom_run::evidence::{Bare, DeviceTime, Evidence, Load, Processors, ThreadRole, ThreadTime};

/// A cell of ten seconds: one thread of a KVM guest makes random reads of 4 KiB through a worker of
/// Fathom's.
///
/// `depth` requests are in flight, each takes `us` microseconds, and the device accounts for 96 %
/// of that. No thread is busy.
pub fn cell(depth: u32, us: f64) -> Evidence {
    let requests = 9.9e6 * f64::from(depth) / us;
    let bytes = requests as u64 * 4096;
    let processors = |busy: [f64; 2]| Processors {
        busy: busy.to_vec(),
        steal: vec![0.0; 2],
    };
    Evidence {
        seconds: 10.0,
        load: Load {
            seconds: 0.0,
            threads: 1,
            depth,
            requests: requests as u64,
            bytes,
            mean_ns: us * 1e3,
            thread_cpu: vec![2.2],
            polls: false,
        },
        host: Some(processors([45.0, 40.0])),
        guest: Some(processors([38.0, 3.0])),
        threads: vec![
            thread("CPU 0/KVM", ThreadRole::Vcpu, 4.1),
            thread("worker 0", ThreadRole::Io, 3.5),
            thread("qemu-system-x86", ThreadRole::Main, 0.1),
        ],
        device: Some(DeviceTime {
            name: "nvme0n1".into(),
            requests: requests as u64,
            bytes,
            utilisation: 100.0,
            in_flight: 0.96 * f64::from(depth),
            mean_ns: 0.96 * us * 1e3,
            queue: Some(1023),
            queues: Some(4),
            own_bytes: None,
        }),
        bare: Some(Bare {
            requests_per_second: requests / 9.8,
            bytes_per_second: bytes as f64 / 9.8,
            mean_ns: 0.95 * us * 1e3,
        }),
        ..Evidence::default()
    }
}

pub fn thread(name: &str, role: ThreadRole, cpu: f64) -> ThreadTime {
    ThreadTime {
        pid: 4000,
        tid: 4001,
        name: name.into(),
        role,
        vcpu: (role == ThreadRole::Vcpu).then_some(0),
        cpu,
        waiting: Some(0.1),
        ..ThreadTime::default()
    }
}

pub fn with(mut evidence: Evidence, change: impl FnOnce(&mut Evidence)) -> Evidence {
    change(&mut evidence);
    evidence
}
