// Charts on canvases: uPlot with the page's colours, as wide as their box, drawn again when the
// theme changes.

const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

// `options()` gives uPlot's options without a size, and the data. Returns {box, plot(), redraw()}.
function plotIn(parent, height, options) {
  const box = add(parent, "div", "plot");
  let plot = null;
  function redraw() {
    if (plot) plot.destroy();
    const { opts, data } = options();
    plot = new uPlot({ ...opts, width: Math.max(box.clientWidth, 200), height }, data, box);
    // For tests and for people at the console.
    box.plot = plot;
  }
  redraw();
  redraws.push(redraw);
  let width = box.clientWidth;
  new ResizeObserver(() => {
    if (box.clientWidth === width) return;
    width = box.clientWidth;
    plot.setSize({ width: Math.max(width, 200), height });
  }).observe(box);
  return { box, redraw, plot: () => plot };
}

function axis(options) {
  const grid = { stroke: colour("--grid"), width: 1 };
  return { size: 32, stroke: colour("--muted"), font: FONT, labelFont: FONT, grid, ticks: { ...grid, size: 5 }, ...options };
}

// Where a log axis has marks: at 1, 2 and 5 of each power of ten, at powers alone where those would
// be too many, at even steps within less than a decade.
function logSplits(plot, i, min, max) {
  if (max / min < 8) return steps(max, 6).filter((at) => at >= min);
  const parts = max / min < 2e4 ? [1, 2, 5] : [1];
  const out = [];
  for (let power = 10 ** Math.floor(Math.log10(min)); power <= max; power *= 10) {
    out.push(...parts.map((part) => part * power).filter((at) => at >= min && at <= max));
  }
  return out;
}

const logAxis = (options) => axis({ values: timeTicks, splits: logSplits, filter: (plot, splits) => splits, ...options });

const timeTicks = (plot, values) => values.map((ns) => (ns === null ? "" : tick(ns)));

// Calls `at(event, x, y)` with values under the pointer, and hides the tooltip where it leaves.
function pointing(box, plot, at) {
  box.addEventListener("mousemove", (event) => {
    const over = plot().over.getBoundingClientRect();
    const [left, top] = [event.clientX - over.left, event.clientY - over.top];
    if (left < 0 || top < 0 || left > over.width || top > over.height) {
      hideTooltip();
      return;
    }
    at(event, plot().posToVal(left, "x"), plot().posToVal(top, "y"));
  });
  box.addEventListener("mouseleave", hideTooltip);
}

// Fills a rectangle given in values, cut to the plot's area.
function fillValues(plot, x0, x1, y0, y1, paint, least = 1) {
  const { left, top, width, height } = plot.bbox;
  const cut = (at, from, length) => Math.min(Math.max(at, from), from + length);
  const a = cut(plot.valToPos(x0, "x", true), left, width);
  const b = cut(plot.valToPos(x1, "x", true), left, width);
  const c = cut(plot.valToPos(y0, "y", true), top, height);
  const d = cut(plot.valToPos(y1, "y", true), top, height);
  if (b <= left || a >= left + width) return;
  plot.ctx.fillStyle = paint;
  plot.ctx.fillRect(a, Math.min(c, d), Math.max(b - a, least), Math.abs(d - c));
}
