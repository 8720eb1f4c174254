// Tenants: what they did in the recent window, what they have held and running, their part of the work, and how far their limits are used.

import { count, element, percent, short } from "./format.js";

const EVERY_MS = 2000, WINDOW_S = 15, NEAR = 0.9, FULL = 0.98, LIMITS = 3;

export class Tenants {
  // `ask` fetches a path with the admin key.
  constructor(panel, ask) {
    this.panel = panel;
    this.body = panel.querySelector("tbody");
    this.ask = ask;
    this.history = [];
    this.pool = null;
    this.asking = false;
    setInterval(() => this.poll(), EVERY_MS);
  }

  show(pool, any) {
    if (pool !== this.pool) this.history = [];
    this.pool = any ? pool : null;
    if (!any) this.panel.hidden = true;
    else if (this.panel.hidden) this.poll();
  }

  async poll() {
    if (this.pool === null || this.asking || document.hidden) return;
    this.asking = true;
    try {
      const pool = this.pool, answer = await this.ask(`admin/usage/now?pool=${encodeURIComponent(pool)}`);
      if (answer.ok && pool === this.pool) this.draw(await answer.json(), performance.now() / 1000);
    } catch (error) {
      console.info(error);
    } finally {
      this.asking = false;
    }
  }

  draw(tenants, now_s) {
    this.history.push({ now_s, of: new Map(tenants.map(({ tenant, today }) => [tenant, today])) });
    while (this.history.length > 1 && this.history[0].now_s < now_s - WINDOW_S) this.history.shift();
    const { now_s: since_s, of } = this.history[0], over_s = now_s - since_s;
    this.body.replaceChildren(...tenants.map((each) => this.row(each, of.get(each.tenant) ?? each.today, over_s)));
    this.panel.hidden = !tenants.length;
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
