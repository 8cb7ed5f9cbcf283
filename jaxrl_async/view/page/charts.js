// Curves of several runs as lines of a chart: smoothed, grouped into bands, with intervals.

import { colorOf } from "./colors.js";
import { placeOf } from "./plot.js";
import { colorNumberOf, groupsOf } from "./run_model.js";

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

/** Return [step, low, high] of the 95 % interval of each value that has a standard error. */
export function intervalsOf([steps, values], errors) {
  if (!errors) return [];
  const known = new Map(errors[0].map((step, i) => [step, errors[1][i]]));
  return steps.flatMap((step, i) => {
    const half = Z_95 * known.get(step);
    return half > 0 ? [[step, values[i] - half, values[i] + half]] : [];
  });
}

/** Return the value of an axis at a step: between two of its points, in proportion; null without an axis. */
export function onAxis(axis, step) {
  if (!axis) return step;
  const [steps, values] = axis;
  if (!steps.length) return null;
  const place = placeOf(steps, step);
  if (steps[place] === step) return values[place];
  if (place === 0) return values[0];
  if (place === steps.length) return values.at(-1);
  const share = (step - steps[place - 1]) / (steps[place] - steps[place - 1]);
  return values[place - 1] + share * (values[place] - values[place - 1]);
}

/** Return mean, minimum and maximum of several curves at each step of any of them. A curve counts between its first
 * and its last step, also at steps that were thinned out of it. */
export function banded(curves) {
  const steps = [...new Set(curves.flatMap(([own]) => own))].sort((a, b) => a - b);
  const at = steps.map((step) => curves
    .filter(([own]) => own[0] <= step && step <= own.at(-1))
    .map((curve) => onAxis(curve, step)));
  return {
    steps,
    mean: at.map((values) => values.reduce((a, b) => a + b, 0) / values.length),
    least: at.map((values) => Math.min(...values)),
    largest: at.map((values) => Math.max(...values)),
  };
}

/** Return the first and the last step whose values on an axis may be in a range. */
export function stepsWithin(axis, [from, to]) {
  if (!axis) return [Math.max(0, Math.floor(from)), Math.ceil(to)];
  const [steps, values] = axis;
  if (!steps.length) return [0, 0];
  const first = Math.max(placeOf(values, from) - 1, 0), last = Math.min(placeOf(values, to) + 1, steps.length - 1);
  return [steps[first], steps[last]];
}

const DASHES = [undefined, [6, 4], [2, 3], [8, 3, 2, 3], [1, 4]];

/** Return the dash of a chart's curve by its place; a run keeps its color in all of them. */
export const dashOf = (which) => DASHES[which % DASHES.length];

/** Return the lines and bands of a chart: see plot.js.
 * data: curves by run and metric; axes: axis by run, or null for steps; look: {smooth, log, group}. */
export function linesOf(chart, data, runs, axes, look) {
  const lines = [], bands = [], several = chart.curves.length > 1;
  chart.curves.forEach(([key, label], which) => {
    const measured = runs.filter((run) => data[run.name]?.[key]?.[0].length && (!axes || axes[run.name]?.[0].length));
    for (const [name, members] of groupsOf(measured, look.group)) {
      const color = runs.length > 1 ? colorOf(colorNumberOf(members[0], look.group)) : colorOf(which), dash = runs.length > 1 ? dashOf(which) : undefined;
      const curves = members.map((run) => {
        const [steps, values] = data[run.name][key];
        return [steps, smoothed(values, look.smooth)];
      });
      const title = several ? (runs.length > 1 ? `${name}: ${label}` : label) : name;
      if (members.length === 1) {
        const [run] = members, axis = axes?.[run.name], [steps, ys] = curves[0];
        const wanted = !look.smooth && !look.log && !look.group;
        const intervals = (wanted ? intervalsOf(curves[0], data[run.name][`${key}_stderr`]) : [])
          .map(([step, ...ends]) => [onAxis(axis, step), ...ends]);
        lines.push({ label: title, run: name, xs: steps.map((step) => onAxis(axis, step)), ys, color, dash, intervals });
        continue;
      }
      const band = banded(curves);
      const xs = band.steps.map((step) => {
        const at = members.map((run) => onAxis(axes?.[run.name], step));
        return at.reduce((a, b) => a + b, 0) / at.length;
      });
      lines.push({ label: `${title} (${members.length} runs)`, run: name, xs, ys: band.mean, color, dash });
      bands.push({ run: name, xs, low: band.least, high: band.largest, color });
    }
  });
  return { lines, bands };
}
