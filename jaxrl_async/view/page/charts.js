// Curves of several runs: smoothed, as bands of seeds, logarithmic, zoomed. Rendered by uPlot.

const HEIGHT = 190;
const NARROWEST = 54;
const SYNC = "steps";

export const colorOf = (number) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--c${number % 8}`).trim();

const inkOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Return exponentially smoothed values; the first ones are not biased towards 0. */
export function smoothed(values, share) {
  if (!share) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

/** Half the length of a 95 % interval, in standard errors. */
const Z_95 = 1.96;
const CAP = 3;

/** Return [step, low, high] of the 95 % interval of each value that has a standard error. */
export function intervalsOf([steps, values], errors) {
  if (!errors) return [];
  const known = new Map(errors[0].map((step, i) => [step, errors[1][i]]));
  return steps.flatMap((step, i) => {
    const half = Z_95 * known.get(step);
    return half > 0 ? [[step, values[i] - half, values[i] + half]] : [];
  });
}

/** Draw the intervals of lines as vertical bars with caps. */
function drawIntervals(plot, lines) {
  const { ctx } = plot;
  ctx.save();
  ctx.lineWidth = uPlot.pxRatio;
  ctx.beginPath();
  ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
  ctx.clip();
  for (const { color, intervals } of lines) {
    ctx.strokeStyle = color;
    ctx.beginPath();
    for (const [step, ...ends] of intervals ?? []) {
      const x = plot.valToPos(step, "x", true), cap = CAP * uPlot.pxRatio;
      const [low, high] = ends.map((y) => plot.valToPos(y, "y", true));
      ctx.moveTo(x, low);
      ctx.lineTo(x, high);
      for (const y of [low, high]) { ctx.moveTo(x - cap, y); ctx.lineTo(x + cap, y); }
    }
    ctx.stroke();
  }
  ctx.restore();
}

/** Return a run's name without its seed: "grpo" for "grpo-2" and "grpo_seed3". */
export const withoutSeed = (name) => name.replace(/[-_.]?(seed)?[-_.]?\d+$/i, "") || name;

/** Return mean, minimum and maximum of several curves at each step. */
export function banded(curves) {
  const at = new Map();
  for (const [steps, values] of curves) {
    steps.forEach((step, i) => {
      const known = at.get(step) ?? [];
      known.push(values[i]);
      at.set(step, known);
    });
  }
  const steps = [...at.keys()].sort((a, b) => a - b);
  const of = (f) => steps.map((step) => f(at.get(step)));
  return {
    steps,
    mean: of((v) => v.reduce((a, b) => a + b, 0) / v.length),
    least: of((v) => Math.min(...v)),
    largest: of((v) => Math.max(...v)),
  };
}

/** Return a number as text; more: digits in addition to the usual three or four. */
export function shown(value, more = 0) {
  if (value == null) return "–";
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

/** Return the width of the y axis: the width of its widest label. */
function axisWidth(plot, labels, index) {
  const axis = plot.axes[index];
  plot.ctx.save();
  plot.ctx.font = axis.font[0];
  const widths = (labels ?? []).map((label) => plot.ctx.measureText(label).width);
  plot.ctx.restore();
  return Math.max(NARROWEST, Math.max(0, ...widths) / uPlot.pxRatio + axis.gap + axis.ticks.size);
}

/** Return the lines to draw: [{label, steps, values, color, dash, hidden}], and the bands between. */
export function linesOf(chart, data, runs, look) {
  const lines = [], bands = [];
  const many = runs.length > 1;
  chart.curves.forEach(([key, label], which) => {
    const curves = runs
      .map((run) => ({ run, points: data[run.name]?.[key], errors: data[run.name]?.[`${key}_stderr`] }))
      .filter((one) => one.points?.[0].length);
    const dash = many && which ? [[6, 4], [2, 3], [8, 3, 2, 3]][(which - 1) % 3] : undefined;
    const title = (name) => (many ? (chart.curves.length > 1 ? `${name}: ${label}` : name) : label);
    const groups = new Map();
    for (const one of curves) {
      const name = look.bands ? withoutSeed(one.run.name) : one.run.name;
      groups.set(name, [...(groups.get(name) ?? []), one]);
    }
    for (const [name, members] of groups) {
      const color = colorOf(many ? members[0].run.number : which);
      const smooth = members.map(({ points: [s, v] }) => [s, smoothed(v, look.smooth)]);
      if (members.length === 1) {
        const [steps, values] = smooth[0];
        const intervals = look.smooth || look.log ? [] : intervalsOf(smooth[0], members[0].errors);
        lines.push({ label: title(name), steps, values, color, dash, intervals });
        const ends = { color, hidden: true, label: "", steps: intervals.map(([step]) => step) };
        if (intervals.length) {  // so that the axis has room for them
          lines.push({ ...ends, values: intervals.map(([, low]) => low) });
          lines.push({ ...ends, values: intervals.map(([, , high]) => high) });
        }
        continue;
      }
      const band = banded(smooth);
      const first = lines.length;
      const edge = { color, hidden: true, label: "", steps: band.steps };
      lines.push({ ...edge, values: band.largest }, { ...edge, values: band.least });
      const label = `${title(name)} (${members.length} seeds)`;
      lines.push({ label, steps: band.steps, values: band.mean, color, dash });
      bands.push({ series: [first + 1, first + 2], fill: `${color}33` });
    }
  });
  return { lines, bands };
}

const fitted = (zero) => (_, least, largest) => {
  if (least == null) return [0, 1];
  const [low, high] = zero ? [Math.min(least, 0), Math.max(largest, 0)] : [least, largest];
  const pad = high > low ? (high - low) * 0.06 : Math.abs(low) * 0.1 || 1;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
};

/** Draw lines into an element; return the uPlot, or null if there is nothing to draw.
 * onZoom: called with the selected steps; null: the chart has separate steps. */
export function draw(place, { lines, bands }, look, onZoom) {
  const positive = (v) => (look.log ? v.map((x) => (x > 0 ? x : null)) : v);
  const tables = lines.map((line) => [line.steps, positive(line.values)]);
  if (!tables.length) return null;
  const axis = { stroke: inkOf("--soft"), grid: { stroke: inkOf("--line"), width: 1 },
    ticks: { stroke: inkOf("--line"), width: 1 }, font: "11px system-ui" };
  const options = {
    width: Math.max(place.clientWidth, 120),
    height: HEIGHT,
    bands,
    cursor: { ...(onZoom && { sync: { key: SYNC } }), drag: { x: Boolean(onZoom), y: false, setScale: false }, points: { size: 6 } },
    scales: {
      x: { time: false, range: look.range ?? undefined },
      y: look.log ? { distr: 3 } : { range: fitted(look.zero) },
    },
    axes: [{ ...axis, size: 28 }, { ...axis, size: axisWidth, values: (_, ticks) => labelsOf(ticks) }],
    series: [
      { label: "step", value: (_, v) => (v == null ? "–" : v) },
      ...lines.map((line) => ({
        label: line.label, stroke: line.hidden ? "transparent" : line.color,
        width: line.hidden ? 0 : 1.7, dash: line.dash, spanGaps: true,
        points: { show: line.steps.length === 1 && !line.hidden }, value: (_, v) => shown(v),
      })),
    ],
    hooks: {
      draw: [(u) => drawIntervals(u, lines)],
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        const [from, to] = [u.select.left, u.select.left + u.select.width].map((x) => u.posToVal(x, "x"));
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        onZoom([from, to]);
      }],
    },
  };
  const plot = new uPlot(options, uPlot.join(tables), place);
  const rows = plot.root.querySelectorAll(".u-legend .u-series");
  lines.forEach((line, i) => { rows[i + 1].hidden = Boolean(line.hidden); });
  return plot;
}
