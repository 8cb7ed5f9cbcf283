// Creates elements of the page from texts.

/** Return a new element with a text and a class. */
export const make = (tag, text, className) => {
  const element = document.createElement(tag);
  if (text != null) element.textContent = text;  // never as HTML: a policy wrote it
  if (className) element.className = className;
  return element;
};

/** Return a button with an action; title: what it does, in more words. */
export const buttonOf = (text, title, act) => {
  const button = Object.assign(make("button", text), { type: "button", title });
  button.addEventListener("click", act);
  return button;
};

/** Return a link to a view of the page. */
export const linkOf = (text, hash) => Object.assign(make("a", text), { href: hash });

const SHORT = 30;

/** Return a table that scrolls sideways. cells: texts or elements; short ones are not broken into lines. */
export function tableOf(names, rows) {
  const wide = make("div", null, "wide"), all = make("table");
  for (const [cells, tag] of [[names, "th"], ...rows.map((row) => [row, "td"])]) {
    const line = make("tr");
    line.append(...cells.map((cell) => {
      if (!(cell instanceof Node)) return make(tag, cell, tag === "td" && String(cell ?? "").length <= SHORT ? "nowrap" : "");
      const place = make(tag);
      place.append(cell);
      return place;
    }));
    all.append(line);
  }
  wide.append(all);
  return wide;
}

/** Fill a place again, and leave the focus on the input of the same run. */
export function refilled(place, fill) {
  const focused = place.contains(document.activeElement) && document.activeElement.type === "checkbox"
    ? document.activeElement.closest("[data-run]")?.dataset.run : null;
  fill();
  if (focused != null) place.querySelector(`[data-run="${CSS.escape(focused)}"] input`)?.focus({ preventScroll: true });
}

/** Have the browser save a file. */
export function save(name, blob) {
  const link = Object.assign(make("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Return lines of cells as CSV; a text that a spreadsheet would take as a formula follows an apostrophe. */
export function csvOf(rows) {
  const cell = (value) => {
    const text = value == null ? "" : String(value), safe = typeof value === "string" && /^[=+\-@]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return rows.map((row) => `${row.map(cell).join(",")}\n`).join("");
}
