// Replicas, the leader, and what happens to them.

import { clock, element } from "./format.js";

const KEPT = 60;

export function showHappenings(place, happened, several) {
  for (const [at_s, pool, kind, words] of happened) {
    place.prepend(element("li", { class: kind }, element("time", {}, clock(at_s)), element("span", {}, several ? `${pool}: ${words}` : words)));
  }
  while (place.children.length > KEPT) place.lastElementChild.remove();
  place.closest("section").hidden = !place.children.length;
}

export function showReplicas(place, now, hello) {
  const hosts = new Set(now.replicas.map(([, , , host]) => host));
  const rows = now.replicas.map(([id, alive, requests, host, version]) =>
    element("li", { class: alive ? "" : "gone", title: [host, version].filter(Boolean).join(", version ") }, element("i"), element("b", {}, id),
      element("span", {}, [alive ? `${requests || 0} live requests` : "lease is over", hosts.size > 1 && host, version !== hello.version && version].filter(Boolean).join(" · ")),
      id === hello.replica_id ? element("em", {}, "serves this page") : ""));
  rows.push(element("li", { class: now.leader ? "leader" : "gone" }, element("i"), element("b", {}, now.leader ? now.leader.owner : "no worker leads"),
    element("span", {}, now.leader ? "leads" : "nothing is rebalanced, learned or checked")));
  const moved = Object.entries(now.migrations).map(([reason, times]) => `${times.toLocaleString("en-US")} ${reason}`).join(", ");
  if (moved) rows.push(element("li", { class: "sum" }, element("span", {}, `migrations: ${moved}`)));
  place.replaceChildren(...rows);
}
