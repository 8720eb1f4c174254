// Why a request went where it went, as a picture: its prompt, its candidates and their costs, its time line.

import { colour } from "./colours.js";
import { clock, count, drawn, element, fit, instance, percent, seconds } from "./format.js";

// The colour of each part of a cost; the replica names and adds up the parts.
const PARTS = {
  "work ahead": "var(--part-1)", "work it overtakes": "var(--part-2)", "KV memory in use": "var(--part-3)",
  "own prefill, weighed": "var(--part-4)", "own prefill, weighed by KV memory in use": "var(--part-5)", "misses the SLO": "var(--bad)",
};
const HELD = PARTS["work it overtakes"], OWN = PARTS["own prefill, weighed"], OTHER_PART = "var(--part-5)";
const OUTCOMES = { completed: "good", ended: "good", client_gone: "", client_error: "warn" };

export class Story {
  constructor(dialog, known, ask) {
    [this.dialog, this.known, this.ask] = [dialog, known, ask];
    this.place = dialog.lastElementChild;
    dialog.querySelector("#close").onclick = () => dialog.close();
    dialog.onclick = (click) => { if (click.target === dialog) dialog.close(); };
  }

  async open(id) {
    this.place.replaceChildren(element("p", { class: "sub" }, `Asking the replicas about ${id} …`));
    if (!this.dialog.open) this.dialog.showModal();
    const answer = await this.ask(`admin/explain/${id.split("/").map(encodeURIComponent).join("/")}`);
    const explanation = await answer.json();
    if (!answer.ok) this.place.replaceChildren(element("h2", {}, id), element("p", {}, explanation.error?.message ?? `The replica answers ${answer.status}.`));
    else if (!explanation.rounds) this.place.replaceChildren(element("h2", {}, id), element("p", {}, `It is live, but ${explanation.note}.`));
    else this.place.replaceChildren(...this.tell(explanation));
    fit();
  }

  // Pictures are drawn in pixels, so that their words stay readable on a phone.
  width() {
    return Math.max(260, Math.min(1000, this.place.clientWidth || 840));
  }

  shortest(pool) {
    return this.known.hello?.pools.find(({ name }) => name === pool)?.min_key_blocks ?? 1;
  }

  tell(story) {
    const last = story.rounds.at(-1);
    const parts = [
      element("h2", {}, element("code", {}, story.request_id), " ", element("span", { class: `chip ${story.outcome ? OUTCOMES[story.outcome] ?? "bad" : "live"}` }, (story.outcome ?? "under way").replaceAll("_", " "))),
      element("p", { class: "sub" }, [`received ${clock(story.received_unix_s)}`, story.model, `policy ${story.policy}`, `placed by ${story.replica_id}`].join(" · ")),
    ];
    if (last) parts.push(this.sentence(story, last));
    parts.push(element("h3", {}, "The prompt"), this.prompt(story, last));
    story.rounds.forEach((round, index) => {
      const several = story.rounds.length > 1 ? ` · decision ${index + 1}, attempt ${round.attempt}` : "";
      parts.push(element("h3", {}, `The candidates${several}`), this.candidates(story, round));
    });
    parts.push(...this.waits(story));
    for (const failure of story.failures) parts.push(element("p", { class: "failure" }, `failed: ${failure}`));
    for (const [instance, tokens, age] of story.continued) parts.push(element("p", {}, `went on elsewhere: ${instance} had answered ${count(tokens)} tokens after ${seconds(age)}`));
    parts.push(element("h3", {}, "The time line"), timeline(story, colour(story.instance_id), this.width()));
    return parts;
  }

  sentence(story, round) {
    const { decision } = round, chosen = element("b", { style: `color: ${colour(decision.instance_id)}` }, decision.instance_id);
    const said = element("p", { class: "sentence" }, "Chosen: ", chosen, `, since ${round.why}. `);
    said.append(`${count(decision.uncached_tokens)} tokens left to prefill, first token expected in ${seconds(decision.expected_ttft_s)}`);
    said.append(story.first_token_s !== null ? `, seen after ${seconds(story.first_token_s)}.` : ".");
    if (story.instance_id && story.instance_id !== decision.instance_id) {
      said.append(" While it was held it moved to ", element("b", { style: `color: ${colour(story.instance_id)}` }, story.instance_id), ".");
    }
    return said;
  }

  // Why it was held: in sentences, and what went past it by class and tenant.
  waits(story) {
    const parts = (story.waits ?? []).flatMap((wait) => {
      const figures = wait.ahead.map((each) => element("tr", {},
        element("td", {}, each.priority_class || "–"), element("td", {}, each.tenant || "–"),
        ...[each.requests, each.came_later].map((value) => element("td", { class: "n" }, count(value)))));
      const table = element("table", { class: "candidates" }, element("thead", {}, element("tr", {},
        ...["class", "tenant"].map((words) => element("th", {}, words)),
        ...["went before it", "came later"].map((words) => element("th", { class: "n" }, words)))), element("tbody", {}, ...figures));
      return [element("h3", {}, `Held on ${wait.instance_id}`), ...wait.why.map((reason) => element("p", {}, reason)),
        figures.length ? element("div", { class: "scroll" }, table) : ""];
    });
    return story.waits_unknown ? [...parts, element("p", { class: "failure" }, story.waits_unknown)] : parts;
  }

  // Blocks as cells: those that the chosen instance has are filled; a bracket spans the hash key.
  prompt(story, round) {
    const full = this.width();
    const cells = Math.max(1, Math.ceil(story.prompt_tokens / story.block_tokens)), hit = round?.decision.hit_blocks ?? 0;
    const shown = Math.min(cells, Math.round(full / 7)), width = full / shown, scale = shown / cells;
    const tint = round ? colour(round.decision.instance_id) : "var(--dim)";
    const picture = drawn("svg", { viewBox: `0 0 ${full} 44`, class: "prompt" });
    const key_width = Math.max(width, (story.key_blocks * story.key_tokens * scale * width) / story.block_tokens);
    picture.append(drawn("path", { d: `M1 14V6H${Math.min(full - 1, key_width) - 1}V14`, class: "bracket" }));
    for (let cell = 0; cell < shown; cell++) {
      const held = (cell + 0.5) / scale < hit;
      picture.append(drawn("rect", { x: cell * width + (width < 14 ? 0.5 : 1.5), y: 18, width: width - (width < 14 ? 1 : 3), height: 24, rx: 2, fill: held ? tint : "var(--hole)" }));
    }
    const hit_tokens = story.prompt_tokens - (round?.decision.uncached_tokens ?? story.prompt_tokens);
    const reported = story.reported_cached_tokens === null ? "" : `, the instance reported ${count(story.reported_cached_tokens)}`;
    return element("figure", {}, picture, element("figcaption", {},
      `${count(story.prompt_tokens)} tokens in ${count(cells)} block${cells > 1 ? "s" : ""} of ${story.block_tokens}. `,
      `The hash key ${story.hash_key.slice(0, 8)} covers the first ${count(Math.min(story.prompt_tokens, story.key_blocks * story.key_tokens))} tokens${story.key_blocks > this.shortest(story.pool) ? ": their prefix is hot" : ""}. `,
      element("i", { style: `color: ${tint}` }, "■ "), `${percent(hit_tokens / story.prompt_tokens)} expected in the cache${reported}.`,
      story.media_estimated ? ` Its media are estimated, as ${story.media_estimated}.` : ""));
  }

  candidates(story, round) {
    const rows = round.candidates.map((id) => ({ id, load: round.loads[id], cost: round.costs[id] })).filter(({ load }) => load);
    const weighed = rows.some(({ cost }) => cost?.parts);
    const total_s = ({ cost }) => (weighed ? cost.total_s : cost.expected_ttft_s);
    rows.sort((one, other) => total_s(one) - total_s(other));
    for (const row of rows) row.bars = weighed ? coloured(row.cost) : [["work ahead", Math.max(0, row.cost.expected_ttft_s - own_s(row)), PARTS["work ahead"]], ["own prefill", own_s(row), OWN]];
    const lengths = rows.map((row) => row.bars.reduce((sum, [words, part]) => sum + (words === "misses the SLO" ? 0 : part), 0));
    const longest = Math.max(...lengths, 1e-6) * 1.12;
    const table = element("table", { class: "candidates" }, element("thead", {}, element("tr", {},
      ...["", weighed ? "cost, in seconds" : "expected first token, in seconds"].map((words) => element("th", {}, words)),
      ...["hit blocks", "pending", "held", "running"].map((words) => element("th", { class: "n" }, words)))));
    const body = element("tbody");
    for (const row of rows) {
      const { id, load, cost, bars } = row;
      const taken = id === round.decision.instance_id, tint = colour(id);
      const late = cost.expected_ttft_s > story.slo_s;
      const bar = element("div", { class: "cost" }, ...bars.map(([words, part, fill]) =>
        element("u", { style: `width: ${words === "misses the SLO" ? 8 : (85 * part) / longest}%; background: ${fill}`, title: `${words}: ${seconds(part)}` })),
        element("small", {}, seconds(total_s(row)), late ? element("em", {}, " late") : ""));
      body.append(element("tr", { class: taken ? "taken" : "" },
        element("td", {}, instance(id, tint), element("small", {}, taken ? "chosen" : id === round.decision.alternative_id ? "next best" : "")),
        element("td", {}, bar), ...[load.hit_blocks, load.pending_tokens, load.queued_requests, load.running_requests].map((value) => element("td", { class: "n" }, count(value)))));
    }
    table.append(body);
    const seen = new Map(rows.flatMap((row) => row.bars.map(([words, , fill]) => [words, fill])));
    const legend = element("p", { class: "legend" }, ...[...seen].map(([words, fill]) => element("span", {}, element("i", { style: `background: ${fill}` }), words)));
    const more = round.considered > round.candidates.length ? element("small", {}, `${round.considered} were considered; those that matter are shown.`) : "";
    const tiers = (round.tiers ?? []).map((words) => element("p", { class: "sub" }, `${words}.`));
    return element("div", { class: "scroll" }, table, weighed ? legend : "", ...tiers, more);
  }
}

const own_s = ({ load, cost }) => cost.uncached_tokens / load.prefill_tokens_per_s;

function coloured(cost) {
  return Object.entries(cost.parts).filter(([, part]) => part > 0).map(([words, part]) => [words, part, PARTS[words] ?? OTHER_PART]);
}

// Received, held, prefill, answer; the SLO and the expected first token are marked. A long answer is cut off.
function timeline(story, tint, width) {
  const { held_s, first_token_s, done_s, slo_s, expected_ttft_s } = story;
  const now_s = Math.max(done_s ?? 0, Date.now() / 1000 - story.received_unix_s > 0 && done_s === null ? Date.now() / 1000 - story.received_unix_s : 0);
  const end_s = done_s ?? now_s, shown_s = Math.max(Math.min(end_s, 3 * (first_token_s ?? end_s) + 0.02), (first_token_s ?? 0) * 1.15, (expected_ttft_s ?? 0) * 1.15, 0.05);
  const with_slo = slo_s <= shown_s * 2.5, full_s = with_slo ? Math.max(shown_s, slo_s * 1.08) : shown_s;
  const x = (time_s) => (width * Math.min(time_s, full_s)) / full_s;
  const picture = drawn("svg", { viewBox: `0 0 ${width} 92`, class: "timeline" });
  const span = (from_s, to_s, fill, words) => {
    const left = x(from_s), long = Math.max(2, x(to_s) - left);
    picture.append(drawn("rect", { x: left, y: 34, width: long, height: 22, rx: 3, fill }));
    if (words && long > 8 * words.length) picture.append(drawn("text", { x: left + 8, y: 49, class: fill === "var(--hole)" ? "quiet" : fill === HELD ? "inside held" : "inside" }, words));
  };
  const held = held_s ?? 0, first = first_token_s ?? (done_s === null ? end_s : null);
  if (held > 0.0005) span(0, held, HELD, `held ${seconds(held)}`);
  if (first !== null) span(held, first, tint, first_token_s === null ? "running" : `to first token ${seconds(first_token_s - held)}`);
  if (end_s > (first ?? held)) span(first ?? held, end_s, "var(--hole)", first_token_s !== null ? "answer" : "");
  const mark = (time_s, words, kind, up) => {
    const at = x(time_s), right = at > 0.75 * width;
    picture.append(drawn("path", { d: up ? `M${at} 18V58` : `M${at} 32V72`, class: kind }));
    picture.append(drawn("text", { x: right ? at - 5 : at + 5, y: up ? 26 : 72, class: kind, "text-anchor": right ? "end" : "start" }, words));
  };
  if (with_slo) mark(slo_s, `SLO ${seconds(slo_s)}`, "slo", true);
  else picture.append(drawn("text", { x: width, y: 26, class: "slo", "text-anchor": "end" }, `SLO ${seconds(slo_s)} →`));
  if (expected_ttft_s !== null) mark(expected_ttft_s, `expected ${seconds(expected_ttft_s)}`, "expected", false);
  picture.append(drawn("text", { x: 0, y: 88, class: "axis" }, "received"));
  picture.append(drawn("text", { x: width, y: 88, class: "axis", "text-anchor": "end" }, done_s === null ? "now" : end_s > full_s ? `… done after ${seconds(done_s)}` : `done after ${seconds(done_s)}`));
  return element("figure", {}, picture);
}
