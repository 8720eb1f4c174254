// The colour of an instance: of its id, so that it stays when others come and go. Red is left to what is wrong.

const HUES = 32, FIRST = 24, STEP = 10; // degrees: 24 to 334
const GAPS = [5, 4, 3, 2, 1]; // between two instances, in steps: as far apart as there is room
const KEPT = 500;
const STORED = "colours";

// By id; kept for as long as the tab, so that a reload changes nothing either.
const hues = new Map(stored());

// Give those of a set that have no colour one that no other of the set has, while there are colours left.
export function meet(ids) {
  const strangers = ids.filter((id) => !hues.has(id)).sort();
  if (!strangers.length) return;
  const taken = ids.filter((id) => hues.has(id)).map((id) => hues.get(id));
  for (const id of strangers) {
    const hue = free(hash(id), taken);
    hues.set(id, hue);
    taken.push(hue);
  }
  for (const id of hues.keys()) {
    if (hues.size <= KEPT) break;
    if (!ids.includes(id)) hues.delete(id);
  }
  try { sessionStorage.setItem(STORED, JSON.stringify([...hues])); } catch { /* of this page alone then */ }
}

export function colour(id) {
  const hue = hues.get(id);
  return hue === undefined ? "var(--dim)" : `hsl(${FIRST + STEP * hue} var(--vivid) var(--bright))`;
}

function free(start, taken) {
  for (const gap of GAPS) {
    for (let tried = 0; tried < HUES; tried++) {
      const hue = (start + 13 * tried) % HUES;
      if (taken.every((other) => Math.abs(other - hue) >= gap)) return hue;
    }
  }
  return start % HUES;
}

// FNV-1a, mixed once more: names often differ in their last character alone.
function hash(text) {
  let value = 0x811c9dc5;
  for (let index = 0; index < text.length; index++) value = Math.imul(value ^ text.charCodeAt(index), 0x01000193);
  value = Math.imul(value ^ (value >>> 15), 0x2c1b3c6d);
  return (value ^ (value >>> 12)) >>> 0;
}

function stored() {
  try { return JSON.parse(sessionStorage.getItem(STORED)) ?? []; } catch { return []; }
}
