// The view of curves: charts by section, each drawn when it is on the screen, with tiles and alerts above them.

import { hashOf } from "./address.js";
import { dashOf, linesOf, onAxis, stepsWithin } from "./charts.js";
import { colorOf, inkOf } from "./colors.js";
import { buttonOf, csvOf, linkOf, make, save } from "./elements.js";
import { durationOf, shown } from "./numbers.js";
import { nearestOf, plotIn } from "./plot.js";
import { colorNumberOf, groupNameOf, groupsOf, model } from "./run_model.js";
import { ask, csvAddress, report } from "./source.js";

const ASKED_AT_ONCE = 40, MOST_FOUND = 60, IN_TIP = 10, IN_PICTURE = 24, AGAIN_MS = 2000;
/** Points of a curve that are asked for, by the number of runs up to which. */
const POINTS = [[6, 600], [12, 300], [25, 160], [50, 100], [Infinity, 60]];
const AXIS_LABELS = { step: "step", tokens: "trained tokens", time: "time of training" };
const isWarm = (key) => key.startsWith("warm_start/");  // its updates are no steps: drawn whole, by update

/** Return the view: {show, listAlerts, highlight, repaint}. look(): the state of the tools; runs(): those shown;
 * change(values): changes the address; onRun(name): a run under the pointer. */
export function curvesIn(place, { look, runs, change, onRun }) {
  const tiles = make("div", null, "tiles"), warnings = make("details", null, "alerts"), note = make("p", "", "hint note");
  const body = make("div"), tip = make("div", null, "tip pointed");
  tip.hidden = true;
  place.replaceChildren(warnings, tiles, note, body);
  document.body.append(tip);
  let cards = [], layout = null, built = "", cache = new Map(), axes = { tokens: {}, time: {} }, waiting = null;
  let shows = 0, generation = 0, isFilling = false, again = false;
  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) target.card.near = isIntersecting;
    schedule();
  }, { rootMargin: "300px 0px" });
  const sizes = new ResizeObserver((entries) => {
    for (const { target: { card } } of entries) if (card.near) card.plot.draw(); else card.stale = true;
  });

  // ---- cards

  /** Build the cards again if the runs, their metrics or the search are others; then fill those on the screen. */
  async function show() {
    const names = runs().map((run) => run.name), mine = ++shows;
    const fresh = names.length ? await ask("/api/layout", { run: names }) : { sections: [], metrics: [] };
    if (mine !== shows) return;  // another choice was made meanwhile
    layout = fresh;
    const sections = sectionsOf(), now = JSON.stringify([sections, look().large, emptyText()]);
    if (now !== built) build(sections, now);
    summarize().catch((error) => { note.textContent = `The summary could not be read (${error.message}).`; });
    repaint();
  }

  function repaint() {
    generation++;
    for (const card of cards) card.stale = true;
    schedule();
  }

  function sectionsOf() {
    const words = look().search.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return layout.sections;
    const found = layout.metrics.filter(({ key, about }) => {
      const text = `${key} ${about}`.toLowerCase();
      return words.every((word) => text.includes(word)) || words.includes(key.toLowerCase());
    });
    const charts = found.slice(0, MOST_FOUND).map(({ key, unit, about }) => ({ title: key, unit, about, curves: [[key, key]] }));
    const more = found.length > MOST_FOUND ? `, of which ${MOST_FOUND} are drawn` : "";
    return [{ title: `${found.length} metrics${more}`, charts }];
  }

  function build(sections, now) {
    built = now;
    near.disconnect();
    sizes.disconnect();
    cards = [];
    const parts = [];
    for (const section of sections) {
      const grid = make("div", null, "charts");
      for (const chart of section.charts) grid.append(cardOf(chart));
      parts.push(make("h2", section.title), grid);
    }
    if (!cards.length) parts.push(make("p", emptyText(), "none"));
    body.replaceChildren(...parts);
    for (const card of cards) { near.observe(card.box); sizes.observe(card.stage); }
  }

  function emptyText() {
    if (look().search) return "No metric has this name.";
    if (!model.runs.length) return `No run has begun in ${model.folders.join(", ")} yet. It appears here when it does.`;
    if (!runs().length) return "No run is chosen. Tick some in the list.";
    return "No step has been recorded yet.";
  }

  function cardOf(chart) {
    const box = make("div", null, "chart"), head = make("div", null, "head"), title = make("h3", chart.title), stage = make("div", null, "stage");
    const card = { chart, box, stage, near: false, stale: true, plot: null, warm: isWarm(chart.curves[0]?.[0] ?? ""), key: make("span", null, "dashes"), count: make("span", "", "unit count") };
    title.append(make("span", chart.unit, "unit"));
    if (chart.about) title.title = chart.about;
    const tools = make("span", null, "tools");
    tools.append(
      buttonOf("⤢", "large or small", () => change({ large: look().large === chart.title ? "" : chart.title })),
      buttonOf("PNG", "save this chart as a picture", () => savePicture(card)),
      buttonOf("CSV", "save the values of these runs", () => saveValues(card)));
    stage.setAttribute("role", "img");
    head.append(title, card.key, card.count, tools);
    box.append(head, stage);
    box.card = stage.card = card;
    box.classList.toggle("large", look().large === chart.title);
    card.plot = plotIn(stage, {
      zoom: card.warm ? null : (from, to) => change({ from: String(Number(from.toPrecision(6))), to: String(Number(to.toPrecision(6))) }),
      whole: () => change({ from: "", to: "" }),
      hover: (x, line, event) => hover(card, x, line, event),
      leave: () => hover(card, null, null, null),
    });
    cards.push(card);
    return box;
  }

  // ---- data

  function schedule() {
    waiting ??= setTimeout(() => { waiting = null; fill(); }, 0);
  }

  const axisOf = (card) => (card.warm ? "step" : look().axis);
  const rangeNow = () => (look().range ? look().range : null);
  const pointsOf = (count) => (POINTS.find(([most]) => count <= most) ?? POINTS.at(-1))[1];

  /** Fill the cards on the screen, one after the other if it is called meanwhile. */
  async function fill() {
    again = true;
    if (isFilling) return;
    isFilling = true;
    try {
      while (again) {
        again = false;
        await fillOnce();
      }
    } catch (error) {
      note.textContent = `The curves could not be read (${error.message}).`;
      setTimeout(schedule, AGAIN_MS);
    } finally {
      isFilling = false;
    }
  }

  /** Fetch what the cards on the screen lack, some runs at a time, and draw them. */
  async function fillOnce() {
    const mine = generation, wanted = cards.filter((card) => card.near && card.stale), shownRuns = runs();
    const isOld = () => { again ||= mine !== generation; return mine !== generation; };
    if (!wanted.length) return;
    const metrics = new Set(layout.metrics.map(({ key }) => key)), points = pointsOf(shownRuns.length);
    const keysOf = (list) => [...new Set(list.flatMap(({ chart }) => chart.curves.flatMap(([key]) =>
      [key, `${key}_stderr`].filter((name) => metrics.has(name)))))];
    const axis = look().axis, range = rangeNow();
    if (axis !== "step") await fetchAxis(axis, shownRuns);
    if (isOld()) return;
    const asked = new Map();  // runs by what is asked of them
    for (const run of shownRuns) {
      for (const [warm, keys] of [[false, keysOf(wanted.filter((card) => !card.warm))], [true, keysOf(wanted.filter((card) => card.warm))]]) {
        const within = warm || !range ? null : stepsWithin(axis === "step" ? null : axes[axis][run.name].points, range);
        const stamp = `${run.seen} ${within} ${points}`, known = cacheOf(run.name, warm, stamp);
        const missing = keys.filter((key) => !known.has(key));
        if (!missing.length) continue;
        const query = { key: missing, points, ...(within && { first: within[0], last: within[1] }) };
        const text = JSON.stringify(query), group = asked.get(text) ?? { query, warm, runs: [] };
        group.runs.push([run, known]);
        asked.set(text, group);
      }
    }
    for (const { query, runs: group } of asked.values()) {
      for (let begin = 0; begin < group.length; begin += ASKED_AT_ONCE) {
        const some = group.slice(begin, begin + ASKED_AT_ONCE);
        const found = await ask("/api/curves", { run: some.map(([run]) => run.name), ...query });
        for (const [run, known] of some) for (const key of query.key) known.set(key, found[run.name]?.[key] ?? null);
        if (isOld()) return;
        if (begin + ASKED_AT_ONCE < group.length) for (const card of wanted) drawCard(card, shownRuns);
      }
    }
    for (const card of wanted) {
      card.stale = false;
      drawCard(card, shownRuns);
    }
    noteMissing(shownRuns, axis);
  }

  function cacheOf(name, warm, stamp) {
    const place = `${name} ${warm}`, known = cache.get(place);
    if (known?.stamp === stamp) return known.curves;
    const curves = new Map();
    cache.set(place, { stamp, curves });
    return curves;
  }

  async function fetchAxis(kind, shownRuns) {
    const missing = shownRuns.filter((run) => axes[kind][run.name]?.seen !== run.seen);
    for (let begin = 0; begin < missing.length; begin += ASKED_AT_ONCE) {
      const some = missing.slice(begin, begin + ASKED_AT_ONCE);
      const found = await ask("/api/axes", { x: kind, run: some.map((run) => run.name) });
      for (const run of some) axes[kind][run.name] = { seen: run.seen, points: found[run.name] };
    }
  }

  function noteMissing(shownRuns, axis) {
    const without = axis === "step" ? [] : shownRuns.filter((run) => !axes[axis][run.name]?.points[0].length);
    note.textContent = without.length ? `Without this axis, and so not drawn: ${without.map((run) => run.name).join(", ")}.` : "";
  }

  function drawCard(card, shownRuns) {
    const { chart, warm } = card, axis = axisOf(card), data = {}, now = look();
    for (const run of shownRuns) {
      const curves = cache.get(`${run.name} ${warm}`)?.curves;
      if (curves) data[run.name] = Object.fromEntries([...curves].filter(([, points]) => points));
    }
    const axisByRun = axis === "step" ? null : Object.fromEntries(shownRuns.map((run) => [run.name, axes[axis][run.name]?.points ?? [[], []]]));
    const { lines, bands } = linesOf(chart, data, shownRuns, axisByRun, now);
    card.plot.draw({ lines, bands, axis, axisLabel: warm ? "update" : AXIS_LABELS[axis], range: warm ? null : rangeNow(),
      log: now.log, zero: chart.zero, cut: now.cut || (chart.unit === "s" && !now.range) });
    card.stage.setAttribute("aria-label", `${chart.title}: ${labelOf(lines)}`);
    listDashes(card, shownRuns);
    const { outside } = card.plot.frame ?? { outside: 0 };
    card.count.textContent = outside ? `${outside} ${outside === 1 ? "value" : "values"} outside` : "";
  }

  /** Say the last values of a chart's curves, or how many there are. */
  function labelOf(lines) {
    if (lines.length > IN_TIP) return `${lines.length} curves`;
    return lines.filter((line) => line.ys.length).map((line) => `${line.label} ${shown(line.ys.at(-1))}`).join(", ") || "no values";
  }

  /** Say which of a chart's curves is which: by dash if runs have colors, else by color. */
  function listDashes(card, shownRuns) {
    if (card.chart.curves.length < 2) return card.key.replaceChildren();
    card.key.replaceChildren(...card.chart.curves.map(([, label], which) => {
      const key = make("span", null, "dash"), canvas = Object.assign(make("canvas"), { width: 44, height: 8 }), context = canvas.getContext("2d");
      context.scale(2, 2);
      context.setLineDash(shownRuns.length > 1 ? dashOf(which) ?? [] : []);
      context.lineWidth = 2;
      context.strokeStyle = shownRuns.length > 1 ? inkOf("--soft") : colorOf(which);
      context.beginPath();
      context.moveTo(0, 2);
      context.lineTo(22, 2);
      context.stroke();
      key.append(canvas, label);
      return key;
    }));
  }

  // ---- the pointer

  function hover(card, x, line, event) {
    for (const other of cards) if (other.near && (other.warm === card.warm || x == null)) other.plot.point(x, line?.run ?? null);
    onRun(line?.run ?? null);
    tip.hidden = x == null;
    if (x == null) return;
    const { spec, frame } = card.plot, py = event.clientY - card.stage.getBoundingClientRect().top;
    const at = spec.lines.filter((one) => card.plot.reaches(one, x)).map((one) => {
      const i = nearestOf(one.xs, x);
      return { one, x: one.xs[i], y: one.ys[i], away: Math.abs(frame.toY(one.ys[i]) - py) };
    }).sort((a, b) => a.away - b.away);
    const first = at[0]?.x ?? x;
    const rows = at.slice(0, IN_TIP).sort((a, b) => b.y - a.y).map(({ one, y }) => {
      const row = make("div", null, one === line ? "row chosen" : "row"), dot = make("span", null, "dot");
      dot.style.setProperty("--c", one.color);
      row.append(dot, make("span", one.label, "name"), make("span", shown(y), "value"));
      return row;
    });
    const more = at.length > IN_TIP ? [make("div", `and ${at.length - IN_TIP} more`, "soft")] : [];
    const where = spec.axis === "time" ? durationOf(first) : Math.round(first).toLocaleString("en");
    tip.replaceChildren(make("div", `${spec.axisLabel} ${where}`, "soft"), ...rows, ...more);
    tip.style.left = `${Math.max(4, event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - tip.offsetWidth - 12 : event.clientX + 16)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8))}px`;
  }

  /** Show the lines of a run, or of its group, before the others. null: of none. */
  function highlight(run) {
    const name = run && groupNameOf(run, look().group);
    for (const card of cards) if (card.near) card.plot.point(null, name);
  }

  // ---- export

  async function savePicture({ chart, plot }) {
    const { base, spec } = plot, scale = devicePixelRatio || 1, line = 18, wide = base.width / scale;
    const groups = [...groupsOf(runs(), look().group)], names = groups.slice(0, IN_PICTURE), title = 30, columns = Math.max(1, Math.floor(wide / 190));
    const several = runs().length > 1, legend = several ? names.map(([name, [run]]) => [name, colorOf(colorNumberOf(run, look().group))])
      : spec.lines.filter((one) => one.label).map((one) => [one.label, one.color]);
    const rest = several ? groups.length - names.length : 0, rows = Math.ceil((legend.length + Number(rest > 0)) / columns);
    const picture = Object.assign(make("canvas"), { width: base.width, height: base.height + (title + rows * line + 12) * scale });
    const context = picture.getContext("2d");
    context.fillStyle = inkOf("--card");
    context.fillRect(0, 0, picture.width, picture.height);
    context.drawImage(base, 0, title * scale);
    context.scale(scale, scale);
    context.fillStyle = inkOf("--ink");
    context.font = "600 14px system-ui";
    context.fillText(`${chart.title} (${chart.unit})`, 12, 20);
    context.font = "12px system-ui";
    [...legend, ...(rest ? [[`and ${rest} more`, "transparent"]] : [])].forEach(([name, color], i) => {
      const x = 12 + (i % columns) * ((wide - 16) / columns), y = title + base.height / scale + 12 + Math.floor(i / columns) * line;
      context.fillStyle = color;
      context.fillRect(x, y - 6, 12, 4);
      context.fillStyle = inkOf("--ink");
      context.fillText(name, x + 18, y, (wide - 16) / columns - 24);
    });
    picture.toBlob((blob) => save(`${fileName(chart)}.png`, blob));
  }

  function saveValues({ chart }) {
    const keys = chart.curves.map(([key]) => key).filter((key) => layout.metrics.some((metric) => metric.key === key));
    if (!report) {
      Object.assign(make("a"), { href: csvAddress(runs().map((run) => run.name), keys), download: `${fileName(chart)}.csv` }).click();
      return;
    }
    const columns = keys.map((key) => new Map((report.curves[key] ?? [[], []])[0].map((step, i) => [step, report.curves[key][1][i]])));
    const steps = [...new Set(columns.flatMap((column) => [...column.keys()]))].sort((a, b) => a - b), [run] = runs();
    const rows = steps.map((step) => [run.name, step, ...["tokens", "time"].map((kind) => onAxis(report.axes[kind], step)), ...columns.map((column) => column.get(step))]);
    save(`${fileName(chart)}.csv`, new Blob([csvOf([["run", "step", "tokens", "time", ...keys], ...rows])], { type: "text/csv" }));
  }

  const fileName = (chart) => chart.title.replace(/[^\w.-]+/g, "_");

  // ---- above the charts

  async function summarize() {
    const shownRuns = runs();
    tiles.hidden = shownRuns.length !== 1 || Boolean(look().search);
    listAlerts();
    if (tiles.hidden) return tiles.replaceChildren();
    const { tiles: values } = await ask("/api/summary", { run: shownRuns[0].name });
    tiles.replaceChildren(...values.map(({ label, value, note: more }) => {
      const tile = make("div", null, "tile");
      const [middle, within] = value.split(" ± "), text = make("div", middle, "value");
      if (within) text.append(make("span", ` ± ${within}`, "label"));
      tile.append(make("div", label, "label"), text, make("div", more, "label"));
      return tile;
    }));
  }

  /** List the alerts of the runs that are shown. */
  function listAlerts() {
    warnings.hidden = !runs().length;
    const all = runs().flatMap((run) => (model.rows[run.name]?.alerts ?? []).map((alert) => ({ run, alert })));
    const lasting = all.filter(({ alert }) => alert.lasts), known = runs().filter((run) => model.rows[run.name]).length;
    const kinds = [...new Set(lasting.map(({ alert }) => alert.title))];
    const words = lasting.length ? `${lasting.length} ${lasting.length === 1 ? "alert" : "alerts"}: ${kinds.join(", ")}`
      : known < runs().length ? "Looking for alerts …" : all.length ? `No alert now, ${all.length} earlier` : "No alerts";
    const summary = make("summary", words, lasting.length ? "warn" : "");
    warnings.replaceChildren(summary, ...all.map(({ run, alert }) => alertOf(run, alert)));
    warnings.classList.toggle("empty", !all.length);
  }

  function alertOf(run, { title, says, first, last, lasts, keys, help, helpAddress }) {
    const row = make("p", null, lasts ? "alert warn" : "alert"), dot = make("span", null, "dot");
    dot.style.setProperty("--c", colorOf(run.number));
    const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`;
    row.append(dot, make("b", `${run.name}: ${title}`), make("span", ` (${steps}${lasts ? "" : ", over now"}). ${says} `));
    if (keys.length) row.append(linkOf("charts", hashOf("curves", { search: keys.join(" | "), show: JSON.stringify([run.name]) })), " ");
    row.append(helpOf(help, helpAddress));
    return row;
  }

  return { show, listAlerts, highlight, repaint };
}

/** Return what leads to a section of the documentation: a link, if the package names its address. */
function helpOf(help, address) {
  if (!address) return make("span", help, "soft");
  return Object.assign(linkOf("help", address), { target: "_blank", rel: "noreferrer", title: help });
}
