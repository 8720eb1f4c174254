// The live page: one stream of events from the replica, and the parts that draw it.

import { showFigures } from "./figures.js";
import { element } from "./format.js";
import { Instances } from "./instances.js";
import { Requests } from "./requests.js";
import { Rings } from "./rings.js";
import { Story } from "./story.js";
import { showHappenings, showReplicas } from "./fleet.js";
import { listen } from "./stream.js";

const root = document.documentElement;
const $ = (id) => document.getElementById(id);

// What is known: `hello` as it came, the topology of each pool, the figures of now and of the last minutes.
const known = { hello: null, topology: {}, now: {}, history: {}, pool: null };

const story = new Story($("story"), known, authorized);
const rings = new Rings($("rings"), $("center"), $("keys"), $("hot"));
const instances = new Instances($("instances"), $("detail"), (id) => rings.light(id));
const requests = new Requests($("requests"), (id) => story.open(id));

function authorized(path) {
  const key = sessionStorage.getItem("admin-key");
  return fetch(path, { headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store" });
}

const HISTORY_S = 180;

function remember(tick) {
  known.now = tick.pools_now ?? known.now;
  for (const [pool, now] of Object.entries(known.now)) {
    if (!now.traffic) continue;
    const history = (known.history[pool] ??= []);
    history.push({ at_s: tick.at_s, traffic: now.traffic, held: sum(now.loads, 5), pending: sum(now.loads, 2) });
    while (history.length > 1 && history[0].at_s < tick.at_s - HISTORY_S) history.shift();
  }
  Object.assign(known.topology, tick.topology ?? {});
}

const sum = (rows, column) => rows.reduce((total, row) => total + row[column], 0);

function show() {
  const pool = known.hello.pools.find((each) => each.name === known.pool) ?? known.hello.pools[0];
  const now = known.now[pool.name] ?? {}, topology = known.topology[pool.name];
  const away = now.store !== undefined && now.store !== "ok";
  $("about").textContent = [pool.model || pool.name, pool.policy, `SLO ${pool.slo_s} s`].join(" · ");
  say(away ? "warn" : "live", away ? "the store is away: this replica decides alone" : `live · ${known.hello.replica_id}`);
  if (!now.loads) return;
  showFigures($("figures"), known.history[pool.name], now, pool);
  rings.show(topology, now, pool);
  instances.show(now.loads, topology, pool, now.troubles);
  showReplicas($("replicas"), now, known.hello);
  requests.show(topology);
}

function say(state, words) {
  root.dataset.state = state;
  $("status").lastElementChild.textContent = words;
}

function hello(event) {
  known.hello = event;
  known.topology = {};
  known.pool ??= event.pools[0].name;
  $("pool").hidden = event.pools.length < 2;
  $("pool").replaceChildren(...event.pools.map(({ name }) => element("option", { value: name }, name)));
  $("pool").value = known.pool;
  document.querySelector("#traffic .empty code").textContent = new URL("v1", location).href;
  requests.clear();
  $("happened").replaceChildren();
  tick(event);
}

function tick(event) {
  remember(event);
  requests.add(event.requests);
  showHappenings($("happened"), event.happened, known.hello.pools.length > 1);
  show();
  root.dataset.ticks = Number(root.dataset.ticks ?? 0) + 1;
}

function locked(again) {
  say("locked", "locked");
  $("lock").hidden = false;
  $("refused").hidden = !again;
  $("key").focus();
  return new Promise((unlocked) => {
    $("lock").onsubmit = (submitted) => {
      submitted.preventDefault();
      sessionStorage.setItem("admin-key", $("key").value.trim());
      $("key").value = "";
      $("lock").hidden = true;
      unlocked();
    };
  });
}

$("pool").onchange = () => { known.pool = $("pool").value; show(); };
$("find").onsubmit = (submitted) => { submitted.preventDefault(); if ($("id").value.trim()) story.open($("id").value.trim()); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => known.hello && show());
addEventListener("resize", () => known.hello && show());

listen(() => authorized("ui/stream"), { hello, tick, locked, lost: (words) => say("lost", words) });
