// Cumulative distributions on a log axis: of a run's total and layers, or of several runs' totals.
// The upright axis is linear, or shows every nine of the tail as wide as the one before.

// Points (ns, share of requests up to it), rising; what is not above `least` is at it.
function curvePoints(time, least) {
  const [xs, ys] = [[], []];
  let sum = 0;
  for (const [end, count] of time.buckets) {
    if (end > least && xs.length === 0) {
      xs.push(Math.max(Math.min(time.min, end - 1), least));
      ys.push(sum / time.count);
    }
    sum += count;
    if (end > least) {
      xs.push(end);
      ys.push(sum / time.count);
    }
  }
  return [xs, ys];
}

// The share of requests that took at most `ns`, between points as the line is drawn.
function shareBelow([xs, ys], ns) {
  if (xs.length === 0) return 1;
  if (ns < xs[0]) return 0;
  let [low, high] = [0, xs.length];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= ns) low = middle;
    else high = middle;
  }
  if (low === xs.length - 1) return 1;
  return ys[low] + ((ys[low + 1] - ys[low]) * (ns - xs[low])) / (xs[low + 1] - xs[low]);
}

// Where the axis begins: most of the time is far above the shortest.
function leastShown(curves) {
  const longest = most(curves.map((curve) => curve.time.max));
  const positive = curves.flatMap((curve) => curve.time.buckets.map(([end]) => end).filter((end) => end > 0));
  const least = positive.reduce((a, b) => Math.min(a, b), longest);
  return Math.max(least * 0.8, longest / 1e6, 1);
}

// `curves` are {key, name, colour, variable, width, time}; `isShown` says which of them are, now.
// `bar` is a row above it, for its controls. Returns the chart.
function ecdf(parent, bar, curves, isShown) {
  const least = leastShown(curves);
  const greatest = most(curves.map((curve) => curve.time.max)) * 1.1;
  const points = curves.map((curve) => curvePoints(curve.time, least));
  const count = most(curves.map((curve) => curve.time.count));
  let nines = false;

  choice(bar, [["linear", "linear", "Shares from 0 to 100%"], ["nines", "tail", "As much room for 90 to 99% as for 99 to 99.9%"]], "linear", (value) => {
    nines = value === "nines";
    chart.redraw();
  });

  const chart = plotIn(parent, 360, () => ({
    opts: ecdfOptions(curves, isShown, nines, [least, greatest], count),
    data: uPlot.join(points.map(([xs, ys]) => [xs, ys.map((y) => (nines ? Math.max(1 - y, 0.5 / count) : y))])),
  }));
  add(parent, "p", "note", "Share of requests that took at most so long. Drag to zoom, double-click to zoom out.");
  pointing(chart.box, chart.plot, (event, ns) => showTooltip(event, (tip) => {
    add(tip, "div", "title", `at most ${duration(ns)}`);
    curves.forEach((curve, i) => {
      if (!isShown(curve)) return;
      tooltipRow(tip, curve.colour, curve.name, percent(shareBelow(points[i], ns), 2));
    });
  }));
  return chart;
}

function ecdfOptions(curves, isShown, nines, range, count) {
  const upright = nines
    ? { distr: 3, dir: -1, range: [0.5 / count, 1] }
    : { range: [0, 1] };
  const share = (v) => (v === null ? "" : `${Number(((nines ? 1 - v : v) * 100).toPrecision(8))}%`);
  return {
    legend: { show: false },
    cursor: { points: { show: false }, y: false },
    focus: { alpha: 0.25 },
    scales: { x: { time: false, distr: 3, range: (u, min, max) => zoomed(u, min, max, range) }, y: upright },
    axes: [logAxis({}), axis({ size: 64, values: (u, values) => values.map(share), ...(nines ? nineSplits(count) : {}) })],
    series: [{}].concat(curves.map((curve) => ({
      label: curve.name,
      show: isShown(curve),
      stroke: colour(curve.variable),
      width: curve.width,
      spanGaps: true,
      points: { show: false },
    }))),
  };
}

// 0, 50, 90, 99, 99.9% and so on, as shares above.
function nineSplits(count) {
  const splits = [1, 0.5];
  for (let above = 0.1; above >= 0.5 / count; above /= 10) splits.push(above);
  return { splits: () => splits, filter: (u, all) => all };
}

// The whole range where nobody zoomed.
function zoomed(plot, min, max, whole) {
  const data = plot.data[0];
  return min === data[0] && max === data[data.length - 1] ? whole : [min, max];
}

// More curves of layers than that are a tangle.
const MOST_CURVES = 5;

function runEcdf(parent, run) {
  const byMean = run.curves.filter((curve) => curve.layer).sort((a, b) => b.mean - a.mean);
  const greatest = () => byMean.filter((curve) => !hiddenLayers.has(curve.layer)).slice(0, MOST_CURVES);
  let shown = new Set(greatest().map((curve) => curve.layer));
  const curves = run.curves.map((curve) => {
    const variable = curve.layer ? `--l-${curve.layer}` : "--text";
    const width = curve.layer ? 1.5 : 2.5;
    return { key: curve.layer || "total", name: curve.name, time: curve.time, variable, colour: `var(${variable})`, width };
  });
  const bar = add(parent, "div", "controls");
  add(bar, "p", "note", `The total is the thick line. Of the layers that the legend shows, there are the ${MOST_CURVES} with the greatest means.`);
  const chart = ecdf(parent, bar, curves, ({ key }) => key === "total" || shown.has(key));
  layerChanges.push(() => {
    shown = new Set(greatest().map((curve) => curve.layer));
    chart.redraw();
  });
  layerLights.push((key) => {
    const at = shown.has(key) ? curves.findIndex((curve) => curve.key === key) : -1;
    chart.plot().setSeries(at < 0 ? null : at + 1, { focus: true });
  });
}

const RUN_COLOURS = 8;

function compareEcdf(parent) {
  const curves = DATA.runs.flatMap((run, i) => {
    const variable = `--run-${i % RUN_COLOURS}`;
    const name = `${run.letter}: ${run.name}`;
    const total = run.curves.find((curve) => !curve.layer);
    return total ? [{ key: run.letter, name, time: total.time, variable, colour: `var(${variable})`, width: 2 }] : [];
  });
  const hidden = new Set();
  const bar = add(parent, "div", "controls");
  const chart = ecdf(parent, bar, curves, ({ key }) => !hidden.has(key));
  legend(bar, curves, hidden, () => chart.redraw());
}
