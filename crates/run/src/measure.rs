//! Figures of a cell, each with its unit, so that a reader need not know the experiment.

use serde::{Deserialize, Serialize};

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// `iops`, `read.p99`, `vcpu0.busy`: words of letters and digits, with dots between them.
    pub name: String,
    pub unit: Unit,
    pub value: f64,
    /// What it was taken from: requests, or repetitions. 0: not a statistic.
    pub samples: u64,
    /// The 95 % interval of `value`, where one was computed.
    pub interval: Option<(f64, f64)>,
    pub better: Better,
}

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// Requests, or other events, in a second.
    PerSecond,
    /// 10^6 bytes in a second.
    MegabytesPerSecond,
    Nanoseconds,
    Seconds,
    /// Microseconds of CPU time for each request.
    CpuMicrosecondsPerRequest,
    /// Events for each request.
    PerRequest,
    /// Of one CPU, or of a whole: 100 is all of it.
    Percent,
    /// The talk's `%vcpu per MB/s`.
    PercentPerMegabyte,
    Ratio,
    Count,
    Bytes,
}

/// Which way a figure should go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Better {
    Higher,
    Lower,
    /// It describes, and does not judge.
    Neither,
}

/// A figure over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// As a [`Measure`]'s.
    pub name: String,
    pub unit: Unit,
    /// Seconds from the window's begin to the end of the first sample's time.
    pub first: f64,
    /// Seconds between two samples.
    pub step: f64,
    pub values: Vec<f64>,
}

impl Measure {
    /// A figure that is no statistic and has no interval.
    pub fn new(name: impl Into<String>, unit: Unit, value: f64, better: Better) -> Measure {
        Measure {
            name: name.into(),
            unit,
            value,
            samples: 0,
            interval: None,
            better,
        }
    }

    /// The same, taken from so many samples.
    #[must_use]
    pub fn of(mut self, samples: u64) -> Measure {
        self.samples = samples;
        self
    }
}

impl Unit {
    /// What stands behind a figure.
    pub fn symbol(self) -> &'static str {
        match self {
            Unit::PerSecond => "/s",
            Unit::MegabytesPerSecond => "MB/s",
            Unit::Nanoseconds => "ns",
            Unit::Seconds => "s",
            Unit::CpuMicrosecondsPerRequest => "us CPU/request",
            Unit::PerRequest => "/request",
            Unit::Percent => "%",
            Unit::PercentPerMegabyte => "% per MB/s",
            Unit::Ratio => "x",
            Unit::Count => "",
            Unit::Bytes => "bytes",
        }
    }
}
