// The timeline: a lane for each thread and for overlapping spans, for any time window.

import { colorOf, inkOf, textOn } from "./colors.js";
import { buttonOf, make, tableOf } from "./elements.js";
import { timeTicksOf } from "./numbers.js";
import { pointOn, writeLabels } from "./plot.js";

const BAR = 15, GAP = 3, LANE_GAP = 9, AXIS = 20, NARROW = 560, TITLE = 15, WAIT = 0.35;
const GREY = 7;  // the number of a color that is taken for a wait's
const numbers = new Map();  // of the kinds of spans by name, so that a kind has one color in all runs

/** Return the number of a kind's color. */
function numberOf(kind) {
  if (!numbers.has(kind)) numbers.set(kind, numbers.size < GREY ? numbers.size : numbers.size + 1);
  return numbers.get(kind);
}

/** Format seconds in a suitable unit. */
export function timeOf(seconds) {
  const size = Math.abs(seconds);
  if (!size) return "0 s";
  if (size >= 100) return `${seconds.toFixed(0)} s`;
  if (size >= 1) return `${Number(seconds.toPrecision(3))} s`;
  return size >= 1e-3 ? `${Number((seconds * 1e3).toPrecision(3))} ms` : `${Math.round(seconds * 1e6)} µs`;
}

const percentOf = (share) => share == null ? "" : `${share > 0 && share < 0.001 ? "<0.1" : Number((share * 100).toPrecision(3))} %`;

/** Return a view of one run's spans: {place, look}; look() draws the current data. */
export function lanesOf(run, ask, whole) {
  const place = document.createElement("div");
  const state = { window: null, shown: null };
  const canvas = Object.assign(document.createElement("canvas"), { tabIndex: 0 });
  const hint = make("div", null, "tip"), where = make("p", null, "hint"), note = make("p", null, "hint");
  const stage = make("div", null, "lanes"), shares = make("div");
  const legend = make("div", null, "keys hint");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-describedby", `keys-${run.number}`);
  hint.hidden = true;
  stage.append(canvas, hint);
  place.append(make("h2", run.name), controls(), where, stage, legend, shares, note);
  const context = canvas.getContext("2d");
  let boxes = [], drag = null;

  function controls() {
    const bar = make("div", null, "keys");
    bar.append(buttonOf("whole run", "0", () => look(null)), buttonOf("earlier", "arrow left", () => pan(-0.5)),
      buttonOf("later", "arrow right", () => pan(0.5)), buttonOf("closer", "+", () => zoom(0.5)),
      buttonOf("wider", "−", () => zoom(2)));
    if (!whole) bar.append(stepsForm());
    const keys = make("span", "Drag over the lanes to zoom", "hint");
    keys.append(make("span", "; arrows, + and − with the lanes in focus", "mouse"), ".");
    keys.id = `keys-${run.number}`;
    bar.append(keys);
    return bar;
  }

  function stepsForm() {
    const form = document.createElement("form");
    const field = (name) => Object.assign(document.createElement("input"),
      { type: "number", min: 0, name, required: true });
    const [first, last] = [field("first"), field("last")];
    first.setAttribute("aria-label", "first step");
    last.setAttribute("aria-label", "last step");
    form.append("steps ", first, " to ", last, make("button", "show"));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      take(await ask("/api/spans", { run: run.name, first: first.value, last: last.value }));
      state.window = state.shown.window;
    });
    return form;
  }

  async function look(window = state.window) {
    state.window = window;
    const [from, to] = window ?? [];
    const shown = await ask("/api/spans", { run: run.name, ...(window && { from, to }) });
    if (state.window === window) take(shown);  // else another was asked for meanwhile
  }

  function take(shown) {
    state.shown = shown;
    const none = !shown.lanes.length;
    for (const part of [stage, legend, shares, where]) part.hidden = none;
    place.querySelector(".keys").hidden = none;
    if (none) {
      note.textContent = shown.files.length ? "The span files contain no spans."
        : "No spans were recorded. metrics.spans=true records them: every minute during the run, and at its end.";
      return;
    }
    const [from, to] = shown.window, [first, last] = shown.steps;
    where.textContent = `${timeOf(to - from)} of ${timeOf(shown.end)}, from ${timeOf(from)}`
      + (shown.steps.length ? `: ${first === last ? `step ${first}` : `steps ${first} to ${last}`}` : "");
    note.textContent = noteOf(shown);
    listShares();
    paint();
    listKinds();
  }

  /** Show the legend: the ink of each kind of span that is drawn. */
  function listKinds() {
    const kinds = [...new Set(state.shown.lanes.flatMap(({ rows }) => rows.flat()).map((span) => span[2]))];
    legend.replaceChildren(...kinds.sort((a, b) => a - b).map((kind) => {
      const key = make("span", null, "key"), dot = make("span", null, "dot"), name = state.shown.kinds[kind];
      dot.style.setProperty("--c", inkOfKind(kind));
      if (waits(kind)) dot.style.opacity = WAIT;
      key.append(dot, name);
      return key;
    }));
  }

  const waits = (kind) => state.shown.kinds[kind].startsWith("wait");
  const inkOfKind = (kind) => (waits(kind) ? inkOf("--soft") : colorOf(numberOf(state.shown.kinds[kind])));

  function noteOf({ spans, files, dropped, unread }) {
    const many = (n) => n.toLocaleString("en");
    const words = [`${many(spans)} spans in ${files.join(", ")} (ui.perfetto.dev opens them)`];
    if (dropped) words.push(`${many(dropped)} older ones had no room`);
    if (unread) words.push(`${many(unread)} lines could not be read`);
    if (whole) words.push("this report has the whole run and its last steps; jaxrl-async view shows every span");
    return `${words.join("; ")}.`;
  }

  function listShares() {
    const rows = state.shown.lanes.map((lane) => [titleOf(lane), percentOf(lane.busy),
      lane.rows.flat().reduce((sum, span) => sum + span[3], 0).toLocaleString("en")]);
    const folded = make("details");
    folded.append(make("summary", "Busy shares of this window as a table"), tableOf(["lane", "busy", "spans drawn"], rows));
    folded.open = shares.firstChild?.open ?? false;
    shares.replaceChildren(folded);
  }

  const titleOf = ({ process, name: thread }) => {
    const name = thread === "MainThread" ? "main thread" : thread;
    const several = new Set(state.shown.lanes.map((lane) => lane.process)).size > 1;
    return several ? `${process}: ${name}` : name;
  };

  function paint() {
    const { shown } = state, [from, to] = shown.window;
    const width = Math.max(canvas.clientWidth, 200), narrow = width < NARROW, left = narrow ? 0 : 190, above = narrow ? TITLE : 0;
    const tall = shown.lanes.map((lane) => above + Math.max(lane.rows.length, 1) * (BAR + GAP) + LANE_GAP);
    const height = AXIS + tall.reduce((a, b) => a + b, 0);
    const scale = devicePixelRatio || 1;
    Object.assign(canvas, { width: width * scale, height: height * scale });
    canvas.style.height = `${height}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const x = (time) => left + ((time - from) / (to - from || 1)) * (width - left - 4);
    context.font = "11px system-ui";
    context.fillStyle = inkOf("--soft");
    const [ticks, labels] = timeTicksOf(from, to, narrow ? 3 : 6);
    writeLabels(context, labels, ticks.map(x), left, width, 12);
    boxes = [];
    let top = AXIS;
    shown.lanes.forEach((lane, number) => {
      context.fillStyle = inkOf("--soft");
      context.fillText(fitted(titleOf(lane), (narrow ? width : left) - 50), 0, top + BAR - 4);
      context.textAlign = "right";
      context.fillText(percentOf(lane.busy), narrow ? width - 4 : left - 6, top + BAR - 4);
      context.textAlign = "left";
      lane.rows.forEach((row, depth) => {
        const y = top + above + depth * (BAR + GAP);
        for (const [start, end, kind, count] of row) {
          const [a, b] = [Math.max(x(start), left), Math.min(x(end), width - 4)];
          const name = shown.kinds[kind], wide = Math.max(b - a, 1);
          context.globalAlpha = waits(kind) ? WAIT : 1;
          context.fillStyle = inkOfKind(kind);
          context.fillRect(a, y, wide, BAR);
          context.globalAlpha = 1;
          if (wide > 46 && count === 1) {
            context.fillStyle = waits(kind) ? inkOf("--ink") : textOn(inkOfKind(kind));
            context.fillText(fitted(name, wide - 8), a + 4, y + BAR - 4);
          }
          boxes.push({ a, b: a + wide, y, lane: number, start, end, name, count });
        }
      });
      top += tall[number];
      context.fillStyle = inkOf("--line");
      context.fillRect(0, top - LANE_GAP / 2, width, 1);
    });
    canvas.setAttribute("aria-label", `Busy shares from ${timeOf(from)} to ${timeOf(to)}: `
      + shown.lanes.map((lane) => `${titleOf(lane)} ${percentOf(lane.busy)}`).join(", "));
    state.left = left;
    state.width = width;
  }

  function fitted(text, room) {
    if (context.measureText(text).width <= room) return text;
    let kept = text;
    while (kept && context.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
    return kept && `${kept}…`;
  }

  const timeAt = (px) => {
    const [from, to] = state.shown.window;
    return from + (Math.min(Math.max(px - state.left, 0), state.width - state.left - 4) / (state.width - state.left - 4)) * (to - from);
  };

  function between(from, to) {
    const { end } = state.shown, size = Math.min(Math.max(to - from, 1e-6), end);
    const start = Math.min(Math.max(from, 0), end - size);
    return look(size >= end ? null : [start, start + size]);
  }
  function pan(share) {
    const [from, to] = state.shown.window, by = share * (to - from);
    return between(from + by, to + by);
  }
  function zoom(times) {
    const [from, to] = state.shown.window, middle = (from + to) / 2, half = ((to - from) / 2) * times;
    return between(middle - half, middle + half);
  }

  canvas.addEventListener("keydown", (event) => {
    const acts = { ArrowLeft: () => pan(-0.5), ArrowRight: () => pan(0.5), "+": () => zoom(0.5), "=": () => zoom(0.5),
      "-": () => zoom(2), 0: () => look(null) };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  });
  canvas.addEventListener("pointerdown", (event) => {
    drag = pointOn(canvas, event)[0];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [px, py] = pointOn(canvas, event);
    if (drag !== null) {
      paint();
      context.globalAlpha = 0.2;
      context.fillRect(Math.min(drag, px), 0, Math.abs(px - drag), canvas.height);
      context.globalAlpha = 1;
    }
    const box = boxes.findLast((one) => px >= one.a - 1 && px <= one.b + 1 && py >= one.y && py <= one.y + BAR);
    hint.hidden = !box;
    if (!box) return;
    const many = box.count > 1 ? `${box.count} spans, the longest ` : "";
    hint.textContent = `${many}${box.name}: ${timeOf(box.end - box.start)} from ${timeOf(box.start)}`;
    hint.style.left = `${Math.min(px + 12, Math.max(state.width - 230, 0))}px`;
    hint.style.top = `${py + 14}px`;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerup", (event) => {
    if (drag === null) return;  // pressed elsewhere
    const [from, to] = [drag, pointOn(canvas, event)[0]].sort((a, b) => a - b);
    drag = null;
    if (to - from > 4) between(timeAt(from), timeAt(to));
    else paint();
  });
  canvas.addEventListener("pointerleave", () => { hint.hidden = true; });
  canvas.addEventListener("dblclick", () => look(null));
  return { place, look, paint: () => state.shown?.lanes.length && paint() };
}
