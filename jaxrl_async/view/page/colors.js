// The colors of runs and of kinds of spans, by number; the inks of the page.

const HAND_PICKED = 8, GOLDEN_DEGREES = 137.508;
const dark = matchMedia("(prefers-color-scheme: dark)");
const inks = new Map();
dark.addEventListener("change", () => inks.clear());

/** Return the value of a style property of the page. */
export function inkOf(name) {
  if (!inks.has(name)) inks.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return inks.get(name);
}

/** Return the color of a number: the first ones are picked by hand, further ones are far from those before. */
export function colorOf(number) {
  if (number < HAND_PICKED) return inkOf(`--c${number}`);
  const light = (dark.matches ? 0.76 : 0.55) + [0, -0.1, 0.08][number % 3];
  return `oklch(${light.toFixed(2)} 0.14 ${((number * GOLDEN_DEGREES) % 360).toFixed(0)})`;
}

/** Call a function whenever the page becomes light or dark. */
export const onTheme = (act) => dark.addEventListener("change", act);
