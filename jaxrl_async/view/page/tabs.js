// The views as tables and texts: evaluations, ages and faults, all metrics, the configuration, the log.

import { setAddress, valueIn } from "./address.js";
import { buttonOf, csvOf, make, save, tableOf } from "./elements.js";
import { durationOf, shown, whenOf } from "./numbers.js";
import { model } from "./run_model.js";
import { dotOf } from "./run_table.js";
import { ask, fileOf, report } from "./source.js";

const COMPARED = 12;  // runs side by side in a table
const between = (ends) => (ends ? `${shown(ends[0])} to ${shown(ends[1])}` : "");

/** Return a heading with a run's name and color. */
function headingOf(run, text = "") {
  const heading = make("h2");
  heading.append(dotOf(run), ` ${run.name}${text && `: ${text}`}`);
  return heading;
}

function nameCell(run) {
  const cell = make("span", null, "nowrap");
  cell.append(dotOf(run), ` ${run.name}`);
  return cell;
}

/** Say which runs a view leaves out because it shows the first ones. */
function restOf(runs) {
  return runs.length > COMPARED ? [make("p", `Of ${runs.length} runs the first ${COMPARED} are listed.`, "hint")] : [];
}

/** Return the evaluations of the runs: the last ones in one table, then each run's history. */
export async function evaluationParts(runs) {
  const found = await Promise.all(runs.slice(0, COMPARED).map(async (run) => ({ run, rows: (await ask("/api/summary", { run: run.name })).evaluations })));
  const rows = found.flatMap(({ run, rows: own }) => own.map((row) => ({ run, row })))
    .sort((a, b) => a.row.name.localeCompare(b.row.name) || a.row.measure.localeCompare(b.row.measure));
  if (!rows.length) return [make("p", "Nothing has been evaluated yet.", "none"), ...restOf(runs)];
  const changes = rows.some(({ row }) => row.change != null);
  const names = ["run", "evaluation", "measure", "step", "value", "95 % interval", ...(changes ? ["change", "95 % interval of the change"] : [])];
  const cells = ({ row }) => [row.name, row.measure, row.step, shown(row.value), between(row.interval),
    ...(changes ? [row.change == null ? "" : shown(row.change), between(row.changeInterval)] : [])];
  const csv = () => save("evaluations.csv", new Blob([csvOf([["run", "evaluation", "measure", "step", "value", "low", "high"],
    ...rows.flatMap(({ run, row }) => row.history.map(([step, value, ends]) => [run.name, row.name, row.measure, step, value, ...(ends ?? [])]))])], { type: "text/csv" }));
  const bar = make("div", null, "keys");
  bar.append(make("h2", "Last evaluation of each name"), buttonOf("CSV", "save all evaluations", csv));
  const parts = [bar, tableOf(names, rows.map((one) => [nameCell(one.run), ...cells(one)])), ...restOf(runs)];
  for (const { run, rows: own } of found) if (own.length) parts.push(...historyOf(run, own));
  return parts;
}

function historyOf(run, rows) {
  const folded = make("details");
  const steps = [...new Set(rows.flatMap(({ history }) => history.map(([step]) => step)))].sort((a, b) => b - a);
  const lines = steps.map((step) => [step, ...rows.map(({ history }) => {
    const at = history.find(([other]) => other === step);
    return at ? `${shown(at[1])}${at[2] ? ` (${between(at[2])})` : ""}` : "";
  })]);
  const summary = make("summary");
  summary.append(dotOf(run), ` ${run.name}: ${steps.length} evaluations`);
  folded.append(summary, tableOf(["step", ...rows.map((row) => `${row.name} ${row.measure}`)], lines));
  return [folded];
}

/** Return the ages of trained tokens, lengths of answers, drops and faults of each run. */
export async function ageParts(runs) {
  const parts = [];
  for (const run of runs.slice(0, COMPARED)) {
    const { ages, lengths, dropped, faults } = await ask("/api/summary", { run: run.name });
    parts.push(headingOf(run, "trained tokens by age, in versions"));
    parts.push(barsOf(Object.fromEntries(ages.map((row) => [row.age, row.tokens])), "none counted"));
    const measured = ["reward", "length", "kl"].filter((name) => ages.some((row) => row[name] != null));
    if (measured.length) {
      parts.push(make("p", "Means of the tokens' episodes, over the tokens of that age:", "hint"));
      parts.push(tableOf(["age", ...measured], ages.map((row) =>
        [row.age, ...measured.map((name) => (row[name] == null ? "" : shown(row[name])))])));
    }
    parts.push(headingOf(run, "trained answers by length, in tokens"), barsOf(lengths, "none counted"));
    parts.push(headingOf(run, "groups dropped"), barsOf(dropped.groups, "none"));
    if (dropped.tokens) parts.push(make("p", `${shown(dropped.tokens)} tokens had been sampled for them.`, "hint"));
    parts.push(headingOf(run, "faults"), barsOf(faults, "none"));
  }
  return [...parts, ...restOf(runs)];
}

function barsOf(counts, none) {
  const box = make("div", null, "bars");
  const rows = Object.entries(counts).filter(([, count]) => count > 0)
    .sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  const total = rows.reduce((sum, [, count]) => sum + count, 0);
  for (const [key, count] of rows) {
    const row = make("div", null, "bar");
    const meter = Object.assign(make("meter"), { max: total, value: count });
    const percent = (100 * count) / total;
    row.append(make("span", key), meter, make("span", `${shown(count)} (${percent < 0.5 ? "<1" : Math.round(percent)} %)`));
    box.append(row);
  }
  if (!rows.length) box.append(make("span", none, "hint"));
  return box;
}

/** Return all metrics: of one run their first, last, least and largest values, of several their last ones. */
export async function metricParts(runs) {
  const some = runs.slice(0, COMPARED);
  const found = await Promise.all(some.map((run) => ask("/api/extents", { run: run.name })));
  const about = new Map(found.flat().map((row) => [row.key, row])), values = found.map((rows) => new Map(rows.map((row) => [row.key, row.values])));
  const isZero = (key) => values.every((own) => (own.get(key) ?? []).every((value) => value === 0) && own.get(key)?.length !== 0);
  const keys = [...about.keys()].sort(), used = keys.filter((key) => !isZero(key)), zero = keys.length - used.length;
  if (!keys.length) return [make("p", "No step has been recorded yet.", "none")];
  const cell = (own, i) => (own == null ? "" : own.length ? shown(own.at(i)) : "never finite");
  const several = some.length > 1, names = several ? some.map((run) => run.name) : ["first", "last", "least", "largest"];
  const rows = used.map((key) => [key, ...(several ? values.map((own) => cell(own.get(key), 1)) : [0, 1, 2, 3].map((i) => cell(values[0].get(key), i))),
    about.get(key).unit, about.get(key).about]);
  const words = `${several ? "Last values. " : ""}${zero ? `${zero} metrics that were always 0 are not listed.` : ""}`;
  return [...(words ? [make("p", words, "hint")] : []), tableOf(["key", ...names, "unit", "meaning"], rows), ...restOf(runs)];
}

/** Return the differences between the configurations of several runs, and how and where each run was made. */
export async function identityParts(runs) {
  const parts = [], some = runs.slice(0, COMPARED);
  if (some.length > 1) parts.push(...await differenceParts(some));
  for (const run of some) {
    const { config, traces, starts, tags, path, time, ...made } = await ask("/api/identity", { run: run.name });
    const list = make("dl"), last = starts.at(-1) ?? {};
    const facts = { state: run.state, folder: path, tags: tags.join(", "), started: whenOf(starts[0]?.started),
      "time of training": durationOf(time), command: last.command, "in folder": last.folder, host: last.host, process: last.process,
      python: last.python, ...made };
    for (const [name, value] of Object.entries(facts)) {
      if (value != null && value !== "") list.append(make("dt", name), make("dd", value));
    }
    parts.push(headingOf(run), list, ...startParts(starts), ...traceParts(run, traces));
    const text = make("pre", config ?? "no config.yaml", "config"), folded = make("details");
    folded.open = some.length === 1;
    folded.append(make("summary", "The whole configuration"), text);
    parts.push(folded);
  }
  return [...parts, ...restOf(runs)];
}

async function differenceParts(runs) {
  const { names, values, equal, leftOut } = await ask("/api/settings", { run: runs.map((run) => run.name) });
  const words = [equal === 1 ? "1 setting is equal" : `${equal} settings are equal`];
  if (leftOut) words.push(`${leftOut} further ones differ`);
  const rows = names.map((name, i) => [name, ...runs.map((run) => values[run.name][i] ?? "(none)")]);
  const head = make("h2", "Settings that differ");
  return [head, rows.length ? tableOf(["setting", ...runs.map((run) => run.name)], rows) : make("p", "None.", "none"), make("p", `${words.join("; ")}.`, "hint")];
}

function startParts(starts) {
  if (starts.length < 2) return [];
  return [make("h3", `Started and resumed ${starts.length} times`),
    tableOf(["when", "host", "command"], starts.map((start) => [whenOf(start.started), start.host ?? "", start.command ?? ""]))];
}

function traceParts(run, traces) {
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

/** Return the log of one run: its end, which is followed, and earlier parts when they are asked for. */
export function logIn(place, runs) {
  const bar = make("div", null, "keys"), choice = make("select"), only = Object.assign(make("input"), { type: "search", placeholder: "only lines with" });
  const text = make("pre", null, "log"), note = make("p", "", "hint");
  const earlier = buttonOf("earlier lines", "read the part before", () => { follows = false; read(from); });
  const newest = buttonOf("newest lines", "read the end, and follow it", () => { follows = true; read(null); });
  let from = 0, lines = [], name = "", current = 0, follows = true;
  choice.setAttribute("aria-label", "run");
  only.setAttribute("aria-label", "only lines with");
  only.value = valueIn("lines");
  bar.append(choice, only, earlier, newest);
  place.replaceChildren(bar, text, note);
  choice.addEventListener("change", () => { setAddress({ log_of: choice.value }); refresh(); });
  only.addEventListener("input", () => { setAddress({ lines: only.value }); draw(); });

  async function read(before) {
    const mine = ++current, found = await ask("/api/log", { run: name, ...(before != null && { before }) });
    if (mine !== current) return;
    const fresh = found.text.split("\n").slice(0, -1);
    lines = before == null ? fresh : [...fresh, ...lines];
    from = found.from;
    earlier.hidden = !from || Boolean(report);
    newest.hidden = follows;
    note.textContent = !found.size ? "This run has no run.log." : from ? `The last ${lines.length} lines of run.log.` : "";
    draw(before == null);
  }

  function draw(toEnd = false) {
    const wasAtEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 30, wanted = only.value.toLowerCase();
    const top = text.scrollTop;
    text.replaceChildren(...lines.filter((line) => line.toLowerCase().includes(wanted)).map((line) => {
      const level = line.match(/^\S+ \S+ (WARNING|ERROR|CRITICAL)/)?.[1];
      return make("span", `${line}\n`, level ? (level === "WARNING" ? "warning" : "error") : "");
    }));
    text.hidden = !lines.length;
    text.scrollTop = toEnd && (wasAtEnd || !top) ? text.scrollHeight : top;
  }

  function refresh() {
    const wanted = valueIn("log_of") || runs()[0]?.name || model.runs[0]?.name || "";
    choice.replaceChildren(...model.runs.map((run) => Object.assign(make("option", run.name), { value: run.name })));
    choice.value = wanted;
    if (!choice.value) return;
    if (name !== choice.value) [name, lines, follows] = [choice.value, [], true];
    return follows ? read(null) : undefined;
  }
  return { refresh };
}
