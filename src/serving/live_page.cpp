#include "serving/live_page.h"

namespace tessera::serving {
namespace {

constexpr std::string_view kPage = R"html(<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>tessera serve</title>
<style>
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --line: #d5dae3; --back: #fff;
  --card: #f6f7f9; --mark: #2563c9; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #39414f;
  --back: #12151b; --card: #1b2029; --mark: #7fb0ff; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 3rem; background: var(--back);
  color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 .25rem; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; color: var(--soft); }
#error { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem;
  margin-top: 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .75rem .9rem; }
.card span { display: block; color: var(--soft); font-size: .85rem; }
.card strong { font-size: 1.5rem; font-weight: 600; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: 9rem; display: block; background: var(--card);
  border: 1px solid var(--line); border-radius: .5rem; }
svg path { fill: none; stroke: var(--mark); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.scale { display: flex; justify-content: space-between; color: var(--soft); font-size: .8rem; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .5rem; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; }
input { font: inherit; padding: .3rem .5rem; width: 22rem; max-width: 100%; }
</style>
<h1>tessera serve</h1>
<p id="state" role="status">waiting for the first figures</p>
<p id="error" role="alert"></p>
<form id="door" hidden><label>Token <input id="token" type="password" autocomplete="off"></label></form>
<div class="cards">
<div class="card"><span>requests a second</span><strong id="rate">0</strong></div>
<div class="card"><span>median time</span><strong id="p50">-</strong></div>
<div class="card"><span>99 of 100 within</span><strong id="p99">-</strong></div>
<div class="card"><span>requests answered</span><strong id="answered">0</strong></div>
<div class="card"><span>refused or wrong</span><strong id="failed">0</strong></div>
<div class="card"><span>version (step)</span><strong id="version">-</strong></div>
<div class="card"><span>rows updated</span><strong id="rows">0</strong></div>
<div class="card"><span>last update visible after</span><strong id="lag">-</strong></div>
</div>
<h2>Requests a second, last two minutes</h2>
<svg id="rates" viewBox="0 0 120 100" preserveAspectRatio="none" role="img"
  aria-label="requests a second over time"><path d=""/></svg>
<div class="scale"><span>2 minutes ago</span><span id="rates-top"></span><span>now</span></div>
<h2>Rows updated a second</h2>
<svg id="updates" viewBox="0 0 120 100" preserveAspectRatio="none" role="img"
  aria-label="rows updated a second over time"><path d=""/></svg>
<div class="scale"><span>2 minutes ago</span><span id="updates-top"></span><span>now</span></div>
<h2>Answers by code</h2>
<table id="codes"><thead><tr><th>code</th><th>answers</th></tr></thead><tbody></tbody></table>
<h2>Versions</h2>
<table id="versions"><thead><tr><th>step</th><th>rows updated</th><th>made</th><th></th></tr></thead>
<tbody></tbody></table>
<script>
"use strict";
const show = (id, text) => { document.getElementById(id).textContent = text; };
const whole = x => Math.round(x).toLocaleString("en");
const time = s => s < 0.001 ? Math.round(s * 1e6) + " µs" : s < 1 ? (s * 1e3).toPrecision(3) + " ms"
  : s.toFixed(2) + " s";
let before = null, token = "";
const rates = [], updates = [];

// Within the bucket that holds it, as if its times were spread evenly.
function quantile(counts, bounds, q) {
  const total = counts.reduce((a, b) => a + b, 0);
  if (total === 0) return null;
  let left = q * total;
  for (let i = 0; i < counts.length; ++i) {
    if (left <= counts[i]) {
      const low = i === 0 ? 0 : bounds[i - 1], high = i < bounds.length ? bounds[i] : bounds.at(-1);
      return low + (high - low) * left / counts[i];
    }
    left -= counts[i];
  }
  return bounds.at(-1);
}
function draw(id, values) {
  const top = Math.max(1, ...values);
  const points = values.map((v, i) => [120 - values.length + 1 + i, 96 - 90 * v / top]);
  document.querySelector("#" + id + " path").setAttribute("d",
    points.map(([x, y], i) => (i ? "L" : "M") + x + " " + y.toFixed(2)).join(""));
  show(id + "-top", "highest " + whole(top));
}
function fill(id, rows) {
  const body = document.querySelector("#" + id + " tbody");
  body.replaceChildren(...rows.map(cells => {
    const row = document.createElement("tr");
    for (const cell of cells) row.appendChild(document.createElement("td")).textContent = cell;
    return row;
  }));
}
async function ask(path) {
  const answer = await fetch(path, {headers: token ? {Authorization: "Bearer " + token} : {},
    cache: "no-store"});
  document.getElementById("door").hidden = answer.status !== 401 && answer.status !== 403;
  if (!answer.ok) throw new Error((await answer.json()).error);
  return answer.json();
}
async function look() {
  try {
    const [now, kept] = [await ask("/admin/figures"), await ask("/admin/versions")];
    const at = performance.now() / 1000;
    if (before) {
      const seconds = at - before.at;
      rates.push((now.answered - before.answered) / seconds);
      updates.push((now.updates.rows - before.updates.rows) / seconds);
      for (const list of [rates, updates]) if (list.length > 120) list.shift();
      show("rate", whole(rates.at(-1)));
      const counts = now.latency.map((c, i) => c - before.latency[i]);
      const p50 = quantile(counts, now.bounds, 0.5), p99 = quantile(counts, now.bounds, 0.99);
      if (p50 !== null) { show("p50", time(p50)); show("p99", time(p99)); }
      draw("rates", rates);
      draw("updates", updates);
    }
    before = {...now, at};
    show("answered", whole(now.answered));
    show("failed", whole(now.answered - (now.codes["200"] || 0) - (now.codes["202"] || 0)));
    show("version", now.version);
    show("rows", whole(now.updates.rows));
    show("lag", now.updates.applied ? time(now.updates.lag_seconds) : "-");
    show("state", (now.ready ? "ready" : "draining") + ", " + now.connections + " connections, " +
      whole(now.queued_samples) + " samples wait, version made " + whole(now.age_seconds) + " s ago, " +
      (!now.updates.watching ? "no updates" : now.updates.held ? "updates are held"
        : now.updates.applied + " updates taken, " + now.updates.refused + " refused"));
    show("error", now.updates.error);
    fill("codes", Object.entries(now.codes).map(([code, n]) => [code === "0" ? "other" : code, whole(n)]));
    fill("versions", kept.versions.toReversed().map(v => [v.version, whole(v.rows_updated),
      new Date(v.made * 1000).toLocaleTimeString("en"), v.current ? "answers" : "kept"]));
  } catch (error) {
    show("state", "no figures");
    show("error", error.message);
  }
}
document.getElementById("door").addEventListener("submit", event => {
  event.preventDefault();
  token = document.getElementById("token").value;
  look();
});
look();
setInterval(look, 1000);
</script>
</html>
)html";

}  // namespace

std::string_view live_page() noexcept { return kPage; }

}  // namespace tessera::serving
