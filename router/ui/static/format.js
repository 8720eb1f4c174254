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

// The colour of an instance: the same in rings, bars and stories. Far apart for few, told apart by their neighbours for many.
export function colour(number, of) {
  if (number < 0) return "var(--dim)";
  const hue = of <= 12 ? 205 + (360 * number) / Math.max(of, 1) : 205 + 137.508 * number;
  return `hsl(${(hue % 360).toFixed(1)} var(--vivid) var(--bright))`;
}
