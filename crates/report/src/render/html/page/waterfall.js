// The slowest requests, each as its way through the layers; a click shows its points.

const ROWS_AT_FIRST = 16;

function runWaterfall(parent, run) {
  const longest = most(run.slowest.map((request) => request.total));
  const rows = add(parent, "div", "waterfall");
  const repaint = () => {
    for (const part of rows.querySelectorAll(".segment")) part.hidden = hiddenLayers.has(part.dataset.key);
  };
  layerChanges.push(repaint);
  const show = (requests) => {
    for (const request of requests) waterfallRow(rows, request, longest, new Map(run.middle));
    repaint();
  };
  show(run.slowest.slice(0, ROWS_AT_FIRST));
  const axisBox = add(parent, "div", "waterfall-axis");
  const drawAxis = () => {
    axisBox.replaceChildren();
    barAxis(axisBox, longest, false);
  };
  drawAxis();
  redraws.push(drawAxis);
  const rest = run.slowest.slice(ROWS_AT_FIRST);
  add(parent, "p", "note", "Click a request to see its points.");
  if (rest.length === 0) return;
  const more = add(parent, "button", "more", `Show ${plural(rest.length, "more request")}`);
  more.type = "button";
  more.addEventListener("click", () => {
    show(rest);
    more.remove();
  });
}

function waterfallRow(rows, request, longest, middle) {
  const row = add(rows, "button", "request");
  row.type = "button";
  row.setAttribute("aria-expanded", "false");
  row.dataset.number = request.number;
  const label = add(row, "span", "label", `#${request.number} ${request.operation}`);
  add(label, "small", "", `${size(request.length)} at ${size(request.offset)}`);
  const track = add(row, "span", "track");
  let at = 0;
  for (const [key, ns] of request.layers) {
    waterfallSegment(track, request, key, at, ns, longest);
    at += ns;
  }
  add(row, "span", "sum", duration(request.total));
  let detail = null;
  row.addEventListener("click", () => {
    if (detail) {
      detail.remove();
      detail = null;
    } else {
      detail = requestDetail(request, middle);
      row.after(detail);
    }
    row.setAttribute("aria-expanded", detail !== null);
  });
}

// A layer that came out negative is drawn back from where it began.
function waterfallSegment(track, request, key, at, ns, longest) {
  if (ns === 0) return;
  const part = add(track, "span", ns < 0 ? "segment negative" : "segment");
  paintLayer(part, key);
  part.style.left = `${((Math.min(at, at + ns) / longest) * 100).toFixed(4)}%`;
  part.style.width = `${((Math.abs(ns) / longest) * 100).toFixed(4)}%`;
  tooltipOf(part, (tip) => {
    add(tip, "div", "title", `Request ${request.number}: ${duration(request.total)}`);
    tooltipRow(tip, layerColour(key), LAYERS.get(key)?.name || key, duration(ns));
    add(tip, "div", "muted", `from ${duration(at)}, ${percent(ns / request.total)} of the request`);
    if (isGap(key)) add(tip, "div", "muted", NOT_TRACED);
  });
}

// `middle` is what an ordinary request spends in each layer.
function requestDetail(request, middle) {
  const box = element("div", "detail");
  const batch = request.batch > 1 ? `, one of ${request.batch} with that kick` : "";
  add(box, "p", "note", `${request.delivery}${batch}; host I/O: ${request.host}`);
  const tables = add(box, "div", "beside");
  let before = 0;
  detailTable(tables, "points", ["Point", "at (\u00b5s)", "since the one before (\u00b5s)"], request.points.map(([name, at]) => {
    const cells = ["", name, at, at - before];
    before = at;
    return cells;
  }));
  const above = middle.size > 0 ? ["above the median request (\u00b5s)"] : [];
  detailTable(tables, "request-layers", ["Layer", "time (\u00b5s)", ...above], request.layers.map(([key, ns]) => [
    layerColour(key), LAYERS.get(key)?.name || key, ns, ...above.map(() => ns - (middle.get(key) || 0)),
  ]));
  return box;
}

// Rows are [colour, words, ns...].
function detailTable(parent, className, headings, rows) {
  const table = add(parent, "table", className);
  const head = add(add(table, "thead"), "tr");
  headings.forEach((text, i) => add(head, "th", i > 0 ? "number" : "", text));
  const body = add(table, "tbody");
  for (const [paint, words, ...times] of rows) {
    const row = add(body, "tr");
    const cell = add(row, "td");
    if (paint) swatch(cell, paint);
    cell.append(words);
    for (const ns of times) add(row, "td", "number", (ns / 1000).toFixed(2));
  }
}
