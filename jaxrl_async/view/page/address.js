// The state of the page in its address, so that a view can be kept and sent: #tab?name=value&...

let words = new URLSearchParams(), view = "";

/** Read the address. */
export function readAddress() {
  const [tab, rest = ""] = location.hash.slice(1).split("?");
  view = tab;
  words = new URLSearchParams(rest);
}

/** Return the tab of the address, or "". */
export const tabOf = () => view;

/** Return a value of the address, or "". */
export const valueIn = (name) => words.get(name) ?? "";

/** Return the hash of another view: its tab, and the values that differ from the present ones ("": none). */
export function hashOf(tab, changes = {}) {
  const other = new URLSearchParams(words);
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value == null || value === false) other.delete(name);
    else other.set(name, value === true ? "1" : value);
  }
  const text = other.toString();
  return `#${tab}${text ? `?${text}` : ""}`;
}

/** Change values of the address, without a new entry in the browser's history. */
export function setAddress(changes, tab = view) {
  history.replaceState(null, "", hashOf(tab, changes));
  readAddress();
}
