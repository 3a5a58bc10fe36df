//! iperf3: the scripts that run it, and what it reports.

use std::time::Duration;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::words::words;

/// Where it listens if nobody says.
const PORT: u16 = 5201;

words! {
    /// What is sent.
    pub enum Test {
        /// TCP, as much as goes through, in writes of 128 KiB.
        Throughput = "throughput",
        /// UDP, as many packets of 64 bytes as go through.
        Packets = "packets",
    }
}

/// What went through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    pub seconds: f64,
    /// That were received.
    pub bytes: u64,
    /// Of TCP: segments that were sent again.
    pub retransmits: u64,
    /// Of UDP: packets that were sent, and those of them that did not come.
    pub packets: u64,
    pub lost: u64,
}

impl Test {
    /// Bytes of a write, or of a packet.
    pub fn size(self) -> u64 {
        match self {
            Test::Throughput => 128 << 10,
            Test::Packets => 64,
        }
    }

    /// A script that sends for so long, by so many streams at the same time, and prints a report.
    pub fn send(self, to: &str, streams: u64, runtime: Duration) -> String {
        let (size, seconds) = (self.size(), runtime.as_secs_f64().ceil());
        let more = match self {
            // Kernels differ in how they send if nobody says. This way needs no rights, and is what
            // cubic, the most usual one, amounts to where a round trip is as short as here.
            Test::Throughput => " -C reno",
            // As fast as it can.
            Test::Packets => " -u -b 0",
        };
        // A failure is in the report, too.
        format!("iperf3 -J -c {to} -t {seconds} -P {streams} -l {size}{more} || true")
    }
}

/// A script that sends so many packets of [`Test::Packets`], 2,000 a second, and prints a report.
pub fn send_some(to: &str, packets: u64) -> String {
    let size = Test::Packets.size();
    format!("iperf3 -J -c {to} -k {packets} -l {size} -u -b 1M || true")
}

/// A script that starts a receiver for one test, and ends when it listens.
pub fn listen() -> String {
    // As the kernel lists sockets that listen (state 0A), of either kind of address.
    let port = format!(":{PORT:04X} [0-9A-F:]* 0A");
    format!(
        "iperf3 -s -1 >/tmp/iperf3 2>&1 &
         until cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -q '{port}'; do
             kill -0 $! 2>/dev/null || {{ cat /tmp/iperf3; exit 1; }}
             sleep 0.05
         done"
    )
}

/// `iperf3 -J`, of version 3.1 and newer. What is not there is of the other kind of test.
#[derive(Deserialize)]
struct Printed {
    #[serde(default)]
    end: End,
    error: Option<String>,
}

#[derive(Default, Deserialize)]
struct End {
    /// Of UDP.
    sum: Option<Sum>,
    sum_sent: Option<Sum>,
    sum_received: Option<Sum>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Sum {
    seconds: f64,
    bytes: u64,
    retransmits: u64,
    packets: u64,
    lost_packets: u64,
}

/// Reads a report.
///
/// # Errors
/// iperf3's own, or when it is none, or nothing went through.
pub fn parse(printed: &str, test: Test) -> Result<Report> {
    let unusable = |why: &str| Error::Protocol(format!("iperf3: {why}"));
    let parsed = serde_json::from_str::<Printed>(printed);
    let parsed = parsed.map_err(|error| unusable(&format!("no report: {error}: {printed}")))?;
    if let Some(error) = parsed.error {
        return Err(unusable(&error));
    }
    let End {
        sum,
        sum_sent,
        sum_received,
    } = parsed.end;
    let report = match test {
        Test::Throughput => {
            let (sent, received) = (sum_sent.unwrap_or_default(), sum_received);
            let received = received.ok_or_else(|| unusable("nothing was received"))?;
            Report {
                seconds: received.seconds,
                bytes: received.bytes,
                retransmits: sent.retransmits,
                packets: 0,
                lost: 0,
            }
        }
        Test::Packets => {
            let sum = sum.ok_or_else(|| unusable("no packets were counted"))?;
            Report {
                seconds: sum.seconds,
                bytes: sum.packets.saturating_sub(sum.lost_packets) * test.size(),
                retransmits: 0,
                packets: sum.packets,
                lost: sum.lost_packets.min(sum.packets),
            }
        }
    };
    match report.bytes > 0 && report.seconds > 0.0 && report.seconds.is_finite() {
        true => Ok(report),
        false => Err(unusable("nothing went through")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of iperf 3.12, shortened.
    const TCP: &str = r#"{"start": {"version": "iperf 3.12"}, "intervals": [], "end": {
        "sum_sent": {"start": 0, "end": 2.000484, "seconds": 2.000484, "bytes": 6649282560,
            "bits_per_second": 26590695291.7394, "retransmits": 7470, "sender": true},
        "sum_received": {"start": 0, "end": 2.000524, "seconds": 2.000524, "bytes": 6649151488,
            "bits_per_second": 26590163617.132313, "sender": true}}}"#;
    const UDP: &str = r#"{"start": {}, "intervals": [], "end": {
        "sum": {"seconds": 2.000073, "bytes": 19818240, "jitter_ms": 0.007, "lost_packets": 13205,
            "packets": 309660, "lost_percent": 4.26, "sender": true},
        "sum_sent": {"seconds": 2.000025, "bytes": 19818240, "packets": 309660, "lost_packets": 0},
        "sum_received": {"seconds": 2.000073, "bytes": 18973120, "packets": 309660}}}"#;

    #[test]
    fn what_was_received_counts() {
        let tcp = parse(TCP, Test::Throughput).unwrap();
        assert_eq!((tcp.bytes, tcp.retransmits), (6_649_151_488, 7470));
        let udp = parse(UDP, Test::Packets).unwrap();
        assert_eq!((udp.packets, udp.lost), (309_660, 13_205));
        assert_eq!(udp.bytes, 18_973_120);
    }

    #[test]
    fn its_own_words_are_the_error() {
        let said = |text: &str| parse(text, Test::Throughput).unwrap_err().to_string();
        let refused = r#"{"start": {}, "end": {}, "error": "unable to connect to server"}"#;
        assert_eq!(said(refused), "iperf3: unable to connect to server");
        assert!(said("not found").contains("no report") && said("not found").contains("not found"));
        assert!(said(r#"{"end": {}}"#).contains("nothing was received"));
        assert!(said(&TCP.replace("6649151488", "0")).contains("nothing went through"));
        assert!(parse(TCP, Test::Packets).is_err());
    }

    #[test]
    fn a_receiver_that_does_not_start_tells_why() {
        let dir = tempfile::tempdir().unwrap();
        let broken = dir.path().join("iperf3");
        std::os::unix::fs::symlink("/bin/false", broken).unwrap();
        let script = format!("PATH={}:$PATH\n{}", dir.path().display(), listen());
        let status = std::process::Command::new("sh")
            .args(["-c", &script])
            .status();
        assert_eq!(status.unwrap().code(), Some(1));
    }
}
