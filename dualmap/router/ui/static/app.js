// The live page: one stream of events from the replica, and the parts that draw it.

import { Adapters } from "./adapters.js";
import { Batches } from "./batches.js";
import { meet } from "./colours.js";
import { showFigures } from "./figures.js";
import { showHappenings, showReplicas } from "./fleet.js";
import { clock, element, fit } from "./format.js";
import { Instances, unknown } from "./instances.js";
import { Minutes } from "./minutes.js";
import { Problems } from "./problems.js";
import { Requests } from "./requests.js";
import { Rings } from "./rings.js";
import { Runs } from "./runs.js";
import { Story } from "./story.js";
import { listen } from "./stream.js";
import { Tenants } from "./tenants.js";

const root = document.documentElement;
const $ = (id) => document.getElementById(id);

// What is known: `hello` as it came, the topology of each pool, the figures of now, the last ones that the store had, and
// those of the last minutes.
const known = { hello: null, topology: {}, now: {}, last: {}, history: {}, problems: [], over: [], at_s: 0, pool: null };

const story = new Story($("story"), known, authorized);
const rings = new Rings($("rings"), $("center"), $("keys"), $("hot"));
const instances = new Instances($("instances"), (id) => rings.light(id), (id) => requests.filter("instance", id));
const requests = new Requests($("traffic"), (id) => story.open(id), (id) => instances.pick(id));
const tenants = new Tenants($("tenants"), authorized);
const runs = new Runs($("runs"), authorized);
const batches = new Batches($("batches"), authorized);
const adapters = new Adapters($("adapters"), authorized);
const minutes = new Minutes($("minutes"));
const problems = new Problems($("verdict"), document.querySelector("#problems ol"), $("over"), filter);

function filter(name, value) {
  requests.filter(name, value);
  $("traffic").scrollIntoView({ block: "nearest" });
}

function authorized(path) {
  const key = sessionStorage.getItem("admin-key");
  return fetch(path, { headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store" });
}

const HISTORY_S = 180;

function remember(tick) {
  known.now = tick.pools_now ?? known.now;
  known.problems = tick.problems ?? [];
  known.over = tick.over ?? [];
  minutes.add(tick.samples);
  known.at_s = tick.at_s ?? known.at_s;
  for (const [pool, now] of Object.entries(known.now)) {
    if (!now.traffic) continue;
    known.last[pool] = { ...now, at_s: tick.at_s };
    const history = (known.history[pool] ??= []);
    history.push({ at_s: tick.at_s, traffic: now.traffic, held: sum(now.loads, 5) });
    while (history.length > 1 && history[0].at_s < tick.at_s - HISTORY_S) history.shift();
  }
  Object.assign(known.topology, tick.topology ?? {});
}

const sum = (rows, column) => rows.reduce((total, row) => total + row[column], 0);

function show() {
  const pool = known.hello.pools.find((each) => each.name === known.pool) ?? known.hello.pools[0];
  const now = known.now[pool.name] ?? {}, last = known.last[pool.name], topology = known.topology[pool.name];
  const away = now.store !== undefined && !now.loads;
  $("about").textContent = [pool.model || pool.name, pool.policy, `SLO ${pool.slo_s} s`].join(" · ");
  say(away ? "warn" : "live", away ? "the store is away: this replica decides alone" : `live · ${known.hello.replica_id}`);
  const loads = of_now(now, last);
  meet([...new Set([...Object.keys(topology.urls), ...topology.members, ...loads.map(([id]) => id)])]);
  showProblems(now, away ? last : null);
  root.toggleAttribute("data-stale", away);
  instances.show(loads, pool, now.troubles ?? {}, known.at_s, { ...now, adapters: topology.adapters });
  requests.offer(loads.map(([id]) => id));
  requests.show();
  tenants.show(pool.name, known.hello.has_tenants);
  runs.show(pool.name, Boolean((now.runs ?? last?.runs)?.[1]));
  batches.show(pool.name, known.hello.has_batches);
  adapters.show(pool.name, Object.keys(topology.adapters ?? {}).length > 0);
  minutes.show(pool.name, known.at_s);
  if (last) showFleet(pool, last, topology);
  fit();
}

function showFleet(pool, last, topology) {
  showFigures($("figures"), known.history[pool.name], last, pool);
  $("map").hidden = topology.members.length < 2;
  if (!$("map").hidden) rings.show(topology, last, pool);
  $("fleet").hidden = false;
  showReplicas($("replicas"), last, known.hello);
}

// Loads; while the store is away the last ones, with the states that the replica knows.
function of_now(now, last) {
  if (now.loads) return now.loads;
  const before = new Map((last?.loads ?? []).map((load) => [load[0], load]));
  return Object.entries(now.states ?? {}).map(([id, state]) => [id, state, ...(before.get(id) ?? unknown(id, state)).slice(2)]);
}

function showProblems(now, last) {
  const ready = (now.loads ?? []).filter(([, state]) => state === "ready").length;
  const alive = (now.replicas ?? []).filter(([, lives]) => lives).length;
  const calm = now.loads ? `${ready} of ${now.loads.length} instances ready, ${alive} replica${alive === 1 ? "" : "s"}, ${now.leader?.owner ?? "nobody"} leads` : "";
  problems.show(known.problems, known.at_s, calm, last ? `The figures below are of ${clock(last.at_s)}` : "", known.over);
}

// The page itself has no connection: what it shows is old.
function lost(words) {
  say("lost", words);
  if (!known.hello) return;
  const problem = {
    key: "page/lost", severity: "critical", what: "This page has lost its connection", why: `${words}. What it shows is of ${clock(known.at_s)}`,
    advice: "If this lasts, the replica or the way to it is gone: open /ui of another replica.", since_s: known.at_s, or_longer: false, instances: [],
  };
  problems.show([problem, ...known.problems], Date.now() / 1000, "", "", known.over);
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
  known.last = {};
  known.history = {};
  minutes.clear(event.sample_fields);
  $("happened").replaceChildren();
  tick(event);
}

function tick(event) {
  remember(event);
  requests.add(event.requests, event.at_s);
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
addEventListener("resize", () => { fit(true); if (known.hello) show(); });

listen(() => authorized("ui/stream"), { hello, tick, locked, lost });
