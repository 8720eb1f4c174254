// Numbers and times as people read them, and elements without HTML from strings.

export const count = (value) => Math.round(value).toLocaleString("en-US");

export const short = (value) =>
  value >= 1e6 ? `${(value / 1e6).toFixed(value >= 1e7 ? 0 : 1)}M` : value >= 1e4 ? `${Math.round(value / 1e3)}k`
  : value >= 1e3 ? `${(value / 1e3).toFixed(1)}k` : `${Math.round(value)}`;

export const percent = (share) =>
  share === null ? "–" : share > 0 && share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(share === 1 || share === 0 ? 0 : 1)}%`;

export const seconds = (value) =>
  value === null || value === undefined ? "–" : value < 0.0995 ? `${Math.round(value * 1000)} ms`
  : value < 9.95 ? `${value.toFixed(2)} s` : value < 99.5 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;

export const clock = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString("en-GB");

// element("td", {class: "n"}, "text", child)
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A name, whole where there is room; `fit` cuts it in the middle where there is none, since names differ at their end.
export const shown = (id) => element("span", { class: "id", title: id }, id);

const TAIL = 9;

// Called when all is drawn. Everything is measured before anything is cut, so that the page is laid out a few times at most.
export function fit(anew = false) {
  if (anew) {
    for (const each of document.querySelectorAll(".id[data-fit]")) {
      each.removeAttribute("data-fit");
      each.textContent = each.title;
    }
  }
  let left = [...document.querySelectorAll(".id:not([data-fit])")].filter((each) => each.clientWidth).map((place) => ({ place, kept: place.title.length }));
  left.forEach(({ place }) => place.setAttribute("data-fit", ""));
  while (left.length) {
    const room = left.map(({ place }) => place.clientWidth / place.scrollWidth);
    left = left.filter((each, index) => {
      const id = each.place.title, kept = Math.min(Math.floor(each.kept * room[index]), each.kept - 1), tail = Math.min(TAIL, kept - 2);
      if (room[index] >= 1 || tail < 1) return false;
      each.kept = kept;
      each.place.textContent = `${id.slice(0, kept - tail - 1)}…${id.slice(-tail)}`;
      return true;
    });
  }
}

// An instance's name behind its colour.
export const instance = (id, tint) => element("span", { class: "instance", style: `--c: ${tint}` }, shown(id));

const collator = new Intl.Collator("en", { numeric: true });
export const byName = (one, other) => collator.compare(one, other);

export function age(time_s) {
  return time_s < 90 ? `${Math.max(0, Math.round(time_s))} s` : time_s < 5400 ? `${Math.round(time_s / 60)} min`
    : time_s < 172800 ? `${Math.round(time_s / 3600)} h` : `${Math.round(time_s / 86400)} days`;
}

// Puts elements in this order, moving none that is in place already: one that is moved loses the focus.
export function arrange(place, wanted) {
  const keep = new Set(wanted);
  for (const child of [...place.children]) if (!keep.has(child)) child.remove();
  wanted.forEach((each, index) => { if (place.children[index] !== each) place.insertBefore(each, place.children[index] ?? null); });
}
