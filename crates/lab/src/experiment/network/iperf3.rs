//! iperf3: scripts that run it, and its report.

use std::time::Duration;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::words::words;

/// iperf3's default port.
const PORT: u16 = 5201;

words! {
    /// Kind of traffic that iperf3 sends.
    pub enum Test {
        /// TCP, as much as possible, in writes of 128 KiB.
        Throughput = "throughput",
        /// UDP, as many packets of 64 bytes as possible.
        Packets = "packets",
    }
}

/// The received data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    pub seconds: f64,
    /// Number of bytes received.
    pub bytes: u64,
    /// TCP only: number of retransmitted segments.
    pub retransmits: u64,
    /// UDP only: number of packets sent, and of those that were lost.
    pub packets: u64,
    pub lost: u64,
}

impl Test {
    /// Returns the size of a write or a packet, in bytes.
    pub fn size(self) -> u64 {
        match self {
            Test::Throughput => 128 << 10,
            Test::Packets => 64,
        }
    }

    /// Returns a script that sends for `runtime` over concurrent streams, and prints a report.
    pub fn send(self, to: &str, streams: u64, runtime: Duration) -> String {
        let (size, seconds) = (self.size(), runtime.as_secs_f64().ceil());
        let more = match self {
            // Kernels differ in their default congestion control. Reno needs no privileges. With
            // such short round trips, cubic, the most common default, behaves like it.
            Test::Throughput => " -C reno",
            // Without a limit.
            Test::Packets => " -u -b 0",
        };
        // The report also contains failures.
        format!("iperf3 -J -c {to} -t {seconds} -P {streams} -l {size}{more} || true")
    }
}

/// Returns a script that sends packets of [`Test::Packets`], 2,000 per second, and prints a report.
pub fn send_some(to: &str, packets: u64) -> String {
    let size = Test::Packets.size();
    format!("iperf3 -J -c {to} -k {packets} -l {size} -u -b 1M || true")
}

/// Returns a script that starts a receiver for one test, and ends when the receiver listens.
pub fn listen() -> String {
    // In the kernel's list of sockets, state 0A is "listen". IPv4 and IPv6 addresses are accepted.
    let port = format!(":{PORT:04X} [0-9A-F:]* 0A");
    format!(
        "iperf3 -s -1 >/tmp/iperf3 2>&1 &
         until cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -q '{port}'; do
             kill -0 $! 2>/dev/null || {{ cat /tmp/iperf3; exit 1; }}
             sleep 0.05
         done"
    )
}

/// Output of `iperf3 -J`, version 3.1 and newer. Each kind of test has other fields.
#[derive(Deserialize)]
struct Printed {
    #[serde(default)]
    end: End,
    error: Option<String>,
}

#[derive(Default, Deserialize)]
struct End {
    /// UDP only.
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

/// Parses a report.
///
/// # Errors
/// iperf3's own error, or if the text is not a report, or if nothing was received.
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

    /// Output of iperf 3.12, shortened.
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
