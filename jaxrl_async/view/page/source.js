// The source of the page's data: the server or, in a report, the page itself.

const place = document.getElementById("embedded");
/** The data of a report (view/report.py); null on a page from a server. */
export const report = place && JSON.parse(place.textContent);
const token = new URLSearchParams(location.search).get("token");

/** Return the answer to a query: names and values, or lists of values. */
export const ask = report ? known : fetched;

async function fetched(path, query = {}) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) words.append(name, one);
  }
  if (token) words.append("token", token);
  const reply = await fetch(`${path}?${words}`);
  if (!reply.ok) throw new Error(`${reply.status}: ${await reply.text()}`);
  return reply.json();
}

/** Return the address of a file in a run's folder; a report is in that folder. */
export function fileOf(run, file) {
  if (report) return file;
  return `/file?${new URLSearchParams({ run, file, ...(token ? { token } : {}) })}`;
}

async function known(path, query = {}) {
  if (path === "/api/curves") return curvesOf(query);
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

/** Return the matching samples, like the server (SampleFilter of view/watched.py). */
function samplesOf({ text = "", first, last, least, most, stop, skip = 0, count = 20 }) {
  const sought = text.toLowerCase();
  const number = (value) => (typeof value === "number" ? value : 0);
  const wanted = report.samples.filter((sample) => {
    const [step, reward] = [number(sample.step), number(sample.reward)];
    return (first == null || step >= Number(first)) && (last == null || step <= Number(last))
      && (least == null || reward >= Number(least)) && (most == null || reward <= Number(most))
      && (!stop || String(sample.stop ?? "") === stop)
      && (!sought || ["prompt", "completion", "reference"].some((name) =>
        String(sample[name] ?? "").toLowerCase().includes(sought)));
  });
  return { found: wanted.length, samples: wanted.slice(skip, skip + count) };
}

/** Describe a report: when it was written, and what it leaves out. */
export function extentOf() {
  const { written, samples, allSamples, tokensLeftOut, thinned } = report;
  const words = [`as of ${written}`];
  if (thinned) words.push(`curves of about ${thinned} points at most: the minimum and maximum of each stretch`);
  const many = (n) => n.toLocaleString("en");
  if (samples.length < allSamples) {
    words.push(`${many(samples.length)} of ${many(allSamples)} samples (all: samples.jsonl)`);
  }
  if (tokensLeftOut) words.push(`of ${many(tokensLeftOut)} samples the text without log-probs and versions`);
  return words.join("; ");
}
