// The runs of the page: their columns, and which are listed, shown and grouped.

/** What is known of the runs. runs: of /api/runs; settings: of /api/settings; rows: of /api/rows. */
export const model = { runs: [], leftOut: 0, folders: [], settings: null, rows: Object.create(null) };

/** Number of runs that are shown unless others are chosen: the newest. */
export const SHOWN_AT_FIRST = 10;

/** Names of the columns that each run has. */
export const PLAIN_COLUMNS = ["state", "tags", "started", "host", "step", "time", "tokens", "best", "alerts"];

/** Return a run's value in a column: one of PLAIN_COLUMNS, a setting (with a dot) or a metric (with a slash). */
export function cellOf(run, column) {
  const row = model.rows[run.name];
  if (column === "tags") return run.tags.join(" ");
  if (["time", "tokens", "best"].includes(column)) return row?.[column] ?? null;
  if (column === "alerts") return row ? row.alerts.filter((alert) => alert.lasts).length : null;
  if (column === "name" || column === "number" || PLAIN_COLUMNS.includes(column)) return run[column] ?? null;
  const place = model.settings?.names.indexOf(column) ?? -1;
  if (place >= 0) return model.settings.values[run.name]?.[place] ?? null;
  return row?.newest[column] ?? null;
}

/** Return the column that a word of a filter names, also by its last part: learning_rate. */
export function columnOf(word) {
  const settings = model.settings?.names ?? [];
  if (word === "name" || PLAIN_COLUMNS.includes(word) || settings.includes(word) || word.includes("/")) return word;
  return settings.find((name) => name.endsWith(`.${word}`)) ?? word;
}

const CONDITION = /^([\w./@-]+?)(!=|>=|<=|=|>|<)(.*)$/;
/** Whether a cell is a number, or a text of one. */
export const isNumber = (text) => text !== "" && text != null && !Number.isNaN(Number(text));

/** Return a setting as it is read best: a number with at most six digits. */
export const neat = (value) => (typeof value === "string" && value.length > 9 && isNumber(value)
  ? String(Number(Number(value).toPrecision(6))) : value);

/** Compare two cells: numbers by size, other texts by their letters and the numbers in them; empty ones last. */
export function compared(a, b) {
  if ((a == null || a === "") || (b == null || b === "")) return Number(a == null || a === "") - Number(b == null || b === "");
  if (isNumber(a) && isNumber(b)) return Number(a) - Number(b);
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function holds(run, [, column, sign, value]) {
  const cell = cellOf(run, columnOf(column));
  if (sign === "!=") return String(cell ?? "") !== value && !(isNumber(cell) && isNumber(value) && Number(cell) === Number(value));
  if (cell == null || cell === "") return false;
  if (sign === "=") return String(cell) === value || (isNumber(cell) && isNumber(value) && Number(cell) === Number(value));
  const order = compared(cell, value);
  return { ">": order > 0, "<": order < 0, ">=": order >= 0, "<=": order <= 0 }[sign];
}

/** Return the runs that have every word of a filter in name, state, tags or host, or meet it as a condition:
 * grpo running learning_rate>1e-4 */
export function filtered(runs, filter) {
  const all = filter.split(/\s+/).filter(Boolean);
  return runs.filter((run) => all.every((word) => {
    const condition = word.match(CONDITION);
    if (condition) return holds(run, condition);
    return `${run.name} ${run.state} ${run.tags.join(" ")} ${run.host}`.toLowerCase().includes(word.toLowerCase());
  }));
}

/** Return runs sorted by a column; a sort that begins with - is from the largest to the smallest. */
export function sortedBy(runs, sort) {
  const down = sort.startsWith("-"), column = sort.replace(/^-/, "");
  const order = (a, b) => {
    const [x, y] = [cellOf(a, column), cellOf(b, column)], empty = (cell) => cell == null || cell === "";
    if (empty(x) || empty(y)) return empty(x) - empty(y);  // last in both directions
    return down ? compared(y, x) : compared(x, y);
  };
  return [...runs].sort((a, b) => order(a, b) || compared(a.name, b.name));
}

/** Return the runs that are shown of those that are listed. chosen: "" (the newest), "all", or names in JSON. */
export function chosenOf(listed, chosen) {
  if (chosen === "all") return listed;
  if (!chosen) {
    const newest = new Set([...listed].sort((a, b) => b.number - a.number).slice(0, SHOWN_AT_FIRST));
    return listed.filter((run) => newest.has(run));
  }
  const names = new Set(namesIn(chosen));
  return listed.filter((run) => names.has(run.name));
}

/** Return the names in a list of chosen runs; a damaged one has none. */
export function namesIn(chosen) {
  try {
    const names = JSON.parse(chosen);
    return Array.isArray(names) ? names : [];
  } catch {
    return [];
  }
}

/** Return a run's name without its seed: "grpo" for "grpo-2" and "grpo_seed3". */
export const withoutSeed = (name) => name.replace(/[-_.]?(seed)?[-_.]?\d+$/i, "") || name;

/** Return the name of a run's group: by "seed" (names that differ in a number), or by a column. */
export function groupNameOf(run, group) {
  if (!group) return run.name;
  if (group === "seed") return withoutSeed(run.name);
  const value = cellOf(run, group);
  return `${group.split(".").at(-1)} ${value == null || value === "" ? "(none)" : neat(value)}`;
}

/** Return the number whose color a run has: of a group, the smallest number of its runs, shown or not. */
export function colorNumberOf(run, group) {
  if (!group) return run.number;
  const name = groupNameOf(run, group);
  return Math.min(run.number, ...model.runs.filter((other) => groupNameOf(other, group) === name).map((other) => other.number));
}

/** Return the runs by the name of their group. */
export function groupsOf(runs, group) {
  const groups = new Map();
  for (const run of runs) {
    const name = groupNameOf(run, group);
    groups.set(name, [...(groups.get(name) ?? []), run]);
  }
  return groups;
}
