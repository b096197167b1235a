// The page of one run.
"use strict";

// What a run is judged by, in the order of its first evaluation.
const figureNames = run => run.evals.length === 0 ? [] : Object.keys(run.evals[run.evals.length - 1]).filter(name => !["step", "samples"].includes(name));

function banner(run) {
  const words = {finished: "Finished", stopped: "Stopped", "stopped early": "Stopped early: no evaluation was better for a while,",
                 diverged: "Diverged: the loss is not a number"};
  const state = run.has_ended ? run.status : "running";
  const text = (run.has_ended ? words[run.status] ?? run.status : "Not finished: the last line is of a run that goes on or was killed,") +
               ` at step ${countText(run.steps)}` + (run.planned_steps > run.steps ? ` of ${countText(run.planned_steps)}` : "");
  const box = make("div", {id: "status", class: "banner is-" + state.replaceAll(" ", "-")}, make("p", {}, make("strong", {}, text)));
  if (run.resumed.length > 0) box.append(make("p", {}, "Resumed at step " + run.resumed.map(one => countText(one)).join(", ")));
  if (run.resume) box.append(make("p", {}, "Go on with ", make("code", {}, run.resume)));
  return box;
}

function figure(title, value, ...small) {
  return make("div", {}, make("dt", {}, title), make("dd", {}, value, ...small.map(line => make("small", {}, line))));
}

function figures(run) {
  const list = make("dl", {class: "figures"});
  const last = run.evals[run.evals.length - 1];
  const best = run.evals.find(row => row.step === run.best_step);
  for (const name of figureNames(run)) {
    if (!isNumber(last[name])) continue;
    const lines = [`last${best === last ? " and best" : ""}, step ${countText(last.step)}`];
    if (best && best !== last && isNumber(best[name])) lines.push(`best model ${number(best[name])}, step ${countText(best.step)}`);
    if (name === "auc" && isNumber(run.auc_ceiling)) lines.push(`best possible ${fixed(run.auc_ceiling, 4)}`);
    list.append(figure(heading(name), fixed(last[name], 4), ...lines));
  }
  if (!last && run.series.step.length > 0) {
    list.append(figure("Loss", number(run.series.loss[run.series.loss.length - 1]), `last, step ${countText(run.steps)}`));
  }
  if (isNumber(run.medians.samples_per_second)) list.append(figure(`${heading(run.unit)} per second`, shortNumber(run.medians.samples_per_second), "median"));
  if (isNumber(run.medians.seconds)) list.append(figure("Step", secondsText(run.medians.seconds), "median"));
  const spent = run.breakdowns.reduce((sum, one) => sum + one.seconds, 0);
  const waited = run.breakdowns.reduce((sum, one) => sum + Object.values(one.phases).reduce((all, time) => all + time[1], 0), 0);
  if (spent > 0) list.append(figure("Exposed comm", fixed(100 * waited / spent, 1) + " %", "of a step, mean of ranks"));
  if (run.memory.length > 0) list.append(figure("Peak memory", bytesText(Math.max(...run.memory)), "largest rank"));
  return list;
}

function head(run) {
  const parts = [run.workload, plural(run.ranks, "rank"), plural(run.steps, "step"), run.samples > 0 ? `${shortNumber(run.samples)} ${run.unit}` : "",
                 run.seconds > 0 ? secondsText(run.seconds) : "", run.started ? "started " + run.started : ""];
  return [make("h1", {}, run.name), make("p", {}, parts.filter(Boolean).join(" · ")), banner(run), figures(run)];
}

// All curves over steps have this axis.
const stepAxis = run => ({xName: "step", xIsWhole: true, marks: run.resumed,
                          x: [0, Math.max(1, run.steps, ...run.series.step, ...run.evals.map(row => row.step))]});

function charts(run) {
  const {series} = run;
  const points = name => series.step.map((step, i) => [step, series[name][i]]);
  const scaledPoints = (name, factor) => points(name).map(([x, y]) => [x, times(y, factor)]);
  const judged = name => run.evals.map(row => [row.step, row[name]]);
  const byStep = chart => chartFigure({...stepAxis(run), ...chart});
  const evaluation = name => ({name: "evaluation", style: "c-eval", points: judged(name), isWhole: true, hasDots: true});
  const names = figureNames(run);
  const lossName = names.find(name => ["log_loss", "validation_loss"].includes(name));
  const list = [byStep({id: "loss", title: "Loss", note: run.resumed.length > 0 ? "The dotted line is where the run was resumed." : "", curves: [
    {name: "each step", style: "c-train", points: points("loss")},
    {name: "training, smooth", style: "c-mean", points: points("loss_mean"), isWhole: true},
    ...(lossName ? [evaluation(lossName)] : [])]})];
  for (const name of names.filter(name => name !== lossName)) {
    const limit = name === "auc" && isNumber(run.auc_ceiling) ? {value: run.auc_ceiling, name: "best possible"}
                : name === "calibration" ? {value: 1, name: "as many clicks as predicted"} : null;
    list.push(byStep({id: name, title: heading(name), limit, curves: [evaluation(name)]}));
  }
  list.push(reliability(run));
  const speed = {unit: " " + run.unit + "/s", fromZero: true};
  list.push(byStep({id: "speed", title: `${heading(run.unit)} per second`, ...speed, curves: [
    {name: "each step", style: "c-train", points: points("speed")},
    {name: "smooth", style: "c-mean", points: points("speed_mean"), isWhole: true}]}));
  list.push(byStep({id: "time", title: "Milliseconds of a step", note: "On rank 0, smooth.", fromZero: true, unit: " ms", curves: [
    {name: "step", style: "c-mean", points: scaledPoints("seconds_mean", 1e3)},
    {name: "exposed communication", style: "c-eval", points: scaledPoints("exposed_mean", 1e3), isWhole: true}]}));
  list.push(byStep({id: "rate", title: "Learning rate", fromZero: true,
                    curves: [{name: "of the dense layers", style: "c-mean", points: points("learning_rate"), isWhole: true}]}));
  return list.filter(Boolean);
}

// Predicted against observed, in parts of equally many samples.
function reliability(run) {
  const judged = run.calibration;
  if (!judged) return null;
  const points = judged.predicted.map((predicted, i) => [predicted, judged.observed[i]]);
  const high = Math.max(...judged.predicted, ...judged.observed, 1e-6);
  const top = ticksOf(0, high, 5).pop();
  return chartFigure({id: "reliability", title: "Calibration by prediction", xName: "predicted chance of a click", x: [0, top], fromZero: true, diagonal: true,
    reach: top, note: `Step ${countText(judged.step)}: ${points.length} parts of equally many samples; on the dashed line both agree.`,
    curves: [{name: "share of clicks", style: "c-eval", points, isWhole: true, hasDots: true}]});
}

function planSection(run) {
  const plan = run.plan;
  if (!plan) return null;
  const ms = seconds => number(seconds * 1e3);
  const gap = plan.bound > 0 ? 100 * (plan.seconds / plan.bound - 1) : 0;
  const rows = plan.ranks.map((parts, rank) => {
    const seconds = Object.entries(parts).reduce((sum, [part, value]) => part === "bytes" ? sum : sum + value, 0);
    return [rank, ms(seconds), plan.bound > 0 ? fixed(100 * seconds / plan.bound, 1) + " %" : "–", bytesText(parts.bytes ?? 0)];
  });
  const two = make("div", {class: "two"}, table("plan", ["rank", "ms", "of the bound", "memory"], rows));
  const parts = Object.keys(plan.measured).filter(part => part in plan.predicted);
  if (parts.length > 0) {
    const sum = side => parts.reduce((all, part) => all + side[part], 0);
    two.append(table("prediction", ["ms of a step", "predicted", "measured"], [
      ...parts.map(part => [part, ms(plan.predicted[part]), ms(plan.measured[part])]), ["together", ms(sum(plan.predicted)), ms(sum(plan.measured))]]));
  }
  return section("planned", "Plan", `Sharding ${plan.sharding}, speeds ${plan.speeds}. Tables need ${ms(plan.seconds)} ms a step on the slowest rank; ` +
    `no plan can be under ${ms(plan.bound)} ms (${fixed(gap, 2)} %).`, two);
}

// Tables that grow: their ids over the steps, and each of them at the end.
function growthSection(run) {
  const last = run.growth[run.growth.length - 1];
  if (!last) return null;
  const rows = last.tables.map(one => [one.name, countText(one.ids), countText(one.admitted), countText(one.refused), countText(one.evicted),
                                       fixed(100 * one.hit_rate, 1) + " %", bytesText(one.bytes)]);
  const drawn = run.growth.length > 1 ? make("div", {class: "charts"}, chartFigure({id: "ids", title: "Ids", fromZero: true, ...stepAxis(run), curves: [
      {name: "all tables", style: "c-eval", points: run.growth.map(row => [row.step, row.ids]), isWhole: true, hasDots: true}]})) : null;
  return section("growing", "Growing tables", `${countText(last.ids)} ids in ${plural(last.tables.length, "table")} at step ${countText(last.step)}. ` +
    "Admissions, refusals, evictions and hits are counted since the run was last started.", drawn,
    table("growth", ["table", "ids", "admitted", "refused", "evicted", "hit rate", "memory"], rows));
}

function textSection(run) {
  if (run.texts.length === 0) return null;
  const rows = run.texts.map(([step, text]) => make("tr", {}, make("th", {scope: "row"}, "step " + countText(step)), make("td", {}, text)));
  return section("texts", "Text", "What the model wrote at its evaluations.",
    make("div", {class: "scroll", tabindex: "0"}, make("table", {class: "facts written"}, make("tbody", {}, ...rows))));
}

function memorySection(run) {
  if (run.memory.length === 0) return null;
  const bars = make("div", {class: "bars memory"});
  const add = (values, name, style) => values.forEach((bytes, rank) => bars.append(make("b", {}, `rank ${rank}${name}`),
    make("div", {class: "bar"}, make("span", {class: style, style: {width: percent(bytes / Math.max(...values, 1))}})), make("em", {}, bytesText(bytes))));
  add(run.memory, "", "p-input_dist");
  if (run.device_memory.some(bytes => bytes > 0)) add(run.device_memory, ", GPU", "p-optimizer");
  return section("memory", "Memory of each rank", "The most each process has had.", bars);
}

function settingsSection(run) {
  const rows = [];
  if (run.command) rows.push(["command", make("code", {}, run.command)]);
  for (const file of run.data) rows.push(["data", `${file.path}, ${bytesText(file.bytes)}`]);
  rows.push(...run.facts);
  const facts = make("table", {class: "facts", id: "facts"}, make("tbody", {}, ...rows.map(([name, value]) =>
    make("tr", {}, make("th", {scope: "row"}, name), make("td", {}, value)))));
  const parts = [section("machine", "Command, data and machine", "", make("div", {class: "scroll"}, facts))];
  if (run.config) parts.push(section("config", "Configuration", "config.toml, every setting of the run.", make("pre", {tabindex: "0"}, run.config)));
  return parts;
}

function numbersSection(run) {
  const {series} = run;
  if (series.step.length === 0) return null;
  const every = Math.max(1, (series.step.length - 1) / 399);
  const shown = [...new Set(Array.from({length: Math.min(400, series.step.length)}, (_, i) => Math.round(i * every)))];
  const rows = shown.map(i => [series.step[i], number(series.loss[i]), number(series.learning_rate[i]), number(series.speed[i]),
                               number(times(series.seconds[i], 1e3)), number(times(series.exposed[i], 1e3))]);
  const caption = shown.length < run.num_logged ? `${shown.length} of ${run.num_logged} steps; metrics.jsonl has all` : "";
  const steps = table("steps", ["step", "loss", "learning rate", `${run.unit} per second`, "ms", "exposed comm ms"], rows, caption);
  const names = run.evals.length > 0 ? [...figureNames(run), ...("samples" in run.evals[0] ? ["samples"] : [])] : [];
  const evals = names.length > 0 ? folded("Evaluations", table("evals", ["step", ...names.map(heading)],
    run.evals.map(row => [row.step, ...names.map(name => number(row[name]))]))) : null;
  return section("numbers", "Numbers", "", folded("Steps", steps), evals);
}

function showRun(run) {
  document.getElementById("head").append(...head(run));
  const drawn = charts(run);
  document.getElementById("main").append(...[
    drawn.length > 0 ? make("div", {class: "charts"}, ...drawn) : make("p", {}, "No step was logged."),
    textSection(run), breakdownSection(run), timelineSection(run), growthSection(run), planSection(run), tableSection(run), memorySection(run), numbersSection(run),
    ...settingsSection(run)].filter(Boolean));
}

showRun(JSON.parse(document.getElementById("data").textContent));
