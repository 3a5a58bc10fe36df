//! The columns of the table of disks.

use super::model::Row;
use super::words::{megabytes, p99, percent, rate, time_or_dash};
use clap::ValueEnum;
use std::cmp::Ordering;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Column {
    /// Host of the server
    Host,
    /// Process id of the server
    Server,
    /// Name of the disk
    Disk,
    /// Guest that uses the disk
    Guest,
    /// Requests per second
    Iops,
    /// Reads per second
    Reads,
    /// Writes per second
    Writes,
    /// Megabytes read per second
    ReadMb,
    /// Megabytes written per second
    WriteMb,
    /// Requests in flight
    InFlight,
    /// Median latency
    P50,
    /// 99th percentile of the latency
    P99,
    /// Largest latency
    Max,
    /// Time in each stage; sorts by the mean latency
    Stages,
    /// Failed requests per second
    Errors,
    /// CPU time of the threads
    Cpu,
    /// CPU time spent polling
    Polling,
    /// Path of the image
    Image,
    /// Resource that limits the disk
    Hint,
}

impl Column {
    pub const ALL: [Column; 19] = [
        Column::Host,
        Column::Server,
        Column::Disk,
        Column::Guest,
        Column::Iops,
        Column::Reads,
        Column::Writes,
        Column::ReadMb,
        Column::WriteMb,
        Column::InFlight,
        Column::P50,
        Column::P99,
        Column::Max,
        Column::Stages,
        Column::Errors,
        Column::Cpu,
        Column::Polling,
        Column::Image,
        Column::Hint,
    ];

    /// Returns the columns that are visible by default.
    pub fn usual() -> Vec<Column> {
        use Column::{Host, Image, Iops, Max, Polling, Server};
        let more = [Host, Server, Iops, Max, Polling, Image];
        let all = Column::ALL.into_iter();
        all.filter(|column| !more.contains(column)).collect()
    }

    /// Returns the heading of the column.
    pub fn head(self) -> &'static str {
        match self {
            Column::Host => "HOST",
            Column::Server => "SERVER",
            Column::Disk => "DISK",
            Column::Guest => "GUEST",
            Column::Iops => "IOPS",
            Column::Reads => "R/s",
            Column::Writes => "W/s",
            Column::ReadMb => "RMB/s",
            Column::WriteMb => "WMB/s",
            Column::InFlight => "INFL",
            Column::P50 => "p50",
            Column::P99 => "p99",
            Column::Max => "max",
            Column::Stages => "STAGES",
            Column::Errors => "ERR/s",
            Column::Cpu => "CPU%",
            Column::Polling => "POLL%",
            Column::Image => "IMAGE",
            Column::Hint => "LIMITED BY",
        }
    }

    /// Returns a description for the list of columns.
    pub fn meaning(self) -> &'static str {
        match self {
            Column::Host => "host, or socket of the server",
            Column::Server => "process id of the server",
            Column::Disk => "name of the disk",
            Column::Guest => "guest or NBD clients that use the disk",
            Column::Iops => "requests per second, of all kinds",
            Column::Reads => "reads per second",
            Column::Writes => "writes per second",
            Column::ReadMb => "megabytes read per second",
            Column::WriteMb => "megabytes written per second",
            Column::InFlight => "requests in flight",
            Column::P50 => "median latency: half of the requests took no longer",
            Column::P99 => "99 of 100 requests took no longer (<: the maximum of fewer than 1000)",
            Column::Max => "largest latency",
            Column::Stages => "time of requests in each stage",
            Column::Errors => "failed requests per second",
            Column::Cpu => "CPU time of the disk's threads",
            Column::Polling => "part of the time in which the threads poll instead of sleeping",
            Column::Image => "path of the image",
            Column::Hint => "resource that limits the disk",
        }
    }

    /// Returns the minimum and the maximum width.
    pub fn widths(self) -> (usize, usize) {
        match self {
            Column::Host => (8, 30),
            Column::Server => (7, 7),
            Column::Disk => (8, 24),
            Column::Guest => (6, 20),
            Column::Iops
            | Column::Reads
            | Column::Writes
            | Column::ReadMb
            | Column::WriteMb
            | Column::Errors
            | Column::Polling => (5, 5),
            Column::InFlight | Column::Cpu => (4, 4),
            Column::P50 | Column::Max => (6, 6),
            Column::P99 => (7, 7),
            Column::Stages => (8, 24),
            Column::Image => (10, 30),
            Column::Hint => (16, 60),
        }
    }

    /// Returns the rank. On a narrow terminal, columns of the highest rank are omitted first.
    pub fn rank(self) -> u8 {
        match self {
            Column::Disk | Column::Host => 0,
            Column::Reads | Column::Writes | Column::P99 => 1,
            Column::Stages | Column::P50 | Column::InFlight => 2,
            Column::ReadMb | Column::WriteMb => 3,
            Column::Errors | Column::Cpu => 4,
            Column::Guest | Column::Iops => 5,
            Column::Max | Column::Server => 6,
            Column::Hint => 7,
            Column::Polling | Column::Image => 8,
        }
    }

    pub fn is_text(self) -> bool {
        use Column::{Disk, Guest, Hint, Host, Image, Stages};
        matches!(self, Host | Disk | Guest | Hint | Image | Stages)
    }

    /// Returns the text for a disk. The stages are a bar instead.
    pub fn cell(self, row: &Row<'_>) -> String {
        let disk = row.disk;
        let all = &disk.all;
        match self {
            Column::Host => row.server.to_owned(),
            Column::Server => row.pid.to_string(),
            Column::Disk => disk.name.clone(),
            Column::Guest => row.guest(),
            Column::Iops => rate(all.iops),
            Column::Reads => rate(row.iops("read")),
            Column::Writes => rate(row.iops("write")),
            Column::ReadMb => megabytes(row.bytes("read")),
            Column::WriteMb => megabytes(row.bytes("write")),
            Column::InFlight => disk.in_flight.to_string(),
            Column::P50 => time_or_dash(all.p50_us),
            Column::P99 => p99(all.p99_us, all.max_us),
            Column::Max => time_or_dash(all.max_us),
            Column::Stages => String::new(),
            Column::Errors => rate(all.errors_per_second),
            Column::Cpu => percent(disk.cpu_percent),
            Column::Polling => percent(Some(disk.polling_percent)),
            Column::Image => disk.image.clone(),
            Column::Hint if row.is_gone => "(server has ended)".to_owned(),
            Column::Hint => disk.limiter.text.clone(),
        }
    }

    /// Orders two disks: names ascending, figures descending, so that notable disks come first.
    pub fn compare(self, a: &Row<'_>, b: &Row<'_>) -> Ordering {
        let figure = |row: &Row<'_>| -> f64 {
            let all = &row.disk.all;
            match self {
                Column::Iops => all.iops,
                Column::Reads => row.iops("read"),
                Column::Writes => row.iops("write"),
                Column::ReadMb => row.bytes("read"),
                Column::WriteMb => row.bytes("write"),
                Column::InFlight => row.disk.in_flight as f64,
                Column::P50 => all.p50_us.unwrap_or(0.0),
                Column::P99 => all.p99_us.or(all.max_us).unwrap_or(0.0),
                Column::Max => all.max_us.unwrap_or(0.0),
                Column::Stages => all.mean_us.unwrap_or(0.0),
                Column::Errors => all.errors_per_second,
                Column::Cpu => row.disk.cpu_percent.unwrap_or(0.0),
                Column::Polling => row.disk.polling_percent,
                _ => 0.0,
            }
        };
        let text = |row: &Row<'_>| match self {
            Column::Guest => row.guest(),
            Column::Image => row.disk.image.clone(),
            Column::Hint => row.disk.limiter.text.clone(),
            _ => String::new(),
        };
        let order = match self {
            Column::Host => a.server.cmp(b.server),
            Column::Server => a.pid.cmp(&b.pid),
            Column::Disk => Ordering::Equal,
            Column::Guest | Column::Image | Column::Hint => {
                let (a, b) = (text(a), text(b));
                // Empty cells come last.
                a.is_empty().cmp(&b.is_empty()).then(a.cmp(&b))
            }
            _ => figure(b).total_cmp(&figure(a)),
        };
        let names = a.disk.name.cmp(&b.disk.name);
        order.then(names).then(a.server.cmp(b.server))
    }
}

/// Selects the columns that fit into `width`, and returns them with their widths.
///
/// One space separates columns. `rows` determine how wide the text columns need to be.
pub fn fit(wanted: &[Column], width: usize, rows: &[Row<'_>]) -> Vec<(Column, usize)> {
    let most = |column: Column| match column {
        Column::Host | Column::Disk | Column::Guest | Column::Image | Column::Hint => {
            let longest = rows
                .iter()
                .map(|row| column.cell(row).chars().count())
                .max();
            column.widths().1.min(longest.unwrap_or(0))
        }
        other => other.widths().1,
    };
    let least = |columns: &[Column]| -> usize {
        columns
            .iter()
            .map(|column| column.widths().0 + 1)
            .sum::<usize>()
    };
    let mut columns = wanted.to_vec();
    while columns.len() > 1 && least(&columns) > width + 1 {
        let last = columns
            .iter()
            .enumerate()
            .max_by_key(|(_, column)| column.rank());
        let Some(index) = last.map(|(index, _)| index) else {
            break;
        };
        columns.remove(index);
    }
    let mut left = (width + 1).saturating_sub(least(&columns));
    let mut fitted: Vec<_> = columns
        .iter()
        .map(|column| (*column, column.widths().0))
        .collect();
    // The remaining width goes to columns that need it, one character at a time.
    while left > 0 {
        let before = left;
        for (column, width) in &mut fitted {
            if left > 0 && *width < most(*column) {
                *width += 1;
                left -= 1;
            }
        }
        if left == before {
            break;
        }
    }
    fitted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::model::Model;
    use crate::top::samples::{disk, sample};

    #[test]
    fn columns_fit() {
        let usual = Column::usual();
        for width in [1, 20, 79, 80, 120, 200, 300] {
            let fitted = fit(&usual, width, &[]);
            let sum: usize = fitted.iter().map(|(_, width)| width + 1).sum();
            assert!(sum <= width + 1 || fitted.len() == 1, "{width}: {fitted:?}");
            assert_eq!(fitted[0].0, Column::Disk);
        }
        let narrow: Vec<_> = fit(&usual, 80, &[])
            .into_iter()
            .map(|(column, _)| column)
            .collect();
        for column in [
            Column::Reads,
            Column::Guest,
            Column::Stages,
            Column::Cpu,
            Column::Errors,
        ] {
            assert!(narrow.contains(&column), "{narrow:?}");
        }
        assert_eq!(fit(&usual, 200, &[]).len(), usual.len());
    }

    #[test]
    fn each_column_sorts_and_shows() {
        let mut model = Model::default();
        let disks = vec![disk("b", 100.0), disk("a", 5.0), disk("c", 7.0)];
        model.take("s".into(), sample(1, disks), None);
        for column in Column::ALL {
            let mut rows = model.rows();
            rows.sort_by(|a, b| column.compare(a, b));
            let names: Vec<_> = rows.iter().map(|row| &*row.disk.name).collect();
            let expected = match column {
                Column::Iops | Column::Reads | Column::ReadMb => ["b", "c", "a"],
                _ => ["a", "b", "c"],
            };
            assert_eq!(names, expected, "{column:?}");
            assert!(column.cell(&rows[0]).chars().count() <= 60);
        }
    }
}
