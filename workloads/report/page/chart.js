// Curves: a drawing that stretches, with letters that do not.
"use strict";

// Round numbers that cover [low, high], about `count` of them; whole ones if asked.
function ticksOf(low, high, count, isWhole = false) {
  const rough = (high - low) / count;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map(factor => factor * power).find(size => size >= rough * 0.9999);
  if (isWhole) step = Math.max(1, step === 2.5 * power && power === 1 ? 5 : Math.ceil(step));
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); ++i) ticks.push(i * step);
  return ticks;
}

// As many decimals as tell one tick from the next.
function tickText(tick, step) {
  const unit = Math.abs(tick) >= 999.5e3 ? 1e6 : Math.abs(tick) >= 9995 ? 1e3 : 1;
  let digits = 0;
  for (let size = step / unit; digits < 9 && Math.abs(size - Math.round(size)) > 1e-6 * size; size *= 10) ++digits;
  return (tick / unit || 0).toFixed(digits) + (unit === 1e6 ? "M" : unit === 1e3 ? "k" : "");
}
const stepOf = ticks => ticks.length < 2 ? 1 : ticks[1] - ticks[0];

// Training steps may be cut off, as the first loss often is far away; `whole` curves never are.
function valueRange(chart) {
  const all = chart.curves.flatMap(curve => curve.points.map(point => point[1])).filter(isNumber).sort((a, b) => a - b);
  const whole = chart.curves.filter(curve => curve.isWhole).flatMap(curve => curve.points.map(point => point[1])).filter(isNumber);
  const cut = all.length >= 50 ? Math.floor(all.length / 50) : 0;
  let low = all[cut], high = all[all.length - 1 - cut];
  const reach = high - low;
  if (all[0] > low - 0.5 * reach) low = all[0];
  if (all[all.length - 1] < high + 0.5 * reach) high = all[all.length - 1];
  low = Math.min(low, ...whole, ...(chart.limit ? [chart.limit.value] : []), ...(chart.fromZero ? [0] : []));
  high = Math.max(high, ...whole, ...(chart.limit ? [chart.limit.value] : []), ...(chart.reach ? [chart.reach] : []));
  if (low === high) {
    const pad = low === 0 ? 1 : Math.abs(low) * 0.1;
    return [low - pad, high + pad];
  }
  return [low, high];
}

// {id, title, xName, x: [low, high], xIsWhole, curves: [{name, style, points, isWhole, hasDots}],
//  limit: {value, name}, diagonal, fromZero, reach (a value to cover), marks: [x], note, unit}.
// Null without a point.
function chartFigure(chart) {
  chart.curves = chart.curves.filter(curve => curve.points.some(point => isNumber(point[1])));
  if (chart.curves.length === 0) return null;
  const [xLow, xHigh] = chart.x;
  const yTicks = ticksOf(...valueRange(chart), 5);
  const [yLow, yHigh] = [yTicks[0], yTicks[yTicks.length - 1]];
  const xShare = x => (x - xLow) / (xHigh - xLow);
  const yShare = y => 1 - (y - yLow) / (yHigh - yLow);
  const place = (x, y) => (1000 * xShare(x)).toFixed(1) + " " + (1000 * yShare(y)).toFixed(1);

  const drawing = make("svg", {viewBox: "0 0 1000 1000", preserveAspectRatio: "none", role: "img",
                               "aria-label": `${chart.title} by ${chart.xName}`});
  const draw = (style, path) => path && drawing.append(make("path", {class: style, d: path}));
  for (const tick of yTicks) draw("grid", `M${place(xLow, tick)}H1000`);
  for (const mark of chart.marks ?? []) draw("mark", `M${place(mark, yHigh)}V1000`);
  if (chart.limit) draw("limit", `M${place(xLow, chart.limit.value)}H1000`);
  if (chart.diagonal) draw("limit", `M${place(xLow, xLow)}L${place(xHigh, xHigh)}`);
  let numOutside = 0;
  for (const curve of chart.curves) {
    let path = "", dots = "", isDown = false;
    curve.points.forEach(([x, y], i) => {
      if (!isNumber(y)) return void (isDown = false);
      numOutside += y < yLow || y > yHigh;
      path += (isDown ? "L" : "M") + place(x, y);
      const isLonely = !isDown && !isNumber(curve.points[i + 1]?.[1]);
      if (curve.hasDots || isLonely) dots += `M${place(x, y)}h0`;  // round ends: dots that stay round
      isDown = true;
    });
    draw("curve " + curve.style, path);
    draw("dots " + curve.style, dots);
  }

  const xTicks = ticksOf(xLow, xHigh, 5, chart.xIsWhole).filter(tick => tick >= xLow && tick <= xHigh * 1.0001);
  const area = make("div", {class: "area"}, drawing);
  const plot = make("div", {class: "plot"},
    make("div", {class: "ys", "aria-hidden": "true"}, ...yTicks.map(tick =>
      make("span", {style: {top: percent(yShare(tick))}}, tickText(tick, stepOf(yTicks))))),
    make("div", {class: "xs", "aria-hidden": "true"}, ...xTicks.map(tick =>
      make("span", {style: {left: percent(xShare(tick))}}, tickText(tick, stepOf(xTicks))))),
    make("div", {class: "x-name", "aria-hidden": "true"}, chart.xName), area);
  follow(area, chart, xShare);
  const names = chart.curves.map(curve => [curve.style, curve.name]);
  if (chart.limit) names.push(["limit", chart.limit.name]);
  const notes = [chart.note ?? ""];
  if (numOutside > 0) notes.push(plural(numOutside, "step") + " outside the picture.");
  const note = notes.filter(Boolean).join(" ");
  return make("figure", {class: "chart", id: chart.id},
    make("figcaption", {}, make("h3", {}, chart.title), legend(names)),
    note ? make("p", {class: "note"}, note) : null, plot);
}

// Shows the numbers under the pointer.
function follow(area, chart, xShare) {
  const rule = make("div", {class: "rule", hidden: ""});
  const tip = make("div", {class: "tip", hidden: ""});
  area.append(rule, tip);
  const curves = chart.curves.map(curve => [curve.name, curve.points.filter(point => isNumber(point[1]))]);
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  const show = event => {
    const box = area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const x = chart.x[0] + share * (chart.x[1] - chart.x[0]);
    const found = curves.map(([name, points]) => [name, nearest(points, x)]);
    const at = nearest(found.map(([, point]) => point), x)[0];
    tip.replaceChildren(make("b", {}, chart.xName + " " + number(at)), ...found.map(([name, point]) =>
      make("div", {}, `${name} ${number(point[1])}${chart.unit ?? ""}` +
                      (point[0] === at ? "" : ` (${chart.xName} ${number(point[0])})`))));
    const left = xShare(at);
    rule.style.left = percent(left);
    tip.style.left = left < 0.5 ? `calc(${percent(left)} + 10px)` : "auto";
    tip.style.right = left < 0.5 ? "auto" : `calc(${percent(1 - left)} + 10px)`;
    rule.hidden = tip.hidden = false;
  };
  area.addEventListener("pointermove", show);
  area.addEventListener("pointerdown", show);
  area.addEventListener("pointerleave", () => { rule.hidden = tip.hidden = true; });
}
