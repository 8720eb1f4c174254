// Instances: rows with bars while they can be read, a field of tiles beyond.

import { colour, count, element, percent, seconds, short } from "./format.js";

const ROWS = 24;

// One load, by name: the order is the feed's (LOAD_FIELDS).
export function named([id, state, pending, dispatched, deferred, held, running, context, capacity, blocks, window, rate, stalled_s]) {
  const on_time = Math.max(pending - dispatched - deferred, 0);
  return {
    id, state, pending, held, running, blocks, window, rate, stalled_s, kv: capacity ? context / capacity : 0,
    sent_s: dispatched / rate, held_s: on_time / rate, deferred_s: deferred / rate, ahead_s: pending / rate,
  };
}

export class Instances {
  constructor(place, detail, light) {
    this.place = place;
    this.detail = detail;
    this.light = light;
    this.rows = new Map();
    this.pinned = null;
    place.onpointerover = (over) => this.light(over.target.closest("[data-id]")?.dataset.id ?? null);
    place.onpointerleave = () => this.light(null);
    place.onclick = (click) => this.pin(click.target.closest("[data-id]")?.dataset.id ?? null);
  }

  pin(id) {
    this.pinned = this.pinned === id ? null : id;
    if (this.last) this.show(...this.last);
  }

  show(loads, topology, pool, troubles = {}) {
    this.last = [loads, topology, pool, troubles];
    const tiles = loads.length > ROWS;
    if (this.place.className !== (tiles ? "tiles" : "rows")) {
      this.place.className = tiles ? "tiles" : "rows";
      this.place.parentElement.classList.toggle("many", tiles);
      this.place.replaceChildren();
      this.rows.clear();
    }
    const seen = new Set();
    for (const load of loads.map(named)) {
      seen.add(load.id);
      let row = this.rows.get(load.id);
      if (!row) {
        row = tiles ? element("i", { "data-id": load.id, tabindex: 0 }) : bars(load.id);
        this.rows.set(load.id, row);
        this.place.append(row);
      }
      const tint = colour(topology.members.indexOf(load.id), topology.members.length);
      tiles ? tile(row, load, pool, this.pinned === load.id, troubles[load.id]) : fill(row, load, pool, tint, troubles[load.id]);
    }
    for (const [id, row] of this.rows) if (!seen.has(id)) { row.remove(); this.rows.delete(id); }
    this.showDetail(tiles ? loads.find(([id]) => id === this.pinned) : null, topology, pool, troubles);
  }

  showDetail(load, topology, pool, troubles) {
    this.detail.hidden = !load;
    if (!load) return;
    const row = bars(load[0]);
    fill(row, named(load), pool, colour(topology.members.indexOf(load[0]), topology.members.length), troubles[load[0]]);
    this.detail.replaceChildren(row);
  }
}

function bars(id) {
  return element("div", { class: "row", "data-id": id },
    element("div", { class: "name" }, element("i"), element("b", {}, id), element("small")),
    element("div", { class: "bar" }, element("u", { class: "sent" }), element("u", { class: "held" }), element("u", { class: "deferred" }), element("s"), element("small")),
    element("div", { class: "bar kv" }, element("u", { class: "kv" }), element("small")),
    element("small", { class: "facts" }));
}

// What is wrong with it, in words, takes the place of its figures.
function fill(row, load, pool, tint, trouble) {
  const [name, work, kv, facts] = row.children, full_s = 2 * pool.slo_s;
  row.style.setProperty("--c", tint);
  row.dataset.state = load.state;
  name.children[2].textContent = load.state === "ready" ? (load.stalled_s >= 3 ? `stalled ${seconds(load.stalled_s)}` : "") : load.state;
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
  facts.classList.toggle("trouble", Boolean(trouble));
  facts.textContent = trouble ?? `${count(load.held)} held · ${count(load.running)} running · ${short(load.rate)} tokens/s`;
  row.title = `${load.id}: ${count(load.pending)} pending tokens, ${count(load.blocks)} blocks listed in its cache${trouble ? `; ${trouble}` : ""}`;
}

function tile(made, load, pool, pinned, trouble) {
  const heat = Math.min(1, load.ahead_s / (2 * pool.slo_s));
  made.dataset.state = load.state;
  made.classList.toggle("pinned", pinned);
  made.style.setProperty("--heat", `${Math.round(100 * Math.sqrt(heat))}%`);
  made.classList.toggle("over", load.ahead_s > pool.slo_s);
  made.title = `${load.id} (${load.state}): ${seconds(load.ahead_s)} ahead, ${load.held} held, ${load.running} running, KV ${percent(load.kv)}${trouble ? `; ${trouble}` : ""}`;
}
