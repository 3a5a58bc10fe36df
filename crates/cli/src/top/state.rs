//! The state of the view.

use super::columns::Column;
use super::feed::News;
use super::look::Look;
use super::model::{Key, Model, Row};
use super::slow::Slow;
use std::time::{Duration, Instant};

/// A dialog in front of the view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Overlay {
    Nothing,
    Help,
    /// Selection of the visible columns.
    Fields,
    /// Selection of the column to sort by.
    Order,
    /// Input line for the filter, with the text so far.
    Filter(String),
    Interval(String),
}

pub struct State {
    pub model: Model,
    pub look: Look,
    pub interval: Duration,
    /// Visible columns, in the order of [`Column::ALL`].
    pub columns: Vec<Column>,
    pub sort: Column,
    pub reversed: bool,
    pub filter: String,
    /// Whether only disks in use are shown.
    pub used_only: bool,
    pub selected: Option<Key>,
    /// The disk whose details are shown, or `None` for the table of all disks.
    pub detail: Option<Key>,
    pub slow: Slow,
    pub overlay: Overlay,
    /// Message for the user, until the next key.
    pub note: Option<String>,
    /// Size of the terminal in columns and lines.
    pub size: (u16, u16),
}

impl State {
    pub fn new(look: Look, interval: Duration) -> State {
        State {
            model: Model::default(),
            look,
            interval,
            columns: Column::usual(),
            sort: Column::Iops,
            reversed: false,
            filter: String::new(),
            used_only: false,
            selected: None,
            detail: None,
            slow: Slow::default(),
            overlay: Overlay::Nothing,
            note: None,
            size: (80, 24),
        }
    }

    pub fn take(&mut self, news: News, now: Instant) {
        match news {
            News::Sample(server, sample) => {
                self.model.take(server, *sample, self.detail.as_ref());
            }
            News::Gone(server, problem) => self.model.lose(&server, problem, now),
            News::Slow(server, disk, told) => {
                let key = Key { server, disk };
                if self.detail.as_ref() == Some(&key) {
                    self.slow = Slow::of(told.as_ref());
                }
            }
        }
    }

    /// Returns the visible disks, in order.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let wanted = self.filter.to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&wanted);
        let mut rows = self.model.rows();
        rows.retain(|row| {
            let disk = row.disk;
            let is_used = disk.front_end.is_some() || disk.nbd_clients + disk.fuse_opens > 0;
            (is_used || !self.used_only)
                && (wanted.is_empty() || has(&disk.name) || has(&row.guest()) || has(&disk.image))
        });
        rows.sort_by(|a, b| self.sort.compare(a, b));
        if self.reversed {
            rows.reverse();
        }
        rows
    }

    /// Returns the index of the selected disk, or 0 if it is not visible.
    pub fn index(&self, rows: &[Row<'_>]) -> usize {
        let selected = self.selected.as_ref();
        let found = selected.and_then(|key| {
            rows.iter()
                .position(|row| row.server == key.server && row.disk.name == key.disk)
        });
        found.unwrap_or(0)
    }

    /// Moves the selection by `by` lines, down if positive.
    pub fn step(&mut self, by: isize) {
        let rows = self.rows();
        let index = self.index(&rows).saturating_add_signed(by);
        let row = rows.get(index.min(rows.len().saturating_sub(1)));
        self.selected = row.map(Row::key);
    }

    pub fn sort_by(&mut self, column: Column) {
        self.reversed = self.sort == column && !self.reversed;
        self.sort = column;
    }

    pub fn set_interval(&mut self, interval: Duration) {
        self.interval = interval;
        self.model.forget_histories();
    }

    /// Shows the details of the selected disk.
    pub fn enter(&mut self) {
        let rows = self.rows();
        let key = rows.get(self.index(&rows)).map(Row::key);
        self.slow = Slow::Unknown;
        (self.selected, self.detail) = (key.clone(), key);
    }
}
