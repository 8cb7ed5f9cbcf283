// The page: its runs and views; with a server, it updates every two seconds.

import { colorOf, draw, linesOf, shown } from "./charts.js";
import { make } from "./elements.js";
import { browse } from "./samples.js";
import { ask, extentOf, fileOf, report } from "./source.js";
import { lanesOf } from "./spans.js";

const EVERY_MS = 2000;
const at = (id) => document.getElementById(id);
const look = { smooth: 0, log: false, bands: false, range: null, search: "" };
let runs = [], hidden = new Set(), layout = null, layoutKeys = "", charts = [], tab = "curves";
let samples = null;

const visible = () => runs.filter((run) => !hidden.has(run.name));

// ---- runs

function listRuns() {
  const list = at("runs");
  const items = runs.map((run) => {
    const item = document.createElement("li"), label = document.createElement("label");
    const box = Object.assign(document.createElement("input"), { type: "checkbox" });
    box.checked = !hidden.has(run.name);
    box.addEventListener("change", () => {
      box.checked ? hidden.delete(run.name) : hidden.add(run.name);
      VIEWS[tab]();
    });
    const dot = make("span", null, "dot");
    dot.style.setProperty("--c", colorOf(run.number));
    label.append(box, dot, make("span", run.name, "name"), make("span", run.state, "what"));
    item.append(label);
    return item;
  });
  list.replaceChildren(...items);
}

// ---- curves

async function rebuild() {
  layout = await ask("/api/layout");
  layoutKeys = layout.metrics.map((metric) => metric.key).join();
  const place = at("curves");
  place.replaceChildren(make("div", null, "tiles"));
  charts = [];
  const words = look.search.toLowerCase().split(/\s+/).filter(Boolean);
  const sections = words.length ? [found(words)] : layout.sections;
  for (const section of sections) {
    place.append(make("h2", section.title));
    const grid = make("div", null, "charts");
    place.append(grid);
    for (const chart of section.charts) {
      const box = make("div", null, "chart"), title = make("h3", chart.title);
      title.append(make("span", chart.unit, "unit"));
      if (chart.about) title.title = chart.about;
      box.append(title);
      grid.append(box);
      charts.push({ chart, box, plot: null });
    }
  }
  if (!charts.length) place.append(make("p", words.length ? "No metric has this name." : "No step has been recorded yet.", "none"));
  await redraw();
}

function found(words) {
  const all = layout.metrics.filter(({ key, about }) =>
    words.every((word) => `${key} ${about}`.toLowerCase().includes(word)));
  return { title: `${all.length} metrics`, charts: all.slice(0, 60).map((metric) => ({
    title: metric.key, unit: metric.unit, about: metric.about, curves: [[metric.key, metric.key]] })) };
}

const isWarm = (key) => key.startsWith("warm_start/");  // its updates are no steps: drawn whole

async function redraw() {
  summarize();
  const known = new Set(layout.metrics.map(({ key }) => key));
  const all = [...new Set(charts.flatMap(({ chart }) => chart.curves.flatMap(([key]) =>
    [key, `${key}_stderr`].filter((name) => name === key || known.has(name)))))];
  const range = look.range
    ? { first: Math.max(0, Math.floor(look.range[0])), last: Math.ceil(look.range[1]) } : {};
  const [steps, updates] = [all.filter((key) => !isWarm(key)), all.filter(isWarm)];
  const shownRuns = visible(), data = {};
  await Promise.all(shownRuns.map(async (run) => {
    data[run.name] = {
      ...(steps.length ? await ask("/api/curves", { run: run.name, key: steps, ...range }) : {}),
      ...(updates.length ? await ask("/api/curves", { run: run.name, key: updates }) : {}),
    };
  }));
  for (const one of charts) {
    one.plot?.destroy();
    const warm = isWarm(one.chart.curves[0][0]);
    const [near, onZoom] = warm ? [{ ...look, range: null }, null] : [look, zoom];
    one.plot = draw(one.box, linesOf(one.chart, data, shownRuns, near), { ...near, zero: one.chart.zero }, onZoom);
  }
}

async function summarize() {
  const place = document.querySelector("#curves .tiles"), shownRuns = visible();
  place.hidden = Boolean(look.search) || shownRuns.length !== 1;  // several are compared
  if (place.hidden) return;
  const { tiles } = await ask("/api/summary", { run: shownRuns[0].name });
  place.replaceChildren(...tiles.map(({ label, value, note }) => {
    const tile = make("div", null, "tile");
    tile.append(make("div", label, "label"), make("div", value, "value"), make("div", note, "label"));
    return tile;
  }));
}

let zoomedAt = 0;

function zoom(range) {
  if (performance.now() - zoomedAt < 100) return;  // the other charts share the same drag
  zoomedAt = performance.now();
  look.range = range;
  redraw();
}

// ---- ages and faults, identity

async function listAges() {
  const place = at("ages"), parts = [];
  for (const run of visible()) {
    const { ages, lengths, dropped, faults } = await ask("/api/summary", { run: run.name });
    parts.push(make("h2", `${run.name}: trained tokens by age, in versions`));
    parts.push(bars(Object.fromEntries(ages.map((row) => [row.age, row.tokens])), "none counted"));
    const measured = ["reward", "length", "kl"].filter((name) => ages.some((row) => row[name] != null));
    if (measured.length) {
      parts.push(make("p", "Means of the tokens' episodes, over the tokens of that age:", "hint"));
      parts.push(table(["age", ...measured], ages.map((row) =>
        [row.age, ...measured.map((name) => (row[name] == null ? "" : shown(row[name])))])));
    }
    parts.push(make("h2", `${run.name}: trained answers by length, in tokens`), bars(lengths, "none counted"));
    parts.push(make("h2", `${run.name}: groups dropped`), bars(dropped.groups, "none"));
    if (dropped.tokens) parts.push(make("p", `${shown(dropped.tokens)} tokens had been drawn for them.`, "hint"));
    parts.push(make("h2", `${run.name}: faults`), bars(faults, "none"));
  }
  place.replaceChildren(...parts);
}

async function listEvaluations() {
  const parts = [];
  for (const run of visible()) {
    const { evaluations } = await ask("/api/summary", { run: run.name });
    parts.push(make("h2", `${run.name}: last evaluation of each name`));
    const between = (ends) => (ends ? `${shown(ends[0])} to ${shown(ends[1])}` : "");
    const rows = evaluations.map((row) => [row.name, row.measure, row.step, shown(row.value),
      between(row.interval), row.change == null ? "" : shown(row.change), between(row.changeInterval)]);
    parts.push(rows.length ? table(["evaluation", "measure", "step", "value", "95 % interval",
      "change", "95 % interval of the change"], rows) : make("p", "Nothing has been evaluated yet.", "none"));
  }
  at("evals").replaceChildren(...parts);
}

function table(names, rows) {
  const wide = make("div", null, "wide"), all = document.createElement("table");
  for (const [cells, tag] of [[names, "th"], ...rows.map((row) => [row, "td"])]) {
    const line = document.createElement("tr");
    line.append(...cells.map((cell) => make(tag, cell)));
    all.append(line);
  }
  wide.append(all);
  return wide;
}

async function listMetrics() {
  const parts = [];
  for (const run of visible()) {
    const metrics = await ask("/api/extents", { run: run.name });
    const rows = metrics.map(({ key, values, unit, about }) =>
      [key, ...(values.length ? values.map(shown) : ["never finite", "", "", ""]), unit, about]);
    parts.push(make("h2", run.name));
    parts.push(rows.length ? table(["key", "first", "last", "least", "largest", "unit", "meaning"], rows)
      : make("p", "No step has been recorded yet.", "none"));
  }
  at("metrics").replaceChildren(...parts);
}

function bars(counts, none) {
  const box = make("div", null, "bars");
  const rows = Object.entries(counts).filter(([, count]) => count > 0)
    .sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  const total = rows.reduce((sum, [, count]) => sum + count, 0);
  for (const [key, count] of rows) {
    const row = make("div", null, "bar");
    const meter = Object.assign(document.createElement("meter"), { max: total, value: count });
    row.append(make("span", key), meter, make("span", `${shown(count)} (${Math.round((100 * count) / total)} %)`));
    box.append(row);
  }
  if (!rows.length) box.append(make("span", none, "hint"));
  return box;
}

async function listIdentity() {
  const parts = [];
  for (const run of visible()) {
    const { config, traces, ...facts } = await ask("/api/identity", { run: run.name });
    const list = document.createElement("dl");
    for (const [name, value] of Object.entries({ state: run.state, ...facts })) {
      list.append(make("dt", name), make("dd", value));
    }
    parts.push(make("h2", run.name), list, ...tracesOf(run, traces), make("pre", config ?? "no config.yaml"));
  }
  at("identity").replaceChildren(...parts);
}

function tracesOf(run, traces) {
  if (!traces.length) return [];
  const list = make("ul", null, "traces");
  for (const { step, file, bytes } of traces) {
    const item = make("li"), link = make("a", `step ${step}: ${file.split("/").at(-1)}`);
    link.href = fileOf(run.name, file);
    link.download = `step_${step}.${file.split("/").at(-1)}`;
    item.append(link, make("span", ` ${(bytes / 2 ** 20).toFixed(1)} MiB`, "hint"));
    list.append(item);
  }
  return [make("h3", "Traces of JAX's profiler"), list,
    make("p", "Open them at https://ui.perfetto.dev, or all with: xprof --logdir RUN/profile", "hint")];
}

// ---- spans

const lanes = new Map();

async function drawLanes() {
  const shownRuns = visible();
  for (const run of shownRuns) if (!lanes.has(run.name)) lanes.set(run.name, lanesOf(run, ask, Boolean(report)));
  const views = shownRuns.map((run) => lanes.get(run.name));
  const places = views.map((view) => view.place);
  if (places.some((place, i) => at("busy").children[i] !== place) || at("busy").children.length !== places.length) {
    at("busy").replaceChildren(...places);
  }
  await Promise.all(views.map((view) => view.look()));
}

// ---- the views

const VIEWS = {
  curves: rebuild,
  samples: async () => { samples ??= browse(at("samples"), ask, () => runs); samples.refresh(); },
  busy: drawLanes,
  evals: listEvaluations,
  ages: listAges,
  metrics: listMetrics,
  identity: listIdentity,
};

function show(name) {
  tab = name in VIEWS ? name : "curves";
  for (const button of document.querySelectorAll("#tabs button")) {
    button.toggleAttribute("aria-current", button.dataset.tab === tab);
  }
  for (const id of Object.keys(VIEWS)) at(id).hidden = id !== tab;
  at("tools").hidden = tab !== "curves";
  return VIEWS[tab]();
}

async function tick() {
  try {
    const seen = await ask("/api/runs");
    const changed = seen.some((run, i) => run.seen !== runs[i]?.seen || run.state !== runs[i]?.state);
    runs = seen.map((run, number) => ({ ...run, number }));
    if (changed) {
      listRuns();
      document.title = runs.length === 1 ? runs[0].name : `${runs.length} runs`;
      document.querySelector("h1").textContent = document.title;
      if (tab !== "curves") await VIEWS[tab]();
      else if ((await ask("/api/layout")).metrics.map((m) => m.key).join() !== layoutKeys) await rebuild();
      else await redraw();
    }
    const going = runs.filter((run) => run.state === "running").length;
    at("state").textContent = report ? extentOf() : going ? `follows ${going === 1 ? "a run" : `${going} runs`} that continues` : "";
  } catch (error) {
    at("state").textContent = `the server does not answer (${error.message})`;
  }
  if (!report) setTimeout(tick, EVERY_MS);
}

at("tabs").addEventListener("click", ({ target }) => {
  if (target.dataset.tab) location.hash = target.dataset.tab;
});
addEventListener("hashchange", () => show(location.hash.slice(1)));
let waiting = 0;
at("search").addEventListener("input", ({ target }) => {
  look.search = target.value;
  clearTimeout(waiting);
  waiting = setTimeout(rebuild, 200);
});
at("smooth").addEventListener("input", ({ target }) => { look.smooth = Number(target.value); redraw(); });
at("log").addEventListener("change", ({ target }) => { look.log = target.checked; redraw(); });
at("bands").addEventListener("change", ({ target }) => { look.bands = target.checked; redraw(); });
at("whole").addEventListener("click", () => zoom(null));
at("curves").addEventListener("dblclick", () => zoom(null));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  listRuns();
  redraw();
  for (const view of lanes.values()) view.paint();
});
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth === width) return;
  width = innerWidth;
  redraw();
  for (const view of lanes.values()) view.paint();
});
show(location.hash.slice(1) || "curves").then(tick, tick);
