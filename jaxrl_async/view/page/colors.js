// The colors of runs and of kinds of spans, by number; the inks of the page.

const HAND_PICKED = 8;
// Hue and lightness of the further ones: of any ten in a row, and of the first 16, no two are near in either theme.
const FIRST_DEGREES = 60, TURN_DEGREES = 142, LIGHTER = [0, -0.12, 0.08, -0.06];
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
  const light = (dark.matches ? 0.76 : 0.55) + LIGHTER[number % LIGHTER.length];
  return `oklch(${light.toFixed(2)} 0.14 ${((FIRST_DEGREES + number * TURN_DEGREES) % 360).toFixed(0)})`;
}

const texts = new Map(), pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });

/** Return the color of a text on a color: black or white, whichever is read better. */
export function textOn(color) {
  if (!texts.has(color)) {
    pixel.fillStyle = color;
    pixel.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...pixel.getImageData(0, 0, 1, 1).data].map((part) => ((part / 255 + 0.055) / 1.055) ** 2.4);
    texts.set(color, 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff");
  }
  return texts.get(color);
}

/** Call a function whenever the page becomes light or dark. */
export const onTheme = (act) => dark.addEventListener("change", act);
