//! An HTML report in a browser.

use fathom_report::analysis::Analysis;
use fathom_report::render::html::render;

use super::browser::Browser;

/// A page in a browser; its file exists until this value is dropped.
pub struct Page {
    pub browser: Browser,
    _dir: tempfile::TempDir,
}

/// Opens the page of these runs.
pub fn show(runs: &[(String, Analysis)]) -> Page {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.html");
    std::fs::write(&file, render(runs)).unwrap();
    let mut browser = Browser::start(1400, 1000);
    browser.dark(false);
    browser.open(&file);
    Page { browser, _dir: dir }
}

pub fn one(run: Analysis) -> Vec<(String, Analysis)> {
    vec![("a.run".into(), run)]
}

impl Page {
    /// Returns the cells of a table, by rows.
    pub fn table(&mut self, id: &str) -> Vec<Vec<String>> {
        let rows = self.browser.eval(&format!(
            "[...document.querySelectorAll('#{id} tbody tr')].map((row) => \
             [...row.cells].map((cell) => cell.textContent))"
        ));
        serde_json::from_value(rows).unwrap()
    }

    /// Returns the tooltip's text; None if no tooltip is shown.
    pub fn tooltip(&mut self) -> Option<String> {
        let tip = "document.querySelector('.tooltip')";
        let shown = self.browser.eval(&format!("!{tip}.hidden")) == true;
        shown.then(|| self.browser.text(&format!("{tip}.innerText")))
    }

    pub fn count(&mut self, selector: &str) -> u64 {
        let count = format!("document.querySelectorAll(`{selector}`).length");
        self.browser.eval(&count).as_u64().unwrap()
    }

    /// Moves the pointer to a value in a chart on a canvas.
    pub fn point_at(&mut self, chart: &str, x: f64, y: f64) {
        let plot = format!("document.querySelector('[data-chart={chart}] .plot').plot");
        let left = self.browser.number(&format!("{plot}.valToPos({x}, 'x')"));
        let top = self.browser.number(&format!("{plot}.valToPos({y}, 'y')"));
        self.browser.point(&format!("{plot}.over"), left, top);
    }

    /// Asserts that nothing went wrong in the page.
    pub fn assert_no_complaints(&mut self) {
        assert_eq!(self.browser.complaints(), [""; 0]);
    }
}
