// The latest requests of all replicas, the newest first; a request that is still under way is renewed in its place.

import { clock, colour, count, element, seconds } from "./format.js";

const KEPT = 60;
const WORDS = {
  completed: ["good", "completed"], client_error: ["warn", "client error"], client_gone: ["dim", "client left"],
  upstream_failed: ["bad", "instance failed"], timed_out: ["bad", "timed out"], cut_off: ["bad", "cut off"],
  refused: ["bad", "refused"], internal_error: ["bad", "internal error"],
};

// The order is the feed's (REQUEST_FIELDS).
const named = ([id, at_s, model, pool, instance, prompt, cached, held_s, first_s, done_s, slo_s, outcome, reason, tries, replica]) =>
  ({ id, at_s, model, pool, instance, prompt, cached, held_s, first_s, done_s, slo_s, outcome, reason, tries, replica });

export class Requests {
  constructor(table, open) {
    this.body = table.tBodies[0];
    this.panel = table.closest("section");
    this.byId = new Map();
    this.dirty = false;
    this.body.onclick = (click) => { const row = click.target.closest("tr"); if (row) open(row.dataset.id); };
    this.body.onkeydown = (press) => { if (press.key === "Enter") open(press.target.closest("tr").dataset.id); };
  }

  clear() {
    this.byId.clear();
    this.dirty = true;
  }

  add(rows) {
    for (const request of rows.map(named)) {
      const known = this.byId.get(request.id);
      if (known?.outcome && !request.outcome) continue;
      if (known) request.at_s = known.at_s; // a request under way estimates its own beginning
      this.byId.set(request.id, request);
    }
    this.dirty ||= rows.length > 0;
  }

  show(topology) {
    if (!this.dirty) return;
    this.dirty = false;
    const newest = [...this.byId.values()].sort((one, other) => other.at_s - one.at_s).slice(0, KEPT);
    this.byId = new Map(newest.map((request) => [request.id, request]));
    const present = new Map([...this.body.children].map((row) => [row.dataset.id, row]));
    this.body.replaceChildren(...newest.map((request) => {
      const text = JSON.stringify(request), row = present.get(request.id);
      return row?.dataset.text === text ? row : line(request, topology, text, !row);
    }));
    this.panel.classList.toggle("some", newest.length > 0);
  }
}

function line(request, topology, text, fresh) {
  const tint = colour(topology.members.indexOf(request.instance), topology.members.length);
  const [mark, words] = WORDS[request.outcome] ?? ["live", request.first_s !== null ? "answering" : request.instance ? "running" : "held"];
  const hit = request.prompt ? request.cached / request.prompt : 0;
  const row = element("tr", { "data-id": request.id, "data-text": text, tabindex: 0, class: fresh ? "fresh" : "" },
    element("td", {}, clock(request.at_s)),
    element("td", { title: `${request.id}, placed by ${request.replica}` }, element("code", {}, request.id)),
    element("td", {}, element("span", { class: "share", style: `--w: ${(100 * hit).toFixed(1)}%; --c: ${tint}` }), `${count(request.prompt)}`, element("small", {}, hit >= 0.005 ? ` ${Math.round(100 * hit)}% hit` : "")),
    element("td", {}, element("span", { class: "instance", style: `--c: ${tint}` }, request.instance ?? "–"), element("small", {}, request.tries > 1 ? ` try ${request.tries}` : "")),
    element("td", {}, wait(request), request.first_s === null ? "" : seconds(request.first_s)),
    element("td", { class: "n" }, seconds(request.done_s)),
    element("td", {}, element("span", { class: `chip ${mark}` }, words)));
  return row;
}

// Time held and time to first token, on a scale that ends at twice the SLO.
function wait({ held_s, first_s, slo_s }) {
  const width = (time_s) => `${Math.min(100, (50 * (time_s ?? 0)) / slo_s).toFixed(1)}%`;
  const late = first_s !== null && first_s > slo_s;
  return element("span", { class: late ? "wait late" : "wait", style: `--first: ${width(first_s)}; --held: ${width(held_s)}`, title: `held ${seconds(held_s)}` });
}
