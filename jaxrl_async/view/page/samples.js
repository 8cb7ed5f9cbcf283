// The browser of samples: filters, groups side by side, tokens colored by their data.

import { hashOf, setAddress, valueIn } from "./address.js";
import { conversationOf } from "./conversation.js";
import { buttonOf, linkOf, make } from "./elements.js";
import { shown } from "./numbers.js";

const PAGE = 20;
const SORTS = { newest: "newest step first", oldest: "oldest step first", reward: "largest reward first", reward_up: "smallest reward first",
  advantage: "largest advantage first", advantage_up: "smallest advantage first" };
const FIELDS = ["run", "text", "first", "last", "least", "most", "stop", "order", "color", "sample"];

const least = (value) => Math.max(-1, Math.min(1, value));
const sizeOf = (value) => least((Math.log10(Math.abs(value) + 1e-12) + 5) / 5);  // 1e-5 and less: 0; 1 and more: 1

/** Color scales of tokens: a value from -1 to 1 of a token's data, the ink of each sign, and what the inks say. */
const COLORS = {
  logprob: { label: "log-prob", share: ({ logprob }) => least(logprob / 4), inks: ["--c1", "--c1"], says: ["lower"] },
  version: { label: "version", share: ({ behind }) => behind, inks: ["--c3", "--c3"], says: ["older"] },
  age: { label: "age when trained", share: ({ age }) => least(age / 8), inks: ["--c3", "--c3"], says: ["older"] },
  advantage: { label: "advantage", recorded: true, share: ({ advantage }) => least(advantage / 2), inks: ["--c1", "--c0"], says: ["negative", "positive"] },
  difference: { label: "trainer minus sampler", recorded: true, inks: ["--c1", "--c0"], says: ["negative", "positive"],
    share: ({ difference }) => Math.sign(difference) * Math.max(0, sizeOf(difference)) },
};

/** Fill the section with filters, which are in the address; `ask(path, query)` fetches, `runs()` lists the runs,
 * `usual()` is the run that is shown unless another is chosen. */
export function browse(place, ask, runs, usual) {
  place.replaceChildren();
  const form = make("form", null, "filters"), inputs = {};
  const field = (label, name, type, more = {}) => {
    const box = make("label", label);
    const input = Object.assign(document.createElement(type === "select" ? "select" : "input"), more);
    if (type !== "select") input.type = type;
    input.name = name;
    box.append(input);
    form.append(box);
    inputs[name] = input;
    return input;
  };
  const options = (select, pairs) => select.replaceChildren(...pairs.map(([value, label]) => Object.assign(make("option", label), { value })));
  const run = field("Run", "run", "select");
  field("Text", "text", "search", { placeholder: "prompt or answer" });
  field("From step", "first", "number", { min: 0 });
  field("To step", "last", "number", { min: 0 });
  field("Reward from", "least", "number", { step: "any" });
  field("Reward to", "most", "number", { step: "any" });
  options(field("Ended by", "stop", "select"), [["", "anything"], ["eos", "its own end"], ["length", "a limit"]]);
  options(field("Order", "order", "select"), Object.entries(SORTS));
  const color = field("Color tokens by", "color", "select");
  options(color, [...Object.entries(COLORS).map(([key, { label }]) => [key, label]), ["none", "nothing"]]);
  field("Sample", "sample", "number", { min: 0, placeholder: "all" });
  const count = make("p", "", "hint"), legend = make("p", null, "legend"), list = make("div"), pages = make("div", null, "keys");
  place.append(form, count, legend, list, pages);

  let current = 0, listed = "";
  const pageNow = () => Math.max(0, Math.floor(Number(valueIn("page")) || 0));

  async function load() {
    const mine = ++current, page = pageNow(), query = { count: PAGE, skip: page * PAGE };
    for (const name of FIELDS) if (inputs[name].value !== "" && name !== "color") query[name] = inputs[name].value;
    if (!query.run) return;
    const { found, samples, numbers } = await ask("/api/samples", query);
    if (mine !== current) return;  // a later question has been asked
    count.textContent = found === 1 ? "1 sample" : `${found.toLocaleString("en")} samples`;
    const wanted = COLORS[color.value];
    const hasColors = samples.some(({ tokens }) => (wanted?.recorded ? tokens?.[color.value] : tokens));
    if (wanted?.recorded && found && !hasColors) count.textContent += `: of these the ${wanted.label} was not recorded`;
    legend.replaceChildren(...legendOf(hasColors ? wanted : null));
    listPages(page, Math.ceil(found / PAGE));
    const now = JSON.stringify([query, numbers, color.value]);
    if (now === listed) return;  // the same samples: what is unfolded stays
    listed = now;
    const all = samples.map((sample, i) => ({ sample, number: numbers[i] }));
    const together = ["newest", "oldest"].includes(inputs.order.value);
    const groups = together ? grouped(all) : [all];
    list.replaceChildren(...[...groups].map((group) => groupOf(group, color.value, query.run, together)));
    if (!samples.length) list.replaceChildren(make("p", "There is no such sample (metrics.samples_every).", "none"));
  }

  function listPages(page, last) {
    const go = (text, title, to) => {
      const button = buttonOf(text, title, () => { setAddress({ page: to || "" }); load(); scrollTo({ top: 0 }); });
      button.disabled = to < 0 || to >= last || to === page;
      return button;
    };
    pages.hidden = last < 2;
    pages.replaceChildren(go("first", "the first page", 0), go("before", "the page before", page - 1),
      make("span", `page ${(page + 1).toLocaleString("en")} of ${last.toLocaleString("en")}`, "hint"),
      go("next", "the next page", page + 1), go("last", "the last page", last - 1));
  }

  /** Take the filters from the address. */
  function read() {
    options(run, runs().map((one) => [one.name, one.name]));
    for (const name of FIELDS) inputs[name].value = valueIn(name);
    run.value = valueIn("run") || usual();
    inputs.order.value ||= "newest";
    color.value ||= "logprob";
  }
  form.addEventListener("input", () => {
    const given = Object.fromEntries(FIELDS.map((name) => [name, inputs[name].value]));
    setAddress({ ...given, order: given.order === "newest" ? "" : given.order, color: given.color === "logprob" ? "" : given.color, page: "" });
    load();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  /** Show news: the runs, if they have become others, and the samples of the first page. */
  function refresh() {
    const isOther = run.options.length !== runs().length;
    if (isOther) read();
    return isOther || !pageNow() ? load() : undefined;
  }
  return { show: () => { read(); return load(); }, refresh };
}

/** Return the keys of a color scale. */
function legendOf(scale) {
  return (scale?.says ?? []).map((words, i) => {
    const key = make("span", null, "key"), dot = make("span", null, "dot");
    dot.style.setProperty("--c", `var(${scale.inks[i]})`);
    key.append(dot, `${scale.label}: ${words}`);
    return key;
  });
}

function grouped(samples) {
  const groups = new Map();
  for (const one of samples) {
    const key = `${one.sample.step}/${one.sample.group ?? ""}`;
    groups.set(key, [...(groups.get(key) ?? []), one]);
  }
  return groups.values();
}

function groupOf(samples, color, run, together) {
  const place = make("div", null, "group"), name = ({ step, group }) => (group == null ? `step ${step}` : `step ${step}, group ${group}`);
  if (together) place.append(make("h3", name(samples[0].sample)));
  for (const one of samples) {
    try {
      place.append(cardOf(one.sample, one.number, color, run, together ? samples[0].sample : one.sample, together ? "" : name(one.sample)));
    } catch {  // fields of other types than a run writes
      place.append(make("article", `The line of sample #${one.number} is damaged.`, "sample"));
    }
  }
  return place;
}

const SHOWN = new Set(["prompt", "completion", "step", "group", "reward", "tokens", "parts", "contexts"]);

function cardOf(sample, number, color, run, first, where) {
  const card = make("article", null, "sample");
  const facts = make("div", null, "facts");
  if (sample.reward != null) facts.append(make("span", `reward ${shown(Number(sample.reward))}`, "reward"));
  facts.append(Object.assign(linkOf(`#${number}`, hashOf("samples", { ...NO_FILTER, run, sample: String(number) })), { title: "this sample alone" }));
  if (where) facts.append(make("span", where));
  for (const [name, value] of Object.entries(sample.parts ?? {})) {
    facts.append(make("span", `${name} ${shown(Number(value))}`));
  }
  for (const [name, value] of Object.entries(sample)) {
    if (SHOWN.has(name) || value == null || value === "") continue;
    facts.append(make("span", `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`));
  }
  const texts = [make("pre", sample.prompt ?? "", "prompt"), tokensOf(sample, color)];
  if (sample.contexts?.length) {
    const tokens = make("details");
    tokens.append(make("summary", "token by token"), ...texts);
    card.append(facts, conversationOf(sample.contexts, first.contexts), tokens);
  } else card.append(facts, ...texts);
  return card;
}

const NO_FILTER = Object.fromEntries([...FIELDS, "page"].filter((name) => name !== "color").map((name) => [name, ""]));

function titleOf({ logprob, version, age, advantage, difference }) {
  const words = [`log-prob ${shown(logprob)}`, `version ${version}, ${age} old when trained`];
  if (advantage != null) words.push(`advantage ${shown(advantage)}`);
  if (difference != null) words.push(`trainer's log-prob minus the sampler's ${shown(difference)}`);
  return words.join("\n");
}

function tokensOf(sample, color) {
  const place = make("pre", null, "completion");
  const tokens = sample.tokens;
  if (!tokens?.text) {
    place.textContent = sample.completion ?? "";
    return place;
  }
  const versions = tokens.version.filter((version) => version != null);
  const [oldest, newest] = [Math.min(...versions), Math.max(...versions)];
  tokens.text.forEach((text, i) => {
    const token = make("span", text, "token");
    const version = tokens.version[i];
    if (version == null) {
      token.classList.add("told");  // not drawn: a reply, a prompt of a later context
      place.append(token);
      return;
    }
    const facts = {
      logprob: tokens.logprob[i], version, age: sample.step - 1 - version,
      behind: newest > oldest ? (newest - version) / (newest - oldest) : 0,
      advantage: tokens.advantage?.[i], difference: tokens.difference?.[i],
    };
    token.title = titleOf(facts);
    const { share, inks } = COLORS[color] ?? { share: () => 0, inks: [] };
    const amount = share(facts);
    if (Math.abs(amount) > 0.01) {  // neither of what was not recorded
      const ink = `var(${inks[Number(amount > 0)]})`;
      token.style.background = `color-mix(in srgb, ${ink} calc(${Math.abs(amount).toFixed(2)} * var(--tint)), transparent)`;
    }
    place.append(token);
  });
  if (tokens.left_out) place.append(make("span", ` … ${tokens.left_out} further tokens`, "hint"));
  return place;
}
