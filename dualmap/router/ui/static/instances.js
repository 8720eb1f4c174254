// Instances: rows with bars while they can be read, a field of tiles beyond. What is wrong comes first, in words.

import { colour } from "./colours.js";
import { age, arrange, byName, clock, count, element, percent, seconds, short, shown } from "./format.js";

const ROWS = 24;
const WRONG_ROWS = 12; // above the tiles
const RANKS = { critical: 0, warning: 1, notice: 2 };
const FIGURES = 10; // behind id and state
const LOAD_TOKENS = 8192; // of the load by which prices of tiers are shown

// One load, by name: the order is the feed's (LOAD_FIELDS).
export function named([id, state, pending, dispatched, deferred, held, running, context, capacity, blocks, window, rate, stalled_s]) {
  const on_time = Math.max(pending - dispatched - deferred, 0);
  return {
    id, state, pending, held, running, blocks, window, rate, stalled_s, kv: capacity ? context / capacity : 0,
    sent_s: dispatched / rate, held_s: on_time / rate, deferred_s: deferred / rate, ahead_s: pending / rate,
  };
}

// A load of which the state alone is known.
export const unknown = (id, state) => [id, state, ...new Array(FIGURES).fill(0), 1];

export class Instances {
  // `light` shows one in the rings, `pick` its requests.
  constructor(place, light, pick) {
    this.place = place;
    [this.rows, this.tiles] = place.children;
    this.light = light;
    this.made = new Map();
    this.picked = "";
    place.onpointerover = (over) => this.light(over.target.closest("[data-id]")?.dataset.id ?? null);
    place.onpointerleave = () => this.light(null);
    place.onfocusin = place.onpointerover;
    place.onfocusout = () => this.light(null);
    place.onclick = (click) => {
      const id = click.target.closest("[data-id]")?.dataset.id;
      if (id && !getSelection().toString()) pick(this.picked === id ? "" : id);
    };
  }

  pick(id) {
    this.picked = id;
    if (this.last) this.show(...this.last);
  }

  // `caches` has the tiers of instances, why their caches are not known exactly, and their adapters, by id.
  show(loads, pool, troubles, now_s, caches = {}) {
    this.last = [loads, pool, troubles, now_s, caches];
    const many = loads.length > ROWS;
    this.place.parentElement.classList.toggle("many", many);
    const rank = ({ id, state }) => RANKS[troubles[id]?.severity] ?? (state === "standby" ? 4 : 3);
    const sorted = loads.map(named).sort((one, other) => rank(one) - rank(other) || byName(one.id, other.id));
    const wrong = sorted.filter(({ id }) => troubles[id]).slice(0, WRONG_ROWS);
    const picked = sorted.filter(({ id }) => id === this.picked && !wrong.some((each) => each.id === id));
    const known = new Set();
    const of = (kind, make, fill) => (load) => {
      const key = `${kind} ${load.id}`;
      known.add(key);
      if (!this.made.has(key)) this.made.set(key, make(load.id));
      const made = this.made.get(key);
      fill(made, load, pool, troubles[load.id], now_s, caches);
      made.classList.toggle("picked", load.id === this.picked);
      made.setAttribute("aria-pressed", load.id === this.picked);
      return made;
    };
    arrange(this.rows, (many ? [...wrong, ...picked] : sorted).map(of("row", bars, fillRow)));
    arrange(this.tiles, many ? sorted.map(of("tile", tile, fillTile)) : []);
    for (const key of this.made.keys()) if (!known.has(key)) this.made.delete(key);
  }
}

function bars(id) {
  return element("button", { type: "button", class: "row", "data-id": id },
    element("span", { class: "name" }, element("i"), element("b", {}, shown(id)), element("small")),
    element("span", { class: "bar" }, element("u", { class: "sent" }), element("u", { class: "held" }), element("u", { class: "deferred" }), element("s"), element("small")),
    element("span", { class: "bar kv" }, element("u", { class: "kv" }), element("small")),
    element("small", { class: "facts" }),
    element("span", { class: "why" }));
}

function fillRow(row, load, pool, trouble, now_s, caches) {
  const [name, work, kv, facts, why] = row.children, full_s = 2 * pool.slo_s;
  row.style.setProperty("--c", colour(load.id));
  row.dataset.state = load.state;
  row.dataset.wrong = trouble?.severity ?? "";
  name.children[2].textContent = load.state !== "ready" ? load.state : trouble ? trouble.what.replace(load.id, "").replace(" is ", "").trim()
    : load.stalled_s >= 3 ? `stalled ${seconds(load.stalled_s)}` : "";
  const fit = Math.min(1, full_s / Math.max(load.ahead_s, 1e-9));
  [load.sent_s, load.held_s, load.deferred_s].forEach((part_s, index) => {
    work.children[index].style.width = `${(100 * fit * part_s) / full_s}%`;
  });
  work.children[3].style.left = "50%";
  work.children[4].textContent = load.ahead_s > 0.005 ? seconds(load.ahead_s) : "";
  work.classList.toggle("over", load.ahead_s > pool.slo_s);
  kv.children[0].style.width = `${Math.min(100, 100 * load.kv)}%`;
  kv.children[1].textContent = load.kv ? percent(load.kv) : "";
  kv.classList.toggle("over", load.kv > 1);
  facts.textContent = load.rate > 1 ? `${count(load.held)} held · ${count(load.running)} running · ${short(load.rate)} tokens/s` : "";
  const tiers = caches.tiers?.[load.id] ?? [], doubt = caches.doubts?.[load.id];
  facts.textContent += tiers.map(([tier, , start_s, token_s]) => ` · ${tier} ${seconds(start_s + LOAD_TOKENS * token_s)}`).join("");
  const [adapters, names] = caches.adapters?.[load.id] ?? [0, []];
  facts.textContent += adapters ? ` · ${count(adapters)} adapters` : "";
  why.textContent = trouble ? `${since(trouble, now_s)}${trouble.why ? `: ${trouble.why}` : ""}` : doubt ? `its cache is estimated: ${doubt}` : "";
  const loaded = tiers.map(([tier, tokens, start_s, token_s, reason]) =>
    `\n${tier}: ${short(tokens)} tokens, a load of ${count(LOAD_TOKENS)} takes ${seconds(start_s + LOAD_TOKENS * token_s)}${reason ? ` by default, as ${reason}` : ""}`);
  row.title = `${load.id}: ${count(load.pending)} pending tokens, ${count(load.blocks)} blocks listed in its cache. A click shows its requests${loaded.join("")}`
    + (adapters ? `\nadapters: ${names.join(", ")}${adapters > names.length ? ` and ${count(adapters - names.length)} more` : ""}` : "");
}

const since = (trouble, now_s) => `${trouble.or_longer ? "since before" : "since"} ${clock(trouble.since_s)}, ${age(now_s - trouble.since_s)}`;

const tile = (id) => element("button", { type: "button", class: "tile", "data-id": id });

function fillTile(made, load, pool, trouble) {
  const heat = Math.min(1, load.ahead_s / (2 * pool.slo_s));
  made.dataset.state = load.state;
  made.dataset.wrong = trouble?.severity ?? "";
  made.style.setProperty("--heat", `${Math.round(100 * Math.sqrt(heat))}%`);
  made.classList.toggle("over", load.ahead_s > pool.slo_s);
  made.title = `${load.id} (${load.state}): ${seconds(load.ahead_s)} ahead, ${load.held} held, ${load.running} running, KV ${percent(load.kv)}${trouble ? `; ${trouble.what}: ${trouble.why}` : ""}`;
  made.setAttribute("aria-label", made.title);
}
