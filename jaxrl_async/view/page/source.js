// The source of the page's data: the server or, in a report, the page itself.

const place = document.getElementById("embedded");
/** The data of a report (view/report.py); null on a page from a server. */
export const report = place && JSON.parse(place.textContent);
const token = new URLSearchParams(location.search).get("token");

/** Return the answer to a query: names and values, or lists of values. */
export const ask = report ? known : fetched;

function queryOf(query) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) words.append(name, one);
  }
  if (token) words.append("token", token);
  return words;
}

async function fetched(path, query = {}) {
  const reply = await fetch(`${path}?${queryOf(query)}`);
  if (!reply.ok) throw new Error(`${reply.status}: ${await reply.text()}`);
  return reply.json();
}

/** Return the address of a file in a run's folder; a report is in that folder. */
export const fileOf = (run, file) => (report ? file : `/file?${queryOf({ run, file })}`);

/** Return the address of all values of some metrics as CSV, on a page from a server. */
export const csvAddress = (run, key) => `/metrics.csv?${queryOf({ run, key })}`;

async function known(path, query = {}) {
  const name = report.answers["/api/runs"].runs[0].name;
  if (path === "/api/curves") return { [name]: curvesOf(query) };
  if (path === "/api/axes") return { [name]: report.axes[query.x] };
  if (path === "/api/samples") return samplesOf(query);
  if (path === "/api/spans") return spansOf(query);
  return report.answers[path];
}

function curvesOf({ key, first = -Infinity, last = Infinity }) {
  const found = {};
  for (const name of [key].flat()) {
    if (!Object.hasOwn(report.curves, name)) continue;
    const [steps, values] = report.curves[name];
    const near = (_, i) => steps[i] >= first && steps[i] <= last;
    found[name] = [steps.filter(near), values.filter(near)];
  }
  return found;
}

/** Return a report's data for a window: the whole run, or its last steps. Other windows have no shares. */
function spansOf({ from, to }) {
  const { whole, last } = report.spans;
  if (from == null) return whole;
  const kept = last && from >= last.window[0] && to <= last.window[1] ? last : whole;
  if (from === kept.window[0] && to === kept.window[1]) return kept;
  const within = ([start, end]) => end > from && start < to;
  const lanes = kept.lanes.map((lane) => ({ ...lane, busy: null, rows: lane.rows.map((row) => row.filter(within)) }));
  return { ...kept, lanes, steps: [], window: [from, to] };
}

const meanOf = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN);
const ORDERS = {
  newest: (a, b) => b.step - a.step,
  oldest: (a, b) => a.step - b.step,
  reward: (a, b) => b.reward - a.reward || b.step - a.step,
  reward_up: (a, b) => a.reward - b.reward || b.step - a.step,
  advantage: (a, b) => Number.isNaN(a.advantage) - Number.isNaN(b.advantage) || b.advantage - a.advantage || b.step - a.step,
  advantage_up: (a, b) => Number.isNaN(a.advantage) - Number.isNaN(b.advantage) || a.advantage - b.advantage || b.step - a.step,
};

/** Return the matching samples, like the server (SampleFilter of view/watched.py). */
function samplesOf({ text = "", first, last, least, most, stop, sample, order = "newest", skip = 0, count = 20 }) {
  const sought = text.toLowerCase();
  const number = (value) => (typeof value === "number" ? value : 0);
  const wanted = report.samples.map((one, i) => ({ one, number: report.numbers[i], step: number(one.step), reward: number(one.reward),
    advantage: meanOf((one.tokens?.advantage ?? []).filter((value) => typeof value === "number")) }))
    .filter((it) => (first == null || it.step >= Number(first)) && (last == null || it.step <= Number(last))
      && (least == null || it.reward >= Number(least)) && (most == null || it.reward <= Number(most))
      && (!stop || String(it.one.stop ?? "") === stop) && (sample == null || it.number === Number(sample))
      && (!sought || ["prompt", "completion", "reference"].some((name) =>
        String(it.one[name] ?? "").toLowerCase().includes(sought))))
    .sort(ORDERS[order] ?? ORDERS.newest);
  const page = wanted.slice(skip, skip + count);
  return { found: wanted.length, samples: page.map(({ one }) => one), numbers: page.map((it) => it.number) };
}

/** Describe a report: when it was written, and what it leaves out. */
export function extentOf() {
  const { written, samples, allSamples, tokensLeftOut, thinned, answers } = report;
  const words = [`as of ${written}`];
  if (thinned) words.push(`curves of about ${thinned} points at most: the minimum and maximum of each stretch`);
  const many = (n) => n.toLocaleString("en");
  if (samples.length < allSamples) {
    words.push(`${many(samples.length)} of ${many(allSamples)} samples (all: samples.jsonl)`);
  }
  if (tokensLeftOut) words.push(`of ${many(tokensLeftOut)} samples the text without log-probs and versions`);
  if (answers["/api/log"].from) words.push("the end of the log (all: run.log)");
  return words.join("; ");
}
