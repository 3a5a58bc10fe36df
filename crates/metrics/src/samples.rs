//! Writes the samples of metric families.

use super::form::Form;
use super::measured::Measured;
use super::scale::{SCHEMA, STAGE, Scale, TOTAL, ZERO};
use fathom_trace::Occupied;
use prometheus_client::encoding::{
    EncodeLabel, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NativeHistogram,
    NativeHistogramBuckets, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt::{self, Write};
use std::iter;

/// A label's name and value.
pub type Label<'a> = (&'static str, &'a str);

/// The style in which all samples of a page are written.
#[derive(Clone, Copy)]
pub struct Style<'a> {
    pub scale: &'a Scale,
    pub form: Form,
}

/// Writes the samples of a family for one disk or process.
pub struct Samples<'a, 'e> {
    to: &'a mut MetricEncoder<'e>,
    style: Style<'a>,
    /// The label of the disk or process.
    of: Label<'a>,
}

/// The labels of a sample.
enum Labels<'a> {
    Each(Label<'a>, &'a [Label<'a>]),
    /// All labels as the text of a line.
    Joined(String),
}

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder) -> fmt::Result {
        match self {
            Labels::Each(of, more) => {
                let mut all = iter::once(of).chain(*more);
                all.try_for_each(|label| label.encode(encoder.encode_label()))
            }
            // A label's name is written without escaping.
            Labels::Joined(text) => encoder.encode_label().encode_label_key()?.write_str(text),
        }
    }
}

impl<'a, 'e> Samples<'a, 'e> {
    pub fn new(to: &'a mut MetricEncoder<'e>, style: Style<'a>, of: Label<'a>) -> Self {
        Samples { to, style, of }
    }

    /// Writes a counter.
    pub fn counter(&mut self, labels: &[Label<'_>], count: u64) -> fmt::Result {
        let labels = self.labels(labels);
        let mut to = self.to.encode_family(&labels)?;
        to.encode_counter::<NoLabelSet, u64, f64>(&count, None)
    }

    /// Writes a counter of seconds, from a time in nanoseconds.
    pub fn seconds(&mut self, labels: &[Label<'_>], ns: u64) -> fmt::Result {
        let labels = self.labels(labels);
        let mut to = self.to.encode_family(&labels)?;
        to.encode_counter::<NoLabelSet, f64, f64>(&(ns as f64 / 1e9), None)
    }

    /// Writes a gauge.
    pub fn gauge(&mut self, labels: &[Label<'_>], value: u64) -> fmt::Result {
        let labels = self.labels(labels);
        self.to.encode_family(&labels)?.encode_gauge(&value)
    }

    /// Writes an info metric, whose information is in the labels.
    pub fn info(&mut self, labels: &[Label<'_>]) -> fmt::Result {
        // The encoder of the text format expects these as a separate label set.
        self.to.encode_info(&self.labels(labels))
    }

    /// Writes a histogram of durations from several workers, in total or in one stage.
    pub fn latency<'h>(
        &mut self,
        labels: &[Label<'_>],
        histograms: impl Iterator<Item = &'h Occupied> + Clone,
        is_total: bool,
    ) -> fmt::Result {
        let scale = self.style.scale;
        let spread = scale.spread(histograms.clone(), is_total);
        let bounds: &[f64] = if is_total { &TOTAL } else { &STAGE };
        let classic: Vec<_> = spread.classic(bounds).collect();
        let (sum, count) = (spread.sum, spread.count);
        let labels = self.labels_of_lines(labels);
        let mut to = self.to.encode_family(&labels)?;
        if self.style.form.is_text() {
            return to.encode_histogram::<NoLabelSet>(sum, count, &classic, None);
        }
        let native = scale.native(histograms);
        let (spans, deltas) = native.spans();
        let native = NativeHistogram {
            schema: SCHEMA,
            zero_threshold: ZERO,
            zero_count: native.zeroes,
            negative: NativeHistogramBuckets {
                spans: &[],
                deltas: &[],
            },
            positive: NativeHistogramBuckets {
                spans: &spans,
                deltas: &deltas,
            },
            created: None,
        };
        to.encode_histogram_with_native::<NoLabelSet>(sum, count, &classic, None, native)
    }

    /// Writes a histogram of batch sizes by powers of two, where the last bucket is unbounded.
    pub fn sizes(&mut self, labels: &[Label<'_>], counts: &[u64], sum: u64) -> fmt::Result {
        let bounds = (0..counts.len()).map(|size| match size + 1 == counts.len() {
            true => f64::INFINITY,
            false => (1u64 << size) as f64,
        });
        let buckets: Vec<_> = bounds.zip(counts.iter().copied()).collect();
        let labels = self.labels_of_lines(labels);
        let mut to = self.to.encode_family(&labels)?;
        let count = counts.iter().sum();
        to.encode_histogram::<NoLabelSet>(sum as f64, count, &buckets, None)
    }

    fn labels<'l>(&self, more: &'l [Label<'l>]) -> Labels<'l>
    where
        'a: 'l,
    {
        Labels::Each(self.of, more)
    }

    /// Returns labels for a histogram with its many lines, formatted only once if possible.
    ///
    /// Otherwise the library would format each label on every line.
    fn labels_of_lines<'l>(&self, more: &'l [Label<'l>]) -> Labels<'l>
    where
        'a: 'l,
    {
        let all = iter::once(&self.of).chain(more);
        let is_plain = |(_, value): &Label<'_>| !value.contains(['\\', '"', '\n']);
        if !self.style.form.is_text() || !all.clone().all(is_plain) {
            return self.labels(more);
        }
        let mut text = String::new();
        for (name, value) in all {
            let comma = if text.is_empty() { "" } else { "," };
            text.extend([comma, name, "=\"", value, "\""]);
        }
        Labels::Joined(text)
    }
}

/// A metric of each disk.
#[derive(Debug)]
pub struct Family {
    pub name: &'static str,
    /// The unit, which Prometheus makes a part of the name.
    pub unit: Option<Unit>,
    pub kind: MetricType,
    pub help: &'static str,
    /// Writes the samples of one disk.
    pub samples: fn(&Measured, &mut Samples<'_, '_>) -> fmt::Result,
}
