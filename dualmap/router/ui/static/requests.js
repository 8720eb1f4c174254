// The latest requests of all replicas, the newest first; a request that is still under way is renewed in its place. Rows
// stand still while somebody points at them or has one focused.

import { colour } from "./colours.js";
import { byName, clock, count, element, fit, instance, seconds } from "./format.js";

const KEPT = 400, KEPT_NOTABLE = 300; // beside the latest ones
const WORDS = {
  completed: ["good", "completed"], ended: ["good", "ended"], client_error: ["warn", "client error"], client_gone: ["dim", "client left"],
  upstream_failed: ["bad", "instance failed"], timed_out: ["bad", "timed out"], cut_off: ["bad", "cut off"],
  refused: ["bad", "refused"], internal_error: ["bad", "internal error"],
};

// The order is the feed's (REQUEST_FIELDS).
const named = ([id, at_s, model, pool, at, prompt, cached, held_s, first_s, done_s, slo_s, outcome, reason, tries, replica, key, failure, tenant, limited, is_late, notable]) =>
  ({ id, at_s, model, pool, instance: at, prompt, cached, held_s, first_s, done_s, slo_s, outcome, tries, replica, failure, tenant, limited, is_late, notable });

const late = ({ is_late, first_s, slo_s, outcome, at_s }, now_s) => is_late || (first_s === null && !outcome && now_s - at_s > slo_s);
const failed = ({ outcome }) => Boolean(outcome) && !["completed", "ended"].includes(outcome) && outcome !== "client_gone";
const KINDS = { all: () => true, late, failed, retried: ({ tries }) => tries > 1 };

export class Requests {
  constructor(panel, open, picked) {
    this.panel = panel;
    this.body = panel.querySelector("tbody");
    this.chips = panel.querySelector("#kinds");
    this.select = panel.querySelector("#of");
    this.tenants = panel.querySelector("#by");
    this.waiting = panel.querySelector("#waiting");
    this.picked = picked;
    this.byId = new Map();
    this.rows = new Map();
    this.kind = "all";
    this.pointed = false;
    this.now_s = 0;
    const list = this.body;
    list.onclick = (click) => { const row = click.target.closest("tr"); if (row) open(row.dataset.id); };
    list.onkeydown = (press) => this.press(press, open);
    // A finger does not hover.
    list.onpointerover = (over) => { this.pointed ||= over.pointerType !== "touch"; };
    list.onpointerleave = () => { this.pointed = false; this.show(); };
    list.onfocusout = () => setTimeout(() => this.show());
    this.waiting.onclick = () => this.release();
    for (const kind of Object.keys(KINDS)) {
      const chip = element("button", { type: "button", class: "filter", "data-kind": kind });
      chip.onclick = () => this.filter("kind", kind);
      this.chips.append(chip);
    }
    this.select.onchange = () => this.filter("instance", this.select.value);
    this.tenants.onchange = () => this.filter("tenant", this.tenants.value);
  }

  get frozen() {
    return this.body.rows.length > 0 && (this.pointed || this.body.contains(document.activeElement));
  }

  press(press, open) {
    const row = press.target.closest("tr");
    if (press.key === "Enter" || press.key === " ") open(row.dataset.id);
    else if (press.key === "ArrowDown") row.nextElementSibling?.focus();
    else if (press.key === "ArrowUp") row.previousElementSibling?.focus();
    else if (press.key === "Escape") this.release();
    else return;
    press.preventDefault();
  }

  release() {
    this.pointed = false;
    document.activeElement?.blur();
    this.body.closest(".scroll").scrollTop = 0;
    this.show(true);
  }

  // `name` is "kind", "instance" or "tenant".
  filter(name, value) {
    if (name === "kind") this.kind = value;
    else if (name === "tenant") {
      if (value && ![...this.tenants.options].some((option) => option.value === value)) this.tenants.append(new Option(value, value));
      this.tenants.value = value;
    } else {
      if (value && ![...this.select.options].some((option) => option.value === value)) this.select.append(new Option(value, value));
      this.select.value = value;
      this.picked(value);
    }
    this.show(true);
  }

  clear() {
    this.byId.clear();
  }

  add(rows, now_s) {
    this.now_s = now_s;
    for (const request of rows.map(named)) {
      const known = this.byId.get(request.id);
      if (known?.outcome && !request.outcome && known.at_s >= request.at_s - 0.5) continue;
      if (known) request.at_s = known.at_s; // a request under way estimates its own beginning
      this.byId.set(request.id, request);
    }
    const newest = [...this.byId.values()].sort((one, other) => other.at_s - one.at_s);
    const older = newest.slice(KEPT).filter(({ notable }) => notable).slice(0, KEPT_NOTABLE);
    this.kept = [...newest.slice(0, KEPT), ...older];
    this.byId = new Map(this.kept.map((request) => [request.id, request]));
  }

  show(anew = false) {
    if (!this.kept) return;
    this.offerTenants();
    const of = this.select.value, by = this.tenants.value;
    const chosen = this.kept.filter((request) => (!of || request.instance === of) && (!by || request.tenant === by));
    for (const chip of this.chips.children) {
      const { kind } = chip.dataset, number = kind === "all" ? "" : ` ${chosen.filter((each) => KINDS[kind](each, this.now_s)).length}`;
      if (chip.textContent !== kind + number) chip.textContent = kind + number;
      chip.setAttribute("aria-pressed", kind === this.kind);
      chip.classList.toggle("some", number > 0);
    }
    const wanted = chosen.filter((each) => KINDS[this.kind](each, this.now_s));
    const frozen = this.frozen && !anew, strange = frozen ? wanted.filter(({ id }) => !this.rows.has(id)).length : 0;
    this.waiting.hidden = !strange;
    this.waiting.textContent = `${strange} new: show`;
    this.panel.classList.toggle("some", this.kept.length > 0);
    this.panel.classList.toggle("none", this.kept.length > 0 && !wanted.length);
    if (frozen) {
      for (const [id, row] of this.rows) if (this.byId.has(id)) fill(row, this.byId.get(id), this.now_s);
      return;
    }
    this.arrange(wanted);
    fit();
  }

  // New rows are put before their successors: nothing that stays is taken out, so scrolling and focus stay as well.
  arrange(wanted) {
    const keep = new Set(wanted.map(({ id }) => id)), first = this.rows.size === 0;
    for (const [id, row] of this.rows) if (!keep.has(id)) { row.remove(); this.rows.delete(id); }
    let next = this.body.firstElementChild;
    for (const request of wanted) {
      let row = this.rows.get(request.id);
      if (!row) {
        row = element("tr", { "data-id": request.id, tabindex: -1, class: first ? "" : "fresh" });
        this.rows.set(request.id, row);
      }
      fill(row, request, this.now_s);
      if (row === next) next = next.nextElementSibling;
      else this.body.insertBefore(row, next);
    }
    this.body.querySelector("tr[tabindex='0']")?.setAttribute("tabindex", -1);
    this.body.firstElementChild?.setAttribute("tabindex", 0);
  }

  // The tenants to choose from: those of the requests that are kept.
  offerTenants() {
    const names = [...new Set([...this.kept.map(({ tenant }) => tenant), this.tenants.value])].filter(Boolean).sort(byName), text = names.join("\n");
    if (text === this.offeredTenants || document.activeElement === this.tenants) return;
    this.offeredTenants = text;
    const chosen = this.tenants.value;
    this.tenants.replaceChildren(new Option("every tenant", ""), ...names.map((name) => new Option(name, name)));
    this.tenants.value = chosen;
    this.tenants.hidden = !names.length;
  }

  // The instances to choose from.
  offer(ids) {
    const wanted = [...ids].sort(byName), text = wanted.join("\n");
    if (text === this.offered || document.activeElement === this.select) return;
    this.offered = text;
    this.panel.style.setProperty("--names", `${Math.min(32, Math.max(8, ...wanted.map((id) => id.length))) * 7.9 + 40}px`);
    const chosen = this.select.value;
    if (chosen && !wanted.includes(chosen)) wanted.push(chosen);
    this.select.replaceChildren(new Option("every instance", ""), ...wanted.map((id) => new Option(id, id)));
    this.select.value = chosen;
  }
}

function fill(row, request, now_s) {
  const is_late = late(request, now_s), waits = is_late && request.first_s === null && !request.outcome;
  const text = JSON.stringify([request, is_late, waits && Math.floor(now_s), colour(request.instance)]);
  if (row.dataset.text === text) return;
  row.dataset.text = text;
  const tint = colour(request.instance);
  const [mark, words] = WORDS[request.outcome] ?? ["live", request.first_s !== null ? "answering" : request.instance ? "running" : "held"];
  const hit = request.prompt ? request.cached / request.prompt : 0;
  row.classList.toggle("failed", mark === "bad");
  row.classList.toggle("late", is_late);
  row.replaceChildren(
    element("td", {}, clock(request.at_s)),
    element("td", { title: [request.id, request.tenant && `of tenant ${request.tenant}`, `placed by ${request.replica}`].filter(Boolean).join(", ") }, element("code", {}, request.id), request.tenant ? element("small", { class: "tenant" }, request.tenant) : ""),
    element("td", {}, element("span", { class: "share", style: `--w: ${(100 * hit).toFixed(1)}%; --c: ${tint}` }), `${count(request.prompt)}`, element("small", {}, hit >= 0.005 ? ` ${Math.round(100 * hit)}%` : "")),
    element("td", {}, request.instance ? instance(request.instance, tint) : "–"),
    element("td", {}, wait(request, is_late), request.first_s !== null ? seconds(request.first_s) : waits ? `late, ${Math.round(now_s - request.at_s)} s` : is_late && request.done_s !== null ? "none" : ""),
    element("td", { class: "n" }, seconds(request.done_s)),
    element("td", { title: request.limited }, element("span", { class: `chip ${mark}` }, request.limited ? "at its limit" : words), request.tries > 1 ? element("span", { class: "chip warn", title: request.failure ?? "" }, `try ${request.tries}`) : "",
      failed(request) && request.failure ? element("small", { class: "failure", title: request.failure }, request.failure) : ""));
}

// Time held and time to first token, on a scale that ends at twice the SLO.
function wait({ held_s, first_s, slo_s }, is_late) {
  const width = (time_s) => `${Math.min(100, (50 * (time_s ?? 0)) / slo_s).toFixed(1)}%`;
  return element("span", { class: is_late ? "wait late" : "wait", style: `--first: ${width(first_s)}; --held: ${width(held_s)}`, title: `held ${seconds(held_s)}` });
}
