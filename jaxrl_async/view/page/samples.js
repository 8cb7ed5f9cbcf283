// The browser of samples: filters, groups side by side, tokens coloured by what is known of each.

import { shown } from "./charts.js";
import { conversationOf } from "./conversation.js";
import { make } from "./elements.js";

const PAGE = 20;

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
  for (const [value, label] of [["logprob", "log-prob"], ["version", "version"], ["", "nothing"]]) {
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
    const [logprob, version] = [tokens.logprob[i], tokens.version[i]];
    if (version == null) {
      token.classList.add("told");  // not drawn: a reply, a prompt of a later context
      place.append(token);
      return;
    }
    token.title = `log-prob ${shown(logprob)}, version ${version}`;
    let share = 0;
    if (color === "logprob" && logprob != null) share = Math.min(1, -logprob / 4);
    if (color === "version") share = newest > oldest ? (newest - version) / (newest - oldest) : 0;
    if (share > 0.01) {
      const ink = color === "version" ? "var(--c3)" : "var(--c1)";
      token.style.background = `color-mix(in srgb, ${ink} ${Math.round(share * 60)}%, transparent)`;
    }
    place.append(token);
  });
  if (tokens.left_out) place.append(make("span", ` … ${tokens.left_out} further tokens`, "hint"));
  return place;
}
