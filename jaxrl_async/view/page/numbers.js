// Numbers, times and axes as texts.

/** Return a number as text; more: digits in addition to the usual three or four. */
export function shown(value, more = 0) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2 + more);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: more });
  return Number(value.toPrecision(4 + more)).toString();
}

/** Return the labels of an axis: numbers with enough digits to give each tick to a thousandth of its
 * distance from the next one. */
export function labelsOf(ticks) {
  const numbers = ticks.filter((t) => t != null);
  const near = numbers.map((t) => Math.min(...numbers.map((u) => Math.abs(u - t) || Infinity)));
  const says = (label, i) => Math.abs(Number(label.replaceAll(",", "")) - numbers[i]) <= near[i] / 1000;
  for (let more = 0; ; more++) {
    const labels = numbers.map((t) => shown(t, more));
    if (labels.every(says) || more === 12) {
      return ticks.map((t) => (t == null ? "" : labels.shift()));
    }
  }
}

/** Return round numbers (1, 2, 2.5 or 5 times a power of ten apart) between two values. */
export function ticksOf(low, high, about) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(about, 1), power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 2.5, 5, 10].map((m) => m * power).find((one) => one >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) {
    ticks.push(Number((i * size).toPrecision(14)));
  }
  return ticks;
}

/** Return powers of ten between two positive values, or round numbers if there are fewer than two. */
export function logTicksOf(low, high, about) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  if (last - first < 1) return ticksOf(low, high, about).filter((tick) => tick > 0);
  const every = Math.max(1, Math.ceil((last - first + 1) / about)), ticks = [];
  for (let power = first; power <= last; power += every) ticks.push(Number(`1e${power}`));
  return ticks;
}

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

/** Return ticks of an axis in seconds, and their labels: 0, 2 h, 4 h. */
export function timeTicksOf(low, high, about) {
  const [unit, size] = UNITS.find(([, one]) => high - low >= 2 * one) ?? UNITS[3];
  const ticks = ticksOf(low / size, high / size, about), labels = labelsOf(ticks);
  return [ticks.map((tick) => tick * size), labels.map((label) => `${label} ${unit}`)];
}

/** Return ticks of an axis of steps, and their labels: whole numbers. */
export function stepTicksOf(low, high, about) {
  const ticks = ticksOf(low, high, about).filter(Number.isInteger);
  return [ticks, ticks.map((tick) => tick.toLocaleString("en"))];
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 3 });

/** Return ticks of an axis that counts tokens, and their labels: 0, 200K, 1.5M. */
export function countTicksOf(low, high, about) {
  const ticks = ticksOf(low, high, about), labels = ticks.map((tick) => compact.format(tick));
  return [ticks, new Set(labels).size === labels.length ? labels : labelsOf(ticks)];
}

/** Return a duration in its two largest units: 3 h 12 min. */
export function durationOf(seconds) {
  if (seconds == null || Number.isNaN(seconds)) return "";
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  const place = UNITS.findIndex(([, size]) => seconds >= size), [unit, size] = UNITS[place];
  const [under, part] = UNITS[place + 1], rest = Math.floor((seconds % size) / part);
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${under}` : ""}`;
}

/** Return a time, in seconds since 1970, as local date and time. */
export function whenOf(seconds) {
  if (seconds == null) return "";
  const date = new Date(seconds * 1000), two = (n) => String(n).padStart(2, "0");
  if (Number.isNaN(date.getTime())) return "";
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}
