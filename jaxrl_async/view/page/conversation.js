// An episode of several turns: its messages, tool calls, and branches of contexts.

import { make } from "./elements.js";

// The marks that begin a message in chat formats: ChatML, Llama 3, Gemma, GLM and Phi; without any of
// these, the marks of the project's own small tokenizers.
const MARKS = [
  /<\|im_start\|>\s*(\w+)|<\|start_header_id\|>\s*(\w+)\s*<\|end_header_id\|>|<start_of_turn>\s*(\w+)|<\|(system|user|assistant|observation|tool)\|>/g,
  /<(system|user|assistant|tool)>/g,
];
const CALL = /<tool_call>[\s\S]*?(?:<\/tool_call>|$)/g;

/** Split text that was not generated into messages: [{role, text}]; role "" before the first mark. */
export function messagesOf(text) {
  const messages = [];
  let [role, from] = ["", 0];
  const add = (to) => {
    if (text.slice(from, to).trim()) messages.push({ role, text: text.slice(from, to).replace(/^\n/, "") });
  };
  const marks = MARKS.find((one) => text.search(one) >= 0) ?? MARKS[0];
  for (const found of text.matchAll(marks)) {
    add(found.index);
    role = found.slice(1).find(Boolean);
    from = found.index + found[0].length;
  }
  add(text.length);
  return messages;
}

/** Return the element of a sample's contexts (endpoint/conversation_log.py); first: the contexts of the
 * group's first sample, whose beginning is not repeated. */
export function conversationOf(contexts, first) {
  const place = make("div", null, "conversation");
  contexts.forEach(({ parts, after, shared }, number) => {
    const branch = make("section", null, after == null ? "context" : "context branch");
    if (contexts.length > 1) {
      const from = after == null ? "" : `, continues from the first ${shared.toLocaleString("en")} tokens of context ${after + 1}`;
      branch.append(make("h4", `context ${number + 1} of ${contexts.length}${from}`));
    }
    const known = number === 0 && first && first !== contexts ? sameParts(parts, first[0].parts) : 0;
    if (known) {
      const box = make("details", null, "same");
      box.append(make("summary", `begins as the group's first sample: ${known} ${known === 1 ? "part" : "parts"}`));
      box.append(...parts.slice(0, known).flatMap(turnsOf));
      branch.append(box);
    }
    branch.append(...parts.slice(known).flatMap(turnsOf));
    place.append(branch);
  });
  return place;
}

function sameParts(parts, others) {
  let count = 0;
  while (count < Math.min(parts.length, others.length)
    && parts[count][0] === others[count][0] && parts[count][1] === others[count][1]) count++;
  return count;
}

function turnsOf([drawn, text]) {
  if (drawn) return [turnOf("policy", text, "turn drawn")];
  return messagesOf(text).map((message) => turnOf(message.role || "given", message.text, "turn"));
}

function turnOf(role, text, className) {
  const turn = make("div", null, className), body = make("pre");
  let from = 0;
  for (const { 0: call, index } of text.matchAll(CALL)) {
    body.append(text.slice(from, index), make("span", call, "call"));
    from = index + call.length;
  }
  body.append(text.slice(from).trimEnd());
  turn.append(make("span", role, "role"), body);
  return turn;
}
