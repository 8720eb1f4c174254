// The fleet in nine figures, each with its last minutes.

import { count, drawn, element, percent, seconds, short } from "./format.js";

const WINDOW_S = 30;

export function showFigures(place, history, now, pool) {
  const recent = since(history, WINDOW_S), total = now.traffic;
  const recentOrTotal = (has) => (has(recent) ? recent : total);
  const note = (used, words) => (used !== recent && total.ended ? "since the start" : words);
  const firsts = recentOrTotal((counts) => sum(counts.ttft_buckets) > 0), tokens = recentOrTotal((counts) => sum(counts.tpot_buckets) > 0);
  const timed = recentOrTotal((counts) => counts.on_time + counts.late > 0), prompts = recentOrTotal((counts) => counts.prompt_tokens > 0);
  const on_time = share(timed.on_time, timed.on_time + timed.late);
  const bad = recent.failed + recent.refused;
  const held = column(now.loads, 5), running = column(now.loads, 6);
  const ttft = (counts, part) => split(quantile(counts.ttft_buckets, pool.ttft_bounds_s, part), part, counts, pool.slo_s);
  const tpot = (counts, part) => quantile(counts.tpot_buckets, pool.tpot_bounds_s, part);
  const p50 = ttft(firsts, 0.5), p99 = ttft(firsts, 0.99);
  const figures = [
    ["answered / s", (recent.answered / Math.max(recent.span_s, 1)).toFixed(1), `${count(total.ended)} in all`, series(history, (grown, s) => grown.answered / s), recent.arrived > 1.2 * recent.answered && recent.late ? "warn" : ""],
    ["TTFT P50", bound(p50), note(firsts, "median"), series(history, (grown) => ttft(grown, 0.5)?.value ?? null), against(p50, pool.slo_s)],
    ["TTFT P99", bound(p99), note(firsts, `SLO ${pool.slo_s} s`), series(history, (grown) => ttft(grown, 0.99)?.value ?? null), against(p99, pool.slo_s)],
    ["on time", percent(on_time), note(timed, `within ${pool.slo_s} s`), series(history, (grown) => share(grown.on_time, grown.on_time + grown.late)), grade(on_time, 0.9, 0.7)],
    ["per output token", bound(tpot(tokens, 0.5)), note(tokens, `P50, P99 ${bound(tpot(tokens, 0.99))}`), series(history, (grown) => tpot(grown, 0.5)?.value ?? null), ""],
    ["output tokens / s", short(recent.output_tokens / Math.max(recent.span_s, 1)), `${short(total.output_tokens)} in all`, series(history, (grown, s) => grown.output_tokens / s), ""],
    ["hit rate", percent(share(prompts.hit_tokens, prompts.prompt_tokens)), fromTiers(prompts) || note(prompts, "of prompt tokens"), series(history, (grown) => share(grown.hit_tokens, grown.prompt_tokens)), ""],
    ["failed, refused", bad ? `${count(recent.failed)}, ${count(recent.refused)}` : "none", `${count(total.failed)}, ${count(total.refused)} in all${total.continued ? `; ${count(total.continued)} went on elsewhere` : ""}`, series(history, (grown) => grown.failed + grown.refused), bad ? "bad" : ""],
    ["held now", count(held), `${count(running)} running${runs(now.runs)}`, history.map((each) => each.held), ""],
  ];
  if (place.children.length !== figures.length) place.replaceChildren(...figures.map(() => tile()));
  figures.forEach(([name, value, words, points, mark], index) => {
    const made = place.children[index], [label, figure, small] = made.children;
    if (label.textContent !== name) label.textContent = name;
    figure.textContent = value;
    figure.className = mark;
    small.textContent = small.title = words;
    made.querySelector("path").setAttribute("d", line(points));
  });
}

const tile = () => element("div", { class: "figure" }, element("span"), element("b"), element("small"),
  drawn("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, drawn("path", { d: "" })));

// Agents' runs that wait for memory; nothing where none was admitted.
const runs = ([used, capacity, waiting]) => (capacity ? `; runs: ${count(waiting)} parked, ${percent(share(used, capacity))} of memory` : "");

// The parts of prompts that were to be loaded from tiers or pulled, and what was computed though a tier had it.
function fromTiers(counts) {
  const part = (tokens) => `${Math.round((100 * tokens) / counts.prompt_tokens)}%`;
  const parts = ["host", "disk", "pool", "peer"].filter((tier) => counts[`${tier}_tokens`] > 0).map((tier) => `${tier} ${part(counts[`${tier}_tokens`])}`);
  if (counts.forgone_tokens > 0) parts.push(`${part(counts.forgone_tokens)} in tiers computed`);
  return parts.join(", ");
}

const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);
const column = (rows, number) => rows.reduce((total, row) => total + row[number], 0);
const share = (part, whole) => (whole > 0 ? part / whole : null);
const grade = (value, good, bad) => (value === null ? "" : value >= good ? "good" : value < bad ? "bad" : "warn");
const against = (found, slo_s) => (found && found.value > slo_s ? "warn" : "");
const bound = (found) => (found === null ? "–" : (found.above ? "> " : "") + seconds(found.value));

// The value below which a part of all lies, straight within a bucket; above the last bound only that is known.
function quantile(buckets, bounds, part) {
  const wanted = part * sum(buckets);
  if (!wanted) return null;
  let below = 0;
  for (let index = 0; index < bounds.length; index++) {
    if (below + buckets[index] >= wanted) {
      const from = index ? bounds[index - 1] : 0;
      return { value: from + ((bounds[index] - from) * (wanted - below)) / buckets[index], from, to: bounds[index], above: false };
    }
    below += buckets[index];
  }
  return { value: bounds[bounds.length - 1], above: true };
}

// Which side of the SLO a quantile is on is known better than where it lies in its bucket.
function split(found, part, { on_time, late }, slo_s) {
  if (found === null || found.above || slo_s <= found.from || slo_s >= found.to) return found;
  const is_on_time = part <= on_time / Math.max(on_time + late, 1);
  return { ...found, value: is_on_time ? Math.min(found.value, slo_s) : Math.max(found.value, slo_s) };
}

// What was counted between two readings.
function grown(before, after) {
  const less = (now, then) => (Array.isArray(now) ? now.map((each, index) => each - (then[index] ?? 0)) : now - then);
  return Object.fromEntries(Object.keys(after).map((name) => [name, less(after[name], before[name])]));
}

function since(history, window_s) {
  const last = history[history.length - 1];
  const first = history.find((each) => each.at_s >= last.at_s - window_s) ?? last;
  return { ...grown(first.traffic, last.traffic), span_s: last.at_s - first.at_s };
}

// Heartbeats come every two seconds, so points are four seconds apart.
function series(history, of) {
  const points = [];
  for (let index = 4; index < history.length; index++) {
    const before = history[index - 4], after = history[index];
    after.grown ??= grown(before.traffic, after.traffic);
    points.push(of(after.grown, Math.max(after.at_s - before.at_s, 0.5)));
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
