// What is wrong, in words, the worst first; one line where nothing is.

import { age, arrange, clock, element } from "./format.js";

const SHOWN = 5;

export class Problems {
  // `over` lists problems that were over in the last minutes; `filter` shows the requests of a kind, or of an instance.
  constructor(verdict, list, over, filter) {
    this.verdict = verdict;
    this.list = list;
    this.over = over;
    this.filter = filter;
    this.items = new Map();
    this.all = false;
    this.more = element("li", { class: "more" }, element("button", { type: "button", class: "link" }));
    this.more.firstChild.onclick = () => { this.all = !this.all; this.show(...this.last); };
  }

  show(problems, now_s, calm, stale, over = []) {
    this.last = [problems, now_s, calm, stale, over];
    const wrong = problems.filter(({ severity }) => severity !== "notice"), worst = problems[0]?.severity;
    this.verdict.parentElement.dataset.worst = wrong.length ? worst : "none";
    const words = wrong.length ? `${wrong.length} problem${wrong.length > 1 ? "s" : ""}` : "All is well";
    this.say(words, [wrong.length ? null : calm, stale].filter(Boolean).join(". "));
    document.title = wrong.length ? `${words} · DualMap fleet` : "DualMap fleet";
    const shown = this.all ? problems : problems.slice(0, SHOWN), hidden = problems.length - SHOWN;
    const present = new Set(problems.map(({ key }) => key));
    for (const key of this.items.keys()) if (!present.has(key)) this.items.delete(key);
    const rows = shown.map((problem) => this.item(problem, now_s));
    this.more.firstChild.textContent = this.all ? "show fewer" : `show ${hidden} more`;
    arrange(this.list, hidden > 0 ? [...rows, this.more] : rows);
    this.showOver(over);
  }

  // The latest first.
  showOver(over) {
    const text = JSON.stringify(over);
    if (text === this.overText) return;
    this.overText = text;
    this.over.hidden = !over.length;
    const rows = [...over].sort((one, other) => other.until_s - one.until_s).slice(0, SHOWN).map(({ what, why, since_s, until_s }) =>
      element("li", { title: why }, element("time", {}, `${clock(since_s)} – ${clock(until_s)}`), element("b", {}, what), element("span", {}, `over after ${age(until_s - since_s)}`)));
    const more = over.length - rows.length;
    this.over.replaceChildren(element("li", { class: "title" }, `Over in the last 15 minutes${more > 0 ? `, and ${more} more` : ""}`), ...rows);
  }

  // Only what changed is written, since it is read out.
  say(words, note) {
    const [, headline, small] = this.verdict.children;
    if (headline.textContent !== words) headline.textContent = words;
    if (small.textContent !== note) small.textContent = note;
  }

  item(problem, now_s) {
    let item = this.items.get(problem.key);
    if (!item) {
      item = element("li", {}, element("span", { class: "severity" }), element("b"), element("time"), element("p", { class: "why" }), element("p", { class: "advice" }));
      const [name, value, words] = action(problem);
      if (name) {
        const button = element("button", { type: "button", class: "link" }, words);
        button.onclick = () => this.filter(name, value);
        item.append(button);
      }
      this.items.set(problem.key, item);
    }
    const [severity, what, since, why, advice] = item.children;
    item.className = severity.textContent = problem.severity;
    what.textContent = problem.what;
    since.textContent = `${problem.or_longer ? "since before" : "since"} ${clock(problem.since_s)}, ${problem.or_longer ? "over " : ""}${age(now_s - problem.since_s)}`;
    why.textContent = problem.why;
    advice.textContent = problem.advice;
    return item;
  }
}

function action({ key, instances }) {
  if (key.endsWith("/failing")) return ["kind", "failed", "show failed requests"];
  if (key.endsWith("/late")) return ["kind", "late", "show late requests"];
  if (key.startsWith("limited/")) return ["tenant", key.slice("limited/".length), "show its requests"];
  return instances.length === 1 ? ["instance", instances[0], "show its requests"] : [];
}
