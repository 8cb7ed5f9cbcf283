// The table of runs: columns of the configuration and of metrics, sorted and grouped; and the list of runs.

import { valueIn } from "./address.js";
import { colorOf } from "./colors.js";
import { buttonOf, csvOf, make, refilled, save } from "./elements.js";
import { durationOf, shown, whenOf } from "./numbers.js";
import { PLAIN_COLUMNS, cellOf, colorNumberOf, groupsOf, isNumber, model, neat } from "./run_model.js";

const SETTINGS_AT_FIRST = 6, LONG = 40;
const AT_FIRST = ["state", "tags", "started", "step", "time", "best", "alerts", "reward/mean"];
const TITLES = { best: "best evaluation", time: "time of training", tokens: "trained tokens", step: "steps" };

/** Return the columns that are shown: those of the address, or the usual ones and the first settings that differ. */
export function columnsNow() {
  const asked = valueIn("columns");
  if (asked) return asked.split(",").filter(Boolean);
  const some = AT_FIRST.filter((column) => column !== "tags" || model.runs.some((run) => run.tags.length));
  return [...some, ...(model.settings?.names ?? []).slice(0, SETTINGS_AT_FIRST)];
}

/** Return a cell's text. */
function textIn(run, column) {
  const cell = cellOf(run, column);
  if (column === "started") return whenOf(cell);
  if (column === "time") return durationOf(cell);
  if (column === "alerts") return cell ? String(cell) : "";
  return typeof cell === "number" ? shown(cell) : neat(cell) ?? "";
}

/** Fill the section with the table. listed: the runs that pass the filter, in their order; shownRuns: those of them
 * that are drawn; act: {choose(run, isShown), change(values)}. */
export function drawRunTable(place, listed, shownRuns, act) {
  const columns = columnsNow(), numbers = new Set(columns.filter((column) => listed.some((run) => isNumber(cellOf(run, column))))), sort = valueIn("sort") || "-started", group = valueIn("group"), chosen = new Set(shownRuns);
  const bar = make("div", null, "keys"), wide = make("div", null, "wide runs"), table = make("table"), head = make("tr");
  bar.append(columnMenu(columns, act), buttonOf("CSV", "save this table", () => saveTable(listed, columns)), noteOf(listed, shownRuns));
  head.append(make("th"), headOf("name", sort, act), ...columns.map((column) => headOf(column, sort, act, numbers.has(column))));
  table.append(head);
  for (const [name, members] of groupsOf(listed, group)) {
    if (group) table.append(groupRow(name, members, columns));
    for (const run of members) table.append(rowOf(run, columns, numbers, chosen.has(run), act));
  }
  wide.append(table);
  const open = place.querySelector("details")?.open, left = place.querySelector(".wide")?.scrollLeft ?? 0;
  const down = place.querySelector(".choices")?.scrollTop ?? 0;
  refilled(place, () => place.replaceChildren(bar, listed.length ? wide : make("p", emptyText(), "none")));
  place.querySelector("details").open = Boolean(open);
  place.querySelector(".choices").scrollTop = down;
  wide.scrollLeft = left;
}

function emptyText() {
  return model.runs.length ? "No run passes the filter." : `No run has begun in ${model.folders.join(", ")} yet. It appears here when it does.`;
}

function noteOf(listed, shownRuns) {
  const words = model.runs.length === 1 ? [] : [`${shownRuns.length} of ${listed.length} runs are drawn`];
  const unread = listed.filter((run) => !model.rows[run.name]).length;
  if (unread) words.push(`reading ${unread} …`);
  if (model.leftOut) words.push(`${model.leftOut} older runs have no place here`);
  if (model.settings?.leftOut) words.push(`${model.settings.leftOut} further settings differ`);
  return make("span", words.join("; "), "hint");
}

function headOf(column, sort, act, isNumeric = false) {
  const cell = make("th", null, isNumeric ? "number" : ""), down = sort === `-${column}`, up = sort === column;
  const mark = down ? " ↓" : up ? " ↑" : "", name = TITLES[column] ?? (column.includes("/") ? column : column.split(".").at(-1));
  const button = buttonOf(`${name}${mark}`, `${column}: sort by it`, () => act.change({ sort: down ? column : `-${column}` }));
  cell.setAttribute("aria-sort", down ? "descending" : up ? "ascending" : "none");
  cell.append(button);
  return cell;
}

function groupRow(name, members, columns) {
  const row = make("tr", null, "grouped");
  row.append(make("td"), make("td", `${name} (${members.length})`));
  for (const column of columns) {
    const values = members.map((run) => cellOf(run, column)).filter((cell) => typeof cell === "number");
    const isMean = values.length && column !== "started" && column !== "alerts";
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    row.append(make("td", !isMean ? "" : column === "time" ? `mean ${durationOf(mean)}` : `mean ${shown(mean)}`, isMean ? "number" : ""));
  }
  return row;
}

function rowOf(run, columns, numbers, isShown, act) {
  const row = make("tr"), tick = make("td"), name = make("td", null, run.name.length > LONG ? "name long" : "name"), box = Object.assign(make("input"), { type: "checkbox", checked: isShown });
  box.setAttribute("aria-label", `draw ${run.name}`);
  box.addEventListener("change", () => act.choose(run, box.checked));
  tick.append(box);
  name.append(dotOf(run), run.name);
  row.dataset.run = run.name;
  row.append(tick, name, ...columns.map((column) => {
    const text = String(textIn(run, column)), cell = make("td", text.length > LONG ? `${text.slice(0, LONG)}…` : text);
    if (text.length > LONG) cell.title = text;
    if (column === "alerts" && text) {
      cell.className = "warn";
      cell.title = model.rows[run.name].alerts.filter((alert) => alert.lasts).map((alert) => alert.title).join(", ");
    }
    if (numbers.has(column)) cell.classList.add("number");
    return cell;
  }));
  return row;
}

/** Return a dot in the color of a run, or of its group. */
export function dotOf(run) {
  const dot = make("span", null, "dot");
  dot.style.setProperty("--c", colorOf(colorNumberOf(run, valueIn("group"))));
  return dot;
}

function columnMenu(columns, act) {
  const menu = make("details", null, "menu"), list = make("div", null, "choices");
  const metrics = [...new Set(Object.values(model.rows).flatMap((row) => Object.keys(row.newest)))].sort();
  for (const [title, names] of [["of each run", PLAIN_COLUMNS], ["settings that differ", model.settings?.names ?? []], ["metrics: newest value", metrics]]) {
    if (names.length) list.append(make("h4", title));
    for (const name of names) {
      const label = make("label"), box = Object.assign(make("input"), { type: "checkbox", checked: columns.includes(name) });
      box.addEventListener("change", () => act.change({ columns: (box.checked ? [...columns, name] : columns.filter((one) => one !== name)).join(",") || "state" }));
      label.append(box, TITLES[name] ?? name);
      list.append(label);
    }
  }
  list.append(buttonOf("usual columns", "as at the beginning", () => act.change({ columns: "" })));
  menu.append(make("summary", "Columns"), list);
  return menu;
}

function saveTable(listed, columns) {
  const rows = listed.map((run) => [run.name, ...columns.map((column) => (column === "started" ? whenOf(run.started) : cellOf(run, column)))]);
  save("runs.csv", new Blob([csvOf([["run", ...columns], ...rows])], { type: "text/csv" }));
}

/** Fill the list of runs, which is the legend of all charts. act: {choose(run, isShown), point(name)}. */
export function listRuns(place, listed, shownRuns, act) {
  const chosen = new Set(shownRuns), top = place.scrollTop;
  const items = listed.map((run) => {
    const item = make("li"), label = make("label"), box = Object.assign(make("input"), { type: "checkbox", checked: chosen.has(run) });
    const progress = run.state === "running" ? (run.step ? `step ${run.step}` : run.update ? `warm start ${run.update}` : "starting") : run.state;
    item.dataset.run = run.name;
    box.addEventListener("change", () => act.choose(run, box.checked));
    label.append(box, dotOf(run), make("span", run.name, "name"), make("span", progress, "what"));
    item.addEventListener("pointerenter", () => act.point(run));
    item.addEventListener("pointerleave", () => act.point(null));
    item.append(label);
    return item;
  });
  refilled(place, () => place.replaceChildren(...items));
  place.scrollTop = top;
}
