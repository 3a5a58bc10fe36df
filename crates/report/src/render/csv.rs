//! The report as files of comma-separated values (RFC 4180), for other tools.
//!
//! The files are `layers.csv`, `requests.csv` (the slowest requests that were kept), `wiki.csv`,
//! `rounds.csv`, `calls.csv`, `locks.csv`, `qemu.csv` and `overhead.csv`. Times are in ns. A file
//! without rows is left out.

use std::fmt::Write;

use crate::analysis::{Analysis, Distribution, Joined, Layer};

/// A file of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsvFile {
    /// Name of the file, such as `layers.csv`.
    pub name: &'static str,
    /// Contents of the file, with a line of headings.
    pub text: String,
}

/// Renders one run as files.
pub fn render(run: &Analysis) -> Vec<CsvFile> {
    let files = [
        ("layers.csv", layers(run)),
        ("requests.csv", requests(run)),
        ("wiki.csv", wiki(run)),
        ("rounds.csv", rounds(run)),
        ("calls.csv", calls(run)),
        ("locks.csv", locks(run)),
        ("qemu.csv", qemu(run)),
        ("overhead.csv", overhead(run)),
    ];
    files
        .into_iter()
        .filter(|(_, sheet)| sheet.rows > 0)
        .map(|(name, sheet)| CsvFile {
            name,
            text: sheet.text,
        })
        .collect()
}

/// The text of a file, and its number of rows without the headings.
pub(crate) struct Sheet {
    pub(crate) text: String,
    rows: usize,
}

impl Sheet {
    fn new(head: &str) -> Sheet {
        Sheet::with(head.split(',').map(str::to_owned))
    }

    /// Creates a sheet with these headings.
    pub(crate) fn with(head: impl IntoIterator<Item = String>) -> Sheet {
        let (text, rows) = (String::new(), 0);
        let mut sheet = Sheet { text, rows };
        sheet.row(head);
        sheet.rows = 0;
        sheet
    }

    pub(crate) fn row<I: IntoIterator<Item = String>>(&mut self, fields: I) {
        for (index, field) in fields.into_iter().enumerate() {
            if index > 0 {
                self.text.push(',');
            }
            if field.contains([',', '"', '\n', '\r']) {
                let _ = write!(self.text, "\"{}\"", field.replace('"', "\"\""));
            } else {
                self.text.push_str(&field);
            }
        }
        self.text.push_str("\r\n");
        self.rows += 1;
    }
}

const DISTRIBUTION: &str = "count,mean,deviation,min,p50,p90,p99,p999,max";

fn distribution(time: &Distribution) -> Vec<String> {
    let maybe = |ns: Option<i64>| ns.map(|ns| ns.to_string()).unwrap_or_default();
    vec![
        time.count.to_string(),
        time.mean.to_string(),
        time.deviation.to_string(),
        time.min.to_string(),
        maybe(time.p50),
        maybe(time.p90),
        maybe(time.p99),
        maybe(time.p999),
        time.max.to_string(),
    ]
}

/// Returns the JSON name of an enum's value.
fn name<T: serde::Serialize>(value: T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    }
}

fn layers(run: &Analysis) -> Sheet {
    let mut sheet = Sheet::new(&format!(
        "layer,group,{DISTRIBUTION},share,tail_mean,negative"
    ));
    if let Some(exact) = &run.exact {
        for row in &exact.layers {
            let mut fields = vec![name(row.layer), name(row.group)];
            fields.extend(distribution(&row.time));
            fields.push(row.share.to_string());
            fields.push(row.tail_mean.map(|ns| ns.to_string()).unwrap_or_default());
            fields.push(row.negative.to_string());
            sheet.row(fields);
        }
        let mut fields = vec!["total".to_owned(), String::new()];
        fields.extend(distribution(&exact.total));
        fields.extend(["1".into(), String::new(), "0".into()]);
        sheet.row(fields);
    }
    sheet
}

fn requests(run: &Analysis) -> Sheet {
    let layers = Layer::ALL.iter().map(name).collect::<Vec<_>>().join(",");
    let head = format!("number,operation,offset,length,start,total,delivery,batch,host,{layers}");
    let mut sheet = Sheet::new(&head);
    for request in run.exact.iter().flat_map(|exact| &exact.slowest) {
        sheet.row(request_fields(request));
    }
    sheet
}

fn request_fields(request: &Joined) -> Vec<String> {
    let mut fields = vec![
        request.number.to_string(),
        request.operation.to_owned(),
        request.offset.to_string(),
        request.length.to_string(),
        request.start.to_string(),
        request.total.to_string(),
        name(request.delivery),
        request.batch.to_string(),
        name(request.host),
    ];
    for layer in Layer::ALL {
        let times = request.layers.iter().filter(|(of, _)| of == layer);
        let mut times = times.map(|(_, ns)| *ns).peekable();
        let passed = times.peek().is_some();
        let sum: i64 = times.sum();
        fields.push(if passed {
            sum.to_string()
        } else {
            String::new()
        });
    }
    fields
}

fn wiki(run: &Analysis) -> Sheet {
    let mut sheet = Sheet::new("table,layer,ns,control_or_percent");
    if let Some(wiki) = &run.wiki {
        for (layer, ns, control) in &wiki.cumulative {
            let control = control.map(|ns| ns.to_string()).unwrap_or_default();
            sheet.row(["cumulative".into(), layer.clone(), ns.to_string(), control]);
        }
        for (layer, ns, percent) in &wiki.delta {
            sheet.row([
                "delta".into(),
                layer.clone(),
                ns.to_string(),
                percent.to_string(),
            ]);
        }
    }
    sheet
}

fn rounds(run: &Analysis) -> Sheet {
    let mut sheet = Sheet::new("round,on_host,traced,call,operations,mean,wall,errors");
    for round in &run.rounds {
        let Some(benchmark) = &round.benchmark else {
            continue;
        };
        sheet.row([
            round.name.clone(),
            round.on_host.to_string(),
            round.traced.join(" "),
            benchmark.call.clone(),
            benchmark.operations.to_string(),
            benchmark.mean_ns.to_string(),
            benchmark.wall_ns.to_string(),
            benchmark.errors.to_string(),
        ]);
    }
    sheet
}

fn calls(run: &Analysis) -> Sheet {
    let mut sheet = Sheet::new(&format!("pid,tid,thread,call,{DISTRIBUTION},total"));
    for of_thread in &run.calls {
        let thread = &of_thread.thread;
        for call in &of_thread.calls {
            let mut row = |name: String, time: &Distribution, total: i64| {
                let ids = [thread.pid.to_string(), thread.tid.to_string()];
                let mut fields = Vec::from(ids);
                fields.extend([thread.name.clone(), name]);
                fields.extend(distribution(time));
                fields.push(total.to_string());
                sheet.row(fields);
            };
            row(call.name.clone(), &call.time, call.total);
            row(format!("{}_post", call.name), &call.post, call.post_total);
        }
    }
    sheet
}

fn locks(run: &Analysis) -> Sheet {
    let mut sheet = Sheet::new(&format!(
        "pid,tid,thread,address,name,source,{DISTRIBUTION},total"
    ));
    for row in &run.locks {
        let thread = &row.thread;
        let mut fields = vec![
            thread.pid.to_string(),
            thread.tid.to_string(),
            thread.name.clone(),
            format!("{:#x}", row.address),
            row.name.clone().unwrap_or_default(),
            row.source.to_owned(),
        ];
        fields.extend(distribution(&row.time));
        fields.push(row.total.to_string());
        sheet.row(fields);
    }
    sheet
}

fn qemu(run: &Analysis) -> Sheet {
    let mut sheet = Sheet::new(&format!("wiki_event,event,{DISTRIBUTION}"));
    for step in &run.qemu {
        let mut fields = vec![step.wiki.clone(), step.today.clone()];
        fields.extend(distribution(&step.time));
        sheet.row(fields);
    }
    sheet
}

fn overhead(run: &Analysis) -> Sheet {
    let mut sheet = Sheet::new("traced,traced_ns,untraced_ns,difference,low,high,pairs");
    for row in &run.overhead {
        sheet.row([
            row.traced.join(" "),
            row.traced_ns.to_string(),
            row.untraced_ns.to_string(),
            row.difference_ns.to_string(),
            row.low_ns.to_string(),
            row.high_ns.to_string(),
            row.pairs.to_string(),
        ]);
    }
    sheet
}
