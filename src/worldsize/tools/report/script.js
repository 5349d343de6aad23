"use strict";
// The page stands without this; it only lets a pointer, a finger or the arrow keys read curves point by point.
const facts = JSON.parse(document.getElementById("facts").textContent);
const at = (path) => path.split("|").reduce((value, name) => value[name], facts);
const digits = (value, kind) => {
  if (value === null) return "not finite";
  if (kind === "percent") return (value * 100).toFixed(1) + "%";
  if (kind === "size") return value >= 1e9 ? (value / 1e9).toPrecision(3) + " GB" : (value / 1e6).toPrecision(3) + " MB";
  if (kind === "duration") return value < 1 ? (value * 1e3).toPrecision(3) + " ms" : value.toPrecision(3) + " s";
  return Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
};
const nearest = (xs, wanted) => {
  let low = 0, high = xs.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < wanted) low = middle + 1; else high = middle; }
  return low > 0 && wanted - xs[low - 1] < xs[low] - wanted ? low - 1 : low;
};
for (const plot of document.querySelectorAll(".plot")) {
  const told = JSON.parse(plot.dataset.curves), [first, last] = told.x;
  const cursor = document.createElement("div"), tip = document.createElement("div");
  cursor.className = "cursor"; tip.className = "tip"; cursor.hidden = tip.hidden = true; tip.setAttribute("aria-live", "polite");
  plot.append(cursor, tip);
  let step = last;
  const show = (wanted) => {
    const main = at(told.series[0].path).x;
    step = main[nearest(main, wanted)];
    const share = last > first ? (step - first) / (last - first) : 0;
    tip.replaceChildren(document.createTextNode("step " + step.toLocaleString("en")));
    for (const each of told.series) {
      const { x, y } = at(each.path), line = document.createElement("div"), key = document.createElement("i");
      key.style.setProperty("--k", `var(${each.color})`);
      line.append(key, `${each.label} ${digits(y[nearest(x, step)], told.kind)}`);
      tip.append(line);
    }
    cursor.style.left = share * 100 + "%";
    tip.style.left = share < 0.5 ? `calc(${share * 100}% + .6rem)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${(1 - share) * 100}% + .6rem)`;
    cursor.hidden = tip.hidden = false;
  };
  const hide = () => { cursor.hidden = tip.hidden = true; };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show(first + (last - first) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) show(step); });
  plot.addEventListener("keydown", (event) => {
    const main = at(told.series[0].path).x, here = nearest(main, step);
    const move = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -main.length, End: main.length }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    show(main[Math.min(main.length - 1, Math.max(0, here + move))]);
  });
}
