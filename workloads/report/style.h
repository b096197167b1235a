// report/style.h — the style sheet and the script of the page.

#pragma once

namespace tessera::workloads::report {

inline constexpr const char* kStyle = R"css(
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2126;--soft:#5b6570;--line:#dfe3e8;--card:#f6f7f9;
--train:#9db4cf;--mean:#2f6db0;--eval:#d0702a;--limit:#77808a;--tile-ink:#fff;
--data:#9aa5b1;--input:#4e79a7;--lookup:#4f9a5a;--output:#5fb0ab;--dense:#d9ad2f;--backward:#e58a3c;
--reduce:#cf5258;--optimizer:#a5719a;--other:#b3aca6;--idle:#e9ebee;--wait:#1c2126}
@media (prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e6e9ec;--soft:#98a2ad;--line:#2d343b;--card:#1b1f24;
--train:#46617f;--mean:#6ea8e5;--eval:#eb9a5c;--limit:#8a949e;--tile-ink:#fff;
--data:#6d7883;--input:#5683b5;--lookup:#54985e;--output:#4f9893;--dense:#bd9632;--backward:#c77a38;
--reduce:#c2575c;--optimizer:#96678c;--other:#7c7772;--idle:#2a3037;--wait:#e6e9ec}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;font-variant-numeric:tabular-nums}
main,header,footer{max-width:1120px;margin:0 auto;padding:0 24px}
header{padding-top:32px}
h1{font-size:24px;line-height:1.25;margin:0;font-weight:650;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:18px;margin:44px 0 4px;font-weight:650}
h3{font-size:15px;margin:0;font-weight:600}
p{margin:4px 0}
.note,header p,footer{color:var(--soft);font-size:13.5px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:1px;margin:24px 0 0;padding:0;background:var(--line);border:1px solid var(--line);border-radius:8px;overflow:hidden}
.figures div{background:var(--paper);padding:12px 16px}
.figures dt{color:var(--soft);font-size:13px}
.figures dd{margin:0;font-size:22px;font-weight:600;letter-spacing:-.01em;white-space:nowrap}
.figures small{display:block;font-size:12.5px;font-weight:400;color:var(--soft);letter-spacing:0;white-space:normal}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:28px 32px;margin-top:28px}
figure{margin:0;min-width:0}
.chart figcaption{display:flex;flex-wrap:wrap;gap:2px 16px;align-items:baseline;justify-content:space-between}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;list-style:none;margin:0;padding:0;font-size:13px;color:var(--soft)}
.legend li{display:flex;align-items:center;gap:6px}
.legend i{width:12px;height:12px;border-radius:2px;background-color:var(--c,var(--other));flex:none}
.chart .legend i{height:3px;width:16px;border-radius:2px}
.chart .legend i.ceiling{background-color:transparent;background-image:repeating-linear-gradient(90deg,var(--limit) 0 4px,transparent 4px 7px)}
.plot{position:relative;height:220px;margin:10px 0 24px 48px}
.area{position:absolute;inset:0}
.area svg{position:absolute;inset:0;width:100%;height:100%;overflow:hidden;display:block}
.area path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--line);stroke-width:1}
.ceiling{stroke:var(--limit);stroke-width:1.5;stroke-dasharray:5 4}
.curve{stroke:var(--c);stroke-width:2;stroke-linejoin:round}
.curve.c-train{stroke-width:1}
.dots{stroke:var(--c);stroke-width:6;stroke-linecap:round}
.c-train{--c:var(--train)}.c-mean{--c:var(--mean)}.c-eval{--c:var(--eval)}
.ys span{position:absolute;right:100%;margin-right:8px;transform:translateY(-50%);font-size:12px;color:var(--soft);white-space:nowrap}
.xs span{position:absolute;top:100%;margin-top:4px;transform:translateX(-50%);font-size:12px;color:var(--soft);white-space:nowrap}
.rule{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);pointer-events:none}
.tip{position:absolute;top:4px;padding:6px 9px;border-radius:6px;background:var(--ink);color:var(--paper);font-size:12.5px;line-height:1.4;pointer-events:none;white-space:nowrap;z-index:2}
details{margin-top:6px}
summary{cursor:pointer;color:var(--soft);font-size:13px;width:max-content}
summary:focus-visible{outline:2px solid var(--mean);outline-offset:2px;border-radius:2px}
.scroll{overflow:auto;max-height:380px;margin-top:8px;border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;width:100%;font-size:13px}
caption{caption-side:top;text-align:left;padding:6px 12px;color:var(--soft)}
th,td{padding:4px 12px;text-align:right;white-space:nowrap;border-top:1px solid var(--line);font-weight:400}
thead th{position:sticky;top:0;background:var(--card);color:var(--soft);border-top:0}
td.words,th:first-child{text-align:left}
.bars{display:grid;grid-template-columns:max-content 1fr max-content;gap:8px 12px;align-items:center;margin:14px 0}
.bars b,.lanes b,figcaption b{font-weight:600;font-size:13px}
.bars em{font-style:normal;font-size:13px;color:var(--soft)}
.bar{display:flex;height:26px;border-radius:3px;overflow:hidden;background:var(--card)}
.bar span,.lanes rect{background:var(--c);fill:var(--c)}
.bar span{flex:none}
.waits{background-image:repeating-linear-gradient(135deg,transparent 0 3px,rgba(0,0,0,.45) 3px 5px)!important;background-color:var(--c)!important}
.p-data{--c:var(--data)}.p-input_dist{--c:var(--input)}.p-lookup{--c:var(--lookup)}.p-output_dist{--c:var(--output)}.p-dense{--c:var(--dense)}.p-backward{--c:var(--backward)}.p-all_reduce{--c:var(--reduce)}.p-optimizer{--c:var(--optimizer)}.p-other{--c:var(--other)}.p-idle{--c:var(--idle)}
.lanes{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:6px 12px;align-items:center;margin:14px 0 28px}
.lanes svg{width:100%;height:34px;display:block;background:var(--card);border-radius:3px}
.lanes .t-wait{fill:var(--wait);fill-opacity:.72}
.lanes .xs{position:relative;height:0}
.lanes .xs span{top:0;margin-top:0;transform:none;border-left:1px solid var(--soft);padding-left:5px;line-height:1.2}
.placement{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,250px),1fr));gap:18px;margin:14px 0}
.placement figcaption{font-size:13px;color:var(--soft);margin-top:6px}
.placement figcaption b{color:var(--ink);margin-right:6px}
.room{position:relative;aspect-ratio:1.25}
.tiles{position:absolute;left:0;right:0;bottom:0}
.tiles div{position:absolute;border:1px solid var(--paper);background-color:var(--c);overflow:hidden;border-radius:3px}
.tiles span{position:absolute;left:5px;right:2px;top:3px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis;font-size:12px;line-height:1.3;color:var(--tile-ink);text-shadow:0 0 3px rgba(0,0,0,.55)}
.s-table_wise{--c:var(--input)}
.s-row_wise{--c:var(--lookup);background-image:repeating-linear-gradient(0deg,rgba(255,255,255,.28) 0 1px,transparent 1px 6px)}
.s-column_wise{--c:var(--optimizer);background-image:repeating-linear-gradient(90deg,rgba(255,255,255,.28) 0 1px,transparent 1px 6px)}
.s-data_parallel{--c:var(--data);background-image:radial-gradient(rgba(255,255,255,.5) 1px,transparent 1.3px);background-size:6px 6px}
.legend i[class^=s-]{background-color:var(--c)}
pre{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:12px 16px;overflow:auto;max-height:420px;font:12.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;margin:8px 0}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:0 32px;align-items:start}
.two>*{min-width:0}
.facts th{width:1%}.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere}
footer{margin-top:48px;padding-top:14px;padding-bottom:32px;border-top:1px solid var(--line)}
@media (max-width:560px){main,header,footer{padding-left:16px;padding-right:16px}header{padding-top:20px}.figures{grid-template-columns:1fr 1fr}.figures dd{font-size:19px}.figures div{padding:10px 12px}.plot{margin-left:42px;height:200px}th,td{padding:4px 9px}.placement{grid-template-columns:1fr 1fr;gap:12px}}
@media print{.scroll{max-height:none}}
)css";

// Shows the numbers under the pointer. All the rest of the page works without it.
inline constexpr const char* kScript = R"js(
"use strict";
for (const figure of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const area = figure.querySelector(".area");
  const rule = document.createElement("div");
  const tip = document.createElement("div");
  rule.className = "rule";
  tip.className = "tip";
  rule.hidden = tip.hidden = true;
  area.append(rule, tip);
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  const show = event => {
    const box = area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const x = data.x[0] + share * (data.x[1] - data.x[0]);
    const lines = [];
    let at = null;
    for (const curve of data.curves) {
      if (!curve.points.length) continue;
      const point = nearest(curve.points, x);
      if (at === null || Math.abs(point[0] - x) < Math.abs(at - x)) at = point[0];
      lines.push([curve.name, point]);
    }
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = data.name + " " + at;
    tip.append(head);
    for (const [name, point] of lines) {
      const line = document.createElement("div");
      line.textContent = name + " " + point[1] + (point[0] === at ? "" : " (" + data.name + " " + point[0] + ")");
      tip.append(line);
    }
    const left = (at - data.x[0]) / (data.x[1] - data.x[0]);
    rule.style.left = 100 * left + "%";
    rule.hidden = tip.hidden = false;
    if (left < 0.5) { tip.style.left = "calc(" + 100 * left + "% + 10px)"; tip.style.right = "auto"; }
    else { tip.style.right = "calc(" + 100 * (1 - left) + "% + 10px)"; tip.style.left = "auto"; }
  };
  area.addEventListener("pointermove", show);
  area.addEventListener("pointerdown", show);
  area.addEventListener("pointerleave", () => { rule.hidden = tip.hidden = true; });
}
)js";

}  // namespace tessera::workloads::report
