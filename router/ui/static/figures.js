// The fleet in six figures, each with its last minutes.

import { count, drawn, element, percent, short } from "./format.js";

const WINDOW_S = 30;

export function showFigures(place, history, now, pool) {
  const recent = since(history, WINDOW_S), total = now.traffic;
  const over = (part, whole) => share(recent[part], recent[whole]) ?? share(total[part], total[whole]);
  const seen = recent.on_time + recent.late, ever = total.on_time + total.late;
  const on_time = seen ? recent.on_time / seen : ever ? total.on_time / ever : null;
  const held = now.loads.reduce((sum, row) => sum + row[5], 0);
  const running = now.loads.reduce((sum, row) => sum + row[6], 0);
  const figures = [
    ["requests / s", (recent.ended / Math.max(recent.span_s, 1)).toFixed(1), `${count(total.ended)} in all`, series(history, (a, b, s) => (b.ended - a.ended) / s), ""],
    ["on time", percent(on_time), `first token within ${pool.slo_s} s`, series(history, (a, b) => share(b.on_time - a.on_time, b.on_time - a.on_time + b.late - a.late)), grade(on_time, 0.9, 0.7)],
    ["hit rate", percent(over("hit_tokens", "prompt_tokens")), "of the prompt tokens", series(history, (a, b) => share(b.hit_tokens - a.hit_tokens, b.prompt_tokens - a.prompt_tokens)), ""],
    ["refused", percent(over("refused", "ended")), `${count(total.refused)} in all, ${count(total.failed)} failed`, series(history, (a, b, s) => (b.refused - a.refused) / s), recent.refused ? "bad" : ""],
    ["held now", count(held), `${count(running)} running`, history.map((each) => each.held), ""],
    ["pending tokens", short(now.loads.reduce((sum, row) => sum + row[2], 0)), "still to be prefilled", history.map((each) => each.pending), ""],
  ];
  if (place.children.length !== figures.length) place.replaceChildren(...figures.map(() => tile()));
  figures.forEach(([name, value, note, points, mark], index) => {
    const made = place.children[index], [label, figure, small] = made.children;
    if (label.textContent !== name) label.textContent = name;
    figure.textContent = value;
    figure.className = mark;
    small.textContent = note;
    made.querySelector("path").setAttribute("d", line(points));
  });
}

const tile = () => element("div", { class: "figure" }, element("span"), element("b"), element("small"),
  drawn("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none" }, drawn("path", { d: "" })));

const share = (part, whole) => (whole > 0 ? part / whole : null);
const grade = (value, good, bad) => (value === null ? "" : value >= good ? "good" : value < bad ? "bad" : "warn");

// What was counted in the last `window_s`.
function since(history, window_s) {
  const last = history[history.length - 1];
  const first = history.find((each) => each.at_s >= last.at_s - window_s) ?? last;
  const grown = Object.fromEntries(Object.keys(last.traffic).map((name) => [name, last.traffic[name] - first.traffic[name]]));
  return { ...grown, span_s: last.at_s - first.at_s };
}

// Heartbeats come every two seconds, so points are four seconds apart.
function series(history, of) {
  const points = [];
  for (let index = 4; index < history.length; index++) {
    const before = history[index - 4], after = history[index];
    points.push(of(before.traffic, after.traffic, Math.max(after.at_s - before.at_s, 0.5)));
  }
  return points;
}

function line(points) {
  const known = points.filter((value) => value !== null);
  if (known.length < 2) return "";
  const highest = Math.max(...known, 1e-9), step = 100 / (points.length - 1);
  let drawing = "", pen = "M";
  points.forEach((value, index) => {
    if (value === null) { pen = "M"; return; }
    drawing += `${pen}${(index * step).toFixed(1)} ${(22 - 20 * (value / highest)).toFixed(1)}`;
    pen = "L";
  });
  return drawing;
}
