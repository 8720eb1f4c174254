// Agents' runs where they wait for memory: those that wait for longest, then those that were seen last, and where their time went.

import { count, element, instance, seconds, short } from "./format.js";
import { colour } from "./colours.js";
import { Polled } from "./polled.js";

const SHOWN = 10;
const PARTS = [["waited_s", "waiting for memory"], ["prefill_s", "to the first token"], ["decode_s", "decoding"], ["tools_s", "its own tools"]];

export class Runs extends Polled {
  path(pool) {
    return `admin/runs?pool=${pool}&limit=${SHOWN}`;
  }

  draw({ runs }) {
    this.body.replaceChildren(...runs.flatMap(rows));
    return runs.length > 0;
  }
}

// A run, and below that where its time went.
function rows(run) {
  const whole_s = PARTS.reduce((sum, [name]) => sum + run[name], 0), agents = run.agents.length;
  const bar = element("span", { class: "parts", title: PARTS.map(([name, words]) => `${words}: ${seconds(run[name])}`).join("\n") },
    ...PARTS.map(([name]) => element("u", { class: name, style: `width: ${whole_s ? (100 * run[name]) / whole_s : 0}%` })));
  const state = run.waits_s ? `parked ${seconds(run.waits_s)}` : run.state;
  const about = `${count(run.turns)} turn${run.turns === 1 ? "" : "s"}${agents > 1 ? ` of ${count(agents)} agents` : ""}, ${short(run.context_tokens)} tokens${run.tenant ? `, ${run.tenant}` : ""}`;
  return [
    element("tr", { class: run.waits_s ? "parked" : "" },
      element("td", { title: `${run.run}\ndualmap runs ${run.run.slice(0, 12)}` }, element("code", {}, run.run.slice(0, 8))),
      element("td", {}, state), element("td", {}, run.home ? instance(run.home, colour(run.home)) : "–")),
    element("tr", { class: "time" }, element("td", { colspan: 3 }, bar, element("small", {}, about))),
  ];
}
