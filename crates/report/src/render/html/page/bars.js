// Stacked bars. Those of time compare the guest with the host, those of shares compare all requests
// with the slowest: each is a row of the page's own elements, so that they follow the theme.

// Bars in one scale, with an axis below. `share` makes all of them equally long.
function barChart(parent, bars, share) {
  const box = add(parent, "div", share ? "bars share" : "bars");
  const shown = (bar) => bar.segments.filter((segment) => !hiddenLayers.has(segment.layer));
  function draw() {
    box.replaceChildren();
    const lengths = bars.map((bar) => sumOf(positive(shown(bar))));
    const longest = most(lengths);
    bars.forEach((bar, i) => {
      barRow(box, bar, shown(bar), share ? lengths[i] || 1 : longest, share);
    });
    barAxis(box, longest, share);
  }
  draw();
  redraws.push(draw);
  layerChanges.push(draw);
}

const positive = (segments) => segments.filter((segment) => segment.ns > 0);
const sumOf = (segments) => segments.reduce((sum, segment) => sum + segment.ns, 0);

// Less than that share of a bar makes no difference that can be seen.
const BELOW_TOLD = 0.005;

// What came out below zero has no length; its bar is longer than its figure, and says why.
function barRow(box, bar, segments, scale, share) {
  const row = add(box, "div", "row");
  const label = add(row, "div", "label", bar.label);
  const below = segments.filter((segment) => segment.ns < bar.total * -BELOW_TOLD).map((segment) => segment.name);
  add(label, "small", "", below.length > 0 ? `${bar.note}; below zero: ${below.join(", ")}` : bar.note);
  const track = add(row, "div", "track");
  for (const segment of positive(segments)) {
    const part = add(track, "div", "segment");
    const width = (segment.ns / scale) * 100;
    part.style.width = `${width.toFixed(4)}%`;
    if (segment.layer) paintLayer(part, segment.layer);
    else part.style.backgroundColor = segmentColour(segment);
    part.classList.toggle("gap", segment.untraced);
    if (width > (NARROW.matches ? 10 : 4) && bar.segments.length > 1) {
      part.style.color = inkOn(segmentColour(segment));
      add(part, "span", "", percent(segment.ns / bar.total, 0));
    }
    tooltipOf(part, (tip) => segmentTip(tip, bar, segment));
  }
  const told = add(row, "div", "sum", duration(sumOf(segments)));
  if (!share && bar.against) add(told, "small", "", bar.against);
}

function segmentColour(segment) {
  if (segment.layer) return layerColour(segment.layer);
  return segment.group ? groupColour(segment.group) : "var(--plain)";
}

function segmentTip(tip, bar, segment) {
  add(tip, "div", "title", bar.label);
  tooltipRow(tip, segmentColour(segment), segment.name, duration(segment.ns));
  const group = GROUPS.get(segment.group);
  const of = `${percent(segment.ns / bar.total)} of ${duration(bar.total)}`;
  add(tip, "div", "muted", segment.layer && group ? `${group.name}, ${of}` : of);
  if (segment.untraced) add(tip, "div", "muted", NOT_TRACED);
}

function barAxis(box, longest, share) {
  const scale = add(add(box, "div", "row"), "div", "scale");
  const count = NARROW.matches ? 3 : 8;
  const ticks = share ? [0, 0.25, 0.5, 0.75, 1] : steps(longest, count).map((at) => at / longest);
  for (const at of ticks) {
    const mark = add(scale, "span", "", share ? percent(at, 0) : tick(Number((at * longest).toPrecision(6))));
    mark.style.left = `${(at * 100).toFixed(3)}%`;
  }
}

function drawBars(parent, bars) {
  if (bars.time.length === 0) {
    parent.remove();
    return;
  }
  barChart(parent, bars.time, false);
  if (bars.share.length > 1) {
    add(parent, "h3", "", bars.shareTitle);
    barChart(parent, bars.share, true);
  }
  if (bars.excess.length > 0) {
    add(parent, "h3", "", "The slowest above the median request, in time");
    barChart(parent, bars.excess, false);
  }
}

function runBars(parent, run) {
  drawBars(parent, { ...run.bars, shareTitle: "All requests against the slowest, by shares" });
}

// The means of all runs below each other.
function compareBars(parent) {
  const bars = DATA.runs.flatMap((run, i) => {
    const bar = run.bars.share[0];
    return bar ? [{ ...bar, label: `${run.letter}: ${run.name}`, note: bar.note }] : [];
  });
  drawBars(parent, { time: bars, share: bars, excess: [], shareTitle: "By shares" });
}
