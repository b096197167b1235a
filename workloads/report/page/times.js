// Where the time of a step goes: bars per rank, and a timeline.
"use strict";

const kPhases = ["data", "input_dist", "lookup", "output_dist", "dense", "backward", "all_reduce", "optimizer", "other", "idle"];
const phaseTitle = phase => phase === "all_reduce" ? "all-reduce" : phase.replaceAll("_", " ");
const phaseStyle = phase => "p-" + (kPhases.includes(phase) ? phase : "other");

function breakdownSection(run) {
  if (run.breakdowns.length === 0) return null;
  const seen = new Set(run.breakdowns.flatMap(one => Object.keys(one.phases)));
  const phases = [...kPhases.filter(phase => seen.has(phase)), ...[...seen].filter(phase => !kPhases.includes(phase)).sort()];
  const perStep = (one, seconds) => one.steps > 0 ? seconds / one.steps : 0;
  const longest = Math.max(...run.breakdowns.map(one => perStep(one, one.seconds)));
  const piece = (phase, seconds, waits) => seconds > 0 && longest > 0
    ? make("span", {class: phaseStyle(phase) + (waits ? " waits" : ""), style: {width: percent(seconds / longest)},
                    title: `${phaseTitle(phase)}${waits ? ", waiting for communication" : ""}: ${secondsText(seconds)} of a step`})
    : null;
  const bars = make("div", {class: "bars", "aria-hidden": "true"});
  const rows = [];
  for (const one of run.breakdowns) {
    const bar = make("div", {class: "bar"});
    let waitedOfAll = 0;
    for (const phase of phases) {
      const [seconds, waited] = one.phases[phase] ?? [0, 0];
      waitedOfAll += waited;
      bar.append(...[piece(phase, perStep(one, seconds - Math.min(waited, seconds)), false),
                     piece(phase, perStep(one, Math.min(waited, seconds)), true)].filter(Boolean));
    }
    bars.append(make("b", {}, "rank " + one.rank), bar, make("em", {}, secondsText(perStep(one, one.seconds))));
    const ms = seconds => (1e3 * perStep(one, seconds)).toFixed(3);
    rows.push([one.rank, ...phases.map(phase => ms(one.phases[phase]?.[0] ?? 0)), ms(one.seconds), ms(waitedOfAll)]);
  }
  const names = phases.map(phase => [phaseStyle(phase), phaseTitle(phase)]);
  return section("times", "Where a step goes",
    `Mean over ${plural(run.breakdowns[0].steps, "step")}. Each part is without those inside it; idle is what no part covers.`,
    legend([...names, ["waits p-other", "hatched: waiting for communication"]]), bars,
    folded("Numbers", table("breakdown", ["rank", ...phases.map(phaseTitle), "step", "exposed comm"], rows,
                            "Milliseconds of a mean step")));
}

function timelineSection(run) {
  const line = run.timeline;
  if (!line) return null;
  const drawings = line.lanes.map(() => make("svg", {viewBox: "0 0 1000 100", preserveAspectRatio: "none"}));
  for (const [lane, begin, duration, phase, name, step, waits] of line.spans) {
    drawings[lane].append(make("rect", {class: waits ? "t-wait" : phaseStyle(line.phases[phase]),
      x: (1000 * begin / line.length).toFixed(2), width: Math.max(0.3, 1000 * duration / line.length).toFixed(2),
      y: waits ? 50 : 0, height: waits ? 50 : 100},
      make("title", {}, `${line.names[name]}, step ${step}: ${secondsText(duration / 1e6)}`)));
  }
  const lanes = make("div", {class: "lanes", "aria-hidden": "true"});
  const laneName = thread => thread === 0 ? "" : thread === 1000 ? " · GPU" : " · thread " + thread;
  line.lanes.forEach(([rank, thread], i) =>
    lanes.append(make("b", {}, `rank ${rank}${laneName(thread)}`), drawings[i]));
  const scale = line.length >= 2e6 ? [1e6, "s"] : [1e3, "ms"];
  const ticks = ticksOf(0, line.length / scale[0], 5).filter(tick => tick * scale[0] <= line.length);
  lanes.append(make("b"), make("div", {class: "marks"}, ...line.marks.map(([step, at]) =>
      make("span", {style: {left: percent(at / line.length)}}, "step " + step))),
    make("b"), make("div", {class: "xs"}, ...ticks.map(tick =>
      make("span", {style: {left: percent(tick * scale[0] / line.length)}}, tickText(tick, stepOf(ticks))))),
    make("b"), make("div", {class: "x-name"}, scale[1]));
  const note = make("p", {class: "note"}, `${plural(line.marks.length, "step")}, ${secondsText(line.length / 1e6)}. ` +
    "Colours as above; the lower half marks waiting for communication. ",
    make("a", {href: "trace.json", download: ""}, "trace.json"), " opens in Perfetto and in chrome://tracing.");
  const part = section("timeline", "Timeline", "", note, lanes);
  if (line.more > 0) part.append(make("p", {class: "note"}, `${plural(line.more, "more lane")} in trace.json.`));
  return part;
}
