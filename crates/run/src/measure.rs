//! Measures of a cell. Each has its unit, so that a reader need not know the experiment.

use serde::{Deserialize, Serialize};

/// A measured value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// Name such as `iops`, `read.p99`, `vcpu0.busy`: words of letters and digits, separated by
    /// dots.
    pub name: String,
    /// Unit of `value` and of `interval`.
    pub unit: Unit,
    /// Measured value in `unit`.
    pub value: f64,
    /// Number of samples: requests, or repetitions. 0 means that the value is not a statistic.
    pub samples: u64,
    /// The 95 % interval of `value`, if one was computed.
    pub interval: Option<(f64, f64)>,
    /// Direction in which a change of `value` is an improvement.
    pub better: Better,
}

/// Unit of a measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// Requests, or other events, per second.
    PerSecond,
    /// 10^6 bytes per second.
    MegabytesPerSecond,
    /// Time in nanoseconds.
    Nanoseconds,
    /// Time in seconds.
    Seconds,
    /// Microseconds of CPU time per request.
    CpuMicrosecondsPerRequest,
    /// Events per request.
    PerRequest,
    /// Percent of one CPU or of a whole; 100 is all of it.
    Percent,
    /// The talk's unit `%vcpu per MB/s`.
    PercentPerMegabyte,
    /// Quotient of two values of the same unit.
    Ratio,
    /// Plain number without a unit.
    Count,
    /// Amount of data in bytes.
    Bytes,
}

/// Which direction of change is an improvement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Better {
    /// A higher value is better, as for throughput.
    Higher,
    /// A lower value is better, as for latency.
    Lower,
    /// The measure is descriptive only.
    Neither,
}

/// A measure over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Name, in the form of a [`Measure`]'s.
    pub name: String,
    /// Unit of `values`.
    pub unit: Unit,
    /// Seconds from the start of the window to the end of the first sample.
    pub first: f64,
    /// Seconds between two samples.
    pub step: f64,
    /// Samples in the order of time.
    pub values: Vec<f64>,
}

impl Measure {
    /// Creates a measure that is not a statistic and has no interval.
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

    /// Sets the number of samples.
    #[must_use]
    pub fn of(mut self, samples: u64) -> Measure {
        self.samples = samples;
        self
    }
}

impl Unit {
    /// Returns the symbol that follows a value.
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
