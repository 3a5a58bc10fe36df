//! Builds HTML. Markup is text of this program (`&'static str`). Text from a run is always escaped,
//! so the name of a disk or thread cannot change the structure of the page.

use super::words::{layer_colour, layer_key};
use crate::analysis::Layer;
use crate::render::layout::Sheet;
use crate::render::text::{clean, percent};

/// A piece of a page.
#[derive(Debug, Default)]
pub(crate) struct Html {
    out: String,
    /// (id, text) of the headings in the navigation.
    headings: Vec<(String, String)>,
}

/// An attribute's name and its value, which is escaped.
pub(crate) type Attribute<'a> = (&'static str, &'a str);

impl Sheet for Html {
    fn append(&mut self, piece: Html) {
        self.out.push_str(&piece.out);
        self.headings.extend(piece.headings);
    }
}

impl Html {
    pub(crate) fn finish(self) -> String {
        self.out
    }

    pub(crate) fn raw(&mut self, markup: &'static str) {
        self.out.push_str(markup);
    }

    pub(crate) fn text(&mut self, text: &str) {
        for c in clean(text).chars() {
            match c {
                '&' => self.out.push_str("&amp;"),
                '<' => self.out.push_str("&lt;"),
                '>' => self.out.push_str("&gt;"),
                '"' => self.out.push_str("&quot;"),
                '\'' => self.out.push_str("&#39;"),
                c => self.out.push(c),
            }
        }
    }

    pub(crate) fn open(&mut self, name: &'static str, attributes: &[Attribute]) {
        self.out.push('<');
        self.out.push_str(name);
        for (name, value) in attributes {
            self.out.push(' ');
            self.out.push_str(name);
            self.out.push_str("=\"");
            self.text(value);
            self.out.push('"');
        }
        self.out.push('>');
    }

    pub(crate) fn close(&mut self, name: &'static str) {
        self.out.push_str("</");
        self.out.push_str(name);
        self.out.push('>');
    }

    /// Adds an element that contains only text.
    pub(crate) fn element(&mut self, name: &'static str, attributes: &[Attribute], text: &str) {
        self.open(name, attributes);
        self.text(text);
        self.close(name);
    }

    /// Adds a small square in the colour of a layer or group; `variable` is a name in palette.css.
    pub(crate) fn swatch(&mut self, variable: &str) {
        let style = format!("--c:var({variable})");
        self.element("i", &[("class", "swatch"), ("style", &style)], "");
    }

    /// Adds an empty element in which a script draws; `kind` is a chart's name in page/main.js.
    /// Without scripts the element stays empty, and tables show the same figures.
    pub(crate) fn chart(&mut self, kind: &'static str, run: usize) {
        let run = run.to_string();
        let attributes = [("class", "chart"), ("data-chart", kind), ("data-run", &run)];
        self.element("div", &attributes, "");
        self.raw("\n");
    }

    /// Adds a heading with an id for links; `short` is its text in the navigation. With a prefix,
    /// the heading belongs to one of several runs and is not in the navigation.
    pub(crate) fn heading(&mut self, prefix: &str, (id, short): (&str, &str), text: &str) {
        let id = format!("{prefix}{id}");
        self.element("h2", &[("id", &id)], text);
        self.raw("\n");
        if prefix.is_empty() {
            self.headings.push((id, short.to_owned()));
        }
    }

    /// Adds the heading of one of several runs.
    pub(crate) fn run_heading(&mut self, id: &str, letter: &str, name: &str) {
        self.element("h1", &[("id", id)], &format!("{letter}: {name}"));
        self.raw("\n");
        self.headings.push((id.to_owned(), letter.to_owned()));
    }

    pub(crate) fn headings(&self) -> &[(String, String)] {
        &self.headings
    }

    /// Adds a document in a frame of the page's width, with its own names, styles and scripts. The
    /// document must come from this program and must already escape its text.
    pub(crate) fn document(&mut self, title: &str, height: u32, document: &str) {
        let height = height.to_string();
        self.open("iframe", &[("title", title), ("height", &height)]);
        self.out.pop();
        self.out.push_str(" srcdoc=\"");
        let document = document.replace('&', "&amp;").replace('"', "&quot;");
        self.out.push_str(&document);
        self.out.push_str("\"></iframe>");
    }

    pub(crate) fn note(&mut self, text: &str) {
        self.element("p", &[("class", "note")], text);
        self.raw("\n");
    }
}

/// A cell of a table.
#[derive(Clone, Debug)]
pub(crate) enum Cell {
    Text(String),
    /// Text that stays on one line, even if it has hyphens.
    Name(String),
    /// A number, aligned to the right.
    Number(String),
    /// A number and smaller lines below it, each with a CSS class.
    Figure(String, Vec<(&'static str, String)>),
    /// Text after a square in a colour of palette.css.
    Coloured(String, String),
    /// A layer's name and colour, hatched if it is a gap. Charts highlight the row with the layer.
    Layer(Layer, bool),
    /// A share of 1, with a bar in the row's colour; the column's greatest share has the longest
    /// bar.
    Share(f64),
    /// Names of events, calls or files.
    Code(String),
}

/// A row and its CSS class (`""` for most).
#[derive(Debug)]
struct Row {
    class: &'static str,
    cells: Vec<Cell>,
}

/// A table of headings and rows. A column is numeric if its first cell is.
#[derive(Debug)]
pub(crate) struct Table {
    id: String,
    headings: Vec<String>,
    rows: Vec<Row>,
}

impl Table {
    /// Creates a table; `id` is its id in the page, for tests and links.
    pub(crate) fn new(id: String, headings: &[&str]) -> Table {
        Table {
            id,
            headings: headings.iter().map(|&text| text.to_owned()).collect(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn add_column(&mut self, heading: impl Into<String>) {
        self.headings.push(heading.into());
    }

    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        self.classed("", cells);
    }

    pub(crate) fn classed(&mut self, class: &'static str, cells: Vec<Cell>) {
        self.rows.push(Row { class, cells });
    }

    /// Adds rows, the last of which is the total.
    pub(crate) fn totalled(&mut self, rows: Vec<Vec<Cell>>) {
        let last = rows.len().saturating_sub(1);
        for (i, cells) in rows.into_iter().enumerate() {
            self.classed(if i == last { "total" } else { "" }, cells);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(crate) fn show(&self, html: &mut Html) {
        html.raw("<div class=\"scroll\">");
        html.open("table", &[("id", &self.id)]);
        html.raw("<thead><tr>");
        for (i, heading) in self.headings.iter().enumerate() {
            let first = self.rows.first().and_then(|row| row.cells.get(i));
            let number = matches!(
                first,
                Some(Cell::Number(_) | Cell::Figure(..) | Cell::Share(_))
            );
            let class: &[Attribute] = if number { &[("class", "number")] } else { &[] };
            html.element("th", class, heading);
        }
        html.raw("</tr></thead>\n<tbody>\n");
        for row in &self.rows {
            row.open(html);
            for (i, cell) in row.cells.iter().enumerate() {
                match cell {
                    Cell::Share(share) => self.share(html, row, i, *share),
                    cell => cell.show(html),
                }
            }
            html.raw("</tr>\n");
        }
        html.raw("</tbody></table></div>\n");
    }

    fn share(&self, html: &mut Html, row: &Row, column: usize, share: f64) {
        let shares = self
            .rows
            .iter()
            .filter_map(|row| match row.cells.get(column) {
                Some(Cell::Share(share)) => Some(*share),
                _ => None,
            });
        let most = shares.fold(0.0, f64::max).max(f64::MIN_POSITIVE);
        let mut style = format!("--share:{:.4}", (share / most).clamp(0.0, 1.0));
        if let Some(variable) = row.cells.first().and_then(Cell::colour) {
            style.push_str(&format!(";--c:var({variable})"));
        }
        html.raw("<td class=\"number share\">");
        html.element("i", &[("class", "bar"), ("style", &style)], "");
        html.text(&percent(share));
        html.close("td");
    }
}

impl Row {
    fn open(&self, html: &mut Html) {
        let (class, key) = match self.cells.first() {
            Some(Cell::Layer(layer, true)) => ("gap", Some(layer_key(*layer))),
            Some(Cell::Layer(layer, false)) => (self.class, Some(layer_key(*layer))),
            _ => (self.class, None),
        };
        let attributes = [("class", Some(class)), ("data-key", key.as_deref())];
        let told = attributes
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        let told: Vec<Attribute> = told.filter(|(_, value)| !value.is_empty()).collect();
        html.open("tr", &told);
    }
}

impl Cell {
    /// Returns the cell's colour: a variable in palette.css.
    fn colour(&self) -> Option<String> {
        match self {
            Cell::Coloured(variable, _) => Some(variable.clone()),
            Cell::Layer(layer, _) => Some(layer_colour(*layer)),
            _ => None,
        }
    }

    fn named(&self, html: &mut Html, text: &str) {
        html.raw("<td class=\"name\">");
        if let Some(variable) = self.colour() {
            html.swatch(&variable);
        }
        html.text(text);
        html.close("td");
    }

    fn show(&self, html: &mut Html) {
        match self {
            Cell::Text(text) => html.element("td", &[], text),
            Cell::Number(text) => html.element("td", &[("class", "number")], text),
            Cell::Figure(text, notes) => {
                html.open("td", &[("class", "number")]);
                html.text(text);
                for (class, note) in notes {
                    html.element("small", &[("class", class)], note);
                }
                html.close("td");
            }
            Cell::Name(text) | Cell::Coloured(_, text) => self.named(html, text),
            Cell::Layer(layer, is_gap) => self.named(html, layer.name(*is_gap)),
            Cell::Share(share) => html.element("td", &[("class", "number")], &percent(*share)),
            Cell::Code(text) => {
                html.raw("<td>");
                html.element("code", &[], text);
                html.close("td");
            }
        }
    }
}

/// Returns texts as numeric cells.
pub(crate) fn numbers(column: Vec<String>) -> Vec<Cell> {
    column.into_iter().map(Cell::Number).collect()
}

/// Turns columns of equal height into rows.
pub(crate) fn rows(columns: Vec<Vec<Cell>>) -> Vec<Vec<Cell>> {
    let height = columns.iter().map(Vec::len).min().unwrap_or(0);
    let mut columns: Vec<_> = columns.into_iter().map(Vec::into_iter).collect();
    let row = |_| columns.iter_mut().filter_map(Iterator::next).collect();
    (0..height).map(row).collect()
}

/// Returns JSON that is safe in a `<script>` element: it can neither end the element nor start a
/// comment.
pub(crate) fn json_in_script<T: serde::Serialize>(value: &T) -> String {
    // The value has only string keys, so serialization cannot fail.
    let text = serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned());
    text.replace('<', "\\u003c").replace('>', "\\u003e")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_from_a_run_is_text() {
        let mut html = Html::default();
        html.open("p", &[("title", "a\" onload=\"x")]);
        html.text("</p><script>alert('1')</script>\u{202e}&amp;");
        assert_eq!(
            html.finish(),
            "<p title=\"a&quot; onload=&quot;x\">&lt;/p&gt;&lt;script&gt;alert(&#39;1&#39;)\
             &lt;/script&gt;\u{fffd}&amp;amp;"
        );
    }

    #[test]
    fn no_string_ends_a_script() {
        let told = json_in_script(&["</script><!--<script>", "\u{2028}"]);
        assert!(!told.contains(['<', '>']));
        let again: Vec<String> = serde_json::from_str(&told).unwrap();
        assert_eq!(again, ["</script><!--<script>", "\u{2028}"]);
    }

    #[test]
    fn columns_become_rows() {
        let column = |texts: [&str; 2]| numbers(texts.map(str::to_owned).to_vec());
        let rows = rows(vec![column(["1", "2"]), column(["3", "4"])]);
        assert_eq!(rows.len(), 2);
        assert!(matches!(&rows[1][..], [Cell::Number(a), Cell::Number(b)] if a == "2" && b == "4"));
        assert!(super::rows(vec![]).is_empty());
    }
}
