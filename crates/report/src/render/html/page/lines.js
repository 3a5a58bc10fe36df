// What threads did when: system calls, and user space between them.

// What a call is for decides its colour; the wiki's picture told these apart.
const KINDS = [
  ["user", "user space", (name) => name === "user"],
  ["guest", "in the guest", (name) => /KVM_RUN/.test(name)],
  ["io", "I/O, and waiting for it", (name) => /^(io_uring|io_submit|io_getevents|io_pgetevents|p?readv?|p?writev?|pread|pwrite|read64|write64|fsync|fdatasync|fallocate|lseek)/.test(name) && !/^(read|write)$/.test(name)],
  ["notify", "read(), write(): kicks, interrupts, wake-ups", (name) => /^(read|write)$/.test(name) || /KVM_(SIGNAL_MSI|IRQ_LINE)/.test(name)],
  ["wait", "waiting: poll, futex, sleep", (name) => /(poll|epoll|select|futex|nanosleep|sigtimedwait)/.test(name)],
  ["lost", "unknown: events are missing", (name) => name === "unknown" || name === "?"],
  ["other", "other calls", () => true],
];

const kindOf = (name) => KINDS.find(([, , is]) => is(name))[0];
const LINE_HEIGHT = 34;
// Pixels and letters for a thread's name.
const labelRoom = () => (NARROW.matches ? [92, 11] : [170, 22]);

function runLines(parent, run) {
  const { what, threads, request } = run.lines;
  const kinds = what.map(kindOf);
  const ends = threads.map(({ spans }) => spans[spans.length - 1]).map(([start, length]) => start + length);
  const end = most(ends);
  const hidden = new Set();
  const entries = KINDS.filter(([key]) => kinds.includes(key))
    .map(([key, name]) => ({ key, name, colour: `var(--k-${key})` }));
  legend(parent, entries, hidden, () => chart.plot().redraw(false));
  const height = threads.length * LINE_HEIGHT + 44;
  const shorten = (name, letters) => (name.length > letters ? `${name.slice(0, letters - 1)}\u2026` : name);
  const chart = plotIn(parent, height, () => {
    const [room, letters] = labelRoom();
    const paints = new Map(KINDS.map(([key]) => [key, colour(`--k-${key}`)]));
    return {
      opts: {
        legend: { show: false },
        cursor: { points: { show: false }, y: false },
        scales: {
          x: { time: false, range: (u, min, max) => (min === null ? [0, end] : [min, max]) },
          y: { dir: -1, range: [0, threads.length] },
        },
        axes: [
          axis({ values: timeTicks }),
          axis({
            size: room,
            grid: { show: false },
            ticks: { show: false },
            splits: () => threads.map((_, i) => i + 0.5),
            values: () => threads.map((thread) => shorten(thread.name, letters)),
          }),
        ],
        series: [{}, { paths: () => null, points: { show: false } }],
        hooks: {
          draw: [
            (plot) => drawLines(plot, threads, kinds, hidden, paints),
            (plot) => drawRequest(plot, request, threads.length),
          ],
        },
      },
      data: [[0, end], [0, threads.length]],
    };
  });
  add(parent, "p", "note", "Drag to zoom, double-click to zoom out.");
  pointing(chart.box, chart.plot, (event, x, y) => {
    const thread = threads[Math.floor(y)];
    const span = thread && spanAt(thread.spans, x);
    if (!span) {
      hideTooltip();
      return;
    }
    showTooltip(event, (tip) => {
      add(tip, "div", "title", thread.name);
      tooltipRow(tip, `var(--k-${kinds[span[2]]})`, what[span[2]], duration(span[1]));
      add(tip, "div", "muted", `from ${duration(span[0])}`);
    });
  });
}

function spanAt(spans, x) {
  const found = spans[lastNotAbove(spans.map(([start]) => start), x)];
  return found && x <= found[0] + found[1] ? found : null;
}

// Where the request begins and ends.
function drawRequest(plot, request, rows) {
  if (!request) return;
  const [start, length] = request;
  for (const at of [start, start + length]) {
    fillValues(plot, at, at, 0, rows, colour("--text"), 1.5);
  }
}

function drawLines(plot, threads, kinds, hidden, paints) {
  threads.forEach(({ spans }, i) => {
    for (const [start, length, what] of spans) {
      if (hidden.has(kinds[what])) continue;
      // User space is a thin line between calls, which stand out.
      const inset = kinds[what] === "user" ? 0.36 : 0.14;
      fillValues(plot, start, start + length, i + inset, i + 1 - inset, paints.get(kinds[what]), 0.75);
    }
  });
}
