// Draws every chart of the page into its place.

const CHARTS = {
  bars: runBars,
  ecdf: runEcdf,
  heat: runHeat,
  waterfall: runWaterfall,
  lines: runLines,
  "compare-bars": compareBars,
  "compare-ecdf": compareEcdf,
};

layerLegend();
for (const place of document.querySelectorAll(".chart")) {
  CHARTS[place.dataset.chart](place, DATA.runs[Number(place.dataset.run)]);
}
