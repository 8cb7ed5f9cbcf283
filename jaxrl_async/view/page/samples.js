// The browser of samples: filters, groups side by side, tokens colored by their data.

import { shown } from "./charts.js";
import { conversationOf } from "./conversation.js";
import { make } from "./elements.js";

const PAGE = 20;

const least = (value) => Math.max(-1, Math.min(1, value));
const sizeOf = (value) => least((Math.log10(Math.abs(value) + 1e-12) + 5) / 5);  // 1e-5 and less: 0; 1 and more: 1

/** Color scales of tokens: a value from -1 to 1 of a token's data, and the ink of each sign. */
const COLORS = {
  logprob: { label: "log-prob", share: ({ logprob }) => least(logprob / 4), inks: ["--c1", "--c1"] },
  version: { label: "version", share: ({ behind }) => behind, inks: ["--c3", "--c3"] },
  age: { label: "age when trained", share: ({ age }) => least(age / 8), inks: ["--c3", "--c3"] },
  advantage: { label: "advantage", recorded: true, share: ({ advantage }) => least(advantage / 2), inks: ["--c1", "--c2"] },
  difference: { label: "trainer minus sampler", recorded: true, inks: ["--c1", "--c0"],
    share: ({ difference }) => Math.sign(difference) * Math.max(0, sizeOf(difference)) },
};

/** Fill the section with filters; `ask(path, query)` fetches, `runs()` lists the runs. */
export function browse(place, ask, runs) {
  place.replaceChildren();
  const form = make("form", null, "filters");
  const field = (label, name, type, more = {}) => {
    const box = make("label", label);
    const input = Object.assign(document.createElement(type === "select" ? "select" : "input"), more);
    if (type !== "select") input.type = type;
    input.name = name;
    box.append(input);
    form.append(box);
    return input;
  };
  const run = field("Run", "run", "select");
  field("Text", "text", "search", { placeholder: "in prompt or answer" });
  field("From step", "first", "number", { min: 0 });
  field("To step", "last", "number", { min: 0 });
  field("Reward from", "least", "number", { step: "any" });
  field("Reward to", "most", "number", { step: "any" });
  const stop = field("Ended by", "stop", "select");
  for (const [value, label] of [["", "anything"], ["eos", "its own end"], ["length", "a limit"]]) {
    stop.append(Object.assign(make("option", label), { value }));
  }
  const color = field("Colour tokens by", "color", "select");
  for (const [value, label] of [...Object.entries(COLORS).map(([key, { label }]) => [key, label]), ["", "nothing"]]) {
    color.append(Object.assign(make("option", label), { value }));
  }
  const count = make("p", "", "hint");
  const list = make("div");
  const more = make("button", "more");
  more.type = "button";
  place.append(form, count, list, more);

  let skip = 0, current = 0;
  const load = async (fresh) => {
    const mine = ++current;
    if (fresh) skip = 0;
    const query = { count: PAGE, skip };
    for (const [name, value] of new FormData(form)) if (value !== "" && name !== "color") query[name] = value;
    if (!query.run) return;
    const { found, samples } = await ask("/api/samples", query);
    if (mine !== current) return;  // a later question has been asked
    if (fresh) list.replaceChildren();
    skip += samples.length;
    count.textContent = found === 1 ? "1 sample" : `${found.toLocaleString("en")} samples`;
    const wanted = COLORS[color.value];
    if (wanted?.recorded && found && !samples.some(({ tokens }) => tokens?.[color.value])) {
      count.textContent += `: of these the ${wanted.label} was not recorded`;
    }
    more.hidden = skip >= found;
    for (const group of grouped(samples)) list.append(groupOf(group, color.value));
    if (!found) list.replaceChildren(make("p", "There is no such sample (metrics.samples_every).", "none"));
  };
  const names = () => {
    const before = run.value;
    run.replaceChildren(...runs().map((one) => Object.assign(make("option", one.name), { value: one.name })));
    if (before) run.value = before;
  };
  names();
  form.addEventListener("input", () => load(true));
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => load(false));
  load(true);
  return { refresh: () => { names(); if (skip <= PAGE) load(true); } };
}

function grouped(samples) {
  const groups = new Map();
  for (const sample of samples) {
    const key = `${sample.step}/${sample.group ?? ""}`;
    groups.set(key, [...(groups.get(key) ?? []), sample]);
  }
  return groups.values();
}

function groupOf(samples, color) {
  const place = make("div", null, "group");
  const [{ step, group }] = samples;
  place.append(make("h3", group == null ? `step ${step}` : `step ${step}, group ${group}`));
  for (const sample of samples) place.append(cardOf(sample, color, samples[0]));
  return place;
}

const SHOWN = new Set(["prompt", "completion", "step", "group", "reward", "tokens", "parts", "contexts"]);

function cardOf(sample, color, first) {
  const card = make("article", null, "sample");
  const facts = make("div", null, "facts");
  if (sample.reward != null) facts.append(make("span", `reward ${shown(Number(sample.reward))}`, "reward"));
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
      token.style.background = `color-mix(in srgb, ${ink} ${Math.round(Math.abs(amount) * 60)}%, transparent)`;
    }
    place.append(token);
  });
  if (tokens.left_out) place.append(make("span", ` … ${tokens.left_out} further tokens`, "hint"));
  return place;
}
