// The page of two runs beside each other.
"use strict";

const STYLES = ["c-mean", "c-eval"];

function comparedCharts(runs) {
  const steps = runs.flatMap(run => [run.steps, ...run.series.step, ...run.evals.map(row => row.step)]);
  const byStep = chart => chartFigure({xName: "step", x: [0, Math.max(1, ...steps)], xIsWhole: true, ...chart});
  const series = name => runs.map((run, i) => ({name: run.name, style: STYLES[i], isWhole: true,
    points: run.series.step.map((step, at) => [step, run.series[name][at]])}));
  const judged = name => runs.map((run, i) => ({name: run.name, style: STYLES[i], isWhole: true, hasDots: true,
    points: run.evals.map(row => [row.step, row[name]])}));
  const names = [...new Set(runs.flatMap(run => run.evals.flatMap(row => Object.keys(row))))]
    .filter(name => !["step", "samples"].includes(name));
  return [
    byStep({id: "loss", title: "Training loss", note: "Smooth.", curves: series("loss_mean")}),
    ...names.map(name => byStep({id: name, title: "Evaluation: " + heading(name), curves: judged(name)})),
    byStep({id: "speed", title: heading(runs[0].unit) + " per second", note: "Smooth.", fromZero: true, curves: series("speed_mean")}),
  ].filter(Boolean);
}

function showComparison({runs, settings, figures}) {
  const titles = ["", ...runs.map(run => run.name)];
  document.getElementById("head").append(make("h1", {}, runs.map(run => run.name).join(" and ")));
  document.getElementById("main").append(make("div", {class: "charts"}, ...comparedCharts(runs)),
    section("figures", "Figures", "", table("figures-table", titles, figures)),
    section("settings", "Settings that differ", settings.length > 0 ? "" : "None.",
      settings.length > 0 ? table("settings-table", titles, settings) : null));
}

showComparison(JSON.parse(document.getElementById("data").textContent));
