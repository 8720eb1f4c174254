// Both hash rings as coloured arcs, the hottest keys as chords between their places on either ring.

import { colour } from "./colours.js";
import { element, instance } from "./format.js";

const TURN = 2 * Math.PI, TOP = -Math.PI / 2;

export class Rings {
  constructor(canvas, center, table, hot) {
    this.hot = hot;
    this.canvas = canvas;
    this.center = center;
    this.table = table.tBodies[0];
    this.lit = null; // an instance
    this.key = null; // a hash key
    this.last = null;
  }

  light(instance) {
    this.lit = instance;
    if (this.last) this.draw();
  }

  show(topology, now, pool) {
    const total = now.keys.reduce((sum, key) => sum + key[2], 0);
    const keys = now.keys.filter(([, , requests], index) => index < 3 || requests > 1);
    this.last = { topology, keys, shortest: pool.min_key_blocks };
    this.draw();
    this.list(keys, total, topology, pool);
    this.hot.replaceChildren(...prefixes(topology));
    const deepest = topology.hot.length ? topology.hot[0][1] : 0;
    this.center.replaceChildren(
      element("b", {}, String(topology.members.length)), element("span", {}, "in the rings"),
      deepest ? element("span", { class: "hot" }, `hot prefixes up to ${deepest} block${deepest > 1 ? "s" : ""}`) : "");
  }

  list(keys, total, topology, pool) {
    const of = topology.members.length, shown = keys.slice(0, 8);
    this.table.parentElement.hidden = !shown.length;
    this.table.replaceChildren(...shown.map(([key, blocks, requests, , , pair]) => {
      const row = element("tr", { class: blocks > pool.min_key_blocks ? "hot" : "" },
        element("td", {}, element("code", {}, key.slice(0, 8))),
        element("td", { class: "n" }, `${((100 * requests) / Math.max(total, 1)).toFixed(0)}%`),
        element("td", { class: "n", title: `${blocks * pool.key_tokens} tokens` }, `${blocks} block${blocks > 1 ? "s" : ""}`),
        element("td", {}, ...pair.map((id) => of > 12 ? element("span", { class: "instance", style: `--c: ${colour(id)}`, title: id }) : instance(id, colour(id)))));
      row.onpointerenter = () => { this.key = key; this.draw(); };
      row.onpointerleave = () => { this.key = null; this.draw(); };
      return row;
    }));
  }

  draw() {
    const { topology, keys } = this.last, { canvas } = this, style = getComputedStyle(canvas);
    const size = canvas.clientWidth, scale = devicePixelRatio || 1;
    if (!size) return;
    canvas.width = canvas.height = Math.round(size * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.translate(size / 2, size / 2);
    const outer = size / 2 - 10, thick = Math.max(10, size * 0.035), inner = outer - thick - size * 0.055;
    const resolve = (value) => value.replace(/var\((--\w+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    const colours = topology.members.map((id) => resolve(colour(id)));
    const pairs = this.key ? keys.find((key) => key[0] === this.key)?.[5] : null;
    topology.rings.forEach((arcs, ring) => this.arcs(pen, arcs, topology.members, colours, ring ? inner : outer, thick, pairs));
    this.chords(pen, keys, outer - thick, inner - thick, style);
  }

  arcs(pen, arcs, members, colours, radius, thick, pair) {
    const angle = TURN / arcs.length;
    for (let start = 0; start < arcs.length; ) {
      let end = start + 1;
      while (end < arcs.length && arcs[end] === arcs[start]) end++;
      const member = members[arcs[start]];
      const dim = pair ? !pair.includes(member) : this.lit && this.lit !== member;
      pen.globalAlpha = dim ? 0.13 : 0.92;
      pen.fillStyle = colours[arcs[start]];
      pen.beginPath();
      pen.arc(0, 0, radius, TOP + start * angle, TOP + end * angle + 0.002);
      pen.arc(0, 0, radius - thick, TOP + end * angle + 0.002, TOP + start * angle, true);
      pen.fill();
      start = end;
    }
    pen.globalAlpha = 1;
  }

  // From the place on the outer ring to that on the inner one, bent towards the centre.
  chords(pen, keys, outer, inner, style) {
    const most = Math.max(...keys.map((key) => key[2]), 1);
    const strokes = { plain: style.getPropertyValue("--accent").trim(), hot: style.getPropertyValue("--warm").trim() };
    for (const [key, blocks, requests, first, second] of [...keys].reverse()) {
      const from = TOP + TURN * first, to = TOP + TURN * second, weight = requests / most;
      const start = [Math.cos(from) * (outer - 3), Math.sin(from) * (outer - 3)], end = [Math.cos(to) * (inner - 3), Math.sin(to) * (inner - 3)];
      pen.strokeStyle = pen.fillStyle = blocks > this.last.shortest ? strokes.hot : strokes.plain;
      pen.globalAlpha = this.key ? (this.key === key ? 1 : 0.08) : 0.25 + 0.6 * weight;
      pen.lineWidth = 1 + 3.5 * weight;
      pen.beginPath();
      pen.moveTo(...start);
      pen.bezierCurveTo(start[0] * 0.45, start[1] * 0.45, end[0] * 0.3, end[1] * 0.3, ...end);
      pen.stroke();
      for (const [x, y] of [start, end]) {
        pen.beginPath();
        pen.arc(x, y, 2.5 + 2.5 * weight, 0, TURN);
        pen.fill();
      }
    }
    pen.globalAlpha = 1;
  }
}

// The hot prefixes that no longer one continues, the longest first: requests behind one are keyed a block longer than it.
function prefixes({ hot }) {
  if (!hot.length) return [];
  const shown = hot.slice(0, 8).map(([prefix, blocks]) =>
    element("span", { title: `${blocks} blocks are hot: requests behind them are keyed by ${blocks + 1}` }, element("code", {}, prefix.slice(0, 8)), ` ${blocks} → ${blocks + 1}`));
  return ["hot prefixes, blocks → key length", ...shown, hot.length > 8 ? "…" : ""];
}
