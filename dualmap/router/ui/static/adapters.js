// Adapters by instance: what is on the device and in host memory by last use, what is loaded of the registered ones, and what fails to load.

import { count, element, shown } from "./format.js";
import { Polled } from "./polled.js";

const NAMES = 6, LISTED = 40;

export class Adapters extends Polled {
  path(pool) {
    return `admin/adapters?pool=${pool}`;
  }

  draw({ room, adapters }) {
    const found = byInstance(room, adapters);
    this.body.replaceChildren(...[...found].sort(([a], [b]) => (a < b ? -1 : 1)).flatMap(([id, each]) => rows(id, each, room[id])));
    return found.size > 0;
  }
}

// The adapters of each instance: those with most running requests first, as they come.
function byInstance(room, adapters) {
  const found = new Map();
  const of = (id) => found.get(id) ?? found.set(id, { device: [], host: [], loaded: 0, failed: [] }).get(id);
  for (const id of Object.keys(room)) of(id);
  for (const { adapter, running, device, host, registered } of adapters) {
    for (const id of device) of(id).device.push({ adapter, running });
    for (const id of host) of(id).host.push({ adapter, running });
    for (const id of registered?.loaded ?? []) of(id).loaded += 1;
    for (const [id, why] of Object.entries(registered?.failed ?? {})) of(id).failed.push(`${adapter}: ${why}`);
  }
  return found;
}

function rows(id, { device, host, loaded, failed }, room) {
  const of = (names, slots) => (slots ? `${count(names.length)} / ${count(slots)}` : count(names.length));
  const chips = device.slice(0, NAMES).map(({ adapter, running }) =>
    element("span", { class: "chip", title: running ? `${count(running)} requests run in the fleet` : "no request runs" }, adapter));
  if (device.length > NAMES) chips.push(element("span", { class: "chip", title: names(device) }, `and ${count(device.length - NAMES)} more`));
  const waiting = (room?.running ?? 0) - (room?.device ?? 0);
  if (waiting > 0) chips.push(element("span", { class: "chip warn", title: "adapters with running requests beyond the slots on the device" }, `${count(waiting)} wait for a slot`));
  if (failed.length) chips.push(element("span", { class: "chip bad", title: failed.slice(0, LISTED).join("\n") }, `${count(failed.length)} not loaded`));
  // The device's adapters are in host memory as well.
  const inHost = [...device, ...host];
  const figures = element("tr", {}, element("td", {}, shown(id)),
    element("td", { class: "n" }, of(device, room?.device)), element("td", { class: "n", title: names(inHost) }, of(inHost, room?.host)),
    element("td", { class: "n" }, count(loaded)));
  return chips.length ? [figures, element("tr", { class: "names" }, element("td", { colspan: 4 }, ...chips))] : [figures];
}

const names = (list) => list.slice(0, LISTED).map(({ adapter }) => adapter).join(", ") + (list.length > LISTED ? ` and ${count(list.length - LISTED)} more` : "");
