// The layers of all charts: one legend for the page, what it hides, and what is pointed at.

const hiddenLayers = new Set();
// Called when the legend hides or shows a layer, and with the layer that is pointed at or null.
const layerChanges = [];
const layerLights = [];

// At the foot of the window, so that it is in sight of every chart.
function layerLegend() {
  if (DATA.layers.length === 0) return;
  const box = add(document.querySelector("main"), "aside", "layers");
  box.setAttribute("aria-label", "Layers");
  const entries = DATA.layers.map((layer) => ({ ...layer, colour: layerColour(layer.key) }));
  legend(box, entries, hiddenLayers, () => {
    // What is drawn anew would be alike, the rest not.
    light(null);
    for (const changed of layerChanges) changed();
  });
}

const NOT_TRACED = "hatched: what lies within was not traced";

// A layer's piece of a bar.
function paintLayer(part, key) {
  part.dataset.key = key;
  part.style.backgroundColor = layerColour(key);
  part.classList.toggle("gap", isGap(key));
}

const isGap = (key) => LAYERS.get(key)?.gap === true;

// One layer stands out wherever it is; null: all are alike again.
let lit = null;
function light(key) {
  if (key === lit) return;
  lit = key;
  for (const part of document.querySelectorAll("[data-key]")) {
    const other = LAYERS.has(part.dataset.key) && part.dataset.key !== key;
    part.classList.toggle("dim", key !== null && other);
    part.classList.toggle("lit", key !== null && !other);
  }
  for (const lightIn of layerLights) lightIn(key);
}

function lightTarget(event) {
  const key = event.target.closest?.("[data-key]")?.dataset.key;
  light(LAYERS.has(key) ? key : null);
}
document.addEventListener("mouseover", lightTarget);
document.addEventListener("focusin", lightTarget);
document.addEventListener("focusout", () => light(null));
