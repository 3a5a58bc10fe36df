//! The common shape of all reports: the answer, then the picture, the tables, and the setup.

/// A medium of reports, whose pieces can be joined.
pub(crate) trait Sheet {
    /// Appends a piece.
    fn append(&mut self, piece: Self);
}

/// A report in parts. Renderers may write the parts in any order; the report shows them in the
/// order of the fields.
pub(crate) struct Layout<S> {
    /// The sentence that says what limits the run, with its evidence; then the title, and warnings
    /// that make the answer doubtful.
    pub(crate) answer: S,
    /// Bars of layers or points, curves, and the sentences that belong to them.
    pub(crate) picture: S,
    /// The figures.
    pub(crate) table: S,
    /// Machines, programs and settings; how far the figures can be trusted; problems.
    pub(crate) environment: S,
}

impl<S: Sheet> Layout<S> {
    /// Creates a report of empty parts.
    pub(crate) fn new(empty: impl Fn() -> S) -> Layout<S> {
        Layout {
            answer: empty(),
            picture: empty(),
            table: empty(),
            environment: empty(),
        }
    }

    /// Returns the report in one piece.
    pub(crate) fn finish(self) -> S {
        let mut whole = self.answer;
        for part in [self.picture, self.table, self.environment] {
            whole.append(part);
        }
        whole
    }
}
