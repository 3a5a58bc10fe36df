// Requests by the time of their start and their latency.

// The upper end of a row; rows rise by a constant step within a power of two.
function rowEnd(latency, row) {
  if (row + 1 < latency.length) return latency[row + 1];
  const step = row > 0 ? latency[row] - latency[row - 1] : latency[row] / 4;
  return latency[row] + Math.max(step, 1);
}

// A colour between those of the theme for a count, by its logarithm.
function heatPaint(most) {
  const stops = ["--heat-0", "--heat-1", "--heat-2"].map((name) => hexParts(colour(name)));
  return (count) => {
    const at = most > 1 ? (Math.log(count) / Math.log(most)) * 2 : 2;
    const low = Math.min(Math.floor(at), 1);
    const parts = stops[low].map((part, i) => Math.round(part + (stops[low + 1][i] - part) * (at - low)));
    return `rgb(${parts.join(",")})`;
  };
}

function heatKey(parent, most) {
  const key = add(parent, "div", "heat-key");
  add(key, "span", "", "1 request");
  add(key, "i", "ramp");
  add(key, "span", "", number(most));
}

function runHeat(parent, run) {
  const heat = run.heat;
  const fullest = most(heat.cells.map(([, , count]) => count));
  const begin = heat.start[0];
  const end = heat.start[heat.start.length - 1] + heat.column_ns;
  const least = Math.max(heat.latency[0], 1);
  const greatest = rowEnd(heat.latency, heat.latency.length - 1);
  const cells = new Map(heat.cells.map(([column, row, count]) => [`${column} ${row}`, count]));
  heatKey(parent, fullest);
  const chart = plotIn(parent, 320, () => ({
    opts: {
      legend: { show: false },
      cursor: { points: { show: false }, drag: { x: true, y: true, uni: 20 } },
      scales: {
        x: { time: false, range: (u, min, max) => (min === null ? [begin, end] : [min, max]) },
        y: { distr: 3, range: (u, min, max) => (min === null ? [least, greatest] : [min, max]) },
      },
      axes: [axis({ values: timeTicks }), logAxis({ size: 72 })],
      series: [{}, { paths: () => null, points: { show: false } }],
      hooks: { draw: [(plot) => drawHeat(plot, heat, heatPaint(fullest))] },
    },
    data: [[begin, end], [least, greatest]],
  }));
  add(parent, "p", "note", "Each field is a moment and a latency; its colour is the number of requests. Drag to zoom, double-click to zoom out.");
  pointing(chart.box, chart.plot, (event, x, y) => {
    const column = lastNotAbove(heat.start, x);
    const row = lastNotAbove(heat.latency, y);
    const count = column >= 0 && x < heat.start[column] + heat.column_ns && cells.get(`${column} ${row}`);
    if (!count) {
      hideTooltip();
      return;
    }
    showTooltip(event, (tip) => {
      add(tip, "div", "title", plural(count, "request"));
      tooltipRow(tip, "", "latency", `${duration(heat.latency[row])} to ${duration(rowEnd(heat.latency, row))}`);
      tooltipRow(tip, "", "started at", `${duration(heat.start[column])} to ${duration(heat.start[column] + heat.column_ns)}`);
    });
  });
}

function lastNotAbove(sorted, value) {
  let [low, high] = [-1, sorted.length];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle;
  }
  return low;
}

function drawHeat(plot, heat, paint) {
  for (const [column, row, count] of heat.cells) {
    const start = heat.start[column];
    const least = Math.max(heat.latency[row], 1);
    fillValues(plot, start, start + heat.column_ns, least, rowEnd(heat.latency, row), paint(count));
  }
}
