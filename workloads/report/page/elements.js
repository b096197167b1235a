// Elements and texts. Whatever comes from a run becomes text or an attribute, never markup.
"use strict";

function make(tag, properties = {}, ...children) {
  const isDrawing = ["svg", "path", "rect", "circle", "title"].includes(tag);
  const element = isDrawing ? document.createElementNS("http:" + "//www.w3.org/2000/svg", tag)
                            : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined && child !== ""));
  return element;
}

const isNumber = value => typeof value === "number" && Number.isFinite(value);
const percent = share => (100 * share).toFixed(3) + "%";
const threeDigits = value => value.toFixed(Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2);
const number = value => isNumber(value) ? String(Number(value.toPrecision(6))) : "–";
const fixed = (value, digits) => isNumber(value) ? value.toFixed(digits) : "–";
const countText = value => String(value).replace(/\B(?=(\d{3})+$)/g, "\u202f");
const plural = (count, word) => countText(count) + " " + word + (count === 1 ? "" : "s");

// Three digits and the largest unit that leaves one before the point.
function scaled(value, units) {
  if (!isNumber(value)) return "–";
  const [size, name] = units.find(([size]) => Math.abs(value) >= 0.9995 * size) ?? units[units.length - 1];
  return (Number.isInteger(value / size) ? String(value / size) : threeDigits(value / size)) + name;
}
const shortNumber = value => Math.abs(value) < 9995 ? scaled(value, [[1, ""]]) : scaled(value, [[1e9, "G"], [1e6, "M"], [1e3, "k"]]);
const bytesText = value => scaled(value, [[1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " kB"], [1, " B"]]);
const times = (value, factor) => isNumber(value) ? value * factor : null;
function secondsText(value) {
  if (!isNumber(value)) return "–";
  if (value >= 7200) return `${Math.floor(value / 3600)} h ${Math.floor(value / 60) % 60} min`;
  if (value >= 120) return `${Math.floor(Math.round(value) / 60)} min ${Math.round(value) % 60} s`;
  return value >= 0.9995 ? threeDigits(value) + " s" : value >= 0.9995e-3 ? threeDigits(value * 1e3) + " ms"
                                                                         : threeDigits(value * 1e6) + " µs";
}
// A name of metrics.jsonl for people: "energy_error" is "Energy error".
function heading(name) {
  const known = {auc: "AUC", normalized_entropy: "Normalised entropy"};
  const words = name.replaceAll("_", " ");
  return known[name] ?? words.charAt(0).toUpperCase() + words.slice(1);
}

function table(id, titles, rows, caption) {
  const cell = (value, at) => at === 0 ? make("th", {scope: "row"}, String(value)) : make("td", {}, String(value));
  return make("div", {class: "scroll", tabindex: "0"}, make("table", {id},
    caption ? make("caption", {}, caption) : null,
    make("thead", {}, make("tr", {}, ...titles.map(title => make("th", {scope: "col"}, title)))),
    make("tbody", {}, ...rows.map(row => make("tr", {}, ...row.map(cell))))));
}
const folded = (title, content) => make("details", {}, make("summary", {}, title), content);
const section = (id, title, note, ...content) =>
  make("section", {id}, make("h2", {}, title), note ? make("p", {class: "note"}, note) : null, ...content);
const legend = items => make("ul", {class: "legend"},
  ...items.map(([style, name]) => make("li", {}, make("i", {class: style}), name)));
