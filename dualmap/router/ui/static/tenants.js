// Tenants: what they did in the recent window, what they have held and running, their part of the work, and how far their limits are used.

import { count, element, percent, short } from "./format.js";
import { Polled } from "./polled.js";

const WINDOW_S = 15, NEAR = 0.9, FULL = 0.98, LIMITS = 3;

export class Tenants extends Polled {
  history = [];

  show(pool, any) {
    if (pool !== this.pool) this.history = [];
    super.show(pool, any);
  }

  path(pool) {
    return `admin/usage/now?pool=${pool}`;
  }

  draw(tenants) {
    const now_s = performance.now() / 1000;
    this.history.push({ now_s, of: new Map(tenants.map(({ tenant, today }) => [tenant, today])) });
    while (this.history.length > 1 && this.history[0].now_s < now_s - WINDOW_S) this.history.shift();
    const { now_s: since_s, of } = this.history[0], over_s = now_s - since_s;
    this.body.replaceChildren(...tenants.map((each) => this.row(each, of.get(each.tenant) ?? each.today, over_s)));
    return tenants.length > 0;
  }

  row({ tenant, today, held, running, limits, work }, before, over_s) {
    const tokens = (counts) => counts.prompt_tokens + counts.output_tokens;
    const rate = (value) => (over_s > 0 ? short(Math.max(0, value) / over_s) : "–");
    const nearest = [...limits].sort((a, b) => b[2] - a[2]).slice(0, LIMITS).map(([name, of, share]) =>
      element("span", { class: share > NEAR ? "chip bad" : "chip", title: of }, `${name.replaceAll("_", " ")} ${percent(share)}`));
    const figures = [rate(today.requests - before.requests), rate(tokens(today) - tokens(before)), count(held), count(running), count(today.refused), work ? `${percent(work.part)} / ${percent(work.share)}` : "–"];
    return element("tr", { class: limits.some(([, , share]) => share >= FULL) ? "full" : "" }, element("td", {}, tenant), ...figures.map((figure) => element("td", { class: "n" }, figure)), element("td", {}, ...nearest));
  }
}
