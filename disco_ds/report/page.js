"use strict";
(() => {
  const tip = document.getElementById("tip");
  const text = (value, percent) =>
    percent ? `${(100 * value).toFixed(1)} %` : Number(value.toPrecision(4)).toString();
  const nearest = (points, x) => {
    let best = null;
    for (const point of points)
      if (point[1] !== null && (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x))) best = point;
    return best;
  };
  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    const chart = JSON.parse(svg.dataset.chart);
    const [left, right, top, bottom] = chart.box;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.setAttribute("class", "cursor");
    line.setAttribute("y1", top);
    line.setAttribute("y2", bottom);
    line.setAttribute("visibility", "hidden");
    svg.append(line);
    const leave = () => {
      line.setAttribute("visibility", "hidden");
      tip.hidden = true;
    };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const place = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const share = Math.min(1, Math.max(0, (place - left) / (right - left)));
      const wanted = chart.x[0] + share * (chart.x[1] - chart.x[0]);
      const found = chart.series.map((s) => [s.label, nearest(s.points, wanted)]).filter((f) => f[1]);
      if (!found.length) return leave();
      const step = found[0][1][0];
      const at = left + ((step - chart.x[0]) / (chart.x[1] - chart.x[0] || 1)) * (right - left);
      line.setAttribute("x1", at);
      line.setAttribute("x2", at);
      line.setAttribute("visibility", "visible");
      const rows = found.map(([label, point]) => `${label}: ${text(point[1], chart.percent)}`);
      tip.textContent = [`step ${step}`, ...rows].join("\n");
      tip.hidden = false;
      const width = tip.offsetWidth;
      const x = Math.min(event.clientX + 14, document.documentElement.clientWidth - width - 8);
      tip.style.left = `${Math.max(8, x) + window.scrollX}px`;
      tip.style.top = `${event.clientY + 16 + window.scrollY}px`;
    });
  }
})();
