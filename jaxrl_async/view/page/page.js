// The page: its runs and views. With a server it looks for news every few seconds.

import { hashOf, readAddress, setAddress, tabOf, valueIn } from "./address.js";
import { onTheme } from "./colors.js";
import { curvesIn } from "./curves.js";
import { make } from "./elements.js";
import { SHOWN_AT_FIRST, chosenOf, filtered, model, namesIn, sortedBy } from "./run_model.js";
import { drawRunTable, listRuns } from "./run_table.js";
import { browse } from "./samples.js";
import { ask, extentOf, report } from "./source.js";
import { lanesOf } from "./spans.js";
import { ageParts, evaluationParts, identityParts, logIn, metricParts } from "./tabs.js";

const EVERY_MS = 2000, EVERY_MS_OF_MANY = 5000, MANY = 50, ROWS_AT_ONCE = 25, MOST_TIMELINES = 6;
const AXES = [["step", "step"], ["tokens", "trained tokens"], ["time", "time of training"]];
const OF_ROWS = /[/]|\b(time|tokens|best|alerts)\b/;  // columns that need more than the list of runs
const at = (id) => document.getElementById(id);
const phone = matchMedia("(max-width: 760px)");
let listed = [], shownRuns = [], rowsSeen = Object.create(null), settingsSeen = "", isFetching = false, isBehind = false;
let samples = null, log = null;

/** Return the state of the tools, from the address. */
const look = () => ({
  smooth: Math.min(Math.max(Number(valueIn("smooth")) || 0, 0), 0.98), log: Boolean(valueIn("log")), cut: Boolean(valueIn("cut")),
  group: valueIn("group"), search: valueIn("search"), large: valueIn("large"),
  axis: AXES.some(([name]) => name === valueIn("x")) ? valueIn("x") : "step",
  range: valueIn("to") !== "" && Number(valueIn("to")) > Number(valueIn("from")) ? [Number(valueIn("from")), Number(valueIn("to"))] : null,
});

const curves = curvesIn(at("curves"), { look, runs: () => shownRuns, change, onRun: mark });

/** Change values of the address, and show what follows. */
function change(values) {
  setAddress(values, tabNow());
  syncTools();
  update();
  return VIEWS[tabNow()]();
}

// ---- which runs

/** Find the runs that are listed and shown now. */
function update() {
  listed = sortedBy(filtered(model.runs, valueIn("filter")), valueIn("sort") || "-number");
  shownRuns = chosenOf(listed, valueIn("show"));
  listRuns(at("runs"), listed, shownRuns, { choose, point: (run) => curves.highlight(run) });
  const words = [`${shownRuns.length} of ${listed.length} drawn`];
  if (listed.length < model.runs.length) words.push(`${model.runs.length - listed.length} filtered out`);
  if (model.leftOut) words.push(`${model.leftOut} older ones left out`);
  at("count").textContent = words.join("; ");
  at("which").classList.toggle("single", model.runs.length === 1);
}

function choose(run, isShown) {
  const before = valueIn("show").startsWith("[") ? namesIn(valueIn("show")) : shownRuns.map((one) => one.name);
  const names = isShown ? [...before, run.name] : before.filter((name) => name !== run.name);
  change({ show: JSON.stringify([...new Set(names)]) });
}

/** Mark a run's line in the list, while the pointer is on its curve. */
function mark(name) {
  for (const item of at("runs").children) item.classList.toggle("pointed", item.dataset.run === name);
}

/** Fetch the rows that are needed and not known: of the runs that are shown, or of all for the table. */
async function fetchRows() {
  if (isFetching) return;
  isFetching = true;
  try {
    const wantsAll = () => tabNow() === "table" || [valueIn("sort"), valueIn("filter"), valueIn("group")].some((text) => OF_ROWS.test(text));
    const settingsNow = model.runs.map((run) => run.name).join("\n");
    if (settingsNow !== settingsSeen && (model.runs.length > 1 || tabNow() === "table")) {
      model.settings = await ask("/api/settings");
      settingsSeen = settingsNow;
      listGroups();
      afterRows();
    }
    for (;;) {
      const runs = wantsAll() ? [...shownRuns, ...model.runs.filter((run) => !shownRuns.includes(run))] : shownRuns;
      const some = runs.filter((run) => rowsSeen[run.name] !== run.seen).slice(0, ROWS_AT_ONCE);
      if (!some.length) break;
      const found = await ask("/api/rows", { run: some.map((run) => run.name) });
      for (const run of some) { rowsSeen[run.name] = run.seen; model.rows[run.name] = found[run.name]; }
      afterRows();
    }
  } finally {
    isFetching = false;
  }
}

function afterRows() {
  const before = shownRuns;
  update();
  curves.listAlerts();
  if (tabNow() === "table") drawTable();
  else if (tabNow() === "curves" && before.map((run) => run.name).join() !== shownRuns.map((run) => run.name).join()) curves.show();
}

const drawTable = () => drawRunTable(at("table"), listed, shownRuns, { choose, change });

// ---- tools

function listGroups() {
  const names = ["", "seed", "tags", "state", "host", ...(model.settings?.names ?? [])], now = valueIn("group");
  if (now && !names.includes(now)) names.push(now);
  const label = { "": "nothing", seed: "names without seeds" };
  at("group").replaceChildren(...names.map((name) => Object.assign(make("option", label[name] ?? name), { value: name })));
  at("group").value = now;
}

/** Have the tools show the state of the address. */
function syncTools() {
  const now = look();
  for (const [id, value] of [["filter", valueIn("filter")], ["search", now.search], ["smooth", String(now.smooth)], ["axis", now.axis]]) {
    if (at(id).value !== value) at(id).value = value;
  }
  at("log").checked = now.log;
  at("cut").checked = now.cut;
  if ([...at("group").options].some((option) => option.value === now.group)) at("group").value = now.group;
  else listGroups();
}

let waiting = 0;
const later = (act) => { clearTimeout(waiting); waiting = setTimeout(act, 200); };
at("filter").addEventListener("input", ({ target }) => later(() => { change({ filter: target.value }); fetchRows(); }));
at("search").addEventListener("input", ({ target }) => later(() => change({ search: target.value })));
at("group").addEventListener("change", ({ target }) => { change({ group: target.value }); fetchRows(); });
at("axis").replaceChildren(...AXES.map(([value, label]) => Object.assign(make("option", label), { value })));
at("axis").addEventListener("change", ({ target }) => change({ x: target.value === "step" ? "" : target.value, from: "", to: "" }));
at("smooth").addEventListener("input", ({ target }) => { setAddress({ smooth: Number(target.value) ? target.value : "" }, tabNow()); curves.repaint(); });
at("log").addEventListener("change", ({ target }) => { setAddress({ log: target.checked }, tabNow()); curves.repaint(); });
at("cut").addEventListener("change", ({ target }) => { setAddress({ cut: target.checked }, tabNow()); curves.repaint(); });
at("whole").addEventListener("click", () => change({ from: "", to: "" }));
at("all").addEventListener("click", () => change({ show: "all" }));
at("none").addEventListener("click", () => change({ show: "[]" }));
at("newest").textContent = `newest ${SHOWN_AT_FIRST}`;
at("newest").addEventListener("click", () => change({ show: "" }));

// ---- the views

const lanes = new Map();

async function drawLanes() {
  const some = shownRuns.slice(0, MOST_TIMELINES);
  for (const run of some) if (!lanes.has(run.name)) lanes.set(run.name, lanesOf(run, ask, Boolean(report)));
  const views = some.map((run) => lanes.get(run.name)), places = views.map((view) => view.place);
  if (shownRuns.length > some.length) places.push(make("p", `Of ${shownRuns.length} runs the first ${some.length} are shown.`, "hint"));
  const children = [...at("busy").children].filter((child) => child.tagName === "DIV");
  if (children.length !== views.length || views.some((view, i) => children[i] !== view.place)) at("busy").replaceChildren(...places);
  await Promise.all(views.map((view) => view.look()));
}

const listIn = (id, partsOf) => async () => {
  const parts = await partsOf(shownRuns), open = [...at(id).querySelectorAll("details")].map((one) => one.open);
  at(id).replaceChildren(...parts);
  at(id).querySelectorAll("details").forEach((one, i) => { if (i in open && open.length === at(id).querySelectorAll("details").length) one.open = open[i]; });
};

const VIEWS = {
  table: drawTable,
  curves: curves.show,
  samples: () => { samples ??= browse(at("samples"), ask, () => model.runs, () => shownRuns[0]?.name ?? model.runs[0]?.name ?? ""); return samples.show(); },
  busy: drawLanes,
  evals: listIn("evals", evaluationParts),
  ages: listIn("ages", ageParts),
  metrics: listIn("metrics", metricParts),
  identity: listIn("identity", identityParts),
  log: () => { log ??= logIn(at("lines"), () => shownRuns); return log.refresh(); },
};
const PLACES = { log: "lines" };
const tabNow = () => (Object.hasOwn(VIEWS, tabOf()) ? tabOf() : "curves");

/** Show the place and the tools of a tab. */
function frame(tab) {
  for (const button of document.querySelectorAll("#tabs button")) {
    if (button.dataset.tab === tab) {
      button.setAttribute("aria-current", "page");
      at("tabs").scrollTo({ left: button.offsetLeft - (at("tabs").clientWidth - button.offsetWidth) / 2 });
    } else button.removeAttribute("aria-current");
  }
  for (const name of Object.keys(VIEWS)) at(PLACES[name] ?? name).hidden = name !== tab;
  at("tools").hidden = tab !== "curves";
}

/** Unfold the lists beside the view; on a phone, where they would be above it, fold them. */
function fold() {
  for (const id of ["which", "tools"]) at(id).open = !phone.matches;
}

/** Show the view of the address. */
async function show() {
  readAddress();
  const tab = tabNow();
  frame(tab);
  syncTools();
  update();
  try {
    await VIEWS[tab]();
    await fetchRows();
  } catch (error) {
    at("state").textContent = `the server does not answer (${error.message})`;
  }
}

async function tick() {
  try {
    const seen = await ask("/api/runs"), key = (run) => `${run.name} ${run.seen} ${run.state} ${run.step} ${run.update} ${run.number}`;
    const changed = seen.runs.map(key).join("\n") !== model.runs.map(key).join("\n") || !model.folders.length;
    Object.assign(model, seen);
    if (changed || isBehind) {
      isBehind = true;  // until all answers have come
      update();
      document.title = model.runs.length === 1 ? model.runs[0].name : `${model.runs.length} runs`;
      document.querySelector("h1").textContent = document.title;
      if (tabNow() === "samples" && samples) samples.refresh();
      else await VIEWS[tabNow()]();
      await fetchRows();
      isBehind = false;
    }
    const going = model.runs.filter((run) => run.state === "running").length;
    at("state").textContent = report ? extentOf() : going ? `follows ${going === 1 ? "a run" : `${going} runs`} that continues` : "";
  } catch (error) {
    at("state").textContent = `the server does not answer (${error.message})`;
  }
  if (!report) setTimeout(tick, model.runs.length > MANY ? EVERY_MS_OF_MANY : EVERY_MS);
}

at("tabs").addEventListener("click", ({ target }) => {
  if (target.dataset.tab) location.hash = hashOf(target.dataset.tab);
});
addEventListener("hashchange", show);
onTheme(() => {
  update();
  VIEWS[tabNow()]();
  for (const view of lanes.values()) view.paint();
});
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  for (const view of lanes.values()) view.paint();
});

readAddress();
listGroups();
syncTools();
frame(tabNow());
fold();
phone.addEventListener("change", fold);
tick();
