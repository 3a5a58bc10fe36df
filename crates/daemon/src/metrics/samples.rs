//! How families write what they have.

use super::measured::Measured;
use super::scale::{SCHEMA, STAGE, Scale, TOTAL, ZERO};
use fathom_trace::Occupied;
use prometheus_client::encoding::{
    EncodeLabel, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NativeHistogram,
    NativeHistogramBuckets, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt;

/// A label's name and value.
pub type Label<'a> = (&'static str, &'a str);

/// Where a family's samples of one disk, or of one process, go.
pub struct Samples<'a, 'e> {
    to: &'a mut MetricEncoder<'e>,
    scale: &'a Scale,
    /// Which disk or process they are of.
    of: Label<'a>,
}

/// Whose samples, and which.
struct Labels<'a> {
    of: Label<'a>,
    more: &'a [Label<'a>],
}

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder) -> fmt::Result {
        self.of.encode(encoder.encode_label())?;
        let mut more = self.more.iter();
        more.try_for_each(|label| label.encode(encoder.encode_label()))
    }
}

impl<'a, 'e> Samples<'a, 'e> {
    pub fn new(to: &'a mut MetricEncoder<'e>, scale: &'a Scale, of: Label<'a>) -> Self {
        Samples { to, scale, of }
    }

    /// What only grows.
    pub fn counter(&mut self, labels: &[Label<'_>], count: u64) -> fmt::Result {
        let labels = self.labels(labels);
        let mut to = self.to.encode_family(&labels)?;
        to.encode_counter::<NoLabelSet, u64, f64>(&count, None)
    }

    /// Likewise a time, of nanoseconds.
    pub fn seconds(&mut self, labels: &[Label<'_>], ns: u64) -> fmt::Result {
        let labels = self.labels(labels);
        let mut to = self.to.encode_family(&labels)?;
        to.encode_counter::<NoLabelSet, f64, f64>(&(ns as f64 / 1e9), None)
    }

    /// What there is now.
    pub fn gauge(&mut self, labels: &[Label<'_>], value: u64) -> fmt::Result {
        let labels = self.labels(labels);
        self.to.encode_family(&labels)?.encode_gauge(&value)
    }

    /// That it is so: the labels say what.
    pub fn info(&mut self, labels: &[Label<'_>]) -> fmt::Result {
        // (The encoder of the text format wants these as a label set of their own.)
        self.to.encode_info(&self.labels(labels))
    }

    /// How long requests took, by several workers; in all, or in one stage.
    pub fn latency<'h>(
        &mut self,
        labels: &[Label<'_>],
        histograms: impl Iterator<Item = &'h Occupied>,
        is_total: bool,
    ) -> fmt::Result {
        let spread = self.scale.spread(histograms, is_total);
        let bounds: &[f64] = if is_total { &TOTAL } else { &STAGE };
        let classic: Vec<_> = spread.classic(bounds).collect();
        let (spans, deltas) = spread.native();
        let native = NativeHistogram {
            schema: SCHEMA,
            zero_threshold: ZERO,
            zero_count: spread.zeroes,
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
        let labels = self.labels(labels);
        let mut to = self.to.encode_family(&labels)?;
        let (sum, count) = (spread.sum, spread.count);
        to.encode_histogram_with_native::<NoLabelSet>(sum, count, &classic, None, native)
    }

    /// How many there were of each size; of these sizes at most, the last any.
    pub fn sizes(&mut self, labels: &[Label<'_>], counts: &[u64], sum: u64) -> fmt::Result {
        let bounds = (0..counts.len()).map(|size| match size + 1 == counts.len() {
            true => f64::INFINITY,
            false => (1u64 << size) as f64,
        });
        let buckets: Vec<_> = bounds.zip(counts.iter().copied()).collect();
        let labels = self.labels(labels);
        let mut to = self.to.encode_family(&labels)?;
        let count = counts.iter().sum();
        to.encode_histogram::<NoLabelSet>(sum as f64, count, &buckets, None)
    }

    fn labels<'l>(&self, more: &'l [Label<'l>]) -> Labels<'l>
    where
        'a: 'l,
    {
        Labels { of: self.of, more }
    }
}

/// A metric of each disk.
pub struct Family {
    pub name: &'static str,
    /// For Prometheus a part of the name.
    pub unit: Option<Unit>,
    pub kind: MetricType,
    pub help: &'static str,
    /// Of one disk.
    pub samples: fn(&Measured, &mut Samples<'_, '_>) -> fmt::Result,
}
