// One chart on a canvas: lines, bands, intervals and axes; a second canvas above it for the pointer.

import { inkOf } from "./colors.js";
import { countTicksOf, labelsOf, logTicksOf, stepTicksOf, ticksOf, timeTicksOf } from "./numbers.js";

const FONT = "11px system-ui", TOP = 8, BELOW = 32, RIGHT = 10, TICK = 4, CAP = 3, NEAR_DRAG = 4, NEAR_END = 0.02;
const SPREADS = 3;

/** Return the place of the first value that is at least `value`, in ascending values. */
export function placeOf(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

/** Return the place of the value that is nearest, in ascending values. */
export function nearestOf(values, value) {
  const place = placeOf(values, value);
  if (place === 0) return 0;
  if (place === values.length) return place - 1;
  return value - values[place - 1] <= values[place] - value ? place - 1 : place;
}

/** Return the range of the y axis for some values. zero: it includes 0. cut: it leaves out values that are farther
 * from the middle 80 % than three times their range, such as the first step's time. */
export function rangeOf(values, { log, zero, cut }) {
  const used = (log ? values.filter((value) => value > 0) : values);
  if (!used.length) return log ? [0.1, 1] : [0, 1];
  let low = Infinity, high = -Infinity;
  for (const value of used) { if (value < low) low = value; if (value > high) high = value; }
  if (cut) {
    const sorted = Float64Array.from(used).sort(), at = (share) => sorted[Math.round(share * (sorted.length - 1))];
    const spread = SPREADS * (at(0.9) - at(0.1));
    if (spread > 0) [low, high] = [Math.max(low, at(0.1) - spread), Math.min(high, at(0.9) + spread)];
  }
  if (log) low = Math.max(low, Number.MIN_VALUE);
  if (log) return high > low ? [low / 1.15, high * 1.15] : [low / 2, high * 2];
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  const pad = high > low ? (high - low) * 0.06 : Math.abs(low) * 0.1 || 1;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}

/** Return the place of an event on a canvas, in pixels. */
export function pointOn(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

/** Write labels at places of an axis, centered between its ends, without those that would overlap. */
export function writeLabels(context, labels, places, left, right, y) {
  let free = left;
  labels.forEach((label, i) => {
    const width = context.measureText(label).width, at = Math.min(Math.max(places[i] - width / 2, left), right - width);
    if (at < free) return;
    context.fillText(label, at, y);
    free = at + width + 8;
  });
}

const xTicksOf = { step: stepTicksOf, tokens: countTicksOf, time: timeTicksOf };

/** Return a chart in an element: {draw(spec), point(x, run), reaches(line, x), base, frame}.
 * spec: {lines: [{label, run, xs, ys, color, dash, intervals}], bands: [{run, xs, low, high, color}], range, log, zero,
 * cut, axis, axisLabel}; on: {zoom(from, to), whole(), hover(x, run, event), leave()}. */
export function plotIn(place, on) {
  const base = document.createElement("canvas"), over = document.createElement("canvas");
  const paint = base.getContext("2d"), above = over.getContext("2d");
  let spec = null, frame = null, drag = null;
  over.className = "over";
  place.append(base, over);

  function sized(canvas, context, wide, tall) {
    const scale = devicePixelRatio || 1;
    Object.assign(canvas, { width: Math.round(wide * scale), height: Math.round(tall * scale) });
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = FONT;
  }

  function draw(next = spec) {
    spec = next;
    const wide = place.clientWidth, tall = place.clientHeight;
    if (!wide || !spec) return;
    sized(base, paint, wide, tall);
    sized(over, above, wide, tall);
    frame = frameOf(wide, tall);
    axes();
    paint.save();
    paint.beginPath();
    paint.rect(frame.left, TOP, frame.right - frame.left, frame.bottom - TOP);
    paint.clip();
    for (const band of spec.bands) area(band);
    for (const line of spec.lines) stroke(paint, line, 1.5);
    for (const line of spec.lines) if (line.intervals?.length) bars(line);
    paint.restore();
  }

  function frameOf(wide, tall) {
    const { lines, bands, range, log } = spec;
    let [low, high] = range ?? [Infinity, -Infinity];
    if (!range) for (const { xs } of lines) if (xs.length) { low = Math.min(low, xs[0]); high = Math.max(high, xs.at(-1)); }
    if (!(high > low)) [low, high] = Number.isFinite(low) ? [low - 0.5, low + 0.5] : [0, 1];
    const values = [], add = (xs, ys) => {
      const end = Math.min(placeOf(xs, high) + 1, xs.length);
      for (let i = Math.max(placeOf(xs, low) - 1, 0); i < end; i++) values.push(ys[i]);
    };
    for (const { xs, ys, intervals } of lines) {
      add(xs, ys);
      for (const [x, ...ends] of intervals ?? []) if (x >= low && x <= high) values.push(...ends);
    }
    for (const { xs, low: least, high: largest } of bands) { add(xs, least); add(xs, largest); }
    const [bottomValue, topValue] = rangeOf(values, spec);
    const bottom = tall - BELOW, right = wide - RIGHT;
    const yTicks = log ? logTicksOf(bottomValue, topValue, 5) : ticksOf(bottomValue, topValue, 5);
    const yLabels = labelsOf(yTicks);
    const left = Math.ceil(Math.max(34, ...yLabels.map((label) => paint.measureText(label).width)) + TICK + 8);
    const [a, b] = log ? [Math.log(bottomValue), Math.log(topValue)] : [bottomValue, topValue];
    const outside = values.filter((value) => value < bottomValue || value > topValue || (log && value <= 0)).length;
    return { left, right, bottom, low, high, yTicks, yLabels, outside,
      toX: (x) => left + ((x - low) / (high - low)) * (right - left),
      fromX: (px) => low + ((px - left) / (right - left)) * (high - low),
      toY: (y) => bottom - (((log ? Math.log(y) : y) - a) / (b - a)) * (bottom - TOP) };
  }

  function axes() {
    const { left, right, bottom, low, high, yTicks, yLabels, toX, toY } = frame;
    const [soft, thin] = [inkOf("--soft"), inkOf("--line")];
    paint.lineWidth = 1;
    paint.strokeStyle = thin;
    paint.fillStyle = soft;
    paint.textAlign = "right";
    paint.textBaseline = "middle";
    yTicks.forEach((tick, i) => {
      const y = Math.round(toY(tick)) + 0.5;
      if (y < TOP - 1 || y > bottom + 1) return;
      rule(paint, left - TICK, y, right, y);
      paint.fillText(yLabels[i], left - TICK - 3, y);
    });
    const [ticks, labels] = xTicksOf[spec.axis](low, high, Math.max(2, Math.floor((right - left) / 55)));
    const places = ticks.map((tick) => Math.round(toX(tick)) + 0.5);
    for (const x of places) rule(paint, x, TOP, x, bottom + TICK);
    paint.textAlign = "left";
    paint.textBaseline = "alphabetic";
    writeLabels(paint, labels, places, 1, place.clientWidth - 1, bottom + 15);
    paint.textAlign = "right";
    paint.fillText(spec.axisLabel, right, bottom + 28);
  }

  function rule(context, x, y, toX, toY) {
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(toX, toY);
    context.stroke();
  }

  function stroke(context, { xs, ys, color, dash }, width) {
    const { toX, toY, low, high } = frame, { log } = spec;
    const begin = Math.max(placeOf(xs, low) - 1, 0), end = Math.min(placeOf(xs, high) + 1, xs.length);
    context.strokeStyle = context.fillStyle = color;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.setLineDash(dash ?? []);
    context.beginPath();
    let count = 0, last = null;
    for (let i = begin; i < end; i++) {
      if (log && !(ys[i] > 0)) continue;
      last = [toX(xs[i]), toY(ys[i])];
      if (count++) context.lineTo(...last); else context.moveTo(...last);
    }
    context.stroke();
    context.setLineDash([]);
    if (count === 1) dot(context, last, color);
  }

  function dot(context, [x, y], color) {
    context.fillStyle = color;
    context.beginPath();
    context.arc(x, y, 3, 0, 2 * Math.PI);
    context.fill();
  }

  function area({ xs, low, high, color }) {
    const { toX, toY } = frame, y = (value) => toY(spec.log ? Math.max(value, 1e-300) : value);
    paint.globalAlpha = spec.bands.length > 4 ? 0.07 : 0.18;
    paint.fillStyle = color;
    paint.beginPath();
    for (let i = 0; i < xs.length; i++) paint.lineTo(toX(xs[i]), y(high[i]));
    for (let i = xs.length - 1; i >= 0; i--) paint.lineTo(toX(xs[i]), y(low[i]));
    paint.fill();
    paint.globalAlpha = 1;
  }

  function bars({ intervals, color }) {
    const { toX, toY } = frame;
    paint.strokeStyle = color;
    paint.lineWidth = 1;
    paint.beginPath();
    for (const [x, ...ends] of intervals) {
      const px = toX(x), [low, high] = ends.map(toY);
      paint.moveTo(px, low);
      paint.lineTo(px, high);
      for (const y of [low, high]) { paint.moveTo(px - CAP, y); paint.lineTo(px + CAP, y); }
    }
    paint.stroke();
  }

  /** Show the pointer at an x, and a run before the others. null: none. */
  function point(x, run) {
    if (!frame) return;
    above.clearRect(0, 0, place.clientWidth, place.clientHeight);
    above.save();
    above.beginPath();
    above.rect(frame.left, TOP, frame.right - frame.left, frame.bottom - TOP);
    above.clip();
    const chosen = run == null ? [] : spec.lines.filter((line) => line.run === run);
    if (chosen.length && spec.lines.length > chosen.length) {
      above.fillStyle = inkOf("--card");
      above.globalAlpha = 0.6;
      above.fillRect(frame.left, TOP, frame.right - frame.left, frame.bottom - TOP);
      above.globalAlpha = 1;
      for (const line of chosen) stroke(above, line, 2.5);
    }
    if (x != null && x >= frame.low && x <= frame.high) {
      const px = Math.round(frame.toX(x)) + 0.5;
      above.strokeStyle = inkOf("--soft");
      above.lineWidth = 1;
      rule(above, px, TOP, px, frame.bottom);
      for (const line of chosen.length ? chosen : spec.lines.length <= 12 ? spec.lines : []) {
        if (!reaches(line, x)) continue;
        const i = nearestOf(line.xs, x);
        if (!spec.log || line.ys[i] > 0) dot(above, [frame.toX(line.xs[i]), frame.toY(line.ys[i])], line.color);
      }
    }
    if (drag?.to != null) {
      above.fillStyle = inkOf("--c0");
      above.globalAlpha = 0.18;
      above.fillRect(Math.min(drag.from, drag.to), TOP, Math.abs(drag.to - drag.from), frame.bottom - TOP);
    }
    above.restore();
  }

  /** Whether a line has a value at about an x, neither begins later nor ends earlier. */
  function reaches({ xs }, x) {
    const near = NEAR_END * (frame.high - frame.low);
    return xs.length > 0 && x >= xs[0] - near && x <= xs.at(-1) + near;
  }

  /** Return the line that is nearest to a place, and its distance in pixels. */
  function nearestLine(px, py) {
    const x = frame.fromX(px);
    let best = null;
    for (const line of spec.lines) {
      if (!reaches(line, x)) continue;
      const i = nearestOf(line.xs, x), away = Math.abs(frame.toY(line.ys[i]) - py);
      if (!best || away < best.away) best = { line, away };
    }
    return best;
  }

  over.addEventListener("pointerdown", (event) => {
    if (!frame || !on.zoom || event.button !== 0 || event.pointerType === "touch") return;
    drag = { from: Math.min(Math.max(pointOn(over, event)[0], frame.left), frame.right), to: null };
    over.setPointerCapture(event.pointerId);
  });
  over.addEventListener("pointermove", (event) => {
    if (!frame || !spec) return;
    const [px, py] = pointOn(over, event);
    if (drag) drag.to = Math.min(Math.max(px, frame.left), frame.right);
    if (px < frame.left || px > frame.right) { if (!drag) on.leave(); return; }
    const near = nearestLine(px, py);
    on.hover(frame.fromX(px), near && near.away < 24 ? near.line : null, event);
  });
  over.addEventListener("pointerup", () => {
    const done = drag;
    drag = null;
    if (done?.to == null) return;
    const [from, to] = [done.from, done.to].sort((a, b) => a - b);
    if (to - from >= NEAR_DRAG) on.zoom(frame.fromX(from), frame.fromX(to));
    else point(null, null);
  });
  over.addEventListener("pointercancel", () => { drag = null; });
  over.addEventListener("pointerleave", () => { if (!drag) on.leave(); });
  over.addEventListener("dblclick", () => on.whole?.());

  return { draw, point, reaches, base, get frame() { return frame; }, get spec() { return spec; } };
}
