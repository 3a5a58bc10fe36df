//! A real Prometheus, which `make setup` has unpacked or which is in PATH.

use super::{Kept, as_arg, eventually};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns the path of `prometheus` or `promtool`.
pub fn program(name: &str) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let unpacked = cache
        .or_else(home)
        .map(|cache| cache.join("fathom/prometheus/usr/bin").join(name));
    unpacked
        .filter(|path| path.exists())
        .unwrap_or_else(|| name.into())
}

pub fn curl(args: &[&str]) -> String {
    let output = Command::new("curl")
        .args(["--silent", "--show-error", "--fail", "--max-time", "60"])
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A Prometheus that scrapes an address and evaluates its rules every second.
pub struct Prometheus {
    _process: Kept,
    pub at: String,
}

impl Prometheus {
    pub fn start(dir: &Path, target: &str, more: &[&str]) -> Prometheus {
        Prometheus::with_rules(dir, target, &[], more)
    }

    /// Starts Prometheus with these files of rules, whose paths are absolute.
    pub fn with_rules(dir: &Path, target: &str, rules: &[String], more: &[&str]) -> Prometheus {
        let config = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\n\
             rule_files: {rules:?}\n\
             scrape_configs: [{{ job_name: fathom, static_configs: [{{ targets: ['{target}'] }}] }}]\n"
        );
        fs::write(dir.join("prometheus.yml"), config).unwrap();
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let at = port.to_string();
        let process = Kept::spawn(
            Command::new(program("prometheus"))
                .arg(format!(
                    "--config.file={}",
                    as_arg(&dir.join("prometheus.yml"))
                ))
                .arg(format!("--storage.tsdb.path={}", as_arg(&dir.join("data"))))
                .arg(format!("--web.listen-address={at}"))
                .args(more),
        );
        Prometheus {
            _process: process,
            at,
        }
    }

    /// Returns the series that a query finds now, with `metric` and `value`.
    ///
    /// Returns `None` if Prometheus does not reply yet.
    pub fn ask(&self, query: &str) -> Option<Vec<Value>> {
        let url = format!("http://{}/api/v1/query", self.at);
        let query = format!("query={query}");
        let args = ["-s", "--get", "--data-urlencode", &query, &url];
        let output = Command::new("curl").args(args).output().unwrap();
        let answer: Value = serde_json::from_slice(&output.stdout).ok()?;
        assert_ne!(answer["status"], "error", "{query}: {answer}");
        answer["data"]["result"].as_array().cloned()
    }

    /// Waits until a query finds values, and returns them.
    pub fn query(&self, query: &str) -> Vec<f64> {
        eventually(query, || {
            let values: Vec<_> = self.ask(query)?.iter().map(value).collect();
            (!values.is_empty()).then_some(values)
        })
    }
}

/// Returns the value of a series.
pub fn value(one: &Value) -> f64 {
    one["value"][1].as_str().unwrap().parse().unwrap()
}
