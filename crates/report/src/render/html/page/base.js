// What all charts share: the data, words for numbers, elements, the tooltip and the theme.

const DATA = JSON.parse(document.getElementById("data").textContent);
const LAYERS = new Map(DATA.layers.map((layer) => [layer.key, layer]));
const GROUPS = new Map(DATA.groups.map((group) => [group.key, group]));

// --- words -------------------------------------------------------------------------------------

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "\u00b5s"]];

// A time with its unit, as the tables' renderer has it: 1.25 µs.
function duration(ns) {
  const unit = UNITS.find(([scale]) => Math.abs(ns) >= scale);
  return unit ? `${(ns / unit[0]).toFixed(2)} ${unit[1]}` : `${ns.toFixed(0)} ns`;
}

// The same on an axis: no more digits than the value needs.
function tick(ns) {
  if (ns === 0) return "0";
  const [scale, name] = UNITS.find(([scale]) => Math.abs(ns) >= scale * 0.99999) || [1, "ns"];
  return `${Number((ns / scale).toPrecision(6))} ${name}`;
}

const percent = (share, digits = 1) => `${(share * 100).toFixed(digits)}%`;
const number = (count) => count.toLocaleString("en-US");
const plural = (count, one) => `${number(count)} ${one}${count === 1 ? "" : "s"}`;

function size(bytes) {
  for (const [unit, name] of [[2 ** 30, "G"], [2 ** 20, "M"], [2 ** 10, "k"]]) {
    if (bytes >= unit && bytes % unit === 0) return `${bytes / unit}${name}`;
  }
  return `${bytes} B`;
}

// The greatest, and at least 1: charts divide by it.
const most = (values) => values.reduce((a, b) => Math.max(a, b), 1);

// Steps of 1, 2 or 5 that divide `max` into about `count` parts.
function steps(max, count) {
  const rough = max / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const out = [];
  for (let at = 0; at <= max * 1.0001; at += step) out.push(at);
  return out;
}

// --- elements ----------------------------------------------------------------------------------

// Text goes in as text only: what a run calls its disks and threads is never markup.
function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function add(parent, name, className, text) {
  return parent.appendChild(element(name, className, text));
}

function swatch(parent, colour) {
  add(parent, "i", "swatch").style.setProperty("--c", colour);
}

// Buttons of which one is pressed.
function choice(parent, options, chosen, choose) {
  const box = add(parent, "div", "choice");
  const buttons = options.map(([value, text, title]) => {
    const button = add(box, "button", "", text);
    button.type = "button";
    button.title = title;
    button.addEventListener("click", () => {
      press(value);
      choose(value);
    });
    return [value, button];
  });
  function press(value) {
    for (const [other, button] of buttons) button.setAttribute("aria-pressed", other === value);
  }
  press(chosen);
}

// A legend of which entries can be hidden: `entries` are {key, name, colour, gap}. A click hides
// or shows one; with the shift key, it shows that one alone, or all again.
function legend(parent, entries, hidden, changed) {
  const box = add(parent, "div", "legend");
  const buttons = entries.map((entry) => {
    const button = add(box, "button", entry.gap ? "gap" : "");
    button.type = "button";
    button.dataset.key = entry.key;
    button.title = "Click to hide or show; shift-click to show it alone";
    swatch(button, entry.colour);
    add(button, "span", "", entry.name);
    button.addEventListener("click", (event) => {
      toggle(entries, hidden, entry.key, event.shiftKey);
      show();
      changed();
    });
    return [entry.key, button];
  });
  function show() {
    for (const [key, button] of buttons) button.setAttribute("aria-pressed", !hidden.has(key));
  }
  show();
  return box;
}

function toggle(entries, hidden, key, alone) {
  if (!alone) {
    if (!hidden.delete(key)) hidden.add(key);
    return;
  }
  const others = entries.map((entry) => entry.key).filter((other) => other !== key);
  const isAlone = !hidden.has(key) && others.every((other) => hidden.has(other));
  for (const other of others) {
    if (isAlone) hidden.delete(other);
    else hidden.add(other);
  }
  hidden.delete(key);
}

// --- the tooltip -------------------------------------------------------------------------------

const TOOLTIP = add(document.body, "div", "tooltip");
TOOLTIP.hidden = true;

// `fill` puts the content in; the tooltip stays beside the pointer and within the window.
function showTooltip(event, fill) {
  TOOLTIP.replaceChildren();
  fill(TOOLTIP);
  TOOLTIP.hidden = false;
  const { width, height } = TOOLTIP.getBoundingClientRect();
  const right = event.clientX + 16 + width < document.documentElement.clientWidth;
  const below = event.clientY + 16 + height < document.documentElement.clientHeight;
  const x = right ? event.clientX + 16 : Math.max(4, event.clientX - 16 - width);
  const y = below ? event.clientY + 16 : Math.max(4, event.clientY - 16 - height);
  TOOLTIP.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
}

function hideTooltip() {
  TOOLTIP.hidden = true;
}

function tooltipOf(target, fill) {
  target.addEventListener("mousemove", (event) => showTooltip(event, fill));
  target.addEventListener("mouseleave", hideTooltip);
}

// A line of a tooltip: a colour, a name, a figure.
function tooltipRow(box, colour, name, figure) {
  const row = add(box, "div", "row");
  if (colour) swatch(row, colour);
  add(row, "span", "name", name);
  add(row, "span", "figure", figure);
}

// --- the theme ---------------------------------------------------------------------------------

// Canvases do not know variables of the style sheet: what a variable is now.
function colour(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}

// Black or white, whichever can be read on a colour, `var(--name)`.
function inkOn(paint) {
  const [red, green, blue] = hexParts(colour(paint.slice(4, -1)));
  return 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#000000d0" : "#ffffff";
}

const hexParts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// As in charts.css: a phone's width, where labels stand above their bars and marks are few.
const NARROW = matchMedia("(max-width: 760px)");

const redraws = [];
for (const change of [matchMedia("(prefers-color-scheme: dark)"), NARROW]) {
  change.addEventListener("change", () => {
    for (const redraw of redraws) redraw();
  });
}

const layerColour = (key) => `var(--l-${key})`;
const groupColour = (key) => `var(--g-${key})`;
