// The last 15 minutes as pictures: what arrives and is answered, how much of it is not on time, what is held and overdue.

import { clock, count, drawn, element, percent } from "./format.js";

const WIDTH = 600, HEIGHT = 96, TOP = 6, SPAN_S = 900, STEP_S = 15;

const PICTURES = [
  { name: "Arriving and answered", unit: "requests/s", lines: [["arriving", "arrived", true], ["answered", "answered", true]] },
  { name: "Held and overdue", unit: "requests", lines: [["held", "held", false], ["overdue", "overdue", false]] },
  { name: "Not on time", unit: "of requests", lines: [["late", "late", "share"]] },
];

export class Minutes {
  constructor(place) {
    this.place = place;
    this.body = place.querySelector(".pictures");
    this.pools = {};
  }

  clear(fields) {
    this.fields = fields ?? [];
    this.pools = {};
  }

  add(samples) {
    for (const [pool, rows] of Object.entries(samples ?? {})) {
      const kept = (this.pools[pool] ??= []);
      for (const row of rows) kept.push(Object.fromEntries(this.fields.map((name, index) => [name, row[index]])));
      while (kept.length && kept[0].at_s < kept.at(-1).at_s - SPAN_S) kept.shift();
    }
  }

  show(pool, now_s) {
    const slots = slotted(this.pools[pool] ?? [], now_s);
    this.place.hidden = slots.every((slot) => slot === null);
    if (this.place.hidden) return;
    const text = JSON.stringify(slots);
    if (text === this.text) return;
    this.text = text;
    this.body.replaceChildren(...PICTURES.map((each) => picture(each, slots, now_s)));
  }
}

// Samples of every 15 s together, from 15 minutes ago until now; null where there are none.
function slotted(samples, now_s) {
  const slots = Array.from({ length: SPAN_S / STEP_S }, () => null), begin_s = now_s - SPAN_S;
  for (const each of samples) {
    const index = Math.floor((each.at_s - begin_s) / STEP_S);
    if (index < 0 || index >= slots.length) continue;
    const slot = (slots[index] ??= { over_s: 0, arrived: 0, answered: 0, on_time: 0, late: 0, held: 0, overdue: 0 });
    for (const name of ["over_s", "arrived", "answered", "on_time", "late"]) slot[name] += each[name];
    for (const name of ["held", "overdue"]) slot[name] = Math.max(slot[name], each[name]);
  }
  return slots;
}

function value(slot, name, kind) {
  if (slot === null) return null;
  if (kind === "share") return slot.on_time + slot.late ? slot.late / (slot.on_time + slot.late) : null;
  return kind ? slot[name] / Math.max(slot.over_s, 1) : slot[name];
}

function picture({ name, unit, lines }, slots, now_s) {
  const series = lines.map(([words, field, kind]) => ({ words, kind, values: slots.map((slot) => value(slot, field, kind)) }));
  const is_share = lines[0][2] === "share", known = series.flatMap(({ values }) => values).filter((each) => each !== null);
  const highest = is_share ? 1 : nice(Math.max(1, ...known));
  const shown = (figure) => (figure === null ? "–" : is_share ? percent(figure) : figure < 10 && lines[0][2] ? figure.toFixed(1) : count(figure));
  const last = (values) => values.findLast((each) => each !== null) ?? null;
  const words = series.map(({ words, values }) => `${words} ${shown(last(values))}`).join(", ");
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${name} in the last 15 minutes; now ${words}` });
  if (is_share) svg.append(drawn("path", { class: "bound", d: `M0 ${y(0.1, highest)}H${WIDTH}` }));
  series.forEach(({ words, values }) => svg.append(
    drawn("path", { class: `area ${words}`, d: path(values, highest, true) }), drawn("path", { class: `line ${words}`, d: path(values, highest, false) })));
  const legend = series.map(({ words, values }) => element("span", {}, element("i", { class: words }), `${words} `, element("b", {}, shown(last(values)))));
  return element("figure", {}, element("figcaption", {}, element("strong", {}, name), element("small", {}, unit), element("div", { class: "lines" }, ...legend)),
    element("div", { class: "frame" }, svg, element("em", {}, is_share ? "100%" : shown(highest))),
    element("div", { class: "times" }, ...[SPAN_S, 600, 300, 0].map((ago_s) => element("span", {}, ago_s ? clock(now_s - ago_s).slice(0, 5) : "now"))));
}

const y = (figure, highest) => (HEIGHT - (HEIGHT - TOP) * (figure / highest)).toFixed(1);

function path(values, highest, closed) {
  const step = WIDTH / values.length;
  let drawing = "", from = null;
  const end = (index) => { if (closed && from !== null) drawing += `L${(index * step).toFixed(1)} ${HEIGHT}L${(from * step).toFixed(1)} ${HEIGHT}Z`; from = null; };
  values.forEach((figure, index) => {
    if (figure === null) { end(index); return; }
    drawing += `${from === null ? "M" : "L"}${(index * step).toFixed(1)} ${y(figure, highest)}H${((index + 1) * step).toFixed(1)}`;
    from ??= index;
  });
  end(values.length);
  return drawing;
}

// The next of 1, 2, 5, 10, 20, ...
function nice(figure) {
  const power = 10 ** Math.floor(Math.log10(figure));
  return [1, 2, 5, 10].find((each) => each * power >= figure) * power;
}
