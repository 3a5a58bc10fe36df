//! Stages, stamps, histograms and the trace ring.
