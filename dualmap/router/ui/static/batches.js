// Batches that are not over, those first whose windows end first: how far each is, and whether its window will be missed.

import { age, count, element, percent } from "./format.js";
import { Polled } from "./polled.js";

const SHOWN = 10;
const DELAYS = {
  room: "late: interactive requests leave too little room", limits: "late: limits keep its lines out",
  failures: "late: its lines fail and are tried again", speed: "late: its lines are too slow",
};

export class Batches extends Polled {
  path() {
    return "admin/batches";
  }

  draw({ batches, now }) {
    this.body.replaceChildren(...batches.slice(0, SHOWN).map((batch) => row(batch, now)));
    return batches.length > 0;
  }
}

function row(batch, now) {
  const { total, completed, failed } = batch.request_counts, share = (part) => (total ? part / total : 0);
  const bar = element("span", { class: "parts", title: `${count(completed)} answered, ${count(failed)} failed, of ${count(total)}` },
    element("u", { class: "answered", style: `width: ${100 * share(completed)}%` }),
    element("u", { class: "failed", style: `width: ${100 * share(failed)}%` }));
  const { ends_at, delay } = batch.forecast;
  return element("tr", { class: delay ? "late" : "" },
    element("td", { title: batch.id }, element("code", {}, batch.id.slice(0, 14)), batch.tenant ? ` ${batch.tenant}` : ""),
    element("td", {}, delay ? DELAYS[delay] : batch.status.replace("_", " ")),
    element("td", {}, bar), element("td", { class: "n" }, percent(share(completed + failed))),
    element("td", { class: "n" }, count(total)), element("td", { class: "n" }, ends_at ? age(ends_at - now) : "–"),
    element("td", { class: "n" }, age(batch.expires_at - now)));
}
