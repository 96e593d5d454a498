"use strict";
// Draws the figures, switches the theme and the axes. Colours of text and lines are in page.css, so a theme needs no redrawing.
(function () {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const common = {
    autosize: true,
    height: 380,
    margin: { l: 60, r: 16, t: 40, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 13 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left" },
    hoverlabel: { bgcolor: "#1f2937", bordercolor: "#1f2937", font: { color: "#f9fafb" } },
    dragmode: "zoom",
  };

  for (const figure of figures) {
    const layout = Object.assign({}, common, figure.layout);
    Plotly.newPlot(figure.id, figure.data, layout, { responsive: true, displayModeBar: false, displaylogo: false });
  }

  for (const button of document.querySelectorAll("[data-axis]")) {
    button.addEventListener("click", () => {
      const linear = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(linear));
      Plotly.relayout(`plot-${button.dataset.axis}`, { "yaxis.type": linear ? "linear" : "log", "yaxis.autorange": true });
    });
  }
  for (const button of document.querySelectorAll("[data-reset]")) {
    const id = `plot-${button.dataset.reset}`;
    // a heatmap has its first class on top
    const figure = figures.find((one) => one.id === id);
    const vertical = (figure && figure.layout.yaxis && figure.layout.yaxis.autorange) || true;
    button.addEventListener("click", () => Plotly.relayout(id, { "xaxis.autorange": true, "yaxis.autorange": vertical }));
  }

  const theme = document.getElementById("theme");
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const label = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-pressed", String(isDark()));
  };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  prefersDark.addEventListener("change", label);
  label();

  // A figure does not know the width of paper: 180 mm at 96 dots per inch.
  const resize = (change) => figures.forEach((figure) => Plotly.relayout(figure.id, change));
  window.addEventListener("beforeprint", () => resize({ width: 660, autosize: false }));
  window.addEventListener("afterprint", () => resize({ width: null, autosize: true }));
  root.dataset.drawn = String(figures.length);
})();
