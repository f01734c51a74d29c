"use strict";
// Show values under the pointer. Without scripts the line below each chart summarizes them.
for (const figure of document.querySelectorAll(".chart")) {
  const svg = figure.querySelector(":scope > svg"), cursor = svg.querySelector(".cursor");
  const readout = figure.querySelector(".readout"), summary = figure.querySelector(".summary");
  const [left, right] = ["x1", "x2"].map((name) => Number(svg.querySelector(".grid").getAttribute(name)));
  let chart = null; // parsed on first use
  const show = (on) => {
    cursor.toggleAttribute("hidden", !on);
    readout.hidden = !on;
    summary.hidden = on;
  };
  const text = (value) => Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 });
  svg.addEventListener("pointermove", (event) => {
    chart ??= JSON.parse(figure.dataset.chart);
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const [low, high] = chart.x;
    const pointed = low + ((at - left) / (right - left)) * (high - low);
    const nearest = (xs) => xs.reduce((best, x, n) => (Math.abs(x - pointed) < Math.abs(xs[best] - pointed) ? n : best), 0);
    const points = chart.curves.map(([label, xs, ys]) => [label, nearest(xs), xs, ys]);
    const step = points.reduce((best, [, n, xs]) => (Math.abs(xs[n] - pointed) < Math.abs(best - pointed) ? xs[n] : best), Infinity);
    const place = left + ((step - low) / (high - low)) * (right - left);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    const values = points.map(([label, n, , ys]) => (points.length > 1 ? `${label} ` : "") + text(ys[n]) + (chart.unit && ` ${chart.unit}`));
    readout.textContent = `${chart.x_title.split(",")[0]} ${text(step)}: ${values.join("; ")}`;
    show(true);
  });
  svg.addEventListener("pointerleave", () => show(false));
}
