// Which part of which table lies on which rank: area by bytes, colour by traffic.
"use strict";

const kMaxPictures = 16;  // the table has all ranks

// Tiles of a box of `width` by `height`, areas in the ratios of `sizes` (largest first), as square as
// rows of tiles allow.
function squarify(sizes, width, height) {
  const total = sizes.reduce((sum, size) => sum + size, 0);
  const areas = sizes.map(size => size / total * width * height);
  const tiles = [];
  let left = 0, top = 0, first = 0;
  let [wide, high] = [width, height];
  while (first < areas.length) {
    const length = Math.min(wide, high);
    let sum = 0, worst = Infinity, last = first;
    for (; last < areas.length; ++last) {
      const thickness = (sum + areas[last]) / length;
      const ratio = Math.max(areas[first] / thickness ** 2, thickness ** 2 / areas[last]);
      if (last > first && ratio > worst) break;
      worst = ratio;
      sum += areas[last];
    }
    const thickness = sum / length;
    let along = 0;
    for (let i = first; i < last; ++i) {
      const side = areas[i] / thickness;
      tiles.push(wide >= high ? {left, top: top + along, width: thickness, height: side}
                              : {left: left + along, top, width: side, height: thickness});
      along += side;
    }
    if (wide >= high) { left += thickness; wide -= thickness; } else { top += thickness; high -= thickness; }
    first = last;
  }
  return tiles;
}

const kindStyle = kind => ["table_wise", "row_wise", "column_wise", "data_parallel"].includes(kind) ? "s-" + kind
                        : kind.includes("row") ? "s-row_wise" : "s-column_wise";
const rangeText = (first, count) => count === 0 ? "none" : `${countText(first)}–${countText(first + count - 1)}`;

function tableSection(run) {
  if (run.tables.length === 0) return null;
  const ranks = Array.from({length: run.ranks}, () => []);
  for (const one of run.tables) {
    for (const shard of one.shards) if (shard.rank >= 0) (ranks[shard.rank] ??= []).push({table: one, ...shard});
  }
  const bytes = ranks.map(held => held.reduce((sum, shard) => sum + shard.bytes, 0));
  const [most, sum] = [Math.max(...bytes), bytes.reduce((a, b) => a + b, 0)];
  const traffic = ranks.flat().map(shard => shard.traffic).filter(isNumber);
  const [hot, hasTraffic] = [Math.max(0, ...traffic), traffic.length > 0];
  const shown = ranks.slice(0, kMaxPictures);
  const pictures = make("div", {class: "placement", "aria-hidden": "true"},
    ...shown.map((held, rank) => rankPicture(held, rank, bytes[rank] / most, shown.length, hot)));
  const kinds = [...new Set(run.tables.map(one => one.sharding))].map(kind => [(hasTraffic ? "cut " : "") + kindStyle(kind), kind.replaceAll("_", " ")]);
  const rows = run.tables.flatMap(one => one.shards.map(shard =>
    [one.name, one.sharding, shard.rank, rangeText(shard.row, shard.rows), rangeText(shard.column, shard.columns),
     countText(shard.bytes), isNumber(shard.traffic) ? countText(Math.round(shard.traffic)) : "–"]));
  const scale = hasTraffic ? make("p", {class: "scale"}, "0 B ", make("i"), " " + bytesText(hot) + " read in a step") : null;
  const part = section("tables", "Tables",
    `${plural(run.tables.length, "table")}, ${bytesText(sum)} on ${plural(ranks.length, "rank")}; the fullest holds ` +
    `${fixed(sum > 0 ? most * ranks.length / sum : 1, 2)} times the mean. Areas are bytes, on one scale; lines show how a table is cut` +
    (hasTraffic ? "; colours are what a step reads of it." : "."), legend(kinds), scale, pictures);
  if (ranks.length > kMaxPictures) part.append(make("p", {class: "note"}, `${ranks.length - kMaxPictures} more ranks are in the table.`));
  part.append(folded("Numbers", table("placement", ["table", "sharding", "rank", "rows", "columns", "bytes", "bytes read in a step"], rows)));
  return part;
}

function rankPicture(held, rank, share, numRanks, hot) {
  const [width, height] = [1000, Math.max(70, 260 / Math.sqrt(numRanks)) * Math.max(share, 0.02)];
  const shards = held.filter(shard => shard.bytes > 0).sort((a, b) => b.bytes - a.bytes);
  const tiles = squarify(shards.map(shard => shard.bytes), width, height);
  const room = make("div", {class: "room", style: {height: height.toFixed(1) + "px"}});
  tiles.forEach((tile, i) => {
    const shard = shards[i];
    let title = `${shard.table.name}: ${bytesText(shard.bytes)}`;
    if (shard.rows !== shard.table.rows) title += `, rows ${rangeText(shard.row, shard.rows)} of ${countText(shard.table.rows)}`;
    if (shard.columns !== shard.table.columns) title += `, columns ${rangeText(shard.column, shard.columns)} of ${countText(shard.table.columns)}`;
    const style = {left: percent(tile.left / width), top: percent(tile.top / height),
                   width: percent(tile.width / width), height: percent(tile.height / height)};
    if (isNumber(shard.traffic)) {
      title += `, ${bytesText(shard.traffic)} read in a step`;
      style["--heat"] = percent(hot > 0 ? Math.sqrt(shard.traffic / hot) : 0);
    }
    room.append(make("div", {class: `tile ${kindStyle(shard.table.sharding)}${isNumber(shard.traffic) ? " heat" : ""}`, style, title},
      tile.width > 40 && tile.height > 17 ? make("span", {}, shard.table.name) : null));
  });
  const bytes = shards.reduce((sum, shard) => sum + shard.bytes, 0);
  return make("figure", {}, make("figcaption", {}, make("b", {}, "rank " + rank), bytesText(bytes)), room);
}
